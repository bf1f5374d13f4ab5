"""Write the folder that transformers loads, file by file, so that a reader never meets half a file.

The weights go through transformers' own class and `save_pretrained`; that class keeps experts stacked in
memory and saves them one by one (`mlp.experts.3.gate_proj.weight`), as published Qwen3-MoE checkpoints do.
"""

import json
import tempfile
from pathlib import Path

import torch
from corpus import END_OF_TEXT, TURN_END, special_id
from model import TrainableMoe
from tokenizer import save_tokenizer
from tokenizers import Tokenizer
from transformers import GenerationConfig, Qwen3MoeConfig, Qwen3MoeForCausalLM


def to_transformers(model: TrainableMoe, config: Qwen3MoeConfig, dtype: torch.dtype) -> Qwen3MoeForCausalLM:
    """A copy of the trained weights in transformers' class, in `dtype`."""
    exported = Qwen3MoeForCausalLM(config).to(dtype)
    missing, unexpected = exported.load_state_dict(model.state_dict(), strict=False)
    assert set(missing) <= {"lm_head.weight"}, missing
    assert not unexpected, unexpected
    exported.tie_weights()
    return exported


def name_experts_both_ways(config_file: Path) -> None:
    """transformers 5.23 writes `num_local_experts`; published Qwen3-MoE configurations say `num_experts`."""
    config = json.loads(config_file.read_text())
    config["num_experts"] = config["num_local_experts"]
    config_file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def export_checkpoint(
    model: TrainableMoe,
    config: Qwen3MoeConfig,
    tokenizer: Tokenizer,
    folder: Path,
) -> None:
    """Write weights (bfloat16), configurations and tokenizer into `folder`, each file replaced atomically."""
    ends = [special_id(tokenizer, END_OF_TEXT), special_id(tokenizer, TURN_END)]
    config.eos_token_id, config.pad_token_id, config.bos_token_id = ends, ends[0], None
    exported = to_transformers(model, config, torch.bfloat16)
    exported.generation_config = GenerationConfig(
        eos_token_id=ends, pad_token_id=ends[0], do_sample=True, temperature=0.7, top_p=0.95
    )
    with tempfile.TemporaryDirectory(dir=folder, prefix=".export-") as scratch:
        exported.save_pretrained(scratch)
        name_experts_both_ways(Path(scratch) / "config.json")
        save_tokenizer(tokenizer, Path(scratch), context_length=config.max_position_embeddings)
        for path in Path(scratch).iterdir():
            path.chmod(0o644)
            path.replace(folder / path.name)
