"""Two plans side by side: the question each answers, its layout, its numbers, and the ratio of what can be compared.

Rejected: predicting both anew with the code at hand. A plan that was measured or published should be compared as it is;
`antiphon simulate` says how it would do now.
"""

from collections.abc import Iterator, Mapping

from rich.console import RenderableType
from rich.text import Text

from antiphon.report.summary import FACTS, facts
from antiphon.report.terminal import heading, plain_table
from antiphon.report.words import OBJECTIVE_UNITS, PHASE_TITLES, number, score
from antiphon.specs.plan import PHASES, PhaseName, PhasePlan, Plan, Predicted

RATIOS: tuple[tuple[str, str], ...] = (
    ("time per output token", "tpot_s"),
    ("time to first token", "ttft_s"),
    ("tokens/s", "tokens_per_s"),
    ("  per device", "per_gpu"),
    ("  per unit of price", "per_cost"),
    ("  per watt", "per_power"),
    ("attention, a layer", "t_a_s"),
    ("experts, a layer", "t_e_s"),
    ("exchange, one way", "t_c_s"),
)
NEARLY_EQUAL = 0.02


def comparison_report(first: Plan, second: Plan, names: tuple[str, str]) -> Iterator[RenderableType]:
    """What to print, in order. `names`: how the two are called."""
    shared = [name for name in PHASES if name in first.phases and name in second.phases]
    if differs := different_questions(first, second):
        yield Text(f"these plans answer different questions: {'; '.join(differs)}")
    for name in shared:
        yield Text(f"{PHASE_TITLES[name]}: {sentence(first, second, name, names)}", style="bold")
    for name, phases in ((name, (first.phases.get(name), second.phases.get(name))) for name in PHASES):
        if any(phases):
            yield heading(PHASE_TITLES[name])
            yield plain_table(["", *names, f"{names[1]} of {names[0]}"], _rows(name, *phases), right=(3,))


def different_questions(first: Plan, second: Plan) -> list[str]:
    """What the plans were asked that is not the same."""
    found = []
    for what, mine, theirs in (
        ("model", _about(first.model, first.model_config), _about(second.model, second.model_config)),
        ("cluster", _about(first.cluster, first.cluster_config), _about(second.cluster, second.cluster_config)),
        ("workload", _about(first.workload, first.workload_config), _about(second.workload, second.workload_config)),
        ("objective", _about(first.objective, {}), _about(second.objective, {})),
        ("precision", _about("", vars(first.precision)), _about("", vars(second.precision))),
    ):
        if mine[1] and theirs[1] and mine != theirs:
            keys = sorted(key for key in {*mine[1], *theirs[1]} if mine[1].get(key) != theirs[1].get(key))
            found.append(f"{what} ({', '.join(keys)})")
        elif mine[0] != theirs[0]:
            found.append(f"{what} ({mine[0]}, {theirs[0]})")
    return found


def _about(name: str, contents: Mapping[str, object]) -> tuple[str, dict[str, object]]:
    return name, dict(contents)


def sentence(first: Plan, second: Plan, name: PhaseName, names: tuple[str, str]) -> str:
    """Which of the two is better by the first one's objective, and by how much."""
    mine, theirs = (score(plan.phases[name].predicted, first.objective) for plan in (first, second))
    unit = OBJECTIVE_UNITS[first.objective]
    if not mine or not theirs:
        return f"{unit} are not known of both"
    better, worse = (names[1], names[0]) if theirs > mine else (names[0], names[1])
    ratio = max(mine, theirs) / min(mine, theirs)
    if ratio <= 1 + NEARLY_EQUAL:
        return f"{names[0]} and {names[1]} are within 2% of each other in {unit}: no model of costs tells them apart"
    return f"{better} gives {number(ratio)} times the {unit} of {worse}"


def _rows(name: PhaseName, first: PhasePlan | None, second: PhasePlan | None) -> list[list[str]]:
    told = [{} if phase is None else dict(facts(name, phase)) for phase in (first, second)]
    ratios = {} if first is None or second is None else _ratios(first.predicted, second.predicted)
    order = [*FACTS, *(key for each in told for key in each if key not in FACTS)]
    return [
        [key, told[0].get(key, "-"), told[1].get(key, "-"), ratios.get(key, "")]
        for key in dict.fromkeys(order)
        if any(key in each for each in told)
    ]


def _ratios(first: Predicted, second: Predicted) -> dict[str, str]:
    pairs = {key: (getattr(first, field), getattr(second, field)) for key, field in RATIOS}
    return {key: f"{theirs / mine:.2f} ×" for key, (mine, theirs) in pairs.items() if mine and theirs}
