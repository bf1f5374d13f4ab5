"""`antiphon simulate`: a plan against requests, with failures if asked for, before any machine is rented.

It prints predicted beside simulated, latencies, what the workers did, and what failed.
"""

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import RenderableType

from antiphon.base.errors import UserError
from antiphon.base.progress import progress
from antiphon.base.units import format_seconds
from antiphon.cli.commands import given_options, takes_groups
from antiphon.cli.output import JsonOption, check_output_file, emit_json, show, table, whole_file
from antiphon.cli.simulate_inputs import SimulateOptions, differences, plan_model
from antiphon.cost.ping_pong import iteration
from antiphon.report.emit_k8s import chosen_phase
from antiphon.sim.gantt import write_trace
from antiphon.sim.ping_pong import plan_pipeline, simulate_ping_pong
from antiphon.sim.pools import Pool, ServingOptions
from antiphon.sim.serve_log import ServingRun, write_serving_trace
from antiphon.sim.serve_results import PoolResult, ServingResult, serving_result
from antiphon.sim.serving_run import simulate_serving
from antiphon.specs.plan import Plan, read_plan

Cells = tuple[object, ...]
_RECORDED_WORKERS = 8


@takes_groups
def simulate(
    context: typer.Context,
    plan: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan.json that antiphon plan wrote.")],
    chosen: SimulateOptions,
    pipeline: Annotated[bool, typer.Option("--pipeline", help="One decode step from inside instead.")] = False,
    perfetto: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a trace for Perfetto.")] = None,
    json: JsonOption = None,
) -> None:
    """Serve requests by PLAN in a simulation: the engine's own scheduler, steps timed by the planner's costs."""
    check_output_file("--perfetto", perfetto)
    found = read_plan(plan)
    if pipeline:
        if given := given_options(context, vars(chosen)) - {"seed"}:
            option = sorted(given)[0].replace("_", "-")
            raise UserError(f"--{option} does not apply to --pipeline, which runs one step: leave one of them out")
        show_pipeline(found, perfetto, json)
        return
    serve(found, plan, chosen, perfetto, json)


def serve(plan: Plan, file: Path, chosen: SimulateOptions, perfetto: Path | None, json: str | None) -> None:
    """Request level."""
    workload = chosen.read(plan)
    setting = chosen.setting(plan, workload)
    requests = chosen.draw(workload)
    pools = chosen.pools(plan, setting, requests)
    options = chosen.serving(pools)
    with progress("simulating") as report:
        run = simulate_serving(pools, requests, options, record_steps=perfetto is not None, on_progress=report)
    result = serving_result(run, workload.slo, num_cut=requests.num_cut)
    changed = [] if chosen.skew is not None else differences(plan, setting)
    notes = changed + notes_of(plan, pools, options, run, result)
    if pools[0].kv_arrives and chosen.prefill is None:
        notes.append("prompts come computed, as the prediction assumes (--prefill mixed computes them in the steps)")
    if perfetto is not None:
        with whole_file("--perfetto", perfetto) as partial:
            write_serving_trace(partial, run)
        notes.append(f"trace written to {perfetto}: open it at ui.perfetto.dev")
    for item in shown(result, notes):
        show(item, json=json)
    about = {"plan": file, "model": plan.model, "cluster": setting.cluster.name, "workload": workload.name}
    emit_json(json, {**about, "seed": chosen.seed, **asdict(result), "notes": notes})


def notes_of(
    plan: Plan, pools: list[Pool], options: ServingOptions, run: ServingRun, result: ServingResult
) -> list[str]:
    """What a person should know before comparing, and what was asked for and did not happen."""
    notes = []
    if list(plan.phases) == ["decode"] and not pools[0].kv_arrives:
        notes.append(
            "the plan has no prefill phase: prompts are computed in the steps, which the prediction leaves out "
            "(--prefill elsewhere leaves them out here too)"
        )
    side_by_side = sum(pool.phase.batch * pool.phase.num_instances for pool in pools if pool.name != "prefill")
    if result.arrival_rate is None and result.num_requests < 2 * side_by_side:
        notes.append(
            f"the plan runs {side_by_side:,} requests side by side: with fewer than twice that it is soon empty"
        )
    for kill in options.kills:
        if kill.time_s > run.end_s:
            name = pools[kill.pool].name_of(kill.role, kill.worker)
            notes.append(f"{name} did not die at {kill.time_s:g} s: the run ended at {run.end_s:.1f} s")
    if options.shift_every_s is not None and not pools[0].setting.is_skewed:
        notes.append("all experts are equally popular: shifts change nothing (--skew)")
    if options.rebalance_every_s is not None and not result.replacements:
        notes.append("experts never moved: no other placement would have been better by 2%")
    if run.log.num_steps_left_out:
        kept, left_out = len(run.log.steps), run.log.num_steps_left_out
        notes.append(f"the trace holds the first {kept:,} steps, {left_out:,} are left out")
    return notes


def show_pipeline(plan: Plan, perfetto: Path | None, json: str | None) -> None:
    """Pipeline level: one iteration of the decode phase, without chance."""
    phase = chosen_phase(plan)[1]
    model = plan_model(plan)
    result = simulate_ping_pong(plan_pipeline(phase, model.num_moe_layers))
    workers = (phase.parallel.attention_dp, phase.parallel.expert_workers)
    shown_workers = [min(count, _RECORDED_WORKERS) for count in workers]
    predicted = phase.predicted
    times = (predicted.t_a_s or 0.0, predicted.t_e_s or 0.0, predicted.t_c_s or 0.0)
    formula_s = float(iteration(phase.micro_batches, model.num_moe_layers, *times))
    payload: dict[str, Any] = {
        "model": plan.model,
        "micro_batches": phase.micro_batches,
        "num_layers": model.num_moe_layers,
        **{name: asdict(predicted)[name] for name in ("t_a_s", "t_e_s", "t_c_s")},
        "iteration_s": result.end_s,
        "formula_s": formula_s,
        "attention_idle_ratio": result.attention_idle_ratio,
        "expert_idle_ratio": result.experts_idle_ratio,
    }
    rows = [
        ("T_a, T_e, T_c", ", ".join(format_seconds(time) for time in times)),
        ("micro-batches, MoE layers", f"{phase.micro_batches}, {model.num_moe_layers}"),
        ("one step, simulated", format_seconds(result.end_s)),
        ("one step, MegaScale-Infer eq. 5 with bubbles", format_seconds(formula_s)),
        ("attention idle", f"{result.attention_idle_ratio:.0%}"),
        ("experts idle", f"{result.experts_idle_ratio:.0%}"),
    ]
    show(table(("one decode step", ""), rows), json=json)
    if perfetto is not None:
        with whole_file("--perfetto", perfetto) as partial:
            write_trace(partial, result.bars_of(*shown_workers))
        num_attention, num_experts = shown_workers
        show(f"trace of {num_attention} attention and {num_experts} expert workers written to {perfetto}", json=json)
    emit_json(json, payload)


def shown(result: ServingResult, notes: list[str]) -> Iterator[RenderableType]:
    """Everything, in order."""
    yield headline(result)
    yield comparison(result)
    yield latencies(result)
    yield workers(result)
    yield from promises(result)
    yield from events(result)
    yield from notes


def headline(result: ServingResult) -> str:
    came = "all at once" if result.arrival_rate is None else f"{result.arrival_rate:.3g} a second"
    return (
        f"{result.num_requests:,} requests, {came}; {result.num_finished:,} served in {result.duration_s:,.1f} s of "
        f"simulated time: {result.input_tokens:,} tokens in, {result.output_tokens:,} out"
    )


def comparison(result: ServingResult) -> RenderableType:
    """Predicted beside simulated; latencies at the promise's percentile."""
    rows: list[Cells] = []
    for pool in result.pools:
        rows += _comparison(result, pool)
    columns = ("phase", "", "predicted", "simulated", "simulated / predicted")
    return table(columns, rows)


def _comparison(result: ServingResult, pool: PoolResult) -> Iterator[Cells]:
    predicted, percentile = pool.predicted, f"p{result.slo.percentile * 100:g}"
    if pool.name != "prefill":
        yield _times(pool, f"time per output token, {percentile}", predicted.tpot_s, result.tpot_at_percentile_s)
        yield _times(pool, "one step at the simulated batch", pool.predicted_step_at_batch_s, pool.step_s)
        yield _numbers(pool, "output tokens/s", predicted.tokens_per_s, result.steady_tokens_per_s)
        yield _numbers(pool, "requests in an instance's step", pool.predicted_batch, pool.batch)
    if pool.name == "serve":
        yield _times(pool, f"time to first token, {percentile}", predicted.ttft_s, result.ttft_at_percentile_s)
    if pool.name == "prefill":
        yield _times(pool, f"time to first token, {percentile}", predicted.ttft_s, result.ttft_at_percentile_s)
        yield _numbers(pool, "prompt tokens/s", predicted.tokens_per_s, result.prompt_tokens_per_s)
        yield _numbers(pool, "tokens of a pass", pool.predicted_batch, pool.batch)
    for name, planned, simulated in (
        ("T_a, one layer and micro-batch", predicted.t_a_s, pool.t_a_s),
        ("T_e", predicted.t_e_s, pool.t_e_s),
        ("T_c", predicted.t_c_s, pool.t_c_s),
    ):
        yield _times(pool, name, planned, simulated)


def _times(pool: PoolResult, name: str, predicted: float | None, simulated: float | None) -> Cells:
    texts = ["" if value is None else format_seconds(value) for value in (predicted, simulated)]
    return pool.name, name, *texts, _ratio(predicted, simulated)


def _numbers(pool: PoolResult, name: str, predicted: float, simulated: float) -> Cells:
    return pool.name, name, f"{predicted:,.0f}", f"{simulated:,.0f}", _ratio(predicted, simulated)


def _ratio(predicted: float | None, simulated: float | None) -> str:
    return f"{simulated / predicted:.2f}" if predicted and simulated is not None else ""


def latencies(result: ServingResult) -> RenderableType:
    rows: list[Cells] = []
    for name, found in (
        ("time to first token", result.ttft_s),
        ("time per output token", result.tpot_s),
        ("between two tokens", result.itl_s),
        ("whole request", result.e2e_s),
    ):
        if found:
            rows.append((name, *(format_seconds(value) for value in found.values())))
    return table(("latency", "mean", "p50", "p90", "p99", "max"), rows)


def workers(result: ServingResult) -> RenderableType:
    """By pool. Idle shares are of the time in which steps ran."""
    rows: list[Cells] = [
        (
            pool.name,
            pool.num_instances,
            f"{pool.stepping_ratio:.0%}",
            f"{pool.attention_idle_ratio:.0%}",
            f"{pool.expert_idle_ratio:.0%}",
            f"{pool.expert_balancedness:.2f}",
            f"{pool.kv_usage_mean:.0%} ({pool.kv_usage_peak:.0%})",
            f"{pool.running_mean:,.0f}",
            f"{pool.waiting_mean:,.0f} ({pool.waiting_peak:,})",
            pool.num_preemptions,
        )
        for pool in result.pools
    ]
    columns = ("pool", "instances", "stepping", "attention idle", "experts idle", "balancedness")
    return table((*columns, "KV (peak)", "running", "waiting (peak)", "preemptions"), rows)


def promises(result: ServingResult) -> Iterator[str]:
    slo = result.slo
    targets = [
        f"{name} within {format_seconds(target)}"
        for name, target in (("first token", slo.ttft_s), ("each token", slo.tpot_s))
        if target is not None
    ]
    if targets:
        yield (
            f"{result.slo_kept_ratio:.1%} of all requests keep {' and '.join(targets)} "
            f"(promised: {slo.percentile:.0%}); "
            f"goodput {result.goodput_requests_per_s:.3g} of {result.requests_per_s:.3g} requests/s"
        )


def events(result: ServingResult) -> Iterator[str]:
    if (handed := result.handovers) is not None:
        yield (
            f"{handed['num_done']:,} prompts handed over, {handed['num_tokens']:,} tokens; {handed['num_failed']:,} "
            f"hand-overs failed, {handed['num_recomputed']:,} prompts were computed by decode workers; keys and values "
            f"that still leave are {handed['exposed_share']:.1%} of the prefill workers' steps"
        )
    for failure in result.failures:
        yield (
            f"{failure['worker']} was down from {failure['time_s']:.1f} to {failure['until_s']:.1f} s, "
            f"{failure['num_moved']} requests left it"
        )
    if result.replacements:
        first, last = result.replacements[0]["move"], result.replacements[-1]["move"]
        pauses_s = sum(entry["move"]["pause_s"] for entry in result.replacements)
        yield (
            f"experts moved {len(result.replacements)} times, {format_seconds(pauses_s)} of pauses: the share of the "
            f"busiest worker went from {first['busiest_before']:.1%} to {first['busiest_after']:.1%} at first, "
            f"{last['busiest_before']:.1%} to {last['busiest_after']:.1%} at last"
        )
    if result.num_refused:
        yield f"{result.num_refused:,} requests refused, as the engine would, the first because: {result.first_refusal}"
    if result.num_cut:
        yield f"{result.num_cut:,} requests shortened to the workload's max_length"
