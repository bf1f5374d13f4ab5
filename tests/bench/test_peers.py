"""Peers: rates from durations, the child protocol with an invented engine, the HTTP client against a stub server."""

import json
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import psutil
import pytest

from antiphon.base.errors import UserError
from antiphon.bench.openai_peer import OpenAIPeer, StreamedAnswer, inter_token_s
from antiphon.bench.serving_peers import (
    EngineProcess,
    PeerError,
    RunResult,
    Workload,
    llama_cpp_peer,
    run_result,
    vllm_peer,
)

ENGINE = """
class Engine:
    def __init__(self, options):
        self.options = options
    def details(self):
        return self.options
    def timed_run(self, prompts, output_tokens):
        if prompts[0][0] == 666:
            raise RuntimeError("out of pages")
        ids = [[prompt[0] + i for i in range(output_tokens)] for prompt in prompts]
        times = {"prefill_s": 0.1, "total_s": 0.5, "ttft_s": [0.1], "itl_s": [0.2] * (output_tokens - 1)}
        return {**times, "token_ids": ids}
def load(options):
    print("noise on standard output")
    return Engine(options)
"""


def result_of(workload: Workload, prefill_s: float, total_s: float, *ttft_s: float) -> RunResult:
    return run_result(workload, 0, prefill_s=prefill_s, total_s=total_s, ttft_s=list(ttft_s), itl_s=[], token_ids=None)


def test_rates_come_from_the_two_passes() -> None:
    workload = Workload([[1] * 128] * 8, 64)
    result = result_of(workload, 0.5, 2.5)
    assert result.prefill_tokens_per_s == 8 * 128 / 0.5
    assert result.output_tokens_per_s == 8 * 64 / 2.5
    assert result.decode_tokens_per_s == 8 * 63 / 2.0


def test_disturbed_prefill_pass_does_not_flatter_the_decode() -> None:
    result = result_of(Workload([[1] * 128] * 2, 64), 2.4, 2.5, 0.3, 0.5)
    assert result.prefill_tokens_per_s == 2 * 128 / 2.4
    assert result.decode_tokens_per_s == 2 * 63 / 2.0


def test_one_token_has_no_decode_rate() -> None:
    assert result_of(Workload([[1]], 1), 0.5, 0.5).decode_tokens_per_s is None


@pytest.mark.parametrize(("prompts", "output_tokens"), [([], 1), ([[1], []], 1), ([[1]], 0)])
def test_empty_workloads_are_refused(prompts: list[list[int]], output_tokens: int) -> None:
    with pytest.raises(ValueError, match=r"workload needs|output_tokens is 0"):
        Workload(prompts, output_tokens)


@pytest.fixture
def process(tmp_path: Path) -> Iterator[EngineProcess]:
    engine_file = tmp_path / "engine.py"
    engine_file.write_text(ENGINE)
    engine = EngineProcess("fake", engine_file, {"greeting": "hello"}, interpreter=sys.executable, environment={})
    yield engine
    engine.close()


def test_engine_process_lives_pauses_and_ends(process: EngineProcess) -> None:
    with pytest.raises(PeerError, match=r"fake: not started; call start\(\) first"):
        process.run(Workload([[5]], 3))
    assert process.start() == {"greeting": "hello"}
    result = process.run(Workload([[5], [7]], 3))
    assert result.token_ids == [[5, 6, 7], [7, 8, 9]]
    assert result.itl_s == [0.2, 0.2]
    assert result.peak_rss_bytes > 1_000_000
    process.pause()
    assert process.pid is not None
    # The signal is delivered in its own time; a process that never stops runs into the test's time limit.
    while psutil.Process(process.pid).status() != psutil.STATUS_STOPPED:
        time.sleep(0.01)
    process.resume()
    assert process.run(Workload([[1]], 1)).token_ids == [[1]]
    process.close()
    process.close()
    assert process.pid is None


def test_engine_failure_names_engine_reason_and_log(process: EngineProcess) -> None:
    process.start()
    with pytest.raises(PeerError, match="fake: RuntimeError: out of pages; its last lines"):
        process.run(Workload([[666]], 3))


def test_missing_vllm_says_how_to_get_it(tmp_path: Path) -> None:
    with pytest.raises(PeerError, match="run `make peers`"):
        vllm_peer(tmp_path, environment=tmp_path / "absent").start()


def test_llama_cpp_reads_gguf_and_says_how_to_get_it(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"peer llama\.cpp reads GGUF files"):
        llama_cpp_peer(tmp_path)
    with pytest.raises(PeerError, match="run `make peers`"):
        llama_cpp_peer(tmp_path / "model.gguf", packages=tmp_path / "absent").start()


class StubServer(BaseHTTPRequestHandler):
    """Streams `max_tokens` chunks; a prompt that begins with 9 ends one token early, one with 8 is refused."""

    def log_message(self, format: str, *args: object) -> None: ...

    def do_GET(self) -> None:
        self._answer(200, json.dumps({"data": [{"id": "stub"}]}))

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert request["ignore_eos"]
        assert request["stream_options"] == {"include_usage": True}
        if request["prompt"][0] == 8:
            self._answer(400, '{"error": {"message": "no eights"}}')
            return
        count = request["max_tokens"] - (request["prompt"][0] == 9 and request["max_tokens"] > 1)
        chunks: list[dict[str, object]] = [{"choices": [{"text": "x"}]}] * count
        chunks.append({"choices": [], "usage": {"completion_tokens": count}})
        self._answer(200, "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n")

    def _answer(self, status: int, text: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())


@pytest.fixture
def stub_url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), StubServer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()
    server.server_close()


def test_openai_peer_measures_a_stream(stub_url: str) -> None:
    peer = OpenAIPeer(stub_url)
    assert peer.start()["model"] == "stub"
    result = peer.run(Workload([[1, 2], [3, 4]], 5))
    assert len(result.ttft_s) == 2
    assert len(result.itl_s) == 2 * 4
    assert result.token_ids is None


def test_openai_peer_rejects_early_stops_and_refusals(stub_url: str) -> None:
    peer = OpenAIPeer(stub_url, name="stub")
    peer.start()
    with pytest.raises(PeerError, match="stub: generated 4 tokens instead of 5"):
        peer.run(Workload([[9]], 5))
    with pytest.raises(PeerError, match=r"stub: status 400: .*no eights"):
        peer.run(Workload([[8]], 5))


def test_openai_peer_names_an_absent_server() -> None:
    with pytest.raises(PeerError, match="does not answer as it should"):
        OpenAIPeer("http://127.0.0.1:9").start()


def test_bundled_tokens_share_the_time_between_chunks() -> None:
    assert inter_token_s(StreamedAnswer([0.0, 1.0, 4.0], 5, None)) == [1.0] * 4
    assert inter_token_s(StreamedAnswer([0.0, 1.0, 4.0], 3, None)) == [1.0, 3.0]
    assert inter_token_s(StreamedAnswer([0.0, 1.0], 1, None)) == []
