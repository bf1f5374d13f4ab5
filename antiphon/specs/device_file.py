"""Devices from TOML files, shipped or a user's own, and to JSON and back.

A file holds the fields of `DeviceSpec` and a table `[sources]` with one text per field: a shipped number without a
source is a fault that a test finds; a user's own file need not say. `flops_per_s` is a table by compute dtype, DENSE
rates; links are ONE direction (makers print both together); GB are decimal, as printed.
"""

from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from antiphon.specs.catalog import shipped_file
from antiphon.specs.device import DeviceSpec
from antiphon.specs.strict_table import Table, read_table


def load_device(name_or_path: str | Path) -> DeviceSpec:
    """A shipped device (``"H20"``) or that of a TOML or JSON file; `UserError` names what is wrong and where."""
    table = read_table(shipped_file("device", name_or_path))
    for key in ("aliases", "summary", "source"):
        table.has(key)
    return device_from_table(table)


def device_from_table(table: Table) -> DeviceSpec:
    """The device a table describes; unknown keys, wrong types and sizes of zero or less are refused."""
    sources = table.optional_table("sources")
    given = {field.name: sources.text(field.name) for field in fields(DeviceSpec) if sources.has(field.name)}
    sources.finish()
    return table.read(DeviceSpec, sources=given)


def device_to_json(device: DeviceSpec) -> dict[str, Any]:
    """What `device_from_table` reads back as an equal device."""
    return {key: value for key, value in asdict(device).items() if value is not None}
