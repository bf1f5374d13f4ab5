"""`antiphon top`: what a running server does, in a terminal. It shows what the page `/dashboard` draws.

Rejected: reading `/metrics`. It has neither steps nor events, and rates need two scrapes.
"""

import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import httpx
import pydantic
import typer
from rich.console import Console
from rich.live import Live

from antiphon.base.errors import UserError
from antiphon.cli.output import JsonOption, emit_json, show
from antiphon.cli.top_frame import frame
from antiphon.serve.api.dashboard_reading import DashboardReading
from antiphon.serve.api.key_file import read_api_keys

_PATIENCE_S = 6.0
_LONGEST_INTERVAL_S = 3600.0


def top(
    url: Annotated[str, typer.Argument(metavar="[URL]", help="The server.")] = "http://127.0.0.1:8000",
    api_key_file: Annotated[Path | None, typer.Option(metavar="FILE", help="API keys; the first is used.")] = None,
    interval: Annotated[float, typer.Option(metavar="S", help="Seconds between two looks.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print one frame and end.")] = False,
    json: JsonOption = None,
) -> None:
    """Show what the server at URL does, until Ctrl-C: throughput, waiting, the last step, load of experts, events."""
    if not 0.1 <= interval <= _LONGEST_INTERVAL_S:
        raise UserError(f"--interval is {interval:g}: it must be 0.1 to {_LONGEST_INTERVAL_S:.0f} s")
    key = read_api_keys(api_key_file)[0] if api_key_file is not None else None
    headers = {"authorization": f"Bearer {key}"} if key else {}
    with httpx.Client(headers=headers, timeout=_PATIENCE_S, trust_env=False) as client:  # no proxy knows our servers
        reading = read(client, url)
        if once or json is not None:
            show(frame(reading, ""), json=json)
            emit_json(json, reading.model_dump(mode="json"))
            return
        with suppress(KeyboardInterrupt), Live(console=Console(highlight=False), screen=True) as live:
            live.update(frame(reading, ""))
            for newer, problem in _readings(client, url, interval):
                reading = newer or reading
                live.update(frame(reading, problem))


def _readings(client: httpx.Client, url: str, interval_s: float) -> Iterator[tuple[DashboardReading | None, str]]:
    """(a reading, or None, and why there is none), for ever."""
    while True:
        time.sleep(interval_s)
        try:
            yield read(client, url), ""
        except UserError as error:
            yield None, f"{error}. What is shown is what it said last; asking again."


def read(client: httpx.Client, url: str) -> DashboardReading:
    """One reading; `UserError` if the server does not give it."""
    try:
        answer = client.get(f"{url.rstrip('/')}/dashboard/data")
    except (httpx.UnsupportedProtocol, httpx.InvalidURL, UnicodeError) as error:
        raise UserError(f"{url!r} is not a server's address: write for example http://127.0.0.1:8000") from error
    except httpx.TimeoutException as error:
        raise UserError(f"the server at {url} has not answered for {_PATIENCE_S:.0f} s") from error
    except httpx.HTTPError as error:
        raise UserError(f"no server answers at {url} ({error}); `antiphon serve MODEL` starts one") from error
    if answer.status_code == 401:
        raise UserError(f"the server at {url} asks for an API key: give --api-key-file FILE with one that it knows")
    try:
        if answer.status_code != 200:
            raise ValueError(f"status {answer.status_code}")
        return DashboardReading.model_validate_json(answer.content)
    except (ValueError, pydantic.ValidationError) as error:
        raise UserError(f"{url} answers, but not as this version of `antiphon serve` does: see its /version") from error
