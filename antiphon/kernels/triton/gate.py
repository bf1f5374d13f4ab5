"""The gate: from logits to the chosen experts, their weights, and how many rows of each block of tokens go where.

One program a block of tokens. Experts lie as [groups, experts of a group], both padded to powers of two. A choice takes
the largest score that is left, the lowest index among equals; K is small, so K passes cost less than a sort.
"Sparsemixer" (two passes of its own) stays with PyTorch: `antiphon.kernels.ops.route`.

Letters as in `antiphon.kernels.api`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from antiphon.kernels.triton.launch import launch, power_of_two
from antiphon.kernels.triton.rows import tokens_a_block
from antiphon.specs.model import RouterSpec

_LOWEST = tl.constexpr(-3.0e38)  # below every score, above what is no longer there


@triton.jit(do_not_specialize=["num_tokens"])
def _gate(logits_ptr, bias_ptr, ids_ptr, weights_ptr, counts_ptr, num_tokens, num_experts, group_size, num_groups,
          top_groups, scaling, HAS_BIAS: tl.constexpr, SIGMOID: tl.constexpr, TWO_BEST: tl.constexpr,
          LATE_SOFTMAX: tl.constexpr, NORMALIZE: tl.constexpr, TOP_K: tl.constexpr, K: tl.constexpr, T: tl.constexpr,
          GROUPS: tl.constexpr, SIZE: tl.constexpr):  # fmt: skip
    tokens = tl.program_id(0) * T + tl.arange(0, T)
    flat = tl.arange(0, GROUPS * SIZE)
    expert = flat // SIZE * group_size + flat % SIZE
    exists = (flat % SIZE < group_size) & (flat // SIZE < num_groups)
    here = (tokens < num_tokens)[:, None] & exists[None, :]
    logits = tl.load(logits_ptr + tokens[:, None].to(tl.int64) * num_experts + expert[None, :], here, 0.0)
    logits = tl.where(exists[None, :], logits, float("-inf"))
    if SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-logits))
    else:
        raised = tl.exp(logits - tl.max(logits, 1)[:, None])
        scores = raised / tl.sum(raised, 1)[:, None]
    choice = scores
    if HAS_BIAS:
        choice += tl.load(bias_ptr + expert, exists, 0.0)[None, :]
    choice = tl.where(choice > _LOWEST, choice, _LOWEST)  # also what is not a number
    choice = tl.where(exists[None, :], choice, float("-inf"))
    if GROUPS > 1:
        choice = _best_groups(choice, num_groups, top_groups, TWO_BEST, T, GROUPS, SIZE)
    slot = tl.arange(0, K)
    ids = tl.full((T, K), -1, tl.int32)
    weights = tl.zeros((T, K), tl.float32)
    chosen = tl.zeros((T, GROUPS * SIZE), tl.int32)
    for k in range(TOP_K):
        best = tl.min(tl.where(choice == tl.max(choice, 1)[:, None], flat[None, :], GROUPS * SIZE), 1)
        taken = flat[None, :] == best[:, None]
        weight = tl.sum(tl.where(taken, logits if LATE_SOFTMAX else scores, 0.0), 1)
        ids = tl.where(slot[None, :] == k, (best // SIZE * group_size + best % SIZE)[:, None], ids)
        weights = tl.where(slot[None, :] == k, weight[:, None], weights)
        choice = tl.where(taken, float("-inf"), choice)
        chosen += (taken & (tokens < num_tokens)[:, None]).to(tl.int32)
    used = (slot < TOP_K)[None, :]
    if LATE_SOFTMAX:
        raised = tl.exp(weights - tl.max(tl.where(used, weights, float("-inf")), 1)[:, None])
        weights = tl.where(used, raised, 0.0)
        weights = weights / tl.sum(weights, 1)[:, None]
    if NORMALIZE:
        weights = weights / (tl.sum(weights, 1) + 1e-20)[:, None]
    places = tokens[:, None] * TOP_K + slot[None, :]
    stored = used & (tokens < num_tokens)[:, None]
    tl.store(ids_ptr + places, ids, stored)
    tl.store(weights_ptr + places, weights * scaling, stored)
    tl.store(counts_ptr + tl.program_id(0) * num_experts + expert, tl.sum(chosen, 0), exists)


@triton.jit
def _best_groups(choice, num_groups, top_groups, TWO_BEST: tl.constexpr, T: tl.constexpr, GROUPS: tl.constexpr,
                 SIZE: tl.constexpr):  # fmt: skip
    """-inf for every expert outside the best groups; a group counts as its best expert, or its two best together."""
    grouped = tl.reshape(choice, (T, GROUPS, SIZE))
    best = tl.max(grouped, 2)
    rank = best
    if TWO_BEST:
        place = tl.arange(0, SIZE)[None, None, :]
        first = tl.min(tl.where(grouped == best[:, :, None], place, SIZE), 2)
        rank += tl.max(tl.where(place == first[:, :, None], float("-inf"), grouped), 2)
    group = tl.arange(0, GROUPS)[None, :]
    rank = tl.where(group < num_groups, rank, float("-inf"))
    kept = rank > float("inf")  # none yet
    for _ in range(top_groups):
        winner = tl.min(tl.where(rank == tl.max(rank, 1)[:, None], group, GROUPS), 1)
        won = group == winner[:, None]
        kept = kept | won
        rank = tl.where(won, float("-inf"), rank)
    return tl.reshape(tl.where(kept[:, :, None], grouped, float("-inf")), (T, GROUPS * SIZE))


def gate(logits_TE: Tensor, bias_E: Tensor | None, router: RouterSpec) -> tuple[Tensor, Tensor, Tensor]:
    """(ids int32 [T, K], weights float32 [T, K], counts int32 [blocks, E]: rows of each block of tokens), from float32
    logits. Any router but "sparsemixer"."""
    assert router.scoring != "sparsemixer", "PyTorch's operators do this one"
    (num_tokens, num_experts), top_k = logits_TE.shape, router.top_k
    block = tokens_a_block(num_tokens, num_experts)
    ids_TK = torch.empty((num_tokens, top_k), dtype=torch.int32, device=logits_TE.device)
    weights_TK = torch.empty((num_tokens, top_k), dtype=torch.float32, device=logits_TE.device)
    num_blocks = -(-num_tokens // block)
    counts_BE = torch.empty((num_blocks, num_experts), dtype=torch.int32, device=logits_TE.device)
    group_size = num_experts // router.num_groups
    groups, size = power_of_two(router.num_groups), power_of_two(group_size, 2)
    launch(
        _gate, (num_blocks,), logits_TE.contiguous(), bias_E, ids_TK, weights_TK, counts_BE,
        num_tokens, num_experts, group_size, router.num_groups, router.top_k_groups, router.scaling,
        HAS_BIAS=bias_E is not None, SIGMOID=router.scoring == "sigmoid", TWO_BEST=router.group_score == "top2",
        LATE_SOFTMAX=router.softmax_after_top_k, NORMALIZE=router.normalize, TOP_K=top_k, K=power_of_two(top_k),
        T=block, GROUPS=groups, SIZE=size, num_warps=max(1, min(16, block * groups * size // 256)),
    )  # fmt: skip
    return ids_TK, weights_TK, counts_BE
