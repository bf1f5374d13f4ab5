"""Moving weights from a checkpoint to a back-end, one tensor at a time.

Every tensor is read, copied to where it stays, and its pages released before the next one is touched: a loading
process holds what it keeps, plus the tensor in hand, plus one fused projection while its parts are put together.
All but the experts' matrices is looked through for NaN and infinity on the way.

A matrix in few bits stays as it is stored if the back-end can compute with it; `WeightReader.kept` says in words what
stayed and what did not, for the log. What does not stay is multiplied out to the back-end's dtype:
- norms, the embedding, routers, the up projection of latent attention: back-ends want them as floats;
- projections that are stacked, or gate and up of an expert, and not all in one format;
- matrices with an order of columns (GPTQ's `desc_act`), where a back-end or a layout of experts takes none.

The order of an expert's down projection needs no work later: its gate and up projections get their rows in it, so
activations come out in the order in which they are multiplied. A rank's part is then a part of that order, the same
numbers of columns as ever. Rejected: the columns that a rank has in other files. Each group has another number of them
in every expert.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from antiphon.base.errors import CheckpointError
from antiphon.base.logging import get_logger
from antiphon.kernels.api import ExpertFormats, ExpertShape, KernelBackend, PackedExperts, PackedLinear
from antiphon.kernels.quantized import OffsetKind, QuantizedWeight, WeightFormat, as_bits, unpack_nibbles
from antiphon.models.checkpoint import Checkpoint
from antiphon.models.packed import MXFP4_BLOCK
from antiphon.models.rounding import RoundedFormat, format_of, rounded
from antiphon.models.tensors import ExpertRefs, LoadPlan, TensorRef

_log = get_logger("models")
EXPERTS_AHEAD = 4  # asked of the disk before they are read: some MiB
PLAIN_PURPOSES = ("router", "shared_gate", "kv_up")  # matrices that back-ends want as floats
ReportProgress = Callable[[int, int], None]


class WeightReader:
    """Reads planned tensors for one back-end and reports (bytes done, bytes total) after each."""

    def __init__(
        self, checkpoint: Checkpoint, backend: KernelBackend, total_bytes: int, progress: ReportProgress | None
    ) -> None:
        self.checkpoint = checkpoint
        self.backend = backend
        self.total_bytes = total_bytes
        self.done_bytes = 0
        self.progress = progress
        self.kept: Counter[str] = Counter()

    @contextmanager
    def stored(self, ref: TensorRef, *, checked: bool = True) -> Iterator[Tensor]:
        """The tensor as stored (scaled float8 and MXFP4: multiplied out), valid inside the block only.

        `checked`: `CheckpointError` if it holds NaN or infinity, for one more pass over it."""
        tensor = self.checkpoint.read(ref.name, rows=ref.rows, cut=ref.cut, dequantize_to=self.backend.dtype)
        if checked:
            check_finite(tensor, ref.name, self.checkpoint.file_of(ref.name))
        yield tensor
        del tensor
        self._done(ref)

    def _done(self, ref: TensorRef, *, packed: bool = False) -> None:
        num_bytes = self.checkpoint.stored_bytes(ref.name, ref.rows, ref.cut)
        self.checkpoint.release(ref.name, ref.rows)
        self.checkpoint.bytes_read += num_bytes if packed else 0  # `read` counts itself
        self.done_bytes += num_bytes
        if self.progress is not None:
            self.progress(self.done_bytes, self.total_bytes)

    def packed(self, ref: TensorRef, to: RoundedFormat | None = None) -> QuantizedWeight | None:
        """The matrix in few bits, if it may stay so, or rounded to `to`; valid until its pages are given back
        (`_done`)."""
        weight = self.checkpoint.packed(ref.name, rows=ref.rows, cut=ref.cut)
        if weight is not None and (weight.order is None or self.backend.orders_columns):
            return weight
        return None if to is None else self._rounded_part(ref, to, len(ref.shape) - 1)

    def _rounded_part(self, ref: TensorRef, to: RoundedFormat, axis: int) -> QuantizedWeight:
        """The matrix whose columns lie along `axis`; a rank's columns in the groups that they have in all of it, so
        that ranks together have the numbers that one process has."""
        wider, before = ref.in_groups(axis, MXFP4_BLOCK if to == "mxfp4" else self.checkpoint.rounding.group)
        floats = _matrix(self._floats(wider))
        whole = self._rounded(floats if axis == len(ref.shape) - 1 else floats.t(), to)
        return whole if wider == ref else whole.columns(before, before + ref.local_shape[axis])

    def _rounded(self, weight: Tensor, to: RoundedFormat) -> QuantizedWeight:
        dtype = self.backend.dtype if weight.dtype == torch.float32 else weight.dtype
        return rounded(weight, format_of(to, self.checkpoint.rounding.group, dtype))

    def log_formats(self, what: str) -> None:
        """One line about `what` was read, if any of it is in few bits in the checkpoint or here."""
        if set(self.kept) - {"floats"}:
            counts = (f"{count} x {words}" for words, count in sorted(self.kept.items()))
            _log.info("%s, matrices by format (floats are %s): %s", what, self.backend.dtype, "; ".join(counts))

    def tensor(self, refs: Sequence[TensorRef], dtype: torch.dtype | None = None) -> Tensor:
        """The tensors stacked along their rows: a copy on the back-end's device, in its dtype or in `dtype`."""
        return self._stacked(refs, self.backend.device, dtype or self.backend.dtype)

    def optional(self, plan: LoadPlan, purpose: str, dtype: torch.dtype | None = None) -> Tensor | None:
        return self.tensor(plan[purpose], dtype) if purpose in plan else None

    def linear(self, plan: LoadPlan, purpose: str) -> PackedLinear:
        """The packed projection of `purpose`. Its bias may cover the last rows only: the first get zeros."""
        refs = plan[purpose]
        bias = None
        if bias_refs := plan.get(purpose + "_bias"):
            bias = torch.zeros(sum(ref.local_shape[0] for ref in refs), dtype=self.backend.dtype)
            given = self._stacked(bias_refs, torch.device("cpu"), self.backend.dtype)
            bias[bias.shape[0] - given.shape[0] :] = given
        to = None if purpose == "head" else self.checkpoint.rounding.dense
        parts = [None if purpose in PLAIN_PURPOSES else self.packed(ref, to) for ref in refs]
        if (whole := stacked(parts)) is not None:
            with self._named(refs[0]):
                packed = self.backend.pack_linear(whole, bias)
            for ref in refs:
                self._done(ref, packed=True)
            self._note(whole.format, refs, to, ordered=whole.order is not None)
            return packed
        self._note(None, refs, to)
        if len(refs) == 1:
            with self.stored(refs[0]) as weight:
                return self.backend.pack_linear(weight, bias)
        return self.backend.pack_linear(self._stacked(refs, torch.device("cpu"), self.backend.dtype), bias)

    def new_experts(
        self, shape: ExpertShape, plan: Sequence[ExpertRefs], like: ExpertRefs, to: RoundedFormat | None
    ) -> PackedExperts:
        """Room for experts in the formats of `like`, as stored or rounded to `to`, filled with those in `plan`."""
        gate_up, down, _ = self._matrices(like, to)
        orders = [self._column_groups(refs) for refs in (like, *plan)]
        if any(not _equal(first, last) for first, last in orders):
            gate_up = None
        formats = ExpertFormats(
            gate_up=None if gate_up is None else gate_up[0].format,
            down=None if down is None else down.format,
            ordered=gate_up is not None and any(first is not None for first, _ in orders),
        )
        experts = self.backend.new_experts(shape, formats)
        for refs in plan[:EXPERTS_AHEAD]:
            self._will_need(refs)
        for index, refs in enumerate(plan):
            for later in plan[index + EXPERTS_AHEAD : index + EXPERTS_AHEAD + 1]:
                self._will_need(later)
            self.expert(experts, index, refs, to)
        for form, ref in ((formats.gate_up, like.gate_up[0]), (formats.down, like.down)):
            ordered = self.checkpoint.column_groups(ref.name) is not None
            self._note(form, [ref], to, len(plan), ordered=ordered)
        return experts

    def _column_groups(self, refs: ExpertRefs) -> tuple[Tensor | None, Tensor | None]:
        """The groups of gate's and up's columns, where they are not in order."""
        groups = [self.checkpoint.column_groups(ref.name) for ref in refs.gate_up]
        return groups[0], groups[-1]

    def _will_need(self, refs: ExpertRefs) -> None:
        """The disk reads while the experts before it are unpacked."""
        for ref in refs.refs:
            self.checkpoint.will_need(ref.name, ref.rows)

    def expert(self, experts: PackedExperts, index: int, refs: ExpertRefs, to: RoundedFormat | None) -> None:
        """Copy one expert into place. Experts are nearly all of a checkpoint: their numbers are not looked at.

        `CheckpointError` if it is not in the formats that the experts of its layer have."""
        formats = experts.formats
        pair, down, rows = self._matrices(refs, to, down_floats=formats.down is None)
        pair, down = None if formats.gate_up is None else pair, None if formats.down is None else down
        gate, up = pair or self._gate_up_floats(refs, rows)
        with self._named(refs.down):
            experts.set_expert(index, gate, up, self._down_floats(refs) if down is None else down)
        for ref in refs.gate_up:
            self._done(ref, packed=pair is not None)
        self._done(refs.down, packed=down is not None)
        if len(refs.biases) == 1:
            with self.stored(refs.biases[0]) as gate_up:
                experts.set_bias(index, gate_up[0, 0::2], gate_up[0, 1::2], self._down_bias(experts, refs))
        elif refs.biases:
            with self.stored(refs.biases[0]) as gate_bias, self.stored(refs.biases[1]) as up_bias:
                experts.set_bias(index, gate_bias[0], up_bias[0], self._down_bias(experts, refs))

    def _matrices(
        self, refs: ExpertRefs, to: RoundedFormat | None, *, down_floats: bool = False
    ) -> tuple[tuple[QuantizedWeight, QuantizedWeight] | None, QuantizedWeight | None, Tensor | None]:
        """Gate and up in few bits, and down; None where one is not stored so and not to be rounded, or gate and up
        differ. And the order of the down projection's columns, in which gate and up have their rows. `down_floats`:
        down is multiplied out, which puts its columns in the model's order."""
        is_ordered = self.checkpoint.column_groups(refs.down.name) is not None
        apart = refs.layout == "separate" and refs.gate_up[0].name != refs.gate_up[1].name and not refs.biases
        down: QuantizedWeight | None
        rows: Tensor | None = None
        if is_ordered and apart and self.backend.orders_columns and not down_floats:
            down, rows = self._ordered_down(refs.down)
        else:
            down = self._down(refs, to)
        pair = self._gate_up(refs, to, rows)
        if pair is not None and (pair[0].format != pair[1].format or not _equal(pair[0].order, pair[1].order)):
            pair = None
        return pair, down, rows

    def _ordered_down(self, ref: TensorRef) -> tuple[QuantizedWeight, Tensor]:
        """This rank's part of the columns as they are stored, and which they are. `CheckpointError` if groups are not
        full, since experts would differ in size."""
        whole = self.checkpoint.packed(ref.name, rows=ref.rows)
        assert whole is not None
        assert whole.order is not None
        if whole.stored_columns != whole.num_columns:
            raise CheckpointError(
                f"{self.checkpoint.file_of(ref.name)}: tensor {ref.name}: g_idx has groups of different sizes: use "
                f"another checkpoint of the model"
            )
        start, stop = (0, whole.num_columns) if ref.cut is None else ref.cut[1:]
        return whole.in_stored_order().columns(start, stop), whole.order[start:stop]

    def _gate_up(
        self, refs: ExpertRefs, to: RoundedFormat | None, rows: Tensor | None
    ) -> tuple[QuantizedWeight, QuantizedWeight] | None:
        """Both in few bits; None where one is not stored so, and not to be rounded."""
        if rows is not None:
            whole = [self.checkpoint.packed(ref.name) for ref in refs.gate_up]
            if len(whole) == 2 and whole[0] is not None and whole[1] is not None:
                return whole[0].rows_at(rows), whole[1].rows_at(rows)
            return None
        parts = [self.packed(ref) for ref in refs.gate_up]
        first, last = parts[0], parts[-1]
        if first is not None and last is not None and refs.layout not in ("rows", "columns"):
            if len(parts) == 2:
                return first, last
            return _turns(first) if refs.layout == "mxfp4" else _halves(first)
        if to is None:
            return None
        gate, up = self._gate_up_floats(refs, None)
        return self._rounded(gate, to), self._rounded(up, to)

    def _gate_up_floats(self, refs: ExpertRefs, rows: Tensor | None) -> tuple[Tensor, Tensor]:
        if rows is not None:
            gate, up = (self._floats(replace(ref, rows=None, cut=None)) for ref in refs.gate_up)
            return gate[rows], up[rows]
        first = self._floats(refs.gate_up[0])
        if refs.layout in ("separate", "rows"):
            return _matrix(first), _matrix(self._floats(refs.gate_up[1]))
        if refs.layout == "fused":
            gate, up = first.reshape(2, -1, first.shape[-1]).unbind(0)
            return gate, up
        gate_up = first[0].t() if refs.layout == "columns" else first[0]
        return gate_up[0::2], gate_up[1::2]

    def _down(self, refs: ExpertRefs, to: RoundedFormat | None) -> QuantizedWeight | None:
        is_turned = refs.layout in ("rows", "columns")
        stored = None if is_turned else self.packed(refs.down)
        if stored is not None and stored.order is not None:
            stored = None
        if stored is not None or to is None:
            return stored
        return self._rounded_part(refs.down, to, len(refs.down.shape) - (2 if is_turned else 1))

    def _down_floats(self, refs: ExpertRefs) -> Tensor:
        down = _matrix(self._floats(refs.down))
        return down.t() if refs.layout in ("rows", "columns") else down

    def _floats(self, ref: TensorRef) -> Tensor:
        return self.checkpoint.read(ref.name, rows=ref.rows, cut=ref.cut, dequantize_to=self.backend.dtype)

    @contextmanager
    def _named(self, ref: TensorRef) -> Iterator[None]:
        """What a back-end refuses (another format, a float8 that is no number) as `CheckpointError` with the tensor."""
        try:
            yield
        except ValueError as error:
            file = self.checkpoint.file_of(ref.name)
            raise CheckpointError(f"{file}: tensor {ref.name}: {error}: use another checkpoint of the model") from error

    def _note(
        self,
        kept: WeightFormat | None,
        refs: Sequence[TensorRef],
        to: RoundedFormat | None,
        count: int = 1,
        *,
        ordered: bool = False,
    ) -> None:
        """Count how matrices stayed; refs of matrices that did not stay in few bits, though stored so, say why."""
        if kept is not None and to is None:  # as stored: reading it once more would say nothing new
            self.kept[str(kept) + (" in act order" if ordered else "")] += count
            return
        stored = [self.checkpoint.packed(ref.name, rows=ref.rows, cut=ref.cut) for ref in refs]
        if kept is not None:
            self.kept[str(kept) + ("" if stored[0] is not None else ", rounded at load")] += count
            return
        formats = sorted({str(weight.format) for weight in stored if weight is not None})
        self.kept[f"{' and '.join(formats)}, multiplied out" if formats else "floats"] += count

    def _down_bias(self, experts: PackedExperts, refs: ExpertRefs) -> Tensor:
        """Zeros where another rank adds it."""
        if refs.down_bias is None:
            return torch.zeros(experts.shape.hidden)
        with self.stored(refs.down_bias) as down:
            return down[0].clone()

    def _stacked(self, refs: Sequence[TensorRef], device: torch.device, dtype: torch.dtype) -> Tensor:
        num_rows = sum(ref.local_shape[0] for ref in refs)
        out = torch.empty((num_rows, *refs[0].local_shape[1:]), dtype=dtype, device=device)
        first = 0
        for ref in refs:
            with self.stored(ref) as part:
                out[first : first + part.shape[0]].copy_(part)
                first += part.shape[0]
        return out


def stacked(parts: Sequence[QuantizedWeight | None]) -> QuantizedWeight | None:
    """The matrices one below the other, values unchanged; None if one is missing or they have no format in common."""
    given = [part for part in parts if part is not None]
    if len(given) != len(parts):
        return None
    if len(given) == 1:
        return given[0]
    by_row = _in_one_format([part.with_scale_per_row() for part in given])
    form = by_row[0].format
    if any(part.format != form or not _equal(part.order, by_row[0].order) for part in by_row):
        return None

    together: dict[str, Any] = {}
    for name in ("codes", "scales", "zeros", "offsets", "units"):
        found = [getattr(part, name) for part in by_row]
        if found[0] is not None:
            together[name] = torch.cat([as_bits(tensor) for tensor in found]).view(found[0].dtype)
    return replace(by_row[0], **together)


def _in_one_format(parts: list[QuantizedWeight]) -> list[QuantizedWeight]:
    """Whole numbers with scales of one kind as 8-bit codes in the narrowest groups, as q, k and v of llama.cpp's mixes;
    other matrices as they are."""
    forms = [part.format for part in parts]
    is_one = all(form == forms[0] for form in forms)
    whole = all(form.codes in ("int8", "int4") and form.offset != "zeros" for form in forms)
    groups = [form.columns_per_scale or 0 for form in forms]
    alike = len({form.scale_dtype for form in forms}) == 1 and all(part.order is None for part in parts)
    if is_one or not whole or not alike or not all(groups):
        return parts
    offset: OffsetKind = "offsets" if any(form.offset == "offsets" for form in forms) else "none"
    return [_in_bytes(part, math.gcd(*groups), offset) for part in parts]


def _in_bytes(part: QuantizedWeight, group: int, offset: OffsetKind) -> QuantizedWeight:
    """The same values from 8-bit codes, in these groups, with an offset that may be 0."""
    form, units = part.format, part.units
    codes = part.codes
    if form.codes == "int4":
        codes = unpack_nibbles(codes)[:, : part.num_columns].to(torch.int8) - (8 if form.offset == "none" else 0)
    times, num_groups = (form.columns_per_scale or group) // group, -(-part.num_columns // group)
    scales = part.scales.repeat_interleave(times, dim=1)[:, :num_groups]
    offsets = part.offsets
    if offsets is not None:
        offsets = offsets.repeat_interleave(times, dim=1)[:, :num_groups]
    elif offset == "offsets":
        offsets = torch.zeros(scales.shape, dtype=form.offset_dtype)
        units = None if units is None else torch.stack((units, torch.zeros_like(units)), dim=2).flatten(1)
    form = replace(form, codes="int8", columns_per_scale=group, offset=offset)
    return replace(part, format=form, codes=codes, scales=scales, offsets=offsets, units=units)


def _equal(one: Tensor | None, other: Tensor | None) -> bool:
    return one is other if one is None or other is None else torch.equal(one, other)


def _halves(weight: QuantizedWeight) -> tuple[QuantizedWeight, QuantizedWeight]:
    middle = weight.num_rows // 2
    weight = weight.with_scale_per_row()
    return weight.rows(0, middle), weight.rows(middle, weight.num_rows)


def _turns(weight: QuantizedWeight) -> tuple[QuantizedWeight, QuantizedWeight]:
    """The even and the odd rows."""
    weight = weight.with_scale_per_row()
    first, second = (replace(weight, codes=weight.codes[start::2], scales=weight.scales[start::2]) for start in (0, 1))
    return first, second


def _matrix(tensor: Tensor) -> Tensor:
    """Without the axis of one expert that stacked tensors have."""
    return tensor[0] if tensor.ndim == 3 else tensor


def check_finite(tensor: Tensor, name: str, file: str) -> None:
    """`CheckpointError` that names tensor, file and place if a number is NaN or infinite. `tensor` is on the CPU.

    One such number in a norm or an embedding makes every answer nonsense. A sum is finite only if every number is, and
    takes one pass at the speed of memory. A sum that is not finite may just be too large for its dtype: then the
    smallest and the largest number decide (`aminmax` hands NaN on), and only where they are not finite does a slow pass
    look for the place. Rejected: `isfinite().all()`, which writes a mask first and takes seventy times as long on
    bfloat16."""
    if tensor.numel() == 0 or torch.isfinite(tensor.sum()):
        return
    low, high = torch.aminmax(tensor)
    if torch.isfinite(low) and torch.isfinite(high):
        return
    place = torch.isfinite(tensor).logical_not().nonzero()[0].tolist()
    value = float(tensor[tuple(place)])
    raise CheckpointError(
        f"{file}: tensor {name} holds {value} at {place}: the weights are damaged, download the file again"
    )
