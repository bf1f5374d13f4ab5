"""Servers that others measured: the file, the fit on a made-up engine, and that shipped constants are what it finds."""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from antiphon.base.errors import UserError
from antiphon.cost.engine_step import CONSTANTS, FIRST_CONSTANTS, EngineSpec, load_engine
from antiphon.reproduce.measured_servers import (
    compare,
    cross_validated,
    engine_file,
    fit_engine,
    fitted_engines,
    loads,
    measured_points,
    peer_times,
    slices,
    stored_times,
    times_file,
)
from antiphon.specs.catalog import names

SOME = measured_points()[::29]


def test_every_point_states_a_server_that_there_is() -> None:
    for point in measured_points():
        degrees = point.degrees
        assert degrees.attention_tp * degrees.attention_dp == degrees.expert_tp * degrees.expert_ep
        assert point.is_pools or degrees.attention_tp * degrees.attention_dp <= 8
        assert min(point.tpot_s, point.in_flight, point.prompt, point.output) > 0
    assert {point.engine for point in measured_points()} == set(names("engine"))


def test_a_made_up_engine_is_found_again() -> None:
    """Times made by known constants: the fit finds what predicts them, though the terms are nearly dependent."""
    true = replace(load_engine("vllm"), kernel_s=3e-6, collective_s=2e-5, dense=1.3, queued=0.3)
    load = loads(SOME)
    tpot_s, ttft_s = load.tpot_s(true), load.ttft_s(true)
    made = [
        replace(one, tpot_s=float(tpot), ttft_s=float(ttft))
        for one, tpot, ttft in zip(SOME, tpot_s, ttft_s, strict=True)
    ]
    found = fit_engine("made-up", load, made)
    assert np.median(np.abs(load.tpot_s(found) / tpot_s - 1)) < 0.02
    known = [index for index, one in enumerate(SOME) if not one.is_pools]
    assert np.median(np.abs(load.ttft_s(found)[known] / ttft_s[known] - 1)) < 0.03
    assert all(getattr(found, name) >= 0 for name in (*CONSTANTS, *FIRST_CONSTANTS))


def test_a_point_is_judged_without_its_group() -> None:
    """A group whose times are all doubled changes what is said of other groups, not of itself."""
    group = SOME[0].group
    doubled = [replace(one, tpot_s=2 * one.tpot_s) if one.group == group else one for one in SOME]
    before, after = cross_validated(SOME), cross_validated(doubled)
    inside = np.array([one.group == group for one in SOME])
    same = np.isclose(before.tpot_s, after.tpot_s, equal_nan=True)
    assert same[inside].all()
    assert not same[~inside].all()


def test_slices_count_what_they_say() -> None:
    judged = cross_validated(SOME)
    found = {one.name: one for one in slices(judged, fitted_engines(judged))}
    whole = found["aggregated servers"]
    assert whole.num_points == sum(not one.is_pools for one in SOME)
    assert whole.num_points == sum(one.num_points for name, one in found.items() if name.startswith("engine "))
    assert all(0 <= one.within <= 1 and 0 <= (one.in_band or 0.0) <= 1 for one in found.values())


@pytest.mark.slow
def test_the_shipped_constants_are_fitted() -> None:
    """The files of `specs/data/engines` are what `antiphon reproduce --deployments --fit` writes; the errors are those
    that docs/reproduction.md states."""
    judged = cross_validated(measured_points())
    fitted = fitted_engines(judged)
    for spec in fitted:
        shipped = load_engine(spec.name)
        for name in (*CONSTANTS, *FIRST_CONSTANTS, "low", "high"):
            assert getattr(shipped, name) == pytest.approx(getattr(spec, name), rel=0.02, abs=1e-9), (spec.name, name)
    whole = slices(judged, fitted)[0]
    assert whole.within > 0.8
    assert whole.error < 0.13
    assert whole.in_band is not None
    assert 0.75 < whole.in_band < 0.85


def test_an_engine_file_is_read_back(tmp_path: Path) -> None:
    spec = load_engine("sglang")
    path = tmp_path / "mine.toml"
    path.write_text(engine_file(spec))
    assert load_engine(path) == spec
    path.write_text(engine_file(spec) + "kernels_s = 1.0\n")
    with pytest.raises(UserError, match="unknown key kernels_s: did you mean kernel_s"):
        load_engine(path)
    with pytest.raises(UserError, match="low must not be above high"):
        EngineSpec(**{**vars(spec), "low": 2.0, "high": 1.0})


API = """
class Found:
    tpot, ttft = 10.0, 100.0


def cli_estimate(model, system, **options):
    print("a library's own words")
    if "B200" in system.upper():
        raise RuntimeError("no data")
    return Found()
"""


def test_a_peer_is_asked_in_its_own_interpreter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "aiconfigurator" / "cli"
    package.mkdir(parents=True)
    for folder in (package, package.parent):
        (folder / "__init__.py").touch()
    (package / "api.py").write_text(API)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    points = measured_points()
    known = np.array([one.tpot_s for one in points])
    judged = replace(cross_validated(SOME), points=points, tpot_s=known, ttft_s=known)
    times = peer_times(sys.executable)
    theirs, ours = compare(judged, times)
    asked = [one for one in points if not one.is_pools][::7]
    assert theirs.num_points == ours.num_points == sum(one.device != "B200" for one in asked)
    assert ours.ratio == 1.0
    (package / "api.py").write_text("raise ImportError('no tables')")
    with pytest.raises(UserError, match="no tables"):
        peer_times(sys.executable)
    with pytest.raises(UserError, match="it does not run"):
        peer_times(str(tmp_path / "none"))


def test_what_the_peer_said_is_kept_for_the_page() -> None:
    """Of servers that are in the file, at least 200."""
    times, points = stored_times(), measured_points()
    assert len(times) >= 200
    assert not any(points[index].is_pools for index in times)
    assert times_file(times).splitlines()[3] == "{},{:.4g},{:.4g}".format(*next((i, *t) for i, t in times.items()))
