"""What serving takes beside the model's steps: a server of this machine, asked over HTTP by this process.

1. `antiphon serve MODEL` with one thread, and once more with prompts in a pool of their own. The client is that of
   `bench.load`.
2. Processor time is of the server's main thread, which is its event loop, with that of processes that read texts for
   it, and of this thread. It hardly depends on what else the machine does. Requests of one token give what a request
   takes, longer ones what a token takes, by how many streams there are: tokens of a step share a part of the way.
3. The time to the first token, less all that and less the step, is waiting: for sockets, threads and processes to wake
   up. It is of the clock, and only as good as the machine is quiet.
4. The server's timeline says how long its decode steps took. Beside what the profile has of the same rows, with one
   thread, they are longer: HTTP, texts and the client take a part of the caches.

Rejected: a profiler in the server. It would be part of what it measures, and see neither the kernel nor the client.
"""

import asyncio
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import httpx
import numpy as np
import psutil

from antiphon.base.errors import UserError
from antiphon.base.progress import Report
from antiphon.bench.harness.processes import START_S, serving_here
from antiphon.bench.openai_peer import OpenAIPeer, StreamedAnswer
from antiphon.bench.profile.measure import Effort, curve
from antiphon.cost.curves import Curve
from antiphon.cost.profile import HostTimes, LocalTimes, flat
from antiphon.planner.local_prediction import LocalChoice, predict_decode
from antiphon.serve.worker.spans import NAMES as SPAN_NAMES
from antiphon.serve.worker.spans import STEP
from antiphon.specs.model import ModelSpec

_PROMPT_TOKENS = 16
_OUTPUT_TOKENS = 33
_SCHEDULER_FILE = "schedstat"  # of a thread, in /proc: nanoseconds on a processor come first


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A number of requests: processor seconds of the server's event loop and of the client, and each one's time to the
    first token."""

    server_s: float
    client_s: float
    ttft_s: list[float]


class HostServer:
    """A server that is ready. `facts`: the file of `serve --json`. It is asked for the model's name."""

    def __init__(self, facts: dict[str, object], vocab_size: int) -> None:
        self._pid = int(str(facts["pid"]))
        workers = facts["workers"]
        assert isinstance(workers, list)
        self._workers = {int(worker["pid"]) for worker in workers}
        self._vocab_size = vocab_size
        self._peer = OpenAIPeer(str(facts["url"]))
        self._peer.start()
        self._generator = np.random.default_rng(0)

    def ask(self, num_requests: int, output_tokens: int, streams: int = 1) -> Asked:
        """`streams` of them at a time. All prompts differ."""
        sizes = (num_requests, _PROMPT_TOKENS)
        prompts = [row.tolist() for row in self._generator.integers(self._vocab_size, size=sizes)]
        return asyncio.run(self._ask(prompts, output_tokens, streams))

    async def _ask(self, prompts: list[list[int]], output_tokens: int, streams: int) -> Asked:
        times: list[float] = []
        async with httpx.AsyncClient(timeout=START_S, trust_env=False) as client:
            server_s, client_s = self._server_s(), time.thread_time()  # a client that is made reads certificates

            async def one(prompt: list[int]) -> None:
                begin = time.perf_counter()
                answer: StreamedAnswer = await self._peer.stream(client, prompt, output_tokens)
                times.append(answer.arrivals_s[0] - begin)

            for first in range(0, len(prompts), streams):
                await asyncio.gather(*map(one, prompts[first : first + streams]))
            client_s = time.thread_time() - client_s
            return Asked(server_s=self._server_s() - server_s, client_s=client_s, ttft_s=times)

    def _server_s(self) -> float:
        """Processor seconds of the main thread, and of all threads of children that are not workers."""
        try:
            total = _processor_s(Path(f"/proc/{self._pid}/task/{self._pid}"))
            children = psutil.Process(self._pid).children()
        except (OSError, psutil.Error) as error:
            raise UserError(f"this system does not say how long a thread was on a processor: {error}") from error
        for child in children:
            if child.pid in self._workers:
                continue
            for thread in Path("/proc").glob(f"{child.pid}/task/*"):
                with suppress(OSError):  # it ended
                    total += _processor_s(thread)
        return total


def _processor_s(folder: Path) -> float:
    return int((folder / _SCHEDULER_FILE).read_text(encoding="ascii").split()[0]) * 1e-9


@contextmanager
def _serving(model: Path, folder: Path, vocab_size: int, *options: str) -> Iterator[HostServer]:
    with serving_here(model, folder, "--threads", "1", *options) as facts:
        yield HostServer(facts, vocab_size)


def _step_s_by_rows(timeline: Path) -> dict[int, float]:
    """Median seconds of a worker's steps, by their rows; of none if the server did not end in time to write it."""
    seconds: dict[int, list[float]] = {}
    if not timeline.exists():
        return {}
    for event in json.loads(timeline.read_text(encoding="utf-8"))["traceEvents"]:
        if event["name"] == SPAN_NAMES[STEP] and "dur" in event:
            seconds.setdefault(event["args"]["rows"], []).append(event["dur"] * 1e-6)
    return {rows: median(each) for rows, each in seconds.items()}


def _step_ratio(measured: dict[int, float], times: LocalTimes, spec: ModelSpec, rows: Sequence[int]) -> Curve:
    """Decode steps with one thread: those of the server to those of the profile, both without bookkeeping."""
    if all(each.num_threads > 1 for each in times.threads):
        return flat(1.0)
    ratios = {}
    for number in sorted(measured.keys() & set(rows)):
        alone = predict_decode(
            replace(times, num_cores=1),
            spec,
            LocalChoice(layout="colocated"),
            concurrency=number,
            context=_PROMPT_TOKENS + _OUTPUT_TOKENS / 2,
        ).parts_s
        within_s = measured[number] - alone["bookkeeping"]
        ratios[number] = max(1.0, within_s / (alone["attention"] + alone["experts"] + alone["head"]))
    return curve(ratios, may_fall=True) if ratios else flat(1.0)


def host_times(model: Path, times: LocalTimes, spec: ModelSpec, effort: Effort, report: Report) -> HostTimes:
    """Blocks for half a minute. `UserError` if no server can be started here."""
    done, num_parts = count(1), len(effort.host_streams) + 1
    dtype = ("--dtype", times.dtype)
    server_s: dict[int, float] = {}
    client_s: dict[int, float] = {}
    short: dict[int, Asked] = {}
    with TemporaryDirectory(prefix="host-") as name:
        folder, timeline = Path(name), Path(name) / "timeline.json"
        with _serving(model, folder, spec.vocab_size, *dtype, "--timeline", str(timeline)) as server:
            server.ask(effort.host_requests, 2)  # to warm up
            for streams in effort.host_streams:
                num_requests = -(-effort.host_requests // streams) * streams
                short[streams] = server.ask(num_requests, 1, streams)
                whole = server.ask(num_requests, _OUTPUT_TOKENS, streams)
                num_tokens = num_requests * (_OUTPUT_TOKENS - 1)
                server_s[streams] = max(whole.server_s - short[streams].server_s, 0.0) / num_tokens
                client_s[streams] = max(whole.client_s - short[streams].client_s, 0.0) / num_tokens
                report(next(done), num_parts)
        step_ratio = _step_ratio(_step_s_by_rows(timeline), times, spec, effort.host_streams)
    first = effort.host_streams[0]
    single = short[first]
    each = [seconds / len(single.ttft_s) for seconds in (single.server_s, single.client_s)]
    beside = sum(each) + _step_s(times, spec)
    ttft_s = median(single.ttft_s)
    pooled_s = ttft_s
    if times.num_cores > 1:
        with (
            TemporaryDirectory(prefix="host-") as name,
            _serving(model, Path(name), spec.vocab_size, *dtype, "--prefill", "1", "--decode", "1") as server,
        ):
            server.ask(effort.host_requests, 2)
            pooled_s = median(server.ask(effort.host_requests, 2).ttft_s)
    report(next(done), num_parts)
    return HostTimes(
        request_s=max(each[0] - server_s[first], 0.0),
        token_s=curve(server_s, may_fall=True),
        client_request_s=max(each[1] - client_s[first], 0.0),
        client_token_s=curve(client_s, may_fall=True),
        wait_s=max(ttft_s - beside, 0.0),
        handover_s=max(pooled_s - ttft_s, 0.0),
        step_ratio=step_ratio,
    )


def _step_s(times: LocalTimes, spec: ModelSpec) -> float:
    """The step of one prompt alone, and the engine's turn: as a simulation prices them."""
    worker = min(times.threads, key=lambda each: (each.num_threads, not each.both_sides))
    experts = worker.experts_s[spec.router.num_experts]
    layers = spec.num_layers * worker.prompt_attention_s.value(_PROMPT_TOKENS)
    turn_s = times.engine.alone_s.seconds[0] + times.engine.bookkeeping_s.seconds[0]
    return layers + spec.num_moe_layers * experts.value(_PROMPT_TOKENS) + worker.head_s.value(1) + turn_s
