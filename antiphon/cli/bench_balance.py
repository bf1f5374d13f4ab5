"""`antiphon bench balance`: the same requests while experts stay, are placed once, or move with the load."""

import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, cast

import torch
import typer

from antiphon.base.errors import UserError
from antiphon.base.progress import progress
from antiphon.bench.balance import CASES, BalanceOrder, BalanceRow, Case, bench_balance
from antiphon.cli import options
from antiphon.cli.commands import takes_groups
from antiphon.cli.output import JsonOption, show_bench, table
from antiphon.models.config import load_model_spec
from antiphon.serve.balancer import POLICIES

MOST_WORKERS, MOST_TOKENS = 64, 100_000
_MOST = {  # more is a slip of the finger
    **dict.fromkeys(("attention", "experts", "micro_batches"), MOST_WORKERS),
    "batch": 65_536,
    **dict.fromkeys(("prompt_tokens", "output_tokens"), MOST_TOKENS),
    "rounds": 1000,
}
_COLUMNS = (
    "case",
    "policy",
    "tokens/s",
    "step ms",
    "p95 ms",
    "p95 to off",
    "processor ms",
    "balancedness",
    "moves",
    "copies",
)


@dataclass(frozen=True, kw_only=True)
class BalanceOptions:
    """What is measured of each case."""

    attention: Annotated[int, typer.Option(metavar="N", help="Attention workers.")] = 1
    experts: Annotated[int, typer.Option(metavar="N", help="Expert workers.")] = 4
    micro_batches: Annotated[int, typer.Option(metavar="N", help="Micro-batches.")] = 2
    expert_slots: Annotated[
        int | None, typer.Option(metavar="N", show_default="a quarter more than needed", help="Slots a layer.")
    ] = None
    batch: Annotated[int, typer.Option(metavar="N", help="Requests at once.")] = 64
    prompt_tokens: Annotated[int, typer.Option(metavar="N", help="Of each request.")] = 32
    output_tokens: Annotated[int, typer.Option(metavar="N", help="Of each request.")] = 128
    dtype: Annotated[str, typer.Option(metavar="NAME", help="Texts are compared in float32.")] = "float32"
    rounds: Annotated[int, typer.Option(metavar="N", help="Runs of each policy, in turns.")] = 3
    expert_cores: Annotated[
        float | None, typer.Option(metavar="X", show_default="shared", help="Part of a core of an expert worker.")
    ] = None
    routing: Annotated[Path | None, typer.Option(metavar="FILE", help="For recorded: of serve --record-routing.")] = (
        None
    )

    def order(self, model: Path, case: Case) -> BalanceOrder:
        needed = -(-load_model_spec(model).router.num_experts // self.experts)
        values = dict(vars(self))
        slots = values.pop("expert_slots")
        return BalanceOrder(
            model=model, case=case, slots=needed + -(-needed // 4) if slots is None else slots, **values
        )

    def check(self) -> None:
        """`UserError` for what is a slip of the finger."""
        for name, most in _MOST.items():
            options.check_count(f"--{name.replace('_', '-')}", getattr(self, name), most)
        if self.expert_cores is not None and not 0.1 <= self.expert_cores <= MOST_WORKERS:
            raise UserError(f"--expert-cores is {self.expert_cores:g}: it must be 0.1 to {MOST_WORKERS}")


@takes_groups
def balance(
    model: options.ModelFolder,
    cases: Annotated[
        str | None, typer.Option(metavar="NAME,...", show_default="all", help="plain, hot, slow, recorded.")
    ] = None,
    *,
    chosen: BalanceOptions,
    json: JsonOption = None,
) -> None:
    """Time serving under each --balance policy: plain, with a hot expert, with a slow worker, with recorded load."""
    chosen.check()
    orders = [chosen.order(model, case) for case in chosen_cases(cases, chosen.routing)]
    rows: list[BalanceRow] = []
    for order in orders:
        with (
            tempfile.TemporaryDirectory(prefix="antiphon-hot-") as folder,
            progress(f"balance, {order.case}", format_amount=lambda done: f"{done:.0f}") as report,
        ):
            rows += bench_balance(order, POLICIES, Path(folder), report)
    about = {"slots": orders[0].slots, "batch": chosen.batch}
    show_bench("balance", result_table(rows), list(map(asdict, rows)), json=json, about=about, torch=torch.__version__)


def chosen_cases(text: str | None, routing: Path | None) -> list[Case]:
    """``"plain,hot"`` -> ["plain", "hot"]; without a text all that there can be."""
    if text is None:
        return [case for case in CASES if case != "recorded" or routing is not None]
    if routing is not None and "recorded" not in text:
        raise UserError(f"--routing {routing} is for the case recorded, which --cases {text} leaves out")
    names = [part.strip() for part in text.split(",")]
    if wrong := [name for name in names if name not in CASES]:
        raise UserError(f"--cases has {wrong[0]!r}: use some of {', '.join(CASES)}")
    return cast(list[Case], names)


def result_table(rows: list[BalanceRow]) -> Any:
    """What people read."""
    off = {row.case: row.step_s_p95 for row in rows if row.policy == "off"}
    cells = [
        (
            row.case,
            row.policy,
            f"{row.tokens_per_s:.0f}",
            f"{row.step_s_median * 1e3:.2f}",
            f"{row.step_s_p95 * 1e3:.2f}",
            f"{off[row.case] / row.step_s_p95:.2f}",
            f"{row.processor_s * 1e3:.2f}",
            f"{row.balancedness:.3f}",
            row.placement_changes,
            row.copies,
        )
        for row in rows
    ]
    return table(_COLUMNS, cells, title="medians over the rounds; p95 to off: higher is better")
