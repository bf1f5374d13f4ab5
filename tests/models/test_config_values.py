"""Values of `config.json` that are refused, and what people read: the value, the limit, the fix."""

import json
from pathlib import Path
from typing import Any

import pytest

from antiphon.base.errors import CheckpointError
from antiphon.models.config import load_model_spec, model_spec
from antiphon.models.quantization import INSTEAD
from tests.models.test_config import DEEPSEEK_V3

COPY = "copy the file from the model's publisher"
MIXTRAL: dict[str, Any] = {
    "model_type": "mixtral",
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 32768,
}
YARN = DEEPSEEK_V3["rope_scaling"]
DYNAMIC = {"rope_scaling": {"type": "dynamic", "factor": 2.0}}
LONG = {"type": "longrope", "short_factor": [1.0] * 64, "long_factor": [1.0] * 63}
BANDS = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 1.0}
REFUSED: list[tuple[dict[str, Any], str]] = [
    # beyond all bounds
    ({"num_hidden_layers": 10**9}, f"num_hidden_layers = 1000000000: at most 10,000 is supported: {COPY}"),
    ({"num_local_experts": 10**9}, f"num_local_experts = 1000000000: at most 100,000 is supported: {COPY}"),
    ({"hidden_size": 2**40}, f"hidden_size = 1099511627776: at most 1,048,576 is supported: {COPY}"),
    ({"vocab_size": 10**12}, f"vocab_size = 1000000000000: at most 16,777,216 is supported: {COPY}"),
    (
        {"max_position_embeddings": 2**40},
        f"max_position_embeddings = 1099511627776: at most 1,073,741,824 is supported: {COPY}",
    ),
    (
        {"num_hidden_layers": 10_000, "num_local_experts": 100_000, "intermediate_size": 2**20},
        "the sizes make a model of 1.3e+19 parameters: at most 1e+15 are supported: correct them",
    ),
    # of a wrong type
    ({"num_hidden_layers": "32"}, f"num_hidden_layers = '32': a whole number of at least 1 is needed: {COPY}"),
    ({"num_local_experts": True}, f"num_local_experts = true: a whole number of at least 1 is needed: {COPY}"),
    ({"hidden_size": 4096.5}, f"hidden_size = 4096.5: a whole number of at least 1 is needed: {COPY}"),
    ({"attention_bias": "false"}, f"attention_bias = 'false': true or false is needed: {COPY}"),
    ({"rope_scaling": [1]}, f"rope_scaling = [1]: an object is needed: {COPY}"),
    ({"rope_scaling": "yarn"}, f"rope_scaling = 'yarn': an object is needed: {COPY}"),
    (
        {"rope_scaling": {"factor": 4.0}},
        "rope_scaling has factor = 4.0 and no rope_type: add the type, such as yarn, or remove the factor",
    ),
    ({"quantization_config": ["fp8"]}, f"quantization_config = ['fp8']: an object is needed: {COPY}"),
    ({"quantization_config": "fp8"}, f"quantization_config = 'fp8': an object is needed: {COPY}"),
    (
        {"quantization_config": {"quant_method": "fp8", "weight_block_size": 128}},
        f"quant_method = 'fp8' with weight_block_size = 128 is not supported: {INSTEAD}",
    ),
    ({"eos_token_id": "2"}, f"eos_token_id = '2': a whole number of at least 0 is needed: {COPY}"),
    ({"eos_token_id": [None]}, f"eos_token_id = [null]: in a list, a whole number of at least 0 is needed: {COPY}"),
    # numbers that nothing can be computed with
    ({"rope_theta": 0}, f"rope_theta = 0: a number above 1 up to 1e+15 is needed: {COPY}"),
    ({"rope_theta": -1e4}, f"rope_theta = -10000.0: a number above 1 up to 1e+15 is needed: {COPY}"),
    ({"rope_theta": float("nan")}, f"rope_theta = nan: a number above 1 up to 1e+15 is needed: {COPY}"),
    (
        {"rope_parameters": {"rope_theta": float("inf")}},
        f"rope_parameters.rope_theta = inf: a number above 1 up to 1e+15 is needed: {COPY}",
    ),
    ({"rms_norm_eps": -1e-5}, f"rms_norm_eps = -1e-05: a number from 0 up to 1 is needed: {COPY}"),
    ({"rms_norm_eps": float("inf")}, f"rms_norm_eps = inf: a number from 0 up to 1 is needed: {COPY}"),
    (
        {"rope_scaling": YARN | {"factor": 0}},
        f"rope_scaling.factor = 0: a number above 0 up to 1e+09 is needed: {COPY}",
    ),
    (
        {"rope_scaling": YARN | {"factor": [40]}},
        f"rope_scaling.factor = [40]: a number above 0 up to 1e+09 is needed: {COPY}",
    ),
    (
        {"partial_rotary_factor": 0},
        f"partial_rotary_factor = 0: a number above 0 up to 1 is needed: {COPY}",
    ),
    # values that do not fit together
    (
        {"num_experts_per_tok": 9},
        "9 experts per token of 8 experts: lower the experts per token to 8 or less",
    ),
    (
        {"num_attention_heads": 30},
        "hidden_size = 4096 is not a multiple of num_attention_heads = 30: correct one of them, or state head_dim",
    ),
    (
        {"num_key_value_heads": 7},
        "32 attention heads are not a multiple of 7 key and value heads: correct one of them",
    ),
    (
        {"head_dim": 33},
        "rotary embedding of 33 dimensions in heads of 33: an even number of at least 2, "
        "no more than a head has, is needed: "
        "correct the width of a head or partial_rotary_factor",
    ),
    (
        DYNAMIC | {"head_dim": 2},
        "rotary embedding of 2 dimensions in heads of 2: an even number of at least 4, "
        "no more than a head has, is needed: "
        "correct the width of a head or partial_rotary_factor",
    ),
    ({"eos_token_id": 32000}, "eos_token_id = 32000: the vocabulary has tokens 0 to 31999: correct it, or vocab_size"),
    ({"bos_token_id": 40000}, "bos_token_id = 40000: the vocabulary has tokens 0 to 31999: correct it, or vocab_size"),
    (
        {"rope_scaling": LONG},
        "long_factor has 63 factors: 64, one for two rotated dimensions, are needed: "
        "copy it from the model's publisher",
    ),
    # kinds of layers that this family does not read
    (
        {"num_hidden_layers": 2, "layer_types": ["full_attention", "chunked_attention"]},
        "layer_types = ['full_attention', 'chunked_attention'] is not supported: use a model with one of "
        "sliding_attention, full_attention for each of 2 layers",
    ),
    (
        {"num_hidden_layers": 2, "layer_types": ["full_attention"]},
        "layer_types = ['full_attention'] is not supported: use a model with one of "
        "sliding_attention, full_attention for each of 2 layers",
    ),
    (
        {"num_hidden_layers": 2, "layer_types": ["full_attention", "sliding_attention"]},
        "layer_types = 'sliding_attention' for layer 1, whose sliding_window is null: correct one of them",
    ),
    (
        {"num_hidden_layers": 2, "layer_types": ["full_attention"] * 2, "sliding_window": 64},
        "layer_types = 'full_attention' for layer 0, whose sliding_window is 64: correct one of them",
    ),
    (
        {"rope_scaling": BANDS},
        "low_freq_factor = 4.0 is not below high_freq_factor = 1.0: correct one of them",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("change", "expected"), REFUSED)
def test_refused(change: dict[str, Any], expected: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        model_spec(MIXTRAL | change)
    assert str(caught.value) == f"config.json: {expected}"


def test_a_block_size_that_is_no_list() -> None:
    quantization = {"quant_method": "fp8", "weight_block_size": 128}
    with pytest.raises(CheckpointError, match="quant_method = 'fp8' with weight_block_size = 128 is not supported: "):
        model_spec(MIXTRAL | {"quantization_config": quantization})


def test_bands_of_yarn_may_meet_but_not_cross() -> None:
    """Kimi-K2 is published with 1 for both."""
    model_spec(MIXTRAL | {"rope_scaling": YARN | {"beta_slow": 1.0, "beta_fast": 1.0}})
    with pytest.raises(CheckpointError, match=r"beta_slow = 2\.0 is above beta_fast = 1\.0: correct one of them"):
        model_spec(MIXTRAL | {"rope_scaling": YARN | {"beta_slow": 2.0, "beta_fast": 1.0}})


GROUPS: list[tuple[dict[str, Any], str]] = [
    ({"n_group": 7}, "256 experts do not divide into 7 groups of equal size: correct n_group"),
    ({"topk_group": 9}, "9 groups per token of 8 groups: use 1 to 8 for topk_group"),
    (
        {"n_group": 64, "topk_group": 1},
        "8 experts per token, but 1 groups of 4 have 4: raise topk_group or lower the experts per token",
    ),
    (
        {"n_group": 256, "topk_group": 8},
        "groups of 1 expert: the two best of each group are compared, so 2 are needed: lower n_group",
    ),
    ({"first_k_dense_replace": 61}, "no layer has experts: correct the keys that say which layers are dense"),
]


@pytest.mark.parametrize(("change", "expected"), GROUPS)
def test_refused_groups(change: dict[str, Any], expected: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        model_spec(DEEPSEEK_V3 | change)
    assert str(caught.value) == f"config.json: {expected}"


def test_a_zero_that_means_something_is_kept() -> None:
    """The family's default stands in for a value that is absent, not for one that is 0."""
    assert model_spec(MIXTRAL).norm_eps == 1e-5
    assert model_spec(MIXTRAL | {"rms_norm_eps": 0.0}).norm_eps == 0.0


def test_what_no_family_reads_is_not_looked_at() -> None:
    model_spec(MIXTRAL | {"architectures": 7, "initializer_range": "wide", "my_own_note": [[]]})


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (500, "eos_token_id = 500: the vocabulary has tokens 0 to 96: correct it, or vocab_size"),
        ({"a": 1}, f"eos_token_id = {{'a': 1}}: a whole number of at least 0 is needed: {COPY}"),
        (["2"], f"eos_token_id = ['2']: in a list, a whole number of at least 0 is needed: {COPY}"),
    ],
)
def test_generation_config(value: Any, expected: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MIXTRAL | {"vocab_size": 97}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    with pytest.raises(CheckpointError) as caught:
        load_model_spec(tmp_path)
    assert str(caught.value) == f"generation_config.json: {expected}"
