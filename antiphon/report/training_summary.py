"""What a training plan says in words and rows: the part of its report that terminal and page share.

An iteration is split in four: what the pipeline's bubble, exposed exchanges and exposed synchronisation leave is work.
Rejected: the planner's own parts of an iteration beside these. They say what work waits for, which `bound_by` says too.
"""

from dataclasses import dataclass

from antiphon.report.words import gigabytes, milliseconds, number, plural
from antiphon.specs.training_plan import RejectedTraining, TrainingLayout, TrainingPlan, TrainingPredicted

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


@dataclass(frozen=True, kw_only=True)
class StepPart:
    """One part of an iteration."""

    name: str
    seconds: float
    share: float


def title(plan: TrainingPlan) -> str:
    return f"Training plan for {plan.model} on {plan.cluster}"


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
        ("experts", WHOLE if whole else f"{_experts(layout)} {over} ({layout.experts} parallel)"),
        ("dispatch to experts", "nothing is sent" if whole else _dispatch(layout)),
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


def step_parts(predicted: TrainingPredicted) -> tuple[StepPart, ...]:
    """The iteration in parts that add up to it. "work": computation, optimizer, and hops between stages."""
    total_s = predicted.iteration_s
    waits = {
        "pipeline bubble": predicted.bubble_s,
        "exposed exchanges in layers": predicted.exposed_s,
        "exposed synchronisation": predicted.sync_exposed_s,
    }
    parts = {"work": total_s - sum(waits.values()), **waits}
    return tuple(StepPart(name=name, seconds=value, share=value / total_s) for name, value in parts.items())


def hidden_summary(predicted: TrainingPredicted) -> str:
    """How much of the exchanges inside layers hides behind computation."""
    total_s = predicted.communication_s
    if not total_s:
        return "layers exchange nothing"
    return f"layers exchange rows for {milliseconds(total_s)}, {1 - predicted.exposed_s / total_s:.0%} of it hidden"


def memory_parts(predicted: TrainingPredicted) -> list[tuple[str, float]]:
    """Bytes of the fullest device by part, those that are known."""
    return [(part, predicted.memory_bytes[part]) for part in MEMORY_PARTS if part in predicted.memory_bytes]


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
    """In the order of `LOSER_COLUMNS`; without numbers where it cannot be run."""
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
    return f"n{layout.model_parallel} p{stages} d{layout.data_parallel} b{layout.micro_batch}"


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
