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

In a box every node has as many processes of a layout, a thread each, so all layouts have equal hardware (MixServe's
Figure 10, MegaScale-Infer's Figures 8 and 9, whose baselines are layouts too). Processes lie on the nodes in order:
those of attention workers or replicas, rank by rank, then those of expert workers. The server is on node 0 with the
first ones; the others join, as on machines of their own. The client sits on node 0.

Rejected: as many requests in flight as before whatever the server does (closed loop). A slow server would slow its own
load, and its queue would not show. Rejected: nodes for each contestant in turn. A start costs more than a load, and a
server that waits costs nothing.
"""

import asyncio
import itertools
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
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
from antiphon.bench.box import Box
from antiphon.bench.harness.columns import ContestColumns, UpTo, milliseconds, share
from antiphon.bench.harness.processes import (
    ANTIPHON,
    PATIENCE_S,
    check_mbit,
    end_process,
    ready_facts,
    require_box,
    start_here,
    start_on,
    start_workers,
)
from antiphon.bench.harness.quiet import Repetitions, repeat_until_quiet
from antiphon.bench.openai_peer import REQUEST_TIMEOUT_S, OpenAIPeer, inter_token_s
from antiphon.bench.serve import parse_contestant
from antiphon.bench.serving_peers import PeerError
from antiphon.models.config import load_model_spec
from antiphon.planner.local_prediction import LocalChoice
from antiphon.serve.joining import roles_of
from antiphon.sim.demand import Demand, draw_demand
from antiphon.specs.workload import LengthSpec, WorkloadSpec, load_workload

QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
LATENCIES = ("ttft_s", "tpot_s", "itl_s")


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """Load at given rates. Promises that are None are the workload's."""

    rate: Annotated[
        str | None, Option(metavar="R,R", help="Load instead: requests/s, sent whatever the server does.")
    ] = None
    lengths: Annotated[
        str, Option(metavar="NAME", show_default="sharegpt-like", help="Of load: a workload, a trace, 512x16.")
    ] = "sharegpt-like"
    requests: Annotated[
        int, UpTo(65_536), Option(metavar="N", show_default="200", help="Of load: requests of a rate and repeat.")
    ] = 200
    burstiness: Annotated[
        float, Option(metavar="K", show_default="1: Poisson", help="Of load: 1/K is the gaps' variance.")
    ] = 1.0
    slo_ttft: Annotated[
        float | None, Option(metavar="S", show_default="the workload's", help="Of load: first token.")
    ] = None
    slo_tpot: Annotated[
        float | None, Option(metavar="S", show_default="the workload's", help="Of load: time per token.")
    ] = None
    repeats: Annotated[int, UpTo(1000), Option(metavar="N", show_default="3", help="Of load: repeats of a rate.")] = 3
    html: Annotated[Path | None, Option(metavar="FILE", help="Of load: write a page with curves.")] = None
    nodes: Annotated[
        int | None, UpTo(16), Option(metavar="N", show_default="this machine", help="Of load: nodes of a box.")
    ] = None
    mbit: Annotated[
        float | None, Option(metavar="R", show_default="100", help="Of load: links of the nodes, 10^6 bits/s.")
    ] = None


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
    limit = load_model_spec(model).max_position
    workload = _workload(options.lengths, limit)
    slo = workload.slo
    for name, value in (("ttft_s", options.slo_ttft), ("tpot_s", options.slo_tpot)):
        if value is not None:
            slo = replace(slo, **{name: _positive(f"--slo-{name[:-2]}", value, "seconds")})
    return LoadCase(
        workload=replace(workload, slo=slo, max_length=min(limit, workload.max_length or limit)),
        rates=tuple(_rate(text) for text in (options.rate or "").split(",")),
        num_requests=options.requests,
        burstiness=_positive("--burstiness", options.burstiness, ""),
        num_repeats=options.repeats,
    )


def _workload(text: str, limit: int) -> WorkloadSpec:
    """``"512x16"``: prompts of 512 tokens, answers of 16. Else what is shipped by that name, or the file."""
    if (fixed := re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text)) is None:
        return load_workload(text)
    if (total := sum(map(int, fixed.groups()))) > limit:
        raise UserError(
            f"--lengths {text}: {total:,} tokens are more than the model's context of {limit:,}: shorten them"
        )
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
        raise UserError(f"{option} is {value:g}: it must be above 0 {unit}".rstrip() + ", and finite")
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
    if num_cut := sum(case.demand(case.rates[0], repeat).num_cut for repeat in range(case.num_repeats)):
        num_requests, longest = case.num_repeats * case.num_requests, case.workload.max_length or 0
        say(
            f"{num_cut:,} of {num_requests:,} requests are cut to {longest:,} tokens, the model's context or max_length"
        )
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


# --- servers of ours: one for each layout, on this machine, or spread over the nodes of a cluster in a box


_FIRST_PORT = 7700  # where workers join the first contestant; the next port is the next one's


@contextmanager
def own_servers(
    model: Path, contestants: Sequence[str], case: LoadCase, folder: Path, options: Sequence[str], box: Box | None
) -> Iterator[list[OpenAIPeer]]:
    """`antiphon serve` for each contestant, one after the other, with `options` besides; all are ended at the end.

    A contestant is a layout, behind which `:fused` or `:synchronous` may say the form of its prompts' collectives.

    `UserError` with the end of a server's log if it does not start within 300 s, or if a layout's processes cannot be
    shared out evenly over the nodes."""
    choices = [parse_contestant(name.partition(":")[0], "--layouts") for name in contestants]
    spreads = [None if box is None else spread_over_nodes(choice, box.num_nodes) for choice in choices]
    with ExitStack() as stack:
        peers = []
        for index, (name, choice, spread_over) in enumerate(zip(contestants, choices, spreads, strict=True)):
            ready, log = folder / f"{index}.json", folder / f"{index}.log"
            command = [*ANTIPHON, "serve", str(model), *serve_options(choice), "--port", "0", "--json", str(ready)]
            command += ["--max-streams", str(2 * case.num_requests), *options]
            if form := name.partition(":")[2]:
                command += ["--prefill-collectives", form]
            if case.workload.max_batch is not None:
                command += ["--max-running", str(case.workload.max_batch)]
            if box is None or spread_over is None:
                server = start_here(command, log)
            else:
                on_nodes, joined = spread_over
                address = f"{box.address(0)}:{_FIRST_PORT + index}"
                for node, roles in enumerate(joined, start=1):
                    start_workers(box, node, roles, address, log, stack)
                command += ["--threads", "1", "--timeout", str(PATIENCE_S), "--join-address", address]
                server = start_on(box, 0, [*command, *on_nodes], log)
            stack.callback(end_process, server)
            peers.append(OpenAIPeer(str(ready_facts(ready, server, log)["url"]), name=f"antiphon {name}"))
        yield peers


def spread_over_nodes(choice: LocalChoice, num_nodes: int) -> tuple[list[str], list[list[str]]]:
    """Equally many processes of this layout on each node: options of its server, and for each further node the roles of
    its processes. `UserError` if they cannot be: expert workers are whole on a node, and of attention workers only the
    first may lie on several."""
    width = choice.attention_tp * choice.num_stages
    attention, experts = choice.num_attention * width, choice.num_experts * choice.expert_tp
    experts = experts if choice.layout == "disaggregated" else 0
    here, rest = divmod(attention + experts, num_nodes)
    if rest:
        raise UserError(f"--nodes {num_nodes}: {choice} has {attention + experts} processes, not equally many a node")
    elsewhere = roles_of(choice.layout, attention, experts)[here:]
    in_one = here < width
    if (here > width and here < attention and here % width) or elsewhere.count("experts") % choice.expert_tp:
        raise UserError(f"--nodes {num_nodes}: the {here} processes of a node cut a worker of {choice} in two")
    joined_attention = choice.num_attention - (0 if in_one else min(here, attention) // width)
    options = ["--join-workers", f"{joined_attention}+{elsewhere.count('experts') // choice.expert_tp}"]
    if in_one:
        options += ["--ranks-here", str(here)]
    return options, [elsewhere[first : first + here] for first in range(0, len(elsewhere), here)]


def serve_options(choice: LocalChoice) -> list[str]:
    """How `antiphon serve` is asked for that layout."""
    numbers = {"--attention": choice.num_attention, "--tp": choice.attention_tp}
    if choice.layout == "colocated":
        numbers["--pp"] = choice.num_stages
    else:
        numbers["--expert-tp"] = choice.expert_tp
    if choice.layout == "disaggregated":
        numbers |= {"--experts": choice.num_experts, "--micro-batches": choice.num_micro_batches}
    return ["--layout", choice.layout, *(str(word) for pair in numbers.items() for word in pair)]


@contextmanager
def nodes_for(options: LoadOptions) -> Iterator[Box | None]:
    """The nodes that the options ask for; None: this machine as it is. `ResourceError` if there can be no box."""
    if options.nodes is None:
        if options.mbit is not None:
            raise UserError(f"--mbit {options.mbit:g} is of the nodes' links: give --nodes too, or leave it out")
        yield None
        return
    if options.nodes < 2:
        raise UserError(f"--nodes is {options.nodes}: it must be 2 at least")
    mbit = 100.0 if options.mbit is None else options.mbit
    check_mbit("--mbit", mbit)
    require_box("--nodes")
    with Box(num_nodes=options.nodes, mbit=mbit) as box:
        yield box
