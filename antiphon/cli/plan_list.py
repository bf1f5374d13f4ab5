"""`antiphon plan --list`: the devices, clusters, workloads and models that are shipped."""

from typing import get_args

from rich.console import RenderableType

from antiphon.cli.output import show, table
from antiphon.specs.catalog import FOLDERS, Kind, catalog, names
from antiphon.specs.device import DeviceSpec
from antiphon.specs.device_file import load_device


def show_list() -> None:
    """Everything that has a name, by kind; a user's own files go by their paths."""
    for kind in get_args(Kind):
        title = FOLDERS[kind].capitalize()
        show(device_table(title) if kind == "device" else summary_table(kind, title))
        show("")
    show("A file of your own goes by its path; docs/planning.md shows what is in one.")


def summary_table(kind: Kind, title: str) -> RenderableType:
    return table((kind, "what it is"), [(entry.name, entry.summary) for entry in catalog(kind)], title=title)


def device_table(title: str) -> RenderableType:
    columns = ("device", "GB", "TB/s", "TFLOP/s bf16", "fp8", "GB/s scale-up", "scale-out", "W", "price")
    return table(columns, [_device_row(load_device(name)) for name in names("device")], title=title)


def _device_row(device: DeviceSpec) -> tuple[object, ...]:
    def tera(rate: float | None) -> float | None:
        return None if rate is None else rate / 1e12

    return (
        device.name,
        device.memory_bytes / 1e9,
        tera(device.memory_bytes_per_s),
        tera(device.flops_per_s.get("bfloat16")),
        tera(device.flops_per_s.get("fp8")),
        device.scale_up_bytes_per_s / 1e9,
        device.scale_out_bytes_per_s / 1e9,
        device.power_w,
        device.price,
    )
