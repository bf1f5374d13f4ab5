"""Workers that are groups of ranks: the text is one process's, and the loss of any rank costs no token."""

import os
import signal
from typing import Any

import pytest

from antiphon.base.errors import UserError
from antiphon.serve.config import OneRole
from antiphon.serve.fleet import Fleet
from antiphon.serve.prepare import prepare
from antiphon.serve.worker.messages import Role, RunStep
from antiphon.serve.worker_handle import WorkerName, WorkerProcess
from antiphon.specs.plan import Collectives
from tests.serve.engine_harness import (
    GREEDY,
    NUM_TOKENS,
    Prompts,
    Run,
    TinyModel,
    Tokens,
    complete,
    config,
    kill,
    running,
    wait_until_idle,
)
from tests.waiting import wait_until


def slow(*values: object) -> object:
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    "layout",
    [
        "1t2",
        "1t3+1t2/m2",
        "2t2*2",
        slow("2*1"),
        slow("1t2*1"),
        slow("2*2/m2"),
        slow("4t1*2"),
        slow("1t3"),
        slow("2t2"),
        slow("1t2+1/m1"),
        slow("1+2t2/m2"),
        slow("2t2+2t3/m3"),
        "1p2/m2",
        slow("1p2"),
        slow("1t2p2/m3"),
        "2p2*2/m2",
        slow("2t2p2*1/m2"),
    ],
)
def test_ranks_equal_transformers(layout: str, tiny_model: TinyModel, prompts: Prompts, reference: Tokens) -> None:
    with running(config(tiny_model, layout)) as engine:
        assert complete(engine, prompts[:24]) == reference[:24]
        wait_until_idle(engine)


@pytest.mark.parametrize(
    ("layout", "victim", "number"),
    [
        ("1t2", WorkerName("replica", 0, 1), signal.SIGKILL),
        slow("1t3", WorkerName("replica", 0, 0), signal.SIGKILL),
        slow("1t2", WorkerName("replica", 0, 1), signal.SIGSTOP),
        ("2t2+1t2/m2", WorkerName("attention", 1, 1), signal.SIGSTOP),
        slow("2t2+1t2/m2", WorkerName("attention", 0, 0), signal.SIGKILL),
        slow("1+1t3/m2", WorkerName("experts", 0, 2), signal.SIGKILL),
        slow("1+1t2/m2", WorkerName("experts", 0, 0), signal.SIGSTOP),
        slow("2t2*2", WorkerName("replica", 1, 1), signal.SIGKILL),
        ("1p2/m2", WorkerName("replica", 0, 1), signal.SIGSTOP),
        slow("2p2*1/m2", WorkerName("replica", 1, 1), signal.SIGKILL),
    ],
)
def test_the_loss_of_a_rank_costs_no_token(
    layout: str, victim: WorkerName, number: int, tiny_model: TinyModel, prompts: Prompts, reference: Tokens
) -> None:
    """All ranks of the worker start again; the others keep their processes."""
    with running(config(tiny_model, layout)) as engine:
        first = {name: engine.worker_pid(name) for name in engine.workforce.names}
        num_total = 24 * NUM_TOKENS
        left = [lambda: kill(engine, victim.role, victim.index, number, rank=victim.rank)]

        def on_output(num_tokens: int) -> None:
            if left and num_tokens > 0.2 * num_total:
                left.pop()()

        finished = Run(engine, prompts[:24], GREEDY).finish(on_output)
        assert [request.error for request in finished] == [None] * 24
        assert [request.token_ids for request in finished] == reference[:24]
        wait_until_idle(engine)
        wait_until(lambda: engine.complete, "all workers are back")
        changed = {name for name, pid in first.items() if engine.worker_pid(name) != pid}
        assert changed == {name for name in first if name.leader == victim.leader}


@pytest.mark.parametrize(
    ("prefill", "decode"), [("synchronous", "fused"), slow("fused", "synchronous"), slow("synchronous", "synchronous")]
)
def test_text_is_the_same_with_every_form_of_the_exchange(
    prefill: Collectives,
    decode: Collectives,
    tiny_model: TinyModel,
    prompts: Prompts,
    reference: Tokens,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The default, measured, is among the layouts above. All workers hear the same of a step: phase and size."""
    steps: dict[int, list[RunStep]] = {}
    send = Fleet.send

    def seen(fleet: Fleet, worker: WorkerProcess, message: object) -> None:
        if isinstance(message, RunStep):
            steps.setdefault(message.step, []).append(message)
        send(fleet, worker, message)  # type: ignore[arg-type]

    monkeypatch.setattr(Fleet, "send", seen)
    forms = {"prefill_collectives": prefill, "decode_collectives": decode}
    with running(config(tiny_model, "2t2*2/m2", **forms)) as engine:
        assert complete(engine, prompts[:8]) == reference[:8]
        wait_until_idle(engine)
    phases = set()
    for messages in steps.values():
        assert len(messages) == 2, "both replicas take part"
        sequences = [[len(each.token_ids) for each in batch] for told in messages for batch in told.micro_batches]
        for told in messages:
            assert told.prefill == (max(map(max, filter(None, sequences))) > 1)
            assert told.most_rows == max(map(sum, sequences))
            phases.add(told.prefill)
    assert phases == {True, False}


def test_a_process_says_once_how_it_reaches_others(
    tiny_model: TinyModel, prompts: Prompts, reference: Tokens, capfd: pytest.CaptureFixture[str]
) -> None:
    """Though it has several ends: of its ranks, of its node, between nodes. Rank 0 says what was measured."""
    with running(config(tiny_model, "2t2*2")) as engine:
        assert complete(engine, prompts[:2]) == reference[:2]
        wait_until_idle(engine)
    lines = capfd.readouterr().err.splitlines()
    said = [line.partition("replica")[2] for line in lines if "transport" in line]
    assert [line.partition(":")[0] for line in sorted(said)] == ["[0][0]", "[0][1]", "[1][0]", "[1][1]"]
    assert all(": transport shm, waits by " in line for line in said)
    assert sum("of an exchange by rows, fused and synchronous: 1: " in line for line in lines) == 1


@pytest.mark.parametrize(("layout", "transport"), [("1t2", "tcp"), slow("1t3", "shm"), slow("2t2+1t2/m2", "tcp")])
def test_sums_beside_products_give_the_same_text(
    layout: str, transport: str, tiny_model: TinyModel, prompts: Prompts, reference: Tokens
) -> None:
    """Prompts of up to 1,024 rows at once go in blocks; a rank is lost on the way."""
    asked = config(tiny_model, layout, max_batch_tokens=1024, exchange=transport, prefill_collectives="fused")
    with running(asked) as engine:
        role = next(iter(engine.workforce.names)).role
        left = [lambda: kill(engine, role, 0, signal.SIGKILL, rank=1)]

        def on_output(num_tokens: int) -> None:
            if left and num_tokens > 5 * NUM_TOKENS:
                left.pop()()

        finished = Run(engine, prompts, GREEDY).finish(on_output)
        assert [request.token_ids for request in finished] == reference
        wait_until(lambda: engine.complete, "all workers are back")


def test_sums_are_beside_products_where_ranks_share_no_memory(tiny_model: TinyModel) -> None:
    def in_blocks(layout: str, role: Role = "replica", **changes: Any) -> bool:
        return config(tiny_model, layout, **changes).sums_in_blocks(role)

    assert in_blocks("1t2", exchange="tcp")
    assert in_blocks("1t2", prefill_collectives="fused")
    assert in_blocks("2t2+1t2/m2", "attention", exchange="tcp")
    assert not in_blocks("1t2")
    assert not in_blocks("1t2", exchange="tcp", prefill_collectives="synchronous")
    assert not in_blocks("2t2+1t2/m2", "experts", exchange="tcp")
    assert not in_blocks("2t2*2", exchange="tcp", prefill_collectives="fused"), "its sums stay inside nodes"


def test_forms_belong_to_the_hybrid_layout(tiny_model: TinyModel) -> None:
    with pytest.raises(
        UserError, match=r"--prefill-collectives fused needs --layout hybrid or several ranks .*: elsewhere"
    ):
        config(tiny_model, "2", prefill_collectives="fused")
    with pytest.raises(UserError, match="--decode-collectives fused needs --layout hybrid"):
        config(tiny_model, "1t2", decode_collectives="fused")
    with pytest.raises(UserError, match="--prefill-collectives is 'slow': it must be 'fused', 'synchronous' or 'auto'"):
        config(tiny_model, "2*2", prefill_collectives="slow")


def test_instances_share_the_requests(tiny_model: TinyModel, prompts: Prompts, reference: Tokens) -> None:
    """Two groups of workers; one of them loses its experts while all stream."""
    with running(config(tiny_model, "1+1/m2", num_instances=2)) as engine:
        first = {name: engine.worker_pid(name) for name in engine.workforce.names}
        assert [str(name) for name in first] == ["attention[0]", "experts[0]", "1/attention[0]", "1/experts[0]"]
        left = [lambda: os.kill(first[WorkerName("experts", 0, instance=1)], signal.SIGKILL)]

        def on_output(num_tokens: int) -> None:
            if left and num_tokens > 5 * NUM_TOKENS:
                left.pop()()

        finished = Run(engine, prompts[:24], GREEDY).finish(on_output)
        assert [request.token_ids for request in finished] == reference[:24]
        wait_until(lambda: engine.complete, "all workers are back")
        books = [scheduler.book for scheduler in engine.workforce.schedulers.values()]
        assert all(book.generation_tokens > 0 for book in books), "both got requests"
        wait_until(lambda: sorted(engine.stats().expert_rows_per_s) == [0, 1], "both expert workers have reported")


def test_roles_have_their_own_threads_and_dtypes(tiny_model: TinyModel, prompts: Prompts, reference: Tokens) -> None:
    """The first token of a prompt hardly ever hangs on the experts' rounding; with threads alone nothing is rounded."""
    threads = config(tiny_model, "1+1t2/m1", of_experts=OneRole(num_threads=2))
    assert (threads.own("experts").num_threads, threads.own("attention").num_threads) == (2, 1)
    narrow = OneRole(dtype="bfloat16")
    with running(config(tiny_model, "1t2+1t2/m1", of_experts=narrow)) as engine:
        made = complete(engine, prompts[:16])
    same = sum(tokens[0] == expected[0] for tokens, expected in zip(made, reference[:16], strict=True))
    assert same >= 12
    with pytest.raises(UserError, match="--expert-dtype bfloat16 needs --layout disaggregated: a replica"):
        config(tiny_model, "1", of_experts=narrow)


def test_cores_are_shared_out_by_threads(tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    uneven = config(tiny_model, "1t2+2/m1", of_experts=OneRole(num_threads=3))
    roles: list[Role] = ["attention", "attention", "experts", "experts"]
    assert [uneven.cores_of(process, [uneven.own(role) for role in roles]) for process in range(4)] == [
        [0],
        [1],
        [2, 3, 4],
        [5, 6, 7],
    ]
    assert uneven.cores_of(0, [uneven.own(role) for role in roles[:3]]) == []


def test_more_ranks_than_heads_are_refused_before_anything_starts(tiny_model: TinyModel) -> None:
    with pytest.raises(UserError) as caught:
        prepare(config(tiny_model, "1t7"))
    assert str(caught.value) == "--tp is 7: the model has 6 attention heads, so it must be at most 6"
    with pytest.raises(UserError) as caught:
        prepare(config(tiny_model, "1+1t25"))
    assert str(caught.value) == "--expert-tp is 25: the model has 24 columns in an expert, so it must be at most 24"


def test_stages_have_layers_and_hold_experts_too(tiny_model: TinyModel) -> None:
    with pytest.raises(UserError) as caught:
        prepare(config(tiny_model, "1p3"))
    assert str(caught.value) == "--pp is 3: the model has 2 layers, so it must be at most that"
    with pytest.raises(UserError, match=r"--pp 2: apart from experts, .* or use --layout colocated or hybrid"):
        config(tiny_model, "1p2+1/m2")


def test_where_experts_cannot_move(tiny_model: TinyModel) -> None:
    with pytest.raises(
        UserError, match="--balance window needs --layout disaggregated or hybrid: here every replica has all experts"
    ):
        config(tiny_model, "2", balance="window")
    with pytest.raises(UserError, match="--balance static with --pp 2: a pipeline's leader counts the rows of its own"):
        config(tiny_model, "2p2*1", balance="static")
    with pytest.raises(UserError, match="--balance predict with --tp 1 and --expert-tp 2: what a replica asks"):
        config(tiny_model, "2*2", balance="predict")


def test_groups_of_a_hybrid_have_to_divide(tiny_model: TinyModel) -> None:
    with pytest.raises(UserError, match="on 6 ranks: one must divide the other, and the larger the number of ranks"):
        config(tiny_model, "2t3*2")
    with pytest.raises(UserError, match="on 3 ranks: one must divide the other, and the larger the number of ranks"):
        config(tiny_model, "3*2")


def test_the_budget_counts_every_ranks_part(tiny_model: TinyModel) -> None:
    """Six heads share two KV heads: two ranks have one each, three ranks hold four between them."""
    blocks = [
        prepare(config(tiny_model, layout, kv_bytes=1 << 20)).scheduler.num_blocks for layout in ("1", "1t2", "1t3")
    ]
    assert blocks[0] == blocks[1]
    assert blocks[2] == blocks[0] // 2
