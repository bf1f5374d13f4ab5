"""One file of training names devices, and a layout for 64 ranks can be gone through without them: the shapes and bytes
of every rank without memory, the order of its collectives over a process group that does nothing."""

import ast
import math
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

import antiphon
from antiphon.base.errors import UserError
from antiphon.comm import collectives
from antiphon.comm.mesh import Mesh, connect
from antiphon.kernels.ops import feed_forward
from antiphon.models.config import load_model_spec
from antiphon.specs.counts import count_parameters
from antiphon.train import device, pipeline, setup
from antiphon.train.config import TrainConfig, read_config
from antiphon.train.memory import memory_need, setup_of
from antiphon.train.ranks import sizes_of
from antiphon.train.setup import build_model, check_device, prepare
from antiphon.train.shards import Shards
from antiphon.train.trainer import TrainedStep, Trainer
from tests.train.harness import config_of, write_run

ROOT = Path(antiphon.__file__).parent
TRAINING = sorted((ROOT / "train").rglob("*.py"))
NAMES = ("cpu", "cuda", "gloo", "nccl", "meta")
MAY_NAME = {
    "train/device.py": "it is the one that does",
    "comm/collectives.py": "asks of which back-end a group is",
}
FACTORIES = ("tensor", "zeros", "ones", "empty", "full", "arange", "rand", "randn", "linspace", "eye")
MAY_LEAVE_OPEN = {
    "comm/collectives.py": "a barrier's number lies in host memory",
    "comm/dispatch.py": "small tables that each call takes to its rows",
    "comm/tile_flight.py": "tiles travel through host memory",
}
RANKS = 64


def files() -> list[Path]:
    """Those of training, and of communication what these import; the M2N library moves host memory."""
    found, waiting = list(TRAINING), list(TRAINING)
    while waiting:
        for node in ast.walk(ast.parse(waiting.pop().read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("antiphon.comm."):
                file = ROOT.joinpath(*str(node.module).split(".")[1:]).with_suffix(".py")
                if "m2n" not in file.parts and file.exists() and file not in found:
                    found.append(file)
                    waiting.append(file)
    assert ROOT / "comm/collectives.py" in found
    return found


def texts(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """All texts of a file but docstrings, and the names of methods that are called."""
    prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
            yield node.lineno, node.value
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            yield node.lineno, node.func.attr


def test_nothing_else_names_a_device() -> None:
    found = []
    for file in files():
        name = str(file.relative_to(ROOT))
        for line, text in texts(ast.parse(file.read_text(encoding="utf-8"))):
            is_one = text.partition(":")[0] in NAMES
            if is_one and name not in MAY_NAME:
                found.append(f"{name}:{line}: {text!r}")
    assert not found


def test_every_new_tensor_says_where_it_lies() -> None:
    found = []
    for file in files():
        name = str(file.relative_to(ROOT))
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            of_torch = isinstance(node.func.value, ast.Name) and node.func.value.id == "torch"
            says = any(keyword.arg == "device" for keyword in node.keywords)
            if of_torch and node.func.attr in FACTORIES and not says and name not in MAY_LEAVE_OPEN:
                found.append(f"{name}:{node.lineno}: torch.{node.func.attr} without a device")
    assert not found


def test_which_device_a_rank_has(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device.device_of("auto") == device.device_of("cpu") == torch.device("cpu")
    with pytest.raises(UserError, match="device is 'cuda', torch sees no GPU: set device to 'cpu'"):
        device.device_of("cuda")
    chosen = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    assert device.device_of("auto", local_rank=3, ranks_here=4) == torch.device("cuda:3") == chosen[0]
    assert device.device_of("cpu", local_rank=3, ranks_here=4) == torch.device("cpu")
    with pytest.raises(UserError, match="8 ranks on this machine share 4 GPUs: start a rank a GPU"):
        device.device_of("auto", local_rank=3, ranks_here=8)
    assert device.backends_of(torch.device("cuda:3")) == "cpu:gloo,cuda:nccl"
    for change, words in (
        ("overlap.inside=true", "tiles travel through host memory"),
        ("parallel.pipeline=2", "tags, which NCCL does not know"),
    ):
        config = config_of(tmp_path, change)
        check_device(config, torch.device("cpu"))
        with pytest.raises(UserError, match=words):
            check_device(config, torch.device("cuda:0"))


def test_products_of_gpus_are_those_of_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel that GPUs take runs on CPUs too, so its arguments can be tried there; an expert has no rows."""
    counts = (3, 0, 5)
    drawn = torch.Generator().manual_seed(0)
    x_RI = torch.randn(8, 16, generator=drawn).bfloat16().requires_grad_()
    weight_EOI = torch.randn(3, 24, 16, generator=drawn).bfloat16().requires_grad_()
    grad_RO = torch.randn(8, 24, generator=drawn).bfloat16()
    found = []
    for has in (False, True):
        monkeypatch.setattr(feed_forward, "_has_grouped_mm", lambda *_, has=has: has)
        y_RO = feed_forward.grouped_product(x_RI, weight_EOI, counts)
        found.append((y_RO.detach(), *torch.autograd.grad(y_RO, (x_RI, weight_EOI), grad_RO)))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-2)
    assert not found[1][2][1].any(), "a gradient of zeros"


# --- 64 ranks

LARGE = {
    "hidden_size": 2048,
    "num_hidden_layers": 8,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "moe_intermediate_size": 768,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
}
SMALL = LARGE | {"hidden_size": 32, "head_dim": 2, "moe_intermediate_size": 8, "vocab_size": 320}
SMALL |= {"num_hidden_layers": 4, "max_position_embeddings": 64}
LAYOUT = ("parallel.pipeline=2", "parallel.sequence=4", "parallel.tensor=2", "parallel.expert=16", "parallel.zero=1")
LAYOUT += ("parallel.row_budget=0", "batch=8", "micro_batch=4", "sequence_length=16", "steps=2")


@pytest.fixture
def as_rank(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes this process one of 64 whose process groups do nothing."""

    def become(rank: int) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
        monkeypatch.setenv("WORLD_SIZE", str(RANKS))
        monkeypatch.setenv("RANK", str(rank))
        dist.init_process_group("fake", rank=rank, world_size=RANKS, store=FakeStore())

    yield become
    if dist.is_initialized():
        dist.destroy_process_group()


def mesh_of(config: TrainConfig, rank: int) -> Mesh:
    return connect(sizes_of(config, load_model_spec(Path(config.model.path)), RANKS), rank)


def test_shapes_and_memory_of_64_ranks(tmp_path: Path, as_rank: Any) -> None:
    """All parameters are there as often as they have replicas, and no rank has more than was planned."""
    config = config_of(tmp_path, *LAYOUT, **LARGE)
    spec = load_model_spec(Path(config.model.path))
    need = memory_need(spec, config, setup_of(config, sizes_of(config, spec, RANKS)))
    total, largest, shards = 0.0, 0, 0
    for rank in range(0, RANKS, 3):
        as_rank(rank)
        mesh = mesh_of(config, rank)
        model = build_model(spec, config, 16, mesh, device.SHAPES_ONLY)
        own = sum(each.numel() for each in model.parameters())
        largest = max(largest, 4 * own)
        pieces = Shards(model, config.parallel.zero).pieces
        shards = max(shards, sum(8 * piece.values.numel() for piece in pieces))
        for module in model.modules():
            for part in getattr(module, "parts", {}).values():
                copies = mesh.replicas(part.axes).size
                total += math.prod(part.local_shape) / copies
    assert all(each.device == device.SHAPES_ONLY for each in model.parameters())
    assert total * 3 == pytest.approx(count_parameters(spec).total, rel=0.05), "every third rank was looked at"
    assert largest <= need.parameters * 1.01
    assert shards <= need.optimizer * 1.01
    assert largest >= need.parameters * 0.7, "the plan is no wild guess"


class Enough(Exception):
    pass


def stop(result: TrainedStep) -> None:
    if result.step == 1:
        raise Enough


def mirrored(group: Any, buffer: Tensor, x: Tensor, receive: Any, send: Any) -> Any:
    """What this rank sends is what comes back, as if all others were like it."""
    buffer.copy_(x) if buffer.shape == x.shape else buffer.zero_()
    return dist.barrier(group=group.process_group, async_op=True)


def test_the_order_of_collectives_of_64_ranks(tmp_path: Path, as_rank: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks start the collectives of every group that they share in one order, through two steps of the real trainer;
    and what one sends to the next stage, the other takes, in order."""
    file = write_run(tmp_path, **SMALL)
    file.write_text(file.read_text().replace("batch = 4", "batch = 8").replace("checkpoint_every = 3", ""))
    config = read_config(file, LAYOUT)
    setup.prepare_data(config, load_model_spec(Path(config.model.path)))
    launched: dict[int, dict[tuple[int, ...], list[str]]] = {}
    parcels: dict[int, dict[tuple[str, int], list[int]]] = {}
    current = [0]
    launch = collectives.Flight.launch

    def noted(flight: Any, x: Tensor, *, backward: bool, part: tuple[int, int] = (0, 1)) -> None:
        collective = flight._forward.reverse() if backward else flight._forward
        launched[current[0]][collective.group.ranks].append(f"{collective.name} {backward}")
        launch(flight, x, backward=backward, part=part)

    send, receive = pipeline.start_send, pipeline.start_receive

    def sent(group: Any, peer: int, tag: int, what: str, x: Tensor) -> Any:
        parcels[current[0]]["to", group.ranks[peer]].append(tag)
        return send(group, peer, tag, what, x)

    def received(group: Any, peer: int, tag: int, what: str, buffer: Tensor) -> Any:
        parcels[current[0]]["from", group.ranks[peer]].append(tag)
        return receive(group, peer, tag, what, buffer.zero_())

    monkeypatch.setattr(collectives.Flight, "launch", noted)
    monkeypatch.setattr(collectives, "start_all_to_all", mirrored)
    monkeypatch.setattr(pipeline, "start_send", sent)
    monkeypatch.setattr(pipeline, "start_receive", received)
    monkeypatch.setattr(setup, "join", lambda sizes, communication, device: connect(sizes, current[0]))
    for rank in (0, 1, 9, 31, 32, 33, 41, 63):
        current[0] = rank
        launched[rank], parcels[rank] = defaultdict(list), defaultdict(list)
        as_rank(rank)
        with pytest.raises(Enough):
            Trainer(prepare(config), stop).run()
    shared = Counter(group for of_rank in launched.values() for group in of_rank if len(group) > 1)
    assert sum(count > 1 for count in shared.values()) >= 4, "some ranks share groups"
    for group, count in shared.items():
        orders = {tuple(of_rank[group]) for rank, of_rank in launched.items() if rank in group}
        assert len(orders) == 1 or count == 1, group
    names = {entry.partition(" ")[0] for of_rank in launched.values() for each in of_rank.values() for entry in each}
    for name in ("dispatch.all_to_all", "attention.all_to_all", "gradients.reduce_scatter", "parameters.all_gather"):
        assert name in names
    for first, second in ((0, 32), (1, 33), (9, 41), (31, 63)):
        for one, other in ((first, second), (second, first)):
            assert parcels[one]["to", other] == parcels[other]["from", one]
            assert parcels[one]["to", other]
