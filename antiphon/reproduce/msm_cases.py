"""How MegaScale-MoE's evaluation is set up for our cost model, and the estimates that several rows share.

Not stated in the paper and taken here: micro-batches of one sequence, two virtual stages per pipeline stage.
"Megatron-LM" is our model of tensor parallelism for attention and experts without overlap, as is the baseline of
Table 5.
"""

from dataclasses import replace
from functools import cache
from typing import Literal

import numpy as np

from antiphon.cost.training.fit_memory import Rematerialize
from antiphon.cost.training.megascale_models import (
    NODE_DEVICES,
    SEQUENCE_LENGTH,
    TABLE_2,
    TABLE_3_BATCH,
    TABLE_3_PIPELINE,
)
from antiphon.cost.training.setup import Training, TrainingPrecision, TrainingSetup
from antiphon.cost.training.step import estimate_step
from antiphon.cost.training.step_estimate import StepEstimate
from antiphon.reproduce import shipped
from antiphon.specs.cluster import ClusterSpec

H800 = "msm-h800"
VIRTUAL_STAGES = 2
Variant = Literal["tp_tp", "sp_tp", "tp_ep", "sp_ep", "inter", "intra", "megascale"]
SETUPS: dict[Variant, TrainingSetup] = {
    "tp_tp": TrainingSetup(attention="tensor", experts="tensor", dispatch="all_gather", overlap="none"),
    "sp_tp": TrainingSetup(attention="sequence", experts="tensor", dispatch="all_gather", overlap="none"),
    "tp_ep": TrainingSetup(attention="tensor", experts="expert", dispatch="all_to_all", overlap="none"),
    "sp_ep": TrainingSetup(attention="sequence", experts="expert", dispatch="all_to_all", overlap="none"),
    "inter": TrainingSetup(attention="sequence", experts="expert", dispatch="all_to_all", overlap="inter"),
    "intra": TrainingSetup(attention="sequence", experts="expert", dispatch="all_to_all", overlap="intra"),
    "megascale": TrainingSetup(
        attention="sequence",
        experts="expert",
        dispatch="all_to_all",
        overlap="intra",
        precision=TrainingPrecision(gradient_wire="bfloat16"),
    ),
}


@cache
def step_352b(variant: Variant, num_devices: int, batch: int = TABLE_3_BATCH) -> StepEstimate:
    """One iteration of the 352B model, pipeline 15, the rest of the devices in data parallelism."""
    cluster = shipped.cluster(H800)
    training = Training(
        model=shipped.model("msm-internal-352b"),
        cluster=cluster,
        group=cluster.groups[0],
        sequence_length=SEQUENCE_LENGTH,
        batch=batch,
    )
    setup = replace(
        SETUPS[variant],
        model_parallel=NODE_DEVICES,
        pipeline=TABLE_3_PIPELINE,
        virtual_stages=VIRTUAL_STAGES,
        data_parallel=num_devices // (NODE_DEVICES * TABLE_3_PIPELINE),
    )
    return estimate_step(training, setup)


@cache
def step_one_node(
    name: str, variant: Variant, cluster_name: str = H800, data_parallel: int = 1, batch: int = 32
) -> StepEstimate:
    """One iteration of a Table 2 model without pipeline, nothing made again (section 6.2: one node, batch 32; section
    6.1, Figure 13: four nodes). Layers are left as they are: time per layer does not depend on how many there are."""
    training = training_of(name, shipped.cluster(cluster_name), batch)
    return estimate_step(training, setup_of_one_node(SETUPS[variant], data_parallel), "none")


def setup_of_one_node(setup: TrainingSetup, data_parallel: int) -> TrainingSetup:
    """Groups of one node each, no pipeline."""
    return replace(setup, model_parallel=NODE_DEVICES, data_parallel=data_parallel)


@cache
def step_for_memory(name: str, num_devices: int, rematerialize: Rematerialize) -> StepEstimate:
    """`name` on that many H800 with the shortest pipeline that has room for all activations (Figure 17 ran without SAR;
    its configuration is not stated), one micro-batch per stage in flight."""
    pipeline = next(pipeline for pipeline in (1, 2, 4, 8, 16) if _fits(name, num_devices, pipeline))
    return _with_pipeline(name, num_devices, pipeline, rematerialize)


def _fits(name: str, num_devices: int, pipeline: int) -> bool:
    cluster = shipped.cluster(H800)
    usable = training_of(name, cluster, num_devices).usable_bytes
    return float(np.max(_with_pipeline(name, num_devices, pipeline, "none").memory.total)) <= usable


def _with_pipeline(name: str, num_devices: int, pipeline: int, rematerialize: Rematerialize) -> StepEstimate:
    training = training_of(name, shipped.cluster(H800), num_devices)
    setup = replace(
        SETUPS["megascale"],
        model_parallel=NODE_DEVICES,
        pipeline=pipeline,
        data_parallel=num_devices // (NODE_DEVICES * pipeline),
    )
    return estimate_step(training, setup, rematerialize)


def training_of(name: str, cluster: ClusterSpec, batch: int) -> Training:
    return Training(
        model=TABLE_2[name].model(),
        cluster=cluster,
        group=cluster.groups[0],
        sequence_length=SEQUENCE_LENGTH,
        batch=batch,
    )


def number(value: object) -> float:
    """The one value of an estimate that holds one candidate."""
    return float(np.max(np.asarray(value, dtype=np.float64)))
