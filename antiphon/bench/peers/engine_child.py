"""The child process of a peer: loads one engine and obeys JSON lines until its input ends.

    python engine_child.py ENGINE_FILE '{"model": …, other options}'

`ENGINE_FILE` defines `load(options) -> (engine, details)`; `engine(prompts, output_tokens)` generates and
returns `{"ttft_s": […], "itl_s": […], "token_ids": [[…], …]}`. Requests: `{"prompts": [[…], …],
"output_tokens": n}`. Replies, one a line: `{"ready": details}` once, then `{"run": {…}}` or `{"error":
text}`.

It runs under the engine's own interpreter, where antiphon is not installed, so it and the engine files import
nothing of ours. Engines print as they please: their standard output is sent to standard error, and replies go
out through a private copy.
"""

from __future__ import annotations

import ctypes
import json
import os
import runpy
import signal
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any, TextIO

PR_SET_PDEATHSIG = 1  # linux/prctl.h

Engine = Callable[[list[list[int]], int], dict[str, Any]]


def private_stdout() -> TextIO:
    """A stream on the real standard output; everything else that is printed goes to standard error from now on."""
    copy = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return copy


def end_with_parent() -> None:
    """Be killed when the benchmark dies (Linux): a stopped engine would otherwise keep its memory."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def reply(stream: TextIO, message: dict[str, Any]) -> None:
    stream.write(json.dumps(message) + "\n")
    stream.flush()


def timed_run(engine: Engine, prompts: list[list[int]], output_tokens: int) -> dict[str, Any]:
    """Both passes of a run: one token, then all. Their durations, and what the engine saw in the second."""
    start_s = time.perf_counter()
    observed = engine(prompts, 1)
    prefill_s = time.perf_counter() - start_s
    if output_tokens == 1:
        return {**observed, "prefill_s": prefill_s, "total_s": prefill_s}
    start_s = time.perf_counter()
    observed = engine(prompts, output_tokens)
    return {**observed, "prefill_s": prefill_s, "total_s": time.perf_counter() - start_s}


def main() -> int:
    end_with_parent()
    replies = private_stdout()
    engine_file, options = sys.argv[1], json.loads(sys.argv[2])
    try:
        engine, details = runpy.run_path(engine_file)["load"](options)
        reply(replies, {"ready": details})
        for line in sys.stdin:
            request = json.loads(line)
            reply(replies, {"run": timed_run(engine, request["prompts"], request["output_tokens"])})
    except Exception as error:
        traceback.print_exc()
        reply(replies, {"error": f"{type(error).__name__}: {error}"})
        return 1
    return 0


if __name__ == "__main__":
    # Guarded: helper processes that an engine spawns import this file again.
    sys.exit(main())
