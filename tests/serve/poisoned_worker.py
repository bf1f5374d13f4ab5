"""Requests that break their worker: `poison` makes worker processes begin with this file, which then calls `install`.

A request with the seed `SEED` is poisonous: the step that computes its token number `point`, or a later one, breaks in
the way that was asked for. Everything else is the real worker.
"""

import os
import signal
import time
from pathlib import Path
from typing import Any

SEED = 666
WAY = "ANTIPHON_TEST_POISON"
POINT = "ANTIPHON_TEST_POISON_POINT"
_MAGIC = 4096.0  # no row of a tiny model is full of it


def poison(folder: Path, monkeypatch: Any, way: str, point: int = 0) -> None:
    """Poison the workers that are started from now on. `way`: "die", "hang", "error", "break" (an error, and all steps
    after it are errors too), or "experts" (an expert worker dies of the rows)."""
    (folder / "sitecustomize.py").write_text(Path(__file__).read_text() + "\ninstall()\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]))
    monkeypatch.setenv(WAY, way)
    monkeypatch.setenv(POINT, str(point))


def install() -> None:
    """In the worker: look at every step before it runs."""
    from antiphon.comm.m2n.native import NativeAttentionExchange
    from antiphon.models.expert_half import ExpertHalf
    from antiphon.serve.worker.attention import AttentionRunner
    from antiphon.serve.worker.side_by_side import SideBySide

    way, point = os.environ[WAY], int(os.environ[POINT])
    start = SideBySide._start
    run, dispatch, forward = AttentionRunner.run, NativeAttentionExchange.dispatch, ExpertHalf.forward
    poisonous: set[str] = set()
    state = {"broken": False}
    rows_of: dict[int, bool] = {}  # by micro-batch: of a poisonous step

    def look_at(step: Any) -> None:
        poisonous.update(start.request_id for start in step.starts if start.seed == SEED)
        triggered = any(
            sequence.request_id in poisonous and sequence.start + len(sequence.token_ids) > point
            for sequences in step.micro_batches
            for sequence in sequences
        )
        if triggered and way == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if triggered and way == "hang":
            time.sleep(3600.0)
        if state["broken"] or (triggered and way in {"error", "break"}):
            state["broken"] = way == "break"
            raise RuntimeError("poisoned")
        for number in range(len(step.micro_batches)):
            rows_of[step.first_micro_batch + number] = triggered

    def run_poisoned(self: AttentionRunner, step: Any) -> Any:
        look_at(step)
        return run(self, step)

    def start_poisoned(self: SideBySide, step: Any) -> None:
        look_at(step)
        start(self, step)

    def dispatch_poisoned(
        self: NativeAttentionExchange, layer: int, micro_batch: int, rows: Any, ids: Any, weights: Any
    ) -> None:
        dispatch(
            self, layer, micro_batch, rows.new_full(rows.shape, _MAGIC) if rows_of[micro_batch] else rows, ids, weights
        )

    def forward_poisoned(self: ExpertHalf, layer: int, rows: Any, *rest: Any) -> Any:
        if way == "experts" and bool((rows == _MAGIC).all(dim=-1).any()):
            os.kill(os.getpid(), signal.SIGKILL)
        return forward(self, layer, rows, *rest)

    for owner, name, replacement in (
        (AttentionRunner, "run", run_poisoned),
        (SideBySide, "_start", start_poisoned),
        (NativeAttentionExchange, "dispatch", dispatch_poisoned),
        (ExpertHalf, "forward", forward_poisoned),
    ):
        setattr(owner, name, replacement)
