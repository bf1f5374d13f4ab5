"""The part of a load plan that one rank of a tensor-parallel group reads: its rows and columns of the stored tensors.

A plan stacks the tensors of a purpose along their rows. So the rows of a share become rows of one tensor after the
other, and its columns a cut of each. What a rank leaves out is never mapped, let alone read; only of a matrix whose
columns it takes the pages between them come along where a row is shorter than a page.
"""

import itertools
from collections.abc import Sequence
from dataclasses import replace

from antiphon.models.shares import Range, Ranges, Share, head_ranges
from antiphon.models.tensors import ExpertRefs, LoadPlan, TensorRef
from antiphon.specs.model import ModelSpec

_VOCABULARY = ("embedding", "head", "head_bias")


def plan_of(plan: LoadPlan, spec: ModelSpec, share: Share) -> LoadPlan:
    """What this rank reads of a plan of the attention half."""
    if share.is_whole:
        return plan
    found: LoadPlan = {}
    for purpose, refs in plan.items():
        if purpose == "out_bias" and not share.leads:
            continue
        found[purpose] = _of_purpose(purpose, refs, spec, share)
    return found


def expert_of(refs: ExpertRefs, width: int, share: Share) -> ExpertRefs:
    """What this rank reads of one expert of this width."""
    if share.is_whole:
        return refs
    first, last = share.columns(width)
    layout = refs.layout
    if layout == "rows":
        parts = [_rows(ref, (first, last)) for ref in (*refs.gate_up, refs.down)]
        return replace(refs, gate_up=tuple(parts[:-1]), down=parts[-1])
    if layout in ("columns", "mxfp4"):  # gate and up in turns
        axis, down_axis = (2, 1) if layout == "columns" else (1, 2)
        return replace(
            refs,
            gate_up=(replace(refs.gate_up[0], cut=(axis, 2 * first, 2 * last)),),
            down=replace(refs.down, cut=(down_axis, first, last)),
            biases=_biases(refs.biases, (first, last), share),
        )
    if refs.down.rows is not None:  # stacked: an expert is one row of the first axis
        ref = refs.gate_up[0]
        gate_up = tuple(replace(ref, cut=(1, start + first, start + last)) for start in (0, width))
        return replace(refs, layout="separate", gate_up=gate_up, down=replace(refs.down, cut=(2, first, last)))
    gate_up = tuple(_of_rows(refs.gate_up, ((first, last), (width + first, width + last))))
    return replace(refs, layout="separate", gate_up=gate_up, down=replace(refs.down, cut=(1, first, last)))


def _biases(biases: tuple[TensorRef, ...], columns: Range, share: Share) -> tuple[TensorRef, ...]:
    if not biases:
        return ()
    gate_up = replace(biases[0], cut=(1, 2 * columns[0], 2 * columns[1]))
    return (gate_up, biases[1]) if share.leads else (gate_up,)


def _of_purpose(purpose: str, refs: tuple[TensorRef, ...], spec: ModelSpec, share: Share) -> tuple[TensorRef, ...]:
    if purpose in _VOCABULARY:
        return tuple(_of_rows(refs, (share.vocabulary,)))
    kind, _, matrix = purpose.partition(".")
    if matrix:
        widths = spec.feed_forward
        width = widths.dense_intermediate if kind == "dense" else widths.shared_intermediate
        first, last = share.columns(width)
        if matrix == "down":
            return (replace(refs[0], cut=(1, first, last)),)
        return tuple(_of_rows(refs, ((first, last), (width + first, width + last))))
    kv_heads = _merged(tuple((head, head + 1) for head in share.kv_heads))
    own = head_ranges(spec.attention, purpose, share.q_heads, kv_heads)
    if own is None:
        return refs
    dim, ranges = own
    if dim == 0:
        return tuple(_of_rows(refs, _merged(ranges)))
    ((first, last),) = ranges
    return tuple(replace(ref, cut=(dim, first, last)) for ref in refs)


def _merged(ranges: Ranges) -> Ranges:
    """The same indices in the same order in as few ranges as can be."""
    found: list[Range] = []
    for start, stop in ranges:
        if found and found[-1][1] == start:
            found[-1] = found[-1][0], stop
        else:
            found.append((start, stop))
    return tuple(found)


def _of_rows(refs: Sequence[TensorRef], ranges: Ranges) -> list[TensorRef]:
    """These rows of the stacked tensors, in the order of `ranges`."""
    starts = [0, *itertools.accumulate(ref.shape[0] for ref in refs)]
    found = []
    for start, stop in ranges:
        for ref, begin in zip(refs, starts, strict=False):
            first, last = max(start - begin, 0), min(stop - begin, ref.shape[0])
            if first < last:
                found.append(replace(ref, rows=(first, last)))
    return found


def _rows(ref: TensorRef, part: Range) -> TensorRef:
    """Part of the rows that `ref` already picks."""
    assert ref.rows is not None, "experts stacked by rows are picked by rows"
    return replace(ref, rows=(ref.rows[0] + part[0], ref.rows[0] + part[1]))
