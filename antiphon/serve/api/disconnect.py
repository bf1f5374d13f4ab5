"""Work that stops when the client hangs up.

The web server reports a closed connection only to somebody who listens, and sending to one fails in silence. So one
task works and one listens, for the whole request; whichever is first ends the other.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

from antiphon.serve.api.errors import ApiError

_Result = TypeVar("_Result")


class ClientGone(ApiError):
    """The client closed the connection; nobody will read this."""

    def __init__(self) -> None:
        super().__init__(499, "the client closed the connection")


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, _Result]) -> _Result:
    """The result of `work`, or `ClientGone` with `work` cancelled and finished. The request's body must be read
    before."""
    working = asyncio.ensure_future(work)
    listening = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((working, listening), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientGone
    finally:
        working.cancel()
        listening.cancel()
        await asyncio.gather(working, listening, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
