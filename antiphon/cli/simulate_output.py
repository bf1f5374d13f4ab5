"""What `antiphon simulate` shows people: predicted beside simulated, latencies, what the workers did, what failed."""

from collections.abc import Iterator

from rich.console import RenderableType

from antiphon.base.units import format_seconds
from antiphon.cli.output import table
from antiphon.sim.serve_results import PoolResult, ServingResult

Cells = tuple[object, ...]


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
    if pool.name == "decode":
        yield _times(pool, f"time per output token, {percentile}", predicted.tpot_s, result.tpot_at_percentile_s)
        yield _times(pool, "one step at the simulated batch", pool.predicted_step_at_batch_s, pool.step_s)
        yield _numbers(pool, "output tokens/s", predicted.tokens_per_s, result.steady_tokens_per_s)
        yield _numbers(pool, "requests in an instance's step", pool.predicted_batch, pool.batch)
    else:
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
