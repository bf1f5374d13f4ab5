"""A GGUF file's metadata as the `config.json` that the same model has in Hugging Face format.

llama.cpp names a model by its architecture, which stands before its keys (`qwen3moe.expert_used_count`). What keys do
not say, shapes of tensors say: the vocabulary, the width of the experts, whether there are biases. What neither says is
what llama.cpp computes for the architecture (whether the weights of the chosen experts are normalised). The result goes
through the family's own reader, so that a size out of bounds gets the same words as in `config.json`. A key that would
change what is computed, and that the architecture does not read, is refused unless its value switches it off (`_OFF`).

Rejected: transformers' reading of GGUF, which knows three of these architectures.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from antiphon.base.errors import CheckpointError
from antiphon.models.checkpoint_folder import brief
from antiphon.models.families.config_values import completed
from antiphon.models.gguf.container import ROPE_TABLES, GgufArray, GgufHeader, gguf_files, read_gguf
from antiphon.models.shard_index import AGAIN

_GATE_SIGMOID = 2  # `expert_gating_func`
_WITH_SIGMOID = ("dots1", "glm4moe", "minimax-m2")  # whatever that key says; deepseek2 has both
_DTYPES = {"F32": "float32", "F16": "float16"}
_ENDINGS = ("eos", "eot", "eom")
_OLD_V3 = (61, 256)  # layers and experts of DeepSeek-V3, whose first files do not say its 8 groups
_NO_MODELS = {
    "adapter": "an adapter, which must be merged into its model",
    "controlvector": "a control vector",
    "imatrix": "statistics for a quantiser",
    "mmproj": "the part of a model that reads pictures or sound",
    "vocab": "a vocabulary without weights",
}  # by `general.type`, or by architecture
_OFF: Mapping[str, tuple[float, ...]] = {
    **dict.fromkeys(("attention.clamp_kqv", "attention.max_alibi_bias", "attention.temperature_scale"), (0,)),
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping", "router_logit_softcapping"), (0,)),
    **dict.fromkeys(("swiglu_clamp_exp", "swiglu_clamp_shexp", "pooling_type", "use_parallel_residual"), (0,)),
    **dict.fromkeys(("embedding_scale", "residual_scale", "logit_scale", "expert_weights_scale"), (0, 1)),
    **dict.fromkeys(("attention.output_scale", "attention.value_scale", "expert_group_count"), (0, 1)),
    **dict.fromkeys(("rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor"), (0, 1)),
    "attention.scale": (0,),
    **dict.fromkeys(("attention.causal", "expert_weights_norm"), (1,)),
    "rope.scaling.yarn_ext_factor": (-1, 1),
}
Config = dict[str, Any]


class _Keys:
    """The architecture's keys. `CheckpointError` naming the key for a value of another kind."""

    def __init__(self, header: GgufHeader, architecture: str) -> None:
        self.header = header
        self.architecture = architecture
        self.read: set[str] = set()

    def number(self, key: str, default: float | None = None) -> Any:
        """A number. Some keys may hold one for each layer: then all must be the same."""
        name = f"{self.architecture}.{key}"
        self.read.add(key)
        value = self.header.metadata.get(name, default)
        if isinstance(value, GgufArray):
            numbers = set(_values(value, name))
            if len(numbers) != 1:
                raise CheckpointError(f"{name} differs from layer to layer ({brief(sorted(numbers))}): not supported")
            (value,) = numbers
        if value is None:
            raise CheckpointError(f"{name} is missing: {AGAIN}")
        if not isinstance(value, int | float):
            raise CheckpointError(f"{name} = {brief(value)}: a number is needed: {AGAIN}")
        return value

    def optional(self, key: str) -> Any:
        return self.number(key) if f"{self.architecture}.{key}" in self.header.metadata else None

    def check_unread(self) -> None:
        """`CheckpointError` for a key that the architecture's reader left alone, and that is not off."""
        for key in sorted(_OFF.keys() - self.read):
            if (value := self.optional(key)) is not None and value not in _OFF[key]:
                raise self.unsupported(key, value)
        window, gate = "attention.sliding_window", "expert_gating_func"
        if window not in self.read and 0 < self.number(window, 0) < self.number("context_length"):
            raise self.unsupported(window, self.number(window))
        has_sigmoid = self.architecture in _WITH_SIGMOID
        if gate not in self.read and self.number(gate, 0) and has_sigmoid != (self.number(gate) == _GATE_SIGMOID):
            raise self.unsupported(gate, self.number(gate))

    def unsupported(self, key: str, value: object) -> CheckpointError:
        return CheckpointError(
            f"{self.architecture}.{key} = {brief(value)} is not supported: use another GGUF file, or the model's "
            f"weights in another format"
        )

    def shape(self, tensor: str) -> tuple[int, ...]:
        """The shape of a tensor that some layer has, or that no layer's name has; () where there is none."""
        shapes = self.header.shapes
        if tensor in shapes:
            return shapes[tensor]
        return next((shape for name, shape in shapes.items() if _in_layer(name) == tensor), ())


def _in_layer(name: str) -> str:
    return name.split(".", 2)[2] if name.startswith("blk.") and name.count(".") >= 2 else ""


def _values(array: GgufArray, name: str) -> list[Any]:
    try:
        return array.values()
    except ValueError as error:
        raise CheckpointError(f"{name} holds what is no UTF-8 text: {AGAIN}") from error


def gguf_config(path: Path) -> Config:
    """The keys of a `config.json` for the model in this file, or in the files of which it is one, with the family's
    defaults for all others."""
    first, *others = gguf_files(path)
    header = read_gguf(first)
    for other in others:
        part = read_gguf(other)
        header.entries.update(part.entries)
        header.types.update(part.types)
        header.shapes.update(part.shapes)
        header.rope_factors.update(part.rope_factors)
    try:
        return completed(config_of(header))
    except CheckpointError as error:
        raise CheckpointError(f"{first.name}: {error}") from error


def config_of(header: GgufHeader) -> Config:
    """The keys of a `config.json`. `CheckpointError` for an architecture that is not supported, or keys that lack."""
    architecture, kind = (header.metadata.get(f"general.{key}") for key in ("architecture", "type"))
    if named := [each for each in (kind, architecture) if isinstance(each, str) and each in _NO_MODELS]:
        raise CheckpointError(f"this is no model but {_NO_MODELS[named[0]]}; give the GGUF file of a model")
    if not isinstance(architecture, str) or architecture not in ARCHITECTURES:
        raise CheckpointError(
            f"general.architecture = {brief(architecture)} is not supported: use a GGUF file of "
            f"{', '.join(sorted(ARCHITECTURES))}"
        )
    keys = _Keys(header, architecture)
    config = _shared(keys) | ARCHITECTURES[architecture](keys)
    keys.check_unread()
    return config


def _shared(keys: _Keys) -> Config:
    """The keys that every family reads alike."""
    num_heads, hidden = keys.number("attention.head_count"), keys.number("embedding_length")
    head_dim = keys.optional("attention.key_length") or hidden // max(num_heads, 1)
    vocabulary = keys.shape("token_embd.weight")
    config: Config = {
        "hidden_size": hidden,
        "num_hidden_layers": keys.number("block_count") - keys.number("nextn_predict_layers", 0),
        "num_attention_heads": num_heads,
        "num_key_value_heads": keys.number("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "intermediate_size": keys.number("feed_forward_length", 0) or _width(keys),
        "max_position_embeddings": keys.number("context_length"),
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon", keys.optional("attention.layer_norm_epsilon")),
        "rope_theta": keys.number("rope.freq_base", 10_000.0),
        "vocab_size": vocabulary[0] if vocabulary else keys.number("vocab_size"),
        "hidden_act": "silu",
        "tie_word_embeddings": "output.weight" not in keys.header.shapes,
        "dtype": _dtype(keys.header),
        **_tokens(keys.header),
    }
    if keys.optional("attention.kv_lora_rank") is None:
        if (values := keys.number("attention.value_length", head_dim)) != head_dim:
            raise keys.unsupported("attention.value_length", values)
        if (rotated := keys.number("rope.dimension_count", head_dim)) != head_dim:
            config["partial_rotary_factor"] = rotated / max(head_dim, 1)
    return config | _scaling(keys)


def _dtype(header: GgufHeader) -> str:
    """That of most bytes. What has blocks was made for 16 bits, and bfloat16 has the range of its scales."""
    num_bytes: Counter[str] = Counter()
    for name, entry in header.entries.items():
        num_bytes[header.types[name].name] += entry.num_bytes
    return _DTYPES.get(max(num_bytes, key=lambda kind: num_bytes[kind], default=""), "bfloat16")


def _tokens(header: GgufHeader) -> Config:
    found = {
        key: value
        for key in ("bos", *_ENDINGS)
        if type(value := header.metadata.get(f"tokenizer.ggml.{key}_token_id")) is int
    }
    endings = list(dict.fromkeys(found[key] for key in _ENDINGS if key in found))
    return {"bos_token_id": found.get("bos"), "eos_token_id": endings or None}


def _scaling(keys: _Keys) -> Config:
    """A factor without a type is linear; the first files named it otherwise."""
    stated = keys.optional("rope.scaling.factor") or keys.optional("rope.scale_linear")
    kind = keys.header.metadata.get(f"{keys.architecture}.rope.scaling.type", "linear" if stated else "none")
    if any(keys.shape(name) for name in ROPE_TABLES):
        return {"rope_scaling": _by_frequency(keys, kind)}
    if kind == "none":
        return {}
    factor = stated or keys.number("rope.scaling.factor")
    if kind == "linear":
        return {"rope_scaling": {"rope_type": "linear", "factor": factor}}
    if kind != "yarn":
        raise keys.unsupported("rope.scaling.type", kind)
    scaling = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": keys.number("rope.scaling.original_context_length"),
        "beta_fast": keys.number("rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": keys.number("rope.scaling.yarn_beta_slow", 1.0),
    }
    if (logarithm := keys.optional("rope.scaling.yarn_log_multiplier")) is not None:  # a tenth of DeepSeek's mscale
        scaling |= dict.fromkeys(("mscale", "mscale_all_dim"), round(10 * logarithm, 6))
    return {"rope_scaling": scaling}


def _by_frequency(keys: _Keys, kind: object) -> Config:
    """Each frequency divided by a stored factor, which is LongRoPE. Files with Llama 3's scaling have one set for all
    positions (`rope_freqs`), Phi's have two."""
    tables = keys.header.rope_factors
    both = ["rope_freqs.weight"] * 2 if keys.shape("rope_freqs.weight") else ROPE_TABLES[1:]
    if not set(both) <= tables.keys() or kind not in ("none", "longrope"):
        raise CheckpointError(
            f"{' and '.join(dict.fromkeys(both))}, factors of each rotary frequency, are not supported with "
            f"rope.scaling.type = {brief(kind)}, nor in other types than F32: use another GGUF file"
        )
    return {
        "rope_type": "longrope",
        "short_factor": tables[both[0]],
        "long_factor": tables[both[1]],
        "original_max_position_embeddings": keys.number(
            "rope.scaling.original_context_length", keys.number("context_length")
        ),
        "attention_factor": keys.number("rope.scaling.attn_factor", 1.0) or 1.0,
    }


def _width(keys: _Keys) -> int:
    """The width of an expert: `ffn_down_exps` is [experts, hidden, width]."""
    shape = keys.shape("ffn_down_exps.weight")
    if len(shape) != 3:
        raise CheckpointError(
            "there is no tensor ffn_down_exps.weight with three axes: the model has no experts, or the file is from "
            "before April 2024: use a newer one"
        )
    return shape[2]


def _routed(keys: _Keys, num_experts: str = "num_experts", top_k: str = "num_experts_per_tok") -> Config:
    return {num_experts: keys.number("expert_count"), top_k: keys.number("expert_used_count")}


def _normalizes(keys: _Keys, *, default: bool) -> Config:
    """`default`: what llama.cpp does for the architecture."""
    return {"norm_topk_prob": bool(keys.number("expert_weights_norm", default))}


def _mixtral(keys: _Keys) -> Config:
    window = keys.optional("attention.sliding_window")
    config = {"model_type": "mixtral", "intermediate_size": _width(keys), "sliding_window": window}
    return config | _routed(keys, "num_local_experts")


def _olmoe(keys: _Keys) -> Config:
    config = {"model_type": "olmoe", "intermediate_size": _width(keys)} | _normalizes(keys, default=False)
    return config | _routed(keys) | {"clip_qkv": keys.optional("attention.clamp_kqv") or None}


def _phimoe(keys: _Keys) -> Config:
    return _routed(keys, "num_local_experts") | {
        "model_type": "phimoe",
        "intermediate_size": _width(keys),
        "sliding_window": keys.optional("attention.sliding_window") or None,
        "attention_bias": bool(keys.shape("attn_q.bias")),
        "lm_head_bias": bool(keys.shape("output.bias")),
    }


def _dbrx(keys: _Keys) -> Config:
    return {
        "model_type": "dbrx",
        "attn_config": {
            "kv_n_heads": keys.number("attention.head_count_kv"),
            "clip_qkv": keys.optional("attention.clamp_kqv") or None,
        },
        "ffn_config": {"ffn_hidden_size": _width(keys)} | _routed(keys, "moe_num_experts", "moe_top_k"),
    }


def _qwen2(keys: _Keys) -> Config:
    shared = keys.shape("ffn_down_shexp.weight")
    return _routed(keys) | {
        "model_type": "qwen2_moe",
        "moe_intermediate_size": _width(keys),
        "shared_expert_intermediate_size": shared[-1] if shared else 0,
        **_normalizes(keys, default=False),
        "qkv_bias": bool(keys.shape("attn_q.bias")),
    }


def _qwen3(keys: _Keys) -> Config:
    config = {"model_type": "qwen3_moe", "moe_intermediate_size": _width(keys)} | _normalizes(keys, default=True)
    return config | _routed(keys)


def _granite(keys: _Keys) -> Config:
    shared = keys.shape("ffn_down_shexp.weight")
    scales = {
        "embedding_multiplier": "embedding_scale",
        "residual_multiplier": "residual_scale",
        "attention_multiplier": "attention.scale",
        "logits_scaling": "logit_scale",
    }
    own = {ours: keys.number(theirs, 1.0) for ours, theirs in scales.items()}
    if shared:
        own["shared_intermediate_size"] = shared[-1]
    kind = "granitemoeshared" if shared else "granitemoe"
    return _routed(keys, "num_local_experts") | own | {"model_type": kind, "intermediate_size": _width(keys)}


def _gpt_oss(keys: _Keys) -> Config:
    config = _routed(keys, "num_local_experts") | {
        "model_type": "gpt_oss",
        "intermediate_size": _width(keys),
        "sliding_window": keys.number("attention.sliding_window"),
        "attention_bias": bool(keys.shape("attn_q.bias")),
    }
    scaling = _scaling(keys).get("rope_scaling", {})
    return config | ({"rope_scaling": scaling | {"truncate": False}} if scaling.get("rope_type") == "yarn" else {})


def _minimax(keys: _Keys) -> Config:
    return _routed(keys, "num_local_experts") | {
        "model_type": "minimax_m2",
        "intermediate_size": _width(keys),
        "rotary_dim": keys.number("rope.dimension_count"),
    }


def _ernie(keys: _Keys) -> Config:
    return _routed(keys, "moe_num_experts", "moe_k") | {
        "model_type": "ernie4_5_moe",
        "moe_intermediate_size": _width(keys),
        "moe_num_shared_experts": keys.number("expert_shared_count", 0),
        "moe_layer_start_index": keys.number("leading_dense_block_count", 0),
        "moe_layer_interval": keys.number("interleave_moe_layer_step", 1),
    }


def _deepseek_experts(keys: _Keys) -> Config:
    """The routed experts as DeepSeek's configs name them, whatever the attention."""
    return _routed(keys, "n_routed_experts") | {
        "moe_intermediate_size": _width(keys),
        "n_shared_experts": keys.number("expert_shared_count", 0),
        "first_k_dense_replace": keys.number("leading_dense_block_count", 0),
        "routed_scaling_factor": keys.number("expert_weights_scale", 1.0) or 1.0,
        "norm_topk_prob": bool(keys.number("expert_weights_norm", 0)),
        "n_group": keys.number("expert_group_count", 1) or 1,
        "topk_group": keys.number("expert_group_used_count", 1) or 1,
    }


def _deepseek_v1(keys: _Keys) -> Config:
    return _deepseek_experts(keys) | {"model_type": "deepseek", "scoring_func": "softmax"}


def _deepseek_v2_and_v3(keys: _Keys) -> Config:
    config = _deepseek_experts(keys)
    rope_dim = keys.number("rope.dimension_count")
    key = keys.optional("attention.key_length_mla") or keys.number("attention.key_length")
    value = keys.optional("attention.value_length_mla") or keys.number("attention.value_length")
    config |= {
        "q_lora_rank": keys.optional("attention.q_lora_rank") or None,
        "kv_lora_rank": keys.number("attention.kv_lora_rank"),
        "qk_rope_head_dim": rope_dim,
        "qk_nope_head_dim": key - rope_dim,
        "v_head_dim": value,
        "num_key_value_heads": keys.number("attention.head_count"),
    }
    if keys.number("expert_gating_func", 1) != _GATE_SIGMOID:
        method = "group_limited_greedy" if config["n_group"] > 1 else "greedy"
        return config | {"model_type": "deepseek_v2", "topk_method": method}
    if (keys.number("block_count"), keys.number("expert_count")) == _OLD_V3 and config["n_group"] == 1:
        config |= {"n_group": 8, "topk_group": 4}
    return config | {"model_type": "deepseek_v3"}


def _glm4(keys: _Keys) -> Config:
    return _deepseek_experts(keys) | {
        "model_type": "glm4_moe",
        "partial_rotary_factor": keys.number("rope.dimension_count") / keys.number("attention.key_length"),
        "use_qk_norm": bool(keys.shape("attn_q_norm.weight")),
        "attention_bias": bool(keys.shape("attn_q.bias")),
    }


def _dots(keys: _Keys) -> Config:
    return _deepseek_experts(keys) | {"model_type": "dots1", "attention_bias": bool(keys.shape("attn_q.bias"))}


ARCHITECTURES: Mapping[str, Callable[[_Keys], Config]] = {
    "dbrx": _dbrx,
    "deepseek": _deepseek_v1,
    "deepseek2": _deepseek_v2_and_v3,
    "dots1": _dots,
    "ernie4_5-moe": _ernie,
    "glm4moe": _glm4,
    "gpt-oss": _gpt_oss,
    "granitemoe": _granite,
    "llama": _mixtral,
    "minimax-m2": _minimax,
    "olmoe": _olmoe,
    "phimoe": _phimoe,
    "qwen2moe": _qwen2,
    "qwen3moe": _qwen3,
}  # by llama.cpp's name
PERMUTED = frozenset({"deepseek", "granitemoe", "llama"})  # rows of q and k in the order of neighbours, not of halves
