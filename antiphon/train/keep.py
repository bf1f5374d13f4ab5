"""What is kept between forward and backward of a layer, and what is made again (MegaScale-MoE, section 4.1).

    none        keep all that backward reads
    selective   keep what is dear to make: products and attention; make norms, activations and exchanges again
    full        keep the layer's input and its routing
    a list      keep these tensors, by name

What is made again may be received again: an operator that is run again may be an exchange. Choices of experts, counts
and maps of rows are always kept: choosing again could choose otherwise.

Rejected: `torch.utils.checkpoint`. It runs a whole layer again before its backward begins, products and all; here each
tensor is made again where the backward schedule says, beside other work.
"""

from collections.abc import Collection
from dataclasses import dataclass

from antiphon.base.errors import UserError
from antiphon.specs.checked import nearest_names
from antiphon.train.operators import Graph, whole_name

PROJECTED = ("qkv", "qkv_a2a")  # one of them, if backward reads it: `qkv_a2a` in tiles
DEAR = (*PROJECTED, "attn", "ln2_in", "fc1_out", "fc2_out", "returned", "shared_fc1_out", "shared_out", "dense_fc1_out")
HEADS = ("q_a2a", "k_a2a", "v_a2a")
Keep = str | tuple[str, ...]


@dataclass(frozen=True)
class Keeping:
    """`kept`: names held until backward; `again`: operators that backward runs again."""

    kept: frozenset[str]
    again: frozenset[str]


def keeping(graph: Graph, keep: Keep, dropped: Collection[str] = ()) -> Keeping:
    """Under a policy or a list of names; "none" without those in `dropped`. A name may be of another kind of layer;
    `check_names` refuses it if it is of none."""
    saved = graph.saved
    if keep == "none":
        wanted = {whole_name(name) for name in saved} - set(dropped)
    elif keep == "selective":
        wanted = {*DEAR, *(HEADS if saved.isdisjoint(PROJECTED) else ())}
    elif keep == "full":
        wanted = set[str]()
    else:
        wanted = set(keep)
    kept, again = {graph.begin}, set[str]()
    kept.update(name for each in graph.operators.values() if each.once for name in each.makes)
    waiting = list(saved)
    while waiting:
        name = waiting.pop()
        maker = graph.maker_of.get(name)
        if name in kept or maker is None:
            continue
        if whole_name(name) in wanted:
            kept.add(name)  # even if its maker runs again for another name: what comes out of it is wanted
        elif maker.name not in again:
            again.add(maker.name)
            waiting += maker.reads
    return Keeping(frozenset(kept), frozenset(again))


def check_names(keep: Collection[str], graphs: Collection[Graph]) -> None:
    """`UserError` for a name that no layer of the model has."""
    known = sorted({whole_name(name) for graph in graphs for name in graph.maker_of})
    for name in keep:
        if name not in known:
            raise UserError(
                f"memory.keep names {name!r}, which no layer of this model has: did you mean "
                f"{' or '.join(nearest_names(name, known)) or 'none'}? There are: {', '.join(known)}"
            )
