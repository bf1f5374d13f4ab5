"""The file of tiles of grouped products, and the file's entries. `antiphon.kernels.triton.tiles` reads it for a weight.

A JSON file of entries: what weight on what GPU, and a list of [most rows an expert, tile] in ascending order, one a
batch bucket. It is the file that ANTIPHON_TILES names, or `~/.cache/antiphon/tiles.json`, and is read once a process.
Nothing is measured while serving, because a stopwatch would decide a row's bits anew in every process. `inputs` of a
tile is the order in which a row is summed, so it is the same in all buckets of an entry; and entries do not depend on
how many experts a worker holds. So workers with the same table and the same kind of GPU give a row the same bits.
"""

import json
import os
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from antiphon.base.errors import UserError
from antiphon.kernels.choices import table_path


@dataclass(frozen=True, kw_only=True)
class ProductTile:
    """What one program makes: `rows` by `columns`, `inputs` at a time; and its warps and stages of loads in flight."""

    rows: int
    columns: int
    inputs: int
    warps: int
    stages: int


@dataclass(frozen=True, kw_only=True)
class TunedWeight:
    """An entry: (most rows an expert, tile) in ascending order, or none where the rule's tiles are the quickest."""

    tiles: list[tuple[float, ProductTile]] = field(default_factory=list)

    def tile_for(self, num_rows: int, num_experts: int) -> ProductTile:
        """Beyond the last bucket it is the last one's, because the rule's may sum in another order."""
        return next((tile for most, tile in self.tiles if num_rows <= most * num_experts), self.tiles[-1][1])


Table = dict[tuple[Any, ...], TunedWeight]


@cache
def process_table() -> Table:
    """The table of this process, read by the first call. `UserError` if ANTIPHON_TILES names no file."""
    path = table_path()
    if not path.exists():
        if os.environ.get("ANTIPHON_TILES"):
            raise UserError(f"ANTIPHON_TILES is {path}, which is no file: write it with antiphon tune, or unset it")
        return {}
    return read_table(path)


def read_table(path: Path) -> Table:
    """Entries by key; `UserError` for a file that is not such a table."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return {tuple(entry["key"]): _entry_of(entry["tiles"]) for entry in found["entries"]}
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UserError(f"{path} is no table of tiles ({error}): write it with antiphon tune") from error


def _entry_of(tiles: list[Any]) -> TunedWeight:
    return TunedWeight(tiles=[(float(most), ProductTile(**tile)) for most, tile in tiles])


def write_table(path: Path, table: Table) -> None:
    """The reverse of `read_table`."""
    entries = [
        {"key": list(key), "tiles": [[most, vars(tile)] for most, tile in entry.tiles]} for key, entry in table.items()
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"entries": entries}, indent=1) + "\n", encoding="utf-8")
