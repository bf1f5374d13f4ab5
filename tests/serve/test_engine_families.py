"""All families through whole engines, in both layouts; 5 experts (8 for DeepSeek's likes) on an uneven two workers."""

from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from tests.models.conftest import FAMILIES
from tests.models.float8_specimens import FORMATS, quantize_checkpoint
from tests.serve.engine_harness import TinyModel, complete, config, random_prompts, running, save_tiny_model

LAYOUTS = ("1", "1+2/m2")
# The layouts alternate over the families; the other half of the matrix is slow.
MATRIX = [
    pytest.param(family, LAYOUTS[(number + turn) % 2], marks=[pytest.mark.slow] * turn)
    for turn in range(2)
    for number, family in enumerate(FAMILIES)
]
RANKED = ("1t2", "1t2+1t3/m2", "1t3+2t2/m2")
QUICK = ("olmoe", "deepseek_v2", "gpt_oss")  # norms over all heads, latent attention, sinks and biases
RANKS = [
    pytest.param(family, RANKED[number % 3], marks=[] if family in QUICK else [pytest.mark.slow])
    for number, family in enumerate(FAMILIES)
]
HANDED_OVER = ("1>1", "1t2>1+2/m2", "1+1/m2>1t2")
POOLS = [
    pytest.param(family, HANDED_OVER[number % 3], marks=[] if family in QUICK[1:] else [pytest.mark.slow])
    for number, family in enumerate(FAMILIES)
]
FREE = [
    pytest.param(family, "2+2/m2 free", marks=[] if family == "deepseek_v2" else [pytest.mark.slow])
    for family in FAMILIES
]


@pytest.mark.parametrize(("family", "layout"), [*MATRIX, *RANKS, *POOLS, *FREE])
def test_greedy_tokens_equal_transformers(family: str, layout: str, tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "checkpoint", family)
    prompts = random_prompts([1, 40] * 6, seed=5)
    with running(config(model, layout)) as engine:
        assert complete(engine, prompts) == model.greedy(prompts)
        assert ">" not in layout or engine.stats().handovers.num_done


def test_a_float8_checkpoint_says_that_only_its_weights_are_float8(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = save_tiny_model(tmp_path / "checkpoint", "glm4_moe").folder
    wide_folder = quantize_checkpoint(folder, FORMATS["compressed-tensors, one scale a row"])
    wide = TinyModel(folder, AutoModelForCausalLM.from_pretrained(wide_folder, attn_implementation="eager").eval())
    prompts = random_prompts([1, 40] * 3, seed=5)
    expected = wide.greedy(prompts)
    caplog.set_level("INFO")
    for layout in LAYOUTS:
        caplog.clear()
        with running(config(wide, layout)) as engine:
            assert complete(engine, prompts) == expected, layout
        said = "8 bits for weights only: activations, which this checkpoint would round too, are not rounded"
        assert [record.message for record in caplog.records].count(said) == 1
