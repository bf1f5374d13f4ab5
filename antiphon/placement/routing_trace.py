"""Which experts the rows of real steps chose: what `antiphon serve --record-routing FILE` writes, and its reader.

A file is a sequence of frames: 4 bytes of length (little endian), then that number of bytes of MessagePack. The first
frame is the `TraceHeader`, every other one a `RoutedRows`: the rows that one attention worker computed in one step.

Ids are kept by row and layer, not only counted: counts follow from them, and what a row chose in earlier layers is
what Lina's estimation reads (section 5.1). Beside them stand forecasts: what the next layer's router says of the rows
that enter a layer's experts. A file that was cut off reads up to its last whole frame.

Rejected: an archive of NumPy arrays. It is written at its end or not at all, and a server may be killed.

Letters: T rows, L MoE layers, K experts chosen by a row, E experts.
"""

import contextlib
import errno
import struct
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from antiphon.base.errors import UserError
from antiphon.base.logging import get_logger
from antiphon.base.system import lock
from antiphon.specs.catalog import a_file_of
from antiphon.specs.checked import read_bytes
from antiphon.specs.model import ModelSpec
from antiphon.specs.workload import WorkloadSpec

_log = get_logger("engine")
_LENGTH = struct.Struct("<I")
_FORMAT = "antiphon routing trace 1"
_MAX_FRAME_BYTES = 1 << 30

IdArray = NDArray[np.uint16]
CountArray = NDArray[np.int64]


class TraceHeader(msgspec.Struct, frozen=True, kw_only=True):
    """What the trace is of: the model's name, the numbers of its MoE layers, its experts and choices of a row."""

    format: str = _FORMAT
    model: str
    layers: tuple[int, ...]
    num_experts: int
    top_k: int

    @property
    def num_layers(self) -> int:
        """MoE layers."""
        return len(self.layers)


class RoutedRows(msgspec.Struct, frozen=True, kw_only=True):
    """Rows of one attention worker in one step of the group. `ids`: uint16 [L, T, K], little endian.

    `forecasts`: [L - 1, T, K], of all layers but the first, by the rows of the layer before; empty if not known.
    `prompts`: uint8 [T], 1 for a row of a prompt; empty if not known (files of older versions)."""

    step: int
    worker: int
    num_rows: int
    ids: bytes
    forecasts: bytes = b""
    prompts: bytes = b""


Phase = Literal["prefill", "decode"]


class RoutingTrace:
    """A trace read into memory."""

    def __init__(self, header: TraceHeader, rows: list[RoutedRows]) -> None:
        self.header = header
        self.rows = rows

    def of_phase(self, phase: Phase) -> "RoutingTrace":
        """Only the rows of prompts, or only those of answers. `UserError` if the file does not say which is which."""
        if any(rows.num_rows and not rows.prompts for rows in self.rows):
            raise UserError(f"the recording does not say which rows are of {phase}: record it anew with this version")
        return RoutingTrace(self.header, [self._kept(rows, phase) for rows in self.rows])

    def _kept(self, rows: RoutedRows, phase: Phase) -> RoutedRows:
        kept_T = np.frombuffer(rows.prompts, dtype=np.uint8) == (phase == "prefill")
        forecasts = self._forecasts_of(rows)[:, kept_T].tobytes() if rows.forecasts else b""
        return RoutedRows(
            step=rows.step,
            worker=rows.worker,
            num_rows=int(kept_T.sum()),
            ids=self.ids_of(rows)[:, kept_T].tobytes(),
            forecasts=forecasts,
            prompts=bytes([phase == "prefill"]) * int(kept_T.sum()),
        )

    @property
    def num_rows(self) -> int:
        return sum(each.num_rows for each in self.rows)

    def ids_of(self, rows: RoutedRows) -> IdArray:
        """[L, T, K]"""
        header = self.header
        return np.frombuffer(rows.ids, dtype="<u2").reshape(header.num_layers, rows.num_rows, header.top_k)

    def ids_LTK(self) -> IdArray:
        """All rows, one step after the other."""
        header = self.header
        parts = [self.ids_of(rows) for rows in self.rows]
        empty = np.zeros((header.num_layers, 0, header.top_k), dtype="<u2")
        return np.concatenate([empty, *parts], axis=1)

    @property
    def has_forecasts(self) -> bool:
        """Whether all rows have forecasts."""
        with_rows = [rows for rows in self.rows if rows.num_rows]
        return bool(with_rows) and all(rows.forecasts for rows in with_rows)

    def forecasts_LTK(self) -> IdArray | None:
        """Forecasts of all layers but the first, for the rows of `ids_LTK`; None if some are not known."""
        return np.concatenate(list(map(self._forecasts_of, self.rows)), axis=1) if self.has_forecasts else None

    def _forecasts_of(self, rows: RoutedRows) -> IdArray:
        shape = self.header.num_layers - 1, rows.num_rows, self.header.top_k
        return np.frombuffer(rows.forecasts, dtype="<u2").reshape(shape)

    def popularity(self) -> tuple[float, ...]:
        """Shares of the experts, the most popular first: the mean over layers, of which each has its own favourites.
        `UserError` if there are no rows."""
        if self.num_rows == 0:
            raise UserError("the recording has no rows: record while requests are served")
        counts = self.counts_of_steps().sum(axis=0).astype(np.float64)
        falling = -np.sort(-counts / counts.sum(axis=1, keepdims=True), axis=1)
        shares = falling.mean(axis=0)
        return tuple((shares / shares.sum()).tolist())

    def counts_of_steps(self) -> CountArray:
        """[steps, L, E]: rows that chose each expert, of all workers together, steps ascending."""
        return self._by_step(self.header.num_layers, self.ids_of)

    def forecasts_of_steps(self) -> CountArray | None:
        """As `counts_of_steps`, rows that were expected there, of all layers but the first; None if not known."""
        return self._by_step(self.header.num_layers - 1, self._forecasts_of) if self.has_forecasts else None

    def _by_step(self, num_layers: int, ids_of: Callable[[RoutedRows], IdArray]) -> CountArray:
        numbers = {step: place for place, step in enumerate(sorted({rows.step for rows in self.rows}))}
        counts = np.zeros((len(numbers), num_layers, self.header.num_experts), dtype=np.int64)
        for rows in self.rows:
            counts[numbers[rows.step]] += count_rows(ids_of(rows), self.header.num_experts)
        return counts


def count_rows(ids_LTK: NDArray[np.integer], num_experts: int) -> CountArray:
    """[L, E]: how many (row, choice) pairs name each expert."""
    num_layers = ids_LTK.shape[0]
    if ids_LTK.size and not 0 <= int(ids_LTK.min()) <= int(ids_LTK.max()) < num_experts:
        raise UserError(f"ids {int(ids_LTK.min())} to {int(ids_LTK.max())}: experts are 0 to {num_experts - 1}")
    places = ids_LTK.reshape(num_layers, -1).astype(np.int64) + np.arange(num_layers)[:, None] * num_experts
    counts = np.bincount(places.ravel(), minlength=num_layers * num_experts)
    return counts.reshape(num_layers, num_experts)


class RoutingTraceWriter:
    """Appends to a file, which it makes anew. `UserError` if it cannot be written."""

    def __init__(self, path: Path, header: TraceHeader) -> None:
        self._encode = msgspec.msgpack.Encoder().encode
        self._header = header
        if path.is_fifo():
            raise UserError(f"{path} is a pipe, whose reader could hold up all requests: name a file")
        try:
            self._file: BinaryIO = path.open("ab", buffering=0)  # a server may be killed
            if path.is_file():
                lock(self._file.fileno(), path, "another server writes it: name another file")
                self._file.truncate(0)
            self._write(header)
        except OSError as error:
            raise UserError(f"{path}: cannot be written ({error.strerror}): choose another file") from error

    def append_step(self, step: int, worker: int, ids: bytes, forecasts: bytes = b"", prompts: bytes = b"") -> None:
        """Add the rows of one worker and step; the rest as in `RoutedRows`. `UserError` for half a row."""
        num_rows, rest = divmod(len(ids), 2 * self._header.num_layers * self._header.top_k)
        if rest:
            raise UserError(f"{len(ids)} bytes of ids: a row has {2 * self._header.num_layers * self._header.top_k}")
        self._write(
            RoutedRows(step=step, worker=worker, num_rows=num_rows, ids=ids, forecasts=forecasts, prompts=prompts)
        )

    def close(self) -> None:
        self._file.close()

    def _write(self, frame: TraceHeader | RoutedRows) -> None:
        encoded = self._encode(frame)
        data = _LENGTH.pack(len(encoded)) + encoded
        if self._file.write(data) != len(data):  # nothing may follow a torn frame
            raise OSError(errno.ENOSPC, "no room for a whole frame")
        self._file.flush()  # a server may be killed


class RoutingRecord:
    """What `serve --record-routing` writes: one file for all groups of an engine, from the engine's thread. `UserError`
    if the file cannot be made.

    A disk that is full ends the record, not the serving."""

    def __init__(self, path: Path, model: str, spec: ModelSpec, num_groups: int) -> None:
        router = spec.router
        header = TraceHeader(model=model, layers=spec.expert_layers, num_experts=router.num_experts, top_k=router.top_k)
        self._path = path
        self._num_groups = num_groups
        try:
            self._writer: RoutingTraceWriter | None = RoutingTraceWriter(path, header)
        except UserError as error:
            raise UserError(f"--record-routing {error}") from error

    def add(self, group: int, step: int, worker: int, ids: bytes, forecasts: bytes, prompts: bytes) -> None:
        """The rows of one worker in one step of its group. Groups step by themselves, so each has its own numbers."""
        if self._writer is None:
            return
        try:
            self._writer.append_step(step * self._num_groups + group, worker, ids, forecasts, prompts)
        except OSError as error:
            _log.error("%s: nothing more is recorded: %s", self._path, error.strerror or error)
            self.close()

    def close(self) -> None:
        """Record nothing more: others may have the file. Safe to call again."""
        writer, self._writer = self._writer, None
        if writer is not None:
            with contextlib.suppress(OSError):
                writer.close()


def read_routing_trace(path: Path) -> RoutingTrace:
    """`UserError` if the file is no trace, or holds ids of experts that do not exist."""
    with a_file_of("recording", path):
        return _read_routing_trace(path)


def _read_routing_trace(path: Path) -> RoutingTrace:
    frames = _frames(read_bytes(path))
    try:
        first = next(frames, b"")
        header = msgspec.msgpack.decode(first, type=TraceHeader)
        rows = [msgspec.msgpack.decode(frame, type=RoutedRows) for frame in frames]
    except msgspec.DecodeError as error:
        raise UserError(f"{path}: not a routing trace: write one with antiphon serve --record-routing") from error
    if header.format != _FORMAT or min(header.num_layers, header.num_experts, header.top_k) < 1:
        raise UserError(f"{path}: its format is {header.format!r}, this program reads {_FORMAT!r}")
    most = np.iinfo(np.uint16).max + 1
    if not header.top_k <= header.num_experts <= most or len(set(header.layers)) < header.num_layers:
        raise UserError(
            f"{path}: {header.top_k} of {header.num_experts} experts in {header.num_layers} layers: a trace names each "
            f"layer once, and up to {most:,} experts"
        )
    trace = RoutingTrace(header, rows)
    for each in rows:
        if len(each.ids) != 2 * header.num_layers * each.num_rows * header.top_k or each.num_rows < 0:
            raise UserError(f"{path}: step {each.step} has {len(each.ids)} bytes of ids for {each.num_rows} rows")
        if len(each.forecasts) not in (0, len(each.ids) // header.num_layers * (header.num_layers - 1)):
            raise UserError(f"{path}: step {each.step} has {len(each.forecasts)} bytes of forecasts")
        if len(each.prompts) not in (0, each.num_rows):
            raise UserError(
                f"{path}: step {each.step} has {len(each.prompts)} bytes of phases for {each.num_rows} rows"
            )
        if np.frombuffer(each.ids + each.forecasts, "<u2").max(initial=0) >= header.num_experts:
            raise UserError(f"{path}: step {each.step} names an expert beyond {header.num_experts - 1}")
    return trace


def with_recorded_popularity(workload: WorkloadSpec, file: Path) -> WorkloadSpec:
    """The workload with experts as popular as in a recording of `antiphon serve --record-routing`."""
    trace = read_routing_trace(file)
    if trace.num_rows == 0:
        raise UserError(f"--routing {file} has no rows: record while requests are served")
    return replace(workload, expert_skew=0.0, expert_loads=trace.popularity())


def _frames(content: bytes) -> Iterator[bytes]:
    at = 0
    while at + _LENGTH.size <= len(content):
        (length,) = _LENGTH.unpack_from(content, at)
        at += _LENGTH.size
        if length > _MAX_FRAME_BYTES or at + length > len(content):
            return  # cut off while it was written
        yield content[at : at + length]
        at += length
