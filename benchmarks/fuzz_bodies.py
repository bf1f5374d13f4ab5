"""Send hostile request bodies to a server and watch what they do to others.

    python benchmarks/fuzz_bodies.py MODEL [--bodies 10000] [--seed 0]

Method
1. `antiphon serve MODEL` runs in a process of its own, attention and experts apart.
2. Bodies come from `hostile_bodies`; the same seed gives the same ones.
3. Four senders share them, each in a process of its own. They are niced, as an attacker has another machine.
4. All the while one more process asks for two tokens, again and again, and times each answer.
5. Memory is that of the server's process and of its children, after the first bodies and at the end. The KV cache is
   small enough for the first bodies to fill it: a larger one is reserved at the start and becomes resident later.

It fails (exit 1) at an answer of 5xx, also within a stream, at no answer, at a server that is not well afterwards, at a
parallel request that took more than 250 ms, and at memory that grew by more than 64 MiB.

Rejected: generating from the OpenAPI description (a test does that, but it knows no sizes); a coverage-guided fuzzer,
which would find paths, and what is looked for here is time and memory.
"""

import argparse
import json
import multiprocessing
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
from hostile_bodies import random_body

NUM_SENDERS = 4
MAX_STALL_S = 0.25
MAX_GROWTH_BYTES = 64 * 2**20
_WARM_UP_BODIES = 200  # per sender, before memory is read for the first time
_PATIENCE_S = 120.0
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

    def summary(self) -> str:
        waits = sorted(self.waits_s)
        shares = (("median", 0.5), ("p99", 0.99), ("longest", 1.0))
        quantiles = ", ".join(f"{name} {waits[int(share * (len(waits) - 1))] * 1e3:.1f} ms" for name, share in shares)
        answers = ", ".join(f"{status}: {count}" for status, count in sorted(self.statuses.items()))
        return (
            f"answers {answers}\nparallel request ({len(waits)} times): {quantiles}\n"
            f"memory {self.growth_bytes / 2**20:+.0f} MiB"
        )


def fuzz(url: str, pid: int, num_bodies: int, seed: int) -> Findings:
    """Send `num_bodies` to the server at `url`, whose process is `pid`. Blocks until all are answered."""
    context = multiprocessing.get_context("spawn")
    results: Any = context.Queue()
    warm = context.Barrier(NUM_SENDERS + 1)
    stop = context.Event()
    probe = context.Process(target=_probe, args=(url, stop, results), daemon=True)
    senders = [
        context.Process(target=_send, args=(url, seed + first, num_bodies, warm, results), daemon=True)
        for first in range(NUM_SENDERS)
    ]
    for process in (probe, *senders):
        process.start()
    warm.wait(_PATIENCE_S * 4)
    before = resident_bytes(pid)
    warm.wait(_PATIENCE_S)
    findings = Findings()
    for _ in senders:
        statuses, failures = results.get(timeout=3600)
        findings.statuses.update(statuses)
        findings.failures += failures
    stop.set()
    findings.waits_s = results.get(timeout=_PATIENCE_S)
    for process in (probe, *senders):
        process.join(_PATIENCE_S)
    findings.failures = findings.failures[:20]
    findings.well = _is_well(url)
    findings.growth_bytes = resident_bytes(pid) - before
    return findings


def resident_bytes(pid: int) -> int:
    """Resident memory of a process and of all below it; the least of some readings, after it had time to rest."""

    def reading() -> int:
        process = psutil.Process(pid)
        return sum(each.memory_info().rss for each in (process, *process.children(recursive=True)))

    readings = []
    for _ in range(10):
        time.sleep(0.5)  # memory goes back to the system when it likes; nothing tells when
        readings.append(reading())
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


def _send(url: str, first: int, num_bodies: int, warm: Any, results: Any) -> None:
    statuses: Counter[int] = Counter()
    failures: list[str] = []
    os.nice(_SENDER_NICENESS)
    numbers = range(first, first + num_bodies, NUM_SENDERS)
    num_warm = min(_WARM_UP_BODIES, len(numbers) // 4)
    with httpx.Client(timeout=_PATIENCE_S, trust_env=False) as http:
        for position, number in enumerate(numbers):
            if position == num_warm:
                warm.wait(_PATIENCE_S * 4)
                warm.wait(_PATIENCE_S)
            path, content = random_body(random.Random(number))
            status, text = _ask(http, url + path, content)
            statuses[status] += 1
            if status == 0 or status >= 500:
                failures.append(f"body {number} to {path}: {status} {text[:200]}")
    results.put((statuses, failures))


def _wait_until_ready(server: subprocess.Popen[bytes], ready: Path) -> Any:
    """What the server says of itself in the file `ready`."""
    deadline = time.monotonic() + _PATIENCE_S
    while not ready.exists():
        if server.poll() is not None or time.monotonic() > deadline:
            sys.exit(f"the server did not start within {_PATIENCE_S:.0f} s; what it wrote stands above")
        time.sleep(0.1)  # nothing but the file tells that the server is ready
    return json.loads(ready.read_text(encoding="utf-8"))


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
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        ready = Path(folder) / "ready.json"
        command = [sys.executable, "-m", "antiphon.cli.main", "serve", str(arguments.model), "--port", "0"]
        command += ["--json", str(ready), "--layout", "disaggregated", "--kv-bytes", "16MiB"]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL) as server:
            try:
                facts = _wait_until_ready(server, ready)
                findings = fuzz(facts["url"], server.pid, arguments.bodies, arguments.seed)
            finally:
                server.terminate()
    print(findings.summary())
    problems = findings.problems()
    for problem in problems:
        print(f"FAILED: {problem}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
