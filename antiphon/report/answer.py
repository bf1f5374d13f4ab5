"""The answer at the top of a plan's page: a sentence, three numbers, what they count, what it takes, sources."""

from datetime import UTC, datetime

from antiphon.report.contents import PhaseContents, Report
from antiphon.report.summary import NEARLY_EQUAL
from antiphon.report.words import LAYOUT_TITLES, OBJECTIVE_UNITS, devices_text, milliseconds, number, plural, score
from antiphon.specs.plan import Objective, Predicted

Pairs = list[tuple[str, str]]


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
    phase = contents.phase
    apart = phase.layout == "disaggregated"
    rates = {
        loser.layout: rate
        for loser in phase.rejected
        if (loser.layout == "disaggregated") != apart
        if loser.predicted is not None and (rate := score(loser.predicted, objective))
    }
    mine = score(phase.predicted, objective)
    if not rates or not mine:
        return ""
    best = max(rates, key=lambda layout: rates[layout])
    unit, ratio = OBJECTIVE_UNITS[objective], f"{rates[best] / mine:.2f}"
    if apart:
        gains = ": " if rates[best] <= NEARLY_EQUAL * mine else ", which gains little: "
        return f"{gains}{mine / rates[best]:.2f} times the {unit} of the best {LAYOUT_TITLES[best]}"
    return f"; attention and experts apart would give {ratio} times its {unit}"


def three_numbers(report: Report) -> Pairs:
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
    predicted: Predicted = contents.phase.predicted
    is_decode = contents.name == "decode"
    latency_s = predicted.tpot_s if is_decode else predicted.ttft_s
    return [
        ("a token" if is_decode else "to the first token", milliseconds(latency_s)),
        ("tokens/s", number(predicted.tokens_per_s)),
        (OBJECTIVE_UNITS[objective], number(score(predicted, objective))),
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


def sources(report: Report, now: datetime | None = None) -> Pairs:
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
