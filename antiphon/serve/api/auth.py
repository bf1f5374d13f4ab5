"""Asks for an API key before anything else happens: before the body is read, before the route is looked up.

Open without a key are the paths that machines poll and that reveal nothing of what users do: health, version,
metrics and the OpenAPI description.
"""

import hmac

from starlette.types import ASGIApp, Receive, Scope, Send

from antiphon.serve.api.errors import ApiError

OPEN_PATHS = frozenset({"/health", "/version", "/metrics", "/openapi.json"})


class ApiKeyMiddleware:
    """401 unless the request carries ``Authorization: Bearer`` and one of the keys."""

    def __init__(self, app: ASGIApp, keys: tuple[str, ...]) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS or self._is_allowed(scope):
            await self._app(scope, receive, send)
            return
        refusal = ApiError(
            401,
            "missing or wrong API key: send it as Authorization: Bearer <key>",
            code="invalid_api_key",
            headers={"www-authenticate": "Bearer"},
        )
        await refusal.response()(scope, receive, send)

    def _is_allowed(self, scope: Scope) -> bool:
        header: bytes = dict(scope["headers"]).get(b"authorization", b"")
        scheme, _, key = header.partition(b" ")
        # Compare with every key in constant time: timing must not tell how much of a key was right.
        matches = [hmac.compare_digest(key.strip(), known) for known in self._keys]
        return scheme.lower() == b"bearer" and any(matches)
