"""A record of which experts real text chooses, for `antiphon placement` and `antiphon bench balance --routing`:

    python benchmarks/record_routing.py out/routing.trace
    python benchmarks/record_routing.py out/routing.trace --model DIR

The model (default: the demo) goes on with beginnings of the standard library's text, at a temperature of 1. Requests
follow each other in the order of the files, and a new one begins when one ends. So those that run together are about
similar code, and popularity drifts as they do.
"""

import argparse
from pathlib import Path

import numpy as np
from demo_loss import FOLDER, LIBRARY

from antiphon.base.errors import UserError
from antiphon.placement.routing_trace import read_routing_trace
from antiphon.serve.config import ServeConfig
from antiphon.serve.launch import start_engine
from antiphon.serve.outputs import ThreadSink
from antiphon.specs.sampling import SamplingParams
from antiphon.train.encoder import load_tokenizer

WINDOW, PROMPT_TOKENS = 256, 64


def prompts_of(model: Path, count: int) -> list[list[int]]:
    """Up to `count` beginnings of windows of the library's text, in the order of its files."""
    tokenizer, ids = load_tokenizer(model), list[int]()
    for file in sorted(LIBRARY.glob("*/*.py")):
        ids += [*tokenizer.encode(file.read_text(errors="replace"), add_special_tokens=False).ids, 0]
        if len(ids) >= count * WINDOW:
            break
    num_windows = min(count, len(ids) // WINDOW)
    return np.asarray(ids[: num_windows * WINDOW]).reshape(num_windows, WINDOW)[:, :PROMPT_TOKENS].tolist()


def main() -> None:
    parser = argparse.ArgumentParser(description="Record which experts a model's rows choose on real text.")
    parser.add_argument("file", type=Path)
    parser.add_argument("--model", type=Path, default=FOLDER)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--at-once", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=128)
    arguments = parser.parse_args()
    config = ServeConfig(
        model=arguments.model, layout="colocated", max_running=arguments.at_once, record_routing=arguments.file
    )
    engine = start_engine(config)
    prompts = prompts_of(arguments.model, arguments.requests)
    try:
        sink = ThreadSink()
        for number, prompt in enumerate(prompts):
            params = SamplingParams(max_tokens=arguments.tokens, temperature=1.0, seed=number, ignore_eos=True)
            engine.submit_to(sink, str(number), prompt, params)
        for output in sink.outputs(len(prompts)):
            if output.error is not None:
                raise UserError(output.error)
    finally:
        engine.stop()
    trace = read_routing_trace(arguments.file)
    print(f"{arguments.file}: {trace.num_rows:,} rows of {len(trace.counts_of_steps())} steps")


if __name__ == "__main__":
    main()
