"""Where a step's time goes: spans by layer and operator, forward and backward; and the trace for Perfetto made of them.

    with spans.of("experts", layer):       # forward
        ...
    with spans.backward(loss):             # each node of the graph belongs to the span it was made in
        loss.backward()

Autograd numbers its nodes in the order in which forward makes them and comes to them in the reverse order, so the
number tells the span, and a hook before the first node of each span takes the time. Off, a span costs one branch. Times
are `time.monotonic_ns`: one clock for all ranks of a machine.
Rejected: `torch.profiler`. It sees every kernel, which slows a small model by a third, and its events need to be joined
to layers afterwards.

The trace has a process a rank, a row of steps and two rows of operators. Each rank writes `FILE.rankN`; when all have,
`join_parts` makes FILE of them. Times in a part are on the wall clock, so that ranks of several machines line up as
well as their clocks do. Rejected: sending spans to rank 0. A rank that dies would take the others' part with it.
"""

import json
import threading
import time
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from antiphon.base.errors import UserError
from antiphon.base.trace import process_named, thread_named, write_events
from antiphon.train.device import HOST, settle

_NOTHING = nullcontext()
_NUMBERLESS = 1 << 63  # nodes that add up a parameter's gradient: they run when they can
OUTSIDE = "outside"


@dataclass(frozen=True, slots=True)
class Label:
    """An operator of a layer; `layer` -1: of none."""

    operator: str
    layer: int = -1
    backward: bool = False

    @property
    def name(self) -> str:
        return f"{self.operator} backward" if self.backward else self.operator

    def __str__(self) -> str:
        where = f"layer {self.layer}, " if self.layer >= 0 else ""
        return f"{where}{self.operator}, {'backward' if self.backward else 'forward'}"


@dataclass(slots=True)
class Span:
    """`inner_ns`: of that time, what spans within it took."""

    label: Label
    step: int
    start_ns: int
    end_ns: int = 0
    inner_ns: int = 0


class _Own(threading.local):
    """What a thread has begun: autograd numbers the nodes of each thread by themselves."""

    def __init__(self) -> None:
        self.open: list[Span] = []
        self.numbers: list[int] = []  # from this number on, nodes are made in ...
        self.labels: list[Label] = []  # ... this span


class StepSpans:
    """Records while `on`. Forward and backward of a pass run in one thread; several threads may record. A span ends
    when `device` has done what it was given in it."""

    def __init__(self, device: torch.device = HOST) -> None:
        self._device = device
        self.on = False
        self.step = 0
        self._own = _Own()
        self._closed: list[Span] = []

    @property
    def current(self) -> Label:
        """What is being done now."""
        return self._own.open[-1].label if self._own.open else Label(OUTSIDE)

    def of(self, operator: str, layer: int = -1, *, backward: bool = False) -> AbstractContextManager[None]:
        """What runs within is `operator`, and so is its backward; or it is its backward already."""
        return self._forward(Label(operator, layer, backward)) if self.on else _NOTHING

    @contextmanager
    def apart(self, name: str, seconds: Callable[[], float]) -> Iterator[None]:
        """Count the time by which `seconds` grows within as `name`, and take it from what is being done."""
        before_s = seconds()
        yield
        if self.on and self._own.open:
            open_span, end_ns = self._own.open[-1], time.monotonic_ns()
            length_ns = min(round((seconds() - before_s) * 1e9), end_ns - open_span.start_ns - open_span.inner_ns)
            label = replace(open_span.label, operator=name)
            open_span.inner_ns += length_ns
            self._closed.append(Span(label, self.step, end_ns - length_ns, end_ns))

    @contextmanager
    def backward(self, root: Tensor) -> Iterator[None]:
        """While `root.backward()` runs within, its nodes are recorded."""
        if not self.on or root.grad_fn is None:
            yield
            return
        depth = len(self._own.open)
        handles = [node.register_prehook(self._change(label, depth)) for node, label in self._starts(root)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            while len(self._own.open) > depth:
                self._end()

    def take(self) -> list[Span]:
        """All spans since the last `take`, in the order of their ends."""
        assert not self._own.open, f"{self.current} is still open"
        taken, self._closed = self._closed, []
        self._own.numbers.clear()
        self._own.labels.clear()
        return taken

    @contextmanager
    def _forward(self, label: Label) -> Iterator[None]:
        self._begin(label)
        self._note()
        try:
            yield
        finally:
            self._end()
            self._note()

    def _change(self, label: Label, depth: int) -> Callable[..., None]:
        """A hook that ends what ran above `depth` and begins `label`; what is outside, as layers are, has its own."""

        def change(*_: object) -> None:
            while len(self._own.open) > depth:
                self._end()
            if label.operator != OUTSIDE:
                self._begin(label)

        return change

    def _begin(self, label: Label) -> None:
        settle(self._device)
        self._own.open.append(Span(label, self.step, time.monotonic_ns()))

    def _end(self) -> None:
        settle(self._device)
        span = self._own.open.pop()
        span.end_ns = time.monotonic_ns()
        if self._own.open:
            self._own.open[-1].inner_ns += span.end_ns - span.start_ns
        self._closed.append(span)

    def _note(self) -> None:
        self._own.numbers.append(torch._C._autograd._get_sequence_nr())
        self._own.labels.append(self.current)

    def _starts(self, root: Tensor) -> list[tuple[Node, Label]]:
        """The first node of each span of the graph of `root`, as backward comes to them."""
        starts: list[tuple[Node, Label]] = []
        for number, node in sorted(_graph(root).items(), reverse=True):
            index = bisect_right(self._own.numbers, number) - 1
            made_in = self._own.labels[index] if index >= 0 else Label(OUTSIDE)
            label = replace(made_in, backward=True)
            if not starts or starts[-1][1] != label:
                starts.append((node, label))
        return starts


def _graph(root: Tensor) -> dict[int, Node]:
    """All nodes that have a number."""
    found: dict[int, Node] = {}
    waiting = [root.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None:
            continue
        number = node._sequence_nr()
        if number < _NUMBERLESS and number not in found:
            found[number] = node
            waiting += [next_node for next_node, _ in node.next_functions]
    return found


def share_spans(model: nn.Module, spans: StepSpans) -> None:
    """All parts of `model` that record spans record into `spans` from here on."""
    for module in model.modules():
        if isinstance(getattr(module, "spans", None), StepSpans):
            module.spans = spans  # type: ignore[assignment]  # not a module or tensor


def seconds_by_operator(spans: list[Span]) -> Mapping[str, float]:
    """Time by operator, forward and backward apart, without what spans inside took; the most first."""
    total_ns: dict[str, int] = defaultdict(int)
    for span in spans:
        total_ns[span.label.name] += span.end_ns - span.start_ns - span.inner_ns
    return {name: total_ns[name] * 1e-9 for name in sorted(total_ns, key=lambda name: -total_ns[name])}


STEPS, FORWARD, BACKWARD = 1, 2, 3  # the rows of a process
_ROWS = {STEPS: "steps", FORWARD: "forward", BACKWARD: "backward"}


def part_of(file: Path, rank: int) -> Path:
    return file.with_name(f"{file.name}.rank{rank}")


def write_part(file: Path, rank: int, spans: list[Span]) -> None:
    """What `rank` adds to the trace `file`."""
    offset_ns = time.time_ns() - time.monotonic_ns()
    rows = [
        (label.name, label.layer, label.backward, span.step, span.start_ns + offset_ns, span.end_ns - span.start_ns)
        for span in spans
        for label in (span.label,)
    ]
    part_of(file, rank).write_text(json.dumps(rows), encoding="utf-8")


def join_parts(file: Path, num_ranks: int) -> None:
    """Write `file` from the parts of ranks 0 to `num_ranks` - 1, and remove them. `UserError` if one is missing."""
    parts: dict[int, list[list[Any]]] = {}
    for rank in range(num_ranks):
        try:
            parts[rank] = json.loads(part_of(file, rank).read_text(encoding="utf-8"))
        except OSError as error:
            path = part_of(file, rank)
            raise UserError(f"{path}: cannot be read ({error.strerror}): rank {rank} did not write it") from error
    write_events(file, _events(parts))
    for rank in parts:
        part_of(file, rank).unlink()


def _events(parts: dict[int, list[list[Any]]]) -> Iterator[dict[str, Any]]:
    origin_ns = min((start_ns for rows in parts.values() for *_, start_ns, _ in rows), default=0)
    for rank, rows in parts.items():
        yield process_named(f"rank {rank}", rank)
        for thread, name in _ROWS.items():
            yield thread_named(name, rank, thread)
        steps: dict[int, tuple[int, int]] = {}
        for name, layer, backward, step, start_ns, length_ns in sorted(rows, key=lambda row: row[4]):
            first_ns, last_ns = steps.get(step, (start_ns, start_ns))
            steps[step] = (first_ns, max(last_ns, start_ns + length_ns))
            arguments = {"step": step} | ({"layer": layer} if layer >= 0 else {})
            place = {"pid": rank, "tid": BACKWARD if backward else FORWARD}
            yield _event(name, start_ns - origin_ns, length_ns, place, arguments)
        for step, (first_ns, last_ns) in steps.items():
            place = {"pid": rank, "tid": STEPS}
            yield _event(f"step {step}", first_ns - origin_ns, last_ns - first_ns, place, {"step": step})


def _event(
    name: str, start_ns: int, length_ns: int, place: dict[str, int], arguments: dict[str, int]
) -> dict[str, Any]:
    return {"ph": "X", "name": name, **place, "ts": start_ns / 1000, "dur": length_ns / 1000, "args": arguments}
