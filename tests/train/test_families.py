"""Every family's trainable model equals transformers' in float64: logits, loss, and every parameter's gradient."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from antiphon.comm.mesh import Sizes, connect
from antiphon.models.config import load_model_spec
from antiphon.train.hugging_face import export, import_weights, tensors_of
from antiphon.train.model import Batch, MoeModel
from antiphon.train.weights import FirstValues
from tests.models.conftest import FAMILIES
from tests.train.harness import LiveParameters, logits_of, loss_of

LENGTH = 37
PUBLISHED = [family for family in FAMILIES if family != "kimi_k2"]  # whose experts transformers cannot unstack


def trainable(folder: Path, dtype: torch.dtype = torch.float32) -> MoeModel:
    spec = load_model_spec(folder)
    model = MoeModel(spec, connect(Sizes(), 0), max_positions=128, dtype=dtype, first=FirstValues(3))
    import_weights(model, folder)
    return model.to(dtype)


def batch_of(ids_BS: Tensor) -> Batch:
    targets = torch.full_like(ids_BS, -100)
    targets[:, :-1] = ids_BS[:, 1:]
    positions = torch.arange(ids_BS.shape[1]).expand_as(ids_BS)
    return Batch(ids_BS, targets, positions, None)


@pytest.mark.usefixtures("unrounded")
@pytest.mark.parametrize("family", PUBLISHED)
def test_logits_loss_and_gradients_equal_transformers(family: str, save_model: Any, tools: Any) -> None:
    saved = save_model(tools.config(family))
    saved.model.double()  # at float32 a clamp or a router may decide the last bit differently
    model = trainable(saved.folder, torch.float64)
    ids = tools.ids(3 * LENGTH).clamp(min=3).view(3, LENGTH)  # transformers gives padding no gradient
    batch = batch_of(ids)
    expected = saved.model(ids).logits
    limit = 2e-6 if family == "deepseek_v2" else 1e-9  # transformers rotates its queries in complex64
    assert float((logits_of(model, batch) - expected).detach().abs().max()) < limit
    num_targets = torch.tensor(3 * (LENGTH - 1))
    loss = loss_of(model, batch, num_targets)
    theirs = torch.nn.functional.cross_entropy(expected[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    torch.testing.assert_close(loss, theirs, rtol=limit, atol=limit)
    loss.backward()
    theirs.backward()
    compare_gradients(model, saved.model, limit)


def compare_gradients(model: MoeModel, theirs: Any, limit: float) -> None:
    """By the published names: ours through the export, theirs through their own save."""
    for parameter in model.parameters():
        parameter.data = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
    ours = {each.name: each.value for each in tensors_of(LiveParameters(model))}
    for parameter in theirs.parameters():
        parameter.data = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
    published = published_tensors(theirs)
    for name, gradient in published.items():
        if name not in ours or name.endswith("e_score_correction_bias"):
            continue
        scale = float(gradient.abs().max()) or 1.0
        assert float((ours[name] - gradient).abs().max()) < limit * scale + 1e-12, name
    compared = [name for name in ours if name in published]
    assert len(compared) > 0.9 * len(ours), sorted(set(ours) - set(published))[:5]


def published_tensors(model: Any) -> dict[str, Tensor]:
    """As `save_pretrained` would write them."""
    import tempfile

    from safetensors.torch import load_file

    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return {name: tensor for file in Path(folder).glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.mark.parametrize("family", PUBLISHED)
def test_an_export_is_what_was_imported(family: str, save_model: Any, tools: Any, tmp_path: Path) -> None:
    saved = save_model(tools.config(family))
    model = trainable(saved.folder)
    config = json.loads((saved.folder / "config.json").read_text())
    export(LiveParameters(model), tmp_path / "out", config, {}, torch.float32)
    again = trainable(tmp_path / "out")
    both = (tensors_of(LiveParameters(each)) for each in (model, again))
    for first, second in zip(*both, strict=True):
        assert torch.equal(first.value, second.value), first.name
    ids = tools.ids(LENGTH)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager").eval()
    with torch.inference_mode():
        error = (loaded(ids[None]).logits[0] - saved.logits(ids)).abs().max()
    assert float(error) < 1e-5
