"""Answers a file of requests without a server: OpenAI's batch format in, its result format out.

Each line is handed to the application that serves HTTP, so an offline request is checked, limited and answered exactly
as one over HTTP. Results are appended as they come. A later run goes on where an interrupted one ended: what the output
holds is not asked again, except for requests that failed for reasons that pass (429, 5xx) and a last line that was cut.

Rejected: a client of a server on a free port (a second process, a key, and the same bytes twice through a socket).
"""

import asyncio
import json
import os
import uuid
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from starlette.types import ASGIApp

from antiphon.base.errors import UserError, shortened
from antiphon.base.progress import Report
from antiphon.base.system import lock
from antiphon.specs.catalog import a_file_of

BATCH_PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
_MAX_LINE_BYTES = 64 * 1024 * 1024
_NUM_TRIES = 5
_PASSING = (429, 503)
_IN_USE = "another batch writes it: wait for its end, or name another file"


@dataclass
class BatchCounts:
    """What came of the lines: `num_skipped` were answered by an earlier run."""

    num_answered: int = 0
    num_refused: int = 0
    num_skipped: int = 0
    tokens: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True)
class _BatchLine:
    number: int
    custom_id: str
    path: str
    body: bytes


def read_lines(path: Path) -> Iterator[_BatchLine]:
    """The requests of a batch file, one at a time; `UserError` that names the line for what is none."""
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise UserError(f"{path} is no file, and requests are read more than once: write them to a file")
    try:
        with path.open("rb") as file:
            number = 0
            while line := file.readline(_MAX_LINE_BYTES + 1):
                number += 1
                if len(line) > _MAX_LINE_BYTES:
                    raise UserError(f"{path} line {number} has more than {_MAX_LINE_BYTES} bytes")
                if line.strip():
                    yield _read_line(path, number, line)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error


def _read_line(path: Path, number: int, line: bytes) -> _BatchLine:
    where = f"{path} line {number}"
    try:
        request = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where} is not JSON: {error}") from None
    if not isinstance(request, dict) or not isinstance(request.get("body"), dict):
        raise UserError(
            f"{where} has no body: write custom_id, method, url and body, as OpenAI's batch format has them"
        )
    if not isinstance(custom_id := request.get("custom_id"), str):
        raise UserError(f"{where} has no custom_id: give each request a text of its own")
    if request.get("method", "POST") != "POST" or request.get("url") not in BATCH_PATHS:
        raise UserError(
            f"{where} asks for {request.get('method')} {request.get('url')}: use POST {', '.join(BATCH_PATHS)}"
        )
    for key in ("stream", "background"):
        if request["body"].get(key):
            raise UserError(f"{where} has {key}: each line of the answers is a finished answer; leave {key} out")
    try:
        body = json.dumps(request["body"]).encode()
    except RecursionError:
        raise UserError(f"{where} has a body that is nested too deeply: flatten it") from None
    return _BatchLine(number, custom_id, request["url"], body)


def check_requests(path: Path) -> int:
    """How many requests the file has. `UserError` for the first line that is wrong, before anything is computed."""
    seen: dict[str, int] = {}
    with a_file_of("requests", path):
        for line in read_lines(path):
            first = seen.setdefault(line.custom_id, line.number)
            if first != line.number:
                raise UserError(
                    f"{path} lines {first} and {line.number} have the same custom_id {shortened(line.custom_id)!r}"
                )
    if not seen:
        raise UserError(f"{path} holds no requests")
    return len(seen)


@contextmanager
def answers_file(path: Path) -> Iterator[tuple[TextIO, set[str]]]:
    """The answers at `path`, open for more, and the ids of the requests that it has answers for. `UserError` if it
    cannot be written or is no output of a batch, and while another run writes it."""
    if path.exists() and not path.is_file():
        raise UserError(f"{path} is no file: name one, so that a run that was interrupted can go on")
    before = _answered_before(path)
    try:
        output = path.open("a", encoding="utf-8", errors="backslashreplace")  # as JSON writes half a pair
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error}") from error
    try:
        lock(output.fileno(), path, _IN_USE)
        if not os.path.samestat(os.fstat(output.fileno()), path.stat()):  # another run was in between, and has ended
            raise UserError(f"{path}: {_IN_USE}")
        yield output, before
    finally:
        with suppress(OSError):  # each answer was flushed: an error was raised there
            output.close()


def _answered_before(path: Path) -> set[str]:
    if not path.exists():
        return set()
    try:
        with path.open(encoding="utf-8") as old:
            lock(old.fileno(), path, _IN_USE)
            return _keep_answers(old, path)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be gone on with: {error}") from error


def _keep_answers(old: TextIO, path: Path) -> set[str]:
    """Take failures that pass, and a last line without an end, out of the file; the ids of what is left."""
    real = path.resolve()  # a link stays one
    kept_path = real.with_name(f"{real.name}.kept")
    answered: set[str] = set()
    try:
        with kept_path.open("w", encoding="utf-8") as kept:
            for number, line in enumerate(old, 1):
                try:
                    result = json.loads(line)
                    custom_id, status = result["custom_id"], int(result["response"]["status_code"])
                except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
                    if line.endswith("\n"):
                        raise UserError(
                            f"{path} line {number} is no answer of a batch: name another file for the answers"
                        ) from None
                    break  # the run ended within it
                if status < 500 and status not in _PASSING and line.endswith("\n"):
                    answered.add(custom_id)
                    kept.write(line)
        kept_path.replace(real)
    finally:
        kept_path.unlink(missing_ok=True)
    return answered


async def answer_batch(
    app: ASGIApp, requests: Path, output: TextIO, before: Collection[str], num_at_once: int, report: Report
) -> BatchCounts:
    """Answer the requests of a file that `check_requests` found no fault with, but for those answered `before`;
    `report` gets how many are done.

    `UserError` when the output cannot be written; what is written stays."""
    counts = BatchCounts()
    total = check_requests(requests)
    places = asyncio.Semaphore(num_at_once)

    async def answer(line: _BatchLine) -> None:
        try:
            status, body = await _ask(app, line)
            _write(output, line, status, body)
        finally:
            places.release()
        counts.num_answered += status == 200
        counts.num_refused += status != 200
        usage = body.get("usage") or {}
        counts.tokens["prompt"] += usage.get("prompt_tokens", usage.get("input_tokens", 0))
        counts.tokens["completion"] += usage.get("completion_tokens", usage.get("output_tokens", 0))
        report(counts.num_answered + counts.num_refused + counts.num_skipped, total)

    try:
        async with asyncio.TaskGroup() as tasks:
            for line in read_lines(requests):
                if line.custom_id in before:
                    counts.num_skipped += 1
                    continue
                await places.acquire()
                tasks.create_task(answer(line))
    except* OSError as errors:
        problem = errors.exceptions[0]
        raise UserError(f"{output.name} cannot be written: {problem}; the same command goes on from here") from problem
    return counts


def _write(output: TextIO, line: _BatchLine, status: int, body: dict[str, Any]) -> None:
    response = {"status_code": status, "request_id": uuid.uuid4().hex, "body": body}
    result = {"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": line.custom_id, "response": response, "error": None}
    output.write(json.dumps(result, ensure_ascii=False) + "\n")
    output.flush()


async def _ask(app: ASGIApp, line: _BatchLine) -> tuple[int, dict[str, Any]]:
    """Status and answer of one request; one that finds no room is tried again, after as long as it is told."""
    for attempt in range(_NUM_TRIES):
        status, headers, body = await _call(app, line)
        if status not in _PASSING or attempt == _NUM_TRIES - 1:
            break
        await asyncio.sleep(float(headers.get(b"retry-after", b"1")))
    answer: dict[str, Any] = json.loads(body)
    return status, answer


async def _call(app: ASGIApp, line: _BatchLine) -> tuple[int, dict[bytes, bytes], bytes]:
    """One request to the application, as the web server would make it."""
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": line.path,
        "raw_path": line.path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")],
        "client": None,
        "server": ("localhost", 80),
        "state": {},
    }
    incoming = [{"type": "http.request", "body": line.body, "more_body": False}]
    sent: list[Any] = []

    async def receive() -> Any:
        if incoming:
            return incoming.pop()
        return await asyncio.get_running_loop().create_future()  # it does not hang up

    async def send(message: Any) -> None:
        sent.append(message)

    await app(scope, receive, send)
    body = b"".join(message.get("body", b"") for message in sent[1:])
    return sent[0]["status"], dict(sent[0]["headers"]), body
