"""What the system says of its processor; nothing where it says nothing."""

from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")


def cpu_fields(path: Path = CPUINFO) -> dict[str, str]:
    """By their names in `/proc/cpuinfo`, those of the first core."""
    fields: dict[str, str] = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        key, _, value = line.partition(":")
        fields.setdefault(key.strip(), value.strip())
    return fields


def cpu_name() -> str:
    """The processor's own name, where the system tells."""
    return cpu_fields().get("model name") or "unknown"
