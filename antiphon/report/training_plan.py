"""The report of a training plan: its words and rows, and what a terminal and a page show of them.

Terminal:

1. the answer in a sentence, the chosen layout and its predicted rate
2. the step in parts, and the fullest device's memory in parts, as bars
3. the best of every other way to divide a layer, and why it lost
4. with `explain`: the plan with one thing changed at a time, and what was searched

The page has three figures: the step, the fullest device's memory, and MFU of the plan and of every alternative that
fits.

An iteration is split in four: what the pipeline's bubble, exposed exchanges and exposed synchronisation leave is work.
Rejected: the planner's own parts of an iteration beside these. They say what work waits for, which `bound_by` says too.
"""

from collections.abc import Callable, Iterator, Sequence

from antiphon.base.units import milliseconds, number
from antiphon.report.document import (
    FREE,
    MARK,
    Axis,
    BlockChart,
    ChartBlock,
    Drawing,
    Grid,
    Notes,
    Pairs,
    Piece,
    ReportDocument,
    Sentence,
    bar,
    stacked,
)
from antiphon.report.draw import draw
from antiphon.report.words import gigabytes, plural, time_unit
from antiphon.specs.training_plan import (
    RejectedTraining,
    TrainingLayout,
    TrainingPlan,
    TrainingPredicted,
    training_plan_to_json,
)

Row = tuple[str, ...]
FORMAT_TITLES = {"float32": "FP32", "bfloat16": "BF16", "float16": "FP16", "fp8": "FP8", "int4": "INT4"}
MADE_AGAIN = {
    "ln1_out": "norm before attention",
    "attn_a2a": "exchange after attention",
    "ln2_out": "norm before experts",
    "ffn_in": "dispatch to experts",
    "fc2_in": "experts' activation",
    "qkv_a2a": "projections and exchange before attention",
    "fc1_out+fc3_out": "experts' first products",
    "attn": "attention",
}
"""What a trainer runs a second time for each tensor it did not keep (names of MegaScale-MoE's Figure 9)."""
MEMORY_PARTS = ("parameters", "gradients", "optimizer", "activations", "workspace")
SHARDED = ("nothing is sharded", "optimizer state", "optimizer state and gradients", "all states and parameters")
OVERLAPS = {
    "none": "none",
    "inter": "communication beside independent operators",
    "intra": "communication beside independent operators, and fused with products",
}
LOSER_COLUMNS = ("alternative", "sizes", "step", "tokens/s", "MFU", "of plan", "why it lost")
WHOLE = "whole on each device"
SIZES = "sizes: n devices share a layer, p stages (x chunks), d copies, b sequences"
STEP_COLOURS = {
    "work": "#0088cc",
    "pipeline bubble": "#999999",
    "exposed exchanges in layers": "#009e73",
    "exposed synchronisation": "#d55e00",
}
MEMORY_COLOURS = {
    "parameters": "#0088cc",
    "gradients": "#e69f00",
    "optimizer": "#009e73",
    "activations": "#cc79a7",
    "workspace": "#d55e00",
    "free": FREE,
}
LOSER_COLOUR = "#0088cc"
CAPTIONS = {
    "step": "The fullest stage: what computes, what stands, and what is waited for.",
    "memory": "Of the fullest device, without what the runtime keeps.",
    "mfu": "The plan, the best of every other way to divide a layer, and the plan with one thing changed. What does "
    "not fit in memory is left out.",
}
PLAN, ALTERNATIVE = "plan", "alternative"


def training_pieces(plan: TrainingPlan, *, explain: bool) -> Iterator[Piece]:
    """For a terminal, in order."""
    yield from (Sentence(subtitle(plan)), Sentence(headline(plan), "heading"), Sentence(""))
    yield Grid(columns=["", "train"], rows=facts(plan))
    yield Sentence("One step", "heading")
    yield _shares(step_parts(plan.predicted), plan.predicted.iteration_s, milliseconds, ("time", "of step"))
    yield Sentence(f"work: computation, optimizer, hops between stages; {hidden_summary(plan.predicted)}")
    if summary := memory_summary(plan):
        yield Sentence(f"Memory of the fullest device: {summary}", "heading")
        usable = plan.predicted.memory_bytes["usable"]
        yield _shares(memory_parts(plan.predicted), usable, gigabytes, ("bytes", "of usable"))
    if others := other_strategies(plan):
        yield Sentence("Other ways to divide a layer, the best of each", "heading")
        yield from _losers(others, plan)
    if explain and (changes := single_changes(plan)):
        yield Sentence("The plan with one thing changed", "heading")
        yield from _losers(changes, plan)
    yield Notes(plan.notes)
    if explain:
        yield from (Sentence(""), Sentence(search_summary(plan)))


def _shares(parts: dict[str, float], whole: float, text: Callable[[float], str], columns: tuple[str, str]) -> Grid:
    """A row a part, with a bar that is its share of the whole."""
    rows = [[name, bar([part], whole), text(part), f"{part / whole:.1%}"] for name, part in parts.items()]
    return Grid(columns=["", "", *columns], rows=rows, right=(2, 3))


def _losers(losers: Sequence[RejectedTraining], plan: TrainingPlan) -> Iterator[Piece]:
    """Numbers in a table; the reasons, which are sentences, below it."""
    yield Sentence(SIZES)
    rows = [loser_row(loser, plan)[:-1] for loser in losers]
    yield Grid(columns=["", "sizes", "step", "tokens/s", "MFU", "of plan"], rows=rows, right=(2, 3, 4, 5))
    yield Pairs([(loser.name, loser.reason) for loser in losers])


def training_page(plan: TrainingPlan) -> ReportDocument:
    """The page."""
    predicted = plan.predicted
    summary = memory_summary(plan)
    holds = f" The fullest device holds {summary}." if summary else ""
    cards = [
        ("a step", milliseconds(predicted.iteration_s)),
        ("tokens/s per device", number(predicted.tokens_per_s_per_device)),
        ("MFU", f"{predicted.mfu:.1%}"),
    ]
    pieces: list[Piece] = [
        Sentence(f"{headline(plan)}.{holds}", "answer", "Every number on this page is predicted by a cost model."),
        Pairs(cards, "cards"),
        Sentence(subtitle(plan), "soft"),
        Sentence(hidden_summary(predicted).capitalize(), "soft"),
        Sentence(f"{search_summary(plan)}.", "soft"),
        Grid(rows=facts(plan)),
    ]
    if plan.notes:
        pieces += [Sentence("Notes", "heading"), Notes(plan.notes)]
    if plan.rejected:
        rows = [_unbroken(loser_row(rejected, plan)) for rejected in plan.rejected]
        pieces += [Sentence("Other ways to train, and the plan with one thing changed", "heading")]
        pieces += [Sentence(SIZES.capitalize(), "soft"), Grid(columns=LOSER_COLUMNS, rows=rows)]
    return ReportDocument(
        title=f"Training plan for {plan.model} on {plan.cluster}",
        pieces=[*pieces, *_drawings(plan)],
        footer="The plan itself is in this page's source (element `plan`).",
        data_name="plan",
        data=training_plan_to_json(plan),
    )


def _unbroken(row: tuple[str, ...]) -> tuple[str, ...]:
    """Only the reason, the last cell, may take several lines."""
    return (*(cell.replace(" ", "\u00a0") for cell in row[:-1]), row[-1])


def _drawings(plan: TrainingPlan) -> list[Drawing]:
    drawn = [("step", "One step", step_chart(plan)), ("mfu", "Model FLOPs utilization", mfu_chart(plan))]
    if memory_summary(plan):
        drawn.insert(1, ("memory", "Memory of a device", memory_chart(plan)))
    return [draw(f"train-{name}", words, CAPTIONS[name], chart) for name, words, chart in drawn]


def step_chart(plan: TrainingPlan) -> BlockChart:
    """One bar, as long as the step."""
    scale_s, unit = time_unit(plan.predicted.iteration_s)
    parts = {name: seconds / scale_s for name, seconds in step_parts(plan.predicted).items()}
    x = Axis(title=f"Time of one step ({unit})")
    return BlockChart(x=x, blocks=stacked({"": parts}, unit), colours=STEP_COLOURS)


def memory_chart(plan: TrainingPlan) -> BlockChart:
    """One bar, as long as the memory that can be used."""
    memory = plan.predicted.memory_bytes
    parts = memory_parts(plan.predicted) | {"free": max(0.0, memory["usable"] - memory["total"])}
    scaled = {name: num_bytes / 1e9 for name, num_bytes in parts.items()}
    colours = {name: MEMORY_COLOURS[name] for name in scaled}
    return BlockChart(
        x=Axis(title="Memory of one device (GB)"), blocks=stacked({plan.device: scaled}, "GB"), colours=colours
    )


def mfu_chart(plan: TrainingPlan) -> BlockChart:
    """One bar per way to train, the plan's first."""
    alternatives = [
        (rejected.name, rejected.predicted.mfu)
        for rejected in plan.rejected
        if rejected.predicted is not None and fits(rejected)
    ]
    bars = [(f"plan: {strategy(plan.layout)}", plan.predicted.mfu), *alternatives]
    blocks = tuple(
        ChartBlock(
            row=name,
            start=0.0,
            length=100 * mfu,
            group=ALTERNATIVE if index else PLAN,
            text=f"{mfu:.1%}",
            tip=f"{name}\nMFU {mfu:.1%}",
        )
        for index, (name, mfu) in enumerate(bars)
    )
    return BlockChart(x=Axis(title="MFU (%)"), blocks=blocks, colours={PLAN: MARK, ALTERNATIVE: LOSER_COLOUR})


def subtitle(plan: TrainingPlan) -> str:
    """What is trained on what."""
    tokens = plan.sequence_length * plan.global_batch
    return (
        f"{plan.model} on {plan.cluster}, training: {plural(plan.global_batch, 'sequence')} of "
        f"{plan.sequence_length:,} tokens a step, {tokens:,} tokens; {plan.num_devices:,} {plan.device} offered"
    )


def headline(plan: TrainingPlan) -> str:
    """The answer in one sentence."""
    predicted, layout = plan.predicted, plan.layout
    return (
        f"Train: {_layer(layout)}, {_pipeline(layout)}, "
        f"{plural(layout.data_parallel, 'copy', 'copies')}: {milliseconds(predicted.iteration_s)} a step, "
        f"{number(predicted.tokens_per_s)} tokens/s, MFU {predicted.mfu:.1%}"
    )


def strategy(layout: TrainingLayout) -> str:
    """``SP+EP``, as MegaScale-MoE writes it."""
    return f"{_attention(layout)}+{_experts(layout)}"


def facts(plan: TrainingPlan) -> list[tuple[str, str]]:
    """The chosen layout, then what is predicted of it."""
    layout, predicted = plan.layout, plan.predicted
    over = f"over {layout.model_parallel} devices"
    whole = layout.model_parallel == 1
    data = plural(layout.data_parallel, "copy", "copies")
    return [
        ("attention", WHOLE if whole else f"{_attention(layout)} {over} ({layout.attention} parallel)"),
        ("experts", _experts_over(layout)),
        ("dispatch to experts", "nothing is sent" if layout.expert_parallel == 1 else _dispatch(layout)),
        ("pipeline", _pipeline(layout)),
        ("data parallel", data),
        ("sharded over copies", f"{SHARDED[layout.zero]} (ZeRO stage {layout.zero})"),
        ("micro-batches", f"{layout.num_micro_batches:,} of {plural(layout.micro_batch, 'sequence')}"),
        ("devices", f"{layout.num_devices:,} × {plan.device}"),
        ("made again in backward", ", ".join(map(made_again, layout.rematerialized)) or "nothing"),
        ("weights in", _format(plan.weights)),
        ("computed in", _format(plan.compute)),
        ("gradients sent in", f"{_format(layout.gradient_wire)}, summed in {_format(plan.gradients)}"),
        ("rows sent in", _format(layout.activation_wire)),
        ("overlap", OVERLAPS[layout.overlap]),
        ("step", milliseconds(predicted.iteration_s)),
        ("tokens/s", number(predicted.tokens_per_s)),
        ("  per device", number(predicted.tokens_per_s_per_device)),
        ("MFU", f"{predicted.mfu:.1%}"),
        ("step waits for", predicted.bound_by or "unknown"),
    ]


def step_parts(predicted: TrainingPredicted) -> dict[str, float]:
    """Seconds of the iteration in parts that add up to it. "work": computation, optimizer, and hops between stages."""
    waits = {
        "pipeline bubble": predicted.bubble_s,
        "exposed exchanges in layers": predicted.exposed_s,
        "exposed synchronisation": predicted.sync_exposed_s,
    }
    return {"work": predicted.iteration_s - sum(waits.values()), **waits}


def hidden_summary(predicted: TrainingPredicted) -> str:
    """How much of the exchanges inside layers hides behind computation."""
    total_s = predicted.communication_s
    if not total_s:
        return "layers exchange nothing"
    return f"layers exchange rows for {milliseconds(total_s)}, {1 - predicted.exposed_s / total_s:.0%} of it hidden"


def memory_parts(predicted: TrainingPredicted) -> dict[str, float]:
    """Bytes of the fullest device by part, those that are known."""
    return {part: predicted.memory_bytes[part] for part in MEMORY_PARTS if part in predicted.memory_bytes}


def memory_summary(plan: TrainingPlan) -> str:
    """How full the fullest device is; empty if the plan does not say."""
    memory = plan.predicted.memory_bytes
    if not {"total", "usable"} <= memory.keys():
        return ""
    total, usable = memory["total"], memory["usable"]
    return f"{gigabytes(total)} of the {gigabytes(usable)} that can be used, {total / usable:.1%}"


def fits(rejected: RejectedTraining) -> bool:
    """Whether an alternative could be run at all."""
    if rejected.predicted is None:
        return False
    memory = rejected.predicted.memory_bytes
    return memory.get("total", 0.0) <= memory.get("usable", float("inf"))


def other_strategies(plan: TrainingPlan) -> list[RejectedTraining]:
    """The best of each other way to divide a layer."""
    return [rejected for rejected in plan.rejected if not _same_strategy(plan, rejected)]


def single_changes(plan: TrainingPlan) -> list[RejectedTraining]:
    """The chosen layout with one thing changed."""
    return [rejected for rejected in plan.rejected if _same_strategy(plan, rejected)]


def loser_row(rejected: RejectedTraining, plan: TrainingPlan) -> Row:
    """An alternative in the order of `LOSER_COLUMNS`; without numbers where it cannot be run."""
    sizes = "-" if rejected.layout is None else short_sizes(rejected.layout)
    if rejected.predicted is None or not fits(rejected):
        return rejected.name, sizes, "-", "-", "-", "-", rejected.reason
    predicted = rejected.predicted
    return (
        rejected.name,
        sizes,
        milliseconds(predicted.iteration_s),
        number(predicted.tokens_per_s),
        f"{predicted.mfu:.1%}",
        f"{predicted.tokens_per_s / plan.predicted.tokens_per_s:.2f} ×",
        rejected.reason,
    )


def short_sizes(layout: TrainingLayout) -> str:
    """``n8 p15x2 d2 b1``: devices of a layer, stages by chunks of each, copies, sequences of a micro-batch."""
    stages = f"{layout.pipeline}x{layout.virtual_stages}" if layout.virtual_stages > 1 else f"{layout.pipeline}"
    shared = f" s{layout.expert_copies}" if layout.expert_copies > 1 else ""
    return f"n{layout.model_parallel} p{stages} d{layout.data_parallel} b{layout.micro_batch}{shared}"


def search_summary(plan: TrainingPlan) -> str:
    return f"{plan.num_candidates:,} candidates considered in {plan.search_s:.2f} s"


def made_again(name: str) -> str:
    """A tensor's name with what is run again for it."""
    return f"{name} ({MADE_AGAIN[name]})" if name in MADE_AGAIN else name


def _same_strategy(plan: TrainingPlan, rejected: RejectedTraining) -> bool:
    if rejected.layout is None:
        return False
    mine, theirs = plan.layout, rejected.layout
    return (mine.attention, mine.experts, mine.dispatch) == (theirs.attention, theirs.experts, theirs.dispatch)


def _attention(layout: TrainingLayout) -> str:
    return "SP" if layout.attention == "sequence" else "TP"


def _experts(layout: TrainingLayout) -> str:
    return "EP" if layout.experts == "expert" else "TP"


def _experts_over(layout: TrainingLayout) -> str:
    if layout.expert_parallel == 1:
        return WHOLE
    shared = f", {plural(layout.expert_copies, 'copy', 'copies')} share them" if layout.expert_copies > 1 else ""
    return f"{_experts(layout)} over {layout.expert_parallel} devices ({layout.experts} parallel){shared}"


def _layer(layout: TrainingLayout) -> str:
    if layout.model_parallel == 1:
        return "layers whole on each device"
    return f"{strategy(layout)} over {layout.model_parallel} devices"


def _dispatch(layout: TrainingLayout) -> str:
    if layout.experts == "expert" and layout.dispatch == "all_to_all":
        return "all-to-all" + (", a token once per device" if layout.deduplicate else ", a row per expert of a token")
    return "all-gather, back by reduce-scatter"


def _pipeline(layout: TrainingLayout) -> str:
    if layout.pipeline == 1:
        return "no pipeline"
    chunks = f" of {layout.virtual_stages} virtual stages each" if layout.virtual_stages > 1 else ""
    return f"{layout.pipeline} stages{chunks}"


def _format(name: str) -> str:
    return FORMAT_TITLES.get(name, name)
