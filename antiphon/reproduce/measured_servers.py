"""Servers that others measured, beside what the planner says of them: by slice, with the spread of the errors. Beside
it, on request, NVIDIA's aiconfigurator.

1. `data/measured_servers.csv` has the points with their source. A point is one run of a closed loop: model, device,
   engine, layout, formats, lengths, requests at once, and its median times.
2. A prediction is `cost.engine_step` with an engine's constants (`specs/data/engines`). They are fitted here: least
   squares of the relative error, constants not below 0, far points counted less, drawn a little towards the roofline
   (factors of 1). Nothing is fitted to a model or a device.
3. What is reported is cross-validated: the points of a model on a device are predicted by constants that were fitted
   without them. So is the band in which four of five points lie.
4. aiconfigurator runs in an interpreter of its own (`aiconfigurator_peer.py`) and says one line a server. What it said
   is kept in `data/aiconfigurator_servers.csv`, so that the page can be written without it. Both are judged on the
   servers that both price. Rejected: all servers. It takes seconds for each, and neighbours are nearly the same server.

Rejected: cross-validation by single points. Neighbouring concurrencies of one server are nearly the same point.
"""

import csv
import json
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from antiphon.base.errors import UserError
from antiphon.base.progress import Report
from antiphon.cost.engine_step import CONSTANTS, FIRST_CONSTANTS, EngineSpec, ServerLoad, server_load
from antiphon.cost.exchange import Degrees
from antiphon.cost.roofline import FloatArray
from antiphon.reproduce import cluster_of, shipped_device, shipped_model
from antiphon.specs.cluster import ComputeDtype
from antiphon.specs.model import PrecisionSpec, StorageDtype

BoolArray = NDArray[np.bool_]
DATA = Path(__file__).parent / "data" / "measured_servers.csv"
WITHIN = 0.25
FIRST_GOAL = 0.6
"""The share of times to first token that should be within."""
ARITHMETIC: dict[StorageDtype, ComputeDtype] = {"fp8": "fp8", "nvfp4": "fp4"}
"""What products are computed in by the format of the weights, if the device can; else BF16."""
STEP = 7
TIMEOUT_S = 300.0  # for one server; a database is loaded for some
STORED = DATA.with_name("aiconfigurator_servers.csv")
PeerTimes = Mapping[int, tuple[float, float]]
"""By place in the file: seconds a token, seconds to the first one."""


@dataclass(frozen=True, kw_only=True)
class MeasuredPoint:
    """One measured run; fields as in the file. `ttft_s` is nan where it is not stated."""

    run: str
    engine: str
    version: str
    model: str
    device: str
    weights: StorageDtype
    experts: StorageDtype
    prompt: int
    output: int
    in_flight: int
    degrees: Degrees
    workers: int
    prefill_workers: int
    ttft_s: float
    tpot_s: float

    @property
    def is_pools(self) -> bool:
        """Whether prefill and decode ran on devices of their own."""
        return self.prefill_workers > 0

    @property
    def group(self) -> tuple[str, str]:
        """What cross-validation leaves out together."""
        return self.model, self.device


@cache
def measured_points() -> tuple[MeasuredPoint, ...]:
    """All of the file, in its order."""
    return tuple(_point(row) for row in _rows(DATA))


def _rows(path: Path) -> Iterator[dict[str, str]]:
    lines = path.read_text(encoding="utf-8").splitlines()
    return csv.DictReader(line for line in lines if not line.startswith("#"))


def _point(row: dict[str, str]) -> MeasuredPoint:
    texts = ("run", "engine", "version", "model", "device", "weights", "experts")
    given: dict[str, Any] = {name: row[name] for name in texts}
    given |= {name: int(row[name]) for name in ("prompt", "output", "in_flight")}
    return MeasuredPoint(
        **given,
        degrees=Degrees(**{one.name: int(row[one.name]) for one in fields(Degrees)}),
        workers=int(row["workers"] or 1),
        prefill_workers=int(row["prefill_workers"] or 0),
        ttft_s=float(row["ttft_ms"] or "nan") / 1e3,
        tpot_s=float(row["tpot_ms"]) / 1e3,
    )


def _alike(point: MeasuredPoint) -> tuple[object, ...]:
    """Points that are priced in one call."""
    return point.model, point.device, point.weights, point.experts, *vars(point.degrees).values(), point.is_pools


def load_of(points: Sequence[MeasuredPoint]) -> ServerLoad:
    """The load of points that are alike. A pool that decodes takes no prompts."""
    first = points[0]
    device = shipped_device(first.device)
    num_devices = int(first.degrees.attention_tp * first.degrees.attention_dp)
    in_node = min(device.scale_up_domain, 8)
    cluster = cluster_of(device, -(-num_devices // in_node), device.scale_up_domain, in_node=in_node)
    compute = ARITHMETIC.get(first.weights, "bfloat16")
    if compute not in device.flops_per_s:
        compute = "bfloat16"
    columns = np.array([(one.in_flight / one.workers, one.prompt, one.output) for one in points], dtype=np.float64).T
    return server_load(
        shipped_model(first.model),
        cluster,
        first.degrees,
        PrecisionSpec(weights=first.weights, experts=first.experts, compute=compute),
        in_flight=columns[0] / first.degrees.attention_dp,
        prompt=columns[1],
        output=columns[2],
        decodes_only=first.is_pools,
    )


def loads(points: Sequence[MeasuredPoint]) -> ServerLoad:
    """The loads of all points, in their order; those that are alike are priced in one call."""
    order = sorted(range(len(points)), key=lambda index: str(_alike(points[index])))
    parts = [
        load_of([points[index] for index in alike]) for _, alike in groupby(order, lambda index: _alike(points[index]))
    ]
    back = np.argsort(np.array(order))
    together = ServerLoad(
        **{one.name: np.concatenate([getattr(part, one.name) for part in parts]) for one in fields(ServerLoad)}
    )
    return together.take(back)


def fit_engine(name: str, load: ServerLoad, points: Sequence[MeasuredPoint]) -> EngineSpec:
    """The engine's constants from its points; the band is left at 1."""
    found = _least(load.terms, np.array([one.tpot_s for one in points]), PRIOR)
    spec = EngineSpec(name=name, **_named(CONSTANTS, found), **_named(FIRST_CONSTANTS, FIRST_PRIOR))
    ttft_s = np.array([one.ttft_s for one in points])
    known = np.array([not one.is_pools for one in points]) & np.isfinite(ttft_s)
    if known.any():
        first = _least(load.first_terms(spec)[known], ttft_s[known], FIRST_PRIOR)
        spec = replace(spec, **_named(FIRST_CONSTANTS, first))
    return spec


def _named(names: Sequence[str], values: FloatArray) -> dict[str, Any]:
    return {name: float(value) for name, value in zip(names, values, strict=True)}


PRIOR = np.array([1e-3, 1e-5, 2e-6, 1e-5, 1.0, 1.0, 1.0, 1.0])
FIRST_PRIOR = np.array([0.02, 2.0, 1.0, 0.1])
_TOWARDS_PRIOR = 0.02
_FAR = 0.15
"""A relative error from which on a point counts less."""


def _least(terms: FloatArray, measured: FloatArray, prior: FloatArray) -> FloatArray:
    """x >= 0 for which terms @ x is near `measured` relative to it: coordinate descent, reweighted by how far off."""
    columns = terms * prior / measured[:, None]
    x, before = np.ones(len(prior)), np.zeros(len(prior))
    for _ in range(60):
        if np.abs(x - before).max() < 1e-4:
            break
        before = x.copy()
        ratio = np.maximum(columns @ x, 1e-3)
        # half the measured value counts as much as twice; what is far off counts in proportion, not in its square
        weights = 1 / np.maximum(np.abs(np.log(ratio)), _FAR) / np.maximum(ratio, 0.3)
        normal = columns.T @ (weights[:, None] * columns) / len(measured)
        right = columns.T @ weights / len(measured)
        pull = _TOWARDS_PRIOR * np.mean(np.diag(normal))
        x = _not_negative(normal + pull * np.eye(len(x)), right + pull, x)
    return np.asarray(x * prior)


def _not_negative(normal: FloatArray, right: FloatArray, x: FloatArray) -> FloatArray:
    """x >= 0 that minimizes x @ normal @ x / 2 - right @ x, by coordinate descent from `x`."""
    x = x.copy()
    for _ in range(500):
        moved = 0.0
        for one in range(len(x)):
            value = max(x[one] + (right[one] - normal[one] @ x) / normal[one, one], 0.0)
            moved, x[one] = max(moved, abs(value - x[one])), value
        if moved < 1e-6:
            break
    return x


@dataclass(frozen=True, kw_only=True)
class Judged:
    """Points with what constants that were fitted without their group say of them; nan where no others are left."""

    points: tuple[MeasuredPoint, ...]
    load: ServerLoad
    tpot_s: FloatArray
    ttft_s: FloatArray

    def ratios(self, chosen: BoolArray, *, first: bool = False) -> FloatArray:
        """Predicted over measured, of the chosen points of which both are known."""
        measured_s = np.array([one.ttft_s if first else one.tpot_s for one in self.points])
        ratios = (self.ttft_s if first else self.tpot_s) / measured_s
        return np.asarray(ratios[chosen & np.isfinite(ratios)])


def cross_validated(points: Sequence[MeasuredPoint], report: Report | None = None) -> Judged:
    """All points judged, engine by engine. Ten seconds for all of the file."""
    load = loads(points)
    groups = sorted({(one.engine, one.group) for one in points})
    tpot_s, ttft_s = np.full(len(points), np.nan), np.full(len(points), np.nan)
    for number, (engine, group) in enumerate(groups):
        if report is not None:
            report(number, len(groups))
        held = [index for index, one in enumerate(points) if (one.engine, one.group) == (engine, group)]
        rest = [index for index, one in enumerate(points) if one.engine == engine and one.group != group]
        if rest:
            spec = fit_engine(engine, load.take(np.array(rest)), [points[index] for index in rest])
            tpot_s[held], ttft_s[held] = load.take(np.array(held)).tpot_s(spec), load.take(np.array(held)).ttft_s(spec)
    return Judged(points=tuple(points), load=load, tpot_s=tpot_s, ttft_s=ttft_s)


def fitted_engines(judged: Judged) -> list[EngineSpec]:
    """Every engine's constants from all its points, with the bands of the cross-validated errors."""
    found = []
    for engine in sorted({one.engine for one in judged.points}):
        index = np.array([number for number, one in enumerate(judged.points) if one.engine == engine])
        points = [judged.points[int(number)] for number in index]
        spec = fit_engine(engine, judged.load.take(index), points)
        chosen = np.isin(np.arange(len(judged.points)), index)
        low, high = np.quantile(1 / judged.ratios(chosen), BAND)
        spec = replace(
            spec,
            low=float(low),
            high=float(high),
            source=f"fitted to {len(points)} measured runs: antiphon reproduce --deployments --fit FOLDER",
        )
        found.append(spec)
    return found


BAND = (0.1, 0.9)


@dataclass(frozen=True, kw_only=True)
class PointSlice:
    """One line of the table: how many points, and of times per token and to the first token the median ratio of
    predicted to measured, the shares within 25% and within the engine's band, and the median error."""

    name: str
    num_points: int
    ratio: float
    within: float
    in_band: float | None
    error: float
    first_ratio: float | None
    first_within: float | None

    def cells(self) -> tuple[str, ...]:
        """The slice as a row of a table."""
        in_band = "" if self.in_band is None else f"{self.in_band:.0%}"
        shares = (f"{self.within:.0%}", in_band, f"{self.error:.0%}")
        return (
            self.name,
            f"{self.num_points:,}",
            f"{self.ratio:.2f}",
            *shares,
            "" if self.first_ratio is None else f"{self.first_ratio:.2f}",
            "" if self.first_within is None else f"{self.first_within:.0%}",
        )


COLUMNS = ("slice", "points", "ratio", "within 25%", "in band", "error", "first token", "within 25%")


def slices(judged: Judged, engines: Sequence[EngineSpec]) -> list[PointSlice]:
    """All points, then by layout, model, device, engine, formats, prompt length and requests at once."""
    points, by_name = judged.points, {one.name: one for one in engines}
    band = np.array([(by_name[one.engine].low, by_name[one.engine].high) for one in points])

    def of(name: str, chosen: BoolArray) -> PointSlice:
        return slice_of(name, judged, chosen, band)

    kinds = np.array([_kind(one) for one in points])
    together = np.array([not one.is_pools for one in points])
    found = [of("aggregated servers", together)]
    found += [of(kind, kinds == kind) for kind in sorted(set(kinds))]
    for name in ("model", "device", "engine", "weights", "prompt"):
        values = np.array([str(getattr(one, name)) for one in points])
        found += [of(f"{name} {value}", together & (values == value)) for value in sorted(set(values[together]))]
    in_flight = np.array([one.in_flight for one in points])
    for least, most in ((1, 8), (9, 32), (33, 128), (129, 1024)):
        found.append(of(f"{least} to {most} at once", together & (in_flight >= least) & (in_flight <= most)))
    return [one for one in found if one.num_points]


def slice_of(name: str, judged: Judged, chosen: BoolArray, band: FloatArray | None = None) -> PointSlice:
    known = chosen & np.isfinite(judged.tpot_s)
    ratios, first = judged.ratios(chosen), judged.ratios(chosen, first=True)
    in_band = None
    if band is not None:
        in_band = float(np.mean((1 / ratios >= band[known, 0]) & (1 / ratios <= band[known, 1])))
    return PointSlice(
        name=name,
        num_points=len(ratios),
        ratio=float(np.median(ratios)),
        within=float(np.mean(np.abs(ratios - 1) <= WITHIN)),
        in_band=in_band,
        error=float(np.median(np.abs(ratios - 1))),
        first_ratio=float(np.median(first)) if first.size else None,
        first_within=float(np.mean(np.abs(first - 1) <= WITHIN)) if first.size else None,
    )


def _kind(point: MeasuredPoint) -> str:
    degrees = point.degrees
    if point.is_pools:
        return "pools: decode workers"
    if degrees.attention_dp > 1:
        return "attention DP, experts EP"
    if degrees.expert_ep > 1:
        return "attention TP, experts EP"
    return "TP" if degrees.attention_tp > 1 else "one device"


def engine_file(spec: EngineSpec) -> str:
    """The engine as a file of `specs/data/engines`."""
    lines = [f'name = "{spec.name}"', f'summary = "{spec.name}, constants of its steps"']
    for one in fields(EngineSpec):
        value = getattr(spec, one.name)
        if one.name == "source":
            lines.append(f'source = "{value}"')
        elif one.name != "name":
            lines.append(f"{one.name} = {float(f'{value:.3g}')!r}")
    return "\n".join(lines) + "\n"


def peer_times(python: str, report: Report | None = None) -> PeerTimes:
    """What aiconfigurator, which the interpreter `python` has, says of every seventh server without pools; those that
    it refuses are left out. Five minutes. `UserError` if that interpreter does not do it."""
    program = Path(__file__).with_name("aiconfigurator_peer.py")
    theirs: dict[int, dict[str, Any]] = {}
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as said:
        try:
            process = subprocess.Popen(
                [python, str(program), str(DATA), str(STEP)], stdout=subprocess.PIPE, stderr=said, text=True
            )
        except OSError as error:
            raise UserError(f"--peer {python}: it does not run ({error.strerror}): give a Python") from error
        with process:
            assert process.stdout is not None
            silent = threading.Timer(TIMEOUT_S, process.kill)
            silent.start()
            for line in process.stdout:
                if not line.startswith('{"index"'):
                    continue  # what a library prints
                found = json.loads(line)
                theirs[found["index"]] = found
                silent.cancel()
                silent = threading.Timer(TIMEOUT_S, process.kill)
                silent.start()
                if report is not None:
                    report(len(theirs), found["of"])
            silent.cancel()
        said.seek(0)
        _check_ended(python, process.returncode, said.read().strip().splitlines())
    priced = {
        index: (found["tpot_ms"] / 1e3, found["ttft_ms"] / 1e3)
        for index, found in sorted(theirs.items())
        if "error" not in found
    }
    if not priced:
        raise UserError(f"--peer {python}: aiconfigurator refused all {len(theirs)} servers: is it of version 0.12?")
    return priced


def _check_ended(python: str, code: int, lines: list[str]) -> None:
    if code == -signal.SIGKILL:
        raise UserError(f"--peer {python}: it said nothing for {TIMEOUT_S:.0f} s and was killed")
    if code:
        reason = lines[-1] if lines else f"exit code {code}"
        raise UserError(
            f"--peer {python}: {reason}: give a Python that has aiconfigurator (pip install aiconfigurator)"
        )


def stored_times() -> PeerTimes:
    """What it said when it was last asked."""
    return {int(row["index"]): (float(row["tpot_s"]), float(row["ttft_s"])) for row in _rows(STORED)}


def times_file(times: PeerTimes) -> str:
    """The text of `STORED`."""
    lines = [
        "# What aiconfigurator 0.12 (Apache-2.0) predicts for measured_servers.csv; index: the row there, from 0.",
        "# Made by: antiphon reproduce --deployments --peer PYTHON --fit FOLDER",
        "index,tpot_s,ttft_s",
        *(f"{index},{tpot_s:.4g},{ttft_s:.4g}" for index, (tpot_s, ttft_s) in times.items()),
    ]
    return "\n".join(lines) + "\n"


def compare(judged: Judged, times: PeerTimes) -> list[PointSlice]:
    """Two slices over the servers that both price: aiconfigurator and this project."""
    both = [index for index in times if np.isfinite(judged.tpot_s[index])]
    tpot_s, ttft_s = np.full((2, len(judged.points)), np.nan)
    for index in both:
        tpot_s[index], ttft_s[index] = times[index]
    peer = replace(judged, tpot_s=tpot_s, ttft_s=ttft_s)
    chosen = np.isin(np.arange(len(judged.points)), both)
    return [slice_of("aiconfigurator", peer, chosen), slice_of("antiphon", judged, chosen)]
