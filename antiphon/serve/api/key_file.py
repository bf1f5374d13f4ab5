"""The file of API keys, read by the server and by `antiphon top`, which must load neither torch nor a web server."""

from pathlib import Path

from antiphon.base.errors import UserError


def read_api_keys(path: Path) -> tuple[str, ...]:
    """The keys in a file, one a line; empty lines and lines that begin with ``#`` do not count.

    `UserError` when the file cannot be read or holds no key: a server that is to ask for keys must not run open."""
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
