"""A record of which experts real text chooses, for `antiphon bench balance --routing` and `antiphon placement`.

    python benchmarks/record_routing.py out/routing.trace

The demo model goes on with beginnings of the standard library's text, at a temperature of 1. Requests follow each other
in the order of the files, and a new one begins when one ends. So those that run together are about similar code, and
popularity drifts as they do.
"""

import argparse
from pathlib import Path

from demo_loss import FOLDER, LIBRARY
from expert_popularity import windows_of

from antiphon.base.errors import UserError
from antiphon.placement.routing_trace import read_routing_trace
from antiphon.serve.config import ServeConfig
from antiphon.serve.launch import start_engine
from antiphon.serve.outputs import ThreadSink
from antiphon.specs.sampling import SamplingParams

PROMPT_TOKENS = 64


def main() -> None:
    parser = argparse.ArgumentParser(description="Record which experts the demo model's rows choose on real text.")
    parser.add_argument("file", type=Path)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--at-once", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=128)
    arguments = parser.parse_args()
    prompts = windows_of(sorted(LIBRARY.glob("*/*.py")), arguments.requests)[:, :PROMPT_TOKENS]
    config = ServeConfig(model=FOLDER, layout="colocated", max_running=arguments.at_once, record_routing=arguments.file)
    engine = start_engine(config)
    try:
        sink = ThreadSink()
        for number, prompt in enumerate(prompts):
            params = SamplingParams(max_tokens=arguments.tokens, temperature=1.0, seed=number, ignore_eos=True)
            engine.submit_to(sink, str(number), prompt.tolist(), params)
        for output in sink.outputs(len(prompts)):
            if output.error is not None:
                raise UserError(output.error)
    finally:
        engine.stop()
    trace = read_routing_trace(arguments.file)
    print(f"{arguments.file}: {trace.num_rows:,} rows of {len(trace.counts_of_steps())} steps")


if __name__ == "__main__":
    main()
