"""Small random checkpoints of every family, saved by transformers, and ways to run them through the decoder."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from antiphon.kernels.api import KernelBackend
from antiphon.kernels.reference import ReferenceBackend
from antiphon.models.batch import make_attention_batch
from antiphon.models.config import load_model_spec
from antiphon.models.families.config_readers import FAMILIES as KNOWN
from antiphon.models.load import load_attention_half, load_expert_half, open_checkpoint
from antiphon.specs.model import KVStorage
from tests.models.decoder import Decoder

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

FAMILIES = sorted(KNOWN.keys() - {"deepseek"})  # of which transformers has no model
SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.15,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
GPT_OSS_ROPE: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 150000.0,
    "factor": 8.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 16,
}
QWEN: dict[str, Any] = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
DEEPSEEK: dict[str, Any] = {
    "num_key_value_heads": 6,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 20,
    "q_lora_rank": 28,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
}
GLM: dict[str, Any] = {
    "n_routed_experts": 8,
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "routed_scaling_factor": 1.5,
}
GRANITE: dict[str, Any] = {
    "num_local_experts": 5,
    "num_experts_per_tok": 3,
    "embedding_multiplier": 12.0,
    "attention_multiplier": 0.3,
    "residual_multiplier": 0.22,
    "logits_scaling": 0.7,
}
ERNIE: dict[str, Any] = {"moe_num_experts": 5, "moe_k": 3, "moe_intermediate_size": 24, "pad_token_id": 0}
HALF_ROTATED = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5}
MINIMAX: dict[str, Any] = {"num_local_experts": 5, "num_experts_per_tok": 3, "head_dim": 12}


class KimiK2Config(transformers.DeepseekV3Config):  # type: ignore[misc]
    """transformers has no `kimi_k2`: Kimi-K2 is DeepSeek-V3 under this name."""

    model_type = "kimi_k2"


class KimiK2ForCausalLM(transformers.DeepseekV3ForCausalLM):  # type: ignore[misc]
    config_class = KimiK2Config


AutoConfig.register("kimi_k2", KimiK2Config, exist_ok=True)
AutoModelForCausalLM.register(KimiK2Config, KimiK2ForCausalLM, exist_ok=True)


@dataclass
class SavedModel:
    """A checkpoint folder and the transformers model it was saved from."""

    folder: Path
    model: Any

    def logits(self, token_ids: Tensor) -> Tensor:
        with torch.inference_mode():
            logits: Tensor = self.model(token_ids[None]).logits[0]
        return logits


def family_config(family: str, **changes: Any) -> Any:
    """A transformers config of odd small sizes: 5 experts, 3 query heads per KV head, dense layers where possible."""
    makers: dict[str, tuple[Any, dict[str, Any]]] = {
        "mixtral": (transformers.MixtralConfig, {"num_local_experts": 5}),
        "qwen2_moe": (
            transformers.Qwen2MoeConfig,
            QWEN | {"shared_expert_intermediate_size": 32, "mlp_only_layers": [1]},
        ),
        "qwen3_moe": (
            transformers.Qwen3MoeConfig,
            QWEN | {"head_dim": 12, "norm_topk_prob": True, "decoder_sparse_step": 2},
        ),
        "olmoe": (transformers.OlmoeConfig, {"num_experts": 5, "num_experts_per_tok": 3, "clip_qkv": 1.0}),
        "phimoe": (
            transformers.PhimoeConfig,
            {"num_local_experts": 5, "lm_head_bias": True, "attention_bias": True, "router_jitter_noise": 0.1},
        ),
        "gpt_oss": (
            transformers.GptOssConfig,
            {"num_local_experts": 5, "head_dim": 12, "sliding_window": 9, "initializer_range": 0.25}
            | {"rope_parameters": GPT_OSS_ROPE},
        ),
        "deepseek_v2": (transformers.DeepseekV2Config, DEEPSEEK | {"q_lora_rank": None, "routed_scaling_factor": 1.5}),
        "deepseek_v3": (transformers.DeepseekV3Config, DEEPSEEK | {"n_group": 4, "topk_group": 2}),
        "kimi_k2": (KimiK2Config, DEEPSEEK | {"n_group": 1, "topk_group": 1, "rms_norm_eps": 1e-5}),
        "glm4_moe": (transformers.Glm4MoeConfig, GLM | {"use_qk_norm": True, "attention_bias": True, "head_dim": 12}),
        "glm4_moe_lite": (transformers.Glm4MoeLiteConfig, DEEPSEEK | GLM | {"num_key_value_heads": 6}),
        "solar_open": (transformers.SolarOpenConfig, GLM | {"head_dim": 10}),
        "dots1": (transformers.Dots1Config, GLM | {"first_k_dense_replace": 1, "n_shared_experts": 2, "head_dim": 12}),
        "minimax_m2": (transformers.MiniMaxM2Config, MINIMAX | {"rope_parameters": HALF_ROTATED}),
        "ernie4_5_moe": (transformers.Ernie4_5_MoeConfig, ERNIE),
        "granitemoe": (transformers.GraniteMoeConfig, GRANITE),
        "granitemoeshared": (transformers.GraniteMoeSharedConfig, GRANITE | {"shared_intermediate_size": 32}),
    }
    if family == "dbrx":
        sizes = {
            "d_model": 48,
            "n_heads": 6,
            "n_layers": 2,
            "vocab_size": 97,
            "max_seq_len": 128,
            "initializer_range": 0.15,
            "attn_config": {"kv_n_heads": 2, "clip_qkv": 1.0, "rope_theta": 500000.0},
            "ffn_config": {"ffn_hidden_size": 24, "moe_num_experts": 5, "moe_top_k": 3},
        }
        return transformers.DbrxConfig(**(sizes | changes))
    maker, own = makers[family]
    return maker(**(SIZES | own | changes))


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """These models are so small that more threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def save_model(tmp_path: Path) -> Callable[..., SavedModel]:
    """save(config, **how): a random float32 model with audible norms and biases, saved; `how` goes to transformers."""

    def save(config: Any, **how: Any) -> SavedModel:
        torch.manual_seed(7)
        config._experts_implementation = "eager"  # grouped products want widths that are multiples of 16 bytes
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "norm" in name and tensor.ndim == 1 and name.endswith("weight"):
                tensor.data = 1.0 + 0.2 * torch.randn_like(tensor)
            elif name.endswith("bias"):
                tensor.data = 0.2 * torch.randn_like(tensor)
            elif name.endswith("sinks"):
                tensor.data = torch.randn_like(tensor)
        folder = tmp_path / "checkpoint"
        model.save_pretrained(folder, **how)
        return SavedModel(folder, model)

    return save


def load_decoder(folder: Path, backend: KernelBackend | None = None, rope_scaling: str = "", **how: Any) -> Decoder:
    spec, backend = load_model_spec(folder, rope_scaling), backend or ReferenceBackend()
    checkpoint = open_checkpoint(folder, spec)
    return Decoder(load_attention_half(checkpoint, spec, backend, **how), load_expert_half(checkpoint, spec, backend))


def logits_by_chunks(
    decoder: Decoder, token_ids: Tensor, chunks: Sequence[int], block_size: int = 8, storage: KVStorage = "auto"
) -> Tensor:
    """Logits of every token of one sequence fed chunk by chunk through a paged cache whose blocks are not in order."""
    num_blocks = -(-len(token_ids) // block_size)
    half = decoder.attention_half
    cache = half.new_cache(num_blocks + 1, block_size, storage)
    table = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(1)).add(1).tolist()
    parts, start = [], 0
    with torch.inference_mode():
        for size in chunks:
            batch = make_attention_batch([size], [start + size], [table], block_size, "cpu")
            x = decoder.forward(token_ids[start : start + size], cache, batch)
            parts.append(half.head(x))
            start += size
    assert start == len(token_ids)
    return torch.cat(parts)


def random_ids(count: int, vocab_size: int = 97) -> Tensor:
    return torch.randint(0, vocab_size, (count,), generator=torch.Generator().manual_seed(count))


@pytest.fixture
def tools() -> Any:
    """The functions above, for tests, which cannot import this file by name."""

    class Tools:
        config = staticmethod(family_config)
        load = staticmethod(load_decoder)
        run = staticmethod(logits_by_chunks)
        ids = staticmethod(random_ids)

    return Tools
