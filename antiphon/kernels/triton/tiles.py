"""Tiles of the grouped product: from the table of `antiphon tune` (`antiphon.kernels.choices`), or by rule."""

from functools import cache
from typing import Any

import torch
import triton

from antiphon.base.logging import get_logger
from antiphon.kernels.choices import ProductTile, TunedWeight, process_table, table_path
from antiphon.kernels.stacked import StackedWeight
from antiphon.kernels.triton.launch import capability_of, power_of_two

_log = get_logger("kernels")
_BY_RULE = TunedWeight()


def tile_for(weight: StackedWeight, num_rows: int, device: torch.device) -> ProductTile:
    """The tile for this weight and about `num_rows` rows over all its experts."""
    return tuned_tile(_entry(key_of(weight, device)), weight, num_rows, device)


def tuned_tile(entry: TunedWeight, weight: StackedWeight, num_rows: int, device: torch.device) -> ProductTile:
    """That of an entry, or the rule's where it has none."""
    if entry.tiles:
        return entry.tile_for(num_rows, weight.num_experts)
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


def key_of_gpu(device: torch.device) -> tuple[str, str]:
    """The GPU and Triton's version."""
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
    return gpu, str(triton.__version__)


def key_of(weight: StackedWeight, device: torch.device) -> tuple[Any, ...]:
    """What an entry is for: GPU, Triton's version, parts, outputs, inputs, and how numbers are stored."""
    kind, form = str(weight.dtype).removeprefix("torch."), weight.format
    if form is not None:
        blocks = f"{form.rows_per_scale or 'all'} x {form.columns_per_scale or 'all'}"
        kind = f"{form.codes} in {kind}, scales of {blocks}, offset {form.offset}"
    return *key_of_gpu(device), weight.num_parts, weight.num_rows, weight.num_columns, kind


@cache
def _entry(key: tuple[Any, ...]) -> TunedWeight:
    """The entry for a weight; the log says once for each whether there is one, if there is a table."""
    table = process_table()
    found = table.get(key, _BY_RULE)
    if table:
        gpu, _, parts, outputs, inputs, kind = key
        source = f"from {table_path()}" if key in table else f"by rule: {table_path()} has no such entry"
        _log.info(
            "kernels: %d x %d x %d in %s on %s: tiles %s", parts, outputs, inputs, kind, gpu, source
        )  # fmt: skip
    return found
