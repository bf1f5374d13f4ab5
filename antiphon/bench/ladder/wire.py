"""What a step sends, by formula, and how long a box's links need for it.

Bytes are those that a rank sends (`comm/ledger`); which of them pass a link between nodes follows from who is where:

    all-to-all     equal parts to every other rank of the group
    all-gather     a ring: a rank's bytes go to the next rank; an all-reduce is two of them
    reduce-scatter as an all-to-all, which it is over gloo (`comm/collectives`)

A link is busy for the bytes of all ranks of its node; the busiest one counts. Inside a node nothing takes time.

Letters: T rows of this rank, H hidden, K experts of a row.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from antiphon.comm.mesh import Sizes
from antiphon.cost.dispatch import expected_distinct
from antiphon.cost.training.measured import held_parameters
from antiphon.cost.training.memory import fullest_stage
from antiphon.cost.training.setup import TrainingSetup
from antiphon.specs.model import ModelSpec
from antiphon.train.config import TrainConfig

Pattern = Literal["all_to_all", "all_gather", "reduce_scatter"]
NUMBER_BYTES = {"float32": 4, "bfloat16": 2, "float64": 8}
WIDE_BYTES = 4  # of what stays in float32 whatever the arithmetic
_WAYS: dict[str, tuple[Pattern, Pattern]] = {  # to the experts and back
    "all_to_all": ("all_to_all", "all_to_all"),
    "gather_scatter": ("all_gather", "reduce_scatter"),
}
_REVERSE: dict[Pattern, Pattern] = {
    "all_to_all": "all_to_all",
    "all_gather": "reduce_scatter",
    "reduce_scatter": "all_gather",
}


@dataclass(frozen=True)
class Sent:
    """What each rank of every group over `axes` sends in one exchange, forward and backward; `pattern`: forward."""

    pattern: Pattern
    axes: tuple[str, ...]
    forward_bytes: float
    backward_bytes: float

    def seconds(self, links: "Links", sizes: Sizes, *, backward: bool) -> float:
        """Until all groups have done it. Backward, a reduce-scatter undoes an all-gather, and the other way round."""
        groups = sizes.groups(self.axes)
        if backward:
            return links.seconds(_REVERSE[self.pattern], groups, self.backward_bytes)
        return links.seconds(self.pattern, groups, self.forward_bytes)


@dataclass(frozen=True, kw_only=True)
class Links:
    """The links of a box: `bytes_per_s` of each node's link, each way."""

    nodes: int
    ranks_per_node: int
    bytes_per_s: float

    def seconds(self, pattern: Pattern, groups: Sequence[Sequence[int]], sent_bytes: float) -> float:
        """Until all groups have done it, side by side."""
        out = [0.0] * self.nodes
        for ranks in groups:
            for node, share in self._crossing(pattern, ranks):
                out[node] += share * sent_bytes
        return max(out) / self.bytes_per_s

    def _crossing(self, pattern: Pattern, ranks: Sequence[int]) -> Iterator[tuple[int, float]]:
        """(node, part of what a rank sends) for all that leaves a node."""
        for place, rank in enumerate(ranks):
            others = (
                [ranks[(place + 1) % len(ranks)]]
                if pattern == "all_gather"
                else [each for each in ranks if each != rank]
            )
            for other in others:
                if self._node(other) != self._node(rank):
                    yield self._node(rank), 1 / len(others)

    def _node(self, rank: int) -> int:
        return rank // self.ranks_per_node


def exchanges(spec: ModelSpec, config: TrainConfig, sizes: Sizes) -> dict[str, Sent]:
    """By operator of a MoE layer, at even use of experts; what sends nothing is left out."""
    rows = config.tokens_per_step // config.micro_batches / (sizes.data * sizes.sequence * sizes.tensor)
    found = _attention(spec, config, sizes, rows)
    end = ""
    if sizes.expert_tensor > 1:
        found |= _way(spec, config, "gather_scatter", "expert_tensor", sizes.expert_tensor, rows, end)
        rows, end = rows * sizes.expert_tensor, "_2"
    if sizes.expert > 1:
        found |= _way(spec, config, config.parallel.dispatch, "expert", sizes.expert, rows, end)
    return found


def _attention(spec: ModelSpec, config: TrainConfig, sizes: Sizes, rows: float) -> dict[str, Sent]:
    attention, found, number = spec.attention, dict[str, Sent](), NUMBER_BYTES[config.dtype]
    if sizes.tensor > 1:
        sent = (sizes.tensor - 1) * rows * spec.hidden_size * number
        found["tensor_gather"] = Sent("all_gather", ("tensor",), sent, sent)
        found["tensor_scatter"] = Sent("reduce_scatter", ("tensor",), sent, sent)
    if sizes.sequence > 1:
        away = rows * number * (sizes.sequence - 1) / sizes.sequence
        queries = away * attention.num_heads * attention.head_dim
        kv = away * 2 * attention.num_kv_heads * attention.head_dim
        found["heads_a2a"] = Sent("all_to_all", ("sequence",), queries + kv, queries + kv)
        found["rows_a2a"] = Sent("all_to_all", ("sequence",), queries, queries)
    return found


def _way(
    spec: ModelSpec, config: TrainConfig, dispatch: str, axis: str, ranks: int, rows: float, end: str
) -> dict[str, Sent]:
    hidden, router, number = spec.hidden_size, spec.router, NUMBER_BYTES[config.dtype]
    there, back = _WAYS[dispatch]
    if there == "all_gather":
        copies = float(ranks - 1)
    elif config.parallel.deduplicate:
        copies = float(expected_distinct(router.num_experts, router.top_k, ranks)) * (ranks - 1) / ranks
    else:
        copies = router.top_k * (ranks - 1) / ranks
    narrow = config.communication.activations == "float8" or (
        config.communication.activations == "float8_permutation" and there == "all_to_all"
    )
    forward, backward = (hidden + 4.0, hidden * (1 + 4 / 128)) if narrow else (hidden * number, hidden * number)
    packed = copies * rows * 2 * router.top_k * max(number, WIDE_BYTES)
    found = {f"routing{end}": Sent(there, (axis,), packed, packed)}
    for name, pattern in (("dispatch", there), ("combine", back)):
        found[name + end] = Sent(pattern, (axis,), copies * rows * forward, copies * rows * backward)
    return found


def sums_s(spec: ModelSpec, config: TrainConfig, setup: TrainingSetup, sizes: Sizes, links: Links) -> float:
    """Seconds of the sums of gradients behind a step, without ZeRO: all-reduces over the ranks that hold the same."""
    held = held_parameters(spec, setup, fullest_stage(spec, setup.pipeline, setup.virtual_stages))
    number = 2 if config.communication.gradients == "bfloat16" else WIDE_BYTES
    total_s = 0.0
    for count, axes in (
        (float(held.sharded), ("expert_data",)),
        (float(held.replicated), ("data", "sequence")),
    ):
        groups = sizes.groups(axes)
        size = len(groups[0])
        if size == 1:
            continue
        inside = links.ranks_per_node if config.communication.hierarchical else 1
        if inside > 1 and size > inside:
            groups = [ranks[place::inside] for ranks in groups for place in range(inside)]
            count, size = count / inside, size // inside
        first: Pattern = "all_to_all" if config.communication.gradients == "bfloat16" else "all_gather"
        half = count * number * (size - 1) / size
        total_s += links.seconds(first, groups, half) + links.seconds("all_gather", groups, half)
    return total_s
