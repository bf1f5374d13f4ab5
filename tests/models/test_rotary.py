"""Long-context scalings equal transformers' logits, and both spellings of a config give the same `RopeSpec`."""

import copy
import json
import logging
from typing import Any

import pytest
import torch

from antiphon.base.errors import CheckpointError, UserError
from antiphon.models.config import load_model_spec, model_spec
from antiphon.models.families.config_keys import check_rope_scaling
from antiphon.models.rotary import rotary_table
from antiphon.specs.model import RopeSpec

TOLERANCE = 2e-4
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 10000.0}
DEEPSEEK_YARN = YARN | {"mscale": 0.707, "mscale_all_dim": 0.9, "beta_fast": 16, "beta_slow": 2}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 5000.0,
}


def error_of(saved: Any, tools: Any, length: int, chunks: list[int], **how: Any) -> float:
    token_ids = tools.ids(length)
    expected = saved.logits(token_ids)
    return float((tools.run(tools.load(saved.folder, **how), token_ids, chunks) - expected).abs().max())


@pytest.mark.parametrize(
    ("family", "rope"),
    [
        ("qwen3_moe", {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}),
        ("mixtral", LLAMA3),
        ("qwen3_moe", YARN),
        ("qwen2_moe", YARN | {"attention_factor": 1.3}),
        ("qwen3_moe", YARN | {"truncate": False}),
        ("deepseek_v2", DEEPSEEK_YARN),
        ("deepseek_v3", DEEPSEEK_YARN),
        ("deepseek_v3", YARN | {"mscale": 1.0, "mscale_all_dim": 1.0, "factor": 40}),
        ("deepseek_v3", {"rope_type": "default", "rope_theta": 1e4, "mscale_all_dim": 1.0, "factor": 40.0}),
    ],
)
def test_scaling_equals_transformers(family: str, rope: dict[str, Any], save_model: Any, tools: Any) -> None:
    saved = save_model(tools.config(family, rope_parameters=dict(rope)))
    assert error_of(saved, tools, 100, [100]) < TOLERANCE
    assert error_of(saved, tools, 100, [60, 39, 1]) < TOLERANCE


def test_dynamic_scaling_follows_the_number_of_positions(save_model: Any, tools: Any) -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    saved = save_model(tools.config("qwen3_moe", rope_parameters=rope, max_position_embeddings=48))
    assert error_of(saved, tools, 40, [40]) < TOLERANCE
    assert error_of(saved, tools, 90, [90], max_positions=90) < TOLERANCE


def longrope(width: int, **own: Any) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(3)
    short, long = (1.0 + torch.rand(2, width // 2, generator=generator) * torch.tensor([[0.5], [8.0]])).tolist()
    return {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": short,
        "long_factor": long,
        "original_max_position_embeddings": 32,
    } | own


def test_longrope_of_phi_below_and_beyond_the_trained_length(save_model: Any, tools: Any) -> None:
    rope = longrope(8, short_mscale=1.243, long_mscale=1.243)
    saved = save_model(tools.config("phimoe", rope_parameters=rope))
    assert error_of(saved, tools, 30, [30]) < TOLERANCE
    assert error_of(saved, tools, 30, [20, 9, 1]) < TOLERANCE
    assert error_of(saved, tools, 90, [90]) < TOLERANCE
    assert error_of(saved, tools, 90, [31, 2, 57]) < TOLERANCE


def test_longrope_magnitude_of_phi_is_the_short_one_below_the_trained_length(save_model: Any, tools: Any) -> None:
    saved = save_model(tools.config("phimoe", rope_parameters=longrope(8, short_mscale=1.1, long_mscale=1.4)))
    assert error_of(saved, tools, 32, [32]) < TOLERANCE


def test_longrope_of_other_families_equals_decoding_past_the_trained_length(save_model: Any, tools: Any) -> None:
    """transformers picks factors by the length so far; with a cache, rows past the trained length use the long ones."""
    saved = save_model(tools.config("qwen3_moe", rope_parameters=longrope(12, factor=4.0)))
    assert error_of(saved, tools, 30, [30]) < TOLERANCE
    token_ids = tools.ids(45)
    with torch.inference_mode():
        first = saved.model(token_ids[None, :32], use_cache=True)
        rest = [first.logits[0]]
        for token in token_ids[32:]:
            step = saved.model(token[None, None], past_key_values=first.past_key_values, use_cache=True)
            rest.append(step.logits[0])
    found = tools.run(tools.load(saved.folder), token_ids, [45])
    assert float((found - torch.cat(rest)).abs().max()) < TOLERANCE


QWEN3 = {
    "model_type": "qwen3_moe",
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "max_position_embeddings": 128,
}


def test_published_and_rewritten_spellings_give_the_same_rope() -> None:
    published = model_spec(
        QWEN3
        | {
            "rope_theta": 5e5,
            "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
        }
    )
    rewritten = model_spec(QWEN3 | {"rope_parameters": YARN | {"rope_theta": 5e5}})
    assert published.attention.rope == rewritten.attention.rope
    assert published.attention.rope == RopeSpec(
        dim=12, theta=5e5, scaling="yarn", parameters={"factor": 4.0}, max_position=128, original_max_position=32
    )


@pytest.mark.parametrize(
    "config",
    [{"partial_rotary_factor": 0.5}, {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}],
)
def test_a_part_of_a_head_is_not_rotated_where_others_rotate_the_whole(config: dict[str, Any]) -> None:
    """transformers leaves the key out in this family; the parts of a head that families rotate: `test_families`."""
    assert model_spec(QWEN3 | {"partial_rotary_factor": 1.0}).attention.rope.dim == 12
    with pytest.raises(CheckpointError, match=r"partial_rotary_factor = 0\.5 is not supported: use a model with 1"):
        model_spec(QWEN3 | config)


def test_unknown_rope_type() -> None:
    with pytest.raises(CheckpointError) as caught:
        model_spec(QWEN3 | {"rope_scaling": {"rope_type": "mystery", "factor": 2.0}})
    assert str(caught.value) == (
        "config.json: rope_type = 'mystery' is not supported: "
        "use one of default, dynamic, linear, llama3, longrope, none, su, yarn"
    )


def test_missing_rope_number() -> None:
    with pytest.raises(CheckpointError) as caught:
        model_spec(QWEN3 | {"rope_scaling": {"rope_type": "llama3", "factor": 2.0}})
    assert str(caught.value) == (
        "config.json: rope_type = 'llama3' needs low_freq_factor, high_freq_factor: add it to rope_parameters"
    )


def test_a_key_without_a_use_is_named(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "antiphon"):
        model_spec(QWEN3 | {"rope_scaling": RECIPE})
        assert not caplog.text
        model_spec(QWEN3 | {"rope_scaling": RECIPE | {"attn_factor": 2.0}})
    assert "config.json: 'attn_factor' means nothing to the scaling yarn: left out" in caplog.text


def test_table_has_the_positions_asked_for() -> None:
    table = rotary_table(RopeSpec(dim=8, theta=10000.0), 5, torch.device("cpu"))
    assert table.cos.shape == table.sin.shape == (5, 4)
    assert table.cos[0].tolist() == [1.0] * 4
    assert table.sin[1, 0].item() == pytest.approx(0.841471)


RECIPE = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
ADDED: dict[str, dict[str, Any]] = {
    "yarn": RECIPE,
    "yarn, named as transformers 4 does": {"type": "yarn", "factor": 4, "original_max_position_embeddings": 32},
    "yarn, trained length not stated": {"rope_type": "yarn", "factor": 2.0},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama3": {key: value for key, value in LLAMA3.items() if key != "rope_theta"},
}


@pytest.mark.parametrize("scaling", ADDED.values(), ids=ADDED)
@pytest.mark.parametrize("how", ["in config.json", "by option"])
def test_a_scaling_added_by_hand(scaling: dict[str, Any], how: str, save_model: Any, tools: Any) -> None:
    """Positions beyond those of training; the base of the file that transformers 5 wrote stays."""
    theta = {"rope_type": "default", "rope_theta": 5e4}
    saved = save_model(tools.config("qwen3_moe", rope_parameters=theta, max_position_embeddings=40))
    kind = {"rope_type": scaling.get("type", scaling.get("rope_type")), "rope_theta": 5e4}
    rope = {key: value for key, value in scaling.items() if key != "type"} | kind
    changed = tools.config("qwen3_moe", rope_parameters=copy.deepcopy(rope), max_position_embeddings=40)
    model = type(saved.model).from_pretrained(saved.folder, config=changed, attn_implementation="eager").eval()
    if how == "in config.json":
        file = saved.folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"rope_scaling": scaling}))
    token_ids = tools.ids(100)
    with torch.inference_mode():
        expected = model(token_ids[None]).logits[0]
    option = json.dumps(scaling) if how == "by option" else ""
    found = tools.run(tools.load(saved.folder, rope_scaling=option, max_positions=100), token_ids, [60, 40])
    assert float((found - expected).abs().max()) < TOLERANCE
    assert float((expected - saved.logits(token_ids)).abs().max()) > 0.01, "the scaling changes nothing"


@pytest.mark.parametrize(
    ("scaling", "positions"),
    [
        (RECIPE, 128),
        (RECIPE | {"factor": 1.5}, 48),
        (RECIPE | {"factor": 1.1}, 40),
        ({"type": "yarn", "factor": 4.0}, 40),
        ({"rope_type": "linear", "factor": 4.0}, 40),
        (longrope(12, factor=4.0), 40),
    ],
)
def test_the_context_of_a_scaling(scaling: dict[str, Any], positions: int, tmp_path: Any) -> None:
    """YaRN is published with the positions it stretches; every other file says itself how far it goes."""
    config = QWEN3 | {"max_position_embeddings": 40}
    assert model_spec(config | {"rope_scaling": scaling}).max_position == positions
    assert model_spec(config | {"rope_parameters": scaling | {"rope_theta": 1e4}}).max_position == positions
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert load_model_spec(tmp_path, json.dumps(scaling)).max_position == positions


def test_an_option_replaces_the_scaling_of_the_file(tmp_path: Any) -> None:
    file = {"rope_parameters": DEEPSEEK_YARN | {"rope_theta": 7e4}, "original_max_position_embeddings": 16}
    (tmp_path / "config.json").write_text(json.dumps(QWEN3 | file))
    found = load_model_spec(tmp_path, json.dumps({"rope_parameters": RECIPE})).attention.rope
    assert found == RopeSpec(
        dim=12, theta=7e4, scaling="yarn", parameters={"factor": 4.0}, max_position=128, original_max_position=32
    )
    assert load_model_spec(tmp_path, '{"rope_type": "default"}').attention.rope.scaling == "none"
    (tmp_path / "config.json").write_text(json.dumps(QWEN3 | {"rope_scaling": [1]}))
    assert load_model_spec(tmp_path, json.dumps(RECIPE)).attention.rope.scaling == "yarn"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("yarn", "--rope-scaling 'yarn': not valid JSON (Expecting value: line 1 column 1 (char 0)): write '{"),
        ("[4]", "--rope-scaling '[4]': an object is needed: write '{"),
        ("{}", "--rope-scaling: rope_type = null: use one of default, dynamic, linear, llama3, longrope, none,"),
        ('{"type": "ntk"}', "--rope-scaling: rope_type = 'ntk': use one of default, dynamic,"),
        ('{"type": "yarn"}', "--rope-scaling: yarn needs factor: add it"),
        (
            '{"type": "linear", "factor": 2, "beta_fast": 1}',
            "--rope-scaling: 'beta_fast' means nothing to linear: it has factor, rope_theta, partial_rotary_factor",
        ),
        (
            '{"type": "yarn", "factor": "4"}',
            "--rope-scaling: factor = '4': a number above 0 up to 1e+09 is needed",
        ),
        ('{"type": "yarn", "factor": 2, "factor": 4}', "'factor' stands there twice"),
        ('{"type": "yarn", "factor": NaN}', "it holds NaN, which is not JSON"),
    ],
)  # fmt: skip
def test_options_that_are_refused(text: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        check_rope_scaling(text)
    assert message in str(caught.value)


def test_a_stretch_beyond_all_bounds() -> None:
    with pytest.raises(CheckpointError, match=r"factor = 1000000000\.0 for 32 positions: at most 1,073,741,824"):
        model_spec(QWEN3 | {"rope_scaling": RECIPE | {"factor": 1e9}})
