"""What every endpoint needs, in one object hung on the application; there are no globals.

It also keeps count: how many requests run right now, and whether the server is on its way out; and the answers that a
client can go on from (`ResponseStore`).
"""

import asyncio
import ipaddress
import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from fastapi import Request

from antiphon.base.system import MemoryTrimmer
from antiphon.serve.api.answer_json import TokenJson, encode_json
from antiphon.serve.api.dashboard import Dashboard
from antiphon.serve.api.errors import shutting_down, too_busy
from antiphon.serve.api.input_limits import BodyMemory, input_limits
from antiphon.serve.api.metrics import ServerMetrics
from antiphon.serve.api.settings import ServerSettings
from antiphon.serve.engine_api import AsyncEngine
from antiphon.serve.text.dialects import dialect_of
from antiphon.serve.text.structured import GrammarCompiler
from antiphon.serve.text.text_queue import TextLimits
from antiphon.serve.text.text_service import TextService
from antiphon.serve.text.tokenizer import TextTokenizer

_MAX_KEPT_BYTES = 64 * 1024 * 1024
_STOP_TIMEOUT_S = 10.0  # of an answer in the background
_SLICE_S = 0.0005
_SMALL_SHARE = 8  # one part in eight of the engine's line is for requests with a single answer


@dataclass(frozen=True)
class StoredResponse:
    """`messages`: the chat without instructions, the answer its last turn. `response`: as it was sent."""

    messages: list[dict[str, Any]]
    response: dict[str, Any]
    num_bytes: int


class ResponseStore:
    """The answers that can be gone on from: in memory, the newest, up to a limit of bytes. The oldest come first. Used
    from the event loop's thread only.

    An answer belongs to its client: an API key, or an address where there are no keys. A server that ends, or another
    one behind the same name, does not have it; clients that must not lose a conversation send it along
    (`store: false`). Rejected: a file, which would keep on disk what users say."""

    def __init__(self, max_bytes: int = _MAX_KEPT_BYTES) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self.working: dict[tuple[str, str], asyncio.Task[None]] = {}  # makes an answer in the background
        self._stored: OrderedDict[tuple[str, str], StoredResponse] = OrderedDict()  # by client and id
        self._items: dict[tuple[str, str], dict[str, Any]] = {}  # of those, by client and the item's own id

    def add(self, client: str, messages: list[dict[str, Any]], response: dict[str, Any]) -> None:
        """Keep an answer. The oldest go where it does not fit; one that is larger than the limit is not kept."""
        num_bytes = len(encode_json([messages, response]))
        self.remove(client, response["id"])
        if num_bytes > self._max_bytes:
            return
        self._stored[client, response["id"]] = StoredResponse(messages, response, num_bytes)
        self._items |= {(client, item["id"]): item for item in response.get("output", ())}
        self._num_bytes += num_bytes
        while self._num_bytes > self._max_bytes:
            self.remove(*next(iter(self._stored)))

    def get(self, client: str, response_id: str) -> StoredResponse | None:
        """The client's answer with this id, if it is still kept."""
        return self._stored.get((client, response_id))

    def item(self, client: str, item_id: str) -> dict[str, Any] | None:
        """The item with this id of one of the client's answers that are still kept."""
        return self._items.get((client, item_id))

    async def stop_working(self, client: str, response_id: str) -> None:
        """End the making of an answer, if it is still being made; what came of it is kept."""
        working = self.working.get((client, response_id))
        if working is not None:
            working.cancel()
            await asyncio.wait((working,), timeout=_STOP_TIMEOUT_S)

    def remove(self, client: str, response_id: str) -> bool:
        """Forget an answer; False if the client has none of this id."""
        found = self._stored.pop((client, response_id), None)
        if found is None:
            return False
        self._num_bytes -= found.num_bytes
        for item in found.response.get("output", ()):
            self._items.pop((client, item["id"]), None)
        return True


class Pace:
    """Cuts one request's work on the event loop into slices: after each half millisecond it waits for its turn, and all
    requests with as much to do share one turn an iteration of the loop. So a large request, or a hundred of them, delay
    a small one by some milliseconds; one that never works for long never waits.

    Each piece of work is a block: ``async with pace: ...``, without `await` in it. Counted is processor time, or a
    request would wait because another program has taken the core."""

    def __init__(self, turns: asyncio.Lock) -> None:
        self._turns = turns
        self._spent_s = 0.0
        self._began_s = 0.0

    async def __aenter__(self) -> None:
        await self.wait()
        self._began_s = time.thread_time()

    async def __aexit__(self, *_: object) -> None:
        self._spent_s += time.thread_time() - self._began_s

    async def wait(self) -> None:
        """Wait for a turn, if the last slice is spent."""
        if self._spent_s >= _SLICE_S:
            async with self._turns:
                await asyncio.sleep(0)
            self._spent_s = 0.0


class ApiContext:
    """Engine, tokenizer, settings and the requests in flight. Used from the event loop's thread only.

    `large_body` is held while a large request body is decoded."""

    def __init__(
        self,
        *,
        engine: AsyncEngine,
        tokenizer: TextTokenizer,
        settings: ServerSettings,
        grammars: GrammarCompiler | None,
    ) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.texts = TextService(tokenizer, TextLimits.for_context(engine.info.max_model_len))
        self.dialect = dialect_of(
            tokenizer.chat_template,
            reasoning_parser=settings.reasoning_parser,
            tool_parser=settings.tool_parser,
        )
        self.settings = settings
        self.limits = input_limits(settings, engine.info.max_model_len, engine.info.vocab_size, tokenizer)
        self._turns = asyncio.Lock()
        self.token_json = TokenJson(tokenizer)
        self.trimmer = MemoryTrimmer()
        self.body_memory = BodyMemory(self.limits.max_body_bytes, self.trimmer)
        self.large_body = asyncio.Lock()
        self.response_store = ResponseStore()
        self.metrics = ServerMetrics(engine, settings.predicted)
        self.grammars = grammars
        self.model_names = settings.served_model_names or (engine.info.model_name,)
        self.model_name = self.model_names[0]
        self.dashboard = Dashboard(engine, self.metrics, self.model_name)
        self.started_at_s = int(time.time())
        self.draining = False
        self.num_active = 0
        self.num_in_line = 0  # answers that the engine has not begun
        self._idle = asyncio.Event()
        self._idle.set()

    def pace(self) -> Pace:
        """The pace of one request."""
        return Pace(self._turns)

    def enter(self) -> None:
        """Count one more running request, or refuse it: 503 when draining, 429 at the limit."""
        if self.draining:
            raise shutting_down()
        limit = self.settings.max_streams
        if self.num_active >= limit:
            raise too_busy(f"{self.num_active} requests are running, the limit is {limit}: try again later", 1.0)
        self.num_active += 1
        self._idle.clear()

    def leave(self) -> None:
        """The counterpart of `enter`, once the response is out or the client is gone."""
        self.num_active -= 1
        if self.num_active == 0:
            self._idle.set()

    def check_line(self, num_answers: int) -> None:
        """429 for a request whose `num_answers` would fill the engine's line, of which a part is kept for requests
        with a single answer. It may always fill an empty line: then the engine decides."""
        limit = self.engine.info.max_waiting
        limit -= limit // _SMALL_SHARE
        if num_answers > 1 and self.num_in_line and self.num_in_line + num_answers > limit:
            raise too_busy(
                f"{self.num_in_line} answers are waiting, the limit for requests with several is {limit}: this one has"
                f" {num_answers}; try again later",
                1.0,
            )

    @contextmanager
    def running(self) -> Iterator[None]:
        """`enter` and `leave` around a request whose answer is ready at the end of the block."""
        self.enter()
        try:
            yield
        finally:
            self.leave()

    async def wait_idle(self, timeout_s: float) -> bool:
        """Wait until no request generates; False when some still do at the timeout."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True


def context_of(request: Request) -> ApiContext:
    """The context of the application that serves `request`."""
    context = request.app.state.context
    assert isinstance(context, ApiContext)
    return context


def client_of(request: Request) -> str:
    """Whose request it is, where clients take turns: the API key where keys are used, else the peer's address, of
    IPv6 the half that names its network."""
    if context_of(request).settings.api_keys:
        key = request.headers.get("authorization", "").partition(" ")[2] or request.headers.get("x-api-key", "")
        return key.strip()
    host = request.client.host if request.client is not None else ""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:  # a Unix socket, or a name
        return host
    return host if address.version == 4 else str(int(address) >> 64)
