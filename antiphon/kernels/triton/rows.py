"""The gate, and rows into order of expert and back, without atomic additions and without asking the host anything.

    gate      from logits to the chosen experts, their weights, and how many rows of each block of tokens go where
    count     rows of each expert in each block of tokens, where no gate has counted them
    place     prefix sums over experts and blocks; then each row's place: by expert, in the order of tokens
    sum       of each token's rows, in ascending order of place and so of expert, in float32
    scale     gradients of a weighted sum: each place gets its token's, times its weight

Places are integers that depend on the choices only. A choice of -1 has no place: it is read by none and adds nothing.

In the gate experts lie as [groups, experts of a group], both padded to powers of two. A choice takes the largest score
that is left, the lowest index among equals; K is small, so K passes cost less than a sort. On a CPU it is
`csrc/kernels/gate.h`. Training, and "sparsemixer" (two passes of its own), stay with PyTorch: `kernels/ops/route`.

Letters: T tokens, K choices a token, R = T * K rows at most, E experts, B blocks of tokens, H width.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from antiphon.kernels.triton.launch import launch, power_of_two
from antiphon.specs.model import RouterSpec

_CHUNK = tl.constexpr(32)  # slots compared at once


def tokens_a_block(num_tokens: int, num_experts: int) -> int:
    """Tokens of a program of the gate, of `count` and of `place`. It changes no result."""
    if num_tokens <= 2048:
        return 16
    return max(16, min(64, 4096 // power_of_two(num_experts)))


@triton.jit(do_not_specialize=["num_slots"])
def _count(ids_ptr, counts_ptr, num_slots, num_experts, SLOTS: tl.constexpr, STEP: tl.constexpr, E: tl.constexpr):
    expert = tl.arange(0, E)
    sums = tl.zeros((E,), tl.int32)
    for step in range(SLOTS // STEP):
        slots = tl.program_id(0) * SLOTS + step * STEP + tl.arange(0, STEP)
        ids = tl.load(ids_ptr + slots, slots < num_slots, -1)
        sums += tl.sum((ids[:, None] == expert[None, :]).to(tl.int32), 0)
    tl.store(counts_ptr + tl.program_id(0) * num_experts + expert, sums, expert < num_experts)


@triton.jit(do_not_specialize=["num_slots", "num_blocks"])
def _place(ids_ptr, counts_ptr, starts_ptr, order_ptr, places_ptr, num_slots, num_blocks, num_experts,
           SLOTS: tl.constexpr, E: tl.constexpr, S: tl.constexpr):  # fmt: skip
    """`SLOTS` of a block, padded to `S`."""
    block, expert = tl.program_id(0), tl.arange(0, E)
    before, totals = tl.zeros((E,), tl.int32), tl.zeros((E,), tl.int32)
    for other in range(num_blocks):
        counts = tl.load(counts_ptr + other * num_experts + expert, expert < num_experts, 0)
        totals += counts
        before += tl.where(other < block, counts, 0)
    ends = tl.cumsum(totals, 0)
    if block == 0:
        tl.store(starts_ptr + 1 + expert, ends, expert < num_experts)
        tl.store(starts_ptr, 0)
    inner = tl.arange(0, S)
    slots = block * SLOTS + inner
    mine = (inner < SLOTS) & (slots < num_slots)
    ids = tl.load(ids_ptr + slots, mine, -1)
    earlier = tl.zeros((S,), tl.int32)
    for first in range(0, S, _CHUNK):
        inner_there = first + tl.arange(0, _CHUNK)
        there = block * SLOTS + inner_there
        ids_there = tl.load(ids_ptr + there, (inner_there < SLOTS) & (there < num_slots), -1)
        same = (ids[:, None] == ids_there[None, :]) & (inner_there[None, :] < inner[:, None])
        earlier += tl.sum(same.to(tl.int32), 1)
    bases = tl.gather(ends - totals + before, tl.maximum(ids, 0), 0)
    held = mine & (ids >= 0)
    tl.store(places_ptr + slots, tl.where(held, bases + earlier, -1), mine)
    tl.store(order_ptr + bases + earlier, slots, held)


@triton.jit
def _sum(rows_ptr, places_ptr, weights_ptr, out_ptr, width, HAS_WEIGHTS: tl.constexpr, ASCENDING: tl.constexpr,
         TOP_K: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    columns, slot = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, K)
    places = tl.load(places_ptr + token * TOP_K + slot, slot < TOP_K, -1)
    sums = tl.zeros((BLOCK,), tl.float32)
    last = -1
    for k in range(TOP_K):
        if ASCENDING:
            place = tl.min(tl.where(places > last, places, 2147483647), 0)
            last = place
            held = place < 2147483647
        else:
            place = tl.load(places_ptr + token * TOP_K + k)
            held = place >= 0
        x = tl.load(rows_ptr + place.to(tl.int64) * width + columns, held & (columns < width), 0.0).to(tl.float32)
        if HAS_WEIGHTS:
            x *= tl.load(weights_ptr + token * TOP_K + k).to(tl.float32)
        sums += x
    tl.store(out_ptr + token * width + columns, sums.to(out_ptr.dtype.element_ty), columns < width)


@triton.jit
def _scale(x_ptr, y_ptr, weights_ptr, order_ptr, out_ptr, dots_ptr, width, HAS_DOTS: tl.constexpr, TOP_K: tl.constexpr,
           BLOCK: tl.constexpr):  # fmt: skip
    place = tl.program_id(0).to(tl.int64)
    slot = tl.load(order_ptr + place).to(tl.int64)
    weight = tl.load(weights_ptr + slot).to(tl.float32)
    dots = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, width, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + slot // TOP_K * width + columns, columns < width, 0.0).to(tl.float32)
        if HAS_DOTS:
            dots += x * tl.load(y_ptr + place * width + columns, columns < width, 0.0).to(tl.float32)
        tl.store(out_ptr + place * width + columns, (x * weight).to(out_ptr.dtype.element_ty), columns < width)
    if HAS_DOTS:
        tl.store(dots_ptr + slot, tl.sum(dots).to(dots_ptr.dtype.element_ty))


def count(ids_TK: Tensor, num_experts: int) -> Tensor:
    """int32 [B, E], as the gate counts them."""
    num_tokens, top_k = ids_TK.shape
    block = tokens_a_block(num_tokens, num_experts)
    num_blocks = -(-num_tokens // block)
    counts_BE = torch.empty((num_blocks, num_experts), dtype=torch.int32, device=ids_TK.device)
    launch(
        _count, (num_blocks,), ids_TK, counts_BE, num_tokens * top_k, num_experts,
        SLOTS=block * top_k, STEP=block, E=power_of_two(num_experts),
    )  # fmt: skip
    return counts_BE


def place(ids_TK: Tensor, counts_BE: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(starts int32 [E + 1] of each expert's rows, and their end; order int32 [R]: the slot t * K + k at each place,
    undefined beyond the end; places int32 [T, K], -1 for an absent choice)."""
    (num_tokens, top_k), (num_blocks, num_experts) = ids_TK.shape, counts_BE.shape
    starts_E1 = torch.empty(num_experts + 1, dtype=torch.int32, device=ids_TK.device)
    order_R = torch.empty(num_tokens * top_k, dtype=torch.int32, device=ids_TK.device)
    places_TK = torch.empty_like(ids_TK)
    slots = tokens_a_block(num_tokens, num_experts) * top_k
    launch(
        _place, (num_blocks,), ids_TK, counts_BE, starts_E1, order_R, places_TK, num_tokens * top_k, num_blocks,
        num_experts, SLOTS=slots, E=power_of_two(num_experts), S=power_of_two(slots, 32),
    )  # fmt: skip
    return starts_E1, order_R, places_TK


def sum_rows(x_RH: Tensor, places_TK: Tensor, weights_TK: Tensor | None, *, ascending: bool = False) -> Tensor:
    """[T, H]: the sum over each token's rows, each times its weight; in order of choice, or ascending by place (and
    then without weights)."""
    (num_tokens, top_k), width = places_TK.shape, x_RH.shape[1]
    assert weights_TK is None or not ascending
    out_TH = torch.empty((num_tokens, width), dtype=x_RH.dtype, device=x_RH.device)
    block = min(1024, power_of_two(width))
    launch(
        _sum, (num_tokens, -(-width // block)), x_RH, places_TK, weights_TK, out_TH,
        width, HAS_WEIGHTS=weights_TK is not None, ASCENDING=ascending, TOP_K=top_k, K=power_of_two(top_k), BLOCK=block,
    )  # fmt: skip
    return out_TH


def combine_gradient(
    grad_TH: Tensor, y_RH: Tensor | None, weights_TK: Tensor, order_R: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Gradients of the rows and, with the rows given, of the weights of `sum_rows`; `order_R` names present ones."""
    top_k, width = weights_TK.shape[1], grad_TH.shape[1]
    grad_TH = grad_TH.contiguous()
    grad_RH = torch.empty((order_R.shape[0], width), dtype=grad_TH.dtype, device=grad_TH.device)
    grad_weights_TK = None if y_RH is None else torch.zeros_like(weights_TK)
    launch(
        _scale, (order_R.shape[0],), grad_TH, y_RH, weights_TK, order_R, grad_RH, grad_weights_TK, width,
        HAS_DOTS=y_RH is not None, TOP_K=top_k, BLOCK=min(1024, power_of_two(width)),
    )  # fmt: skip
    return grad_RH, grad_weights_TK


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
