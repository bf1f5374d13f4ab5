"""The tables `[memory]` and `[overlap]` of a run: what layers keep for backward, and in which order they run."""

from dataclasses import dataclass
from typing import Literal

from antiphon.base.errors import UserError
from antiphon.comm.tiles import check_tile_rows
from antiphon.specs.strict_table import CountFromZero


@dataclass(frozen=True, kw_only=True)
class MemoryConfig:
    """What a layer keeps between forward and backward (`train.layer_plan`); the rest is made, or received, again.

    `remake`: "none" keeps all that backward reads, "selective" makes norms, activations and exchanges again (MegaScale-
    MoE, section 4.1), "full" keeps the layer's input and its routing. `keep`: instead, the tensors to keep, by name.
    `again`: instead, what to make again, in the words of a plan (`cost.training.rematerialize`). `activation_bytes`:
    instead, a limit to what a rank keeps; what is cheapest for its bytes is made again until the rest fits (0: no
    limit)."""

    remake: Literal["none", "selective", "full"] = "none"
    keep: tuple[str, ...] = ()
    again: tuple[str, ...] = ()
    activation_bytes: CountFromZero = 0

    def __post_init__(self) -> None:
        given = [
            name
            for name, is_given in (
                ("remake", self.remake != "none"),
                ("keep", bool(self.keep)),
                ("again", bool(self.again)),
                ("activation_bytes", bool(self.activation_bytes)),
            )
            if is_given
        ]
        if len(given) > 1:
            raise UserError(f"{' and '.join(given)} are given: each decides what is kept, so give one of them")


@dataclass(frozen=True, kw_only=True)
class OverlapConfig:
    """`schedule`: a file with the order of a layer's operators, as `train.layer_schedule` reads it (empty: its default
    one). `search`: find an order from times measured before the first step. `beside` False: the default order, but
    each exchange is waited for where it is started.

    `inside`: experts' products begin with the rows that are there, and rows leave as soon as they are made, in tiles of
    `tile_rows` (MegaScale-MoE, section 4.2; `train.tiled`). `pairs`: two micro-batches of a step in turns, one computes
    while the other one waits (`train.layer_run`). `tiles_first`: links that obey marks carry tiles ahead of all other
    traffic (`comm.m2n.tile_links`)."""

    schedule: str = ""
    search: bool = False
    beside: bool = True
    inside: bool = False
    pairs: bool = False
    tile_rows: int = 256
    tiles_first: bool = False

    def __post_init__(self) -> None:
        check_tile_rows(self.tile_rows)
        if self.inside and (self.search or not self.beside):
            raise UserError(
                "inside is true: a search measures exchanges and products apart, and without beside nothing overlaps: "
                "leave out search and beside, or inside"
            )
        if self.tiles_first and not self.inside:
            raise UserError("tiles_first is true and inside is false, so there are no tiles: set inside to true too")
        if not self.beside and (self.schedule or self.search):
            raise UserError(
                "beside is false, so nothing runs beside an exchange: leave out schedule and search, or beside"
            )
        if self.schedule and self.search:
            raise UserError(f"schedule is {self.schedule} and search is true: give one of them")
