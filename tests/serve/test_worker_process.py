"""How a worker process begins and ends: what is done before it is ready, and what is closed when the engine is gone."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from antiphon.base.errors import PeerLost
from antiphon.comm.m2n.api import ExchangeShape
from antiphon.serve.worker import build, process


def test_its_ends_are_closed_when_the_engine_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[str] = []

    def gone(*arguments: object) -> None:
        raise PeerLost("engine", "closed its end")

    def part(name: str, **fields: object) -> Any:
        return SimpleNamespace(close=lambda: closed.append(name), **fields)

    links = part("links", abort=None, ranks=SimpleNamespace(ticket=b""))
    spans = part("spans", watch=lambda name, thread: None)
    worker = build.Follower(
        runner=part("runner"),
        recorder=spans,
        links=links,
        moves=part("moves"),
        kernels="cpu",
        timeout_s=1.0,
        kv=part("kv", heard=None, ticket=b""),
    )
    orders = SimpleNamespace(start=lambda: None, next=gone)
    channel: Any = SimpleNamespace(receive=lambda timeout_s: SimpleNamespace(), send=lambda message: None)
    monkeypatch.setattr(process, "Configure", SimpleNamespace)
    monkeypatch.setattr(process, "Orders", lambda channel: orders)
    monkeypatch.setattr(process, "_start", lambda channel, configure: worker)
    assert process.run_worker(channel) == 0
    assert closed == ["moves", "kv", "links"]


@pytest.mark.parametrize(
    ("kernels", "merges", "warmed"), [("triton", False, [96]), ("triton", True, [192]), ("cpu", False, [])]
)
def test_kernels_that_are_compiled_are_ready_before_the_worker(
    kernels: str, merges: bool, warmed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attention workers wait for the first batch no longer than for others. 3 of them send 32 rows each, and where they
    step freely, 2 micro-batches may be one batch."""
    found: list[int] = []
    half = SimpleNamespace(warm_up=found.append)
    shape = ExchangeShape(
        num_attention=3, num_experts=1, num_micro_batches=2, max_rows=32, hidden_size=8, top_k=2, dtype=torch.float32
    )  # fmt: skip
    replaced: dict[str, object] = {
        "rank_group": SimpleNamespace(rank=1, size=2), "share_of": None, "load_expert_half": half,
        "configured_shape": shape, "ExpertMoves": None, "PeerLinks": None,
    }  # fmt: skip
    for name, value in replaced.items():
        monkeypatch.setattr(build, name, lambda *given, value=value, **named: value)
    placement = SimpleNamespace(experts_of=lambda index: {})
    configure: Any = SimpleNamespace(
        placement=placement,
        index=0,
        expert_slots=0,
        prefetch_rows=0,
        expert_bytes=None,
        timeout_s=1.0,
        exchange=SimpleNamespace(merges=merges),
    )
    spec = SimpleNamespace(router=SimpleNamespace(top_k=2))
    half.spec = spec
    source: Any = SimpleNamespace(
        configure=configure, spec=spec, backend=SimpleNamespace(name=kernels, device=None), recorder=None,
        endpoints=None, checkpoint=None, progress=None,
    )  # fmt: skip
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    build._build_experts(source)
    assert found == warmed


def test_a_worker_without_work_gives_freed_memory_back_once(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[str] = []
    monkeypatch.setattr(process, "_REST_S", 0.01)
    channel: Any = SimpleNamespace()
    orders = process.Orders(channel)

    def give() -> None:
        given.append("memory")
        orders._queue.put("order")

    monkeypatch.setattr(process, "give_memory_back", give)
    assert orders.next() == "order"
    assert given == ["memory"]
    assert orders.next(0.02) is None  # it has something else to do
    assert given == ["memory"]


def test_an_expert_worker_without_work_gives_freed_memory_back_once(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[int] = []
    calls = iter([True] + [False] * 40)
    monkeypatch.setattr(process, "give_memory_back", lambda: given.append(1))
    monkeypatch.setattr(process, "_report_experts", lambda worker, channel: False)
    orders = SimpleNamespace(waiting=False, poll=lambda: None)
    worker: Any = SimpleNamespace(
        runner=SimpleNamespace(serve_one=lambda idle_s, timeout_s: next(calls)), timeout_s=1.0, moves=None
    )
    with pytest.raises((StopIteration, RuntimeError)):
        process.serve_batches(worker, SimpleNamespace(), orders)  # type: ignore[arg-type]
    assert given == [1]
