"""How long streams stand still when an expert worker dies whose experts all have copies.

    python benchmarks/spare_pause.py MODEL --streams 6 --rounds 5

One attention and two expert workers, each with all experts. While all streams run, the second expert worker is killed;
a stream's longest pause is that between two of its outputs. The text is compared with that of an undisturbed run.
"""

import argparse
import os
import signal
import sys
import time
from pathlib import Path
from statistics import median

import numpy as np

from antiphon.base.errors import UserError
from antiphon.bench.antiphon_engine import greedy_outputs
from antiphon.models.config import load_model_spec
from antiphon.serve.config import ServeConfig
from antiphon.serve.engine import Engine
from antiphon.serve.launch import start_engine
from antiphon.serve.worker_process import WorkerName
from antiphon.specs.placement import ExpertPlacement

VICTIM = WorkerName("experts", 1)


def run(engine: Engine, num_streams: int, num_tokens: int, *, kills: bool) -> tuple[list[list[int]], float]:
    """(token ids, longest pause of any stream in s). The victim dies when a quarter of all tokens is out."""
    prompts = np.random.default_rng(0).integers(3, engine.info.vocab_size, (num_streams, 16)).tolist()
    token_ids: list[list[int]] = [[] for _ in range(num_streams)]
    last_s = [0.0] * num_streams
    longest_s, total = 0.0, 0
    for output in greedy_outputs(engine, prompts, num_tokens, "a stream"):
        now_s, stream = time.perf_counter(), int(output.request_id)
        if last_s[stream]:
            longest_s = max(longest_s, now_s - last_s[stream])
        last_s[stream] = now_s
        token_ids[stream] += output.token_ids
        total += len(output.token_ids)
        if kills and total >= num_streams * num_tokens // 4:
            os.kill(engine.worker_pid(VICTIM), signal.SIGKILL)
            kills = False
    return token_ids, longest_s


def main() -> int:
    parser = argparse.ArgumentParser(description="The longest pause after the death of a worker that is spare.")
    parser.add_argument("model", type=Path)
    parser.add_argument("--streams", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    spec = load_model_spec(arguments.model)
    num_experts = spec.router.num_experts
    owners = ((0, 1),) * num_experts
    config = ServeConfig(
        model=arguments.model,
        layout="disaggregated",
        num_experts=2,
        num_micro_batches=2,
        dtype="float32",
        expert_slots=num_experts,
        placement=ExpertPlacement(2, dict.fromkeys(spec.expert_layers, owners)),
    )
    calm, deadly = [], []
    for number in range(arguments.rounds):
        engine = start_engine(config)
        try:
            expected, calm_s = run(engine, arguments.streams, arguments.tokens, kills=False)
            found, pause_s = run(engine, arguments.streams, arguments.tokens, kills=True)
        finally:
            engine.stop()
        if found != expected:
            raise UserError(f"round {number + 1}: the death has changed the text")
        calm.append(calm_s)
        deadly.append(pause_s)
        print(f"round {number + 1}: longest pause {pause_s * 1e3:.0f} ms, without a death {calm_s * 1e3:.0f} ms")
    print(f"medians: {median(deadly) * 1e3:.0f} ms, without a death {median(calm) * 1e3:.0f} ms; texts are equal")
    return 0


if __name__ == "__main__":
    sys.exit(main())
