"""Which GPU a worker takes: all workers of a machine are counted, whatever their role. The GPUs are invented."""

import re
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from antiphon.base.errors import ResourceError, UserError
from antiphon.kernels.select import resolve_device
from antiphon.serve.config import OneRole, ServeConfig
from antiphon.serve.joining import JoinRole
from antiphon.serve.launch import configure
from antiphon.serve.prepare import prepare
from antiphon.serve.worker.joined import join_engine
from antiphon.serve.worker.messages import Configure
from antiphon.serve.worker_handle import JoinedWorker, RemoteWorkers, WorkerName
from antiphon.specs.counts import count_parameters
from tests.serve.engine_harness import TinyModel, config
from tests.waiting import wait_until

SECRET = b"correct horse battery staple"
GpuCount = Callable[[int], None]


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> GpuCount:
    """Makes PyTorch see so many GPUs, each with 1 GiB free."""

    def pretend(count: int) -> None:
        monkeypatch.setattr(torch.version, "cuda", "12.9")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
        monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_80", "sm_90", "compute_90"])
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "an invented GPU")
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


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"version": None}, r"--device cuda: this PyTorch \(.*\) is a build without CUDA"),
        ({"count": 0, "driver": 0}, "--device cuda: there is no NVIDIA driver .* install one for CUDA 12.9 or later"),
        (
            {"count": 0, "driver": 11080},
            r"--device cuda: the driver is for CUDA 11.8, this PyTorch \(.*\) needs 12.0: update the driver",
        ),
        (
            {"count": 0, "driver": 12040, "visible": "7"},
            r"--device cuda: the driver shows no GPU \(CUDA_VISIBLE_DEVICES is '7'\): check nvidia-smi",
        ),
        (
            {"capability": (6, 1)},
            r"--device cuda: an invented GPU \(cuda:0\) has compute capability 6.1, this PyTorch \(.*\) has code for "
            "8.0, 9.0: use another GPU",
        ),
        ({"capability": (8, 6)}, ""),  # the code for 8.0
        ({"capability": (10, 0)}, ""),  # translated from that for 9.0
    ],
)
def test_a_gpu_that_cannot_be_used_says_why(
    gpus: GpuCount, monkeypatch: pytest.MonkeyPatch, changed: dict[str, Any], message: str
) -> None:
    gpus(changed.get("count", 1))
    monkeypatch.setattr(torch.version, "cuda", changed.get("version", "12.9"))
    monkeypatch.setattr(torch._C, "_cuda_getDriverVersion", lambda: changed.get("driver", 12090), raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: changed.get("capability", (9, 0)))
    if "visible" in changed:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", changed["visible"])
    if not message:
        assert resolve_device("cuda", 0) == torch.device("cuda", 0)
        return
    with pytest.raises(UserError, match=message):
        resolve_device("cuda", 0)


def test_an_old_gpu_has_no_bfloat16(tiny_model: TinyModel, gpus: GpuCount, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_75"])
    message = (
        "--device cuda:0: an invented GPU has compute capability 7.5 and no bfloat16, which needs 8.0: use --dtype"
    )
    with pytest.raises(UserError, match=message):
        prepare(config(tiny_model, "1", device="cuda", dtype="bfloat16"))


@pytest.mark.parametrize(
    ("layout", "changes", "message"),
    [
        (
            "1",
            {},
            r"cuda:0 has 1.0 MiB free and needs .* \(weights of replica\[0\] .*, KV cache of replica\[0\] .*\): ",
        ),
        (
            "1+1",
            {"device": "cpu", "of_experts": OneRole(device="cuda")},
            r"\(weights of experts\[0\] [^,]*\): .* missing",
        ),
    ],
)
def test_a_gpu_that_is_too_small_says_how_much_is_missing(
    tiny_model: TinyModel,
    gpus: GpuCount,
    monkeypatch: pytest.MonkeyPatch,
    layout: str,
    changes: dict[str, Any],
    message: str,
) -> None:
    gpus(1)
    free_bytes = 20_000 if "of_experts" in changes else 1 << 20
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (free_bytes, 2**30))
    settings = config(tiny_model, layout, **({"device": "cuda", "kv_bytes": 1 << 20} | changes))
    with pytest.raises(ResourceError, match=message):
        prepare(settings)


def test_replicas_that_share_experts_need_room_for_their_part_of_them(
    tiny_model: TinyModel, gpus: GpuCount, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus(2)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (0, 2**30))
    monkeypatch.setattr("antiphon.serve.prepare.free_memory_bytes", lambda name: 2**30)  # the caches fit
    bytes_of = {"KiB": 2**10, "MiB": 2**20}
    weights = {}
    for layout in ("2", "2*1"):
        with pytest.raises(ResourceError) as refused:
            prepare(config(tiny_model, layout, device="cuda", kv_bytes=1 << 20))
        size, unit = re.findall(r"weights of replica\[0\] ([\d.]+) (\w+)", str(refused.value))[0]
        weights[layout] = float(size) * bytes_of[unit]
    spec = prepare(config(tiny_model, "1")).spec
    experts = spec.num_moe_layers * spec.router.num_experts * count_parameters(spec).expert
    assert weights["2*1"] / weights["2"] == pytest.approx(1 - experts / 2 / count_parameters(spec).total, rel=0.01)


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
