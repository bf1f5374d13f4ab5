"""Two steps with shards of optimizer, gradients and parameters on four ranks, against one process, in float64 and in
16 bits."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor

from antiphon.base.split_evenly import split_evenly
from antiphon.comm.mesh import Mesh, Sizes, connect
from antiphon.cost.network import CollectiveName, collective_bytes
from antiphon.kernels.ops.products import Products
from antiphon.models.config import model_spec
from antiphon.specs.counts import count_parameters
from antiphon.specs.model import ModelSpec
from antiphon.train.config_tables import CommunicationConfig, OptimizerConfig
from antiphon.train.layer_plan import PlanOptions
from antiphon.train.model import Batch, MoeModel
from antiphon.train.optimizer import Optimizer, shards_of
from antiphon.train.passes import Passes
from antiphon.train.shards import Shards, clip_factor
from antiphon.train.spans import StepSpans
from antiphon.train.weights import FirstValues
from tests.comm.ranks import begin_anew, made_once, on_ranks
from tests.train.harness import CONFIG, LATENT
from tests.train.parallel_forms import LOSSES, RANKS, batch_of

STEPS, RATE = 2, 1e-2
PLAIN = CommunicationConfig()
MODELS: dict[str, dict[str, Any]] = {"qwen3_moe": CONFIG, "deepseek_v3": LATENT}


@dataclass(frozen=True)
class Form:
    model: str
    optimizer: str
    zero: int
    axes: tuple[tuple[str, int], ...]
    communication: CommunicationConfig = PLAIN
    dtype: str = "float64"
    products: str = "plain"


DATA: tuple[tuple[str, int], ...] = ()
MIXED = (("expert", 2), ("sequence", 2))
STAGED = (("pipeline", 2),)
SLICED = (("tensor", 2), ("expert_tensor", 2))
TWO_NODES = CommunicationConfig(hierarchical=True, node_size=2)
NARROW = CommunicationConfig(gradients="bfloat16")
FLOAT8 = CommunicationConfig(activations="float8")
ATTENTION8 = CommunicationConfig(attention="float8")
HALF = Form("qwen3_moe", "adamw", 1, MIXED, dtype="bfloat16")
QUARTER = replace(HALF, products="float8")
COUNTED = [Form("qwen3_moe", "adamw", zero, axes) for zero in (0, 1, 2, 3) for axes in (DATA, MIXED)]
FORMS = [
    *COUNTED,
    *(Form("qwen3_moe", "muon", zero, axes) for zero in (0, 1, 3) for axes in (MIXED, SLICED)),
    Form("deepseek_v3", "muon", 1, SLICED),
    Form("deepseek_v3", "muon", 3, DATA),
    *(Form("qwen3_moe", "adamw", zero, STAGED) for zero in (1, 2, 3)),
    *(Form("qwen3_moe", "adamw", zero, MIXED, TWO_NODES) for zero in (0, 1, 2, 3)),
    Form("qwen3_moe", "muon", 1, DATA, TWO_NODES),
    *(Form("qwen3_moe", "adamw", zero, DATA, NARROW) for zero in (0, 1, 2, 3)),
    Form("qwen3_moe", "adamw", 1, MIXED, replace(NARROW, hierarchical=True, node_size=2)),
    Form("qwen3_moe", "muon", 2, MIXED, NARROW),
    *(Form("qwen3_moe", "adamw", 0, axes, FLOAT8) for axes in (MIXED, SLICED)),
    Form("qwen3_moe", "adamw", 0, MIXED, replace(FLOAT8, activations="float8_permutation")),
    *(Form("qwen3_moe", "adamw", 0, SLICED, ATTENTION8, dtype) for dtype in ("float64", "bfloat16")),
    Form("qwen3_moe", "adamw", 0, MIXED, dtype="bfloat16"),
    HALF,
    QUARTER,
    Form("qwen3_moe", "adamw", 3, SLICED, dtype="bfloat16"),
    Form("deepseek_v3", "muon", 1, MIXED, NARROW, dtype="bfloat16"),
]


QUICK = [  # every optimizer, zero, axis, communication and type, each zero with several of them
    *(form for form in COUNTED if (form.axes == MIXED) == bool(form.zero % 2)),
    Form("qwen3_moe", "muon", 0, SLICED),
    Form("qwen3_moe", "muon", 3, MIXED),
    Form("deepseek_v3", "muon", 1, SLICED),
    Form("qwen3_moe", "adamw", 2, STAGED),
    Form("qwen3_moe", "adamw", 3, MIXED, TWO_NODES),
    Form("qwen3_moe", "muon", 1, DATA, TWO_NODES),
    Form("qwen3_moe", "adamw", 3, DATA, NARROW),
    Form("qwen3_moe", "adamw", 1, MIXED, replace(NARROW, hierarchical=True, node_size=2)),
    Form("qwen3_moe", "muon", 2, MIXED, NARROW),
    Form("qwen3_moe", "adamw", 0, SLICED, FLOAT8),
    Form("qwen3_moe", "adamw", 0, MIXED, replace(FLOAT8, activations="float8_permutation")),
    Form("qwen3_moe", "adamw", 0, SLICED, ATTENTION8, "bfloat16"),
    HALF,
    QUARTER,
    Form("qwen3_moe", "adamw", 3, SLICED, dtype="bfloat16"),
    Form("deepseek_v3", "muon", 1, MIXED, NARROW, dtype="bfloat16"),
]
assert set(QUICK) <= set(FORMS)


def cases(forms: list[Form]) -> list[Any]:
    return [pytest.param(form, marks=() if form in QUICK else pytest.mark.slow) for form in forms]


def some_steps(
    spec: ModelSpec,
    mesh: Mesh,
    zero: int,
    name: str,
    batches: list[Batch],
    communication: CommunicationConfig = PLAIN,
    dtype: str = "float64",
    products: str = "plain",
) -> tuple[list[float], Shards]:
    """Loss and norm of each step; then what this rank holds."""
    first = FirstValues(1, 0.2)
    arithmetic = getattr(torch, dtype)
    options = PlanOptions(products=Products(products))  # type: ignore[arg-type]
    model = MoeModel(
        spec, mesh, max_positions=11, dtype=arithmetic, first=first, communication=communication, options=options
    )
    model = model.double() if dtype == "float64" else model
    settings = OptimizerConfig(name=name, clip=0.5)  # type: ignore[arg-type]
    shards = shards_of(model, zero, settings, communication)
    optimizer, passes = Optimizer(model, shards, settings), Passes(model, LOSSES, StepSpans())
    numbers = []
    for _ in range(STEPS):
        shards.begin_step()
        passed = passes.run(batches)
        shards.reduce()
        norm = shards.norm()
        optimizer.step(RATE, clip_factor(norm, settings.clip))
        shards.end_step()
        numbers += [float(passed.loss), float(norm)]
    return numbers, shards


def batches_of(sizes: Sizes, rank: int, num_passes: int) -> list[Batch]:
    """Four sequences a step, this rank's of each pass."""
    own = 4 // num_passes // sizes.data
    first = sizes.place(rank, "data") * own
    starts = range(first, 4, 4 // num_passes)
    return [batch_of(slice(start, start + own)) for start in starts]


def wholes_of(shards: Shards) -> dict[str, Tensor]:
    """Every parameter of one process."""
    found: dict[str, Tensor] = {}
    for piece in shards.pieces:
        whole = found.setdefault(piece.name, torch.zeros(piece.part.shape, dtype=torch.float64))
        for offsets, view in piece.part.boxes(piece.values.detach(), piece.start):
            inside(whole, offsets, view).copy_(view)
    return found


def inside(whole: Tensor, offsets: tuple[int, ...], view: Tensor) -> Tensor:
    for dim, (start, length) in enumerate(zip(offsets, view.shape, strict=True)):
        whole = whole.narrow(dim, start, length)
    return whole


def by_formula(spec: ModelSpec, sizes: Sizes, rank: int, zero: int, num_passes: int) -> dict[str, float]:
    """Bytes that a rank sends in a step: every parameter is held by all ranks but experts, which `expert_data` hold."""
    counts = count_parameters(spec)
    first, last = split_evenly(spec.router.num_experts, sizes.expert)[sizes.place(rank, "expert")]
    layers = [
        (sizes.data * sizes.sequence, spec.num_layers * (counts.attention + counts.layer_norms + counts.router)),
        (sizes.expert_data, spec.num_layers * (last - first) * counts.expert),
    ]
    outer = [(sizes.data * sizes.sequence, counts.embedding + counts.head + counts.final_norm)]

    def sent(collective: CollectiveName, parts: list[tuple[int, int]]) -> float:
        return sum(float(collective_bytes(collective, 8 * size, alike)[0]) for alike, size in parts)

    if zero == 0:
        return {"gradients": sent("all_reduce", layers + outer), "parameters": 0.0}
    sums, gathers = (1 if zero < 2 else num_passes), (1 if zero < 3 else 2 * num_passes)
    return {
        "gradients": sums * sent("reduce_scatter", layers) + sent("reduce_scatter", outer),
        "parameters": gathers * sent("all_gather", layers) + sent("all_gather", outer),
    }


def sizes_of(form: Form) -> Sizes:
    return Sizes(world_size=RANKS, **dict(form.axes))


def in_one_process(form: Form) -> tuple[str, str, int, str, str]:
    """What one process computes in another way: model, optimizer, passes, type, products."""
    return form.model, form.optimizer, 1 if sizes_of(form).data == 4 else 2, form.dtype, form.products


def differences(quick: bool, rank: int) -> dict[Form, tuple[float, float, str, dict[str, float], dict[str, float]]]:
    """By form: the largest difference of losses and norms, and of values, with the parameter's name; bytes sent in a
    step for gradients and parameters, and those by formula."""
    forms = [form for form in FORMS if (form in QUICK) == quick]

    def reference(key: tuple[str, str, int, str, str]) -> tuple[list[float], dict[str, Tensor]]:
        model, optimizer, num_passes, dtype, products = key
        mesh = connect(Sizes(), 0)
        batches = batches_of(mesh.sizes, 0, num_passes)
        spec = model_spec(MODELS[model])
        numbers, shards = some_steps(spec, mesh, 0, optimizer, batches, dtype=dtype, products=products)
        return numbers, wholes_of(shards)

    found, expected = {}, made_once(list(dict.fromkeys(map(in_one_process, forms))), reference)
    for form in forms:
        spec, sizes = model_spec(MODELS[form.model]), sizes_of(form)
        key = in_one_process(form)
        mesh = connect(sizes, rank, 60)
        batches = batches_of(sizes, rank, key[2])
        mesh.ledger.take()
        numbers, shards = some_steps(
            spec, mesh, form.zero, form.optimizer, batches, form.communication, form.dtype, form.products
        )
        ledger = mesh.ledger.take().sent_bytes
        sent = {
            purpose: sum(num for name, num in ledger.items() if name.split(".")[0] == purpose) / STEPS
            for purpose in ("gradients", "parameters")
        }
        theirs, wholes = expected[key]
        worst = (0.0, "")
        for piece in shards.pieces:
            for offsets, view in piece.part.boxes(piece.values.detach(), piece.start):
                apart = (inside(wholes[piece.name], offsets, view) - view).abs()
                worst = max(worst, (float(apart.max()) if apart.numel() else 0.0, piece.name))
        apart = max(abs(a - b) for a, b in zip(numbers, theirs, strict=True))
        found[form] = (apart, *worst, sent, by_formula(spec, sizes, rank, form.zero, key[2]))
        begin_anew()
    return found


DifferencesOf = Callable[[Form], list[dict[Form, Any]]]


@pytest.fixture(scope="module")
def differences_of(tmp_path_factory: pytest.TempPathFactory) -> DifferencesOf:
    """By rank, of the forms in the lane of one; ranks are started once for each lane."""

    @cache
    def of_lane(quick: bool) -> list[dict[Form, Any]]:
        return on_ranks(RANKS, tmp_path_factory.mktemp("ranks"), partial(differences, quick))

    return lambda form: of_lane(form in QUICK)


@pytest.mark.parametrize("form", cases(FORMS), ids=str)
def test_steps_are_those_of_one_process(differences_of: DifferencesOf, form: Form) -> None:
    for of_rank in differences_of(form):
        numbers, values, name, *_ = of_rank[form]
        communication = form.communication
        narrow = "bfloat16" in (form.dtype, communication.gradients) or communication in (
            FLOAT8,
            ATTENTION8,
            replace(FLOAT8, activations="float8_permutation"),
        )
        by_rows = form.products == "float8"  # scales of groups of rows, which are others on each rank
        assert numbers < (0.3 if by_rows else 0.1 if narrow else 1e-9)
        assert values < (2 * STEPS * RATE if narrow else 1e-9), name  # AdamW steps by the rate, whatever the gradient


@pytest.mark.parametrize("form", cases(COUNTED), ids=str)
def test_bytes_are_those_of_the_formulas(differences_of: DifferencesOf, form: Form) -> None:
    for of_rank in differences_of(form):
        *_, sent, expected = of_rank[form]
        assert sent == expected


def test_parameters_are_gathered_in_the_format_of_the_arithmetic(differences_of: DifferencesOf) -> None:
    """Two bytes each in a bfloat16 run, four of the router, which is read in float32."""
    spec, sizes = model_spec(MODELS[HALF.model]), sizes_of(HALF)
    alike, router = sizes.data * sizes.sequence, spec.num_layers * count_parameters(spec).router
    wider = float(collective_bytes("all_gather", 2 * router, alike)[0])
    for of_rank in differences_of(HALF):
        *_, sent, expected = of_rank[HALF]  # the formula has eight bytes each
        assert sent["parameters"] == expected["parameters"] / 4 + wider
        assert sent["gradients"] == expected["gradients"] / 2


def test_weights_of_float8_products_are_gathered_as_e4m3(differences_of: DifferencesOf) -> None:
    """One byte each and an exponent for 128 of them, instead of two bytes."""
    spec, sizes = model_spec(MODELS[HALF.model]), sizes_of(HALF)
    counts = count_parameters(spec)
    for rank, of_rank in enumerate(differences_of(QUARTER)):
        first, last = split_evenly(spec.router.num_experts, sizes.expert)[sizes.place(rank, "expert")]
        norms = 2 * spec.attention.head_dim  # of queries and keys, which multiply no rows
        weights = [
            (sizes.data * sizes.sequence, spec.num_layers * (counts.attention - norms)),
            (sizes.expert_data, spec.num_layers * (last - first) * counts.expert),
        ]
        saved = sum((1 - 1 / 128) * number * (alike - 1) / alike for alike, number in weights)
        (*_, half, _), (*_, quarter, _) = of_rank[HALF], of_rank[QUARTER]
        assert half["parameters"] - quarter["parameters"] == pytest.approx(saved, rel=0.01)
