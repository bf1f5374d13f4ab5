"""Whether the values of a `ModelSpec` fit together: what no key of `config.json` can say alone.

`families/config_values` has bounded each value before. Here are the relations between them: chosen experts and all
experts, heads and groups, rotated width and factors, tokens and vocabulary, and the size of the whole. They hold for
every family, so they are checked on what the family made, once, and an error names what the spec says.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import fields

from antiphon.base.errors import CheckpointError
from antiphon.models.families.config_values import MAX_WIDTH
from antiphon.models.files import brief
from antiphon.specs.counts import count_parameters
from antiphon.specs.model import ModelSpec, RopeSpec, RouterSpec

MAX_PARAMETERS = 10**15  # a hundred times the largest model that was ever described; planning computes in 64 bits
Check = tuple[bool, str]


def check_spec(spec: ModelSpec) -> None:
    """`CheckpointError` for the first relation that does not hold, naming the values, the limit and what to change."""
    for checks in (_router, _attention, _rope, _whole):
        for holds, wrong in checks(spec):
            if not holds:
                raise CheckpointError(f"config.json: {wrong}")
    check_tokens("config.json: eos_token_id", spec.eos_token_ids, spec.vocab_size)
    if spec.bos_token_id is not None:
        check_tokens("config.json: bos_token_id", [spec.bos_token_id], spec.vocab_size)


def check_tokens(where: str, token_ids: Sequence[int], vocab_size: int) -> None:
    """`CheckpointError` for a token id that the vocabulary does not have. `where`: file and key."""
    if wrong := [token for token in token_ids if not 0 <= token < vocab_size]:
        raise CheckpointError(
            f"{where} = {wrong[0]}: the vocabulary has tokens 0 to {vocab_size - 1}: correct it, or vocab_size"
        )


def _router(spec: ModelSpec) -> Iterable[Check]:
    router = spec.router
    experts, groups = router.num_experts, router.num_groups
    yield (
        1 <= router.top_k <= experts,
        f"{router.top_k} experts per token of {experts} experts: lower the experts per token to {experts} or less",
    )
    yield groups >= 1, f"{groups} groups of experts: at least 1 is needed: correct n_group"
    yield (
        experts % groups == 0,
        f"{experts} experts do not divide into {groups} groups of equal size: correct n_group",
    )
    yield (
        1 <= router.top_k_groups <= groups,
        f"{router.top_k_groups} groups per token of {groups} groups: use 1 to {groups} for topk_group",
    )
    yield from _groups(router) if groups > 1 else ()
    yield any(spec.moe_layers), "no layer has experts: correct the keys that say which layers are dense"
    yield (
        len(spec.moe_layers) == spec.num_layers,
        f"{len(spec.moe_layers)} layers are said to be dense or not, of {spec.num_layers}: say it for each",
    )


def _groups(router: RouterSpec) -> Iterable[Check]:
    per_group = router.num_experts // router.num_groups
    reachable = router.top_k_groups * per_group
    yield (
        router.top_k <= reachable,
        f"{router.top_k} experts per token, but {router.top_k_groups} groups of {per_group} have {reachable}: "
        f"raise topk_group or lower the experts per token",
    )
    yield (
        router.group_score != "top2" or per_group >= 2,
        f"groups of {per_group} expert: the two best of each group are compared, so 2 are needed: lower n_group",
    )


def _attention(spec: ModelSpec) -> Iterable[Check]:
    attention = spec.attention
    yield (
        attention.num_heads % attention.num_kv_heads == 0,
        f"{attention.num_heads} attention heads are not a multiple of {attention.num_kv_heads} key and value heads: "
        f"correct one of them",
    )
    yield (
        math.isfinite(attention.scale) and attention.scale > 0,
        f"scores would be multiplied by {attention.scale}: correct the width of a head or mscale_all_dim",
    )


def _rope(spec: ModelSpec) -> Iterable[Check]:
    rope = spec.attention.rope
    width = spec.attention.latent.qk_rope_head_dim if spec.attention.latent else spec.attention.head_dim
    least = 4 if rope.scaling == "dynamic" else 2  # the power dim / (dim - 2)
    yield (
        rope.dim % 2 == 0 and least <= rope.dim <= width,
        f"rotary embedding of {rope.dim} dimensions in heads of {width}: an even number of at least {least}, "
        f"no more than a head has, is needed: correct the width of a head or partial_rotary_factor",
    )
    yield (
        rope.original_max_position >= 2 or rope.scaling == "none",
        f"original_max_position_embeddings = {rope.original_max_position}: at least 2 is needed: correct it",
    )
    yield from _rope_numbers(rope)


def _rope_numbers(rope: RopeSpec) -> Iterable[Check]:
    numbers = rope.parameters
    low, high = numbers.get("low_freq_factor"), numbers.get("high_freq_factor")
    if isinstance(low, (int, float)) and isinstance(high, (int, float)):  # their difference divides
        yield low < high, f"low_freq_factor = {low} is not below high_freq_factor = {high}: correct one of them"
    slow, fast = numbers.get("beta_slow"), numbers.get("beta_fast")
    if isinstance(slow, (int, float)) and isinstance(fast, (int, float)):  # Kimi-K2 has 1 for both
        yield slow <= fast, f"beta_slow = {slow} is above beta_fast = {fast}: correct one of them"
    if rope.scaling == "longrope":
        for key in ("short_factor", "long_factor"):
            factors = numbers[key]
            found = len(factors) if isinstance(factors, list) else brief(factors)
            yield (
                found == rope.dim // 2,
                f"{key} has {found} factors: {rope.dim // 2}, one for two rotated dimensions, are needed: "
                f"copy it from the model's publisher",
            )


def _whole(spec: ModelSpec) -> Iterable[Check]:
    for field in fields(spec.feed_forward):
        width = getattr(spec.feed_forward, field.name)
        if isinstance(width, int):
            yield 0 <= width <= MAX_WIDTH, f"a feed-forward of width {width}: at most {MAX_WIDTH:,} is supported"
    total = count_parameters(spec).total
    yield (
        total <= MAX_PARAMETERS,
        f"the sizes make a model of {total:.1e} parameters: at most {MAX_PARAMETERS:.0e} are supported: correct them",
    )
