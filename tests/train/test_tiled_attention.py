"""Attention's all-to-alls in tiles, on ranks that share positions: against the same ranks without tiles, in float32."""

import logging
import logging.handlers
import queue
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from antiphon.base.logging import get_logger
from antiphon.comm.m2n.tile_links import TileLinks
from antiphon.comm.mesh import Mesh, Sizes, connect
from antiphon.models.config import model_spec
from antiphon.specs.model import ModelSpec
from antiphon.train.attention import heads_leave_in_tiles
from antiphon.train.config_tables import CommunicationConfig, LossConfig
from antiphon.train.layer_plan import PlanOptions
from antiphon.train.model import Batch, MoeModel
from antiphon.train.passes import Passes
from antiphon.train.setup import connect_tiles
from antiphon.train.shards import Shards
from antiphon.train.spans import StepSpans, share_spans
from antiphon.train.weights import FirstValues
from tests.comm.ranks import begin_anew, on_ranks
from tests.models.conftest import family_config

RANKS, LENGTH, TILE_ROWS = 3, 11, 3
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}  # ranks have 2, 1 and 1, and two share a KV head
CASES: dict[str, tuple[str, dict[str, int], str]] = {
    "plain": ("mixtral", HEADS, "none"),
    "norms of heads": ("qwen3_moe", HEADS, "selective"),
    "bias, sinks and windows": ("gpt_oss", HEADS, "full"),
    "a norm over all heads": ("olmoe", {"num_attention_heads": 4, "num_key_value_heads": 4}, "selective"),
    "latent rows": ("deepseek_v3", {"num_attention_heads": 4, "num_key_value_heads": 4}, "full"),
}
IN_FLOAT8 = ("plain", "latent rows")
PLAIN, FLOAT8 = CommunicationConfig(), CommunicationConfig(attention="float8")
WHY = {"a norm over all heads": "a norm is over all heads", "latent rows": "heads are made of a latent row"}


@dataclass(frozen=True)
class Found:
    """Of one step: loss, gradients by name, bytes of attention's all-to-alls, names on the timeline."""

    loss: Tensor
    gradients: dict[str, Tensor]
    sent_bytes: int
    names: set[str]

    def is_same(self, other: "Found") -> bool:
        """Bit for bit."""
        return torch.equal(self.loss, other.loss) and all(
            torch.equal(each, other.gradients[name]) for name, each in self.gradients.items()
        )


def step(
    spec: ModelSpec, mesh: Mesh, keep: str, links: tuple[TileLinks, ...], wire: CommunicationConfig = PLAIN
) -> Found:
    model = MoeModel(
        spec,
        mesh,
        max_positions=LENGTH,
        dtype=torch.float32,
        first=FirstValues(1, 0.2),
        communication=wire,
        options=PlanOptions(keep=keep),
        links=links,
    )
    spans = StepSpans()
    spans.on = True
    share_spans(model, spans)
    ids = torch.randint(0, 97, (2, LENGTH + 1), generator=torch.Generator().manual_seed(3))
    batch = Batch(ids[:, :-1], ids[:, 1:], torch.arange(LENGTH).expand(2, LENGTH), None)
    shards = Shards(model)
    mesh.ledger.take()
    loss = Passes(model, LossConfig(balance=0.1), spans).run([batch]).loss
    kinds = ("attention.all_to_all", "attention.all_gather", "attention.reduce_scatter")
    sent = mesh.ledger.take().sent_bytes
    sent_bytes = sum(sent.get(kind, 0) for kind in kinds)
    shards.reduce()
    gradients = {piece.name: piece.values.grad for piece in shards.pieces if piece.values.grad is not None}
    return Found(loss, gradients, sent_bytes, {span.label.name for span in spans.take()})


def compared(rank: int) -> dict[str, dict[str, Any]]:
    """By case: how far tiles are from whole exchanges, relative to a gradient's largest number."""
    mesh, found = connect(Sizes(world_size=RANKS, sequence=RANKS, expert=RANKS), rank, 60), {}
    said = queue.SimpleQueue[logging.LogRecord]()
    get_logger("train").addHandler(logging.handlers.QueueHandler(said))
    for case, (family, heads, keep) in CASES.items():
        spec = model_spec(family_config(family, num_hidden_layers=2, **heads).to_dict())
        links = connect_tiles(spec, TILE_ROWS, mesh)
        assert len(links) == 1, "the same ranks share positions and experts"
        whole, tiled, again = (step(spec, mesh, keep, each) for each in ((), links, links))
        torch.distributed.barrier()  # one that closes is lost to those that still wait
        links[0].close()
        off = {
            name: float((tiled.gradients[name] - each).abs().max() / (each.abs().max() or 1.0))
            for name, each in whole.gradients.items()
        }
        found[case] = {
            "loss": float((tiled.loss - whole.loss).abs()),
            "gradient": max(off.items(), key=lambda it: it[1]),
            "same": tiled.is_same(again),
            "bytes": (tiled.sent_bytes, whole.sent_bytes),
            "names": tiled.names,
            "cut": heads_leave_in_tiles(spec.attention),
            "said": [said.get().getMessage() for _ in range(said.qsize())],
        }
    begin_anew()
    return found | between_tensor_ranks(rank)


def between_tensor_ranks(rank: int) -> dict[str, dict[str, Any]]:
    """By case and wire: the same of ranks that share heads and not positions."""
    mesh, found = connect(Sizes(world_size=RANKS, tensor=RANKS, expert=RANKS), rank, 60), {}
    for case, (family, heads, keep) in CASES.items():
        spec = model_spec(family_config(family, num_hidden_layers=2, **heads).to_dict())
        links = connect_tiles(spec, TILE_ROWS, mesh)
        for name, wire in (("", PLAIN), (", FP8", FLOAT8))[: 2 if case in IN_FLOAT8 else 1]:
            whole, tiled, again = (step(spec, mesh, keep, each, wire) for each in ((), links, links))
            off = {
                name: float((tiled.gradients[name] - each).abs().max() / (each.abs().max() or 1.0))
                for name, each in whole.gradients.items()
            }
            found[f"heads: {case}{name}"] = {
                "loss": float((tiled.loss - whole.loss).abs()),
                "gradient": max(off.items(), key=lambda it: it[1]),
                "same": tiled.is_same(again),
                "bytes": (tiled.sent_bytes, whole.sent_bytes),
                "names": tiled.names,
            }
        torch.distributed.barrier()
        links[0].close()
    return found


OF_HEADS = [f"heads: {case}{wire}" for case in CASES for wire in ("", *((", FP8",) if case in IN_FLOAT8 else ()))]


@pytest.mark.parametrize("case", OF_HEADS)
def test_gathers_and_sums_of_heads_are_beside_products(of_ranks: list[dict[str, dict[str, Any]]], case: str) -> None:
    """Also where a norm is over all heads and with latent rows. Tiles of unequal ranks are not padded; E4M3 gradients
    have scales for each tile of theirs."""
    for found in of_ranks:
        band = 0.1 if case.endswith("FP8") else 1e-5
        assert found[case]["loss"] < band
        assert found[case]["gradient"][1] < band, found[case]["gradient"]
        assert found[case]["same"]
        tiled, whole = found[case]["bytes"]
        assert 0 < tiled <= whole * (3 if case.endswith("FP8") else 1)
        assert {"tensor_gather_qkv", "wait for tensor_gather_qkv", "wait for tensor_gather_qkv backward"} <= found[
            case
        ]["names"]
        assert {"out_tensor_scatter weights backward", "wait for out_tensor_scatter"} <= found[case]["names"]
        assert not {"tensor_gather", "tensor_scatter", "qkv", "out"} & found[case]["names"]


@pytest.fixture(scope="module")
def of_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, Any]]]:
    return on_ranks(RANKS, tmp_path_factory.mktemp("ranks"), compared)


@pytest.mark.parametrize("case", CASES)
def test_a_step_is_that_of_whole_exchanges(of_ranks: list[dict[str, dict[str, Any]]], case: str) -> None:
    for found in of_ranks:
        assert found[case]["loss"] < 1e-5
        assert found[case]["gradient"][1] < 1e-5, found[case]["gradient"]
        assert found[case]["same"]


@pytest.mark.parametrize("case", CASES)
def test_bytes_are_those_of_whole_exchanges(of_ranks: list[dict[str, dict[str, Any]]], case: str) -> None:
    for found in of_ranks:
        tiled, whole = found[case]["bytes"]
        assert tiled > 0
        if CASES[case][2] == "selective" and found[case]["cut"]:
            assert tiled < whole, "what has come is kept, so heads are not sent again"
        else:
            assert tiled == whole


@pytest.mark.parametrize("case", CASES)
def test_the_timeline_says_what_is_cut(of_ranks: list[dict[str, dict[str, Any]]], case: str) -> None:
    for found in of_ranks:
        names, cut = found[case]["names"], found[case]["cut"]
        assert cut == (case not in WHY)
        for name in ("rows_a2a_out", *(("qkv_heads_a2a",) if cut else ())):
            assert {name, f"wait for {name}", f"{name} backward", f"wait for {name} backward"} <= names
            assert f"{name} weights backward" in names
        assert ("heads_a2a" in names) != cut
        assert "rows_a2a" not in names
    warnings = [each for each in of_ranks[0][case]["said"] if "overlap.inside" in each]
    assert len(warnings) == (0 if of_ranks[0][case]["cut"] else 1)
    assert all(each.endswith(f"not cut into tiles, because {WHY[case]}") for each in warnings)
