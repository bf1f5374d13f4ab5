"""Loads of experts that are made, not recorded: even, skewed as in Lina's Figure 6, or one hot expert.

A skewed load is a record (`placement.routing_trace`) that is drawn:

1. A row is of one of as many kinds as there are experts; each kind has a favourite expert in each layer, another in
   every one. So what a row chose says what it will choose, as Lina found of real text (section 5.1).
2. Kinds are popular by a Zipf law, the same one in all requests.
3. A row's first choice is its favourite's four times of five, else that of a kind drawn anew; its other choices are
   drawn by the same law, without the ones that it has.
4. The exponent is the one for which the most popular expert gets `skew` times the rows of the least.
5. A forecast is what the row will choose, but for one row of ten, as many as the next router misses of real text
   (docs/placement.md).

Rejected: a Zipf law for each layer alone. Then no estimate says more than the layer's mean. Rejected: another order of
popularity in each quarter of the requests. It changes before a copy has spared as many rows as its load costs, so no
policy copies anything. Rejected: real text of a model without a loss for balance. Its skew is what training made of it.

Letters: L MoE layers, T rows, K choices of a row, E experts, which are also kinds.
"""

import shutil
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from antiphon.base.errors import UserError
from antiphon.cost.skew import zipf_shares
from antiphon.models.config import load_model_spec
from antiphon.models.gguf.checkpoint import open_weights
from antiphon.models.tensors import attention_layer_plan
from antiphon.placement.routing_trace import RoutingTraceWriter, TraceHeader
from antiphon.placement.split import FloatArray
from antiphon.specs.model import ModelSpec

LINA_SKEW = 5.56  # of 16 experts, Figure 6
_KEPT, _FORESEEN = 0.8, 0.9
_CALIBRATING_ROWS, _BISECTIONS = 50_000, 16
_FAR = 1e3  # times the length of a usual router row
Ids = NDArray[np.int64]


@dataclass(frozen=True)
class SkewedLoad:
    """`skew`: rows of the most popular expert over the least's."""

    spec: ModelSpec
    skew: float

    def write(self, file: Path, num_rows: int, seed: int) -> None:
        """A record of `num_rows` rows. Another seed: other rows of the same kinds."""
        random, shares_E = np.random.default_rng([1, seed]), self.shares
        kinds_T = random.choice(len(shares_E), size=num_rows, p=shares_E)
        layers = range(len(self.spec.expert_layers))
        ids_LTK, again_LTK = (
            np.stack([self._choose(kinds_T, layer, shares_E, random) for layer in layers]) for _ in range(2)
        )
        # A row that is not foreseen gets other choices, all of them, so that no expert is there twice.
        missed_LT1 = random.random((*ids_LTK.shape[:2], 1)) >= _FORESEEN
        write_record(file, self.spec, ids_LTK, np.where(missed_LT1, again_LTK, ids_LTK)[1:])

    @cached_property
    def shares(self) -> FloatArray:
        """Shares of kinds [E], by bisection over the law's exponent: choices without replacement level the shares.
        `UserError` where these choices cannot be as uneven as `skew`."""
        num_experts, low, high = self.spec.router.num_experts, 0.0, 6.0
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2
            is_less = self._skew_of(zipf_shares(num_experts, middle)) < self.skew
            low, high = (middle, high) if is_less else (low, middle)
        if self.skew > 1 and (most := self._skew_of(zipf_shares(num_experts, high))) < 0.9 * self.skew:
            raise UserError(
                f"--skew is {self.skew:g}: {self.spec.router.top_k} of {num_experts} experts for each row "
                f"cannot be more uneven than {most:.2g}"
            )
        return zipf_shares(num_experts, low)

    def _skew_of(self, shares_E: FloatArray) -> float:
        random = np.random.default_rng(0)
        kinds_T = random.choice(len(shares_E), size=_CALIBRATING_ROWS, p=shares_E)
        counts_E = np.bincount(self._choose(kinds_T, 0, shares_E, random).ravel(), minlength=len(shares_E))
        return float(counts_E.max() / max(1, counts_E.min()))

    def _choose(self, kinds_T: Ids, layer: int, shares_E: FloatArray, random: np.random.Generator) -> Ids:
        """Choices [T, K] of rows of these kinds."""
        drawn_T = random.choice(len(shares_E), size=len(kinds_T), p=shares_E)
        first_T = np.where(random.random(len(kinds_T)) < _KEPT, kinds_T, drawn_T)
        # Kinds with the largest sums of a logarithm and a Gumbel number are drawn by their shares, none twice.
        scores_TE = np.log(shares_E) + random.gumbel(size=(len(kinds_T), len(shares_E)))
        scores_TE[np.arange(len(first_T)), first_T] = np.inf
        kinds_TK = np.argsort(-scores_TE, axis=1)[:, : self.spec.router.top_k]
        ids_TK: Ids = np.random.default_rng([2, layer]).permutation(len(shares_E))[kinds_TK]
        return ids_TK


def write_even_routing(file: Path, spec: ModelSpec, batch: int) -> None:
    """A record by which any placement is balanced: at one position the `batch` requests choose all experts in turn, and
    so does each request at consecutive positions."""
    router = spec.router
    rows_T = np.arange(batch * router.num_experts)
    firsts_T = (rows_T // batch + rows_T % batch) * router.top_k
    ids_TK = (firsts_T[:, None] + np.arange(router.top_k)) % router.num_experts
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
