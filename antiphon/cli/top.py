"""`antiphon top` shows in a terminal what a running server does, as the page `/dashboard` draws it; and how commands
ask such a server.

One frame is a reading of the server as text for 80 columns and more. A step is a line of characters for each worker:
what took most of a character's time stands there. Rejected: reading `/metrics`. It has neither steps nor events, and
rates need two scrapes.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import httpx
import pydantic
import typer
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from antiphon.base.errors import UserError
from antiphon.base.units import format_seconds
from antiphon.cli.output import JsonOption, emit_json, show, table
from antiphon.report.document import BATCH_COLOURS, HEAT_COLOURS
from antiphon.serve.api.dashboard import DashboardReading, LastSteps, WorkerSpans
from antiphon.specs.checked import read_text

ServerUrl = Annotated[str, typer.Argument(metavar="[URL]", help="The server.")]
KeyFile = Annotated[Path | None, typer.Option(metavar="FILE", help="API keys; the first is used.")]
HERE = "http://127.0.0.1:8000"
PATIENCE_S, MOST_PORT = 6.0, 65_535
_MOST_LAYERS = 8
_MOST_EVENTS = 6
_NAME_WIDTH = 22
_BARS = "▁▂▃▄▅▆▇█"
_MARKS = {
    "waiting": ("·", "dim"),
    "to experts": (">", "dim"),
    "to attention": ("<", "dim"),
    "to decode": ("}", "dim"),
    "sampling": ("s", "cyan"),
}
_EVENT_STYLES = {"ready": "green", "going on": "green", "lost": "bold red", "failed": "red", "standstill": "yellow"}


def top(
    url: ServerUrl = HERE,
    api_key_file: KeyFile = None,
    interval: Annotated[float, typer.Option(metavar="S", min=0.1, max=3600, help="Seconds between two looks.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print one frame and end.")] = False,
    json: JsonOption = None,
) -> None:
    """Show what the server at URL does, until Ctrl-C: throughput, waiting, the last step, load of experts, events."""
    with client_of(api_key_file) as client:
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


def read_api_keys(path: Path) -> tuple[str, ...]:
    """The keys in a file, one a line; empty lines and lines that begin with ``#`` do not count.

    `UserError` when the file cannot be read or holds no key: a server that is to ask for keys must not run open."""
    try:
        lines = read_text(path).splitlines()
    except UserError as error:
        raise UserError(f"--api-key-file {error} with one key a line") from error
    keys = tuple(line.strip() for line in lines if line.strip() and not line.strip().startswith("#"))
    if not keys:
        raise UserError(f"the API key file {path} holds no key: write one key a line")
    unusable = next((number for number, key in enumerate(keys, 1) if not key.isascii() or " " in key), None)
    if unusable is not None:
        raise UserError(
            f"key {unusable} in {path} holds a space or a non-ASCII character: HTTP headers cannot carry it"
        )
    return keys


def client_of(api_key_file: Path | None) -> httpx.Client:
    """For a server of ours, which no proxy knows."""
    headers = {} if api_key_file is None else {"authorization": f"Bearer {read_api_keys(api_key_file)[0]}"}
    return httpx.Client(headers=headers, timeout=PATIENCE_S, trust_env=False)


def _readings(client: httpx.Client, url: str, interval_s: float) -> Iterator[tuple[DashboardReading | None, str]]:
    """(a reading, or None, and why there is none), without end."""
    while True:
        time.sleep(interval_s)
        try:
            yield read(client, url), ""
        except UserError as error:
            yield None, f"{error}. What is shown is what it said last; asking again."


def read(client: httpx.Client, url: str) -> DashboardReading:
    """One reading; `UserError` if the server does not give it."""
    answer = ask(url, lambda: client.get(f"{url.rstrip('/')}/dashboard/data"))
    if answer.status_code == 404:
        raise UserError(f"nothing is at {url}/dashboard/data: give the address of `antiphon serve`, such as {HERE}")
    try:
        if answer.status_code != 200:
            raise ValueError(f"status {answer.status_code}")
        return DashboardReading.model_validate_json(answer.content)
    except (ValueError, pydantic.ValidationError) as error:
        raise UserError(f"{url} answers, but not as this version of `antiphon serve` does: see its /version") from error


def ask(url: str, send: Callable[[], httpx.Response]) -> httpx.Response:
    """What the server at `url` answers; `UserError` if it does not, or asks for a key."""
    try:
        if (httpx.URL(url).port or 0) > MOST_PORT:  # the system would take what is left of it by 65536
            raise httpx.InvalidURL("port")
        answer = send()
    except (httpx.UnsupportedProtocol, httpx.InvalidURL, UnicodeError) as error:
        raise UserError(f"{url!r} is not a server's address: write for example http://127.0.0.1:8000") from error
    except httpx.TimeoutException as error:
        raise UserError(f"the server at {url} has not answered for {PATIENCE_S:.0f} s") from error
    except httpx.HTTPError as error:
        raise UserError(f"no server answers at {url} ({error}); `antiphon serve MODEL` starts one") from error
    if answer.status_code == 401:
        raise UserError(f"the server at {url} asks for an API key: give --api-key-file FILE with one that it knows")
    if answer.status_code == 403:  # of a name that it does not know, which tunnels and proxies have
        raise UserError(f"the server at {url} refuses this: {_message_of(answer)}")
    return answer


def _message_of(answer: httpx.Response) -> str:
    try:
        return str(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"status {answer.status_code}"


def frame(reading: DashboardReading, problem: str) -> RenderableType:
    """Everything, top to bottom; `problem` says why the reading is old, if it is."""
    return Group(*_parts(reading, problem))


def _parts(reading: DashboardReading, problem: str) -> Iterator[RenderableType]:
    up = f"up {reading.up_s / 60:,.0f} min, {reading.now.num_steps:,} steps"
    yield Text(f"Antiphon: {reading.model}", style="bold")
    yield Text(f"Version {reading.version}, layout {reading.layout}, {up}")
    yield Text("Serving", style="green") if reading.status == "ok" else Text(reading.status, style="bold red")
    if problem:
        yield Text(problem, style="bold red")
    yield Text("")
    yield _numbers(reading)
    yield from _pools(reading)
    yield Text("\nThe last minutes", style="bold")
    yield from _history(reading)
    yield from _steps(reading)
    yield from _load(reading)
    yield Text("\nEvents", style="bold")
    for event in reversed(reading.events[-_MOST_EVENTS:]):
        clock = time.strftime("%H:%M:%S", time.localtime(event.time_s))
        style = _EVENT_STYLES.get(event.kind, "")
        yield Text.assemble(f"{clock} ", (f"{event.worker} {event.kind}".strip(), style), f": {event.text}")


def _numbers(reading: DashboardReading) -> Table:
    now, history = reading.now, reading.history
    pairs = (
        ("requests running", f"{now.num_requests_running:,}"),
        ("requests waiting", f"{now.num_requests_waiting:,}"),
        ("answers/s", f"{_last(history.answers_per_s):,.1f}"),
        ("tokens/s generated", f"{_last(history.generation_tokens_per_s):,.0f}"),
        ("prompt tokens/s", f"{_last(history.prompt_tokens_per_s):,.0f}"),
        ("KV cache in use", f"{now.kv_cache_usage_ratio:.1%}"),
        ("attention waits", f"{now.attention_idle_ratio:.1%}"),
        ("experts wait", _share(now.expert_idle_ratio)),
        ("exposed communication", f"{_last(history.exposed_ratio):.1%}"),
        ("prompts from the cache", _share(now.prefix_cache_hit_ratio)),
    )
    grid = Table.grid(padding=(0, 2))
    for column in range(4):
        grid.add_column(justify="right" if column % 2 else "left", min_width=(_NAME_WIDTH, 9)[column % 2])
    for left, right in zip(pairs[::2], pairs[1::2], strict=True):
        grid.add_row(left[0], Text(left[1], style="bold"), right[0], Text(right[1], style="bold"))
    return grid


def _pools(reading: DashboardReading) -> Iterator[RenderableType]:
    if reading.pools:
        yield Text("\nPools", style="bold")
    for pool in reading.pools:
        arriving = f", {pool.num_requests_arriving:,} arriving" if pool.name == "decode" else ""
        yield Text(
            f"{pool.name:<{_NAME_WIDTH}}{pool.num_requests_running:,} running, {pool.num_requests_waiting:,} "
            f"waiting{arriving}, {pool.kv_cache_usage_ratio:.1%} of its KV cache"
        )
    if (counts := reading.handovers) is not None:
        yield Text(
            f"{'hand-overs':<{_NAME_WIDTH}}{counts.num_done:,} done, {counts.num_failed:,} failed, "
            f"{counts.num_recomputed:,} prompts computed by decode workers after all"
        )


def _last(values: Sequence[float]) -> float:
    return values[-1] if values else 0.0


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


class _Wide:
    """What is drawn anew for the width there is, behind a name."""

    def __init__(self, name: str, draw: Callable[[int], Text]) -> None:
        self._name = name
        self._draw = draw

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        room = max(10, options.max_width - _NAME_WIDTH - 2)
        yield Text(f"{self._name:<{_NAME_WIDTH}}").append_text(self._draw(room))


def _history(reading: DashboardReading) -> Iterator[RenderableType]:
    history = reading.history
    highest = max(history.generation_tokens_per_s, default=0.0)
    yield _Wide(f"tokens/s, to {highest:,.0f}", lambda room: _curve(history.generation_tokens_per_s, highest, room))
    yield _Wide("attention waits, to 1", lambda room: _curve(history.attention_idle_ratio, 1.0, room))
    if reading.now.expert_idle_ratio is not None:
        yield _Wide("experts wait, to 1", lambda room: _curve(history.expert_idle_ratio, 1.0, room))
        yield _Wide("exposed comm., to 1", lambda room: _curve(history.exposed_ratio, 1.0, room))


def _curve(values: Sequence[float], highest: float, room: int) -> Text:
    """The newest `room` values, a character each; nothing is a blank."""
    levels = [value / highest if highest else 0.0 for value in values[-room:]]
    return Text("".join(_BARS[min(7, int(8 * level))] if level > 0 else " " for level in levels))


def _steps(reading: DashboardReading) -> Iterator[RenderableType]:
    steps = reading.last_steps
    yield Text("\nThe last step", style="bold")
    if steps is None:
        yield Text("No step yet.")
        return
    last = steps.steps[-1]
    ended = "just now" if steps.ended_s_ago < 2 else f"{steps.ended_s_ago:,.0f} s ago"
    yield Text(
        f"Step {last.number:,} took {format_seconds(last.length_us * 1e-6)} and ended {ended}. Digits: micro-batches; "
        "· waits, > < sends, s samples"
    )
    for worker in steps.workers:
        yield _Wide(worker.name, lambda room, worker=worker: _line(worker, steps, room))  # type: ignore[misc]
    if steps.left_out:
        yield Text(f"not drawn: {', '.join(steps.left_out)}")


def _line(worker: WorkerSpans, steps: LastSteps, room: int) -> Text:
    """The last step in `room` characters: each shows the span that fills most of it."""
    start_us, cell_us = steps.steps[-1].start_us, max(1e-9, steps.steps[-1].length_us / room)
    filled: list[tuple[float, int]] = [(0.0, -1)] * room  # (microseconds, span)
    for index, (begin_us, length_us) in enumerate(zip(worker.starts_us, worker.lengths_us, strict=True)):
        begin, end = (begin_us - start_us) / cell_us, (begin_us + length_us - start_us) / cell_us
        for cell in range(max(0, int(begin)), min(room, int(end) + 1)):
            share = min(end, cell + 1.0) - max(begin, float(cell))
            if share > filled[cell][0]:
                filled[cell] = (share, index)
    return Text().join(_mark(worker, index) for _, index in filled)


def _mark(worker: WorkerSpans, index: int) -> Text:
    if index < 0:
        return Text(" ")
    if worker.kinds[index] in _MARKS:
        character, style = _MARKS[worker.kinds[index]]
        return Text(character, style=style)
    batch = max(0, worker.micro_batches[index])
    return Text(str((batch + 1) % 10), style=BATCH_COLOURS[batch % 5])


def _load(reading: DashboardReading) -> Iterator[RenderableType]:
    """The layers that are balanced worst."""
    yield Text("\nLoad of each expert worker lately, times the layer's mean", style="bold")
    if not reading.load:
        apart = reading.now.expert_idle_ratio is not None
        yield Text("No rows yet." if apart else "Each worker holds all experts here.")
        return
    worst = sorted(
        sorted(reading.load, key=lambda layer: layer.balancedness)[:_MOST_LAYERS], key=lambda each: each.layer
    )
    workers = [load.name for load in worst[0].workers]
    yield table(
        ("layer", "balancedness", *workers, "fullest: prompts", "answers"),
        (
            (
                layer.layer,
                round(layer.balancedness, 3),
                *_heat([sum(load.rows) for load in layer.workers]),
                *([f"{each.largest_share:.1f}x" for each in layer.phases] or ["", ""]),
            )
            for layer in worst
        ),
    )
    if len(worst) < len(reading.load):
        yield Text(f"the {len(worst)} worst of {len(reading.load)} layers")


def _heat(rows: Sequence[float]) -> Iterator[Text]:
    mean = sum(rows) / len(rows)
    for value in rows:
        ratio = value / mean if mean else 0.0
        shade = HEAT_COLOURS[min(len(HEAT_COLOURS) - 1, int(ratio / 2 * len(HEAT_COLOURS)))]
        yield Text(f"{ratio:5.2f}", style=f"black on {shade}")
