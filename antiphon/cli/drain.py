"""`antiphon drain` takes an attention worker of a running server out of service without losing work.

A drained worker gets no new requests, and hands those that it has to others, with their keys and values. Then its
process, or its machine, may end. What takes its place, or the same again after `--undo`, gets requests. The server sets
no limit of time to that; `--wait` is this command's. It asks once and then only looks: a second order would be for the
process that has the name by then.
"""

import time
from typing import Annotated
from urllib.parse import quote

import httpx
import typer

from antiphon.base.errors import UserError
from antiphon.cli.output import JsonOption, emit_json, show
from antiphon.cli.top import HERE, KeyFile, ServerUrl, ask, client_of

_LOOK_S = 0.5


def drain(
    worker: Annotated[str, typer.Argument(metavar="WORKER", help="As /health and top name it: attention[1].")],
    url: ServerUrl = HERE,
    undo: Annotated[bool, typer.Option("--undo", help="Let the worker have requests again.")] = False,
    wait: Annotated[
        float, typer.Option("--wait", metavar="S", min=0, max=1e6, help="Seconds until the worker must be drained.")
    ] = 600.0,
    api_key_file: KeyFile = None,
    json: JsonOption = None,
) -> None:
    """Move all requests of WORKER to others, and wait until it has none."""
    deadline = time.monotonic() + wait
    with client_of(api_key_file) as client:
        state = _state(client, "PUT", url, "undrain" if undo else "drain", worker)
        while state.startswith("draining") and time.monotonic() < deadline:
            time.sleep(_LOOK_S)
            state = _state(client, "GET", url, "drain", worker)
    if state.startswith("draining"):
        raise UserError(f"{worker} is not drained after {wait:g} s ({state}): it goes on; ask again, or --undo")
    if not undo and state != "drained":
        raise UserError(
            f"{worker} is not drained ({state}): its process ended and another takes its place, or somebody used --undo"
        )
    show(f"{worker}: {state}", json=json)
    emit_json(json, {"worker": worker, "state": state})


def _state(client: httpx.Client, method: str, url: str, route: str, worker: str) -> str:
    """How far the worker is: after an order (PUT), or as it is (GET)."""
    answer = ask(url, lambda: client.request(method, f"{url.rstrip('/')}/{route}/{quote(worker, safe='/')}"))
    try:
        body = answer.json()
        if answer.status_code in (400, 503):
            raise UserError(body["error"]["message"])
        return str(body["state"])
    except (ValueError, KeyError, TypeError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{url} does not know /drain: see its /version") from error
