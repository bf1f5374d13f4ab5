"""Write the yardstick: a Qwen3-MoE checkpoint with random bf16 weights in Hugging Face format.

Usage: `python benchmarks/make_model.py {small,medium,qwen3-30b,tiny} DIR [--layers N] [--gguf Q4_0,Q8_0] [--seed N]`.

Method
1. Every tensor is drawn from its own generator, seeded by (seed, tensor name), so the bits depend neither on
   order nor on sharding. numpy's generator is used because torch's normal numbers differ between vector
   instruction sets.
2. One decoder layer is one shard; a shard is dropped once written, so memory stays at one shard.
3. Weights are scaled to keep activations near one (Qwen's 0.02 would leave attention and experts inaudible):
   sharp query/key norms make attention depend on content, and the LM head maps each token to a few likely
   successors, among which the context decides. Greedy text therefore wanders instead of repeating, and bf16
   picks the token fp32 picks 95 to 98 times of 100 (with blocks twice as loud: 77), so engines that round
   differently can be compared token by token.
4. The tokenizer is a byte-level BPE whose merges are made from syllables: any text round-trips, generated
   text can be spoken.

Rejected: training a tokenizer on a corpus (another download, other bits on each machine) and writing through
a transformers model (needs twice the memory and, in recent releases, stacks the experts, which published
checkpoints do not).
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import gguf
import numpy as np
import torch
from rich.progress import Progress
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
NUM_SUCCESSORS = 4
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True, kw_only=True)
class YardstickShape:
    """The sizes of one Qwen3-MoE model. Every layer is a MoE layer; input and output embeddings are separate."""

    num_layers: int
    hidden_size: int
    num_experts: int
    num_experts_per_token: int
    expert_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int = 8192


PRESETS = {
    "small": YardstickShape(
        num_layers=16, hidden_size=1024, num_experts=32, num_experts_per_token=4, expert_size=512,
        num_heads=16, num_kv_heads=4, head_dim=64, vocab_size=32768,
    ),
    "qwen3-30b": YardstickShape(  # 4 of 48 layers of Qwen3-30B-A3B, and fewer words
        num_layers=4, hidden_size=2048, num_experts=128, num_experts_per_token=8, expert_size=768,
        num_heads=32, num_kv_heads=4, head_dim=128, vocab_size=32768,
    ),
    "medium": YardstickShape(
        num_layers=8, hidden_size=512, num_experts=16, num_experts_per_token=2, expert_size=512,
        num_heads=8, num_kv_heads=4, head_dim=64, vocab_size=8192,
    ),
    "tiny": YardstickShape(
        num_layers=2, hidden_size=64, num_experts=8, num_experts_per_token=2, expert_size=32,
        num_heads=4, num_kv_heads=2, head_dim=16, vocab_size=512,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class TensorRecipe:
    """One tensor of the checkpoint: normal numbers of standard deviation `std` around `mean`."""

    name: str
    shape: tuple[int, ...]
    std: float
    mean: float = 0.0


def hugging_face_config(shape: YardstickShape) -> dict[str, object]:
    """`config.json` with the keys of published Qwen3-MoE checkpoints, which transformers and vLLM both read."""
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": shape.vocab_size - 3,
        "eos_token_id": shape.vocab_size - 1,
        "decoder_sparse_step": 1,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "hidden_size": shape.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": shape.expert_size * shape.num_experts_per_token,
        "max_position_embeddings": shape.max_position_embeddings,
        "mlp_only_layers": [],
        "moe_intermediate_size": shape.expert_size,
        "norm_topk_prob": True,
        "num_attention_heads": shape.num_heads,
        "num_experts": shape.num_experts,
        "num_experts_per_tok": shape.num_experts_per_token,
        "num_hidden_layers": shape.num_layers,
        "num_key_value_heads": shape.num_kv_heads,
        "output_router_logits": False,
        "rms_norm_eps": 1e-6,
        "rope_scaling": None,
        "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.001,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": shape.vocab_size,
    }


def layer_recipes(shape: YardstickShape, layer: int) -> list[TensorRecipe]:
    """The tensors of one decoder layer, named as in published checkpoints (one tensor per expert and projection)."""
    prefix, hidden = f"model.layers.{layer}", shape.hidden_size
    q_size, kv_size = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    unit = 1.0 / math.sqrt(hidden)
    # 2L blocks write to the residual stream; together they are about as loud as the token's embedding, which
    # keeps the amplification of rounding errors from layer to layer low.
    out = 1.0 / math.sqrt(2 * shape.num_layers)
    recipes = [
        TensorRecipe(f"{prefix}.input_layernorm.weight", (hidden,), 0.05, 1.0),
        TensorRecipe(f"{prefix}.post_attention_layernorm.weight", (hidden,), 0.05, 1.0),
        TensorRecipe(f"{prefix}.self_attn.q_norm.weight", (shape.head_dim,), 0.05, 1.5),
        TensorRecipe(f"{prefix}.self_attn.k_norm.weight", (shape.head_dim,), 0.05, 1.5),
        TensorRecipe(f"{prefix}.self_attn.q_proj.weight", (q_size, hidden), unit),
        TensorRecipe(f"{prefix}.self_attn.k_proj.weight", (kv_size, hidden), unit),
        TensorRecipe(f"{prefix}.self_attn.v_proj.weight", (kv_size, hidden), unit),
        TensorRecipe(f"{prefix}.self_attn.o_proj.weight", (hidden, q_size), out / math.sqrt(q_size)),
        TensorRecipe(f"{prefix}.mlp.gate.weight", (shape.num_experts, hidden), 2.0 * unit),
    ]
    for expert in range(shape.num_experts):
        stem, size = f"{prefix}.mlp.experts.{expert}", shape.expert_size
        recipes.append(TensorRecipe(f"{stem}.gate_proj.weight", (size, hidden), 2.0 * unit))
        recipes.append(TensorRecipe(f"{stem}.up_proj.weight", (size, hidden), unit))
        recipes.append(TensorRecipe(f"{stem}.down_proj.weight", (hidden, size), out / math.sqrt(size)))
    return recipes


def seeded_generator(seed: int, name: str) -> np.random.Generator:
    """A generator that depends on (seed, name) alone."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return np.random.Generator(np.random.SFC64(int.from_bytes(digest[:16], "little")))


def draw(recipe: TensorRecipe, seed: int) -> torch.Tensor:
    values = seeded_generator(seed, recipe.name).standard_normal(recipe.shape, dtype=np.float32)
    values *= np.float32(recipe.std)
    values += np.float32(recipe.mean)
    return torch.from_numpy(values).to(torch.bfloat16)


def embeddings(shape: YardstickShape, seed: int) -> dict[str, torch.Tensor]:
    """Input embedding, final norm and LM head.

    Row v of the head is the sum of the embeddings of the tokens that v may follow, plus noise. Special tokens
    have zero rows: greedy decoding never ends early, so every engine produces the same number of tokens.
    """
    size = (shape.vocab_size, shape.hidden_size)
    embed = draw(TensorRecipe("model.embed_tokens.weight", size, 1.0), seed)
    head = draw(TensorRecipe("lm_head.weight", size, 2.0 / math.sqrt(shape.hidden_size)), seed).float()
    num_text_tokens = shape.vocab_size - len(SPECIAL_TOKENS)
    for choice in range(NUM_SUCCESSORS):
        # One cycle through all tokens, so that no token follows itself.
        cycle = torch.from_numpy(seeded_generator(seed, f"successor.{choice}").permutation(num_text_tokens))
        head[cycle.roll(-1)] += embed[cycle].float() * (10.0 / shape.hidden_size)
    head[num_text_tokens:] = 0.0
    return {
        "model.embed_tokens.weight": embed,
        "model.norm.weight": draw(TensorRecipe("model.norm.weight", (shape.hidden_size,), 0.05, 1.0), seed),
        "lm_head.weight": head.to(torch.bfloat16),
    }


LAST_WRITTEN = "model.safetensors.index.json"
"""A folder that has it is complete."""


def shards(shape: YardstickShape, seed: int) -> Iterator[dict[str, torch.Tensor]]:
    """The checkpoint's shards, one at a time: the embeddings, then one per decoder layer."""
    yield embeddings(shape, seed)
    for layer in range(shape.num_layers):
        yield {recipe.name: draw(recipe, seed) for recipe in layer_recipes(shape, layer)}


def write_weights(shape: YardstickShape, folder: Path, seed: int) -> int:
    """Write the shards and their index into `folder`; returns the number of parameters."""
    num_shards, num_parameters = shape.num_layers + 1, 0
    weight_map: dict[str, str] = {}
    with Progress() as progress:
        task = progress.add_task(f"writing {folder.name}", total=num_shards)
        for number, tensors in enumerate(shards(shape, seed), start=1):
            file_name = f"model-{number:05d}-of-{num_shards:05d}.safetensors"
            save_file(tensors, folder / file_name, metadata={"format": "pt"})
            weight_map.update(dict.fromkeys(tensors, file_name))
            num_parameters += sum(tensor.numel() for tensor in tensors.values())
            progress.advance(task)
    index = {"metadata": {"total_size": 2 * num_parameters}, "weight_map": weight_map}
    write_json(folder / LAST_WRITTEN, index)
    return num_parameters


def syllable_merges(num_merges: int) -> list[tuple[str, str]]:
    """BPE merges that build syllables, then the same after a space, then words of two syllables, then of three."""
    syllables = [c + v for c, v in itertools.product("bcdfghjklmnpqrstvwxz", "aeiou")]
    pairs = list(itertools.product(syllables, syllables))
    ordered = itertools.chain(
        ((s[0], s[1]) for s in syllables),
        (("Ġ", s) for s in syllables),
        (("Ġ" + a, b) for a, b in pairs),
        pairs,
        (("Ġ" + a + b, c) for a, b in pairs for c in syllables),
    )
    return list(itertools.islice(ordered, num_merges))


def write_tokenizer(shape: YardstickShape, folder: Path) -> None:
    """A byte-level BPE tokenizer with exactly `vocab_size` tokens, the special ones last, and a ChatML template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = syllable_merges(shape.vocab_size - len(alphabet) - len(SPECIAL_TOKENS))
    vocab = {token: number for number, token in enumerate(alphabet + [a + b for a, b in merges])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    assert tokenizer.get_vocab_size() == shape.vocab_size
    tokenizer.save(str(folder / "tokenizer.json"))
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": None,
            "eos_token": SPECIAL_TOKENS[2],
            "pad_token": SPECIAL_TOKENS[0],
            "chat_template": CHAT_TEMPLATE,
            "clean_up_tokenization_spaces": False,
            "model_max_length": shape.max_position_embeddings,
        },
    )


def merged_experts(tensors: dict[str, torch.Tensor], num_experts: int) -> dict[str, torch.Tensor]:
    """The tensors of one shard with all experts of a layer in one tensor a projection, as GGUF has them."""
    merged = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for name in (name for name in tensors if ".experts.0." in name):
        parts = [tensors[name.replace(".experts.0.", f".experts.{expert}.")] for expert in range(num_experts)]
        merged[name.replace(".experts.0.", ".experts.")] = torch.stack(parts)
    return merged


def write_gguf(shape: YardstickShape, file: Path, kind: gguf.GGMLQuantizationType, seed: int) -> None:
    """The same weights as one GGUF: matrices in `kind`, norms and router in float32. Holds the packed weights."""
    writer = gguf.GGUFWriter(file, gguf.MODEL_ARCH_NAMES[gguf.MODEL_ARCH.QWEN3MOE])
    writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{kind.name}"])
    writer.add_block_count(shape.num_layers)
    writer.add_context_length(shape.max_position_embeddings)
    writer.add_embedding_length(shape.hidden_size)
    writer.add_feed_forward_length(shape.expert_size * shape.num_experts_per_token)
    writer.add_expert_feed_forward_length(shape.expert_size)
    writer.add_head_count(shape.num_heads)
    writer.add_head_count_kv(shape.num_kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1000000.0)
    writer.add_expert_count(shape.num_experts)
    writer.add_expert_used_count(shape.num_experts_per_token)
    tokenizer = json.loads((file.parent / "tokenizer.json").read_text(encoding="utf-8"))
    tokens = sorted(tokenizer["model"]["vocab"], key=tokenizer["model"]["vocab"].__getitem__) + list(SPECIAL_TOKENS)
    normal, control = gguf.TokenType.NORMAL, gguf.TokenType.CONTROL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([control if token in SPECIAL_TOKENS else normal for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["model"]["merges"]])
    writer.add_eos_token_id(shape.vocab_size - 1)
    writer.add_pad_token_id(shape.vocab_size - 3)
    writer.add_chat_template(CHAT_TEMPLATE)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3MOE, shape.num_layers)
    for tensors in shards(shape, seed):
        for name, tensor in merged_experts(tensors, shape.num_experts).items():
            plain = tensor.dim() == 1 or name.endswith("mlp.gate.weight")
            stored = gguf.GGMLQuantizationType.F32 if plain else kind
            data = gguf.quants.quantize(tensor.float().numpy(), stored)
            writer.add_tensor(names.get_name(name, (".weight",)), data, raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file(progress=True)
    writer.close()


def write_json(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def make_model(shape: YardstickShape, folder: Path, seed: int = 0) -> int:
    """Write a complete checkpoint into `folder` (created if absent); returns the number of parameters."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / LAST_WRITTEN).unlink(missing_ok=True)
    write_json(folder / "config.json", hugging_face_config(shape))
    eos, pad = shape.vocab_size - 1, shape.vocab_size - 3
    write_json(folder / "generation_config.json", {"eos_token_id": eos, "pad_token_id": pad, "do_sample": False})
    write_tokenizer(shape, folder)
    return write_weights(shape, folder, seed)


def main(arguments: list[str] | None = None) -> int:
    what = "Write the yardstick checkpoint (random weights, same bits for the same seed)."
    parser = argparse.ArgumentParser(description=what)
    parser.add_argument("preset", choices=sorted(PRESETS))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--layers", type=int, help="as many decoder layers in place of the preset's")
    parser.add_argument("--gguf", default="", help="also DIR/TYPE.gguf for each of these types, as Q4_0,Q8_0,BF16")
    parser.add_argument("--keep", action="store_true", help="do nothing if the folder is complete")
    options = parser.parse_args(arguments)
    if options.keep and (options.folder / LAST_WRITTEN).exists():
        print(f"{options.folder}: there already")
        return 0
    shape = PRESETS[options.preset]
    shape = replace(shape, num_layers=options.layers or shape.num_layers)
    kinds = [gguf.GGMLQuantizationType[name] for name in options.gguf.split(",") if name]
    num_parameters = make_model(shape, options.folder, options.seed)
    for kind in kinds:
        write_gguf(shape, options.folder / f"{kind.name.lower()}.gguf", kind, options.seed)
    print(f"{options.folder}: {num_parameters / 1e6:.1f} M parameters, {2 * num_parameters / 2**30:.2f} GiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
