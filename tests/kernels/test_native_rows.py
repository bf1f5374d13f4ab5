"""The trainer's row operators with native kernels against PyTorch's in float64: values and gradients.

Odd sizes, rows that lie apart in memory, every instruction set; a row's bits alone and among others."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from antiphon import _native
from antiphon.kernels import native_rows
from antiphon.kernels.api import ExpertShape
from antiphon.kernels.ops import attention, cross_entropy, feed_forward, kernels_for, route

DTYPES = [torch.bfloat16, torch.float32]
TOLERANCES = {torch.bfloat16: 1e-2, torch.float32: 2e-6}  # of the largest number
Operator = Callable[..., Tensor]


def with_gradients(run: Operator, inputs: list[Tensor], dtype: torch.dtype, *, apart: bool = False) -> list[Tensor]:
    """The result and the gradients of `inputs`, computed in `dtype`. `apart`: the gradient's rows lie as attention's
    do."""
    given = [each.to(dtype).requires_grad_() for each in inputs]
    y = run(*given)
    torch.manual_seed(1)
    grad = torch.randn(y.shape).to(torch.bfloat16).to(dtype)
    if apart and grad.dim() > 2:
        grad = grad.transpose(-3, -2).contiguous().transpose(-3, -2)
    return [y.detach(), *torch.autograd.grad(y, given, grad)]


def compare(run: Operator, inputs: list[Tensor], dtype: torch.dtype, *, apart: bool = False, factor: float = 1) -> None:
    """`run` on `inputs`, whose numbers bfloat16 can say, against float64."""
    inputs = [each.to(torch.bfloat16).double() for each in inputs]
    assert all(kernels_for(each.to(dtype), "rowwise") is native_rows for each in inputs)
    expected = with_gradients(run, inputs, torch.float64, apart=apart)
    found = with_gradients(run, inputs, dtype, apart=apart)
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.dtype == dtype
        assert mine.shape == theirs.shape
        if theirs.numel():
            error = (mine.double() - theirs).abs().max() / theirs.abs().max().clamp(min=1e-2)
            assert error < factor * TOLERANCES[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(0, 3, 7), (1, 1), (35, 17), (2, 130, 3, 64), (2, 3, 4, 5, 33), (301, 256)])
def test_norm(isa: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(shape), torch.rand(shape[-1]) + 0.5
    factor = max(1.0, x.numel() / shape[-1] / 64)  # a weight's gradient is a sum over rows
    compare(lambda x, w: attention.rms_norm(x, w, 1e-5), [x, weight], dtype, apart=True, factor=factor)


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_of_rows_within_wider_ones(num_threads: int, dtype: torch.dtype) -> None:
    """As heads lie in a projection: neither read nor written together."""
    torch.manual_seed(0)

    def heads(x: Tensor, weight: Tensor) -> Tensor:
        q, k = torch.split(x, [3 * 20, 20], dim=-1)
        parts = [attention.rms_norm(each.view(2, 9, -1, 20), weight, 1e-6).flatten(2) for each in (q, k)]
        return torch.cat(parts, -1)

    compare(heads, [torch.randn(2, 9, 80), torch.rand(20) + 0.5], dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    ("shape", "half"), [((2, 5, 3, 9), 4), ((7, 4, 64), 32), ((2, 3, 1, 40), 17), ((0, 5, 2, 8), 2)]
)
def test_rotary(isa: str, dtype: torch.dtype, interleaved: bool, shape: tuple[int, ...], half: int) -> None:
    torch.manual_seed(0)
    angles = torch.rand(*shape[:-2], half) * 6
    cos, sin = angles.cos(), angles.sin()
    compare(lambda x: attention.rotate(x, cos, sin, interleaved), [torch.randn(shape)], dtype, apart=True)


def test_rotary_with_angles_of_all_sequences() -> None:
    torch.manual_seed(0)
    angles = torch.rand(1, 5, 4).expand(3, 5, 4)
    compare(lambda x: attention.rotate(x, angles.cos(), angles.sin(), False), [torch.randn(3, 5, 2, 8)], torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_norms", [False, True])
@pytest.mark.parametrize(
    ("head_dim", "half", "interleaved"), [(64, 32, False), (18, 9, True), (17, 5, False), (6, 0, False)]
)
def test_heads(isa: str, dtype: torch.dtype, has_norms: bool, head_dim: int, half: int, interleaved: bool) -> None:
    torch.manual_seed(0)
    batch, length, widths = 2, 13, (3 * head_dim, 1 * head_dim)
    angles = torch.rand(1, length, half).expand(batch, length, half) * 6

    def run(qkv: Tensor, q_norm: Tensor, k_norm: Tensor) -> Tensor:
        norms = (q_norm, k_norm) if has_norms else None
        parts = attention.heads_of(qkv, widths, norms, 1e-6, (angles.cos(), angles.sin()), interleaved, head_dim)
        return torch.cat(parts, 2)

    def without_norms(qkv: Tensor) -> Tensor:
        return run(qkv, qkv, qkv)

    qkv = torch.randn(batch, length, 5 * head_dim)
    inputs = [qkv, torch.rand(head_dim) + 0.5, torch.rand(head_dim) + 0.5]
    if has_norms:
        compare(run, inputs, dtype, apart=True, factor=4)
    else:
        compare(without_norms, inputs[:1], dtype, apart=True)


@pytest.mark.parametrize("count", [1, 17, 40000])
def test_adamw(isa: str, num_threads: int, count: int) -> None:
    """Three steps as PyTorch's own takes them, of gradients that are scaled."""
    torch.manual_seed(0)
    first = torch.randn(count)
    theirs, ours = first.clone().requires_grad_(), first.clone()
    optimizer = torch.optim.AdamW([theirs], lr=1e-2, betas=(0.8, 0.99), eps=1e-6, weight_decay=0.3)
    moments = torch.zeros(2, count)
    for step in (1, 2, 3):
        grad = torch.randn(count)
        theirs.grad = grad * 0.25
        optimizer.step()
        native_rows.adamw(
            *(ours, grad, *moments),
            step=step,
            scale=0.25,
            rate=1e-2,
            betas=(0.8, 0.99),
            eps=1e-6,
            weight_decay=0.3,
        )
    torch.testing.assert_close(ours, theirs.detach(), rtol=1e-6, atol=1e-6)
    state = optimizer.state[theirs]
    torch.testing.assert_close(moments[0], state["exp_avg"], rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(moments[1], state["exp_avg_sq"], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["silu", "gelu", "swiglu_oai"])
@pytest.mark.parametrize(("rows", "width"), [(0, 5), (1, 1), (6, 11), (260, 64)])
def test_activation(isa: str, dtype: torch.dtype, activation: str, rows: int, width: int) -> None:
    """So low a limit that both clamps bite."""
    torch.manual_seed(0)
    shape = ExpertShape(1, 1, width, activation, alpha=1.3, limit=0.5)
    compare(lambda x: feed_forward.activate(x, shape), [torch.randn(rows, 2 * width) * 3], dtype, factor=2)


@pytest.mark.parametrize("activation", ["silu", "gelu", "swiglu_oai"])
def test_activation_of_large_numbers(isa: str, activation: str) -> None:
    x = torch.tensor([[-200.0, -90.0, -0.0, 0.0, 90.0, 200.0, 1.0, -1.0, 7.0, -7.0] * 2])
    shape = ExpertShape(1, 1, 10, activation)
    compare(lambda x: feed_forward.activate(x, shape), [x], torch.float32, factor=3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("rows", "words"), [(0, 19), (1, 1), (7, 5001), (300, 33)])
def test_cross_entropy(isa: str, dtype: torch.dtype, biased: bool, rows: int, words: int) -> None:
    torch.manual_seed(0)
    targets = torch.randint(words, (rows,))
    targets[1::3] = cross_entropy.IGNORED
    size = 4 if dtype == torch.float32 else 1  # rounded logits of 40 would be 0.1 apart
    inputs = [torch.randn(rows, 6) * size, torch.randn(words, 6), *([torch.randn(words)] if biased else [])]

    def loss(x: Tensor, head: Tensor, bias: Tensor | None = None) -> Tensor:
        return cross_entropy.linear_cross_entropy(x, head, bias, targets, torch.tensor(3), 1.7) * 2

    if dtype == torch.float32:
        compare(loss, inputs, dtype, factor=4)
        return
    inputs = [each.bfloat16() for each in inputs]  # the loss stays in float32; logits are rounded
    expected = with_gradients(loss, inputs, torch.float64)
    given = [each.detach().requires_grad_() for each in inputs]
    y = loss(*given)
    torch.manual_seed(1)
    found = [y.detach(), *torch.autograd.grad(y, given, torch.randn(()).bfloat16().float())]
    for mine, theirs in zip(found, expected, strict=True):
        error = (mine.double() - theirs).abs().max() if theirs.numel() else torch.zeros(())
        assert error <= 5e-2 * max(1e-3, theirs.abs().max() if theirs.numel() else 1.0)


def test_cross_entropy_that_is_not_finite() -> None:
    """Not a number stays one: the run has to see it."""
    x, head = torch.tensor([[1.0], [float("nan")]]), torch.ones(40, 1)
    losses = native_rows.loss_and_gradient(x @ head.t(), None, torch.tensor([3, 3]), 1.0)
    assert losses[0].isfinite()
    assert losses[1].isnan()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("absent", [False, True])
@pytest.mark.parametrize("width", [1, 13, 256])
def test_rows_to_experts_and_back(isa: str, dtype: torch.dtype, absent: bool, width: int) -> None:
    torch.manual_seed(0)
    ids = torch.stack([torch.randperm(5)[:3] for _ in range(9)])
    if absent:
        ids = ids.masked_fill(torch.rand(ids.shape) < 0.4, -1)
        ids[0] = -1
    rows = route.row_map(ids, 5)

    def run(x: Tensor, weights: Tensor) -> Tensor:
        there = route.to_experts(x, rows)
        scale = torch.linspace(0.5, 2, there.shape[0]).unsqueeze(1).bfloat16().to(x.dtype)
        return route.combine(there * scale, weights, rows)

    compare(run, [torch.randn(9, width), torch.rand(9, 3)], dtype, factor=2)


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_depend_on_nothing_else(isa: str, dtype: torch.dtype) -> None:
    """Each row alone has the bits it has among others, and sums over rows have the same on 1 and 3 threads."""
    torch.manual_seed(0)
    x, weight, grad = torch.randn(700, 66).to(dtype), torch.rand(66).to(dtype), torch.randn(700, 66).to(dtype)
    shape, angles, half = ExpertShape(1, 1, 33, "silu"), torch.rand(700, 30), torch.randn(700, 33).to(dtype)
    targets = torch.randint(66, (700,))

    def results(rows: slice) -> list[Tensor]:
        _, y, factors = native_rows.norm(x[rows], weight, 1e-5)
        of_x, of_weight = native_rows.norm_gradient(grad[rows], x[rows], weight, factors)
        logits = x[rows].clone()
        losses = native_rows.loss_and_gradient(logits, None, targets[rows], 1.0)
        heads = x[rows].view(-1, 1, 66)
        return [
            *(y, of_x, logits, losses, native_rows.activate(x[rows], shape)),
            native_rows.activate_gradient(half[rows], x[rows], shape),
            native_rows.turn(heads, angles[rows].cos(), angles[rows].sin(), False),
            of_weight,
        ]

    before = _native.num_threads()
    try:
        _native.set_num_threads(1)
        together = results(slice(None))
        _native.set_num_threads(3)
        assert all(torch.equal(a, b) for a, b in zip(results(slice(None)), together, strict=True))
    finally:
        _native.set_num_threads(before)
    for row in (0, 1, 350, 699):
        alone = results(slice(row, row + 1))
        assert all(torch.equal(a[0], b[row]) for a, b in zip(alone[:-1], together[:-1], strict=True))


def test_a_switch_leaves_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.ones(2, 3)
    assert kernels_for(x, "rowwise") is native_rows
    assert kernels_for(x, "rowwise", native=False) is None
    assert kernels_for(x.double(), "rowwise") is None
    monkeypatch.setenv("ANTIPHON_NATIVE_OPERATORS", "0")
    assert kernels_for(x, "rowwise") is None


PRODUCT_SIZES = [(1, 1, 1), (5, 3, 16), (13, 70, 65), (130, 300, 48), (2, 600, 130), (1030, 20, 7)]


@pytest.mark.parametrize("size", PRODUCT_SIZES)
@pytest.mark.parametrize("layout", ["nn", "nt", "tn", "tt"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_product(isa: str, dtype: torch.dtype, size: tuple[int, int, int], layout: str) -> None:
    """Either factor lies as it is or turned; made anew, into columns of something wider, and added to."""
    torch.manual_seed(0)
    rows, inner, columns = size
    a = torch.randn(rows, inner).to(dtype) if layout[0] == "n" else torch.randn(inner, rows).to(dtype).t()
    b = torch.randn(inner, columns).to(dtype) if layout[1] == "n" else torch.randn(columns, inner).to(dtype).t()
    expected = a.double() @ b.double()
    tolerance = 1e-4 if dtype == torch.float32 else 1e-2
    found = native_rows.matrix_product(a, b)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)
    wider = torch.ones(rows, columns + 5)
    native_rows.matrix_product(a, b, wider[:, 2 : columns + 2], adds=True)
    torch.testing.assert_close(wider[:, 2 : columns + 2].double(), expected + 1, rtol=1e-4, atol=1e-3)
    assert (wider[:, :2] == 1).all()
    assert (wider[:, columns + 2 :] == 1).all()


def test_product_of_nothing(isa: str) -> None:
    assert native_rows.matrix_product(torch.ones(0, 3), torch.ones(3, 4)).shape == (0, 4)
    assert native_rows.matrix_product(torch.ones(2, 0), torch.ones(0, 70)).eq(0).all()


@pytest.mark.parametrize("counts", [(0, 0, 0), (3, 0, 14), (1, 40, 300)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_products_of_experts(isa: str, num_threads: int, dtype: torch.dtype, counts: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    num_rows = sum(counts)

    def run(x: Tensor, weight: Tensor) -> Tensor:
        return feed_forward.grouped_product(x, weight, counts)

    compare(run, [torch.randn(num_rows, 20), torch.randn(3, 35, 20)], dtype, factor=5)


def test_a_row_of_a_product_has_its_bits_alone(isa: str) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(300, 700), torch.randn(90, 700)
    together = native_rows.matrix_product(x, weight.t())
    for rows in (slice(0, 1), slice(7, 9), slice(100, 300)):
        assert torch.equal(native_rows.matrix_product(x[rows], weight.t()), together[rows])


@pytest.mark.parametrize("shape", [(7,), (2, 5), (0,)])
def test_linear(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    compare(feed_forward.linear, [torch.randn(*shape, 20), torch.randn(33, 20)], torch.float32, factor=5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("length", "heads", "kv_heads", "dim", "value_dim"),
    [(1, 1, 1, 1, 1), (7, 4, 2, 5, 3), (65, 2, 2, 16, 40), (150, 6, 2, 24, 17)],
)
@pytest.mark.parametrize("seen", ["all", "documents", "window"])
def test_attention(
    isa: str, dtype: torch.dtype, length: int, heads: int, kv_heads: int, dim: int, value_dim: int, seen: str
) -> None:
    torch.manual_seed(0)
    documents = (torch.rand(2, length) < 0.1).cumsum(1) if seen != "all" else None
    window = 9 if seen == "window" else None
    mask = attention.attention_mask(documents, length, window, torch.device("cpu"))
    first = attention.first_keys(documents, length, window, torch.device("cpu"))

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention.causal_attention(q, k, v, mask, dim**-0.5, None, first)

    sizes = ((heads, dim), (kv_heads, dim), (kv_heads, value_dim))
    compare(run, [torch.randn(2, length, *size) for size in sizes], dtype, apart=True, factor=4)


def test_attention_has_the_same_bits_on_any_number_of_threads(isa: str) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(3, 130, heads, 24) for heads in (4, 2, 2))
    found = []
    before = _native.num_threads()
    try:
        for threads in (1, 3):
            _native.set_num_threads(threads)
            out, lse = native_rows.causal_attention(q, k, v, None, 0.2)
            found.append([out, lse, *native_rows.causal_gradient(out, q, k, v, None, 0.2, out, lse)])
    finally:
        _native.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    alone, _ = native_rows.causal_attention(q[1:2, :70], k[1:2, :70], v[1:2, :70], None, 0.2)
    assert torch.equal(alone, found[0][0][1:2, :70]), "what comes later is not seen"


def test_attention_of_tensors_whose_last_axis_is_not_adjacent(isa: str) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 40, heads, 24) for heads in (4, 2, 2))
    apart = [each.transpose(-1, -2).contiguous().transpose(-1, -2) for each in (q, k, v)]
    out, lse = native_rows.causal_attention(q, k, v, None, 0.2)
    same, same_lse = native_rows.causal_attention(apart[0], apart[1], apart[2], None, 0.2)
    assert torch.equal(out, same)
    assert torch.equal(lse, same_lse)
    expected = native_rows.causal_gradient(out, q, k, v, None, 0.2, out, lse)
    found = native_rows.causal_gradient(out, apart[0], apart[1], apart[2], None, 0.2, out, lse)
    assert all(map(torch.equal, found, expected))


def test_a_target_beyond_the_logits_is_refused() -> None:
    with pytest.raises(ValueError, match="beyond the logits: 5 of 5"):
        native_rows.loss_and_gradient(torch.zeros(1, 5), None, torch.tensor([5]), 1.0)


def test_tensors_that_do_not_belong_together_are_refused() -> None:
    x, heads, cos, q = torch.randn(6, 8), torch.randn(6, 2, 8), torch.ones(6, 4), torch.randn(2, 5, 4, 8)
    k, first = torch.randn(2, 5, 2, 8), torch.full((2, 5), 5)
    calls: list[Callable[[], object]] = [
        lambda: attention.rms_norm(x, torch.ones(4), 1e-6),
        lambda: attention.rms_norm(x, torch.ones(16), 1e-6),
        lambda: attention.rotate(heads, torch.ones(6, 16), torch.ones(6, 16), False),
        lambda: attention.heads_of(
            torch.randn(2, 3, 32), (16, 8), None, 1e-6, (cos[None, :2], cos[None, :2]), False, 8
        ),
        lambda: native_rows.causal_attention(q, k[:, :2], k[:, :2], None, 1.0),
        lambda: native_rows.causal_attention(q, k, k[:, :, :1], None, 1.0),
        lambda: native_rows.causal_attention(q, k[..., :4], k, None, 1.0),
        lambda: native_rows.causal_attention(q, k, k, first, 1.0),
        lambda: native_rows.activate(torch.randn(3, 7), ExpertShape(1, 1, 3, "silu")),
        lambda: native_rows.sum_rows(x, torch.tensor([[6]]), None),
        lambda: native_rows.sum_rows(x, torch.tensor([[0, 1]]), torch.ones(1, 1)),
        lambda: native_rows.matrix_product(x, x),
        lambda: feed_forward.grouped_product(x, torch.randn(2, 4, 8), (7, -1)),
        lambda: native_rows.loss_and_gradient(x, torch.ones(3), torch.zeros(6), 1.0),
        lambda: route.row_map(torch.tensor([[3]]), 3),
        lambda: attention.rms_norm(x, torch.ones(8, device="meta"), 1e-6),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=r"belong together|places|first keys|rows are counted|of 3|on meta"):
            call()
