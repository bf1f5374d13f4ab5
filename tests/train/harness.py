"""A small model, a small tokenizer and some text, for runs that take a second."""

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from antiphon.train.config import TrainConfig, read_config
from antiphon.train.config_tables import LossConfig
from antiphon.train.layer import norm
from antiphon.train.model import Batch, MoeModel
from antiphon.train.routing import Routing
from antiphon.train.weights import Weights

CONFIG: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "moe_intermediate_size": 24,
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "max_position_embeddings": 64,
    "eos_token_id": 0,
    "tie_word_embeddings": False,
}
LATENT: dict[str, Any] = CONFIG | {
    "model_type": "deepseek_v3",
    "intermediate_size": 48,
    "moe_intermediate_size": 21,
    "num_hidden_layers": 2,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
    "num_experts": None,  # the same by another name
    "n_routed_experts": 8,
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 3,
    "n_shared_experts": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
}
LINES = [
    "the cat sat on the mat",
    "a dog ran to the old barn",
    "one two three four five six",
    "rain fell on the red roof",
]


def write_model(folder: Path, **changes: Any) -> Path:
    """`config.json` and a byte-level tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<end>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(LINES * 4, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def write_text(folder: Path, num_documents: int = 40) -> Path:
    """Documents of repeating lines, one a file."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(num_documents):
        lines = [LINES[(number + index * (1 + number % 3)) % len(LINES)] for index in range(8)]
        (folder / f"{number:03d}.txt").write_text("\n".join(lines) + "\n")
    return folder


def write_run(folder: Path, *, extra: str = "", **model: Any) -> Path:
    """A whole run's folder; returns its `train.toml`."""
    write_model(folder / "model", **model)
    write_text(folder / "text")
    file = folder / "train.toml"
    file.write_text(
        f"""steps = 6
sequence_length = 16
batch = 4
{extra}
[model]
path = "model"
[data]
files = ["text/*.txt"]
held_out = 0.1
[optimizer]
learning_rate = 1e-2
warmup_steps = 2
[output]
folder = "out"
checkpoint_every = 3
log_every = 1
"""
    )
    return file


def config_of(folder: Path, *changes: str, **model: Any) -> TrainConfig:
    return read_config(write_run(folder, **model), changes)


def loss_of(model: MoeModel, batch: Batch, num_targets: torch.Tensor, config: LossConfig | None = None) -> torch.Tensor:
    """The cross-entropy, with nothing added to it unless `config` says so."""
    settings = LossConfig(balance=0.0) if config is None else config
    routing = Routing(model.spec.router, settings, model.mesh.stage, num_layers=model.spec.num_moe_layers)
    return model.stage(0, None, batch, num_targets, routing)


def logits_of(model: MoeModel, batch: Batch) -> torch.Tensor:
    """[B, S, W] in float32 or wider, of one process."""
    routing = Routing(model.spec.router, LossConfig(), model.mesh.stage, num_layers=model.spec.num_moe_layers)
    weights = Weights(model, model.dtype)
    y_BSH = norm(model.spec, weights, "final_norm", model._rows(0, None, batch, routing))
    logits = y_BSH @ weights["embedding" if model.spec.tie_embeddings else "head"].mT
    bias = weights.optional("head_bias")
    logits = (logits if bias is None else logits + bias) / model.spec.logits_divisor
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


class LiveParameters:
    """The parameters of a whole model in memory, as an export reads them."""

    def __init__(self, model: MoeModel) -> None:
        self.spec = model.spec
        self.further = model.spec.num_layers in model.layers
        self._tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}

    def read(self, name: str, first: int = 0, last: int | None = None) -> torch.Tensor:
        return self._tensors[name].detach()[first:last]


def losses(folder: Path) -> list[tuple[int, float]]:
    """(step, loss) of every line of the run's metrics."""
    lines = [json.loads(line) for line in (folder / "out" / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["loss"]) for line in lines if "loss" in line]


def same_tensors(first: torch.nn.Module, second: torch.nn.Module) -> bool:
    """Bit for bit."""
    ours, theirs = first.state_dict(), second.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
