"""What a plan says in words and rows: sentences, facts, why layouts lost, what it takes, sources."""

import math
import re
from datetime import UTC, datetime

from antiphon.base.units import milliseconds, number
from antiphon.report.gather import PhaseContents, Report
from antiphon.report.words import (
    LAYOUT_TITLES,
    OBJECTIVE_UNITS,
    PHASE_TITLES,
    degrees_text,
    devices_text,
    latency_s,
    latency_text,
    plural,
    short_degrees,
)
from antiphon.specs.counts import count_parameters
from antiphon.specs.plan import ONE_POOL, TWO_POOLS, Objective, PhaseName, PhasePlan, Rejected

NEARLY_EQUAL = 0.95
PAGE_LOSER_COLUMNS = ("layout", "sizes", "devices", "latency", "rate", "against the plan", "four of five")


def headline(contents: PhaseContents, objective: Objective) -> str:
    """The answer in one sentence."""
    phase, predicted = contents.phase, contents.phase.predicted
    copies = f"{plural(phase.num_instances, 'instance')} of " if phase.num_instances > 1 else ""
    return (
        f"{PHASE_TITLES[contents.name]}: {LAYOUT_TITLES[phase.layout]}, {copies}"
        f"{degrees_text(phase.layout, phase.parallel)}: {latency_text(predicted)}, "
        f"{number(predicted.tokens_per_s)} tokens/s, {number(predicted.score(objective))} {OBJECTIVE_UNITS[objective]}"
    )


def verdict(contents: PhaseContents, objective: Objective) -> str:
    """Whether attention and experts should be apart here, and what that is worth; empty if only one was searched."""
    phase = contents.phase
    others = _other_side(phase)
    if not others:
        return ""
    apart, found = phase.layout == "disaggregated", _against_other_side(phase, objective)
    if found is None:
        colocated = "Disaggregate here: no colocated layout meets the constraints"
        return colocated if apart else f"Do not disaggregate here: {others[0].reason}"
    mine, best, loser = found
    other, unit = LAYOUT_TITLES[loser.layout], OBJECTIVE_UNITS[objective]
    if apart and mine < best:
        return f"Disaggregate here, beside the other phase; alone {other} gives {best / mine:.2f} times as much"
    if _spans_equal(phase, loser, objective):
        way = f"together, as {other}," if apart else "apart"
        compared = f"{way} would give {best / mine:.2f} times the {unit}, which the model cannot tell from equal"
        return f"Too close to call whether to disaggregate: {compared}"
    if apart:
        return f"Disaggregate here: {mine / best:.2f} times the best {other} in {unit}"
    why = f"{loser.reason[:1].upper()}{loser.reason[1:]}"
    return f"Do not disaggregate here: apart would give {best / mine:.2f} times the {unit}. {why}"


def _against_other_side(phase: PhasePlan, objective: Objective) -> tuple[float, float, Rejected] | None:
    """(the plan's rate, the best one of layouts on the other side, which that is); None where one is not known."""
    others = [(rate, one) for one in _other_side(phase) if one.predicted and (rate := one.predicted.score(objective))]
    mine = phase.predicted.score(objective)
    return (mine, *max(others, key=lambda pair: pair[0])) if mine and others else None


def ratio_band(phase: PhasePlan, loser: Rejected, objective: Objective) -> tuple[float, float] | None:
    """Between what a loser's rate, to the plan's, is expected to lie four times of five; None where one has no rate.

    All of both predictions' spread counts, not that of their parts: the one public measurement of experts apart beside
    wide expert parallelism has the other sign than this model, whose pipeline has no stalls."""
    mine, theirs = phase.predicted.score(objective), loser.predicted and loser.predicted.score(objective)
    if not mine or not theirs or loser.predicted is None:
        return None
    spread = math.hypot(phase.predicted.band or 0.0, loser.predicted.band or 0.0) / math.sqrt(2)
    return theirs / mine / (1 + spread), theirs / mine * (1 + spread)


def _spans_equal(phase: PhasePlan, loser: Rejected, objective: Objective) -> bool:
    found = ratio_band(phase, loser, objective)
    return found is not None and found[0] < 1 < found[1]


def _other_side(phase: PhasePlan) -> list[Rejected]:
    """Layouts that lost and answer the question "apart or together" the other way."""
    apart = phase.layout == "disaggregated"
    return [loser for loser in phase.rejected if (loser.layout == "disaggregated") != apart]


def all_facts(name: PhaseName, phase: PhasePlan) -> dict[str, str]:
    """A phase of a plan by name, in the order in which it is shown; what it has not is empty."""
    predicted = phase.predicted

    def time(value: float | None) -> str:
        return "" if value is None else milliseconds(value)

    return {
        "layout": LAYOUT_TITLES[phase.layout],
        "instances": f"{phase.num_instances:,}",
        "sizes of one": degrees_text(phase.layout, phase.parallel),
        "devices": devices_text(phase.devices),
        "micro-batches": f"{phase.micro_batches}",
        "batch of one instance": plural(phase.batch, "token" if name == "prefill" else "request"),
        "rows of a worker's step": f"{phase.step_tokens:,} at most" if phase.step_tokens else "",
        "time per output token": time(predicted.tpot_s),
        "time to first token": time(predicted.ttft_s),
        "of it in the queue": time(predicted.queueing_s),
        "tokens/s": number(predicted.tokens_per_s),
        "  per device": number(predicted.per_gpu),
        "  per unit of price": number(predicted.per_cost),
        "  per watt": number(predicted.per_power),
        "attention, a layer": time(predicted.t_a_s),
        "experts, a layer": time(predicted.t_e_s),
        "exchange, one way": time(predicted.t_c_s),
        **{f"{part} {'wait' if part == 'experts' else 'waits'} for": what for part, what in predicted.bound_by.items()},
    }


def facts(name: PhaseName, phase: PhasePlan) -> list[tuple[str, str]]:
    """Those that the phase has."""
    return [(what, value) for what, value in all_facts(name, phase).items() if value]


def loser_row(loser: Rejected, contents: PhaseContents, objective: Objective) -> tuple[str, ...]:
    """A layout that lost, in the order of `PAGE_LOSER_COLUMNS`."""
    predicted = loser.predicted
    if predicted is None or loser.parallel is None:
        return (LAYOUT_TITLES[loser.layout], *["-"] * (len(PAGE_LOSER_COLUMNS) - 1))
    rate, mine = predicted.score(objective), contents.phase.predicted.score(objective)
    band = ratio_band(contents.phase, loser, objective)
    return (
        LAYOUT_TITLES[loser.layout],
        short_degrees(loser.layout, loser.parallel),
        " + ".join(f"{use.num_devices:,} × {use.device}" for use in loser.devices) or "-",
        milliseconds(latency_s(predicted)),
        number(rate),
        f"{rate / mine:.2f} ×" if rate and mine else "-",
        "-" if band is None else f"{band[0]:.2f} to {band[1]:.2f}",
    )


def reasons(losers: tuple[Rejected, ...]) -> list[tuple[str, str]]:
    """(layouts, why they lost); reasons that differ in nothing but numbers are one, with the first one's numbers."""
    merged: dict[str, list[Rejected]] = {}
    for loser in losers:
        merged.setdefault(re.sub(r"[0-9][0-9.,e+-]*", "#", loser.reason), []).append(loser)
    return [(_titles([LAYOUT_TITLES[loser.layout] for loser in alike]), alike[0].reason) for alike in merged.values()]


def _titles(layouts: list[str]) -> str:
    return layouts[0] if len(layouts) == 1 else f"{layouts[0]}; alike: {', '.join(layouts[1:])}"


def placement_summary(phase: PhasePlan) -> str:
    """How many experts lie where: ``160 experts on 40 workers, 4 each; 12 experts have replicas``."""
    if not phase.placement:
        return ""
    held: dict[int, int] = {}
    for owners in phase.placement:
        for worker, _ in owners:
            held[worker] = held.get(worker, 0) + 1
    fewest, most = min(held.values()), max(held.values())
    each = "" if len(held) == 1 else f", {most} each" if fewest == most else f", {fewest} to {most} each"
    replicated = sum(len(owners) > 1 for owners in phase.placement)
    copies = f"; {plural(replicated, 'expert')} with replicas" if replicated else ""
    where = plural(len(held), "worker" if phase.layout == "disaggregated" else "rank")
    return f"{plural(len(phase.placement), 'expert')} on {where}{each}{copies}"


def subtitle(report: Report) -> str:
    """Model, cluster and workload in one line."""
    workload = report.workload
    lengths = f"{workload.input_tokens.mean:,.0f} tokens in, {workload.output_tokens.mean:,.0f} out on average"
    rate = f", {workload.requests_per_s:g} requests/s" if workload.requests_per_s else ""
    slo = workload.slo
    targets = [f"{name} {milliseconds(value)}" for name, value in (("TTFT", slo.ttft_s), ("TPOT", slo.tpot_s)) if value]
    promise = f"; targets at percentile {slo.percentile:g}: {', '.join(targets)}" if targets else "; no latency target"
    return f"{report.plan.model} on {report.plan.cluster}, workload {report.plan.workload}: {lengths}{rate}{promise}"


def scope(report: Report) -> str:
    """What the numbers count."""
    names: list[PhaseName] = [contents.name for contents in report.phases]
    if len(names) > 1:
        return "End to end: prefill and decode, each with its own devices, sized for the same requests/s"
    return {
        "decode": "Decode only: prefill is not counted",
        "prefill": "Prefill only: decode is not counted",
        "serve": "End to end: prompts and tokens in the same steps, on the same devices",
    }[names[0]]


def one_pool_or_two(report: Report) -> str:
    """Whether prompts and tokens run on the same servers, and what the other way would give; empty where only one way
    was looked at."""
    notes = report.phases[0].phase.notes
    said = next((note for note in notes if note.startswith((f"{ONE_POOL}:", f"{TWO_POOLS}:"))), "")
    return said[:1].upper() + said[1:]


def one_request(report: Report) -> str:
    """What a mean request gets, from its arrival to its last token; empty where a plan is of a part of that."""
    rate = report.plan.request_tokens_per_s
    return "" if rate is None else f"One request: {number(rate)} tokens/s, prompt and output over all its time"


def given(report: Report) -> str:
    """The model's size, the machines, the number formats: what the plan was made from, in one line."""
    counts, precision = count_parameters(report.model), report.precision
    nodes = ", ".join(
        f"{plural(group.num_nodes, 'node')} of {group.devices_per_node} {group.device.name}"
        for group in report.cluster.groups
    )
    experts = "" if precision.experts is None else f", experts {precision.experts}"
    experts += " as stored" if precision.stored else ""
    formats = f"weights {precision.weights}{experts}, KV {precision.kv}, computed in {precision.compute}"
    wire = f"rows sent as {precision.dispatch}, back as {precision.combine}"
    spread = report.workload.expert_spread
    loads = f"; an expert's load varies by {spread:.0%} from step to step" if spread else ""
    scale, unit = (1e9, "B") if counts.total >= 1e9 else (1e6, "M")
    sizes = f"{number(counts.total / scale)} {unit} parameters, {number(counts.active / scale)} {unit} active"
    return f"{sizes}; {nodes}; {formats}, {wire}{loads}"


def search_summary(report: Report) -> str:
    """What the search looked at."""
    considered = report.plan.num_candidates
    feasible = sum(contents.num_feasible for contents in report.phases)
    known = f", {feasible:,} of them feasible" if feasible else ""
    return f"{considered:,} candidates considered in {report.plan.search_s:.2f} s{known}"


def answer(report: Report) -> str:
    """What to run on what, and why that."""
    runs = " and ".join(_run(contents) for contents in report.phases)
    if len(report.phases) > 1:
        total, rate = total_devices(report), requests_per_s(report)
        return f"Run {runs}: together they take {number(rate)} requests/s on {plural(total, 'device')}"
    (contents,) = report.phases
    return f"Run {runs}{_why(contents, report.plan.objective)}"


def _run(contents: PhaseContents) -> str:
    phase = contents.phase
    if phase.layout == "disaggregated":
        use = {use.role: f"{use.num_devices:,} × {use.device}" for use in phase.devices}
        return f"{contents.name} with attention on {use.get('attention', '-')} and experts on {use.get('experts', '-')}"
    return f"{contents.name} as {LAYOUT_TITLES[phase.layout]} on {devices_text(phase.devices)}"


def _why(contents: PhaseContents, objective: Objective) -> str:
    """Against the best layout on the other side of the question "apart or together"."""
    found = _against_other_side(contents.phase, objective)
    if found is None:
        return ""
    mine, best, loser = found
    unit = OBJECTIVE_UNITS[objective]
    tie = ", too close to call" if _spans_equal(contents.phase, loser, objective) else ""
    if contents.phase.layout == "disaggregated":
        gains = ": " if best <= NEARLY_EQUAL * mine else ", which gains little: "
        return f"{gains}{mine / best:.2f} times the {unit} of the best {LAYOUT_TITLES[loser.layout]}{tie}"
    return f"; attention and experts apart would give {best / mine:.2f} times its {unit}{tie}"


def three_numbers(report: Report) -> list[tuple[str, str]]:
    """The page's cards."""
    objective = report.plan.objective
    by_name = {contents.name: contents.phase.predicted for contents in report.phases}
    if len(by_name) > 1:
        rate = requests_per_s(report)
        output = next(contents.tokens_per_request for contents in report.phases if contents.name == "decode")
        return [
            ("to the first token", milliseconds(by_name["prefill"].ttft_s)),
            ("a token after it", milliseconds(by_name["decode"].tpot_s)),
            ("output tokens/s per device, of both phases", number(rate * output / total_devices(report))),
        ]
    (contents,) = report.phases
    predicted = contents.phase.predicted
    return [
        ("to the first token" if contents.name == "prefill" else "a token", milliseconds(latency_s(predicted))),
        ("tokens/s", number(predicted.tokens_per_s)),
        (OBJECTIVE_UNITS[objective], number(predicted.score(objective))),
    ]


def requests_per_s(report: Report) -> float:
    """What the slower phase takes."""
    return min(contents.phase.predicted.tokens_per_s / contents.tokens_per_request for contents in report.phases)


def devices_used(report: Report) -> dict[str, int]:
    """Devices by kind, all phases and instances together."""
    counted: dict[str, int] = {}
    for contents in report.phases:
        for use in contents.phase.devices:
            counted[use.device] = counted.get(use.device, 0) + use.num_devices
    return counted


def total_devices(report: Report) -> int:
    return sum(devices_used(report).values())


def totals(report: Report) -> list[tuple[str, str, str, str]]:
    """(device, how many, price, power) of each kind, then of all together; a price that is not stated is unknown."""
    specs = {group.device.name: group.device for group in report.cluster.groups}
    counted = devices_used(report)
    prices = {name: None if (price := specs[name].price) is None else price * count for name, count in counted.items()}
    powers = {name: specs[name].power_w * count for name, count in counted.items()}
    rows = [(name, counted[name], prices[name], powers[name]) for name in counted]
    known = [price for price in prices.values() if price is not None]
    if len(rows) > 1:
        together = sum(known) if len(known) == len(rows) else None
        rows.append(("together", sum(counted.values()), together, sum(powers.values())))
    return [(name, f"{count:,}", number(price), f"{number(watts / 1e3)} kW") for name, count, price, watts in rows]


def sources(report: Report, now: datetime | None = None) -> list[tuple[str, str]]:
    """Where the numbers come from, most important first."""
    rows = []
    if report.profile is not None:
        made = report.profile.created
        rows.append(
            ("measured", f"on {report.profile.machine.name}, {made}{_age(made, now)}; {report.profile.command}")
        )
    found, source = report.cluster.calibrated, report.cluster.efficiency.source
    rows.append((f"calibration{f' of {found}' if found else ''}{_age(found, now)}", source))
    if report.cluster.source:
        rows.append((f"cluster {report.cluster.name}", report.cluster.source))
    for group in report.cluster.groups:
        if group.device.name in devices_used(report) and group.device.sources:
            rows.append((group.device.name, "; ".join(dict.fromkeys(group.device.sources.values()))))
    return rows


def _age(made: str, now: datetime | None) -> str:
    """``, 12 days old``; nothing if `made` is no date."""
    try:
        then = datetime.fromisoformat(made)
    except ValueError:
        return ""
    then = then if then.tzinfo else then.replace(tzinfo=UTC)
    days = ((now or datetime.now(UTC)) - then).days
    return f", {plural(days, 'day')} old" if days > 0 else ", made today"
