"""What the operator of the server decides: where it listens, who may use it, and how much one request may ask
(`input_limits` is what follows from that)."""

import re
from dataclasses import dataclass, field
from typing import Any

from antiphon.base.errors import UserError
from antiphon.serve.config import MAX_TIMEOUT_S
from antiphon.serve.text.dialects import dialect_of
from antiphon.specs.plan import Predicted


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """Limits and identity of one server. Everything has a safe default; nothing here concerns the model.

    `api_keys` empty: no key is asked for. `allowed_hosts`: its own names (`middlewares`). `cors_origins`: pages of
    other servers that may use this one, ``https://host``, or ``*``. `served_model_names`: the first is the one that
    answers have; empty: the engine's. `model_root`: where the model comes from. `own_chat_template`: in place of the
    checkpoint's. `chat_template_kwargs`: variables of the template, unless a request sets them. `max_streams` counts
    HTTP requests that generate, streaming or not. `max_prompt_tokens` None: only the model's context limits prompts.
    `reasoning_parser` and `tool_parser` None: the chat template shows how the model marks reasoning and calls.
    `root_path`: what a proxy puts before the paths, ``/models/a``; requests may have it or not.
    `return_tokens_as_token_ids` and `force_include_usage` (in each event of a stream): whether answers have them that
    were not asked for it.
    `max_body_bytes` None: what a request that fits the context may need (`input_limits`). `max_answer_bytes` limits one
    answer, estimated before it is made (`parameters`). `predicted`: what the loaded plan promised, None
    without a plan.

    A connection has `header_timeout_s` from its first byte (a new one: from its begin) to a request's complete head. It
    may be idle for `keep_alive_timeout_s` between requests. A client must take some of what waits for it within
    `send_timeout_s`. An address may have `max_slow_bodies` requests whose body is late. `max_unread_bytes` of a
    streamed answer may wait for a client that is slower than the engine.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    served_model_names: tuple[str, ...] = ()
    model_root: str | None = None
    own_chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    reasoning_parser: str | None = None
    tool_parser: str | None = None
    root_path: str = ""
    return_tokens_as_token_ids: bool = False
    force_include_usage: bool = False
    max_body_bytes: int | None = None
    body_timeout_s: float = 60.0
    header_timeout_s: float = 10.0
    keep_alive_timeout_s: float = 75.0
    send_timeout_s: float = 60.0
    max_unread_bytes: int = 1024 * 1024
    max_answer_bytes: int = 64 * 1024 * 1024
    max_connections: int = 2048
    max_slow_bodies: int = 128
    max_prompt_tokens: int | None = None
    max_streams: int = 1024
    max_prompts_per_request: int = 128
    drain_timeout_s: float = 30.0
    predicted: Predicted | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise UserError(f"--port is {self.port}: use 1 to 65535, or 0 for any free port")
        for origin in self.cors_origins:
            if origin != "*" and not re.fullmatch(r"https?://[^/\s]+", origin):
                raise UserError(
                    f"--cors-origin {origin!r} is no origin: write for example https://chat.example.com, or *"
                )
        if not re.fullmatch(r"(/[A-Za-z0-9._~-]+)*", self.root_path):
            raise UserError(
                f"--root-path {self.root_path!r} is no path: write for example /models/a, without / at the end"
            )
        dialect_of("", reasoning_parser=self.reasoning_parser, tool_parser=self.tool_parser)  # knows the names
        counts = (
            ("--max-body-bytes", 1 if self.max_body_bytes is None else self.max_body_bytes),
            ("--max-streams", self.max_streams),
            ("--max-connections", self.max_connections),
            ("--max-slow-bodies", self.max_slow_bodies),
            ("max_unread_bytes", self.max_unread_bytes),
            ("--max-answer-bytes", self.max_answer_bytes),
            ("--max-prompt-tokens", 1 if self.max_prompt_tokens is None else self.max_prompt_tokens),
            ("max_prompts_per_request", self.max_prompts_per_request),
        )
        for name, value in counts:
            if value < 1:
                raise UserError(f"{name} is {value}: it must be at least 1")
        if not 0 <= self.drain_timeout_s <= MAX_TIMEOUT_S:
            raise UserError(f"--drain-timeout is {self.drain_timeout_s:g} s: it must be 0 to {MAX_TIMEOUT_S:.0f}")
        timeouts = (
            ("header_timeout_s", self.header_timeout_s),
            ("keep_alive_timeout_s", self.keep_alive_timeout_s),
            ("--send-timeout", self.send_timeout_s),
        )
        for name, timeout_s in timeouts:
            if not 0 < timeout_s <= MAX_TIMEOUT_S:
                raise UserError(f"{name} is {timeout_s:g} s: it must be above 0 and at most {MAX_TIMEOUT_S:.0f}")
