"""Expert popularity before a layer runs, and devices by it (Lina section 5.2).

1. Profile: rows that chose the same experts in the last l layers are of one sample path j. Psi_j^{i+1} is how the rows
   of a path chose in layer i + 1.
2. Estimate: of each row's path take the top-k experts of Psi with their probabilities P; summed over rows they are the
   popularity of layer i + 1, known when layer i's gate has spoken.
3. n_e = N sum_t P_{j(t)}(e) / N_t (eq. 1) devices for expert e. First-fit-decreasing packs these shares into devices.
4. Phase two: where the top-2k experts of the estimate are not those that the gate then chose, place again, by its
   choices.

The paper says that a path goes "from layer i - l to layer i", and that with l = 3 scheduling starts from the fourth
layer; only paths of l layers fit the latter. Where a gate chooses several experts, rows are grouped by their first
choice: pairs of 16 experts make 1.7 million paths of length 3. The paper says nothing of a path that the profile does
not have; here it counts as its last l - 1 layers, and so on down to the layer's mean.
Rejected: one table of all lengths. Dense it has E^l rows; the paths that occur are few.

Letters: L layers, T rows, K choices of a row, E experts, W devices (workers).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from antiphon.base.errors import UserError
from antiphon.placement.split import BoolArray, FloatArray, IntArray


@dataclass(frozen=True)
class PathTable:
    """Psi of one layer for paths of one length: `shares` [paths, E], of the paths `numbers` (ascending)."""

    numbers: IntArray
    shares: FloatArray


class PathProfile:
    """Psi of every layer, from ids [L, T, K] of rows that a model has routed, a row's best choice first."""

    def __init__(self, ids_LTK: NDArray[np.integer], num_experts: int, length: int) -> None:
        if length < 1:
            raise UserError(f"a sample path of {length} layers: it must be at least 1")
        if ids_LTK.shape[1] == 0:
            raise UserError("no rows to profile: give a trace with at least one")
        self.num_experts = num_experts
        self.length = length
        self.top_k = ids_LTK.shape[2]
        first_LT = ids_LTK[:, :, 0].astype(np.int64)
        self._tables = [
            [self._table(first_LT[:layer], ids_LTK[layer], length) for length in range(min(self.length, layer) + 1)]
            for layer in range(len(ids_LTK))
        ]

    def _table(self, earlier_LT: IntArray, ids_TK: NDArray[np.integer], length: int) -> PathTable:
        numbers, where = np.unique(self._paths(earlier_LT, length, len(ids_TK)), return_inverse=True)
        counts = np.zeros((len(numbers), self.num_experts))
        np.add.at(counts, (np.repeat(where.reshape(-1), self.top_k), ids_TK.reshape(-1)), 1.0)
        return PathTable(numbers, counts / counts.sum(axis=1, keepdims=True))

    def _paths(self, earlier_LT: IntArray, length: int, num_rows: int) -> IntArray:
        """One number for each row's path of the last `length` layers."""
        paths = np.zeros(num_rows, dtype=np.int64)
        for choices_T in earlier_LT[len(earlier_LT) - length :]:
            paths = paths * self.num_experts + choices_T
        return paths

    def probabilities(self, earlier_LT: NDArray[np.integer], layer: int) -> FloatArray:
        """P [T, E] of MoE layer `layer` from the first choices [layer, T] in all earlier ones: of each row's path the
        `top_k` most probable experts, the others 0."""
        first_LT = np.asarray(earlier_LT, dtype=np.int64)
        num_rows = first_LT.shape[1]
        shares_TE = np.zeros((num_rows, self.num_experts))
        missing = np.ones(num_rows, dtype=bool)
        for length in range(len(self._tables[layer]) - 1, -1, -1):
            table = self._tables[layer][length]
            paths = self._paths(first_LT, length, num_rows)
            at = np.minimum(np.searchsorted(table.numbers, paths), len(table.numbers) - 1)
            found = missing & (table.numbers[at] == paths)
            shares_TE[found] = table.shares[at[found]]
            missing &= ~found
        return _only_best(shares_TE, self.top_k)

    def popularity(self, earlier_LT: NDArray[np.integer], layer: int) -> FloatArray:
        """Estimated share [E] of a layer's choices, before the layer runs; of the experts in no row's top-k it is 0."""
        return devices_of_experts(self.probabilities(earlier_LT, layer), 1)


def _only_best(shares_TE: FloatArray, top_k: int) -> FloatArray:
    """All but the `top_k` largest of each row become 0; of equal ones the first stay."""
    order = np.argsort(-shares_TE, axis=1, kind="stable")[:, top_k:]
    kept = shares_TE.copy()
    np.put_along_axis(kept, order, 0.0, axis=1)
    return kept


def devices_of_experts(probabilities_TE: FloatArray | Sequence[Sequence[float]], num_devices: int) -> FloatArray:
    """n_e [E] of eq. 1: N sum_t P_{j(t)}(e) / N_t."""
    probabilities = np.asarray(probabilities_TE, dtype=np.float64)
    devices: FloatArray = num_devices * probabilities.sum(axis=0) / len(probabilities)
    return devices


def pack_first_fit(devices_E: FloatArray, num_devices: int, max_experts: int) -> BoolArray:
    """Who holds a copy, [E, W]: n_e devices for each expert, packed first-fit-decreasing, at most `max_experts` on one.

    Whole devices of n_e come first, then what is left over. Experts without an estimate go evenly to devices that are
    still free. The paper places the rest at random; here it goes to the emptiest device, which no seed can spoil."""
    num_experts = devices_E.size
    if num_devices * max_experts < num_experts:
        raise UserError(
            f"{num_experts} experts do not fit on {num_devices} devices of {max_experts}: give each at least "
            f"{-(-num_experts // num_devices)}"
        )
    held = np.zeros((num_experts, num_devices), dtype=bool)
    filled = np.zeros(num_devices)
    sizes = [
        (float(min(1.0, devices_E[e] - whole)), e) for e in range(num_experts) for whole in range(_pieces(devices_E[e]))
    ]
    placed: set[int] = set()
    sizes.sort(key=lambda piece: (-piece[0], piece[1]))
    homeless = num_experts
    for size, expert in sizes:
        is_first = expert not in placed
        spare = num_devices * max_experts - int(held.sum()) - homeless
        if not is_first and spare <= 0:
            continue  # its slot is needed by an expert that has none yet
        open_to_it = (held.sum(axis=0) < max_experts) & ~held[expert]
        fits = np.flatnonzero(open_to_it & (filled + size <= 1 + 1e-9))
        if not fits.size and not (is_first and open_to_it.any()):
            continue
        device = int(fits[0]) if fits.size else int(np.argmin(np.where(open_to_it, filled, np.inf)))
        held[expert, device] = True
        filled[device] += size
        homeless -= is_first
        placed.add(expert)
    for expert in sorted(set(range(num_experts)) - placed):
        fullness = np.where(held.sum(axis=0) < max_experts, filled + 1e-6 * held.sum(axis=0), np.inf)
        held[expert, int(np.argmin(fullness))] = True
    return held


def _pieces(devices: float) -> int:
    """How many devices a share touches at least: 2.3 is two whole ones and a part."""
    return int(np.ceil(devices - 1e-9))
