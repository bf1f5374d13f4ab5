"""Tiles of the grouped product and which product experts use: from a table that `antiphon tune` measures, or by rule.

The table is a JSON file of entries: what weight on what GPU, the product of experts with it, and a list of [most rows
an expert, tile] in ascending order, one a batch bucket. It is the file that ANTIPHON_TILES names, or
`~/.cache/antiphon/tiles.json`, and is read once a process.
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

import torch
import triton

from antiphon.base.errors import UserError
from antiphon.base.logging import get_logger
from antiphon.kernels.triton.launch import capability_of, power_of_two
from antiphon.kernels.triton.weights import StackedWeight

_log = get_logger("kernels")
PRODUCTS = ("triton", "grouped_mm")


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
    """An entry: the product that experts use whose gate and up it is, and (most rows an expert, tile) in ascending
    order, or none where the rule's tiles are the quickest."""

    product: str = "triton"
    tiles: list[tuple[float, ProductTile]] = field(default_factory=list)

    def tile_for(self, weight: StackedWeight, num_rows: int, device: torch.device) -> ProductTile:
        """Beyond the last bucket it is the last one's, because the rule's may sum in another order."""
        if not self.tiles:
            return default_tile(weight, num_rows, capability_of(device))
        return next((tile for most, tile in self.tiles if num_rows <= most * weight.num_experts), self.tiles[-1][1])


Table = dict[tuple[Any, ...], TunedWeight]
_BY_RULE = TunedWeight()


def tile_for(weight: StackedWeight, num_rows: int, device: torch.device) -> ProductTile:
    """The tile for this weight and about so many rows over all its experts."""
    return _entry(key_of(weight, device)).tile_for(weight, num_rows, device)


def product_for(gate_up: StackedWeight, device: torch.device) -> str:
    """ "triton" or "grouped_mm": the product for experts with this gate and up."""
    return _entry(key_of(gate_up, device)).product


def default_tile(weight: StackedWeight, num_rows: int, capability: int) -> ProductTile:
    """By rule: as many rows as an expert gets on average, within what a program holds."""
    rows = min(128, max(16, power_of_two(-(-num_rows // weight.num_experts))))
    if weight.dtype == torch.float32:
        return ProductTile(rows=32, columns=32, inputs=32, warps=4, stages=2)
    inputs = 64
    if weight.format is not None:
        columns = 32 if weight.format.nibbles and capability < 90 else 64
        warps = 8 if weight.format.nibbles and columns == 64 else 4
        return ProductTile(rows=min(64, rows), columns=columns, inputs=inputs, warps=warps, stages=3)
    if rows >= 64:
        columns = 64 if weight.num_parts == 2 and capability < 90 else 128  # two sums a tile need registers
        return ProductTile(rows=rows, columns=columns, inputs=inputs, warps=8 if rows == 128 else 4, stages=3)
    return ProductTile(rows=rows, columns=64, inputs=inputs, warps=4, stages=4)


def key_of(weight: StackedWeight, device: torch.device) -> tuple[Any, ...]:
    """What an entry is for: GPU, Triton's version, parts, outputs, inputs, and how numbers are stored."""
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
    kind, form = str(weight.dtype).removeprefix("torch."), weight.format
    if form is not None:
        blocks = f"{form.rows_per_scale or 'all'} x {form.columns_per_scale or 'all'}"
        kind = f"{form.codes} in {kind}, scales of {blocks}, offset {form.offset}"
    return gpu, triton.__version__, weight.num_parts, weight.num_rows, weight.num_columns, kind


def table_path() -> Path:
    return Path(os.environ.get("ANTIPHON_TILES") or Path.home() / ".cache" / "antiphon" / "tiles.json")


@cache
def process_table() -> Table:
    """The table of this process, read by the first call. `UserError` if ANTIPHON_TILES names no file."""
    path = table_path()
    if not path.exists():
        if os.environ.get("ANTIPHON_TILES"):
            raise UserError(f"ANTIPHON_TILES is {path}, which is no file: write it with antiphon tune, or unset it")
        return {}
    return read_table(path)


@cache
def _entry(key: tuple[Any, ...]) -> TunedWeight:
    """The entry for a weight; the log says once for each whether there is one, if there is a table."""
    table = process_table()
    found = table.get(key, _BY_RULE)
    if table:
        gpu, _, parts, outputs, inputs, kind = key
        source = f"from {table_path()}" if key in table else f"by rule: {table_path()} has no such entry"
        _log.info(
            "kernels: %d x %d x %d in %s on %s: product %s, tiles %s",
            parts, outputs, inputs, kind, gpu, found.product, source,
        )  # fmt: skip
    return found


def read_table(path: Path) -> Table:
    """Entries by key; `UserError` for a file that is not such a table."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return {tuple(entry["key"]): _read_entry(entry) for entry in found["entries"]}
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UserError(f"{path} is no table of tiles ({error}): write it with antiphon tune") from error


def _read_entry(entry: dict[str, Any]) -> TunedWeight:
    if entry["product"] not in PRODUCTS:
        raise ValueError(f"product is {entry['product']!r}, not one of {', '.join(PRODUCTS)}")
    tiles = [(float(most), ProductTile(**tile)) for most, tile in entry["tiles"]]
    return TunedWeight(product=entry["product"], tiles=tiles)


def write_table(path: Path, table: Table) -> None:
    """The reverse of `read_table`."""
    entries = [
        {"key": list(key), "product": entry.product, "tiles": [[most, vars(tile)] for most, tile in entry.tiles]}
        for key, entry in table.items()
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"entries": entries}, indent=1) + "\n", encoding="utf-8")
