"""A small model and tables of a machine, easy to reckon with by hand."""

from dataclasses import replace
from typing import Any

from antiphon.cost.curves import Curve
from antiphon.cost.profile import (
    EngineTimes,
    ExchangeTimes,
    LocalTimes,
    MachineFacts,
    Profile,
    RowCalls,
    Slowdowns,
    ThreadTimes,
    flat,
)
from antiphon.specs.model import AttentionSpec, FeedForwardSpec, ModelSpec, RopeSpec, RouterSpec

NUM_LAYERS, NUM_DENSE = 5, 1
MODEL = ModelSpec(
    family="qwen3_moe",
    vocab_size=100,
    hidden_size=64,
    num_layers=NUM_LAYERS,
    moe_layers=(False, *(True,) * (NUM_LAYERS - NUM_DENSE)),
    attention=AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=16, scale=0.25, rope=RopeSpec(dim=16, theta=1e4)),
    router=RouterSpec(num_experts=8, top_k=2),
    feed_forward=FeedForwardSpec(intermediate=32, dense_intermediate=64),
)
NONE = flat(1.0)


def line(per_row: float, fixed: float) -> Curve:
    return Curve((1.0, 1001.0), (fixed + per_row, fixed + 1001 * per_row))


def thread_times(num_threads: int) -> ThreadTimes:
    """Attention 10 + 1 rows, experts 20 + 2 rows of all 8 (half for 4), head 5, bookkeeping 3; in milliseconds."""
    return ThreadTimes(
        num_threads=num_threads,
        base_context=100,
        attention_s=line(1e-3 / num_threads, 10e-3 / num_threads),
        per_context_s=flat(1e-6),
        experts_s={8: line(2e-3 / num_threads, 20e-3 / num_threads), 4: line(1e-3 / num_threads, 10e-3 / num_threads)},
        head_s=flat(5e-3),
        step_s=flat(3e-3),
        prompt_attention_s=line(1e-4, 0.0),
    )


def local_times(num_cores: int = 2, **changes: Any) -> LocalTimes:
    """Exchange: each call 0.1 ms, one way 0.5 ms; the engine's turn 2 ms, 1 more for a further worker."""
    made = LocalTimes(
        model="tiny",
        model_config={"num_experts": 8},
        dtype="bfloat16",
        kernels="cpu",
        cpu="one by hand",
        num_cores=num_cores,
        threads=tuple(thread_times(count) for count in sorted({num_cores, 1}, reverse=True)),
        slowdowns=Slowdowns(
            attention_beside_experts=NONE,
            experts_beside_attention=NONE,
            attention_beside_attention=NONE,
            experts_beside_experts=NONE,
            replica_beside_replica=NONE,
        ),
        exchange=ExchangeTimes(
            dispatch_s=flat(1e-4),
            receive_s=flat(1e-4),
            reply_s=flat(1e-4),
            combine_s=flat(1e-4),
            one_way_s=flat(5e-4),
            message_bytes=line(128.0, 0.0),
        ),
        engine=EngineTimes(
            alone_s=flat(2e-3),
            apart_s=flat(2e-3),
            apart_bookkeeping_s=flat(3e-3),
            apart_head_ratio=flat(1.0),
            per_further_worker_s=flat(1e-3),
            bookkeeping_s=flat(3e-3),
        ),
        row_calls=RowCalls(across_s=flat(0.0), gathered_s=flat(0.0), completed_s=flat(0.0)),
    )
    return replace(made, **changes)


def profile() -> Profile:
    return Profile(
        command="test",
        created="2026-11-24",
        machine=MachineFacts(name="box", num_cores=2, memory_bytes=8 * 10**9),
        model="tiny",
        dtype="bfloat16",
        attention=(),
        experts=(),
        engine=local_times(read_bytes_per_s={1: 1e9, 2: 2e9}),
    )
