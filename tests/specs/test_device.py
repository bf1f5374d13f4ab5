"""A user's own device file: what is read, what is refused and in which words."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.base.errors import UserError
from antiphon.specs.checked import plain
from antiphon.specs.cluster import DeviceSpec, device_from_json, load_device

LINES = {
    "name": '"mine"',
    "kind": '"gpu"',
    "memory_bytes": "96e9",
    "memory_bytes_per_s": "4e12",
    "flops_per_s": "{ bfloat16 = 148e12 }",
    "scale_up_bytes_per_s": "450e9",
    "scale_up_domain": "8",
    "scale_out_bytes_per_s": "50e9",
    "power_w": "400",
    "num_processors": "132",
}


def write(folder: Path, **changes: str | None) -> Path:
    """A device file; None leaves a line out."""
    lines = {**LINES, **changes}
    path = folder / "mine.toml"
    path.write_text("\n".join(f"{key} = {value}" for key, value in lines.items() if value is not None))
    return path


def test_a_file_without_sources_or_price_is_enough(tmp_path: Path) -> None:
    device = load_device(write(tmp_path))
    assert (device.name, device.memory_bytes, device.price, device.sources) == ("mine", 96_000_000_000, None, {})
    assert isinstance(device.memory_bytes, int)
    assert device.flops_per_s == {"bfloat16": 148e12}


def test_sources_and_price_are_kept(tmp_path: Path) -> None:
    device = load_device(write(tmp_path, price="2.5", sources='{ price = "the invoice" }'))
    assert device.price == 2.5
    assert device.sources == {"price": "the invoice"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"power_w": None}, r"mine\.toml: power_w is missing: add it"),
        ({"flops_per_s": None}, "flops_per_s is missing"),
        ({"memory_bytes": "0"}, r"mine\.toml: memory_bytes is 0: it must be at least 1"),
        ({"power_w": "9" * 400}, r"power_w is 9+… .* more characters …9+: it must be a valid number"),
        ({"memory_bytes": "96.5"}, "memory_bytes is 96.5: it must be a valid integer"),
        ({"memory_bytes": '"96 GB"'}, "memory_bytes is '96 GB': it must be a valid integer"),
        ({"memory_bytes_per_s": "-1"}, "memory_bytes_per_s is -1: it must be above 0"),
        ({"memory_bytes_per_s": "inf"}, "memory_bytes_per_s is inf: it must be a finite number"),
        ({"power_w": "true"}, "power_w is true: it must be a valid number"),
        ({"price": "0"}, "price is 0: it must be above 0"),
        ({"kind": '"tpu"'}, "kind is 'tpu': it must be 'gpu', 'npu' or 'cpu'"),
        ({"scale_up_domain": "0"}, "scale_up_domain is 0: it must be at least 1"),
        ({"scale_up_mesh": "1"}, "scale_up_mesh is 1: it must be a valid boolean"),
        ({"scale_up_spans_nodes": "1"}, "scale_up_spans_nodes is 1: it must be a valid boolean"),
        ({"flops_per_s": "148e12"}, "flops_per_s is 148000000000000.0: it must be an object"),
        (
            {"flops_per_s": "{ bf16 = 1e12 }"},
            r"unknown key flops_per_s.bf16: it must be 'float32', 'bfloat16', 'fp8' or 'fp4'",
        ),
        (
            {"flops_per_s": "{ bfloat16 = 1e12, fp6 = 1e12 }"},
            "unknown key flops_per_s.fp6: it must be 'float32', 'bfloat16', 'fp8' or 'fp4'",
        ),
        ({"num_processors": None}, "num_processors is missing: add how many multiprocessors"),
        ({"flops_per_s": "{ bfloat16 = 0 }"}, "flops_per_s.bfloat16 is 0: it must be above 0"),
        ({"memory_byte_per_s": "1"}, r"unknown key memory_byte_per_s: did you mean memory_bytes_per_s\?"),
        ({"zzz": "1"}, "unknown key zzz: known keys are .*memory_bytes, "),
        ({"sources": '{ prize = "x" }'}, "unknown key sources.prize: did you mean price"),
        ({"name": '""'}, "name is '': it must have at least 1 character"),
    ],
)
def test_what_is_wrong_is_named_with_its_place(tmp_path: Path, changes: dict[str, str | None], message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_device(write(tmp_path, **changes))


def test_a_file_that_is_not_toml(tmp_path: Path) -> None:
    path = tmp_path / "broken.toml"
    path.write_text("name = 1 2\n")
    with pytest.raises(UserError, match=r"broken\.toml: not valid TOML: .*line 1"):
        load_device(path)
    path.write_bytes(b"name = '\xff'")
    with pytest.raises(UserError, match=r"broken\.toml: not UTF-8 text"):
        load_device(path)


positive = st.floats(1e-3, 1e18, allow_nan=False)
texts = st.text(st.characters(categories=("L", "N")), min_size=1, max_size=8)
devices = st.builds(
    DeviceSpec,
    name=texts,
    kind=st.sampled_from(["gpu", "npu", "cpu"]),
    num_processors=st.integers(1, 1000),
    memory_bytes=st.integers(1, 10**13),
    memory_bytes_per_s=positive,
    flops_per_s=st.dictionaries(st.sampled_from(["float32", "bfloat16", "fp8"]), positive, min_size=1),
    scale_up_bytes_per_s=positive,
    scale_up_domain=st.integers(1, 1000),
    scale_out_bytes_per_s=positive,
    power_w=positive,
    price=st.none() | positive,
    scale_up_spans_nodes=st.booleans(),
    scale_up_mesh=st.booleans(),
    sources=st.dictionaries(st.sampled_from(["price", "power_w", "flops_per_s"]), texts),
)


@settings(max_examples=50, deadline=None)
@given(device=devices)
def test_json_round_trip(device: DeviceSpec) -> None:
    assert device_from_json(plain(device), "device") == device


def test_a_json_file_is_read_too(tmp_path: Path) -> None:
    path = tmp_path / "h20.json"
    path.write_text(json.dumps(plain(load_device("H20"))))
    assert load_device(path) == load_device("H20")


def test_none_is_not_written() -> None:
    device = replace(load_device("H100"), price=None)
    assert "price" not in plain(device)
