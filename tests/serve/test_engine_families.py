"""All eight families through whole engines, in both layouts; 5 experts (8 for DeepSeek) on an uneven two workers."""

from pathlib import Path

import pytest

from antiphon.specs.sampling import SamplingParams
from tests.serve.engine_harness import complete, config, random_prompts, running, save_tiny_model

NUM_TOKENS = 32
FAMILIES = ("mixtral", "dbrx", "qwen2_moe", "qwen3_moe", "olmoe", "phimoe", "deepseek_v2", "deepseek_v3")


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_equal_transformers_in_both_layouts(family: str, tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "checkpoint", family)
    prompts = random_prompts([1, 40] * 6, seed=5)
    expected = model.greedy(prompts, NUM_TOKENS)
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
    for layout in ("1", "1+2/m2"):
        with running(config(model, layout)) as engine:
            assert complete(engine, prompts, params) == expected, layout
