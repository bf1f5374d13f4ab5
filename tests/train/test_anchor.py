"""Sixty steps of training beside transformers in float64, with weights and data from a plain integer generator: in one
process, and on two ranks in every form. The quick lane has sixty of one model and three of everything else.

Everybody who runs this gets the same digits. transformers rounds norms, router scores and logits to float32 even in a
float64 model, which hides whatever is smaller; here it is kept from that. A wrong gradient, a skipped expert or a clip
that counts a gradient twice shows at once.
"""

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from antiphon.comm.mesh import Sizes
from tests.comm.ranks import on_ranks
from tests.train.anchor_curves import (
    MICRO_BATCHES,
    NUM_STEPS,
    VOCABULARY,
    Curve,
    Run,
    Spoil,
    adamw,
    batches,
    curves_of,
    double_an_expert,
    drop_an_expert,
    drop_the_router,
    generated,
)
from tests.train.conftest import unround

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "num_experts_per_tok": 2,
    "tie_word_embeddings": False,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": 0,
}
QWEN3 = {"num_experts": 8, "head_dim": 8, "moe_intermediate_size": 48, "norm_topk_prob": True}
MODELS: dict[str, Callable[[], Any]] = {
    "olmoe": lambda: transformers.OlmoeConfig(**SIZES | {"num_experts": 8, "num_key_value_heads": 4}),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(**SIZES | QWEN3),
    "qwen3_moe balanced": lambda: transformers.Qwen3MoeConfig(**SIZES | QWEN3),
    "mixtral": lambda: transformers.MixtralConfig(**SIZES | {"num_local_experts": 8}),
    "deepseek_v3": lambda: transformers.DeepseekV3Config(
        **SIZES
        | {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "n_shared_experts": 1, "first_k_dense_replace": 1}
        | {"moe_intermediate_size": 48, "q_lora_rank": 16, "kv_lora_rank": 16, "num_key_value_heads": 4}
        | {"qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
    ),
}
BALANCE = {"qwen3_moe balanced": 0.01}
FORMS = {
    "expert": Sizes(world_size=2, expert=2),
    "sequence": Sizes(world_size=2, sequence=2),
    "tensor": Sizes(world_size=2, tensor=2, expert_tensor=2),
    "pipeline": Sizes(world_size=2, pipeline=2),
    "sequence and expert": Sizes(world_size=2, sequence=2, expert=2),
}
ON_RANKS = {
    f"{name}, {form}": (name, form)
    for name in MODELS
    for form in FORMS
    if name in BALANCE or form == "sequence and expert"
}
FEW_STEPS = 3  # in the quick lane
SPOILED = "expert 3 doubled on its rank"


def theirs_of(name: str) -> Any:
    """transformers' model with generated weights."""
    config = MODELS[name]()
    config._experts_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    for index, (parameter_name, parameter) in enumerate(sorted(model.named_parameters())):
        if "norm" in parameter_name:
            parameter.data.fill_(1)
        else:
            numbers = torch.tensor(generated(parameter.numel(), 17 + index), dtype=torch.float64)
            parameter.data.copy_(((numbers / 32768 - 0.5) * 0.08).view_as(parameter))  # rounded to float32
    return model


def their_curve(name: str, num_steps: int, folder: Path) -> Curve:
    """transformers' losses and norms; the model is saved in `folder` before its first step."""
    model = theirs_of(name)
    model.save_pretrained(folder)
    model.double()
    optimizer, weight, found = adamw(list(model.parameters())), BALANCE.get(name, 0.0), []
    for ids in batches()[:num_steps]:
        loss = F.cross_entropy(model(ids).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        (loss + weight * balance_of(model, ids) if weight else loss).backward()
        norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        optimizer.step()
        optimizer.zero_grad()
        found.append((float(loss.detach()), norm))
    return found


def balance_of(model: Any, ids: Tensor) -> Tensor:
    """The mean over micro-batches."""
    experts, top_k = model.config.num_experts, model.config.num_experts_per_tok
    logits = [model(part, output_router_logits=True).router_logits for part in ids.chunk(MICRO_BATCHES)]
    return torch.stack([load_balancing_loss_func(each, experts, top_k) for each in logits]).mean()


Theirs = Callable[[str, int], tuple[Path, Curve]]


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Theirs:
    """The folder of a model, and its curve of so many steps."""

    def found(name: str, num_steps: int) -> tuple[Path, Curve]:
        folder = tmp_path_factory.mktemp("model")
        with pytest.MonkeyPatch.context() as patch:
            unround(patch)
            return folder, their_curve(name, num_steps, folder)

    return cache(found)


def differences(found: Curve, expected: Curve) -> tuple[float, float]:
    """The largest of the losses and of the norms."""
    pairs = list(zip(found, expected, strict=True))
    return max(abs(ours[0] - theirs[0]) for ours, theirs in pairs), max(abs(a[1] - b[1]) for a, b in pairs)


def lengths_of(name: str) -> list[Any]:
    """One model of all steps in the quick lane, all models in the slow one."""
    long = pytest.param(name, NUM_STEPS, marks=() if name == "olmoe" else pytest.mark.slow)
    return [long] if name == "olmoe" else [(name, FEW_STEPS), long]


@pytest.mark.parametrize(("name", "num_steps"), [each for name in MODELS for each in lengths_of(name)])
def test_steps_are_those_of_transformers(name: str, num_steps: int, theirs: Theirs) -> None:
    folder, expected = theirs(name, num_steps)
    found = Run(folder, BALANCE.get(name, 0.0), num_steps).curve()
    loss, norm = differences(found, expected)
    print(f"{name}: loss {loss:.0e}, norm {norm:.0e}")
    assert len(found) == len(expected) == num_steps
    assert num_steps < NUM_STEPS or expected[-1][0] < expected[0][0] - 0.5, "it learned"
    assert loss < 1e-9
    assert norm < 1e-7


OnTwo = Callable[[int], list[dict[str, Curve]]]


@pytest.fixture(scope="module")
def on_two(theirs: Theirs, tmp_path_factory: pytest.TempPathFactory) -> OnTwo:
    """The curves of so many steps, by rank."""

    def found(num_steps: int) -> list[dict[str, Curve]]:
        runs = {
            both: Run(theirs(name, num_steps)[0], BALANCE.get(name, 0.0), num_steps, FORMS[form])
            for both, (name, form) in ON_RANKS.items()
        }
        runs[SPOILED] = Run(
            theirs("olmoe", num_steps)[0], num_steps=FEW_STEPS, sizes=FORMS["pipeline"], spoil=double_an_expert
        )
        return on_ranks(2, tmp_path_factory.mktemp("ranks"), partial(curves_of, runs))

    return cache(found)


SIXTY = pytest.param(NUM_STEPS, marks=[pytest.mark.slow, pytest.mark.timeout(1200)])  # the first one runs all forms


@pytest.mark.parametrize("num_steps", [FEW_STEPS, SIXTY])
@pytest.mark.parametrize("both", ON_RANKS)
def test_steps_on_two_ranks_are_those_of_transformers(both: str, num_steps: int, theirs: Theirs, on_two: OnTwo) -> None:
    for of_rank in on_two(num_steps):
        loss, norm = differences(of_rank[both], theirs(ON_RANKS[both][0], num_steps)[1])
        print(f"{both}: loss {loss:.0e}, norm {norm:.0e}")
        assert len(of_rank[both]) == num_steps
        assert loss < 1e-8
        assert norm < 1e-8


@pytest.mark.parametrize("spoil", [double_an_expert, drop_an_expert, drop_the_router])
def test_what_goes_wrong_is_seen(spoil: Spoil, theirs: Theirs) -> None:
    """A comparison that would not notice these would say nothing."""
    folder, expected = theirs("olmoe", FEW_STEPS)
    loss, norm = differences(Run(folder, num_steps=FEW_STEPS, spoil=spoil).curve(), expected)
    assert loss > 1e-8
    assert norm > 1e-5


def test_what_goes_wrong_on_one_rank_is_seen(theirs: Theirs, on_two: OnTwo) -> None:
    loss, norm = differences(on_two(FEW_STEPS)[0][SPOILED], theirs("olmoe", FEW_STEPS)[1])
    assert loss > 1e-8
    assert norm > 1e-5


def test_a_balance_loss_that_is_left_out_is_seen(theirs: Theirs) -> None:
    folder, expected = theirs("qwen3_moe balanced", FEW_STEPS)
    loss, norm = differences(Run(folder, num_steps=FEW_STEPS).curve(), expected)
    assert loss > 1e-8
    assert norm > 1e-8
