"""What came of a serving simulation: latencies, throughput, promises kept, idle shares, beside what the plan predicted.

Rates are those between the moments at which a tenth and nine tenths of the tokens (or requests) were done, so that
filling and draining do not count; `output_tokens_per_s` is over the whole run. A request keeps its promise if it was
served and both its TTFT and its TPOT are within the targets; goodput is the rate times the share of such requests.

Rejected: discarding the first and last requests by number. How many those are depends on the batch.
"""

from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from antiphon.cost.roofline import FloatArray
from antiphon.planner.predict import predict
from antiphon.sim.instances import LivePool
from antiphon.sim.serve_log import Record, ServingRun
from antiphon.specs.plan import PhasePlan, Predicted
from antiphon.specs.workload import SloSpec

PERCENTILES = (0.5, 0.9, 0.99)  # of the times to a first token, of a token and of gaps


@dataclass(frozen=True, kw_only=True)
class PoolResult:
    """One pool. Times and batch are means as a token meets them; idle and busy shares are of the time in which its
    instances stepped; `expert_balancedness`: mean over fullest rows of an expert worker."""

    name: str
    layout: str
    num_instances: int
    num_steps: int
    stepping_ratio: float
    batch: float
    step_s: float
    t_a_s: float
    t_e_s: float
    t_c_s: float
    attention_idle_ratio: float
    expert_idle_ratio: float
    expert_balancedness: float
    num_preemptions: int
    prefix_hit_ratio: float
    kv_usage_mean: float
    kv_usage_peak: float
    running_mean: float
    waiting_mean: float
    waiting_peak: int
    predicted: Predicted
    predicted_batch: float
    predicted_step_at_batch_s: float | None


@dataclass(frozen=True, kw_only=True)
class ServingResult:
    """Seconds, requests and tokens. Latencies: mean, percentiles, maximum; empty where no request has one. `handovers`:
    of two pools, as in `HandoverCounts`, and `exposed_share` of the prefill workers' steps."""

    num_requests: int
    num_finished: int
    num_refused: int
    num_cut: int
    input_tokens: int
    output_tokens: int
    duration_s: float
    arrival_rate: float | None
    ttft_s: dict[str, float]
    tpot_s: dict[str, float]
    itl_s: dict[str, float]
    e2e_s: dict[str, float]
    output_tokens_per_s: float
    steady_tokens_per_s: float
    prompt_tokens_per_s: float
    requests_per_s: float
    slo: SloSpec
    slo_kept_ratio: float
    goodput_requests_per_s: float
    ttft_at_percentile_s: float | None
    tpot_at_percentile_s: float | None
    pools: tuple[PoolResult, ...]
    failures: tuple[dict[str, Any], ...]
    replacements: tuple[dict[str, Any], ...]
    series: dict[str, Any] = field(default_factory=dict)
    first_refusal: str = ""
    handovers: dict[str, Any] | None = None


def serving_result(run: ServingRun, slo: SloSpec, *, num_cut: int = 0) -> ServingResult:
    """Numbers of a run, `slo` being what was promised."""
    served = [record for record in run.records if not record.refused]
    finished = [record for record in served if record.finished_s is not None]
    refused = [record for record in run.records if record.refused]
    kept = sum(_keeps(record, slo) for record in finished)
    duration_s = max(run.end_s, 1e-300)
    last_arrival_s = run.records[-1].arrival_s
    ttft, tpot = _values(served, "ttft_s"), _values(served, "tpot_s")
    output = sum(record.num_output for record in served)
    requests_per_s = _rate([(record.finished_s, 1) for record in finished])
    return ServingResult(
        num_requests=len(run.records),
        num_finished=len(finished),
        num_refused=len(refused),
        num_cut=num_cut,
        input_tokens=sum(record.input_tokens for record in served),
        output_tokens=output,
        duration_s=run.end_s,
        arrival_rate=(len(run.records) - 1) / last_arrival_s if last_arrival_s > 0 else None,
        ttft_s=summary(ttft),
        tpot_s=summary(tpot),
        itl_s=summary(*run.log.gaps_between()),
        e2e_s=summary(_values(served, "e2e_s")),
        output_tokens_per_s=output / duration_s,
        steady_tokens_per_s=_steady(
            [sample.time_s for sample in run.log.samples], [sample.num_output for sample in run.log.samples]
        ),
        prompt_tokens_per_s=_rate([(record.first_token_s, record.input_tokens) for record in served]),
        requests_per_s=requests_per_s,
        slo=slo,
        slo_kept_ratio=kept / len(run.records),
        goodput_requests_per_s=requests_per_s * kept / max(len(finished), 1),
        ttft_at_percentile_s=_at(ttft, slo.percentile),
        tpot_at_percentile_s=_at(tpot, slo.percentile),
        pools=tuple(_pool_result(run, index, live) for index, live in enumerate(run.pools)),
        failures=tuple(run.log.failures),
        replacements=tuple(run.log.replacements),
        series=_series(run),
        first_refusal=refused[0].refused if refused else "",
        handovers=_handovers(run),
    )


def _handovers(run: ServingRun) -> dict[str, Any] | None:
    if run.handovers is None:
        return None
    stepped_s = run.pools[0].totals.step_s
    return {
        **msgspec.structs.asdict(run.handovers),
        "exposed_share": run.handovers.exposed_s / stepped_s if stepped_s else 0.0,
    }


def summary(values: FloatArray, counts: NDArray[np.int64] | None = None) -> dict[str, float]:
    """Mean, percentiles and maximum; empty if there is nothing. A percentile is a value that occurs: the smallest that
    so large a share does not exceed."""
    if not len(values):
        return {}
    weights = np.ones(len(values)) if counts is None else counts.astype(np.float64)
    order = np.argsort(values, kind="stable")
    values, weights = values[order], weights[order]
    reached = np.cumsum(weights)
    found = {"mean": float((values * weights).sum() / reached[-1])}
    for percentile in PERCENTILES:
        found[f"p{percentile * 100:g}"] = percentile_of(values, reached, percentile)
    found["max"] = float(values[-1])
    return found


def percentile_of(ordered: FloatArray, reached: FloatArray, percentile: float) -> float:
    """`reached`: cumulative weights of the ordered values."""
    index = int(np.searchsorted(reached, percentile * reached[-1] * (1 - 1e-12)))
    return float(ordered[min(index, len(ordered) - 1)])


def _values(records: list[Record], name: str) -> FloatArray:
    return np.asarray([value for record in records if (value := getattr(record, name)) is not None], dtype=np.float64)


def _at(values: FloatArray, percentile: float) -> float | None:
    if not values.size:
        return None
    ordered = np.sort(values)
    return percentile_of(ordered, np.arange(1.0, values.size + 1), percentile)


def _keeps(record: Record, slo: SloSpec) -> bool:
    ttft_s, tpot_s = record.ttft_s, record.tpot_s
    in_time = slo.ttft_s is None or (ttft_s is not None and ttft_s <= slo.ttft_s)
    return in_time and (slo.tpot_s is None or tpot_s is None or tpot_s <= slo.tpot_s)


def _rate(events: list[tuple[float | None, int]]) -> float:
    """Steady rate of amounts that were done at some time."""
    done = sorted((time, amount) for time, amount in events if time is not None)
    times = [time for time, _ in done]
    return _steady(times, list(np.cumsum([amount for _, amount in done])))


def _steady(times: list[float], amounts: list[Any]) -> float:
    """Between a tenth and nine tenths of what was reached at ascending times; of something done at once, per run."""
    if not times:
        return 0.0
    total = float(amounts[-1])
    moments = [float(np.interp(share * total, amounts, times)) for share in (0.1, 0.9)]
    span_s = moments[1] - moments[0]
    return 0.8 * total / span_s if span_s > 0 else total / max(times[-1], 1e-300)


def _series(run: ServingRun) -> dict[str, Any]:
    """Queue lengths over time, one list per pool."""
    samples = run.log.samples
    found: dict[str, Any] = {"time_s": [sample.time_s for sample in samples]}
    for index, live in enumerate(run.pools):
        seen = [sample.pools[index] for sample in samples]
        found[live.pool.name] = {
            "running": [one.running for one in seen],
            "waiting": [one.waiting for one in seen],
            "kv_usage": [one.kv_usage for one in seen],
        }
    return found


def _pool_result(run: ServingRun, index: int, live: LivePool) -> PoolResult:
    totals, phase = live.totals, live.pool.phase
    rows, seconds = max(totals.num_rows, 1), max(totals.step_s, 1e-300)
    books = [scheduler.book for one in live.instances for scheduler in one.schedulers.values()]
    asked = sum(book.prefix_query_tokens for book in books)
    mean_pairs = sum(instance.load.mean_pairs for instance in live.instances)
    fullest = sum(instance.load.fullest_pairs for instance in live.instances)
    times = np.asarray([sample.time_s for sample in run.log.samples])
    seen = [sample.pools[index] for sample in run.log.samples]
    return PoolResult(
        name=live.pool.name,
        layout=phase.layout,
        num_instances=phase.num_instances,
        num_steps=totals.num_steps,
        stepping_ratio=totals.step_s / (max(run.end_s, 1e-300) * phase.num_instances),
        batch=(totals.decode_rows_weighted if live.pool.name != "prefill" else totals.rows_weighted) / rows,
        step_s=totals.step_s_weighted / rows,
        t_a_s=totals.t_a_weighted / rows,
        t_e_s=totals.t_e_weighted / rows,
        t_c_s=totals.t_c_weighted / rows,
        attention_idle_ratio=1 - totals.attention_busy_s / seconds,
        expert_idle_ratio=1 - totals.experts_busy_s / seconds,
        expert_balancedness=mean_pairs / fullest if fullest else 1.0,
        num_preemptions=sum(book.num_preemptions for book in books),
        prefix_hit_ratio=sum(book.prefix_hit_tokens for book in books) / asked if asked else 0.0,
        kv_usage_mean=_mean_over_time(times, [one.kv_usage for one in seen]),
        kv_usage_peak=max(one.kv_usage for one in seen),
        running_mean=_mean_over_time(times, [one.running for one in seen]),
        waiting_mean=_mean_over_time(times, [one.waiting for one in seen]),
        waiting_peak=max(one.waiting for one in seen),
        predicted=phase.predicted,
        predicted_batch=_predicted_batch(phase),
        predicted_step_at_batch_s=_predicted_at(live, totals.decode_rows_weighted / rows),
    )


def _predicted_at(live: LivePool, batch: float) -> float | None:
    """The planner's time per output token at the batch that was met, rounded to whole sequences per micro-batch."""
    pool, phase = live.pool, live.pool.phase
    if pool.name == "prefill" or batch <= 0:
        return None
    each = phase.micro_batches * phase.parallel.attention_dp
    return predict(pool.setting, replace(phase, batch=max(round(batch / each), 1) * each)).tpot_s


def _predicted_batch(phase: PhasePlan) -> float:
    """The batch of one instance: what is in flight (Little) where a rate is served below capacity, the plan's batch at
    most."""
    predicted = phase.predicted
    if predicted.tpot_s is None:
        return float(phase.batch)
    return min(float(phase.batch), predicted.tokens_per_s * predicted.tpot_s / phase.num_instances)


def _mean_over_time(times: FloatArray, values: list[Any]) -> float:
    """Each value holds until the next sample."""
    span_s = float(times[-1] - times[0])
    if span_s <= 0:
        return float(values[-1])
    return float(np.diff(times) @ np.asarray(values[:-1], dtype=np.float64) / span_s)
