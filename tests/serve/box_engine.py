"""What runs on node 0 of a cluster in a box: an engine over a tiny checkpoint, whose other workers join.

    python -m tests.serve.box_engine JSON        # model, join, layout, joined, ranks_here, prompts

The first round is undisturbed; then it prints `ready` and waits for a line. In the second round it stops its workers
once there are some tokens, prints `paused` and waits for a line: who reads that may kill workers, however late it
reads. At the end it prints `done` and JSON: the tokens of both rounds, and how often a worker was started again.
"""

import gc
import json
import sys
from collections.abc import Callable
from pathlib import Path

from antiphon.serve.engine import Engine
from antiphon.serve.launch import start_engine
from tests.serve.engine_harness import GREEDY, Run, TinyModel, complete, config

SECRET = b"only for a test, on a private network"


ENOUGH_TOKENS = 200


def pause_once(engine: Engine) -> Callable[[int], None]:
    """What to call with the number of tokens so far."""
    paused: list[int] = []

    def on_output(num_tokens: int) -> None:
        if num_tokens > ENOUGH_TOKENS and not paused:
            paused.append(num_tokens)
            engine.pause_workers()
            print("paused", flush=True)
            sys.stdin.readline()
            engine.resume_workers()

    return on_output


def main() -> None:
    asked = json.loads(sys.argv[1])
    settings = config(
        TinyModel(Path(asked["model"]), None),
        asked["layout"],
        join_address=asked["join"],
        join_secret=SECRET,
        joined_attention=asked["joined"][0],
        joined_experts=asked["joined"][1],
        ranks_here=asked["ranks_here"],
    )
    engine = start_engine(settings)
    try:
        first = complete(engine, asked["prompts"])
        print("ready", flush=True)
        sys.stdin.readline()
        finished = Run(engine, asked["prompts"], GREEDY).finish(pause_once(engine))
        second = [request.token_ids for request in finished]
        errors = [request.error for request in finished]
        restarts = engine.stats().num_worker_restarts
        print(
            "done", json.dumps({"first": first, "second": second, "errors": errors, "restarts": restarts}), flush=True
        )
    finally:
        engine.stop()
        gc.freeze()  # to look through all that torch has made would take longer than the rest of the end


if __name__ == "__main__":
    main()
