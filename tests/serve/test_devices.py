"""Which GPU a worker takes: all workers of a machine are counted, whatever their role. The GPUs are invented."""

import socket
from collections.abc import Callable, Iterator

import pytest
import torch

from antiphon.base.errors import UserError
from antiphon.kernels.select import resolve_device
from antiphon.serve.config import ServeConfig
from antiphon.serve.joining import JoinRole, join_engine
from antiphon.serve.launch import configure
from antiphon.serve.prepare import prepare
from antiphon.serve.remote_workers import JoinedWorker, RemoteWorkers
from antiphon.serve.worker.messages import Configure
from antiphon.serve.worker_process import WorkerName
from tests.serve.engine_harness import TinyModel, config
from tests.waiting import wait_until

SECRET = b"correct horse battery staple"
GpuCount = Callable[[int], None]


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> GpuCount:
    """Makes PyTorch see so many GPUs, each with 1 GiB free."""

    def pretend(count: int) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (2**30, 2**30))

    return pretend


def configured(settings: ServeConfig) -> dict[str, Configure]:
    """What each worker would be sent, by its name."""
    run = prepare(settings)
    return {str(name): configure(run, name, run.placement) for name in run.worker_names()}


@pytest.mark.parametrize(
    ("layout", "num_gpus", "devices"),
    [
        ("1+1", 2, ["cuda:0", "cuda:1"]),
        ("2+2", 4, ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]),
        ("2+3", 2, ["cuda:0", "cuda:1", "cuda:0", "cuda:1", "cuda:0"]),
        ("1+1", 1, ["cuda:0", "cuda:0"]),
        ("3", 2, ["cuda:0", "cuda:1", "cuda:0"]),
    ],
)
def test_workers_take_the_gpus_in_turn_over_all_roles(
    tiny_model: TinyModel,
    gpus: GpuCount,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    layout: str,
    num_gpus: int,
    devices: list[str],
) -> None:
    gpus(num_gpus)
    with caplog.at_level("INFO"):
        sent = configured(config(tiny_model, layout, device="cuda"))
    assert [str(resolve_device(each.device, each.device_index)) for each in sent.values()] == devices
    shared = f"{len(devices)} workers take turns over {num_gpus} GPUs"
    assert (shared in caplog.text) == (len(devices) > num_gpus)


def test_a_named_gpu_is_for_all_workers(tiny_model: TinyModel, gpus: GpuCount, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(2)
    sent = configured(config(tiny_model, "1+1", device="cuda:1"))
    assert [str(resolve_device(each.device, each.device_index)) for each in sent.values()] == ["cuda:1", "cuda:1"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("cuda:2", "--device cuda:2: this machine has 2 GPUs, use cuda:0 to cuda:1"),
        ("cuda:x", "--device cuda:x is not supported: use cpu or cuda"),
        ("cudafoo", "--device cudafoo is not supported: use cpu or cuda"),
    ],
)
def test_a_gpu_that_does_not_exist_is_refused(gpus: GpuCount, name: str, message: str) -> None:
    gpus(2)
    with pytest.raises(UserError, match=message):
        resolve_device(name, 0)


class JoinedMachines:
    """Workers that join at an address of their own."""

    def __init__(self, places: list[WorkerName], local: list[WorkerName]) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._address = f"127.0.0.1:{free.getsockname()[1]}"
        self._remote = RemoteWorkers(self._address, SECRET, frozenset(places), local=local)
        self._remote.start(lambda: None)
        self.close = self._remote.close

    def fill(self, name: WorkerName, host: str, configure: Configure) -> int:
        """A worker of `host` takes this place; returns its device index."""
        self._remote.ask(name, configure)
        role: JoinRole = "attention" if name.role == "attention" else "experts"
        channel = join_engine(self._address, SECRET, role=role, name=role, host=host, pid=1, patience_s=10.0)
        found: list[JoinedWorker] = []
        wait_until(lambda: bool(found.extend(self._remote.arrivals()) or found), f"{name} has arrived")
        channel.close()
        assert [worker.name for worker in found] == [name]
        return found[0].configure.device_index


def names(num_attention: int, num_experts: int) -> list[WorkerName]:
    attention = [WorkerName("attention", index) for index in range(num_attention)]
    return attention + [WorkerName("experts", index) for index in range(num_experts)]


@pytest.fixture
def joined() -> Iterator[JoinedMachines]:
    """Places for 2+2 workers; the engine itself has started one worker at its own address."""
    made = JoinedMachines(names(2, 2), [WorkerName("attention", 2)])
    yield made
    made.close()


def test_workers_that_join_are_counted_by_their_machine(
    tiny_model: TinyModel, joined: JoinedMachines, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = configured(config(tiny_model, "2+2"))
    places = zip(names(2, 2), ["10.0.0.1", "10.0.0.2", "10.0.0.1", "127.0.0.1"], strict=True)
    assert [joined.fill(name, host, sent[str(name)]) for name, host in places] == [0, 0, 1, 1]
    # One that is lost leaves its GPU to the next of its machine; one from elsewhere begins there.
    lost = WorkerName("attention", 0)
    assert joined.fill(lost, "10.0.0.1", sent[str(lost)]) == 0
    assert joined.fill(lost, "10.0.0.3", sent[str(lost)]) == 0
    again = WorkerName("attention", 1)
    assert joined.fill(again, "10.0.0.1", sent[str(again)]) == 0
