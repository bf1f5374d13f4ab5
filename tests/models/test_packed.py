"""Matrices that several tensors make equal what they multiply out to, stay in few bits, and are cut over ranks."""

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from antiphon.base.errors import CheckpointError
from antiphon.kernels.cpu import CpuBackend
from antiphon.kernels.reference import ReferenceBackend
from antiphon.models.checkpoint import Checkpoint
from antiphon.models.config import load_model_spec
from antiphon.models.load import load_expert, load_expert_half, open_checkpoint
from antiphon.models.shares import share_of
from tests.models.packed_specimens import MIXED, PACKED, PackedForm, pack_checkpoint
from tests.models.test_shares import logits_of_ranks

SIZES = {"hidden_size": 64, "intermediate_size": 48, "moe_intermediate_size": 32, "head_dim": 16}


def saved(save_model: Any, tools: Any, form: str, family: str = "qwen3_moe", **changes: Any) -> tuple[Path, Path]:
    """The packed folder, and the one with what it multiplies out to."""
    folder = save_model(tools.config(family, **(SIZES | changes))).folder
    return folder, pack_checkpoint(folder, PACKED[form])


@pytest.mark.parametrize("form", ["GPTQ", "AWQ", "compressed-tensors int4", "compressed-tensors mxfp4"])
@pytest.mark.parametrize("is_declared", [True, False])
def test_a_packed_matrix_that_config_json_says_nothing_of(
    form: str, is_declared: bool, save_model: Any, tools: Any
) -> None:
    folder, _ = saved(save_model, tools, form, moe_intermediate_size=64, intermediate_size=64)
    file, spec = folder / "model.safetensors", load_model_spec(folder)
    if not is_declared:  # one such matrix among plain ones
        folder = folder.with_name(folder.name + "-wide")
    tensors = load_file(file)
    stem = "model.layers.1.self_attn.q_proj."
    unused = {name.replace("q_proj", "g_proj"): each for name, each in tensors.items() if name.startswith(stem)}
    kept = load_file(folder / file.name)
    save_file(kept | unused, folder / file.name)
    message = r"model\.safetensors: tensor 'model\.layers\.1\.self_attn\.g_proj\.[a-z_]+' has no use by config\.json"
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(folder, spec)


@pytest.mark.parametrize("form", PACKED)
def test_packed_equals_its_multiplied_out_form(
    form: str, save_model: Any, tools: Any, caplog: pytest.LogCaptureFixture
) -> None:
    changes = {"moe_intermediate_size": 64, "intermediate_size": 64, "head_dim": 16} if "mxfp4" in form else {}
    folder, wide_folder = saved(save_model, tools, form, **changes)
    token_ids = tools.ids(17)
    expected = tools.run(tools.load(wide_folder), token_ids, [17])
    with caplog.at_level(logging.INFO, "antiphon"):
        decoder = tools.load(folder)
    torch.testing.assert_close(tools.run(decoder, token_ids, [17]), expected, rtol=1e-4, atol=1e-4)
    assert PACKED[form].kept in caplog.text


@pytest.mark.parametrize("mix", MIXED)
def test_formats_that_differ_by_module(mix: str, save_model: Any, tools: Any) -> None:
    config, write, of_attention = MIXED[mix]
    folder = save_model(tools.config("qwen3_moe", **SIZES)).folder
    wide_folder = pack_checkpoint(folder, PackedForm(write, config), {"self_attn": of_attention})
    token_ids = tools.ids(17)
    expected = tools.run(tools.load(wide_folder), token_ids, [17])
    torch.testing.assert_close(tools.run(tools.load(folder), token_ids, [17]), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("form", "file"), [("GPTQ", "quantize_config.json"), ("AWQ", "quant_config.json")])
def test_what_the_first_tools_wrote_beside_config_json(form: str, file: str, save_model: Any, tools: Any) -> None:
    folder, wide_folder = saved(save_model, tools, form)
    config = json.loads((folder / "config.json").read_text())
    quantization = config.pop("quantization_config")
    (folder / "config.json").write_text(json.dumps(config))
    spec, found = load_model_spec(folder), next(n for n in Checkpoint(folder).names if n.endswith("qweight"))
    with pytest.raises(CheckpointError, match=f"{found} is packed, and no quantization_config in config.json says how"):
        open_checkpoint(folder, spec)
    del quantization["quant_method"]
    (folder / file).write_text(json.dumps(quantization))
    token_ids = tools.ids(17)
    expected = tools.run(tools.load(wide_folder), token_ids, [17])
    torch.testing.assert_close(tools.run(tools.load(folder), token_ids, [17]), expected, rtol=1e-4, atol=1e-4)
    (folder / file).rename(folder / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "NVFP4"}}')
    with pytest.raises(CheckpointError, match="quant_method = 'modelopt' is not supported: use the model in bfloat16"):
        load_model_spec(folder)


def save_alone(folder: Path, form: str, tensors: dict[str, torch.Tensor]) -> None:
    """A folder with no more than these tensors."""
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"quantization_config": PACKED[form].config}))


@pytest.mark.parametrize("form", PACKED)
def test_parts_of_a_packed_matrix(form: str, tmp_path: Path) -> None:
    """Rows and columns that begin and end inside words and groups."""
    torch.manual_seed(2)
    tensors, wide = PACKED[form].write(torch.randn(72, 64))
    wide = wide[:, :64]
    save_alone(tmp_path, form, {"a." + suffix: tensor.contiguous() for suffix, tensor in tensors.items()})
    checkpoint = Checkpoint(tmp_path)
    assert checkpoint.shape("a.weight") == (72, 64)
    for first, last in ((0, 64), (5, 23), (16, 48), (1, 2)):
        for part, expected in (
            (checkpoint.read("a.weight", rows=(first, last)), wide[first:last]),
            (checkpoint.read("a.weight", cut=(1, first, last)), wide[:, first:last]),
            (checkpoint.read("a.weight", rows=(3, 70), cut=(1, first, last)), wide[3:70, first:last]),
        ):
            torch.testing.assert_close(part, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("form", ["compressed-tensors int4", "compressed-tensors int8, zero points", "GPTQ", "AWQ"])
def test_rows_that_are_no_whole_groups(form: str, tmp_path: Path) -> None:
    tensors, wide = PACKED[form].write(torch.randn(8, 40))
    save_alone(tmp_path, form, {"a." + suffix: tensor.contiguous() for suffix, tensor in tensors.items()})
    torch.testing.assert_close(Checkpoint(tmp_path).read("a.weight"), wide, rtol=1e-5, atol=1e-6)


ACT_ORDER = [form for form in PACKED if "act-order" in form or "desc_act" in form]


@pytest.mark.parametrize("form", ACT_ORDER)
def test_act_order_in_the_native_kernels(
    form: str, save_model: Any, tools: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Every matrix stays packed: attention, experts, and dense layers."""
    folder, wide_folder = saved(save_model, tools, form)
    token_ids, backend = tools.ids(17), CpuBackend(torch.float32)
    expected = tools.run(tools.load(wide_folder, backend), token_ids, [17], 16)
    with caplog.at_level(logging.INFO, "antiphon"):
        decoder = tools.load(folder, backend)
    assert "multiplied out" not in caplog.text
    torch.testing.assert_close(tools.run(decoder, token_ids, [17], 16), expected, rtol=1e-4, atol=1e-4)
    for packed in decoder.expert_half.experts.values():
        assert packed.formats.ordered
        assert packed.formats.down is not None


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("form", ACT_ORDER)
def test_ranks_in_act_order(form: str, num_ranks: int, save_model: Any, tools: Any) -> None:
    """Attention, dense layers and experts: two ranks have a KV head each, three share them."""
    folder, wide_folder = saved(save_model, tools, form)
    token_ids = tools.ids(17)
    expected = tools.run(tools.load(wide_folder), token_ids, [17])
    packed = SimpleNamespace(folder=folder)
    found = logits_of_ranks(packed, num_ranks, token_ids, [16, 1], backend=CpuBackend(torch.float32))
    torch.testing.assert_close(found[0], expected, rtol=1e-4, atol=1e-4)


def test_gate_and_up_in_different_orders_are_multiplied_out(
    save_model: Any, tools: Any, caplog: pytest.LogCaptureFixture
) -> None:
    folder, _ = saved(save_model, tools, "GPTQ, desc_act")
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for name in [name for name in tensors if name.endswith("experts.1.up_proj.g_idx")]:
        tensors[name] = tensors[name].flip(0).contiguous()
    save_file(tensors, file)
    token_ids = tools.ids(17)
    with caplog.at_level(logging.INFO, "antiphon"):
        ours = tools.run(tools.load(folder, CpuBackend(torch.float32)), token_ids, [17], 16)
    assert "multiplied out" in caplog.text
    torch.testing.assert_close(ours, tools.run(tools.load(folder), token_ids, [17]), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize(("first", "last"), [(0, 64), (0, 24), (24, 64), (5, 23)])
@pytest.mark.parametrize("form", ACT_ORDER)
def test_columns_of_a_matrix_in_act_order(form: str, first: int, last: int, native: bool, tmp_path: Path) -> None:
    """What a rank has of an output projection: groups with holes, computed as they are packed."""
    torch.manual_seed(2)
    tensors, wide = PACKED[form].write(torch.randn(72, 64))
    save_alone(tmp_path, form, {"a." + suffix: tensor.contiguous() for suffix, tensor in tensors.items()})
    weight = Checkpoint(tmp_path).packed("a.weight", cut=(1, first, last))
    assert weight is not None
    assert weight.order is not None
    assert weight.shape == (72, last - first)
    backend = CpuBackend(torch.float32) if native else ReferenceBackend()
    for num_rows in (1, 9, 40):
        x_TI = torch.randn(num_rows, last - first)
        expected = x_TI @ wide[:, first:last].t()
        torch.testing.assert_close(backend.linear(x_TI, backend.pack_linear(weight)), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("form", PACKED)
def test_ranks_add_up_where_groups_straddle_their_border(
    form: str, num_ranks: int, save_model: Any, tools: Any
) -> None:
    """32 columns over 3 ranks: borders at 11 and 22, groups of 16."""
    folder, wide_folder = saved(save_model, tools, form)
    spec, checkpoint = load_model_spec(folder), Checkpoint(folder)
    layer = spec.moe_layers.index(True)
    x_TH, ids_T1 = torch.randn(5, spec.hidden_size), torch.tensor([[0], [1], [2], [3], [4]], dtype=torch.int32)
    whole = load_expert_half(Checkpoint(wide_folder), spec, ReferenceBackend())
    backend = CpuBackend(torch.float32) if form in ACT_ORDER else ReferenceBackend()
    parts = [
        load_expert_half(checkpoint, spec, backend, share=share_of(spec, rank, num_ranks)) for rank in range(num_ranks)
    ]
    assert all(packed.formats.gate_up and packed.formats.down for part in parts for packed in part.experts.values())
    total = torch.stack([part.forward(layer, x_TH, ids_T1, torch.ones(5, 1)) for part in parts]).sum(0)
    expected = whole.forward(layer, x_TH, ids_T1, torch.ones(5, 1))
    torch.testing.assert_close(total, expected, rtol=1e-4, atol=1e-4)
    if num_ranks == 2 and form not in ACT_ORDER:  # native ones have pages that are not full
        assert sum(part.num_bytes for part in parts) < whole.num_bytes / 2


def broken(tmp_path: Path, form: str, change: Any) -> str:
    tensors, _ = PACKED[form].write(torch.randn(16, 32))
    tensors = {"a." + suffix: tensor.contiguous() for suffix, tensor in tensors.items()}
    change(tensors)
    save_alone(tmp_path, form, tensors)
    with pytest.raises(CheckpointError) as caught:
        Checkpoint(tmp_path).read("a.weight")
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("form", "change", "expected"),
    [
        (
            "compressed-tensors int4",
            lambda t: t.update({"a.weight_shape": torch.tensor([16, 320])}),
            "a.weight_packed: its shape [16, 4] does not hold [16, 320] of (4,) bits",
        ),
        (
            "compressed-tensors int4",
            lambda t: t.update({"a.weight_scale": torch.ones(16, 7)}),
            "a.weight_packed: 7 scales for 32 columns, which groups of 16 do not give",
        ),
        (
            "compressed-tensors int4",
            lambda t: t.pop("a.weight_scale"),
            "a.weight_packed: there is no scale beside it",
        ),
        (
            "compressed-tensors int4, act-order",
            lambda t: t.update({"a.weight_g_idx": torch.full((32,), 9, dtype=torch.int32)}),
            "a.weight_packed: g_idx names groups that are not there",
        ),
        (
            "GPTQ",
            lambda t: t.update({"a.qzeros": torch.zeros(2, 2, dtype=torch.int32)}),
            "a.qweight: its zero points are 1 to 1, sym in config.json asks for 8",
        ),
        ("AWQ", lambda t: t.update({"a.scales": torch.ones(2, 15)}), "a.qweight: scales beside it has shape [2, 15]"),
    ],
)
def test_parts_that_do_not_fit(form: str, change: Any, expected: str, tmp_path: Path) -> None:
    assert broken(tmp_path, form, change).startswith(expected)


@pytest.mark.parametrize("form", PACKED)
def test_a_moved_expert_stays_packed(form: str, save_model: Any, tools: Any) -> None:
    folder, wide_folder = saved(save_model, tools, form)
    spec, checkpoint = load_model_spec(folder), Checkpoint(folder)
    layer, share = spec.moe_layers.index(True), share_of(spec)
    half = load_expert_half(checkpoint, spec, CpuBackend(torch.float32), [0, 1], num_slots=3)
    load_expert(checkpoint, spec, share, half, layer, 4, 2)
    half.hold(layer, 2, 4)
    whole = load_expert_half(Checkpoint(wide_folder), spec, ReferenceBackend())
    x_TH, ids = torch.randn(3, spec.hidden_size), torch.full((3, 1), 4, dtype=torch.int32)
    moved = half.forward(layer, x_TH, half.to_local(layer, ids), torch.ones(3, 1))
    torch.testing.assert_close(moved, whole.forward(layer, x_TH, ids, torch.ones(3, 1)), rtol=1e-4, atol=1e-4)
    assert half.experts[layer].formats.gate_up is not None
    assert set(load_file(folder / "model.safetensors")) == set(checkpoint.names)
