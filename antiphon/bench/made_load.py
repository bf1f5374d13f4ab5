"""Loads of experts that are made, not recorded: even, skewed as in Lina's Figure 6, or one hot expert.

A skewed load is a record (`placement.routing_trace`) that is drawn:

1. A row is of one of as many kinds as there are experts; each kind has a favourite expert in each layer, another in
   every one. So what a row chose says what it will choose, as Lina found of real text (section 5.1).
2. Kinds are popular by a Zipf law. A quarter of the requests, one after the other, have one order of popularity, and
   the next quarter another one: what one batch wants says little of the next one's (section 2.2).
3. A row's first choice is its favourite's four times of five, else that of a kind drawn anew; its other choices are
   drawn by the same law, without the ones that it has.
4. The exponent is the one for which the most popular expert of a quarter gets `skew` times the rows of the least.
5. A forecast is what the row will choose, but for one row of ten, as many as the next router misses of real text
   (docs/placement.md).

Rejected: a Zipf law for each layer alone. Then no estimate says more than the layer's mean, and a window of steps does
as well. Rejected: real text of a model without a loss for balance. Its skew is what training made of it.

Letters: L MoE layers, T rows, K choices of a row, E experts, which are also kinds.
"""

import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from antiphon.cost.skew import zipf_shares
from antiphon.models.config import load_model_spec
from antiphon.models.gguf.checkpoint import open_weights
from antiphon.models.tensors import attention_layer_plan
from antiphon.placement.routing_trace import RoutingTraceWriter, TraceHeader
from antiphon.specs.model import ModelSpec

LINA_SKEW = 5.56  # of 16 experts, Figure 6
QUARTERS = 4
_KEPT, _FORESEEN = 0.8, 0.9
_CALIBRATING_ROWS, _BISECTIONS = 50_000, 16
_FAR = 1e3  # times the length of a usual router row
Ids = NDArray[np.int64]


@dataclass(frozen=True)
class SkewedLoad:
    """What is drawn for requests that run `batch` at once; `skew`: rows of the most popular expert over the least's."""

    spec: ModelSpec
    batch: int
    skew: float

    def write(self, file: Path, num_rows: int, seed: int) -> None:
        """A record of `num_rows` rows; row i is of request i % `batch`. Another seed: other rows of the same kinds."""
        random = np.random.default_rng([1, seed])
        quarters_T = np.arange(num_rows) % self.batch * QUARTERS // self.batch
        ids_LTK = self._draw(quarters_T, self.exponent(), random)
        again_LTK = self._draw(quarters_T, self.exponent(), random)
        # A row that is not foreseen gets another one's choices, all of them, so that no expert is there twice.
        missed_LT1 = random.random((*ids_LTK.shape[:2], 1)) >= _FORESEEN
        forecasts_LTK = np.where(missed_LT1, again_LTK, ids_LTK)[1:]
        write_record(file, self.spec, ids_LTK, forecasts_LTK)

    def exponent(self) -> float:
        """Of the Zipf law, found by bisection: drawing without replacement levels the shares."""
        low, high = 0.0, 6.0
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2
            low, high = (middle, high) if self._skew_of(middle) < self.skew else (low, middle)
        return low

    def _skew_of(self, exponent: float) -> float:
        ids_TK = self._choose(np.zeros(_CALIBRATING_ROWS, dtype=np.int64), 0, exponent, np.random.default_rng(0))
        counts_E = np.bincount(ids_TK.ravel(), minlength=self.spec.router.num_experts)
        return float(counts_E.max() / max(1, counts_E.min()))

    def _draw(self, quarters_T: Ids, exponent: float, random: np.random.Generator) -> Ids:
        """Choices [L, T, K]."""
        kinds_T = self._kinds(quarters_T, exponent, random)
        layers = range(len(self.spec.expert_layers))
        return np.stack([self._choose(quarters_T, layer, exponent, random, kinds_T) for layer in layers])

    def _choose(
        self,
        quarters_T: Ids,
        layer: int,
        exponent: float,
        random: np.random.Generator,
        kinds_T: Ids | None = None,
    ) -> Ids:
        """Choices [T, K] of rows of these kinds; None: of any."""
        num_experts, top_k = self.spec.router.num_experts, self.spec.router.top_k
        others_T = self._kinds(quarters_T, exponent, random)
        first_T = others_T if kinds_T is None else np.where(random.random(len(others_T)) < _KEPT, kinds_T, others_T)
        # Kinds with the largest sums of a logarithm and a Gumbel number are drawn by their shares, none twice.
        scores_TE = np.log(self._shares(exponent))[quarters_T] + random.gumbel(size=(len(quarters_T), num_experts))
        scores_TE[np.arange(len(first_T)), first_T] = np.inf
        kinds_TK = np.argsort(-scores_TE, axis=1)[:, :top_k]
        favourites_E = np.random.default_rng([2, layer]).permutation(num_experts)
        ids_TK: Ids = favourites_E[kinds_TK]
        return ids_TK

    def _kinds(self, quarters_T: Ids, exponent: float, random: np.random.Generator) -> Ids:
        ends_QE = self._shares(exponent).cumsum(axis=1)
        kinds_T: Ids = (random.random((len(quarters_T), 1)) * ends_QE[quarters_T, -1:] >= ends_QE[quarters_T]).sum(1)
        return kinds_T

    def _shares(self, exponent: float) -> NDArray[np.float64]:
        """Of kinds [quarter, E]."""
        shares_E = zipf_shares(self.spec.router.num_experts, exponent)
        orders = [np.random.default_rng([3, quarter]).permutation(len(shares_E)) for quarter in range(QUARTERS)]
        return np.stack([shares_E[order] for order in orders])


def write_even_routing(file: Path, spec: ModelSpec) -> None:
    """A record in which consecutive rows choose all experts in turn, so that any placement is balanced."""
    router = spec.router
    ids_TK = (np.arange(router.num_experts)[:, None] * router.top_k + np.arange(router.top_k)) % router.num_experts
    write_record(file, spec, np.broadcast_to(ids_TK, (len(spec.expert_layers), *ids_TK.shape)))


def write_record(
    file: Path, spec: ModelSpec, ids_LTK: NDArray[np.integer], forecasts_LTK: NDArray[np.integer] | None = None
) -> None:
    """One step with all rows."""
    router = spec.router
    header = TraceHeader(model="made", layers=spec.expert_layers, num_experts=router.num_experts, top_k=router.top_k)
    writer = RoutingTraceWriter(file, header)
    forecasts = b"" if forecasts_LTK is None else forecasts_LTK.astype("<u2").tobytes()
    writer.append_step(0, 0, ids_LTK.astype("<u2").tobytes(), forecasts)
    writer.close()


def make_hot(model: Path, folder: Path, seed: int) -> Path:
    """A copy of a checkpoint in which the first expert of every layer gets half the rows."""
    shutil.copytree(model, folder, dirs_exist_ok=True)
    spec, checkpoint = load_model_spec(model), open_weights(model)
    names = checkpoint.family_names(spec.family)
    routers = set[str]()
    for layer in spec.expert_layers:
        ((router,),) = (attention_layer_plan(spec, names, layer, checkpoint)["router"],)
        routers.add(router.name)
    generator = torch.Generator().manual_seed(seed)
    for file in sorted(model.glob("*.safetensors")):
        tensors = load_file(file)
        for name in sorted(routers & tensors.keys()):
            rows = tensors[name]
            hot = torch.randn(rows.shape[1], generator=generator)
            rows[0] = (hot / hot.norm() * rows.float().norm(dim=1).mean() * _FAR).to(rows.dtype)
        save_file(tensors, folder / file.name, {"format": "pt"})
    return folder
