"""Bytes, seconds and addresses, to and from people. Inside the code quantities are always plain SI numbers."""

import math
import re
from ipaddress import IPv6Address

from antiphon.base.errors import UserError, shortened

_NOTHING = 1e-9
_MOST_BYTES = 2.0**63  # sizes are counted in 64 bits
_BYTE_SUFFIXES = {
    "": 1,
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "t": 10**12,
    "ki": 2**10,
    "mi": 2**20,
    "gi": 2**30,
    "ti": 2**40,
}


def parse_bytes(text: str) -> int:
    """Read ``"2GiB"``, ``"512M"``, ``"1_000_000"`` as a number of bytes; `UserError` for anything else."""
    match = re.fullmatch(r"\s*([0-9][0-9_]*(?:\.[0-9]+)?)\s*([kmgt]i?)?b?\s*", text.lower())
    if match is None:
        raise UserError(f"{text!r} is not a size in bytes: write for example 4GiB, 500MB or 1000000")
    num_bytes = float(match.group(1).replace("_", "")) * _BYTE_SUFFIXES[match.group(2) or ""]
    if num_bytes >= _MOST_BYTES:
        raise UserError(f"{text[:40]!r} is beyond what any machine has: write at most 8,000,000 TiB")
    if match.group(2) is None and not num_bytes.is_integer():
        raise UserError(f"{text[:40]!r} is no whole number of bytes: add a unit, for example {match.group(1)}MiB")
    return int(num_bytes)


def format_bytes(num_bytes: float) -> str:
    """``1536`` -> ``"1.5 KiB"``."""
    for suffix in ("B", "KiB", "MiB", "GiB"):
        if abs(num_bytes) < 1024:
            return f"{num_bytes:.0f} B" if suffix == "B" else f"{num_bytes:.1f} {suffix}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"


def format_seconds(seconds: float) -> str:
    """``0.0012`` -> ``"1.20 ms"``."""
    for scale, suffix in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if abs(seconds) >= scale:
            return f"{seconds / scale:.2f} {suffix}"
    return f"{seconds * 1e9:.0f} ns"


def number(value: float | None, unit: str = "") -> str:
    """Three significant digits, thousands grouped, no exponent; ``"unknown"`` for None."""
    if value is None:
        return "unknown"
    return f"{f'{value:,.0f}' if abs(value) >= 100 else _three_digits(value)} {unit}".rstrip()


def _three_digits(value: float) -> str:
    """Never with an exponent; what rounding left of nothing is 0."""
    if abs(value) < _NOTHING:
        return "0"
    digits = f"{value:.{max(0, 2 - math.floor(math.log10(abs(value))))}f}"
    return digits.rstrip("0").rstrip(".") if "." in digits else digits


def round_step(least: float) -> float:
    """Between two ticks of an axis: the first of 1, 2, 5 times a power of ten that is not below `least`."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least * (1 - 1e-9))


def milliseconds(seconds: float | None) -> str:
    """``0.0123`` -> ``"12.3 ms"``; ``"-"`` for None."""
    if seconds is None:
        return "-"
    if seconds >= 10:
        return f"{seconds:.1f} s"
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return number(seconds * 1e3, "ms") if seconds >= 1e-3 else number(seconds * 1e6, "µs")


def split_address(address: str) -> tuple[str, int]:
    """`HOST:PORT` as its parts; port 0 means any free one."""
    host, colon, port = address.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    is_port = port.isascii() and port.isdecimal() and len(port) <= 5 and int(port) <= 65535
    if not colon or not host or not is_port or (":" in host and not _is_ipv6(host)):
        raise UserError(
            f"address is {shortened(address)!r}: it must be HOST:PORT, for example 10.0.0.1:7700 or [fd00::1]:7700"
        )
    check_host("address", host)
    return host, int(port)


def _is_ipv6(host: str) -> bool:
    try:
        IPv6Address(host)
    except ValueError:
        return False
    return True


def check_host(what: str, host: str) -> None:
    """`UserError` for what no machine can be called; nothing is looked up. Without it, a look-up ends with an error
    that is none of the system's."""
    try:
        host.encode("idna")
    except UnicodeError as error:
        raise UserError(
            f"{what} {shortened(host)!r} is no name of a machine: between dots it must have 1 to 63 characters"
        ) from error
