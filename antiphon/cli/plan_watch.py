"""`antiphon plan PLAN --watch URL`: a running server's load against its plan, look after look."""

import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import httpx
import typer
from prometheus_client.parser import text_string_to_metric_families

from antiphon.base.errors import UserError
from antiphon.base.units import format_seconds
from antiphon.cli.output import emit_json, show
from antiphon.cli.plan_inputs import parse_target
from antiphon.cli.top import ask, client_of
from antiphon.models.planned import planned_model
from antiphon.planner.replan import Replanned, SeenLoad, is_other, replan, watched_phase
from antiphon.specs.plan import PhasePlan, Plan, read_plan

ENOUGH = 0.5
"""Requests that must end in a look for their lengths to be known, of those in flight."""
_COUNTED = ("antiphon:requests_finished_total", "antiphon:prompt_tokens_total", "antiphon:generation_tokens_total")
_STARTED = "antiphon:request_queue_time_seconds_count"  # requests whose prompts prompt_tokens counts
_TIMES = ("antiphon:time_to_first_token_seconds", "antiphon:inter_token_latency_seconds")
_HELD = ("antiphon:num_requests_running", "antiphon:num_requests_waiting")


@dataclass(frozen=True, kw_only=True)
class WatchOptions:
    """A running server beside its plan."""

    watch: Annotated[
        str | None, typer.Option(metavar="URL", show_default=False, help="MODEL is a plan; compare its server's load.")
    ] = None
    look_every: Annotated[str, typer.Option(metavar="TIME", hidden=True, help="Length of a look.")] = "60s"
    looks: Annotated[int | None, typer.Option(metavar="N", min=1, hidden=True, help="End after N looks.")] = None
    move_time: Annotated[str, typer.Option(metavar="TIME", hidden=True, help="A restart takes so long.")] = "60s"


def watch(file: Path, options: WatchOptions, json: str | None) -> None:
    """A line for each look, until Ctrl-C or `--looks`."""
    found = read_plan(file)
    watched_phase(found)
    if not found.model_config:
        raise UserError(f"{file} does not hold its model's config.json: make it again with antiphon plan")
    every_s, move_s = _time("--look-every", options.look_every), _time("--move-time", options.move_time)
    with client_of(None) as client, suppress(KeyboardInterrupt):
        for number, load in enumerate(_loads(client, options.watch or "", every_s)):
            if isinstance(load, UserError):
                show(f"this look is skipped: {load}", json=json)
                emit_json(json, {"load": None, "gain": None, "pays_after_s": None})
            else:
                look(found, load, move_s, json)
            if options.looks is not None and number + 1 >= options.looks:
                return


def look(plan: Plan, load: SeenLoad, move_s: float, json: str | None) -> None:
    """Compare one load, and say what it says."""
    if not load.num_requests:
        _say_only(f"no request ended within {format_seconds(load.seconds)}", load, json)
        return
    if load.num_requests < ENOUGH * load.in_flight or not load.input_tokens:
        few = f"too few to tell: {load.num_requests} requests ended within {format_seconds(load.seconds)}"
        _say_only(f"{few}, {load.in_flight:.0f} are in flight; lengthen the looks with --look-every", load, json)
        return
    seen = (
        f"{load.num_requests / load.seconds:.3g} requests/s of {load.input_tokens:.0f} + {load.output_tokens:.0f} "
        f"tokens, {load.in_flight:.0f} in flight"
    )
    found = replan(plan, planned_model(plan.model_config).spec, load, move_s)
    show(f"{seen}: {verdict(plan, found, move_s)}", json=json)
    running = plan.phases[watched_phase(plan)] if found.running is None else found.running
    facts = {
        "running": layout_words(running),
        "best": None if found.best is None else layout_words(found.best),
        "broken": list(found.broken),
        "gain": found.gain,
        "pays_after_s": found.pays_after_s,
    }
    emit_json(json, {"load": asdict(load), **facts})


def _say_only(text: str, load: SeenLoad, json: str | None) -> None:
    """A look without a verdict."""
    show(text, json=json)
    emit_json(json, {"load": asdict(load), "gain": None, "pays_after_s": None})


def verdict(plan: Plan, found: Replanned, move_s: float) -> str:
    """Stay, or move and after what time it has paid; or that a promise is broken, and by what it would be kept."""
    planned = plan.phases[watched_phase(plan)]
    running = layout_words(planned if found.running is None else found.running)
    if found.broken:
        return f"{running} breaks its promise: {'; '.join(found.broken)}. {_kept_by(planned, found, move_s)}"
    if found.best is None or found.gain is None:
        return f"stay with {running}: it keeps its promise; by the model no layout does: {found.missing}"
    best = layout_words(found.best)
    if found.pays_after_s is None:
        return f"stay with {running}; the best, {best}, is {found.gain:.2f} times as good ({plan.objective})"
    return (
        f"{best} would be {found.gain:.2f} times as good as {running} ({plan.objective}); moving takes "
        f"{format_seconds(move_s)} and pays after {format_seconds(found.pays_after_s)} of such a load"
    )


def _kept_by(planned: PhasePlan, found: Replanned, move_s: float) -> str:
    """What to do where a promise is broken."""
    if found.best is None:
        return f"No layout keeps it: {found.missing}"
    at_once = f"with at most {found.best.batch * found.best.num_instances:,} requests at once"
    if not is_other(found.best, planned):
        return f"It would keep it {at_once}: the others would wait"
    return f"{layout_words(found.best)} would keep it {at_once}; moving takes {format_seconds(move_s)}"


def layout_words(phase: PhasePlan) -> str:
    """``disaggregated 2+1, m 3``: degrees of one instance that are not 1."""
    parallel = phase.parallel
    degrees = [f"{name} {value}" for name, value in asdict(parallel).items() if value > 1]
    instances = f"{phase.num_instances} x " if phase.num_instances > 1 else ""
    turns = f"m {phase.micro_batches}" if phase.micro_batches > 1 else ""
    return ", ".join(filter(None, [f"{instances}{phase.layout}", *degrees, turns])).replace("_", " ")


def _loads(client: httpx.Client, url: str, every_s: float) -> Iterator[SeenLoad | UserError]:
    """What came in each interval, without end; or why a look found nothing. After one that could not read, the next is
    longer. `UserError` if the first reading fails."""
    before, began_s = read_counters(client, url), time.monotonic()
    while True:
        time.sleep(every_s)
        try:
            after, now_s = read_counters(client, url), time.monotonic()
        except UserError as error:
            yield error
            continue
        try:
            found: SeenLoad | UserError = load_between(before, after, now_s - began_s)
        except UserError as error:
            found = error
        before, began_s = after, now_s
        yield found


def read_counters(client: httpx.Client, url: str) -> dict[str, float]:
    """Sums over labels. `UserError` if the server cannot be reached, or is not one of ours."""
    address = f"{url.rstrip('/')}/metrics"
    answer = ask(url, lambda: client.get(address))
    if answer.status_code != 200:
        raise UserError(f"--watch {url}: {address} answers {answer.status_code}: is it a server of antiphon?")
    found: dict[str, float] = {}
    try:
        for family in text_string_to_metric_families(answer.text):
            for sample in family.samples:
                found[sample.name] = found.get(sample.name, 0.0) + sample.value
    except ValueError as error:
        raise UserError(f"--watch {url}: {address} answers no metrics: is it a server of antiphon?") from error
    if missing := [name for name in (*_COUNTED[1:], _STARTED, *_HELD) if name not in found]:
        raise UserError(f"--watch {url}: its metrics lack {missing[0]}: is it a server of antiphon?")
    return found


def load_between(before: dict[str, float], after: dict[str, float], seconds: float) -> SeenLoad:
    """`UserError` where counters went back: the server was started anew. Prompts are counted when they are first
    scheduled, so they are divided by how many were. Tokens come from all that run: divided by how many ended they are
    a length only where a good part has ended (`look`)."""
    counters = (*_COUNTED, _STARTED)
    ended, prompts, outputs, started = (after.get(name, 0.0) - before.get(name, 0.0) for name in counters)
    if min(ended, prompts, outputs, started) < 0:
        raise UserError("the server was started anew meanwhile")
    in_flight = sum(reading[name] for reading in (before, after) for name in _HELD) / 2
    ttft_s, tpot_s = (_mean(before, after, name) for name in _TIMES)
    return SeenLoad(
        ttft_s=ttft_s,
        tpot_s=tpot_s,
        seconds=seconds,
        num_requests=round(ended),
        input_tokens=prompts / max(1.0, started),
        output_tokens=outputs / max(1.0, ended),
        in_flight=in_flight,
    )


def _mean(before: dict[str, float], after: dict[str, float], name: str) -> float | None:
    """The mean of what a histogram counted between two readings; None if that is nothing."""
    total, count = (after.get(f"{name}_{end}", 0.0) - before.get(f"{name}_{end}", 0.0) for end in ("sum", "count"))
    return total / count if count > 0 else None


def _time(option: str, text: str) -> float:
    seconds = parse_target(option, text)
    if seconds is None:
        raise UserError(f"{option} is {text!r}: write seconds, for example 60s")
    return seconds
