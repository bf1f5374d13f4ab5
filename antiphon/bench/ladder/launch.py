"""Runs a ladder on a cluster in a box: one process a rank, the first one's rows are the result.

Links between nodes are slow on purpose: the wire is the bottleneck, as in the papers, and not the cores that all ranks
share. Everything ends with the box.
"""

import json
import subprocess
import threading
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from antiphon.base.allowance import allowance
from antiphon.base.errors import ResourceError, UserError
from antiphon.base.progress import Report
from antiphon.base.system import python_module
from antiphon.bench.box import Box, NodeProcess, box_unavailable
from antiphon.bench.box.ranks import plan_ranks
from antiphon.bench.ladder.ladders import LadderCase, variants_of
from antiphon.bench.ladder.turns import WARM, write_schedule
from antiphon.bench.quiet import CpuWatch
from antiphon.bench.step_case import TEXT
from antiphon.bench.train_turns import write_text
from antiphon.models.config import load_model_spec

END_S = 30.0  # a rank that failed ends the others by then


def check_ladder(case: LadderCase) -> None:
    """`UserError` for what cannot be, `ResourceError` where there can be no box."""
    variants_of(case)
    spec = load_model_spec(case.folder)
    if case.ranks < 2:
        raise UserError(f"--nodes is {case.nodes}, --ranks-per-node {case.ranks_per_node}: a ladder needs two ranks")
    case.check_sizes(spec)
    if case.ranks > min(spec.attention.num_heads, spec.router.num_experts):
        raise UserError(
            f"{case.ranks} ranks share {spec.attention.num_heads} heads and {spec.router.num_experts} experts: use "
            "fewer ranks, or a larger model"
        )
    if reason := box_unavailable():
        raise ResourceError(f"a ladder runs on a cluster in a box (docs/box.md): {reason}")


def bench_ladder(case: LadderCase, timeout_s: float, report: Report) -> list[dict[str, Any]]:
    """A row for each variant."""
    with TemporaryDirectory(prefix="antiphon-ladder-") as name:
        workplace = Path(name)
        write_text(workplace / TEXT, case.tokens_per_step * (WARM + case.rounds + 2))
        write_schedule(workplace)
        case.write(workplace)
        watch = CpuWatch()
        with Box(num_nodes=case.nodes, mbit=case.mbit) as box:
            _run(box, case, workplace, timeout_s, report)
        rows: list[dict[str, Any]] = json.loads((workplace / "rows.json").read_text(encoding="utf-8"))
    return [row | {"foreign_cpu_share": watch.foreign_share()} for row in rows]


def _run(box: Box, case: LadderCase, workplace: Path, timeout_s: float, report: Report) -> None:
    command = python_module("antiphon.bench.ladder.rank", str(workplace))
    plans = plan_ranks(num_nodes=case.nodes, num_local_ranks=case.ranks_per_node, command=command)
    threads = str(max(1, allowance().num_cores // case.ranks))
    with (workplace / "errors.txt").open("wb") as errors:
        processes = [
            box.start(
                plan.node,
                plan.args,
                env=plan.env | {"OMP_NUM_THREADS": threads},
                stdout=subprocess.PIPE if plan.rank == 0 else subprocess.DEVNULL,
                stderr=errors,
            )
            for plan in plans
        ]
        total = (WARM + case.rounds + 1) * len(variants_of(case))
        reader = threading.Thread(target=_relay, args=(processes[0], total, report), daemon=True)
        reader.start()
        _await(processes, timeout_s, workplace)
        reader.join(END_S)


def _relay(first: NodeProcess, total: int, report: Report) -> None:
    """Progress, from what the first rank prints: a line each step."""
    assert first.stdout is not None
    for number, _ in enumerate(first.stdout, start=1):
        report(number, total)


def _await(processes: list[NodeProcess], timeout_s: float, workplace: Path) -> None:
    """`ResourceError` if a rank fails, or all are not done in time."""
    first, *others = processes
    try:
        codes = [first.wait(timeout_s)]
        codes += [each.wait(END_S) for each in others]
    except TimeoutError as error:
        raise ResourceError(f"{error}{_said(workplace)}") from error
    if any(codes):
        rank = next(rank for rank, code in enumerate(codes) if code)
        raise ResourceError(f"rank {rank} ended with exit code {codes[rank]}{_said(workplace)}")


def _said(workplace: Path) -> str:
    lines = (workplace / "errors.txt").read_text(encoding="utf-8", errors="replace").splitlines()
    return "".join(f"\n    {line}" for line in lines[-20:])
