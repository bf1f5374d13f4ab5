"""A layout as text: ``2`` is two replicas, ``3+2/m4`` three attention and two expert workers with four micro-batches.

    [Nx] A [tR] [pS] [*E] [+ F [tR]] [/mM]

`A` attention workers or replicas of `R` ranks and `S` stages; `F` expert workers of `R` ranks; ``*E``: hybrid, replicas
that share experts, each on `E` ranks; `N` instances of all that; `M` micro-batches in turn. So ``1t2+1t3`` is one
attention worker of two ranks and one expert worker of three; ``2t2*1`` a hybrid of two replicas of two ranks.

Where prefill and decode are apart there are two layouts, so that one set of options is not enough. Rejected: every
option once more with `--prefill-` before it.
"""

import re
from typing import Any

from antiphon.base.errors import UserError
from antiphon.specs.plan import MAX_MICRO_BATCHES

_LAYOUT = re.compile(
    r"(?:(?P<instances>\d+)x)?(?P<attention>\d+)(?:t(?P<tp>\d+))?(?:p(?P<pp>\d+))?(?:\*(?P<hybrid>\d+))?"
    r"(?:\+(?P<experts>\d+)(?:t(?P<expert_tp>\d+))?)?(?:/m(?P<m>\d+))?"
)
_EXAMPLES = "2 (replicas), 2t2 (of two ranks), 1+2/m2 (attention + experts, micro-batches) or 2t2*1 (hybrid)"


def parse_layout(option: str, text: str) -> dict[str, Any]:
    """Fields of a `ServeConfig`; `UserError` names the option. Sizes are checked by the configuration they go into."""
    found = _LAYOUT.fullmatch(text.replace(" ", ""))
    if found is None:
        raise UserError(f"{option} is {text!r}: write a layout, for example {_EXAMPLES}")
    given = {name: int(value) for name, value in found.groupdict().items() if value is not None}
    if "hybrid" in given and "experts" in given:
        raise UserError(f"{option} is {text!r}: replicas that share experts (*) have no expert workers (+)")
    layout = "disaggregated" if "experts" in given else "hybrid" if "hybrid" in given else "colocated"
    num_stages = given.get("pp", 1)
    return {
        "layout": layout,
        "num_instances": given.get("instances", 1),
        "num_attention": given["attention"],
        "num_experts": given.get("experts", 1),
        "attention_tp": given.get("tp", 1),
        "expert_tp": given.get("expert_tp", given.get("hybrid", 1)),
        "num_stages": num_stages,
        "num_micro_batches": given.get("m", 2 if layout == "disaggregated" else min(num_stages, MAX_MICRO_BATCHES)),
    }
