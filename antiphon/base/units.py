"""Bytes and seconds, to and from people. Inside the code quantities are always plain SI numbers."""

import re

from antiphon.base.errors import UserError

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
    match = re.fullmatch(r"\s*([0-9_]+(?:\.[0-9]+)?)\s*([kmgt]i?)?b?\s*", text.lower())
    if match is None:
        raise UserError(f"{text!r} is not a size in bytes: write for example 4GiB, 500MB or 1000000")
    return int(float(match.group(1).replace("_", "")) * _BYTE_SUFFIXES[match.group(2) or ""])


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
