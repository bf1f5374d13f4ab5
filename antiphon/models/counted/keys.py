"""Keys of a `config.json` by any of the names that families give them, with bounds; it remembers which were asked for.

A value that is missing is named with all its spellings and the option that gives it. Rejected: guessing a size from the
others. A wrong guess makes a plan nobody notices to be wrong.
"""

from collections.abc import Mapping
from typing import Any

from antiphon.base.errors import CheckpointError
from antiphon.models.families.config_values import MAX_EXPERTS, MAX_LAYERS, MAX_POSITIONS, MAX_TOKENS, MAX_WIDTH, Whole
from antiphon.models.files import brief

SPELLINGS: dict[str, tuple[str, ...]] = {
    "layers": ("num_hidden_layers", "num_layers", "n_layers", "n_layer"),
    "hidden": ("hidden_size", "d_model", "n_embd", "dim"),
    "vocabulary": ("vocab_size", "padded_vocab_size"),
    "heads": ("num_attention_heads", "n_heads", "n_head"),
    "kv heads": ("num_key_value_heads", "num_attention_groups", "kv_n_heads", "multi_query_group_num"),
    "head width": ("head_dim", "attention_head_dim", "kv_channels"),
    "experts": ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_moe_experts"),
    "experts per token": (
        *("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k", "experts_per_token"),
        *("top_k_experts", "moe_router_topk"),
    ),
    "expert width": ("moe_intermediate_size", "expert_ffn_hidden_size", "moe_ffn_hidden_size", "expert_dim"),
    "dense width": ("intermediate_size", "ffn_hidden_size", "intermediate_size_mlp"),
    "shared width": (
        *("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size", "share_expert_dim"),
        "shared_intermediate_size",
    ),
    "shared experts": (
        *("n_shared_experts", "num_shared_experts", "num_shared_expert", "moe_num_shared_experts"),
        *("num_expert_shared", "n_shared_expert"),
    ),
    "dense first layers": ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index"),
    "groups": ("n_group", "num_expert_group", "n_expert_groups"),
    "groups per token": ("topk_group", "num_limited_groups"),
    "positions": ("max_position_embeddings", "max_seq_len", "max_sequence_length", "seq_length", "n_positions"),
}
LARGEST = {
    "layers": MAX_LAYERS,
    "vocabulary": MAX_TOKENS,
    "positions": MAX_POSITIONS,
    **dict.fromkeys(("experts", "experts per token", "shared experts", "groups", "groups per token"), MAX_EXPERTS),
}
MAY_BE_ZERO = ("shared width", "shared experts", "dense first layers", "groups", "groups per token")


class Keys:
    """One config and what was asked of it. `known`: keys that were looked at, be they there or not."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config
        self.known: set[str] = set()

    def raw(self, key: str) -> Any:
        self.known.add(key)
        return self.config.get(key)

    def whole(self, key: str, default: int | None = None, *, least: int = 1, most: int = MAX_WIDTH) -> int:
        """The number under one key; of a list, one value for each layer, the most frequent."""
        value = self.raw(key)
        if value is None:
            if default is not None:
                return default
            raise CheckpointError(
                f"config.json: {key} is missing: copy it from the model's publisher, or give --model-set {key}=N"
            )
        if isinstance(value, list) and value and all(isinstance(each, int) for each in value):
            value = max(set(value), key=lambda each: (value.count(each), each))
        if wrong := Whole(least=least, most=most).wrong(value):
            raise CheckpointError(
                f"config.json: {key} = {brief(value)}: {wrong}: correct it, or give --model-set {key}=N"
            )
        return int(value)

    def optional(self, key: str, *, least: int = 1, most: int = MAX_WIDTH) -> int | None:
        """The number under one key; None where it is not there."""
        return None if self.raw(key) is None else self.whole(key, least=least, most=most)

    def has(self, what: str) -> bool:
        return self._spelled(what) is not None

    def get(self, what: str, default: int | None = None) -> int:
        """The number that `what` names in `SPELLINGS`."""
        key = self._spelled(what)
        if key is None:
            if default is not None:
                return default
            names = SPELLINGS[what]
            raise CheckpointError(
                f"config.json: none of {', '.join(names)} is there: the {what} of this model are unknown: "
                f"give --model-set {names[0]}=N"
            )
        return self.whole(key, least=0 if what in MAY_BE_ZERO else 1, most=LARGEST.get(what, MAX_WIDTH))

    def _spelled(self, what: str) -> str | None:
        self.known.update(SPELLINGS[what])
        return next((key for key in SPELLINGS[what] if self.config.get(key) is not None), None)
