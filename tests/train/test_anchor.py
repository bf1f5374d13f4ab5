"""Sixty steps of training beside transformers in float64, with weights and data from a plain integer generator.

Nothing is random, so everybody who runs this gets the same digits. transformers rounds norms, router scores and logits
to float32 even in a float64 model, which hides whatever is smaller; here it is kept from that. A wrong gradient, a
skipped expert or a clip that counts a gradient twice shows at once.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor

from antiphon.comm.mesh import Sizes, connect
from antiphon.kernels.ops.cross_entropy import IGNORED
from antiphon.models.config import load_model_spec
from antiphon.train.hugging_face import import_weights
from antiphon.train.model import Batch, MoeModel
from antiphon.train.shards import Shards
from tests.train.harness import loss_of

NUM_STEPS, NUM_SEQUENCES, LENGTH, VOCABULARY = 60, 4, 32, 64
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
MODELS: dict[str, Callable[[], Any]] = {
    "olmoe": lambda: transformers.OlmoeConfig(**SIZES | {"num_experts": 8, "num_key_value_heads": 4}),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
        **SIZES | {"num_experts": 8, "head_dim": 8, "moe_intermediate_size": 48, "norm_topk_prob": True}
    ),
    "mixtral": lambda: transformers.MixtralConfig(**SIZES | {"num_local_experts": 8}),
    "deepseek_v3": lambda: transformers.DeepseekV3Config(
        **SIZES
        | {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "n_shared_experts": 1, "first_k_dense_replace": 1}
        | {"moe_intermediate_size": 48, "q_lora_rank": 16, "kv_lora_rank": 16, "num_key_value_heads": 4}
        | {"qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
    ),
}


def generated(count: int, seed: int) -> list[int]:
    """15-bit numbers of a linear congruential generator."""
    numbers = []
    for _ in range(count):
        seed = (1103515245 * seed + 12345) & 0x7FFFFFFF
        numbers.append(seed >> 16)
    return numbers


def batches() -> list[Tensor]:
    """Sequences that mostly follow a rule: token = 3 * last + 7, with noise at one place in eight."""
    numbers = iter(generated(NUM_STEPS * NUM_SEQUENCES * LENGTH * 2, 1))
    found = []
    for _ in range(NUM_STEPS):
        rows = []
        for _ in range(NUM_SEQUENCES):
            row = [next(numbers) % VOCABULARY, next(numbers) % VOCABULARY]
            while len(row) < LENGTH:
                z = next(numbers)
                row.append((3 * row[-1] + 7) % VOCABULARY if z % 8 else z // 8 % VOCABULARY)
            rows.append(row)
        found.append(torch.tensor(rows))
    return found


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


Curve = list[tuple[float, float]]


def curve(
    parameters: list[Tensor], loss_of: Callable[[Tensor], Tensor], norm_and_clip: Callable[[], float], num_steps: int
) -> Curve:
    """(loss, gradient norm) of every step."""
    optimizer = torch.optim.AdamW(parameters, lr=3e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    found = []
    for ids in batches()[:num_steps]:
        loss = loss_of(ids)
        loss.backward()
        norm = norm_and_clip()
        optimizer.step()
        optimizer.zero_grad()
        found.append((float(loss.detach()), norm))
    return found


def both_curves(
    name: str, folder: Path, num_steps: int, spoil: Callable[[MoeModel], None] = lambda model: None
) -> tuple[Curve, Curve]:
    """Ours and theirs; `spoil` may do something to our gradients before their norm is taken."""
    theirs = theirs_of(name)
    theirs.save_pretrained(folder / "model")
    theirs.double()
    spec = load_model_spec(folder / "model")
    ours = MoeModel(spec, connect(Sizes(), 0), max_positions=LENGTH, dtype=torch.float64)
    import_weights(ours, folder / "model")
    ours.double()

    def our_loss(ids: Tensor) -> Tensor:
        targets = torch.full_like(ids, IGNORED)
        targets[:, :-1] = ids[:, 1:]
        positions = torch.arange(LENGTH).expand_as(ids)
        return loss_of(ours, Batch(ids, targets, positions, None), torch.tensor(NUM_SEQUENCES * (LENGTH - 1)))

    shards = Shards(ours)

    def our_clip() -> float:
        spoil(ours)
        shards.reduce()
        norm = shards.norm()
        shards.clip(norm, 1.0)
        return float(norm)

    expected = curve(
        list(theirs.parameters()),
        lambda ids: F.cross_entropy(theirs(ids).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()),
        lambda: float(torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)),
        num_steps,
    )
    return curve([piece.values for piece in shards.pieces], our_loss, our_clip, num_steps), expected


def differences(found: Curve, expected: Curve) -> tuple[float, float]:
    """The largest of the losses and of the norms."""
    pairs = list(zip(found, expected, strict=True))
    return max(abs(ours[0] - theirs[0]) for ours, theirs in pairs), max(abs(a[1] - b[1]) for a, b in pairs)


@pytest.mark.usefixtures("unrounded")
@pytest.mark.parametrize("name", MODELS)
def test_sixty_steps_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    found, expected = both_curves(name, tmp_path, NUM_STEPS)
    loss, norm = differences(found, expected)
    print(f"{name}: loss {loss:.0e}, norm {norm:.0e}")
    assert expected[-1][0] < expected[0][0] - 0.5, "it learned"
    assert loss < 1e-9
    assert norm < 1e-7


def double_an_expert(model: MoeModel) -> None:
    model.layers[1].get_parameter("experts_down").grad[3] *= 2  # type: ignore[index]


def drop_an_expert(model: MoeModel) -> None:
    model.layers[1].get_parameter("experts_gate_up").grad[3] = 0  # type: ignore[index]


def drop_the_router(model: MoeModel) -> None:
    model.layers[0].get_parameter("router").grad = None


@pytest.mark.usefixtures("unrounded")
@pytest.mark.parametrize("spoil", [double_an_expert, drop_an_expert, drop_the_router])
def test_what_goes_wrong_is_seen(spoil: Callable[[MoeModel], None], tmp_path: Path) -> None:
    """A comparison that would not notice these would say nothing."""
    loss, norm = differences(*both_curves("olmoe", tmp_path, 4, spoil))
    assert loss > 1e-8
    assert norm > 1e-5
