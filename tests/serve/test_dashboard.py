"""The dashboard's page and data, over an engine without a model."""

import asyncio
import re
from collections.abc import Iterator
from importlib.resources import files

import httpx
import pytest

from antiphon.report.document import BATCH_COLOURS, HEAT_COLOURS, MARK
from antiphon.serve import statistics as statistics_module
from antiphon.serve.api.dashboard import Dashboard, DashboardReading
from antiphon.serve.api.metrics import ServerMetrics
from antiphon.serve.api.operator_routes import dashboard_page
from antiphon.serve.statistics import EngineStatistics
from antiphon.serve.worker.spans import ATTENTION, COMBINE, EXPERTS, STEP
from tests.serve.api_harness import Live, fake_engine, live
from tests.serve.fake_engine import FakeEngine
from tests.serve.span_examples import recorded


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    engine = fake_engine()
    engine.spans = {
        "attention[0]": recorded((ATTENTION, 0, 4, 8), (COMBINE, 4, 9, 8), (STEP, 0, 10, 8)),
        "experts[0]": recorded((EXPERTS, 5, 8, 11)),
    }
    engine.statistics.note_event("lost", "killed by SIGKILL", "experts[1]")
    with live(engine, api_keys=("secret",)) as running:
        yield running


def test_the_page_is_open_and_the_data_need_the_key(server: Live) -> None:
    page = httpx.get(f"{server.url}/dashboard")
    assert page.status_code == 200
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    refused = httpx.get(f"{server.url}/dashboard/data")
    assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")
    for holder in (page.text, page.headers["content-security-policy"]):
        assert "fake-moe" not in holder
        assert "secret" not in holder


def test_the_page_loads_nothing_from_anywhere() -> None:
    page, policy = dashboard_page()
    assert "default-src 'none'" in policy
    assert "unsafe-inline" not in re.search(r"script-src ([^;]*)", policy).group(1)  # type: ignore[union-attr]
    addresses = set(re.findall(r"https?://[^\s\"']+", page))
    assert addresses == {"http://www.w3.org/2000/svg"}, "a name of a kind of drawing, which nobody fetches"
    assert page.count("<script") == 1
    assert "/* script */" not in page


def test_the_page_has_the_colours_of_the_reports() -> None:
    page, _ = dashboard_page()
    assert str(list(BATCH_COLOURS)).replace("'", '"') in page
    assert str(list(HEAT_COLOURS)).replace("'", '"') in page
    assert f'MARK = "{MARK}"' in page
    schemes = re.findall(r":root \{ (.*?) \}", page)
    template = files("antiphon.report").joinpath("page.html.jinja").read_text(encoding="utf-8")
    of_reports = re.findall(r":root \{ (.*?) \}", template)
    assert [scheme.partition(" --bad")[0] for scheme in schemes] == of_reports


def test_the_data_say_what_the_engine_says(server: Live) -> None:
    answer = server.http.get("/dashboard/data")
    assert answer.status_code == 200
    assert answer.headers["cache-control"] == "no-store"
    reading = DashboardReading.model_validate_json(answer.text)
    assert (reading.model, reading.layout, reading.status, reading.healthy) == ("fake-moe", "disaggregated", "ok", True)
    assert reading.now.attention_idle_ratio == 0.125
    assert (reading.now.expert_idle_ratio, reading.now.prefix_cache_hit_ratio) == (0.5, 0.5)
    assert [(layer.layer, layer.balancedness) for layer in reading.load] == [(0, 0.75), (1, 1.0)]
    loads = [(load.name, load.experts, load.rows) for load in reading.load[0].workers]
    assert loads == [("experts[0]", [0, 1], [10, 20]), ("experts[1]", [2], [10])]
    phases = [(each.phase, each.rows, round(each.largest_share, 3)) for each in reading.load[0].phases]
    assert phases == [("prefill", [4, 15, 5], 1.875), ("decode", [6, 5, 5], 1.125)]
    assert reading.load[1].phases == [], "no prompts lately"
    assert reading.last_steps is not None
    assert [worker.name for worker in reading.last_steps.workers] == ["attention[0]", "experts[0]"]
    assert reading.last_steps.left_out == ["experts[1]"]
    (event,) = reading.events
    assert (event.number, event.kind, event.worker, event.text) == (1, "lost", "experts[1]", "killed by SIGKILL")


def _dashboard(engine: FakeEngine) -> Dashboard:
    return Dashboard(engine, ServerMetrics(engine, None), "m")


def test_many_who_look_cost_as_much_as_one() -> None:
    async def look_often(dashboard: Dashboard) -> list[bytes]:
        return list(await asyncio.gather(*(dashboard.reading() for _ in range(20))))

    engine = fake_engine()
    readings = asyncio.run(look_often(_dashboard(engine)))
    assert engine.num_looks == 1
    assert len(set(readings)) == 1


def test_an_empty_engine_has_an_empty_dashboard() -> None:
    reading = DashboardReading.model_validate_json(asyncio.run(_dashboard(fake_engine()).reading()))
    assert reading.last_steps is None
    assert reading.history.ago_s == []
    assert reading.events == []


def test_the_history_is_rates_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = fake_engine()
    metrics = ServerMetrics(engine, None)
    dashboard = Dashboard(engine, metrics, "m")
    clock = [1000.0]
    monkeypatch.setattr("antiphon.serve.api.dashboard.time.monotonic", lambda: clock[0])
    for _ in range(400):
        dashboard.sample()
        clock[0] += 2.0
        metrics.finished.labels("stop").inc()
    history = DashboardReading.model_validate_json(asyncio.run(dashboard.reading())).history
    assert set(history.answers_per_s) == {0.5}, "one answer in two seconds"
    assert set(history.generation_tokens_per_s) == {0.0}
    assert len(history.ago_s) == 300
    assert history.ago_s[-1] == 2.0
    assert history.ago_s == sorted(history.ago_s, reverse=True)


def test_events_are_numbered_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    statistics = EngineStatistics()
    assert statistics.newest_events() == ()
    for index in range(statistics_module._MAX_EVENTS + 3):
        statistics.note_event("ready", str(index), "attention[0]")
    newest = statistics.newest_events()
    assert len(newest) == statistics_module._MAX_EVENTS
    assert (newest[0].number, newest[0].text, newest[-1].number) == (4, "3", statistics_module._MAX_EVENTS + 3)
