"""A training plan: what a trainer needs to obey it and a person to judge it. Written by the planner, read by all."""

from dataclasses import dataclass, field
from typing import Any, Literal

from antiphon.specs.device import ComputeDtype
from antiphon.specs.precision import StorageDtype
from antiphon.specs.strict_table import CountFromZero, NotNegative, Positive


@dataclass(frozen=True, kw_only=True)
class TrainingLayout:
    """One way to train. `attention`: "sequence" (Ulysses) or "tensor" parallel, `experts`: "expert" or "tensor"
    parallel, both over `model_parallel` devices; `dispatch` of expert parallelism; `micro_batch`: sequences per
    micro-batch.

    `rematerialized`: tensors of a layer that are thrown away in forward and made again in backward (names of
    MegaScale-MoE's Figure 9). `gradient_wire`, `activation_wire`: formats between devices. `overlap`: of communication
    with independent operators ("inter"), with fused products too ("intra"). `deduplicate`: an all-to-all sends a token
    once per rank. `zero`: sharded over data parallelism: 1 optimizer state, 2 gradients too, 3 parameters too."""

    attention: Literal["sequence", "tensor"]
    experts: Literal["expert", "tensor"]
    dispatch: Literal["all_to_all", "all_gather"]
    model_parallel: int
    pipeline: int
    virtual_stages: int
    data_parallel: int
    micro_batch: int
    num_micro_batches: int
    rematerialized: tuple[str, ...] = ()
    gradient_wire: StorageDtype = "float32"
    activation_wire: StorageDtype = "bfloat16"
    overlap: Literal["none", "inter", "intra"] = "intra"
    deduplicate: bool = False
    zero: CountFromZero = 1

    @property
    def num_devices(self) -> int:
        return self.model_parallel * self.pipeline * self.data_parallel

    def label(self) -> str:
        """Such as ``SP+EP (all-to-all) n=8 p=15x2 d=2 b=1``: n devices a layer, p stages of v chunks, d copies, b
        sequences a micro-batch."""
        attention = {"sequence": "SP", "tensor": "TP"}[self.attention]
        experts = {"expert": "EP", "tensor": "TP"}[self.experts]
        how = f" ({self.dispatch.replace('_', '-')})" if self.experts == "expert" else ""
        stages = f"{self.pipeline}x{self.virtual_stages}" if self.virtual_stages > 1 else f"{self.pipeline}"
        return (
            f"{attention}+{experts}{how} n={self.model_parallel} p={stages} d={self.data_parallel} b={self.micro_batch}"
        )


@dataclass(frozen=True, kw_only=True)
class TrainingPredicted:
    """What the model of costs says of one iteration. `memory_bytes`: of the fullest device, by part. Of `iteration_s`:
    `bubble_s` the pipeline stands, `exposed_s` layers wait for communication, `sync_exposed_s` gradients and
    parameters."""

    iteration_s: Positive
    tokens_per_s: Positive
    tokens_per_s_per_device: Positive
    mfu: Positive
    bubble_s: NotNegative
    communication_s: NotNegative
    exposed_s: NotNegative
    sync_exposed_s: NotNegative
    memory_bytes: dict[str, NotNegative] = field(default_factory=dict)
    bound_by: str = ""


@dataclass(frozen=True, kw_only=True)
class RejectedTraining:
    """An alternative that lost, and to what. `predicted` None: it cannot run at all."""

    name: str
    reason: str
    layout: TrainingLayout | None = None
    predicted: TrainingPredicted | None = None


@dataclass(frozen=True, kw_only=True)
class TrainingPlan:
    """The answer to "how shall this model be trained on these machines". `num_devices`: how many were offered; the
    layout may use fewer. `weights`, `gradients`, `compute`: formats of the copy that is multiplied, of gradients' sums
    over micro-batches, of arithmetic. `model_config`: the `config.json` it was made for, empty if none was given."""

    version: int = 1
    model: str
    cluster: str
    device: str
    sequence_length: int
    global_batch: int
    num_devices: int
    weights: StorageDtype = "bfloat16"
    gradients: StorageDtype = "float32"
    compute: ComputeDtype = "bfloat16"
    layout: TrainingLayout
    predicted: TrainingPredicted
    rejected: tuple[RejectedTraining, ...] = ()
    notes: tuple[str, ...] = ()
    model_config: dict[str, Any] = field(default_factory=dict)
    num_candidates: CountFromZero = 0
    search_s: NotNegative = 0.0
