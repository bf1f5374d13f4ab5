"""A training plan with every kind of alternative in it, for the tests of its report."""

from dataclasses import replace

from antiphon.specs.training_plan import RejectedTraining, TrainingLayout, TrainingPlan, TrainingPredicted

LAYOUT = TrainingLayout(
    attention="sequence",
    experts="expert",
    dispatch="all_to_all",
    model_parallel=4,
    pipeline=3,
    virtual_stages=2,
    data_parallel=2,
    micro_batch=1,
    num_micro_batches=15,
    rematerialized=("ln1_out", "fc2_in"),
    gradient_wire="bfloat16",
)
PREDICTED = TrainingPredicted(
    iteration_s=10.0,
    tokens_per_s=12_288.0,
    tokens_per_s_per_device=512.0,
    mfu=0.32,
    bubble_s=1.0,
    communication_s=2.0,
    exposed_s=0.5,
    sync_exposed_s=0.25,
    memory_bytes={
        "parameters": 10e9,
        "gradients": 20e9,
        "optimizer": 15e9,
        "activations": 14e9,
        "workspace": 1e9,
        "total": 60e9,
        "usable": 72e9,
    },
    bound_by="compute",
)
TOO_LARGE = replace(PREDICTED, memory_bytes=PREDICTED.memory_bytes | {"activations": 34e9, "total": 80e9})
PLAN = TrainingPlan(
    model="some-moe",
    cluster="nodes",
    device="H800",
    sequence_length=4096,
    global_batch=30,
    num_devices=25,
    layout=LAYOUT,
    predicted=PREDICTED,
    rejected=(
        RejectedTraining(
            name="TP+TP",
            reason="exposed communication takes 25.0% of the chosen layout's step more",
            layout=replace(LAYOUT, attention="tensor", experts="tensor", dispatch="all_gather", virtual_stages=1),
            predicted=replace(PREDICTED, iteration_s=12.5, tokens_per_s=9830.4, mfu=0.256),
        ),
        RejectedTraining(name="SP+TP", reason="cannot be run: no degree of parallelism has a head for every device"),
        RejectedTraining(
            name="without overlap",
            reason="exposed communication takes 10.0% of the chosen layout's step more",
            layout=replace(LAYOUT, overlap="none"),
            predicted=replace(PREDICTED, iteration_s=11.0, tokens_per_s=11_170.9, mfu=0.29),
        ),
        RejectedTraining(
            name="nothing made again",
            reason="does not fit: a device lacks 7.5 GiB",
            layout=replace(LAYOUT, rematerialized=()),
            predicted=TOO_LARGE,
        ),
    ),
    notes=("1 of 25 devices stay idle: no way to use them is faster",),
    model_config={"model_type": "mixtral", "head_dim": None},
    num_candidates=1234,
    search_s=0.25,
)
