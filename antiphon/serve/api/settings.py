"""What the operator of the server decides: where it listens, who may use it, and how much one request may ask."""

from dataclasses import dataclass
from pathlib import Path

from antiphon.base.errors import UserError
from antiphon.specs.plan import Predicted


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """Limits and identity of one server. Everything has a safe default; nothing here concerns the model.

    `api_keys` empty: no key is asked for. `max_concurrent_streams` counts HTTP requests that generate, streaming or
    not. `max_prompt_tokens` None: only the model's context limits prompts. `predicted`: what the loaded plan promised,
    None without a plan.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    served_model_name: str | None = None
    max_body_bytes: int = 8 * 1024 * 1024
    body_timeout_s: float = 60.0
    max_prompt_tokens: int | None = None
    max_concurrent_streams: int = 1024
    max_n: int = 16
    max_prompts_per_request: int = 128
    max_choices_per_request: int = 256
    max_stop_strings: int = 16
    max_logit_bias: int = 1024
    drain_timeout_s: float = 30.0
    predicted: Predicted | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise UserError(f"--port is {self.port}: use 1 to 65535, or 0 for any free port")
        counts = (
            ("--max-body-bytes", self.max_body_bytes),
            ("--max-streams", self.max_concurrent_streams),
            ("--max-prompt-tokens", 1 if self.max_prompt_tokens is None else self.max_prompt_tokens),
            ("max_n", self.max_n),
            ("max_prompts_per_request", self.max_prompts_per_request),
        )
        for name, value in counts:
            if value < 1:
                raise UserError(f"{name} is {value}: it must be at least 1")
        if self.drain_timeout_s < 0:
            raise UserError(f"--drain-timeout is {self.drain_timeout_s:g} s: it must be at least 0")


def read_api_keys(path: Path) -> tuple[str, ...]:
    """The keys in a file, one a line; empty lines and lines that begin with ``#`` do not count.

    `UserError` when the file cannot be read or holds no key: a server that was told to ask for keys must not run
    open.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text in UTF-8"
        raise UserError(f"the API key file {path} cannot be read ({reason}): write one key a line into it") from error
    keys = tuple(line.strip() for line in lines if line.strip() and not line.strip().startswith("#"))
    if not keys:
        raise UserError(f"the API key file {path} holds no key: write one key a line")
    unusable = next((number for number, key in enumerate(keys, 1) if not key.isascii() or " " in key), None)
    if unusable is not None:
        raise UserError(
            f"key {unusable} in {path} holds a space or a non-ASCII character: HTTP headers cannot carry it"
        )
    return keys
