"""The page in a real browser: every figure is drawn, in its colours, light and dark, and nothing complains."""

import importlib.util
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from antiphon.report.document import (
    BATCH_COLOURS,
    LAYOUT_COLOURS,
    MARK,
    MEMORY_COLOURS,
    PART_COLOURS,
    ROLE_COLOURS,
    html,
)
from antiphon.report.gather import Report
from antiphon.report.serving import plan_page
from antiphon.report.training_plan import MEMORY_COLOURS as TRAINING_MEMORY_COLOURS
from antiphon.report.training_plan import STEP_COLOURS, training_page
from tests.specs.training_specimen import PLAN


def _chromium() -> ModuleType:
    """`chromium.py` beside this file; tests are no package."""
    spec = importlib.util.spec_from_file_location("chromium", Path(__file__).with_name("chromium.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


chromium = _chromium()
pytestmark = pytest.mark.skipif(not chromium.BINARY.exists(), reason=f"no browser: {chromium.BINARY} is not installed")

EXPECTED = {
    "decode-deployment": [ROLE_COLOURS["attention"], ROLE_COLOURS["experts"]],
    "decode-frontier": [*LAYOUT_COLOURS.values(), MARK],
    "decode-pipeline": list(BATCH_COLOURS[:2]),
    "decode-memory": [MEMORY_COLOURS[name] for name in ("weights", "KV cache", "reserve")],
    "decode-parts": list(PART_COLOURS.values()),
    "sensitivity-0": [LAYOUT_COLOURS["disaggregated"], LAYOUT_COLOURS["hybrid"], MARK],
}


def num_pixels(region: np.ndarray, colour: str) -> int:
    """Pixels of exactly this colour, ``#rrggbb``."""
    wanted = np.array([int(colour[start : start + 2], 16) for start in (1, 3, 5)], dtype=np.uint8)
    return int((region == wanted).all(axis=2).sum())


@pytest.fixture(scope="module")
def page(report: Report) -> str:
    """The decode phase alone: pictures take long to unpack."""
    return html(
        plan_page(replace(report, phases=report.phases[1:]), [("This engine", "antiphon serve . --plan plan.json")])
    )


@pytest.mark.parametrize(
    ("dark", "width"), [(False, 1200), (True, 1200), (False, 600)], ids=["light", "dark", "narrow"]
)
def test_every_figure_is_drawn(page: str, tmp_path: Path, dark: bool, width: int) -> None:
    height = 1800 if dark else 5600
    shot = chromium.photograph(page, tmp_path, width=width, height=height, dark=dark)
    assert shot.console == []
    assert shot.size[0] <= width, "the page is wider than its window"
    assert dark or shot.size[1] <= height, "the picture does not hold the whole page"
    assert set(shot.places) == set(EXPECTED)
    corner = shot.pixels[2, 2].astype(int)
    assert (corner.max() < 64) if dark else (corner.min() > 200)
    inside = {name: place for name, place in shot.places.items() if place[1] + place[3] <= height}
    assert len(inside) >= (1 if dark else len(EXPECTED))
    for name, (left, top, wide, high) in inside.items():
        region = shot.pixels[top : top + high, left : left + wide]
        for colour in EXPECTED[name] if width > 1000 else ():  # a narrow window scrolls its figures
            assert num_pixels(region, colour) >= 20, f"{name} shows nothing in {colour}"
        assert len(np.unique(region.reshape(-1, 3), axis=0)) > 20, f"{name} is blank"


def test_the_figures_of_a_training_plan_are_drawn(tmp_path: Path) -> None:
    width, height = 1200, 2600
    shot = chromium.photograph(html(training_page(PLAN)), tmp_path, width=width, height=height)
    assert shot.console == []
    assert shot.size[0] <= width, "the page is wider than its window"
    assert shot.size[1] <= height, "the picture does not hold the whole page"
    drawn = {
        "train-step": list(STEP_COLOURS.values()),
        "train-memory": [TRAINING_MEMORY_COLOURS[name] for name in ("parameters", "gradients", "workspace")],
        "train-mfu": [MARK],
    }
    assert shot.places.keys() == drawn.keys()
    for name, colours in drawn.items():
        left, top, wide, high = shot.places[name]
        for colour in colours:
            found = num_pixels(shot.pixels[top : top + high, left : left + wide], colour)
            assert found >= 20, f"{name} shows nothing in {colour}"
