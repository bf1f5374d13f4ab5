"""Native kernels of the differentiable row operators on CPUs: thin launchers with the functions of Triton's modules.

They compute in float32 and round once. A row's bits depend on that row alone; sums over rows (a norm's weight) go in
fixed parts, so their bits do not depend on the number of threads. Rejected: `torch.compile` of the same operators. It
needs a compiler where people train, and half a minute before the first step.

Letters as in `antiphon.kernels.ops`.
"""

import os
from typing import Any

import torch
from torch import Tensor

from antiphon import _native
from antiphon.kernels.api import ExpertShape, address
from antiphon.specs.model import FeedForwardSpec

DTYPES = (torch.float32, torch.bfloat16)


def takes(x: Tensor) -> bool:
    """Whether these kernels compute with tensors such as `x`. ANTIPHON_NATIVE_OPERATORS=0 turns them off. A dispatch
    mode, such as the one that looks for the first NaN, gets PyTorch's operators: it would not see these."""
    if torch._C._len_torch_dispatch_stack():
        return False
    return x.is_cpu and x.dtype in DTYPES and os.environ.get("ANTIPHON_NATIVE_OPERATORS") != "0"


def check(fits: bool, *given: Tensor | None) -> None:
    """`ValueError` with the shapes, if these tensors do not belong together: kernels would read beyond one of them."""
    if not fits:
        shapes = ", ".join("none" if each is None else f"{each.dtype} {tuple(each.shape)}" for each in given)
        raise ValueError(f"tensors that do not belong together: {shapes}")


def isa() -> str:
    """The instruction set of these kernels."""
    return _native.isa()


def share_threads() -> None:
    """Have these kernels run on as many threads as PyTorch's operators do. Idle ones sleep at once: PyTorch's own need
    the same cores."""
    _native.set_num_threads(torch.get_num_threads())
    _native.set_spin_ns(0)


def norm(x: Tensor, weight_H: Tensor, eps: float) -> tuple[None, Tensor, Tensor]:
    """(None, x * factor * weight, the factors 1 / sqrt(mean(x²) + eps) of rows [..., 1] in float32)."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    factors = torch.empty((*x.shape[:-1], 1), dtype=torch.float32, device=x.device)
    check(x.dim() > 0 and weight_H.shape == x.shape[-1:], x, weight_H)
    x, weight_H = _by_rows(x), _like(weight_H, x).contiguous()
    _native.training_norm(_is_bf16(x), _grid(x), x.shape[-1], address(weight_H), eps, address(out), address(factors))
    return None, out, factors


def norm_gradient(grad: Tensor, x: Tensor, weight_H: Tensor, factors: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of x and of the weight."""
    grad_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    sums_H = torch.empty(weight_H.shape, dtype=torch.float32, device=x.device)
    x, grad, own_H = _by_rows(x), _by_rows(_like(grad, x)), _like(weight_H, x).contiguous()
    _native.training_norm_gradient(
        *(_is_bf16(x), _grid(x), _grid(grad), x.shape[-1], address(own_H), address(factors)),
        *(address(grad_x), address(sums_H)),
    )
    return grad_x, _like(sums_H, weight_H)


def turn(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, *, back: bool = False) -> Tensor:
    """x [..., N, D] rotated, or rotated back; cos and sin [..., R], or to be broadcast to that."""
    rows = x.reshape(-1, *x.shape[-2:]) if x.dim() > 4 else x
    table = (*x.shape[:-2], cos.shape[-1])
    cos, sin = (each.expand(table).reshape(*rows.shape[:-2], table[-1]) for each in (cos, sin))
    if not back:
        return turn_normed(rows, None, 0.0, cos, sin, interleaved)[0].view(x.shape)
    out = torch.empty(rows.shape, dtype=x.dtype, device=x.device)
    turn_normed_gradient(rows, None, None, None, cos, sin, interleaved, out)
    return out.view(x.shape)


def turn_normed(
    x: Tensor, weight_D: Tensor | None, eps: float, cos: Tensor, sin: Tensor, interleaved: bool
) -> tuple[Tensor, Tensor | None]:
    """Heads x, at most 4 axes [..., N, D], normed (None: not) and rotated; the norm's factors. cos and sin [..., R]."""
    out, factors = torch.empty(x.shape, dtype=x.dtype, device=x.device), None
    check(weight_D is None or weight_D.shape == x.shape[-1:], x, weight_D)
    check(cos.shape == sin.shape == (*x.shape[:-2], cos.shape[-1]) and 2 * cos.shape[-1] <= x.shape[-1], x, cos, sin)
    if weight_D is not None:
        weight_D = _like(weight_D, x).contiguous()
        factors = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    x, (cos, sin) = _by_rows(x), _tables(cos, sin)
    _native.training_turn(
        *(_is_bf16(x), _grid(x), x.shape[-1], _angles(cos, sin, interleaved), address(weight_D), eps),
        *(address(factors), address(out)),
    )
    return out, factors


def turn_normed_gradient(
    grad: Tensor,
    x: Tensor | None,
    weight_D: Tensor | None,
    factors: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
    out: Tensor,
) -> Tensor | None:
    """Writes the gradient of `turn_normed`'s x into `out`, whose rows may lie apart; returns that of the weight."""
    grad, x, (cos, sin) = _by_rows(_like(grad, out)), None if x is None else _by_rows(x), _tables(cos, sin)
    own_D = None if weight_D is None else _like(weight_D, out).contiguous()
    sums_D = None if weight_D is None else torch.empty(weight_D.shape, dtype=torch.float32, device=out.device)
    _native.training_turn_gradient(
        *(_is_bf16(out), _grid(grad), out.shape[-1], _angles(cos, sin, interleaved), _grid(grad if x is None else x)),
        *(address(own_D), address(factors), _grid(out), address(sums_D)),
    )
    return None if sums_D is None or weight_D is None else _like(sums_D, weight_D)


def _tables(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """In float32, each row's numbers adjacent, both in the same way."""
    cos, sin = cos.float(), sin.float()
    if cos.stride(-1) != 1 or cos.stride() != sin.stride():
        cos, sin = cos.contiguous(), sin.contiguous()
    return cos, sin


def _angles(cos: Tensor, sin: Tensor, interleaved: bool) -> _native.Angles:
    """The native form of tables that live as long as this is used."""
    first, second = (0, 0, *cos.stride()[:-1])[-2:]
    return _native.Angles(address(cos), address(sin), first, second, cos.shape[-1], interleaved)


def activate(x: Tensor, widths: FeedForwardSpec | ExpertShape) -> Tensor:
    """[..., I] from rows [gate | up] [..., 2 I]."""
    out = torch.empty((*x.shape[:-1], x.shape[-1] // 2), dtype=x.dtype, device=x.device)
    _activation(x, None, widths, out)
    return out


def activate_gradient(grad: Tensor, x: Tensor, widths: FeedForwardSpec | ExpertShape) -> Tensor:
    """The gradient of the rows [gate | up]."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _activation(x, _like(grad, x), widths, out)
    return out


def _activation(x: Tensor, grad: Tensor | None, widths: FeedForwardSpec | ExpertShape, out: Tensor) -> None:
    width = x.shape[-1] // 2
    check(x.shape[-1] == 2 * width and (grad is None or 2 * grad.numel() == x.numel()), x, grad)
    x_RJ = x.reshape(-1, 2 * width).contiguous()
    grad_RI = None if grad is None else grad.reshape(-1, width).contiguous()
    _native.training_activate(
        *(_is_bf16(x), address(x_RJ), 2 * width, address(grad_RI), width, x_RJ.shape[0], width),
        *(widths.activation, widths.alpha, widths.limit, address(out)),
    )


def loss_and_gradient(logits_TV: Tensor, bias_V: Tensor | None, targets_T: Tensor, divisor: float) -> Tensor:
    """The loss -log softmax((logits + bias) / divisor)[target] of each row, float32 [T]. `logits_TV`, contiguous,
    becomes its gradient times `divisor`. A row with a target below 0 has the loss 0 and a gradient of zeros."""
    check(logits_TV.is_contiguous() and targets_T.shape == logits_TV.shape[:1], logits_TV, targets_T)
    check(bias_V is None or bias_V.shape == logits_TV.shape[1:], logits_TV, bias_V)
    losses_T = torch.empty(logits_TV.shape[0], dtype=torch.float32, device=logits_TV.device)
    bias_V = None if bias_V is None else bias_V.float().contiguous()
    targets_T = targets_T.long().contiguous()
    if len(targets_T) and int(targets_T.max()) >= logits_TV.shape[1]:
        raise ValueError(f"a target beyond the logits: {int(targets_T.max())} of {logits_TV.shape[1]}")
    _native.training_cross_entropy(
        *(_is_bf16(logits_TV), address(logits_TV), logits_TV.shape[0], logits_TV.shape[1], address(bias_V)),
        *(address(targets_T), divisor, address(losses_T)),
    )
    return losses_T


def combine_gradient(
    grad_TH: Tensor, y_RH: Tensor | None, weights_TK: Tensor, order_R: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Gradients of the rows and, with the rows given, of the weights of `sum_rows`; `order_R` names present ones."""
    top_k, width = weights_TK.shape[1], grad_TH.shape[1]
    grad_RH = torch.empty((order_R.shape[0], width), dtype=grad_TH.dtype, device=grad_TH.device)
    grad_weights_TK = None if y_RH is None else torch.zeros_like(weights_TK, memory_format=torch.contiguous_format)
    grad_TH, weights_TK, order_R = grad_TH.contiguous(), weights_TK.contiguous(), order_R.contiguous()
    y_RH = None if y_RH is None else y_RH.contiguous()
    check(weights_TK.dtype == grad_TH.dtype and order_R.dtype == torch.int64, weights_TK, grad_TH, order_R)
    check(y_RH is None or y_RH.shape == grad_RH.shape, y_RH, grad_RH)
    _native.training_combine_gradient(
        *(_is_bf16(grad_TH), address(grad_TH), width, address(y_RH), address(weights_TK), address(order_R)),
        *(order_R.shape[0], top_k, width, address(grad_RH), address(grad_weights_TK)),
    )
    return grad_RH, grad_weights_TK


def sum_rows(x_RH: Tensor, places_TK: Tensor, weights_TK: Tensor | None) -> Tensor:
    """[T, H]: the sum over each token's rows, each times its weight, in order of choice."""
    (num_tokens, top_k), width = places_TK.shape, x_RH.shape[1]
    out_TH = torch.empty((num_tokens, width), dtype=x_RH.dtype, device=x_RH.device)
    x_RH, places_TK = x_RH.contiguous(), places_TK.long().contiguous()
    check(weights_TK is None or weights_TK.shape == places_TK.shape, weights_TK, places_TK)
    if places_TK.numel() and not 0 <= int(places_TK.min()) <= int(places_TK.max()) < len(x_RH):
        raise ValueError(f"places {int(places_TK.min())} to {int(places_TK.max())} of {len(x_RH)} rows")
    weights_TK = None if weights_TK is None else _like(weights_TK, x_RH).contiguous()
    _native.training_sum_rows(
        *(_is_bf16(x_RH), address(x_RH), width, address(places_TK), address(weights_TK)),
        *(num_tokens, top_k, width, address(out_TH)),
    )
    return out_TH


def causal_attention(
    q_BSND: Tensor, k_BSGD: Tensor, v_BSGV: Tensor, first_keys_BS: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """[B, S, N, V]: each query sees the keys from its first one, int64, or from 0, to itself; [B, N, S]: the logarithm
    of its sum of exponentials, float32."""
    q_BSND, k_BSGD, v_BSGV = (_by_rows(each) for each in (q_BSND, k_BSGD, v_BSGV))
    (batch, length, heads, _), width = q_BSND.shape, v_BSGV.shape[-1]
    out = torch.empty(batch, length, heads, width, dtype=q_BSND.dtype, device=q_BSND.device)
    lse = torch.empty(batch, heads, length, dtype=torch.float32, device=q_BSND.device)
    _native.causal_attention(_is_bf16(out), *_causal(q_BSND, k_BSGD, v_BSGV, first_keys_BS, scale, out, lse))
    return out, lse


def causal_gradient(
    grad: Tensor,
    q_BSND: Tensor,
    k_BSGD: Tensor,
    v_BSGV: Tensor,
    first_keys_BS: Tensor | None,
    scale: float,
    out: Tensor,
    lse: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v; `out` and `lse` as `causal_attention` made them."""
    grad, out = _by_rows(_like(grad, out)), out.contiguous()
    q_BSND, k_BSGD, v_BSGV = (_by_rows(each) for each in (q_BSND, k_BSGD, v_BSGV))
    made = [torch.empty(each.shape, dtype=out.dtype, device=out.device) for each in (q_BSND, k_BSGD, v_BSGV)]
    _native.causal_gradient(
        *(_is_bf16(out), *_causal(q_BSND, k_BSGD, v_BSGV, first_keys_BS, scale, out, lse), _grid(grad)),
        *(address(each) for each in made),
    )
    return made[0], made[1], made[2]


def _causal(
    q: Tensor, k: Tensor, v: Tensor, first_keys_BS: Tensor | None, scale: float, out: Tensor, lse: Tensor
) -> tuple[Any, ...]:
    """What both kernels begin with, of tensors `_by_rows` that live as long as this is used."""
    check(q.dtype == k.dtype == v.dtype == out.dtype and q.shape[:2] == k.shape[:2], q, k, v)
    check(k.shape[:3] == v.shape[:3] and q.shape[3] == k.shape[3], q, k, v)
    check(k.shape[2] > 0 and q.shape[2] % k.shape[2] == 0, q, k, v)
    if first_keys_BS is not None:
        check(first_keys_BS.shape == q.shape[:2] and first_keys_BS.dtype == torch.int64, q, first_keys_BS)
        own_S = torch.arange(q.shape[1], device=q.device)
        if not first_keys_BS.is_contiguous() or bool(((first_keys_BS < 0) | (first_keys_BS > own_S)).any()):
            raise ValueError("first keys must be contiguous, and none below 0 or behind its query")
    grids = _grid(q), _grid(k), _grid(v)
    sizes = scale, q.shape[-1], v.shape[-1]
    return *grids, address(first_keys_BS), *sizes, address(out), address(lse)


def matrix_product(a: Tensor, b: Tensor, out: Tensor | None = None, *, adds: bool = False) -> Tensor:
    """a @ b, in `out`, whose columns are adjacent, if there is one; `adds`: added to it. `out` has the factors' type or
    is float32."""
    check(a.dim() == b.dim() == 2 and a.dtype == b.dtype and a.shape[1] == b.shape[0], a, b)
    if out is None:
        out = torch.empty(a.shape[0], b.shape[1], dtype=a.dtype, device=a.device)
    check(out.shape == (a.shape[0], b.shape[1]) and out.dtype in (a.dtype, torch.float32), a, b, out)
    check(out.stride(1) == 1 or out.shape[1] <= 1, out)
    a, b = (each if 1 in each.stride() else each.contiguous() for each in (a, b))
    _native.product(
        *(_is_bf16(a), address(a), a.stride(0), a.stride(1), address(b), b.stride(0), b.stride(1)),
        *(address(out), out.stride(0), a.shape[0], a.shape[1], b.shape[1], adds, out.dtype == torch.float32),
    )
    return out


def grouped_forward(x_RI: Tensor, weight_EOI: Tensor, counts_E: tuple[int, ...], out_RO: Tensor) -> Tensor:
    """Each row times the matrix of its expert, in `out_RO`."""
    _grouped(_native.GroupedProduct.FORWARD, x_RI.contiguous(), out_RO, weight_EOI.contiguous(), counts_E)
    return out_RO


def grouped_input_gradient(grad_RO: Tensor, weight_EOI: Tensor, counts_E: tuple[int, ...], out_RI: Tensor) -> Tensor:
    """The gradient of the rows of `grouped_forward`, in `out_RI`."""
    _grouped(_native.GroupedProduct.INPUT_GRADIENT, out_RI, grad_RO.contiguous(), weight_EOI.contiguous(), counts_E)
    return out_RI


def grouped_weight_gradient(grad_RO: Tensor, x_RI: Tensor, counts_E: tuple[int, ...], out_EOI: Tensor) -> Tensor:
    """The gradient of the matrices of `grouped_forward`, in `out_EOI`; zeros for experts without rows."""
    _grouped(_native.GroupedProduct.WEIGHT_GRADIENT, x_RI.contiguous(), grad_RO.contiguous(), out_EOI, counts_E)
    return out_EOI


def _grouped(
    kind: _native.GroupedProduct, x_RI: Tensor, y_RO: Tensor, weight_EOI: Tensor, counts_E: tuple[int, ...]
) -> None:
    alike = x_RI.dtype == y_RO.dtype == weight_EOI.dtype and x_RI.shape[0] == y_RO.shape[0] == sum(counts_E)
    alike = alike and x_RI.is_contiguous() and y_RO.is_contiguous() and weight_EOI.is_contiguous()
    fits = weight_EOI.shape == (len(counts_E), y_RO.shape[1], x_RI.shape[1]) and min(counts_E, default=0) >= 0
    check(alike and fits, x_RI, y_RO, weight_EOI)
    addresses = address(x_RI), address(y_RO), address(weight_EOI)
    _native.grouped_product(_is_bf16(x_RI), kind, *addresses, list(counts_E), x_RI.shape[1], y_RO.shape[1])


def adamw(
    values: Tensor,
    grad: Tensor,
    mean: Tensor,
    square: Tensor,
    *,
    step: int,
    scale: float,
    rate: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> None:
    """Step number `step`, the first is 1, of AdamW as `torch.optim.AdamW` takes it along `grad` times `scale`. All are
    float32, flat and contiguous; `values` and both moments change."""
    flat = (each.dtype == torch.float32 and each.is_contiguous() for each in (values, grad, mean, square))
    check(all(flat) and values.numel() == grad.numel() == mean.numel() == square.numel(), values, grad, mean, square)
    if step < 1:
        raise ValueError(f"step {step} of AdamW: the first is 1")
    _native.adamw(
        address(values),
        address(grad),
        address(mean),
        address(square),
        values.numel(),
        step,
        scale,
        rate,
        betas[0],
        betas[1],
        eps,
        weight_decay,
    )


def _is_bf16(x: Tensor) -> bool:
    return x.dtype == torch.bfloat16


def _like(x: Tensor, other: Tensor) -> Tensor:
    """`x` in the type of `other`."""
    return x if x.dtype == other.dtype else x.to(other.dtype)


def _by_rows(x: Tensor) -> Tensor:
    """`x` with adjacent elements in each row and at most three axes before them."""
    if x.dim() > 4:
        x = x.reshape(-1, x.shape[-1])
    return x if x.stride(-1) == 1 or x.shape[-1] <= 1 else x.contiguous()


def _grid(x: Tensor) -> _native.GridRows:
    """Where the rows of `_by_rows` lie."""
    sizes, strides = (1, 1, 1, *x.shape[:-1])[-3:], (0, 0, 0, *x.stride()[:-1])[-3:]
    return _native.GridRows(address(x), *sizes, *strides)
