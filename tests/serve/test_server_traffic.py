"""What clients do to a running server: giants, hang-ups, and what the metrics say of it all."""

import json
import os
import signal
import socket
from typing import Any

import httpx
import pytest

from tests.serve.server_harness import ServerProcess, event_texts
from tests.waiting import wait_until

LONG = {"prompt": "bada do", "temperature": 0, "max_tokens": 1500, "stream": True}
GAUGES = (
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_ratio",
    "attention_idle_ratio",
    "expert_idle_ratio",
)
COUNTERS = (
    "prefix_cache_hits_total",
    "prefix_cache_queries_total",
    "exposed_communication_seconds_total",
    "dispatch_bytes_total",
    "placement_changes_total",
)
HISTOGRAMS = (
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "e2e_request_latency_seconds",
    "request_queue_time_seconds",
)


def is_idle(server: ServerProcess) -> bool:
    metrics = server.metrics()
    names = ("kv_cache_usage_ratio", "num_requests_running", "num_requests_waiting")
    return all(metrics[f"antiphon:{name}"] == 0 for name in names)


def test_a_body_of_10_megabytes_is_413(live_server: ServerProcess) -> None:
    for _ in range(5):
        response = live_server.http.post("/v1/completions", json={"prompt": "x" * 10_000_000})
        assert response.status_code == 413
        assert response.json()["error"]["code"] == "request_too_large"
    assert live_server.complete().status_code == 200


@pytest.mark.parametrize("n", [1, 3])
def test_a_client_that_hangs_up_frees_its_kv_cache(live_server: ServerProcess, n: int) -> None:
    wait_until(lambda: is_idle(live_server), "idle before")
    with live_server.http.stream("POST", "/v1/completions", json={**LONG, "n": n, "max_tokens": 8000}) as response:
        texts = event_texts(response.iter_lines())
        for _ in range(5):
            next(texts)
        assert live_server.metrics()["antiphon:kv_cache_usage_ratio"] > 0
    wait_until(lambda: is_idle(live_server), "the KV cache is free again", 20)


def test_a_client_that_hangs_up_while_waiting_frees_its_kv_cache(live_server: ServerProcess) -> None:
    body = json.dumps({**LONG, "stream": False, "max_tokens": 8000}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    head += b"content-length: %d\r\n\r\n" % len(body)
    address = httpx.URL(live_server.url)
    with socket.create_connection((address.host, address.port or 80)) as connection:
        connection.sendall(head + body)
        wait_until(lambda: live_server.metrics()["antiphon:num_requests_running"] == 1, "it runs")
    wait_until(lambda: is_idle(live_server), "the KV cache is free again", 20)


@pytest.mark.parametrize("worker", ["experts[0]", "attention[0]"])
def test_a_killed_worker_costs_no_token(live_server: ServerProcess, worker: str) -> None:
    with live_server.http.stream("POST", "/v1/completions", json=LONG) as response:
        expected = "".join(event_texts(response.iter_lines()))
    restarts = live_server.metrics()["antiphon:worker_restarts_total"]
    pid = live_server.worker_pid(worker)  # which takes a while: the answer must not end meanwhile
    with live_server.http.stream("POST", "/v1/completions", json=LONG) as response:
        texts = event_texts(response.iter_lines())
        begin = "".join(next(texts) for _ in range(20))
        os.kill(pid, signal.SIGKILL)
        assert begin + "".join(texts) == expected
    assert live_server.metrics()["antiphon:worker_restarts_total"] == restarts + 1
    wait_until(lambda: live_server.http.get("/health").status_code == 200, "healthy again")
    assert f"lost {worker}: killed by SIGKILL" in live_server.log


def test_the_metrics_tell_what_happened(live_server: ServerProcess) -> None:
    assert live_server.complete(prompt=["bada do ki", "bada do ki bu"], max_tokens=32).status_code == 200
    # expert workers report twice a second
    ratio = "antiphon:expert_balancedness_ratio"
    wait_until(lambda: any(name.startswith(ratio) for name in live_server.metrics()), "experts have reported")
    metrics = live_server.metrics()
    for name in (*GAUGES, *COUNTERS):
        assert metrics[f"antiphon:{name}"] >= 0, name
    for name in HISTOGRAMS:
        assert metrics[f"antiphon:{name}_count"] > 0, name
        assert metrics[f"antiphon:{name}_sum"] > 0, name
    assert metrics["antiphon:dispatch_bytes_total"] > 0
    assert metrics["antiphon:exposed_communication_seconds_total"] > 0
    for name in ("kv_cache_usage_ratio", "attention_idle_ratio", "expert_idle_ratio"):
        assert metrics[f"antiphon:{name}"] <= 1, name
    balance: dict[str, Any] = {name: value for name, value in metrics.items() if name.startswith(ratio)}
    assert set(balance) == {f'{ratio}{{layer="0"}}', f'{ratio}{{layer="1"}}'}
    assert set(balance.values()) == {1.0}, "one expert worker is in perfect balance with itself"
    text = live_server.http.get("/metrics").text
    assert "# TYPE antiphon:prediction_error_ratio gauge" in text


def test_the_server_says_what_it_is(live_server: ServerProcess) -> None:
    version = live_server.http.get("/version").json()
    assert version["layout"] == "disaggregated"
    assert (version["num_attention"], version["num_experts_workers"], version["num_micro_batches"]) == (1, 1, 2)
    for line in (
        "serves tiny",
        "qwen3_moe, 2 layers, 8 experts, top-2, float32 on cpu",
        "disaggregated: 1 attention + 1 expert worker, 2 micro-batches in turn",
        f"attention[0] {live_server.worker_pid('attention[0]')}",
        "16.0 MiB",
        live_server.url,
        "curl http",
    ):
        assert line in live_server.log
    assert "0 B of 0 B" not in live_server.log
    assert "Traceback" not in live_server.log
