"""A layout as text, and what a user calls each of its sizes.

A layout as text: ``2`` is two replicas, ``3+2/m4`` three attention and two expert workers with four micro-batches.

    [Nx] A [tR] [pS] [*E] [+ F [tR]] [/mM]

`A` attention workers or replicas of `R` ranks and `S` stages; `F` expert workers of `R` ranks; ``*E``: hybrid, replicas
that share experts, each on `E` ranks; `N` instances of all that; `M` micro-batches in turn. So ``1t2+1t3`` is one
attention worker of two ranks and one expert worker of three; ``2t2*1`` a hybrid of two replicas of two ranks. Where
prefill and decode are apart there are two layouts. Rejected: every option once more with `--prefill-` before it.

A refusal names what the user wrote: ``--tp``, or the ranks of an attention worker in ``--decode 1t0`` or in a phase of
a plan (`size_name`, `layout_name`).
"""

import re
from collections.abc import Mapping
from typing import Any, Literal

from antiphon.base.errors import UserError, shortened
from antiphon.specs.plan import MAX_MICRO_BATCHES

Layout = Literal["colocated", "disaggregated", "hybrid"]
_LAYOUT = re.compile(
    r"(?:(?P<instances>\d+)x)?(?P<attention>\d+)(?:t(?P<tp>\d+))?(?:p(?P<pp>\d+))?(?:\*(?P<hybrid>\d+))?"
    r"(?:\+(?P<experts>\d+)(?:t(?P<expert_tp>\d+))?)?(?:/m(?P<m>\d+))?"
)
_MOST_DIGITS = 18  # of a size; any so large is refused
_EXAMPLES = "2 (replicas), 2t2 (of two ranks), 1+2/m2 (attention + experts, micro-batches) or 2t2*1 (hybrid)"
_SIZES = {  # field of a configuration -> option, words where it stands in a text or a plan
    "num_attention": ("--attention", "attention workers or replicas"),
    "num_experts": ("--experts", "expert workers"),
    "num_instances": ("--instances", "instances"),
    "attention_tp": ("--tp", "ranks of an attention worker"),
    "expert_tp": ("--expert-tp", "ranks of an expert"),
    "num_stages": ("--pp", "stages"),
    "num_micro_batches": ("--micro-batches", "micro-batches"),
}
LAYOUT_FIELDS = ("layout", *_SIZES)
_SHAPES: dict[Layout, str] = {
    "colocated": "replicas (as 2)",
    "disaggregated": "expert workers (as 1+1/m2)",
    "hybrid": "a hybrid layout (as 2*1)",
}


def size_name(field: str, written_in: str) -> str | None:
    """What a user calls a field of a configuration: an option, or a part of the text or the plan phase `written_in`;
    None: it is no size of a layout."""
    if field not in _SIZES:
        return None
    option, words = _SIZES[field]
    return f"{written_in}: number of {words}" if written_in else option


def sizes_text(values: Mapping[str, int], written_in: str) -> str:
    """Such fields with their values: ``--tp 2 and --pp 3``, or ``2 stages in --decode 2p2``."""
    if not written_in:
        return " and ".join(f"{_SIZES[field][0]} {value}" for field, value in values.items())
    words = " and ".join(f"{value} {_SIZES[field][1]}" for field, value in values.items())
    return f"{words} in {written_in}"


def layout_name(written_in: str, *layouts: Layout) -> str:
    """One of these layouts, as a user can ask for it: ``--layout hybrid``, or ``a hybrid layout in --decode 2``."""
    if not written_in:
        return f"--layout {' or '.join(layouts)}"
    return f"{' or '.join(_SHAPES[each] for each in layouts)} in {written_in}"


def parse_layout(option: str, text: str) -> dict[str, Any]:
    """Fields of a `ServeConfig`; `UserError` names the option. The configuration checks the sizes; its refusals name
    `option` and `text`."""
    found = _LAYOUT.fullmatch(text.replace(" ", ""))
    if found is None:
        raise UserError(f"{option} is {shortened(text)!r}: write a layout, for example {_EXAMPLES}")
    given = {name: int(value[:_MOST_DIGITS]) for name, value in found.groupdict().items() if value is not None}
    if "hybrid" in given and "experts" in given:
        raise UserError(f"{option} is {shortened(text)!r}: replicas that share experts (*) have no expert workers (+)")
    layout = "disaggregated" if "experts" in given else "hybrid" if "hybrid" in given else "colocated"
    num_stages = given.get("pp", 1)
    return {
        "written_in": f"{option} {shortened(text)}",
        "layout": layout,
        "num_instances": given.get("instances", 1),
        "num_attention": given["attention"],
        "num_experts": given.get("experts", 1),
        "attention_tp": given.get("tp", 1),
        "expert_tp": given.get("expert_tp", given.get("hybrid", 1)),
        "num_stages": num_stages,
        "num_micro_batches": given.get("m", 2 if layout == "disaggregated" else min(num_stages, MAX_MICRO_BATCHES)),
    }
