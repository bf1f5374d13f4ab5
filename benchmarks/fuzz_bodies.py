"""Send hostile request bodies, then mixes of much work, to a server and watch what they do to others.

    python benchmarks/fuzz_bodies.py MODEL [--bodies 10000] [--seed 0] [--only bodies|mixes] [--mix TEXT]

Method
1. `antiphon serve MODEL` runs in a process of its own, attention and experts apart.
2. Bodies come from `hostile_bodies`; the same seed gives the same ones.
3. Four senders share them, each in a process of its own. They are niced, as an attacker has another machine.
4. All the while one more process asks for two tokens, again and again, and times each answer.
5. Then come the mixes of `hostile_bodies`, one after the other: legal requests, all of a mix at once from one niced
   process, beside the same probe. Each is a row of a table.
6. Memory is that of the server's process and of its children, after the first bodies and at the end. The KV cache is
   small enough for the first bodies to fill it: a larger one is reserved at the start and becomes resident later.

It fails (exit 1) at an answer of 5xx, also within a stream, at no answer, at a server that is not well afterwards, at a
parallel request that took more than 250 ms (beside a mix also: more than 100 ms at p99), and at memory that grew by
more than 64 MiB (100 MiB over all mixes).

Rejected: generating from the OpenAPI description (a test does that, but it knows no sizes); a coverage-guided fuzzer,
which would find paths, and what is looked for here is time and memory.
"""

import argparse
import json
import multiprocessing
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import psutil
from hostile_bodies import MIXES, Request, random_body

from antiphon.base.errors import UserError
from antiphon.bench.harness.processes import end_of, serving_here

NUM_SENDERS = 4
MAX_STALL_S = 0.25
MAX_GROWTH_BYTES = 64 * 2**20
MAX_P99_S = 0.1
MAX_MIXES_GROWTH_BYTES = 100 * 2**20
_WARM_UP_BODIES = 800  # before memory is read for the first time
_PATIENCE_S = 120.0
_SENDING_S = 3600.0
_SENDER_NICENESS = 10


@dataclass
class Findings:
    """What a run saw. `failures` are answers of 5xx with the seed of their body, at most twenty."""

    statuses: Counter[int] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    waits_s: list[float] = field(default_factory=list)
    growth_bytes: int = 0
    well: bool = False

    def problems(self, max_stall_s: float = MAX_STALL_S, max_growth_bytes: int = MAX_GROWTH_BYTES) -> list[str]:
        """Everything that breaks a promise, one line each."""
        found = list(self.failures)
        if not self.well:
            found.append("the server does not answer as it did before")
        if max(self.waits_s) > max_stall_s:
            found.append(f"a parallel request took {max(self.waits_s):.3f} s: at most {max_stall_s} s")
        if self.growth_bytes > max_growth_bytes:
            found.append(f"memory grew by {self.growth_bytes / 2**20:.0f} MiB: at most {max_growth_bytes / 2**20:.0f}")
        return found

    @property
    def answers(self) -> str:
        return ", ".join(f"{status}: {count}" for status, count in sorted(self.statuses.items()))

    def quantile_ms(self, share: float) -> float:
        """A quantile of the parallel request's times."""
        return sorted(self.waits_s)[int(share * (len(self.waits_s) - 1))] * 1e3

    def summary(self) -> str:
        shares = (("median", 0.5), ("p99", 0.99), ("longest", 1.0))
        quantiles = ", ".join(f"{name} {self.quantile_ms(share):.1f} ms" for name, share in shares)
        return (
            f"answers {self.answers}\nparallel request ({len(self.waits_s)} times): {quantiles}\n"
            f"memory {self.growth_bytes / 2**20:+.0f} MiB"
        )

    def row(self, name: str) -> str:
        """As a row of the table of mixes."""
        times = " | ".join(f"{self.quantile_ms(share):.0f} ms" for share in (0.5, 0.99, 1.0))
        return f"| {name} | {self.answers} | {times} | {self.growth_bytes / 2**20:+.0f} MiB |"


def fuzz(url: str, pid: int, num_bodies: int, seed: int) -> Findings:
    """Send `num_bodies` to the server at `url`, whose process is `pid`. Blocks until all are answered."""
    numbers, num_warm = range(seed, seed + num_bodies), min(_WARM_UP_BODIES, num_bodies // 4)
    findings = Findings()
    with _watched(url, findings, NUM_SENDERS) as senders:

        def send(part: range) -> None:
            shares = [part[first::NUM_SENDERS] for first in range(NUM_SENDERS)]
            for statuses, failures in senders.map(_send, [url] * NUM_SENDERS, shares, timeout=_SENDING_S):
                findings.statuses.update(statuses)
                findings.failures += failures

        send(numbers[:num_warm])
        before = resident_bytes(pid)
        send(numbers[num_warm:])
    findings.failures = findings.failures[:20]
    findings.growth_bytes = resident_bytes(pid) - before
    return findings


def run_mix(url: str, pid: int, requests: list[Request]) -> Findings:
    """Send `requests` at once. Blocks until all are answered."""
    findings, before = Findings(), resident_bytes(pid)
    with _watched(url, findings, num_senders=1) as senders:
        for status, text in senders.submit(_send_at_once, url, requests).result(_SENDING_S):
            findings.statuses[status] += 1
            if status == 0 or status >= 500:
                findings.failures.append(f"{status} {text}")
    findings.growth_bytes = resident_bytes(pid) - before
    return findings


@contextmanager
def _watched(url: str, findings: Findings, num_senders: int) -> Iterator[ProcessPoolExecutor]:
    """Niced processes to send from, beside the probe. After the block: its times, and whether the server is well."""
    context = multiprocessing.get_context("spawn")
    waits_s, stop = context.Queue(), context.Event()
    probe = context.Process(target=_probe, args=(url, stop, waits_s), daemon=True)
    probe.start()
    with ProcessPoolExecutor(num_senders, context, os.nice, (_SENDER_NICENESS,)) as senders:
        yield senders
    stop.set()
    findings.waits_s = waits_s.get(timeout=_PATIENCE_S)
    probe.join(_PATIENCE_S)
    findings.well = _is_well(url)


def run_mixes(url: str, pid: int, seed: int, wanted: str = "") -> list[str]:
    """Print the table of mixes with `wanted` in their names; every promise that was broken, one line each."""
    problems: list[str] = []
    growth_bytes = 0
    print("| mix | answers | median | p99 | longest | memory |\n|---|---|---|---|---|---|")
    for name, make in MIXES.items():
        if wanted not in name:
            continue
        findings = run_mix(url, pid, make(random.Random(f"{seed} {name}")))
        print(findings.row(name), flush=True)
        growth_bytes += findings.growth_bytes
        problems += [f"{name}: {problem}" for problem in findings.problems(max_growth_bytes=MAX_MIXES_GROWTH_BYTES)]
        if findings.quantile_ms(0.99) > MAX_P99_S * 1e3:
            problems.append(f"{name}: p99 is {findings.quantile_ms(0.99):.0f} ms: at most {MAX_P99_S * 1e3:.0f}")
    if growth_bytes > MAX_MIXES_GROWTH_BYTES:
        problems.append(f"memory grew by {growth_bytes / 2**20:.0f} MiB over all mixes")
    return problems


def _send_at_once(url: str, requests: list[Request]) -> list[tuple[int, str]]:
    def send(request: Request) -> tuple[int, str]:
        path, body = request
        with httpx.Client(timeout=_PATIENCE_S * 5) as http:
            status, text = _ask(http, url + path, json.dumps(body).encode())
            return status, text[:200]

    with ThreadPoolExecutor(len(requests)) as threads:
        return list(threads.map(send, requests))


def resident_bytes(pid: int) -> int:
    """Resident memory of a process and of all below it; the least of some readings, after it had time to rest."""
    process, readings = psutil.Process(pid), []
    for _ in range(10):
        time.sleep(0.5)  # memory goes back to the system when it likes; nothing tells when
        readings.append(sum(each.memory_info().rss for each in (process, *process.children(recursive=True))))
    return min(readings)


def _is_well(url: str) -> bool:
    deadline = time.monotonic() + _PATIENCE_S
    while time.monotonic() < deadline:
        if httpx.get(f"{url}/health", timeout=_PATIENCE_S, trust_env=False).status_code == 200:
            answer = httpx.post(f"{url}/v1/completions", json=_PROBE, timeout=_PATIENCE_S, trust_env=False)
            return answer.status_code == 200
        time.sleep(0.2)  # nothing but asking tells that the server is well
    return False


_PROBE = {"prompt": "bada do", "max_tokens": 2, "temperature": 0}


def _probe(url: str, stop: Any, results: Any) -> None:
    """Time a small request again and again; a full server (429) is asked again at once."""
    waits_s = []
    with httpx.Client(timeout=_PATIENCE_S, trust_env=False) as http:
        while not stop.is_set():
            started_s = time.perf_counter()
            answer = http.post(f"{url}/v1/completions", json=_PROBE)
            assert answer.status_code in {200, 429}, answer.text
            waits_s.append(time.perf_counter() - started_s)
            time.sleep(0.005)  # between two requests: the probe measures the load and must not be it
    results.put(waits_s)


def _send(url: str, numbers: range) -> tuple[Counter[int], list[str]]:
    """Send the bodies of these seeds, one after the other; how often each status came, and failures."""
    statuses: Counter[int] = Counter()
    failures: list[str] = []
    with httpx.Client(timeout=_PATIENCE_S, trust_env=False) as http:
        for number in numbers:
            path, content = random_body(random.Random(number))
            status, text = _ask(http, url + path, content)
            statuses[status] += 1
            if status == 0 or status >= 500:
                failures.append(f"body {number} to {path}: {status} {text[:200]}")
    return statuses, failures


def _ask(http: httpx.Client, url: str, content: bytes) -> tuple[int, str]:
    """Status (0: none came) and text; an error within a stream counts with the status it would have had."""
    try:
        answer = http.post(url, content=content, headers={"content-type": "application/json"})
    except httpx.WriteError:
        return 413, "closed while the body was sent"  # the refusal came first, and the rest was not read
    except httpx.HTTPError as error:
        return 0, repr(error)
    if answer.status_code == 200 and '"type":"server_error"' in answer.text:
        return 500, answer.text[-400:]
    return answer.status_code, answer.text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--bodies", type=int, default=10_000, help="how many; the first seed's number counts up")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=("bodies", "mixes"), help="default: both")
    parser.add_argument("--mix", default="", metavar="TEXT", help="only mixes with this in their names, no bodies")
    arguments = parser.parse_args()
    if arguments.mix and (arguments.only == "bodies" or not any(arguments.mix in name for name in MIXES)):
        parser.error(f"--mix {arguments.mix!r}: no mix has that in its name, or --only bodies leaves them all out")
    problems: list[str] = []
    options = ("--layout", "disaggregated", "--kv-bytes", "16MiB")
    try:
        with TemporaryDirectory() as folder, serving_here(arguments.model, Path(folder), *options) as facts:
            finished = False
            try:
                if arguments.only != "mixes" and not arguments.mix:
                    findings = fuzz(facts["url"], facts["pid"], arguments.bodies, arguments.seed)
                    print(findings.summary())
                    problems += findings.problems()
                if arguments.only != "bodies":
                    problems += run_mixes(facts["url"], facts["pid"], arguments.seed, arguments.mix)
                finished = True
            finally:
                if problems or not finished:
                    log = end_of(Path(folder) / "server.log", 10_000)
                    print(f"the end of the server's log:\n{log}", file=sys.stderr)
    except UserError as error:
        sys.exit(f"error: {error}")
    for problem in problems:
        print(f"FAILED: {problem}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
