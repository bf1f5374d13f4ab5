"""Any `config.json` gives a usable `ModelSpec` or one line that refuses it: seeded mutations, for all families.

Never another exception, never more than 200 MB or 2 s, whatever a value claims.
"""

import copy
import math
import random
import resource
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from antiphon.base.errors import CheckpointError
from antiphon.models.config import model_spec
from antiphon.models.families.config_readers import FAMILIES
from antiphon.models.families.config_values import ROPE_RULES, RULES, SECTIONS
from antiphon.specs.counts import count_parameters
from antiphon.specs.model import ModelSpec

NUM_MUTATIONS = 1200  # of each family
MEMORY_BYTES = 200_000_000
LIMIT_S = 2.0
YARN = {"type": "yarn", "factor": 4.0, "beta_fast": 32, "beta_slow": 1, "mscale": 0.7, "mscale_all_dim": 0.7,
        "original_max_position_embeddings": 32}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 32}  # fmt: skip
LONGROPE = {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "short_mscale": 1.1,
            "long_mscale": 1.2, "original_max_position_embeddings": 32}  # fmt: skip
SCALINGS: tuple[Any, ...] = (
    None, {}, YARN, LLAMA3, LONGROPE, {"type": "linear", "factor": 2.0}, {"type": "dynamic", "factor": 2.0},
)  # fmt: skip
VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, 2, 3, 7, -1, -(10**9), 10**5, 10**9, 2**63, 10**30, 0.0, -0.0, 0.5, 1.0, 1.5, -2.5, 1e-320,
    1e30, 1e300, math.nan, math.inf, -math.inf, "", "8", "false", "yarn", "longrope", "x" * 10_000, [], {}, [1, 2],
    [-1], [10**12], [1.5], ["a"], [None], [math.nan], [[1]], [[]] * 3, {"a": 1}, {"rope_type": "yarn"}, [1.0] * 4,
    {"type": ["yarn"]}, {"quant_method": "fp8"}, {"quant_method": "fp8", "weight_block_size": 128},
    {"quant_method": {}, "weight_block_size": "128"},
)  # fmt: skip
NESTED = {
    "rope_scaling": [*ROPE_RULES, "type", "rope_type"],
    "rope_parameters": [*ROPE_RULES, "type", "rope_type"],
    "attn_config": ["kv_n_heads", "clip_qkv", "rope_theta"],
    "ffn_config": ["ffn_hidden_size", "moe_num_experts", "moe_top_k", "moe_normalize_expert_weights", "ffn_act_fn"],
    "quantization_config": ["quant_method", "weight_block_size"],
}


@pytest.fixture
def little_memory() -> Iterator[None]:
    """An allocation of more than 200 MB fails, instead of taking what others need."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY_BYTES, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


def base_config(family: str, tools: Any) -> dict[str, Any]:
    """A valid config; deepseek, which transformers has not, is told in the keys of its second version."""
    if family == "deepseek":
        return base_config("deepseek_v2", tools) | {"model_type": "deepseek", "topk_method": None, "head_dim": None}
    config: dict[str, Any] = tools.config(family).to_dict()
    return config


def mutated(config: dict[str, Any], draw: random.Random) -> dict[str, Any]:
    result = copy.deepcopy(config)
    if draw.random() < 0.3:
        result.pop("rope_parameters", None)
        result["rope_scaling"] = copy.deepcopy(draw.choice(SCALINGS))
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        section, keys = result, [*result, *RULES, *SECTIONS]
        name = draw.choice(list(NESTED))
        if draw.random() < 0.4 and isinstance(result.get(name), dict):
            section, keys = result[name], NESTED[name]
        key = draw.choice(keys)
        old = section.get(key)
        near = [old + 1, old - 1, -old, old * 10, old / 3] if isinstance(old, (int, float)) else []
        section[key] = draw.choice(near) if near and draw.random() < 0.4 else copy.deepcopy(draw.choice(VALUES))
        if draw.random() < 0.1:
            del section[key]
    return result


def check_sane(spec: ModelSpec) -> None:
    """What the rest of the system takes for granted."""
    attention, router, rope = spec.attention, spec.router, spec.attention.rope
    widths = (spec.vocab_size, spec.hidden_size, spec.num_layers, attention.num_heads, attention.num_kv_heads,
              attention.head_dim, router.num_experts, router.top_k, spec.feed_forward.intermediate, spec.max_position,
              rope.max_position, rope.original_max_position)  # fmt: skip
    assert all(type(width) is int and 1 <= width <= 2**30 for width in widths), widths
    numbers = (spec.norm_eps, rope.theta, attention.scale, router.scaling, router.jitter)
    assert all(math.isfinite(number) and number >= 0 for number in numbers), numbers
    assert len(spec.moe_layers) == spec.num_layers
    assert any(spec.moe_layers)
    assert router.top_k <= router.num_experts
    assert router.num_experts % router.num_groups == 0
    assert attention.num_heads % attention.num_kv_heads == 0
    assert rope.theta > 1
    assert rope.dim % 2 == 0
    assert 2 <= rope.dim <= attention.head_dim
    assert all(type(token) is int and 0 <= token < spec.vocab_size for token in spec.eos_token_ids)
    assert spec.bos_token_id is None or 0 <= spec.bos_token_id < spec.vocab_size
    assert attention.sliding_window is None or attention.sliding_window >= 1
    assert attention.clip_qkv is None or attention.clip_qkv > 0
    assert count_parameters(spec).total < 2**63


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_mutated_config_is_read_or_refused(family: str, tools: Any, little_memory: None) -> None:
    draw = random.Random(family)
    config = base_config(family, tools)
    check_sane(model_spec(config))
    refusals: list[str] = []
    longest_s = 0.0
    for number in range(NUM_MUTATIONS):
        candidate = mutated(config, draw)
        start = time.process_time()
        try:
            spec = model_spec(candidate)
        except CheckpointError as error:
            refusals.append(str(error))
        except Exception as error:
            changes = {key: value for key, value in candidate.items() if value != config.get(key)}
            raise AssertionError(f"mutation {number}, changed {str(changes)[:500]}") from error
        else:
            check_sane(spec)
        longest_s = max(longest_s, time.process_time() - start)
    num_read = NUM_MUTATIONS - len(refusals)
    print(f"{family}: {num_read} of {NUM_MUTATIONS} read, the longest took {longest_s * 1e3:.1f} ms")
    assert longest_s < LIMIT_S
    assert [line for line in refusals if "\n" in line or "x" * 100 in line] == [], "a value is shown at full length"
    assert 0.1 < num_read / NUM_MUTATIONS < 0.9, "mutations that are all read, or none, test little"
