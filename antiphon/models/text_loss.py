"""The mean loss of a model on tokens, in nats: what rounding its weights costs, in one number."""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from antiphon.kernels.api import KernelBackend
from antiphon.models.attention_half import AttentionHalf
from antiphon.models.batch import make_attention_batch
from antiphon.models.config import load_model_spec
from antiphon.models.expert_half import ExpertHalf
from antiphon.models.gguf.checkpoint import open_weights
from antiphon.models.load import load_attention_half, load_expert_half

BLOCK_SIZE = 16
WINDOW = 512  # tokens that see each other


def text_loss(
    model: Path, token_ids: Sequence[int], backend: KernelBackend, report: Callable[[float], None], weights: str
) -> float:
    """Every token but the first of a window of `WINDOW` is predicted from those before it. Reads the whole model.
    `report`: the part that is done, up to 1. `weights` as in `open_weights`."""
    spec, checkpoint = load_model_spec(model), open_weights(model, weights)
    attention, experts = load_attention_half(checkpoint, spec, backend), load_expert_half(checkpoint, spec, backend)
    width = min(WINDOW, spec.max_position)
    windows = [list(token_ids[start : start + width]) for start in range(0, len(token_ids), width)]
    windows = [window for window in windows if len(window) > 1]
    total = count = 0.0
    with torch.inference_mode():
        for number, window in enumerate(windows):
            ids = torch.tensor(window, device=backend.device)
            logits = _logits(attention, experts, ids)
            total += float(F.cross_entropy(logits[:-1].float(), ids[1:], reduction="sum"))
            count += len(window) - 1
            report((number + 1) / len(windows))
    return total / max(count, 1.0)


def _logits(half: AttentionHalf, experts: ExpertHalf, ids_T: Tensor) -> Tensor:
    num_blocks = -(-len(ids_T) // BLOCK_SIZE)
    cache = half.new_cache(num_blocks, BLOCK_SIZE)
    batch = make_attention_batch([len(ids_T)], [len(ids_T)], [list(range(num_blocks))], BLOCK_SIZE, ids_T.device)
    x_TH, delta_TH = half.embed(ids_T), None
    for layer in half.layers:
        x_TH, y_TH = half.attend(layer, x_TH, delta_TH, cache, batch)
        delta_TH = half.local_feed_forward(layer, y_TH)
        if half.routes(layer):
            ids_TK, weights_TK = half.gate(layer, y_TH)
            routed_TH = experts.forward(layer, y_TH, experts.to_local(layer, ids_TK), weights_TK)
            delta_TH = routed_TH if delta_TH is None else delta_TH.add_(routed_TH)
    return half.head(x_TH, delta_TH)
