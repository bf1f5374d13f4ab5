"""Models that do not run are refused with what they have that we lack, and with what to use instead."""

from typing import Any

import pytest

from antiphon.base.errors import CheckpointError
from antiphon.models.config import LACKING, TEXT_MODELS, model_spec
from antiphon.models.families.config_readers import FAMILIES


def message_of(config: dict[str, Any]) -> str:
    with pytest.raises(CheckpointError) as caught:
        model_spec(config)
    return str(caught.value)


def test_no_family_is_both_run_and_refused() -> None:
    assert not FAMILIES.keys() & (LACKING.keys() | TEXT_MODELS.keys())


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "deepseek_v32",
            "it has sparse attention, whose indexer picks the tokens to look at: use DeepSeek-V3.1",
        ),
        ("qwen3_next", "it has linear attention in most layers: use Qwen3-30B-A3B"),
        ("hunyuan_v1_moe", "it has norms of queries and keys after their rotation: use Qwen3-30B-A3B"),
        ("flex_olmo", "it has norms after attention and experts instead of before: use OLMoE-1B-7B"),
    ],
)
def test_what_a_model_has_that_we_lack(name: str, expected: str) -> None:
    assert message_of({"model_type": name}) == f"config.json: model_type = {name!r} is not supported, {expected}"


@pytest.mark.parametrize("name", ["Qwen3_MoE", "qwen3-moe", "qwen3moe", " qwen3_moe"])
def test_a_family_in_another_spelling(name: str) -> None:
    assert message_of({"model_type": name}) == f"config.json: model_type = {name!r} is not supported: write qwen3_moe"


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (
            {
                "model_type": "qwen3_vl_moe",
                "text_config": {"model_type": "qwen3_vl_moe_text"},
                "vision_config": {"depth": 27},
            },
            "'qwen3_vl_moe' is not supported, it is a text model (qwen3_vl_moe_text) with vision around it and only "
            "text models run: use Qwen3-30B-A3B",
        ),
        (
            {
                "model_type": "qwen3_omni_moe",
                "talker_config": {},
                "thinker_config": {"model_type": "qwen3_omni_moe_thinker", "audio_config": {}},
            },
            "'qwen3_omni_moe' is not supported, it is a text model (qwen3_omni_moe_thinker) with speech around it and "
            "only text models run: use Qwen3-30B-A3B",
        ),
        (
            {"model_type": "kimi_k25", "text_config": {"model_type": "kimi_k2"}, "vision_config": {}},
            "'kimi_k25' is not supported, it is a text model (kimi_k2) with vision around it and only text models run: "
            "use Kimi-K2-Instruct",
        ),
        (
            {
                "model_type": "new_one",
                "text_config": {"model_type": "mixtral"},
                "audio_config": {},
                "vision_config": {},
            },
            "'new_one' is not supported, it is a text model (mixtral) with vision and audio around it and only text "
            "models run: use a text-only model, whose config.json has no text_config",
        ),
        (
            {"model_type": "new_one", "text_config": {}},
            "'new_one' is not supported, it is a text model (unknown) with other parts around it and only text models "
            "run: use a text-only model, whose config.json has no text_config",
        ),
    ],
)
def test_a_text_model_with_more_around_it(config: dict[str, Any], expected: str) -> None:
    assert message_of(config) == f"config.json: model_type = {expected}"


@pytest.mark.parametrize(
    ("name", "written"), [("llama", "'llama'"), (None, "null"), (7, "7"), (["mixtral"], "['mixtral']")]
)
def test_any_other_type_gets_the_list_of_what_runs(name: Any, written: str) -> None:
    expected = f"config.json: model_type = {written} is not supported: use one of {', '.join(sorted(FAMILIES))}"
    assert message_of({"model_type": name}) == expected
