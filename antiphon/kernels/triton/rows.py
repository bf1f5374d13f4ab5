"""Rows into order of expert and back, without atomic additions and without asking the host anything.

    count     rows of each expert in each block of tokens (the gate counts its own)
    place     prefix sums over experts and blocks; then each row's place: by expert, in the order of tokens
    sum       of each token's rows, in ascending order of place and so of expert, in float32
    scale     gradients of a weighted sum: each place gets its token's, times its weight

Places are integers that depend on the choices only. A choice of -1 has no place: it is read by none and adds nothing.

Letters: T tokens, K choices a token, R = T * K rows at most, E experts, B blocks of tokens, H width.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from antiphon.kernels.triton.launch import launch, power_of_two

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
