"""Tiles of the grouped product: from a table that `antiphon tune` measures, or by rule.

The table is a JSON file of entries: GPU, Triton's version, experts, parts, outputs, inputs, format, and a list of [most
rows, tile] in ascending order, one a batch bucket. It is the file that ANTIPHON_TILES names, or
`~/.cache/antiphon/tiles.json`.
`inputs` of a tile is the order in which a row is summed, so it is the same in all buckets of an entry: a row's bits do
not depend on how many others there are.
"""

import json
import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import triton

from antiphon.base.errors import UserError
from antiphon.kernels.triton.launch import capability_of, power_of_two
from antiphon.kernels.triton.weights import StackedWeight


@dataclass(frozen=True, kw_only=True)
class ProductTile:
    """What one program makes: `rows` by `columns`, `inputs` at a time; and its warps and stages of loads in flight."""

    rows: int
    columns: int
    inputs: int
    warps: int
    stages: int


def tile_for(weight: StackedWeight, num_rows: int, device: torch.device) -> ProductTile:
    """The tile for this weight and about so many rows over all its experts."""
    for most_rows, tile in _entries().get(key_of(weight, device), ()):
        if num_rows <= most_rows:
            return tile
    return default_tile(weight, num_rows, capability_of(device))


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
    """What an entry is for."""
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
    kind = str(weight.dtype).removeprefix("torch.") if weight.format is None else weight.format.codes
    shape = weight.num_experts, weight.num_parts, weight.num_rows, weight.num_columns
    return gpu, triton.__version__, *shape, kind


def table_path() -> Path:
    return Path(os.environ.get("ANTIPHON_TILES") or Path.home() / ".cache" / "antiphon" / "tiles.json")


@cache
def _entries() -> dict[tuple[Any, ...], list[tuple[int, ProductTile]]]:
    path = table_path()
    return read_table(path) if path.exists() else {}


def read_table(path: Path) -> dict[tuple[Any, ...], list[tuple[int, ProductTile]]]:
    """Entries by key; `UserError` for a file that is not such a table."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return {
            tuple(entry["key"]): [(int(most), ProductTile(**tile)) for most, tile in entry["tiles"]]
            for entry in found["entries"]
        }
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UserError(f"{path} is no table of tiles ({error}): write it with antiphon tune") from error


def write_table(path: Path, table: dict[tuple[Any, ...], list[tuple[int, ProductTile]]]) -> None:
    """The reverse of `read_table`."""
    entries = [
        {"key": list(key), "tiles": [[most, vars(tile)] for most, tile in tiles]} for key, tiles in table.items()
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"entries": entries}, indent=1) + "\n", encoding="utf-8")
