"""Servers under load that does not wait for them: requests come when they come, as users do.

1. every contestant is a server that runs already (`--against-url`), or one of our layouts, started by `antiphon serve`
2. for each rate and repeat a demand is drawn: arrivals (Poisson, or gamma), lengths (a workload's or a trace's), random
   prompts; it is the same for all contestants
3. the contestants take turns; each request is sent at its moment over HTTP and streamed, whatever became of those
   before it
4. a row per contestant and rate: latencies as mean, p50, p90, p99 and their standard deviation over the repeats,
   throughput, and goodput: requests a second that kept every promise

A request's first token counts from the moment it was due: a client that is late makes the server look slower, never
faster, and `late_s` says by how much. MegaScale-Infer, section 7.1, bounds the time per output token; MixServe,
section IV-B, sets rates.

Rejected: as many requests in flight as before whatever the server does (closed loop). A slow server would slow its own
load, and its queue would not show.
"""

import asyncio
import itertools
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean, pstdev
from typing import Annotated, Any

import httpx
import numpy as np
from typer import Option

from antiphon.base.errors import UserError
from antiphon.base.system import raise_limit
from antiphon.bench.harness.contest import ContestColumns, UpTo, milliseconds, share
from antiphon.bench.harness.quiet import Repetitions, repeat_until_quiet
from antiphon.bench.openai_peer import REQUEST_TIMEOUT_S, OpenAIPeer, inter_token_s
from antiphon.bench.serving_peers import PeerError
from antiphon.models.config import load_model_spec
from antiphon.sim.serving_options import Demand, draw_demand
from antiphon.specs.workload import LengthSpec, WorkloadSpec, load_workload

QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
LATENCIES = ("ttft_s", "tpot_s", "itl_s")


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """Load at given rates. What is None was left out."""

    rate: Annotated[
        str | None, Option(metavar="R,R", help="Load instead: requests/s, sent whatever the server does.")
    ] = None
    lengths: Annotated[
        str | None, Option(metavar="NAME", show_default="sharegpt-like", help="Of load: a workload, a trace, 512x16.")
    ] = None
    requests: Annotated[
        int | None,
        UpTo(65_536),
        Option(metavar="N", show_default="200", help="Of load: requests of a rate and repeat."),
    ] = None
    burstiness: Annotated[
        float | None, Option(metavar="K", show_default="1: Poisson", help="Of load: 1/K is the gaps' variance.")
    ] = None
    slo_ttft: Annotated[
        float | None, Option(metavar="S", show_default="the workload's", help="Of load: first token.")
    ] = None
    slo_tpot: Annotated[
        float | None, Option(metavar="S", show_default="the workload's", help="Of load: time per token.")
    ] = None
    repeats: Annotated[
        int | None, UpTo(1000), Option(metavar="N", show_default="3", help="Of load: repeats of a rate.")
    ] = None
    html: Annotated[Path | None, Option(metavar="FILE", help="Of load: write a page with curves.")] = None
    nodes: Annotated[
        int | None, UpTo(16), Option(metavar="N", show_default="this machine", help="Of load: nodes of a box.")
    ] = None
    mbit: Annotated[
        float | None, Option(metavar="R", show_default="100", help="Of load: links of the nodes, 10^6 bits/s.")
    ] = None

    def refuse_without_rate(self) -> None:
        """`UserError` if something of load is asked for, and no load."""
        if named := [f"--{name.replace('_', '-')}" for name, value in vars(self).items() if value is not None]:
            raise UserError(f"{', '.join(named)}: only of load, so give --rate too, or leave it out")


@dataclass(frozen=True, kw_only=True)
class LoadCase:
    """`num_requests` requests of `workload`, whose promises are its `slo`, at each of `rates`, `num_repeats` times."""

    workload: WorkloadSpec
    rates: tuple[float, ...]
    num_requests: int = 200
    burstiness: float = 1.0
    num_repeats: int = 3

    def demand(self, rate: float, repeat: int) -> Demand:
        return draw_demand(
            self.workload, num_requests=self.num_requests, rate=rate, burstiness=self.burstiness, seed=repeat
        )


def load_case(options: LoadOptions, model: Path) -> LoadCase:
    """What the options say, cut to the model's context. `UserError` names the option and its limit."""
    workload = _workload(options.lengths or "sharegpt-like")
    limit = load_model_spec(model).max_position
    slo = workload.slo
    for name, value in (("ttft_s", options.slo_ttft), ("tpot_s", options.slo_tpot)):
        if value is not None:
            slo = replace(slo, **{name: _positive(f"--slo-{name[:-2]}", value, "seconds")})
    return LoadCase(
        workload=replace(workload, slo=slo, max_length=min(limit, workload.max_length or limit)),
        rates=tuple(_rate(text) for text in (options.rate or "").split(",")),
        num_requests=200 if options.requests is None else options.requests,
        burstiness=1.0 if options.burstiness is None else _positive("--burstiness", options.burstiness, ""),
        num_repeats=3 if options.repeats is None else options.repeats,
    )


def _workload(text: str) -> WorkloadSpec:
    """``"512x16"``: prompts of 512 tokens, answers of 16. Else what is shipped by that name, or the file."""
    if (fixed := re.fullmatch(r"([1-9]\d{0,9})x([1-9]\d{0,9})", text)) is None:
        return load_workload(text)
    input_tokens, output_tokens = (LengthSpec(median=int(part)) for part in fixed.groups())
    return WorkloadSpec(name=text, input_tokens=input_tokens, output_tokens=output_tokens)


def _rate(text: str) -> float:
    try:
        rate = float(text)
    except ValueError:
        raise UserError(f"--rate {text!r}: write numbers of requests per second, for example 2,4,8") from None
    return _positive("--rate", rate, "requests per second")


def _positive(option: str, value: float, unit: str) -> float:
    if not 0 < value < math.inf:
        raise UserError(f"{option} is {value:g}: it must be above 0 {unit}".rstrip())
    return value


@dataclass(frozen=True, kw_only=True)
class LoadedRequest:
    """`token_s`: when each token came, from when the request was due; empty if it failed, for the reason `error`.
    `late_s`: how long after that the client sent it."""

    token_s: tuple[float, ...]
    late_s: float
    error: str | None = None

    @property
    def ttft_s(self) -> float:
        return self.token_s[0]

    @property
    def gaps_s(self) -> list[float]:
        return [after - before for before, after in itertools.pairwise(self.token_s)]

    @property
    def tpot_s(self) -> float | None:
        """Mean time of a token after the first; None of a single token."""
        return fmean(self.gaps_s) if len(self.token_s) > 1 else None


@dataclass(frozen=True, kw_only=True)
class LoadRun:
    """One repeat: the requests in order of arrival, and seconds from the first arrival to the last token."""

    requests: tuple[LoadedRequest, ...]
    took_s: float

    @property
    def answered(self) -> list[LoadedRequest]:
        return [request for request in self.requests if request.error is None]

    def values(self, name: str) -> list[float]:
        """All values of one of `LATENCIES`: one a request, of gaps one a token."""
        if name == "itl_s":
            return [gap for request in self.answered for gap in request.gaps_s]
        found = (getattr(request, name) for request in self.answered)
        return [value for value in found if value is not None]

    def num_kept(self, ttft_s: float | None, tpot_s: float | None) -> int:
        """Requests that were answered and kept both promises; None promises nothing."""
        return sum(
            (ttft_s is None or request.ttft_s <= ttft_s)
            and (tpot_s is None or request.tpot_s is None or request.tpot_s <= tpot_s)
            for request in self.answered
        )


def run_load(peer: OpenAIPeer, demand: Demand, vocab_size: int, seed: int) -> LoadRun:
    """Send every request at its moment; blocks until all are answered or failed, each for 900 s at most."""
    generator = np.random.default_rng([seed, len(demand)])
    prompts = [generator.integers(vocab_size, size=int(length)).tolist() for length in demand.input_tokens]
    return asyncio.run(_all_requests(peer, demand, prompts))


async def _all_requests(peer: OpenAIPeer, demand: Demand, prompts: Sequence[list[int]]) -> LoadRun:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(timeout=REQUEST_TIMEOUT_S, limits=limits, trust_env=False) as client:
        begin = time.perf_counter()

        async def one(arrival_s: float, prompt: list[int], output_tokens: int) -> LoadedRequest:
            due = begin + arrival_s
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            late_s = time.perf_counter() - due
            try:
                stream = await peer.stream(client, prompt, output_tokens)
            except PeerError as error:
                return LoadedRequest(token_s=(), late_s=late_s, error=str(error))
            first_s = stream.arrivals_s[0] - due
            times = itertools.accumulate(inter_token_s(stream), initial=first_s)
            return LoadedRequest(token_s=tuple(times), late_s=late_s)

        columns = (demand.arrivals_s - demand.arrivals_s[0], demand.input_tokens, demand.output_tokens)
        arrivals, _, outputs = (column.tolist() for column in columns)
        requests = await asyncio.gather(*map(one, arrivals, prompts, outputs))
        return LoadRun(requests=tuple(requests), took_s=time.perf_counter() - begin)


def bench_load(
    model: Path, peers: Sequence[OpenAIPeer], case: LoadCase, *, say: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Rows of `bench serve --rate`. A contestant whose requests all failed is named once, with the reason."""
    raise_limit()
    for peer in peers:
        peer.start()
    vocab_size = load_model_spec(model).vocab_size
    pids = [peer.pid for peer in peers if peer.pid is not None]
    rows = []
    for rate in case.rates:
        say(f"{rate:g} requests/s: {case.num_repeats} x {case.num_requests} requests for each contestant")
        turns = {peer.name: partial(_next_run, peer, case, rate, itertools.count(), vocab_size) for peer in peers}
        outcomes = repeat_until_quiet(
            turns, num_required=case.num_repeats, max_rounds=case.num_repeats, extra_root_pids=pids
        )
        for name, repetitions in outcomes.items():
            row = load_row(name, rate, repetitions, case)
            rows.append(row)
            if row["num_failed"]:
                reasons = [each.error for one in repetitions.all for each in one.value.requests if each.error]
                say(f"{name}: {row['num_failed']} requests failed, the first: {reasons[0]}")
    return rows


def _next_run(peer: OpenAIPeer, case: LoadCase, rate: float, repeats: Iterator[int], vocab_size: int) -> LoadRun:
    repeat = next(repeats)
    return run_load(peer, case.demand(rate, repeat), vocab_size, repeat)


def load_row(name: str, rate: float, repetitions: Repetitions[LoadRun], case: LoadCase) -> dict[str, Any]:
    """All figures of a contestant at a rate; those of latency are None if no request was answered."""
    runs = [repetition.value for repetition in repetitions.all]
    slo = case.workload.slo
    kept = [run.num_kept(slo.ttft_s, slo.tpot_s) for run in runs]
    num_requests = sum(len(run.requests) for run in runs)
    return {
        "engine": name,
        "rate": rate,
        **{latency: spread([run.values(latency) for run in runs]) for latency in LATENCIES},
        "output_tokens_per_s": fmean(sum(len(r.token_s) for r in run.answered) / run.took_s for run in runs),
        "requests_per_s": fmean(len(run.answered) / run.took_s for run in runs),
        "goodput_requests_per_s": fmean(count / run.took_s for count, run in zip(kept, runs, strict=True)),
        "attained": sum(kept) / num_requests,
        "num_requests": num_requests,
        "num_failed": num_requests - sum(len(run.answered) for run in runs),
        "late_s": max(request.late_s for run in runs for request in run.requests),
        "foreign_cpu_share": repetitions.foreign_share,
        "repetitions": len(runs),
    }


def spread(repeats: Sequence[Sequence[float]]) -> dict[str, Any] | None:
    """Mean and quantiles, each the mean over repeats, and under `std` their standard deviation over repeats."""
    found = [_statistics(values) for values in repeats if values]
    if not found:
        return None
    columns = {key: [each[key] for each in found] for key in found[0]}
    means: dict[str, Any] = {key: fmean(values) for key, values in columns.items()}
    return means | {"std": {key: pstdev(values) for key, values in columns.items()}}


def _statistics(values: Sequence[float]) -> dict[str, float]:
    cuts = np.quantile(np.asarray(values), list(QUANTILES.values()))
    return {"mean": fmean(values), **dict(zip(QUANTILES, map(float, cuts), strict=True))}


def best_within(rows: Sequence[Mapping[str, Any]], tpot_s: float) -> dict[str, float | None]:
    """By contestant: the most output tokens a second at a rate whose median time per token keeps `tpot_s`, as
    MegaScale-Infer counts throughput; None if no rate does."""
    best: dict[str, float | None] = dict.fromkeys((row["engine"] for row in rows), None)
    for row in rows:
        if row["tpot_s"] is not None and row["tpot_s"]["p50"] <= tpot_s:
            best[row["engine"]] = max(best[row["engine"]] or 0.0, row["output_tokens_per_s"])
    return best


def _ms(name: str, quantile: str) -> Callable[[Mapping[str, Any]], object]:
    """A latency's quantile, and behind it its standard deviation over repeats."""

    def shown(row: Mapping[str, Any]) -> str | None:
        values = row[name]
        return None if values is None else f"{values[quantile] * 1e3:.1f} ±{values['std'][quantile] * 1e3:.1f}"

    return shown


COLUMNS = ContestColumns(
    (
        ("engine", "engine"),
        ("req/s", lambda row: f"{row['rate']:g}"),
        ("done/s", lambda row: f"{row['requests_per_s']:.2f}"),
        ("out tok/s", lambda row: f"{row['output_tokens_per_s']:.0f}"),
        ("TTFT p50", _ms("ttft_s", "p50")),
        ("p99", _ms("ttft_s", "p99")),
        ("TPOT p50", _ms("tpot_s", "p50")),
        ("p99", _ms("tpot_s", "p99")),
        ("ITL p99", _ms("itl_s", "p99")),
        ("kept", share("attained")),
        ("good/s", lambda row: f"{row['goodput_requests_per_s']:.2f}"),
        ("late", milliseconds("late_s")),
        ("foreign", share("foreign_cpu_share")),
    ),
    title="Latencies in ms, ± their deviation over repeats",
)
