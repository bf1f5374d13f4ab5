"""Lina's sample paths (section 5.2): which experts a layer's rows will choose, and devices for experts by it.

1. Profile: rows that chose the same experts in the last l layers are of one sample path j. Psi_j^{i+1} is how the rows
   of a path chose in layer i + 1. `antiphon placement --profile-paths` makes it from recorded rows.
2. Estimate: of each row's path take the top-k experts of Psi with their probabilities P; summed over rows they are the
   popularity of layer i + 1, known when layer i's gate has spoken.
3. n_e = N sum_t P_{j(t)}(e) / N_t (eq. 1) devices for expert e. First-fit-decreasing packs these shares into devices.
4. Phase two: where the top-2k experts of the estimate are not those that the gate then chose, place again, by its
   choices (`split.needs_phase_two`).

The paper says that a path goes "from layer i - l to layer i", and that with l = 3 scheduling starts from the fourth
layer; only paths of l layers fit the latter. Where a gate chooses several experts, rows are grouped by their first
choice: pairs of 16 experts make 1.7 million paths of length 3. The paper says nothing of a path that the profile does
not have; here it counts as its last l - 1 layers, and so on down to the layer's mean.
Rejected: one table of all lengths. Dense it has E^l rows; the paths that occur are few.

Letters: L MoE layers, T rows, K choices of a row, E experts, W devices (workers).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from antiphon.base.errors import UserError
from antiphon.placement.routing_trace import RoutingTrace, count_rows
from antiphon.placement.split import BoolArray, FloatArray, IntArray, needs_phase_two
from antiphon.specs.catalog import a_file_of
from antiphon.specs.model import ModelSpec

FORMAT = "antiphon sample paths 1"
_PATH_BITS = 62  # of one number, which holds a whole path


PathTable = tuple[IntArray, IntArray, FloatArray]
"""Psi of one layer for paths of one length: numbers of paths (ascending), of each the `top_k` most probable experts
[paths, K], best first, and their shares [paths, K]."""
_PARTS = ("numbers", "experts", "shares")


@dataclass(frozen=True)
class PathProfile:
    """Psi of every MoE layer: `tables[layer][length]`, of length 0 to the smaller of `length` and the layer's number.
    `layers`: their numbers in the model."""

    layers: tuple[int, ...]
    num_experts: int
    top_k: int
    length: int
    tables: tuple[tuple[PathTable, ...], ...]

    @classmethod
    def of_rows(
        cls, ids_LTK: NDArray[np.integer], num_experts: int, length: int, layers: Sequence[int] | None = None
    ) -> "PathProfile":
        """From the choices of rows that a model has routed, a row's best choice first. `UserError` for a length that
        cannot be, or no rows."""
        if ids_LTK.ndim != 3 or 0 in (len(ids_LTK), ids_LTK.shape[2]) or num_experts < 1:
            raise UserError(f"choices {ids_LTK.shape} of {num_experts} experts: give [L, T, K], and 1 expert at least")
        count_rows(ids_LTK, num_experts)  # refuses ids of others
        most = int(_PATH_BITS / max(1.0, np.log2(num_experts)))
        if not 1 <= length <= most:
            raise UserError(f"a sample path of {length} layers: with {num_experts} experts it has 1 to {most}")
        if ids_LTK.shape[1] == 0:
            raise UserError("no rows to profile: give a trace with at least one")
        first_LT, top_k = ids_LTK[:, :, 0].astype(np.int64), ids_LTK.shape[2]
        tables = tuple(
            tuple(
                _table(_paths(first_LT[:layer], length, num_experts), ids_TK, num_experts)
                for length in range(min(length, layer) + 1)
            )
            for layer, ids_TK in enumerate(ids_LTK)
        )
        return cls(tuple(range(len(ids_LTK)) if layers is None else layers), num_experts, top_k, length, tables)

    def expected(self, earlier_LT: NDArray[np.integer], layer: int) -> tuple[IntArray, FloatArray]:
        """Experts [T, K] of MoE layer number `layer` that rows will choose, and the probability P [T, K] of each, from
        the rows' first choices [layer, T] in all earlier MoE layers."""
        first_LT = np.asarray(earlier_LT, dtype=np.int64)
        shape = (first_LT.shape[1], self.top_k)
        experts_TK, shares_TK = np.zeros(shape, dtype=np.int64), np.zeros(shape)
        missing = np.ones(shape[0], dtype=bool)
        for length in range(len(self.tables[layer]) - 1, -1, -1):
            numbers, experts, shares = self.tables[layer][length]
            paths = _paths(first_LT, length, self.num_experts)
            at = np.minimum(np.searchsorted(numbers, paths), len(numbers) - 1)
            found = missing & (numbers[at] == paths)
            experts_TK[found], shares_TK[found] = experts[at[found]], shares[at[found]]
            missing &= ~found
            if not missing.any():
                break
        return experts_TK, shares_TK

    def popularity(self, earlier_LT: NDArray[np.integer], layer: int) -> FloatArray:
        """Estimated share [E] of a layer's choices, before the layer runs; of the experts in no row's top-k it is 0."""
        experts_TK, shares_TK = self.expected(earlier_LT, layer)
        return devices_of_experts(experts_TK, shares_TK, self.num_experts, 1)

    def check_fits(self, spec: ModelSpec) -> None:
        """`UserError` if it was made of another model."""
        theirs = spec.expert_layers, spec.router.num_experts, spec.router.top_k
        if (self.layers, self.num_experts, self.top_k) != theirs:
            raise UserError(
                f"the profile's rows choose {self.top_k} of {self.num_experts} experts in {len(self.layers)} layers, "
                f"this model's {spec.router.top_k} of {spec.router.num_experts} in {len(spec.expert_layers)}: make one "
                f"of this model"
            )

    def write(self, file: Path) -> None:
        """As a NumPy archive. The file system's errors pass through."""
        about = np.array([self.num_experts, self.top_k, self.length, *self.layers])
        arrays: dict[str, Any] = {
            f"{layer}.{length}.{name}": values
            for layer, of_layer in enumerate(self.tables)
            for length, table in enumerate(of_layer)
            for name, values in zip(_PARTS, table, strict=True)
        }
        with file.open("wb") as opened:
            np.savez_compressed(opened, format=np.array(FORMAT), about=about, **arrays)


def read_path_profile(file: Path) -> PathProfile:
    """`UserError` if the file is no profile, or a damaged one."""
    with a_file_of("paths", file):
        return _read_path_profile(file)


def _read_path_profile(file: Path) -> PathProfile:
    wrong = f"{file}: not a profile of sample paths: write one with antiphon placement --profile-paths"
    try:
        with np.load(file, allow_pickle=False) as archive:
            known = str(archive["format"]) == FORMAT
            num_experts, top_k, length, *layers = map(int, archive["about"])
            tables = tuple(
                tuple(
                    (archive[f"{path}.numbers"], archive[f"{path}.experts"], archive[f"{path}.shares"])
                    for path in (f"{layer}.{part}" for part in range(min(length, layer) + 1))
                )
                for layer in range(len(layers))
            )
    except OSError as error:
        raise UserError(f"{file}: cannot be read ({error.strerror or error})") from error
    except Exception as error:  # zip, header and values: whatever a damaged archive makes of them
        raise UserError(wrong) from error
    if not known or not all(_is_whole(table, num_experts, top_k) for of_layer in tables for table in of_layer):
        raise UserError(wrong)
    return PathProfile(tuple(layers), num_experts, top_k, length, tables)


def _is_whole(table: PathTable, num_experts: int, top_k: int) -> bool:
    numbers, experts, shares = table
    if numbers.ndim != 1 or not numbers.size or top_k < 1:
        return False
    if not experts.shape == shares.shape == (len(numbers), top_k):
        return False
    return 0 <= int(experts.min()) <= int(experts.max()) < num_experts


def _table(paths_T: IntArray, ids_TK: NDArray[np.integer], num_experts: int) -> PathTable:
    numbers, where = np.unique(paths_T, return_inverse=True)
    top_k = ids_TK.shape[1]
    counts = np.zeros((len(numbers), num_experts))
    np.add.at(counts, (np.repeat(where.reshape(-1), top_k), ids_TK.reshape(-1)), 1.0)
    shares = counts / counts.sum(axis=1, keepdims=True)
    experts = np.argsort(-shares, axis=1, kind="stable")[:, :top_k]  # of equal ones the first
    return numbers, experts, np.take_along_axis(shares, experts, axis=1)


def _paths(earlier_LT: IntArray, length: int, num_experts: int) -> IntArray:
    """One number for each row's path of the last `length` layers."""
    paths = np.zeros(earlier_LT.shape[1], dtype=np.int64)
    for choices_T in earlier_LT[len(earlier_LT) - length :]:
        paths = paths * num_experts + choices_T
    return paths


def estimate_score(expected_SE: FloatArray, actual_SE: IntArray, top_k: int) -> tuple[float, float]:
    """From steps [S, E], what was expected of each expert, in any unit, and the rows that came: the share of steps
    whose top-2k experts were those that were expected (Lina section 7.3.2; in the others phase two places again), and
    the share of choices that would have to change for the estimate to be right."""
    pairs = list(zip(expected_SE, actual_SE, strict=True))
    right = np.mean([not needs_phase_two(expected, actual, top_k) for expected, actual in pairs])
    shares = expected_SE / np.maximum(expected_SE.sum(axis=1, keepdims=True), 1e-12)
    apart = np.abs(shares - actual_SE / np.maximum(actual_SE.sum(axis=1, keepdims=True), 1))
    return float(right), float(apart.sum(axis=1).mean() / 2)


def expected_by_paths(profile: PathProfile, trace: RoutingTrace, layer: int) -> tuple[FloatArray, IntArray]:
    """Estimates and counts [S, E] of MoE layer number `layer`, of each worker's rows in each step."""
    expected, actual = [], []
    for rows in trace.rows:
        ids_LTK = trace.ids_of(rows)
        if rows.num_rows:
            expected.append(profile.popularity(ids_LTK[:layer, :, 0], layer))
            actual.append(count_rows(ids_LTK[layer : layer + 1], profile.num_experts)[0])
    return np.array(expected), np.array(actual)


def devices_of_experts(
    experts_TK: NDArray[np.integer], shares_TK: FloatArray, num_experts: int, num_devices: int
) -> FloatArray:
    """n_e [E] of eq. 1: N sum_t P_{j(t)}(e) / N_t."""
    sums = np.bincount(experts_TK.ravel(), weights=shares_TK.ravel(), minlength=num_experts)
    devices: FloatArray = num_devices * sums / max(1, len(experts_TK))
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
