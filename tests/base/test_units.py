"""Sizes, times and addresses, to and from people."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.base.errors import UserError
from antiphon.base.units import format_bytes, format_seconds, parse_bytes, split_address


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("0", 0),
        ("1_000_000", 10**6),
        ("2GiB", 2 * 2**30),
        ("512M", 512 * 10**6),
        (" 1.5 kib ", 1536),
        ("3tb", 3 * 10**12),
    ],
)
def test_sizes_are_read(text: str, num_bytes: int) -> None:
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize("text", ["", "GiB", "_", "_GiB", "-1", "1 EiB", "1e9", "four"])
def test_other_sizes_are_refused_with_an_example(text: str) -> None:
    with pytest.raises(UserError, match=r"is not a size in bytes: write for example 4GiB"):
        parse_bytes(text)


@pytest.mark.parametrize("text", ["1.5", "0.5B", "1_000.25"])
def test_a_part_of_a_byte_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="is no whole number of bytes: add a unit, for example"):
        parse_bytes(text)


@pytest.mark.parametrize("text", ["8388608TiB", "9" * 400, "9" * 5000 + "GiB"])
def test_sizes_beyond_any_machine_are_refused(text: str) -> None:
    with pytest.raises(UserError, match="is beyond what any machine has: write at most 8,000,000 TiB"):
        parse_bytes(text)


@given(st.integers(min_value=0, max_value=2**60))
def test_plain_numbers_are_themselves(num_bytes: int) -> None:
    assert parse_bytes(str(num_bytes)) == num_bytes or num_bytes > 2**53


@pytest.mark.parametrize(
    ("num_bytes", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (2**30, "1.0 GiB"), (2**50, "1024.0 TiB")]
)
def test_sizes_are_printed(num_bytes: int, text: str) -> None:
    assert format_bytes(num_bytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.0, "0 ns"), (2e-9, "2 ns"), (0.0012, "1.20 ms"), (3e-6, "3.00 µs"), (61.5, "61.50 s")]
)
def test_times_are_printed(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(
    "address", ["", "host", "host:", ":7", "host:port", "host:70000", "h:²", "::1", "a:b:7", "[::1:7"]
)
def test_a_bad_address_says_how_it_must_look(address: str) -> None:
    with pytest.raises(UserError, match="must be HOST:PORT"):
        split_address(address)


@pytest.mark.parametrize("host", ["a..b", "x" * 64, ".a", "\udcff"])
def test_what_no_machine_can_be_called_is_not_looked_up(host: str) -> None:
    with pytest.raises(UserError, match="is no name of a machine: between dots"):
        split_address(f"{host}:7700")
    for name in ("a.b", "localhost.", "::1", "fe80::1%eth0", "bücher.example"):
        assert split_address(f"[{name}]:7700") == (name, 7700)
