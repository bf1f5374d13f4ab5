"""GGUF files of small checkpoints, written with llama.cpp's own package: its names, its blocks, its metadata.

What llama.cpp's conversion does to a family's tensors (merging experts, turning rows of q and k, splitting the latent
up projection) is written out here from what that conversion says it does."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch import Tensor

Tensors = dict[str, Tensor]
ARCHITECTURES = {
    "dbrx": "dbrx",
    "deepseek": "deepseek",
    "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2",
    "dots1": "dots1",
    "ernie4_5_moe": "ernie4_5-moe",
    "glm4_moe": "glm4moe",
    "glm4_moe_lite": "deepseek2",
    "gpt_oss": "gpt-oss",
    "granitemoe": "granitemoe",
    "granitemoeshared": "granitemoe",
    "kimi_k2": "deepseek2",
    "minimax_m2": "minimax-m2",
    "mixtral": "llama",
    "olmoe": "olmoe",
    "phimoe": "phimoe",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "solar_open": "glm4moe",
}
TURNED = ("deepseek", "mixtral", "granitemoe", "granitemoeshared")
QUANTIZED = {"F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"}  # the package quantises into these


def stored_as(kind: Kind, array: NDArray[np.float32], seed: int) -> tuple[NDArray[Any], NDArray[np.float32]]:
    """(bytes or numbers, what the package makes of them). Types that it does not write get random blocks."""
    if kind == Kind.F32:
        return array, array
    if kind.name in QUANTIZED:
        data = gguf.quants.quantize(array, kind)
        return data, gguf.quants.dequantize(data, kind)
    size, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = np.random.default_rng(seed).integers(0, 256, (array.size // size, num_bytes), dtype=np.uint8)
    scale = np.array([0.001], dtype=np.float16).view(np.uint8)
    if kind == Kind.MXFP4:
        blocks[:, 0] = 122 + blocks[:, 0] % 4
    else:
        start = 208 if kind == Kind.Q6_K else 0
        blocks[:, start : start + 2] = scale
        if kind != Kind.Q6_K:
            blocks[:, 2:4] = scale
    data = blocks.reshape(*array.shape[:-1], -1)
    return data, gguf.quants.dequantize(data, kind)


def turned(weight: Tensor, num_heads: int) -> Tensor:
    """Rows of a head in the order of pairs instead of halves."""
    return weight.view(num_heads, 2, -1, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)


def as_converted(family: str, config: dict[str, Any], tensors: Tensors) -> Tensors:
    """By llama.cpp's names."""
    num_layers = config.get("num_hidden_layers") or config["n_layers"]
    architecture = next(a for a, name in gguf.MODEL_ARCH_NAMES.items() if name == ARCHITECTURES[family])
    names = gguf.get_tensor_name_map(architecture, num_layers)
    merged: dict[str, dict[int, Tensor]] = {}
    found: Tensors = {}
    for name, tensor in tensors.items():
        if expert := re.match(r"(.*\.experts)\.(\d+)\.(\w+)\.weight", name):
            merged.setdefault(f"{expert[1]}.{expert[3]}.weight", {})[int(expert[2])] = tensor
            continue
        found |= _one(family, config, name, tensor)
    for name, experts in merged.items():
        found[name] = torch.stack([experts[e] for e in range(len(experts))])
    result = {}
    for name, tensor in found.items():
        if name.startswith("blk."):
            result[name] = tensor
            continue
        plain = name.replace("e_score_correction_bias", "e_score_correction.bias")
        new = names.get_name(plain, try_suffixes=(".weight", ".bias"))
        assert new is not None, f"llama.cpp has no name for {plain}"
        result[new] = tensor
    return result


def _one(family: str, config: dict[str, Any], name: str, tensor: Tensor) -> Tensors:  # noqa: PLR0911, PLR0912
    layer = re.match(r"(?:model\.layers|transformer\.blocks)\.(\d+)\.", name)
    block = f"blk.{layer[1]}." if layer else ""
    if family in TURNED and re.search(r"\.[qk]_proj\.(weight|bias)", name):
        heads = config["num_attention_heads" if ".q_proj" in name else "num_key_value_heads"]
        return {name: turned(tensor, heads)}
    if name.endswith(("mlp.w1", "mlp.v1", "mlp.w2")):
        experts = tensor.view(config["ffn_config"]["moe_num_experts"], -1, config["d_model"])
        new = {"w1": "gate", "v1": "up", "w2": "down"}[name[-2:]]
        return {f"{block}ffn_{new}_exps.weight": experts.transpose(1, 2) if new == "down" else experts}
    if name.endswith("kv_b_proj.weight"):
        nope, value = config["qk_nope_head_dim"], config["v_head_dim"]
        heads = tensor.view(config["num_attention_heads"], nope + value, -1)
        keys, values = heads.split([nope, value], dim=1)
        return {block + "attn_k_b.weight": keys.transpose(1, 2), block + "attn_v_b.weight": values}
    if name.endswith(("input_linear.weight", "output_linear.weight", "experts.gate_up_proj", "experts.down_proj")):
        kind = "exps" if tensor.ndim == 3 else "shexp"
        if family == "gpt_oss":
            tensor = tensor.transpose(1, 2)
        if name.endswith(("output_linear.weight", "down_proj")):
            return {f"{block}ffn_down_{kind}.weight": tensor}
        gate, up = (tensor[:, 0::2], tensor[:, 1::2]) if family == "gpt_oss" else tensor.chunk(2, dim=-2)
        return {f"{block}ffn_gate_{kind}.weight": gate, f"{block}ffn_up_{kind}.weight": up}
    if name.endswith("gate_up_proj_bias"):
        return {f"{block}ffn_gate_exps.bias": tensor[:, 0::2], f"{block}ffn_up_exps.bias": tensor[:, 1::2]}
    if name.endswith("down_proj_bias"):
        return {f"{block}ffn_down_exps.bias": tensor}
    if name.endswith("self_attn.sinks"):
        return {f"{block}attn_sinks.weight": tensor}
    if name.endswith("e_score_correction_bias"):
        return {f"{block}exp_probs_b.bias": tensor.flatten()}
    if name.endswith("router.bias") and family == "gpt_oss":
        return {f"{block}ffn_gate_inp.bias": tensor}
    if name.endswith("shared_expert_gate.weight"):
        return {f"{block}ffn_gate_inp_shexp.weight": tensor.flatten()}
    if name.endswith("router.layer.weight") or name.endswith("router.weight"):
        return {f"{block}ffn_gate_inp.weight": tensor}
    return {name: tensor}


def metadata(writer: gguf.GGUFWriter, family: str, config: dict[str, Any]) -> None:
    """What llama.cpp's conversion of the family writes."""
    if family == "dbrx":
        _dbrx_metadata(writer, config)
        return
    rope = config.get("rope_parameters") or {}
    head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(rope.get("rope_theta", 10_000.0))
    keys = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
    writer.add_expert_count(next(config[key] for key in keys if config.get(key)))
    writer.add_expert_used_count(config.get("moe_k") or config["num_experts_per_tok"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_eos_token_id(2)
    if config.get("moe_intermediate_size"):
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if ARCHITECTURES[family] == "deepseek2":
        rank, rope_dim = config["kv_lora_rank"], config["qk_rope_head_dim"]
        writer.add_head_count_kv(1)
        writer.add_kv_lora_rank(rank)
        if config.get("q_lora_rank"):
            writer.add_q_lora_rank(config["q_lora_rank"])
        writer.add_key_length(rank + rope_dim)
        writer.add_value_length(rank)
        writer.add_key_length_mla(config["qk_nope_head_dim"] + rope_dim)
        writer.add_value_length_mla(config["v_head_dim"])
        writer.add_rope_dimension_count(rope_dim)
    else:
        writer.add_head_count_kv(config["num_key_value_heads"])
        writer.add_key_length(head)
        writer.add_value_length(head)
        writer.add_rope_dimension_count(int(head * rope.get("partial_rotary_factor", 1.0)))
    if config.get("n_routed_experts"):
        writer.add_expert_shared_count(config.get("n_shared_experts") or 0)
        writer.add_leading_dense_block_count(config.get("first_k_dense_replace") or 0)
        writer.add_expert_weights_scale(config.get("routed_scaling_factor") or 1.0)
        writer.add_expert_weights_norm(bool(config.get("norm_topk_prob")))
        writer.add_expert_group_count(config.get("n_group") or 1)
        writer.add_expert_group_used_count(config.get("topk_group") or 1)
        softmax = family in ("deepseek", "deepseek_v2")
        writer.add_expert_gating_func(
            gguf.ExpertGatingFuncType.SOFTMAX if softmax else gguf.ExpertGatingFuncType.SIGMOID
        )
    if family == "ernie4_5_moe":
        writer.add_expert_shared_count(config["moe_num_shared_experts"])
        writer.add_leading_dense_block_count(config["moe_layer_start_index"])
        writer.add_interleave_moe_layer_step(config["moe_layer_interval"])
    if family == "olmoe" and config.get("clip_qkv"):
        writer.add_clamp_kqv(config["clip_qkv"])
    if family.startswith("granite"):
        writer.add_embedding_scale(config["embedding_multiplier"])
        writer.add_residual_scale(config["residual_multiplier"])
        writer.add_attention_scale(config["attention_multiplier"])
        writer.add_logit_scale(config["logits_scaling"])
    if family == "phimoe":
        writer.add_sliding_window(config.get("sliding_window") or 0)
    if config.get("sliding_window") and family in ("gpt_oss", "mixtral"):
        writer.add_sliding_window(config["sliding_window"])
    if rope.get("rope_type") == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])


def _dbrx_metadata(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    attention, experts = config["attn_config"], config["ffn_config"]
    writer.add_block_count(config["n_layers"])
    writer.add_context_length(config["max_seq_len"])
    writer.add_embedding_length(config["d_model"])
    writer.add_feed_forward_length(experts["ffn_hidden_size"])
    writer.add_head_count(config["n_heads"])
    writer.add_head_count_kv(attention["kv_n_heads"])
    writer.add_rope_freq_base((config.get("rope_parameters") or attention)["rope_theta"])
    writer.add_clamp_kqv(attention["clip_qkv"])
    writer.add_expert_count(experts["moe_num_experts"])
    writer.add_expert_used_count(experts["moe_top_k"])
    writer.add_layer_norm_eps(1e-5)
    writer.add_eos_token_id(2)


KindOf = Callable[[str, tuple[int, ...]], Kind]


def all_of(kind: Kind) -> KindOf:
    """Matrices in `kind`, as llama.cpp has them: routers, vectors and what is no whole blocks stay float32."""
    size = gguf.GGML_QUANT_SIZES[kind][0]

    def choose(name: str, shape: tuple[int, ...]) -> Kind:
        plain = len(shape) < 2 or "ffn_gate_inp" in name or name.endswith(".bias") or shape[-1] % size
        return Kind.F32 if plain else kind

    return choose


def write_gguf(
    folder: Path,
    file: Path,
    kind_of: KindOf,
    add: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
    **writer_options: Any,
) -> Tensors:
    """A GGUF file of the checkpoint in `folder`, with what `add` adds to its metadata. Returns what its tensors
    multiply out to, by llama.cpp's names."""
    config = json.loads((folder / "config.json").read_text())
    family = config["model_type"]
    writer = gguf.GGUFWriter(file, ARCHITECTURES[family], **writer_options)
    metadata(writer, family, config)
    add(writer)
    wide = {}
    for number, (name, tensor) in enumerate(
        as_converted(family, config, load_file(folder / "model.safetensors")).items()
    ):
        kind = kind_of(name, tuple(tensor.shape))
        data, floats = stored_as(kind, tensor.float().contiguous().numpy(), number)
        writer.add_tensor(name, data, raw_dtype=None if kind == Kind.F32 else kind)
        wide[name] = torch.from_numpy(np.ascontiguousarray(floats))
    finish(writer)
    return wide


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def wide_gguf(folder: Path, file: Path, kind_of: KindOf) -> Path:
    """Beside `file`, one with float32 for what its blocks multiply out to."""
    wide = write_gguf(folder, file, kind_of)
    reader = gguf.GGUFReader(file)
    writer = gguf.GGUFWriter(file.with_name("wide.gguf"), str(reader.fields["general.architecture"].contents()))
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            writer.add_key_value(name, field.contents(), field.types[0])
    for name, tensor in wide.items():
        writer.add_tensor(name, tensor.numpy())
    finish(writer)
    return file.with_name("wide.gguf")
