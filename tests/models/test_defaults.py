"""A key that `config.json` lacks, or has as null, means what the family's class in transformers makes of it.

Each file is read twice: as it is, and as transformers writes it after having read it, with every key stated.
"""

import copy
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from huggingface_hub.errors import StrictDataclassError
from packaging.version import Version
from transformers import CONFIG_MAPPING, __version__

from antiphon.base.errors import CheckpointError
from antiphon.models.config import LACKING, model_spec
from antiphon.models.families.config_readers import FAMILIES
from antiphon.models.families.config_values import DEFAULTS, RULES, assumed
from antiphon.models.planned import QUIRKS, Quirk, planned_model
from antiphon.specs.model import ModelSpec
from tests.models.conftest import FAMILIES as COMPARED

pytestmark = pytest.mark.skipif(
    Version(__version__) < Version("5.23"), reason="classes of older versions have other defaults"
)
READ = {*RULES, "hidden_act", "topk_method", "rope_parameters", "rope_scaling", "mlp_bias", "dtype", "torch_dtype"}
SECTIONS = ("rope_parameters", "rope_scaling", "attn_config", "ffn_config")
# DBRX's own code rotates by attn_config.rope_theta; transformers 5 takes it from rope_parameters only. A factor without
# a type, which transformers takes for none, is refused.
OTHER_IN_TRANSFORMERS = {("dbrx", "rope_parameters", "rope_theta"), ("dbrx", "rope_parameters"), ("dbrx", "rope_theta")}
OTHER_IN_TRANSFORMERS |= {("gpt_oss", "rope_parameters", "rope_type"), ("gpt_oss", "rope_scaling", "type")}


def published(config: dict[str, Any]) -> dict[str, Any]:
    """As transformers 4 spells it."""
    result = {key: value for key, value in config.items() if key not in ("rope_parameters", "dtype")}
    rope = dict(config["rope_parameters"])
    result["rope_theta"] = rope.pop("rope_theta")
    if "partial_rotary_factor" in rope:
        result["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
    kind = rope.pop("rope_type")
    result["rope_scaling"] = None if kind == "default" else {"type": kind, **rope}
    result["torch_dtype"] = "bfloat16"
    return result


def places(config: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    for key, value in config.items():
        if key in READ or key in SECTIONS:
            yield (key,)
        if key in SECTIONS and isinstance(value, dict):
            yield from ((key, inner) for inner in value)


def changed(config: dict[str, Any], place: tuple[str, ...], *, null: bool) -> dict[str, Any]:
    result = copy.deepcopy(config)
    section = result[place[0]] if len(place) == 2 else result
    if null:
        section[place[-1]] = None
    else:
        del section[place[-1]]
    return result


def of_transformers(config: dict[str, Any], family: str, tools: Any) -> ModelSpec | None:
    """What transformers reads, every key stated; None where it does not read the file, or we cannot run what it is."""
    try:
        stated = type(tools.config(family)).from_dict(copy.deepcopy(config)).to_dict()
    except (StrictDataclassError, KeyError, TypeError, ValueError, AttributeError):
        return None
    try:
        return model_spec(json.loads(json.dumps(stated, default=str)))
    except CheckpointError:
        return None


@pytest.mark.parametrize("family", COMPARED)
@pytest.mark.parametrize(
    ("spelling", "null"),
    [
        pytest.param("transformers 5", False, id="transformers 5-lacking"),
        pytest.param("transformers 4", True, id="transformers 4-null"),
        pytest.param("transformers 5", True, id="transformers 5-null", marks=pytest.mark.slow),
        pytest.param("transformers 4", False, id="transformers 4-lacking", marks=pytest.mark.slow),
    ],
)
def test_every_key(family: str, spelling: str, null: bool, tools: Any) -> None:
    config = tools.config(family, eos_token_id=3, bos_token_id=4).to_dict() | {"dtype": "bfloat16"}
    config = config if spelling == "transformers 5" else published(config)
    compared = 0
    for place in places(config):
        if (family, *place) in OTHER_IN_TRANSFORMERS:
            continue
        candidate = changed(config, place, null=null)
        expected = of_transformers(candidate, family, tools)
        try:
            found = model_spec(candidate)
        except CheckpointError:
            assert expected is None, f"{place} is refused"
            continue
        if expected is not None:
            if place[-1] == "original_max_position_embeddings":  # transformers states it then, which stretches more
                expected = replace(expected, max_position=found.max_position)
            assert found == expected, place
            compared += 1
    assert compared >= (4 if null else 12), "few keys were compared: the sweep says little"


@pytest.mark.parametrize("family", COMPARED)
def test_a_file_that_states_nothing_else(family: str, tools: Any) -> None:
    lone = {"model_type": family}
    expected = of_transformers(lone, family, tools)
    if expected is None:
        assert family in ("deepseek_v2", "dots1", "glm4_moe"), "these classes alone are no model"
    else:
        assert model_spec(lone) == expected
        assert planned_model(lone).spec == expected


def test_every_family_has_defaults() -> None:
    assert DEFAULTS.keys() == FAMILIES.keys()


@pytest.mark.parametrize("name", sorted({*LACKING, *QUIRKS}))
def test_models_that_are_only_counted(name: str) -> None:
    if name not in CONFIG_MAPPING:
        assert name in ("hunyuan",), "transformers has it no more"
        return
    assert QUIRKS.get(name, Quirk()).tied == CONFIG_MAPPING[name]().tie_word_embeddings


CASES = [
    ("ernie4_5_moe", "tie_word_embeddings", {"tie_word_embeddings": True}),
    ("ernie4_5_moe", "moe_num_shared_experts", {"moe_num_shared_experts": 2}),
    ("deepseek_v3", "n_shared_experts", {"n_shared_experts": 1}),
    ("deepseek_v3", "routed_scaling_factor", {"routed_scaling_factor": 2.5}),
    ("deepseek_v3", "topk_group", {"n_routed_experts": 16, "n_group": 8, "topk_group": 4}),
    ("glm4_moe_lite", "routed_scaling_factor", {"routed_scaling_factor": 1.8}),
    ("glm4_moe_lite", "mlp_layer_types", {"mlp_layer_types": ["dense", "sparse", "sparse"]}),
    ("gpt_oss", "sliding_window", {"sliding_window": 128, "max_position_embeddings": 256}),
    ("gpt_oss", "rope_parameters", {"rope_parameters": None}),
    ("solar_open", "num_experts_per_tok", {"n_routed_experts": 16, "num_experts_per_tok": 8}),
    ("qwen3_moe", "norm_topk_prob", {"norm_topk_prob": False}),
]


@pytest.mark.parametrize(("family", "key", "sizes"), CASES, ids=[f"{case[0]}-{case[1]}" for case in CASES])
def test_logits_of_a_checkpoint_that_lacks_a_key(
    family: str, key: str, sizes: dict[str, Any], save_model: Any, tools: Any
) -> None:
    saved = save_model(tools.config(family, **sizes))
    file = saved.folder / "config.json"
    config = json.loads(file.read_text())
    config.pop(key, None)
    file.write_text(json.dumps(config))
    token_ids = tools.ids(150 if key == "sliding_window" else 37)
    error = (tools.run(tools.load(saved.folder), token_ids, [len(token_ids)]) - saved.logits(token_ids)).abs().max()
    assert float(error) < 2e-4


def test_a_default_outside_the_vocabulary_ends_no_text(tools: Any) -> None:
    config = tools.config("olmoe").to_dict()
    del config["eos_token_id"]
    assert model_spec(config).eos_token_ids == ()


MIXTRAL: dict[str, Any] = {"model_type": "mixtral", "hidden_size": 4096, "num_hidden_layers": 2}
WINDOWED = {"rope_type": "default", "rope_theta": 5000.0}


@pytest.mark.parametrize(
    ("stated", "same_as"),
    [
        ({"hidden_size": 4096.0, "max_position_embeddings": 1e5}, {"max_position_embeddings": 100_000}),
        ({"rope_theta": 5000}, {"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}}),
        ({"dtype": "auto"}, {}),
        ({"torch_dtype": "bfloat16"}, {"dtype": "bfloat16"}),
        ({"dtype": "torch.bfloat16", "torch_dtype": None}, {"dtype": "bfloat16"}),
        ({"num_experts": 4}, {"num_local_experts": 4}),
        ({"num_experts": 8, "num_local_experts": 8}, {}),
        (
            {"layer_types": ["full_attention"] * 2, "rope_parameters": {"full_attention": WINDOWED}},
            {"rope_theta": 5000.0},
        ),
        (
            {"rope_parameters": WINDOWED, "rope_scaling": {"type": "linear", "factor": 2.0}},
            {"rope_theta": 5000.0, "rope_scaling": {"type": "linear", "factor": 2.0}},
        ),
    ],
)  # fmt: skip
def test_spellings_of_the_same(stated: dict[str, Any], same_as: dict[str, Any]) -> None:
    assert model_spec(MIXTRAL | stated) == model_spec(MIXTRAL | same_as)


@pytest.mark.parametrize(
    ("stated", "message"),
    [
        (
            {"num_experts": 8, "num_local_experts": 4},
            "config.json: num_local_experts = 4, but num_experts = 8, which means the same: remove the wrong one",
        ),
        (
            {"rope_parameters": {"full_attention": WINDOWED, "sliding_attention": WINDOWED | {"rope_theta": 1e4}}},
            "is not supported: use a model with one rotary embedding for all layers",
        ),
    ],
)
def test_files_that_contradict_themselves(stated: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        model_spec(MIXTRAL | stated)
    assert str(caught.value).endswith(message)


def test_numbers_that_were_taken_from_the_family() -> None:
    config = {"model_type": "qwen3_moe", "hidden_size": 64, "num_local_experts": 8, "rms_norm_eps": 1e-6}
    found = assumed(config)
    assert {"num_experts_per_tok", "vocab_size"} <= set(found)
    assert not {"hidden_size", "num_experts", "rms_norm_eps"} & set(found)
