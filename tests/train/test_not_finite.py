"""Numbers that are not finite: the run ends and says where the first was made."""

from pathlib import Path
from typing import Any

import pytest
import torch

from antiphon.base.errors import UserError
from antiphon.kernels.ops import products
from antiphon.kernels.ops.attention import causal_attention
from antiphon.kernels.ops.route import choose_experts
from antiphon.models.config import load_model_spec
from antiphon.specs.model import RouterSpec
from antiphon.train import checkpoint, not_finite
from antiphon.train.config import TrainConfig
from antiphon.train.setup import build_model, prepare
from antiphon.train.shards import Shards
from antiphon.train.spans import StepSpans
from antiphon.train.trainer import TrainedStep, Trainer
from antiphon.train.weights import GATE_UP, Weights
from tests.train.harness import config_of


def complaint(trainer: Trainer) -> str:
    with pytest.raises(UserError) as caught:
        trainer.run()
    print(caught.value)
    return str(caught.value)


def spoiled(config: TrainConfig, step: int, name: str, value: float) -> Trainer:
    """One number of parameter `name` becomes `value` behind step `step`."""

    def spoil(result: TrainedStep) -> None:
        if result.step == step:
            with torch.no_grad():
                dict(trainer.model.named_parameters())[name].view(-1)[5] = value

    trainer = Trainer(prepare(config), spoil)
    return trainer


def test_a_nan_in_a_weight(tmp_path: Path) -> None:
    words = complaint(spoiled(config_of(tmp_path), 3, "layers.1.router", float("nan")))
    assert words.startswith("step 4: loss nan, gradient norm nan, so training cannot go on: layers.1.router (1 of ")
    assert (
        "was not finite before it; layer 1, gate, forward, aten.mm.default (micro-batch 0) made the first NaN" in words
    )
    assert "from what was not finite already" in words
    assert "the newest checkpoint, from before it, is " in words
    assert "step-00000003; lower optimizer.learning_rate (now 0.00" in words


def test_an_activation_that_overflows(tmp_path: Path) -> None:
    def enlarge(result: TrainedStep) -> None:
        if result.step == 1:
            with torch.no_grad():
                Weights(trainer.model.layers[1], torch.float32).stored(GATE_UP).fill_(1e20)

    trainer = Trainer(prepare(config_of(tmp_path, "micro_batch=2")), enlarge)
    words = complaint(trainer)
    assert "layer 1, activation, forward, aten.mul_.Tensor (micro-batch 0) made the first " in words
    assert "from finite numbers" in words
    assert "there is no checkpoint yet" in words


def test_a_gradient_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss is finite: from the third step on, the backward of the last layer's experts divides by zero."""
    whole, passes = products.grouped_input_gradient, []

    def gradient(grad: torch.Tensor, *others: Any) -> Any:
        passes.append(1)
        found = whole(grad, *others)
        return found / 0.0 if len(passes) > 8 and len(passes) % 4 == 1 else found

    monkeypatch.setattr(products, "grouped_input_gradient", gradient)
    words = complaint(Trainer(prepare(config_of(tmp_path))))
    assert words.startswith("step 2: loss 5."), words
    assert "gradient norm nan" in words
    assert "layer 1, fc2, backward, aten.div.Tensor (micro-batch 0) made the first " in words
    assert "from finite numbers" in words


def test_a_norm_that_overflows(tmp_path: Path) -> None:
    def enlarge(result: TrainedStep) -> None:
        trainer.model.final_norm.register_hook(lambda grad: grad.fill_(3e38))

    trainer = Trainer(prepare(config_of(tmp_path)), enlarge)
    words = complaint(trainer)
    assert "step 1: loss 5." in words
    assert "all gradients are finite here; the largest is 3e+38, of final_norm: perhaps too large for a norm" in words


def test_no_checkpoint_of_spoiled_parameters(tmp_path: Path) -> None:
    words = complaint(spoiled(config_of(tmp_path), 5, "layers.0.out", float("inf")))
    assert words.startswith("step 6: layers.0.out (1 of 1,024 numbers) was not finite: no checkpoint is written")
    assert checkpoint.find_checkpoints(tmp_path / "out/checkpoints")[-1].name == "step-00000003"


def test_minus_infinity_of_masks_is_no_fault(tmp_path: Path) -> None:
    """Groups of experts that are left out, sinks, and the second choice of sparsemixer."""
    torch.manual_seed(0)
    logits = torch.randn(6, 8, requires_grad=True)
    grouped = RouterSpec(num_experts=8, top_k=2, num_groups=4, top_k_groups=2, scoring="sigmoid")
    mixed = RouterSpec(num_experts=8, top_k=2, scoring="sparsemixer", jitter=0.01)
    q, k = torch.randn(2, 5, 4, 8, requires_grad=True), torch.randn(2, 5, 2, 8, requires_grad=True)

    def run() -> None:
        total = causal_attention(q, k, k, None, 0.3, torch.zeros(4)).sum()
        for router in (grouped, mixed):
            total = total + choose_experts(logits, torch.zeros(8), router)[1].square().sum()
        total.backward()

    config = config_of(tmp_path)
    model = build_model(load_model_spec(Path(config.model.path)), config, 16)
    number, words = not_finite.explain(model, Shards(model), lambda begin: run(), StepSpans())
    assert words.startswith("all gradients are finite here")
    assert number > 50


def test_masks_are_no_fault(tmp_path: Path) -> None:
    """Attention masks packed documents with minus infinity: the fault found lies behind it."""
    trainer = spoiled(config_of(tmp_path, "data.document_masks=true"), 0, "final_norm", float("inf"))
    assert "norm, forward, aten.mul_.Tensor (micro-batch 0) made the first" in complaint(trainer)
