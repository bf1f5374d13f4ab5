"""`antiphon bench balance`: the same requests while experts stay, are placed once, or move with the load."""

import tempfile
from pathlib import Path
from typing import Annotated, Any, cast

import torch
import typer

from antiphon.base.errors import UserError
from antiphon.base.progress import progress
from antiphon.bench.balance import CASES, BalanceOrder, BalanceRow, Case, as_json, bench_balance
from antiphon.cli import options
from antiphon.cli.output import JsonOption, show_bench, table
from antiphon.models.config import load_model_spec
from antiphon.serve.balancer import POLICIES

MOST_WORKERS, MOST_REQUESTS, MOST_TOKENS, MOST_ROUNDS = 64, 65_536, 100_000, 1000  # more is a slip of the finger
_COLUMNS = ("case", "policy", "tokens/s", "step ms", "p95 ms", "p95 to off", "processor ms", "balancedness", "moves")


def balance(
    model: options.ModelFolder,
    cases: Annotated[
        str | None, typer.Option(metavar="NAME,...", show_default="all", help="plain, hot, slow, recorded.")
    ] = None,
    attention: Annotated[int, typer.Option(metavar="N", help="Attention workers.")] = 1,
    experts: Annotated[int, typer.Option(metavar="N", help="Expert workers.")] = 4,
    micro_batches: Annotated[int, typer.Option(metavar="N", help="Micro-batches.")] = 2,
    expert_slots: Annotated[
        int | None, typer.Option(metavar="N", show_default="a quarter more than needed", help="Slots a layer.")
    ] = None,
    batch: Annotated[int, typer.Option(metavar="N", help="Requests at once.")] = 64,
    prompt_tokens: Annotated[int, typer.Option(metavar="N", help="Of each request.")] = 32,
    output_tokens: Annotated[int, typer.Option(metavar="N", help="Of each request.")] = 128,
    dtype: Annotated[str, typer.Option(metavar="NAME", help="Texts are compared in float32.")] = "float32",
    rounds: Annotated[int, typer.Option(metavar="N", help="Runs of each policy, in turns.")] = 3,
    expert_cores: Annotated[
        float | None, typer.Option(metavar="X", show_default="shared", help="Part of a core of an expert worker.")
    ] = None,
    routing: Annotated[
        Path | None, typer.Option(metavar="FILE", help="For recorded: of serve --record-routing.")
    ] = None,
    json: JsonOption = None,
) -> None:
    """Time serving under each --balance policy: plain, with a hot expert, with a slow worker, with recorded load."""
    for name, value, most in (
        ("--attention", attention, MOST_WORKERS),
        ("--experts", experts, MOST_WORKERS),
        ("--micro-batches", micro_batches, MOST_WORKERS),
        ("--batch", batch, MOST_REQUESTS),
        ("--prompt-tokens", prompt_tokens, MOST_TOKENS),
        ("--output-tokens", output_tokens, MOST_TOKENS),
        ("--rounds", rounds, MOST_ROUNDS),
    ):
        options.check_count(name, value, most)
    if expert_cores is not None and not 0.1 <= expert_cores <= MOST_WORKERS:
        raise UserError(f"--expert-cores is {expert_cores:g}: it must be 0.1 to {MOST_WORKERS}")
    needed = -(-load_model_spec(model).router.num_experts // experts)
    slots = needed + -(-needed // 4) if expert_slots is None else expert_slots
    orders = [
        BalanceOrder(
            model=model,
            attention=attention,
            experts=experts,
            micro_batches=micro_batches,
            slots=slots,
            case=case,
            batch=batch,
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            rounds=rounds,
            dtype=dtype,
            expert_cores=expert_cores,
            routing=routing,
        )
        for case in chosen_cases(cases, routing)
    ]
    rows: list[BalanceRow] = []
    for order in orders:
        with (
            tempfile.TemporaryDirectory(prefix="antiphon-hot-") as folder,
            progress(f"balance, {order.case}", format_amount=lambda done: f"{done:.0f}") as report,
        ):
            rows += bench_balance(order, POLICIES, Path(folder), report)
    about = {"slots": slots, "batch": batch}
    show_bench("balance", result_table(rows), as_json(rows), json=json, about=about, torch=torch.__version__)


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
        )
        for row in rows
    ]
    return table(_COLUMNS, cells, title="medians over the rounds; p95 to off: higher is better")
