"""Router: from gate logits to the chosen experts and their weights, for every router a supported family uses.

Letters as in `antiphon.kernels.api`.
"""

import torch
from torch import Tensor

from antiphon.specs.model import RouterSpec


def choose_experts(logits_TE: Tensor, bias_E: Tensor | None, router: RouterSpec) -> tuple[Tensor, Tensor]:
    """(ids int32 [T, K], weights float32 [T, K]) from float32 logits, best first."""
    if router.scoring == "sparsemixer":
        return _sparsemixer(logits_TE, router.jitter)
    scores = logits_TE.sigmoid() if router.scoring == "sigmoid" else logits_TE.softmax(-1)
    choice = scores if bias_E is None else scores + bias_E
    if router.num_groups > 1:
        choice = _keep_best_groups(choice, router)
    ids = choice.topk(router.top_k, dim=-1).indices
    if router.softmax_after_top_k:
        weights = logits_TE.gather(1, ids).softmax(-1)
    else:
        weights = scores.gather(1, ids)
    if router.normalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return ids.int(), weights * router.scaling


def _keep_best_groups(choice_TE: Tensor, router: RouterSpec) -> Tensor:
    """-inf for every expert outside the `top_k_groups` best groups (DeepSeek-V2 section 2.2.2, -V3 section 2.1.2)."""
    grouped = choice_TE.view(choice_TE.shape[0], router.num_groups, router.num_experts // router.num_groups)
    if router.group_score == "max":
        group_scores = grouped.amax(-1)
    else:
        group_scores = grouped.topk(2, dim=-1).values.sum(-1)
    best = group_scores.topk(router.top_k_groups, dim=-1).indices
    dropped = torch.ones_like(group_scores, dtype=torch.bool).scatter_(1, best, False)
    return grouped.masked_fill(dropped.unsqueeze(-1), float("-inf")).flatten(1)


def _sparsemixer(logits_TE: Tensor, jitter: float) -> tuple[Tensor, Tensor]:
    """Two passes of top-1 (GRIN MoE, arXiv 2409.12136, inference form): each pass weighs its winner by a softmax over
    the experts within 2 * jitter of it, relative to the larger of |score| and the winner's score; the second pass no
    longer sees the first winner."""
    chosen, weights = [], []
    candidates = logits_TE
    for _ in range(2):
        best, index = candidates.max(-1, keepdim=True)
        distance = (best - logits_TE) / torch.maximum(logits_TE.abs(), best)
        masked = candidates.masked_fill(distance > 2 * jitter, float("-inf"))
        weights.append(masked.softmax(-1).gather(1, index))
        chosen.append(index)
        candidates = candidates.scatter(1, index, float("-inf"))
    return torch.cat(chosen, 1).int(), torch.cat(weights, 1)
