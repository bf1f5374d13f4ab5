"""What is trained on what, and how: parallel degrees, what is overlapped, in which formats things are kept and sent.

Degrees may be arrays, one value per candidate; the strategies are one per setup, so that a search makes a few setups
and lets each hold thousands of candidates.
Rejected: the serving plan's `Parallel` and `PrecisionSpec`. Training has no KV cache and no phases, but gradients,
optimizer state and virtual stages.

`LayerCase` is one layer under one setup on one kind of device: operators, activations and memory are made from it.
"""

from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from antiphon.base.errors import UserError
from antiphon.cost.exchange import Spread, expected_distinct
from antiphon.cost.memory import share_of
from antiphon.cost.network import Network, network
from antiphon.cost.profile import Profile
from antiphon.cost.roofline import Number, Roofs, roofs
from antiphon.specs.cluster import ClusterSpec, ComputeDtype, NodeGroup
from antiphon.specs.model import BYTES_OF, ModelSpec, StorageDtype

AttentionParallel = Literal["sequence", "tensor"]
ExpertParallel = Literal["expert", "tensor"]
Dispatch = Literal["all_to_all", "all_gather"]
OverlapLevel = Literal["none", "inter", "intra"]


@dataclass(frozen=True, kw_only=True)
class TrainingPrecision:
    """`weights`: the copy that is multiplied; `gradients`: sums over micro-batches; `gradient_wire`: on the way between
    data-parallel ranks (BF16 is MegaScale-MoE's compression, section 5; sums stay FP32); `activation_wire`: rows
    between ranks of a model-parallel group. `optimizer_bytes`: main parameter and two moments, per parameter."""

    weights: StorageDtype = "bfloat16"
    compute: ComputeDtype = "bfloat16"
    gradients: StorageDtype = "float32"
    gradient_wire: StorageDtype = "float32"
    activation_wire: StorageDtype = "bfloat16"
    optimizer_bytes: float = 12.0

    def __post_init__(self) -> None:
        for name in ("weights", "gradients", "gradient_wire", "activation_wire"):
            if getattr(self, name) not in BYTES_OF:
                raise UserError(f"precision: {name} is {getattr(self, name)!r}: use one of {', '.join(BYTES_OF)}")
        if not self.optimizer_bytes >= 0:
            raise UserError(f"precision: optimizer_bytes is {self.optimizer_bytes}: it must be at least 0")

    @property
    def row_bytes(self) -> float:
        """One element of an activation that is kept: 4 where float32 is computed in, else 2."""
        return 4.0 if self.compute == "float32" else 2.0

    def wire_bytes(self, hidden_size: int) -> float:
        """One element of a row on the wire. FP8 rows carry one FP32 scale each (per-token quantization)."""
        size = BYTES_OF[self.activation_wire]
        return size + 4 / hidden_size if self.activation_wire == "fp8" else size


def trained_in(compute: ComputeDtype, zero: int = 0) -> TrainingPrecision:
    """The formats of `antiphon train`: gradients in float32, rows travel as they are computed. Without shards
    parameters are in float32, two moments beside them; with shards (`zero` 1 and more) they are gathered as they are
    computed with, and the main ones lie beside the moments."""
    wire: StorageDtype = "float32" if compute == "float32" else "bfloat16"
    is_apart = zero > 0 and wire != "float32"
    return TrainingPrecision(
        weights=wire if is_apart else "float32",
        compute=compute,
        gradients="float32",
        activation_wire=wire,
        optimizer_bytes=12.0 if is_apart else 8.0,
    )


@dataclass(frozen=True, kw_only=True)
class TrainingSetup:
    """One way to train. `model_parallel`: ranks of the group that shares every layer (n: TP, SP and EP size alike);
    `expert_copies`: data-parallel copies that share one set of experts (EP over n times as many ranks);
    `micro_batch`: sequences of such a group per micro-batch; `virtual_stages`: chunks of layers per pipeline stage.

    `overlap` "inter": communication beside operators independent of it; "intra": that, and fused pairs too.
    `deduplicate`: in an all-to-all a token goes to a rank once. `zero`: 0 nothing sharded over data parallelism,
    1 optimizer state, 2 gradients too, 3 parameters too."""

    attention: AttentionParallel = "sequence"
    experts: ExpertParallel = "expert"
    dispatch: Dispatch = "all_to_all"
    overlap: OverlapLevel = "intra"
    deduplicate: bool = False
    gate_after_down: bool = False
    zero: int = 1
    model_parallel: Number = 1
    expert_copies: Number = 1
    pipeline: Number = 1
    virtual_stages: Number = 1
    data_parallel: Number = 1
    micro_batch: Number = 1
    precision: TrainingPrecision = field(default_factory=TrainingPrecision)

    def __post_init__(self) -> None:
        if self.zero not in (0, 1, 2, 3):
            raise UserError(f"training: zero is {self.zero}: use 0, 1, 2 or 3")

    @property
    def expert_parallel(self) -> Number:
        """Ranks over which experts are shared out."""
        return self.model_parallel * self.expert_copies

    @property
    def num_devices(self) -> Number:
        return self.model_parallel * self.pipeline * self.data_parallel


@dataclass(frozen=True, kw_only=True)
class Training:
    """What is trained on what: the same for all candidates of a search. `batch`: sequences per iteration. `profile`:
    of the machine, whose training tables then take the rooflines' place."""

    model: ModelSpec
    cluster: ClusterSpec
    group: NodeGroup
    sequence_length: int
    batch: int
    profile: Profile | None = None

    def __post_init__(self) -> None:
        for name in ("sequence_length", "batch"):
            if getattr(self, name) < 1:
                raise UserError(f"training: {name} is {getattr(self, name)}: it must be at least 1")
        if self.profile is not None:
            self.profile.training_tables(self.sequence_length)

    @property
    def usable_bytes(self) -> float:
        """Memory of one device that is not the runtime's."""
        return self.group.device.memory_bytes * (1 - self.cluster.efficiency.memory_reserve)


@dataclass(frozen=True, kw_only=True)
class LayerSizes:
    """What a layer's tensors are sized by. `tokens`: of one micro-batch of the whole group."""

    model: ModelSpec
    setup: TrainingSetup
    sequence_length: int

    @property
    def tokens(self) -> Number:
        return self.setup.micro_batch * self.sequence_length

    @property
    def rows(self) -> Number:
        """Rows of one rank, the busiest where tokens do not divide."""
        return share_of(self.tokens, self.setup.model_parallel)

    @property
    def copies(self) -> Number:
        """How many ranks an all-to-all sends a token to."""
        router = self.model.router
        if not self.setup.deduplicate:
            return router.top_k
        return expected_distinct(router.num_experts, router.top_k, self.setup.expert_parallel)

    @property
    def expert_rows(self) -> Number:
        """(token, expert) rows of the busiest rank."""
        router, degree = self.model.router, self.setup.expert_parallel
        if self.setup.experts == "tensor":
            return self.tokens * router.top_k
        return (
            self.tokens
            * self.setup.expert_copies
            * router.top_k
            * share_of(router.num_experts, degree)
            / router.num_experts
        )


@dataclass(frozen=True, kw_only=True)
class LayerCase(LayerSizes):
    """What an operator list is made from."""

    roofs: Roofs
    network: Network

    @property
    def spread(self) -> Spread:
        """Where a token's experts lie, if it may travel once per node."""
        router, ranks = self.model.router, self.setup.expert_parallel
        together = np.minimum(np.asarray(ranks, dtype=np.float64), self.network.domain)

        def touched(workers: Number) -> Number:
            groups = {"num_groups": router.num_groups, "top_k_groups": router.top_k_groups}
            return expected_distinct(router.num_experts, router.top_k, workers, **groups)

        return Spread(
            num_ranks=ranks,
            ranks_per_domain=together,
            ranks_per_row=touched(ranks),
            domains_per_row=touched(np.ceil(ranks / together)),
        )


def layer_case(training: Training, setup: TrainingSetup) -> LayerCase:
    device, efficiency = training.group.device, training.cluster.efficiency
    return LayerCase(
        model=training.model,
        setup=setup,
        roofs=roofs(device, efficiency, setup.precision.compute),
        network=network(training.cluster, training.group),
        sequence_length=training.sequence_length,
    )
