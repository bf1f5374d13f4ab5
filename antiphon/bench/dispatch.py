"""The dispatch benchmark: ways of a MoE layer's rows to their experts and back, between gloo ranks on this machine.

1. every rank draws rows and uniform choices of experts; an expert multiplies by a number of its own
2. results and both gradients of each way must be those of one process
3. the ways take turns; a time is that of the slowest rank, from a barrier to the end of backward
4. bytes are counted where they are sent, and stand beside the formulas of `cost.training`

Experts cost next to nothing here, so this is the price of communication and of putting rows in order. Where all-gather
begins to win as top-k grows is what Figure 7 of MegaScale-MoE shows for its machines.

Letters: T rows of a rank, K experts a row, E experts, R rows received, H width.
"""

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import torch
import torch.distributed as dist
from torch import Tensor
from typer import Option

from antiphon.base.errors import UserError
from antiphon.base.progress import Report
from antiphon.base.split_evenly import split_evenly
from antiphon.bench.harness.children import Children, join_gloo
from antiphon.bench.harness.columns import ContestColumns, UpTo, milliseconds, num_bytes, ratio
from antiphon.comm.dispatch import AllToAllWay, Dispatcher, GatherScatter, Way
from antiphon.comm.mesh import Group, Sizes, connect
from antiphon.cost.exchange import expected_distinct
from antiphon.cost.training.counts import expert_parallel_volume

TOLERANCES = {"float32": 1e-5, "bfloat16": 3e-2}  # relative to the largest number
BASELINE = "all-to-all"
VARIANTS = (BASELINE, "all-to-all, once a rank", "all-gather")
CASE_TIMEOUT_S = 300.0


@dataclass(frozen=True, kw_only=True)
class DispatchOptions:
    """`tokens` of each rank, each with `top_k` of `num_experts` experts; `rounds` are timed after one that is not."""

    ranks: Annotated[int, Option(metavar="N", help="Processes, each with its experts."), UpTo(64)] = 2
    tokens: Annotated[int, Option(metavar="N", help="Rows of each rank."), UpTo(1_000_000)] = 1024
    hidden: Annotated[int, Option(metavar="N", help="Width of a row."), UpTo(65_536)] = 1024
    num_experts: Annotated[int, Option("--experts", metavar="N", help="Experts in all."), UpTo(4096)] = 16
    top_k: Annotated[str, Option(metavar="K,K", help="Experts of a row.")] = "1,2,4,8"
    dtype: Annotated[str, Option(metavar="D", help="float32 or bfloat16: of the rows.")] = "float32"
    rounds: Annotated[int, Option(metavar="N", help="Timed rounds, in turns."), UpTo(1000)] = 10

    def check(self) -> list[int]:
        """The numbers of experts of a row to measure. `UserError` for what cannot be."""
        if self.ranks < 2:
            raise UserError(f"--ranks is {self.ranks}: one rank sends nothing, use 2 or more")
        if self.dtype not in TOLERANCES:
            raise UserError(f"--dtype is {self.dtype!r}: use {' or '.join(TOLERANCES)}")
        counts = parse_top_k(self.top_k)
        if wrong := [count for count in counts if count > self.num_experts]:
            raise UserError(f"--top-k is {wrong[0]}, --experts is {self.num_experts}: choose at most all experts")
        if self.ranks > self.num_experts:
            raise UserError(f"--ranks is {self.ranks}, --experts is {self.num_experts}: give each rank an expert")
        return counts


def parse_top_k(text: str) -> list[int]:
    """``"1,2,4"`` -> [1, 2, 4]."""
    found = [int(part) for part in text.split(",") if part.strip().isdigit()]
    if len(found) < len(text.split(",")) or min(found) < 1:
        raise UserError(f"--top-k is {text!r}: write whole numbers from 1 on, such as 1,2,4")
    return found


COLUMNS = ContestColumns(
    (
        ("ranks", "ranks"),
        ("top-k", "top_k"),
        ("variant", "variant"),
        ("round trip ms", milliseconds("round_trip_s_median")),
        ("to all-to-all", ratio("time_to_all_to_all")),
        ("sent a rank", num_bytes("comm_bytes")),
        ("formula", num_bytes("formula_bytes")),
        ("waited ms", milliseconds("waited_s")),
    ),
    title="dispatch and combine, forward and backward; slowest rank, medians",
)


def bench_dispatch(chosen: DispatchOptions, report: Report) -> list[dict[str, Any]]:
    """Rows of all ways for each number of experts. `ChildFailed`, `PeerLost` or `PeerTimeout` names the rank that
    fails."""
    rows: list[dict[str, Any]] = []
    counts = chosen.check()
    for number, top_k in enumerate(counts):
        report(number, len(counts))
        with TemporaryDirectory(prefix="antiphon-bench-dispatch-") as folder, Children() as ranks:
            ranks.start_ranks(chosen.ranks)
            rows += ranks.ask(measure_rank, chosen, top_k, f"{folder}/store")[0]
    report(len(counts), len(counts))
    return rows


_Inputs = tuple[Tensor, Tensor, Tensor, Tensor]
"""x_TH, ids_TK, weights_TK, and the gradient grad_TH of the sums."""


def _drawn(case: DispatchOptions, top_k: int, rank: int) -> _Inputs:
    generator, dtype = torch.Generator().manual_seed(rank), getattr(torch, case.dtype)
    scores = torch.rand(case.tokens, case.num_experts, generator=generator)
    weights_TK, ids_TK = scores.topk(top_k, dim=1)
    x_TH, grad_TH = (torch.randn(case.tokens, case.hidden, generator=generator).to(dtype) for _ in range(2))
    return x_TH.requires_grad_(), ids_TK, weights_TK.requires_grad_(), grad_TH


def dispatchers_over(group: Group, num_experts: int) -> dict[str, tuple[Dispatcher, tuple[int, int]]]:
    """Each way over `group`, and the experts [first, last) that are here."""
    experts = split_evenly(num_experts, group.size)
    first, last = own = experts[group.index]
    ways: tuple[Way, ...] = (
        AllToAllWay(group, experts, deduplicate=False),
        AllToAllWay(group, experts, deduplicate=True),
        GatherScatter(group, own),
    )
    return {name: (Dispatcher(last - first, (way,)), own) for name, way in zip(VARIANTS, ways, strict=True)}


def there_and_back(dispatcher: Dispatcher, experts: tuple[int, int], inputs: _Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """(sums, gradient of the rows, gradient of the weights); expert e multiplies by 1 + e / 8."""
    x_TH, ids_TK, weights_TK, grad_TH = inputs
    factors = 1 + torch.arange(*experts, dtype=x_TH.dtype) / 8

    def multiply(rows_RH: Tensor, counts: tuple[int, ...], _: Tensor | None) -> Tensor:
        return rows_RH * factors.repeat_interleave(torch.tensor(counts)).unsqueeze(1)

    out_TH = dispatcher.through(multiply, x_TH, ids_TK, weights_TK)
    grad_x, grad_weights = torch.autograd.grad(out_TH, (x_TH, weights_TK), grad_TH)
    return out_TH.detach(), grad_x, grad_weights


def measure_rank(rank: int, case: DispatchOptions, top_k: int, store: str) -> list[dict[str, Any]]:
    """One rank's part; the rows, of which all ranks have the same."""
    join_gloo(store, rank, case.ranks, CASE_TIMEOUT_S)
    mesh = connect(Sizes(world_size=case.ranks, expert=case.ranks), rank, CASE_TIMEOUT_S)
    group, inputs = mesh.group("expert"), _drawn(case, top_k, rank)
    ways = dispatchers_over(group, case.num_experts)
    expected = there_and_back(Dispatcher(case.num_experts), (0, case.num_experts), inputs)
    for name, way in ways.items():
        check_equal(name, case.dtype, there_and_back(*way, inputs), expected)
    times: dict[str, list[float]] = {name: [] for name in ways}
    waited, sent = dict.fromkeys(ways, 0.0), dict.fromkeys(ways, 0)
    for round_number in range(case.rounds + 1):
        for name, way in ways.items():
            mesh.ledger.take()
            dist.barrier()
            began_s = time.perf_counter()
            there_and_back(*way, inputs)
            slowest = torch.tensor([time.perf_counter() - began_s], dtype=torch.float64)
            counted = mesh.ledger.take()
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            if round_number:
                times[name].append(float(slowest))
                waited[name] += sum(counted.waited_s.values()) / case.rounds
                sent[name] = sum(number for key, number in counted.sent_bytes.items() if _carries_rows(key))
    mean_sent = torch.tensor([float(sent[name]) for name in ways], dtype=torch.float64)
    dist.all_reduce(mean_sent)
    dist.destroy_process_group()
    return list(_rows(case, top_k, times, waited, (mean_sent / case.ranks).tolist()))


def _carries_rows(name: str) -> bool:
    """Rows of the hidden width; choices, weights and counts are left out."""
    return name.split(".", maxsplit=1)[0] in ("dispatch", "combine")


def check_equal(name: str, dtype: str, found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    """`AssertionError` where results or gradients are not those of one process: then nothing is timed."""
    for what, ours, wanted in zip(("sum", "gradient of rows", "gradient of weights"), found, expected, strict=True):
        difference = float((ours.float() - wanted.float()).abs().max() / wanted.float().abs().max())
        assert difference <= TOLERANCES[dtype], f"{name}, {dtype}: the {what} differs by {difference:.1e}"


def expected_bytes(case: DispatchOptions, top_k: int) -> dict[str, float]:
    """What a rank sends, there and back, forward and backward, at uniform routing (MegaScale-MoE, eq. 3 and 4)."""
    whole = case.ranks * case.tokens * case.hidden * getattr(torch, case.dtype).itemsize
    once = expected_distinct(case.num_experts, top_k, case.ranks)
    copies = dict(zip(VARIANTS, (top_k, once, case.ranks), strict=True))
    return {name: 2 * whole * float(expert_parallel_volume(case.ranks, each)) for name, each in copies.items()}


def _rows(
    case: DispatchOptions,
    top_k: int,
    times: dict[str, list[float]],
    waited: dict[str, float],
    sent: Sequence[float],
) -> Iterator[dict[str, Any]]:
    formula, baseline_s = expected_bytes(case, top_k), statistics.median(times[BASELINE])
    for name, sent_bytes in zip(times, sent, strict=True):
        median_s = statistics.median(times[name])
        yield {
            "variant": name,
            **asdict(case) | {"top_k": top_k},
            "round_trip_s_median": median_s,
            "time_to_all_to_all": median_s / baseline_s,
            "comm_bytes": sent_bytes,
            "formula_bytes": formula[name],
            "waited_s": waited[name],
        }
