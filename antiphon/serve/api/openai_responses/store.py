"""The answers that can be gone on from: in memory, the newest, up to a limit of bytes.

An entry is the conversation up to its answer, and the answer as it was sent. It belongs to its client: an API key, or
an address where there are no keys. A server that ends, or another one behind the same name, does not have them; clients
that must not lose a conversation send it along (`store: false`). Rejected: a file, which would keep on disk what users
say.
"""

import asyncio
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from antiphon.serve.api.answer_json import encode_json

_MAX_BYTES = 64 * 1024 * 1024
_STOP_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class StoredResponse:
    """`messages`: the chat without instructions, the answer its last turn. `response`: as it was sent."""

    messages: list[dict[str, Any]]
    response: dict[str, Any]
    num_bytes: int


class ResponseStore:
    """Answers of all clients, the oldest first. Used from the event loop's thread only."""

    def __init__(self, max_bytes: int = _MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self.working: dict[tuple[str, str], asyncio.Task[None]] = {}  # makes an answer in the background
        self._stored: OrderedDict[tuple[str, str], StoredResponse] = OrderedDict()  # by client and id

    def add(self, client: str, messages: list[dict[str, Any]], response: dict[str, Any]) -> None:
        """Keep an answer. The oldest go where it does not fit; one that is larger than the limit is not kept."""
        num_bytes = len(encode_json([messages, response]))
        self.remove(client, response["id"])
        if num_bytes > self._max_bytes:
            return
        self._stored[client, response["id"]] = StoredResponse(messages, response, num_bytes)
        self._num_bytes += num_bytes
        while self._num_bytes > self._max_bytes:
            _, oldest = self._stored.popitem(last=False)
            self._num_bytes -= oldest.num_bytes

    def get(self, client: str, response_id: str) -> StoredResponse | None:
        """The client's answer with this id, if it is still kept."""
        return self._stored.get((client, response_id))

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
        return True
