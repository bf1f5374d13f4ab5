"""The processes that work on long texts: the same ids and texts as in process, and their limits one by one."""

import asyncio
import contextlib
import errno
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import psutil
import pytest

from antiphon.base.errors import UserError
from antiphon.base.units import format_bytes
from antiphon.serve.engine_api import NoRoom, QueueFull, RequestTooLong, ShuttingDown
from antiphon.serve.text import text_queue
from antiphon.serve.text.text_queue import TextLimits, WaitingBytes
from antiphon.serve.text.text_service import TextService
from tests.serve.api_harness import fake_engine, live, small_tokenizer, text_pids
from tests.serve.fork_server import PROGRAMS
from tests.serve.test_chat_templates import Running, with_template
from tests.waiting import wait_until

ROOT = Path(__file__).parents[2]
LONG = "some words " * 100_000  # most of a second for the tokenizer
SLOW = "a" * 3_000_000  # one word without an end: seconds for the tokenizer
TEXTS = ["", "hello", "中文 and 😀, " * 50, "  spaces\n\n" * 9000, "x" * 40_000]


@pytest.fixture(scope="module")
def service() -> Iterator[TextService]:
    with Running(small_tokenizer()) as running:
        yield running


def encode(service: TextService, *texts: str, max_tokens: int | None = None) -> list[list[int]]:
    return asyncio.run(service.encode(list(texts), add_special_tokens=True, max_tokens=max_tokens))


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_ids_and_texts_are_those_of_the_tokenizer(service: TextService, text: str) -> None:
    tokenizer = small_tokenizer()
    ids = tokenizer.encode(text, add_special_tokens=True)
    assert encode(service, text, text) == [ids, ids]
    assert encode(service, text, max_tokens=len(ids)) == [ids]
    for skip in (True, False):
        decoded = asyncio.run(service.decode([*ids, 511], skip_special_tokens=skip))
        assert decoded == tokenizer.decode([*ids, 511], skip_special_tokens=skip)


def test_a_text_that_cannot_fit_is_refused_after_its_beginning(service: TextService) -> None:
    def processor_s(num_phrases: int, max_tokens: int | None) -> float:
        process = psutil.Process(text_pids(service)[-1])
        before = process.cpu_times()
        with contextlib.suppress(RequestTooLong):
            encode(service, "hello, world " * num_phrases, max_tokens=max_tokens)
            assert max_tokens is None, "it fits"
        after = process.cpu_times()
        return after.user + after.system - before.user - before.system

    with pytest.raises(RequestTooLong, match="has more than 1000 tokens, which is the limit"):
        encode(service, "hello, world " * 500_000, max_tokens=1000)
    assert processor_s(500_000, 1000) < 5 * processor_s(10_000, None), "all of it takes 50 times as long"


def test_a_short_text_does_not_wait_for_a_long_one() -> None:
    async def both(service: TextService) -> list[str]:
        done: list[str] = []

        async def run(text: str, name: str) -> None:
            with contextlib.suppress(UserError):
                await service.encode([text], add_special_tokens=False, max_tokens=None)
            done.append(name)

        long = asyncio.create_task(run(SLOW, "long"))
        await asyncio.sleep(0.05)
        await run("hello " * 1000, "short")
        await long
        return done

    with Running(small_tokenizer(), tokenizer_timeout_s=5.0) as service:
        encode(service, "x")
        assert asyncio.run(both(service)) == ["short", "long"]


def test_the_limit_on_time_names_itself_and_ends_one_request_only() -> None:
    limits = {"tokenizer_timeout_s": 2.0, "memory_bytes": 4 * 2**30}  # a busy machine needs 2 s for the short one
    with Running(small_tokenizer(), **limits) as service:
        with pytest.raises(UserError, match=r"the tokenizer took longer than 2 s, the limit: send fewer or shorter"):
            encode(service, *[SLOW] * 4)
        assert encode(service, "x" * 40_000)


def test_the_limit_on_memory_names_itself_and_ends_one_request_only() -> None:
    with Running(small_tokenizer(), memory_bytes=64 * 2**20, tokenizer_timeout_s=240.0) as service:
        with pytest.raises(UserError, match=r"memory"):
            encode(service, "hello world, " * 600_000)
        assert encode(service, "hello " * 6000)


def test_more_than_may_wait_are_refused_and_no_request_waits_without_an_end() -> None:
    async def flood(service: TextService) -> list[object]:
        asked = [service.encode([SLOW], add_special_tokens=False, max_tokens=None) for _ in range(5)]
        return list(await asyncio.gather(*asked, return_exceptions=True))

    size = len(SLOW)
    limits = {"tokenizer_timeout_s": 1.0, "max_waiting_bytes": 3 * size, "max_wait_s": 0.5}
    with Running(small_tokenizer(), **limits) as service:
        wait_until(lambda: is_ready(service), "the processes have started")
        errors = asyncio.run(flood(service))
        full = [error for error in errors if isinstance(error, QueueFull)]
        limit = format_bytes(3 * size)
        refusal = f"requests of this client of {limit} wait for the tokenizer, the limit is {limit}"
        assert sum(refusal in str(error) for error in full) == 2
        assert any("s for the tokenizer, the limit is 0.5 s" in str(error) for error in full)
        assert sum("took longer than 1 s" in str(error) for error in errors) == 1
        wait_until(lambda: is_ready(service), "the process is replaced")


def test_the_line_is_limited_by_memory_and_not_by_a_number_of_texts() -> None:
    """At most 64 of these could wait, whatever the limit on requests was."""
    waiting = WaitingBytes(64 * 2**20)
    for _ in range(1024):
        waiting.add("a", 50_000, "a template")
    waiting.add("b", 200, "a template")
    with pytest.raises(QueueFull, match=r"of this client of 48\.8 MiB wait for a template, the limit is 64\.0 MiB"):
        waiting.add("a", 16 * 2**20, "a template")
    for _ in range(1024):
        waiting.remove("a", 50_000)
    waiting.add("a", 10**8, "a template")  # alone


def test_one_client_with_thirty_texts_delays_another_by_one_of_them() -> None:
    """In each process: texts of 3,000 characters, of 20,000, of 40,000; and requests of several, which give way between
    two of them."""

    async def beside(service: TextService, size: int, num_texts: int) -> int:
        done: list[str] = []

        async def run(client: str, texts: list[str]) -> None:
            await service.encode(texts, add_special_tokens=False, max_tokens=None, client=client)
            done.append(client)

        many = [asyncio.create_task(run("a", ["ab " * (size // 3)] * num_texts)) for _ in range(30)]
        await asyncio.sleep(0)
        await run("b", ["cd " * (size // 3)])
        before = done.index("b")
        for task in many:
            task.cancel()
        await asyncio.gather(*many, return_exceptions=True)
        return before

    with Running(small_tokenizer()) as service:
        wait_until(lambda: is_ready(service), "the processes have started")
        for size, num_texts in ((3000, 1), (20_000, 1), (40_000, 1), (40_000, 3)):
            before = asyncio.run(beside(service, size, num_texts))
            assert before <= 5, f"{before} of 30 requests of {num_texts} texts of {size} characters were done before"


def test_an_operating_system_that_refuses_a_process_costs_requests_and_not_the_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with Running(small_tokenizer()) as service:
        assert encode(service, "x")
        pid = text_pids(service)[0]
        with monkeypatch.context() as patch:
            for refusal in (errno.EMFILE, errno.ENOMEM, errno.EAGAIN):
                refusing = Mock(wraps=subprocess, TimeoutExpired=subprocess.TimeoutExpired)
                refusing.Popen.side_effect = OSError(refusal, os.strerror(refusal))
                patch.setattr(text_queue, "subprocess", refusing)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                wait_until(lambda: not psutil.pid_exists(pid), "it has ended")
                with pytest.raises(NoRoom, match=r"the process for the tokenizer does not start now: "):
                    encode(service, "x")
        assert encode(service, "x")


def is_ready(service: TextService) -> bool:
    with contextlib.suppress(QueueFull, UserError):  # it waited for the process to start, or for a core
        return bool(encode(service, "x" * 40_000))
    return False


def test_a_job_whose_process_is_killed_is_done_by_the_next_one() -> None:
    async def kill_at_work(service: TextService) -> list[list[int]]:
        asked = asyncio.ensure_future(service.encode([LONG], add_special_tokens=True, max_tokens=None))
        await asyncio.sleep(0.1)
        os.kill(text_pids(service)[-1], signal.SIGKILL)
        return await asked

    with Running(small_tokenizer()) as service:
        undisturbed = encode(service, LONG)
        assert asyncio.run(kill_at_work(service)) == undisturbed


def test_closing_tells_whoever_waits() -> None:
    async def close_under_them(service: TextService) -> list[object]:
        asked = [
            asyncio.ensure_future(service.encode([SLOW], add_special_tokens=False, max_tokens=None)) for _ in range(3)
        ]
        await asyncio.sleep(0.1)
        service.close()
        return list(await asyncio.gather(*asked, return_exceptions=True))

    with Running(small_tokenizer()) as service:
        encode(service, "x" * 40_000)
        pids = text_pids(service)
        assert [type(error) for error in asyncio.run(close_under_them(service))] == [ShuttingDown] * 3
        assert not any(map(psutil.pid_exists, pids))


PROGRAM = """
import asyncio, sys
from tests.serve.api_harness import fake_engine, live, small_tokenizer, text_pids
from antiphon.serve.text.text_service import TextService
service = TextService(small_tokenizer())
service.start()
asyncio.run(service.encode(["x" * 40_000], add_special_tokens=False, max_tokens=None))
asyncio.run(service.encode(["x"], add_special_tokens=False, max_tokens=None))
print(*text_pids(service), flush=True)
asyncio.run(service.encode(["a" * 3_000_000] * 20, add_special_tokens=False, max_tokens=None))
"""


def test_the_processes_die_with_a_server_that_is_killed() -> None:
    with PROGRAMS.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True, cwd=ROOT) as server:
        assert server.stdout is not None
        processes = [psutil.Process(int(pid)) for pid in server.stdout.readline().split()]
        assert len(processes) == 3
        server.send_signal(signal.SIGKILL)
        gone, alive = psutil.wait_procs(processes, timeout=20)
        assert len(gone) == 3, alive


def test_the_processes_start_and_end_with_the_server() -> None:
    with live(fake_engine()) as server:
        assert server.chat(max_tokens=1).status_code == 200
        texts = server.server.config.app.state.context.texts  # type: ignore[union-attr]
        wait_until(lambda: len(text_pids(texts)) == 3, "the processes have started")
        pids = text_pids(texts)
        assert all(map(psutil.pid_exists, pids))
    assert not any(map(psutil.pid_exists, pids))


def test_a_signal_to_the_group_is_for_the_server_to_decide() -> None:
    with Running(small_tokenizer()) as service:
        encode(service, "x" * 40_000)
        pids = text_pids(service)
        for pid in pids:
            os.kill(pid, signal.SIGINT)
            os.kill(pid, signal.SIGTERM)
        assert encode(service, "x" * 40_000)
        assert set(pids) <= set(text_pids(service)), "one more may have been started meanwhile"


def test_a_process_that_does_not_start_is_no_fault_of_the_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/bin/false")
    with Running(with_template("x")) as service:
        wait_until(lambda: text_pids(service) == [], "it has failed")
        with pytest.raises(NoRoom, match=r"does not start now: .*connection closed"):
            encode(service, "x" * 40_000)
        assert service.template_problem is None


def test_limits_grow_with_the_context() -> None:
    short, long = TextLimits.for_context(8192), TextLimits.for_context(2**20)
    assert short.tokenizer_timeout_s < long.tokenizer_timeout_s
    assert short.memory_bytes < long.memory_bytes
