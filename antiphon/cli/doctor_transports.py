"""`antiphon doctor`: a line of its report, and the transports: how workers can exchange rows here, and collectives.

Shared memory travels as memory files of the kernel, which need no mount. TCP works everywhere; what can be missing is
room in the kernel's buffers, without which a thread of the library has to move bytes while a worker computes. All of
them wake processes up, which a virtual machine makes expensive where its cores halt as soon as they have nothing to do.
"""

import importlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from antiphon.base.units import format_bytes

BUFFER_LIMITS = (Path("/proc/sys/net/core/wmem_max"), Path("/proc/sys/net/core/rmem_max"))
WANTED_BUFFER_BYTES = 4 * 2**20  # a micro-batch of 512 rows of 4096 bf16 values
HALT_POLL_NS = Path("/sys/module/haltpoll/parameters/guest_halt_poll_ns")
IDLE_GOVERNOR = Path("/sys/devices/system/cpu/cpuidle/current_governor")
WANTED_HALT_POLL_NS = 200_000  # the kernel's own default
CONGESTION = Path("/proc/sys/net/ipv4/tcp_congestion_control")

LIBFABRIC_HEADERS = "install libfabric-dev (libfabric-devel) and reinstall: pip install . or make clean setup"


Status = Literal["ok", "info", "missing", "broken"]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One line of the report. `mend` says what to do about it, empty when there is nothing to do."""

    area: str
    name: str
    status: Status
    detail: str
    mend: str = ""


def probe_transports() -> list[Finding]:
    return [probe_shared_memory(), probe_tcp(), *probe_libfabric(), *probe_idle_cores(), *probe_collectives()]


def _finding(name: str, status: Any, detail: str, mend: str = "") -> Finding:
    return Finding(area="transports", name=name, status=status, detail=detail, mend=mend)


def probe_shared_memory() -> Finding:
    """Workers on one machine write into each other's memory files."""
    try:
        os.close(os.memfd_create("antiphon-doctor", os.MFD_ALLOW_SEALING))
    except (AttributeError, OSError) as error:
        return _finding("shm", "missing", f"no memory files: {error}", "use --transport tcp, or Linux 3.17 or newer")
    return _finding("shm", "ok", "sealed memory files, futexes")


def probe_tcp() -> Finding:
    """What the kernel lets a process without privileges ask for."""
    limits = {path.name: int(path.read_text()) for path in BUFFER_LIMITS if path.exists()}
    congestion = CONGESTION.read_text(encoding="utf-8").strip() if CONGESTION.exists() else "unknown"
    words = ", ".join(f"{name} {format_bytes(value)}" for name, value in limits.items())
    detail = f"{words}; congestion control {congestion}"
    if limits and min(limits.values()) < WANTED_BUFFER_BYTES:
        settings = " ".join(f"net.core.{name}={WANTED_BUFFER_BYTES}" for name in limits)
        return _finding("tcp", "info", detail, f"sysctl -w {settings} (else a thread moves large messages)")
    return _finding("tcp", "ok", detail)


def probe_libfabric() -> list[Finding]:
    """The library, if there is one, and a line for each provider."""
    native: Any = importlib.import_module("antiphon._m2n")
    info = native.libfabric_info()
    if not info["built"]:  # whether there is a library does not matter then
        return [_finding("libfabric", "missing", "built without libfabric's headers", LIBFABRIC_HEADERS)]
    if info["problem"] or not info["providers"]:  # the problem holds its own advice
        return [_finding("libfabric", "missing", str(info["problem"] or f"{info['library']} has no usable provider"))]
    found = [_finding("libfabric", "ok", f"{info['version']} ({info['library']}), would use {info['chosen']}")]
    domains: dict[tuple[str, str], list[str]] = {}
    for provider in info["providers"]:
        waits = "sleeps" if provider["waits_by_descriptor"] else "looks again and again"
        memory = ", device memory" if provider["device_memory"] else ""
        what = f"{waits}{memory}; {provider['note']}"
        domains.setdefault((provider["name"], what), []).append(provider["domain"])
    for (name, what), where in domains.items():
        found.append(_finding(f"libfabric {name}", "info", f"{', '.join(where)}: {what}"))
    return found


def probe_idle_cores() -> list[Finding]:
    """Whether a virtual machine's idle cores look for work before they halt; nothing where another governor decides."""
    if (
        not HALT_POLL_NS.exists()
        or not IDLE_GOVERNOR.exists()
        or IDLE_GOVERNOR.read_text(encoding="utf-8").strip() != "haltpoll"
    ):
        return []
    polled_ns = int(HALT_POLL_NS.read_text(encoding="utf-8"))
    if polled_ns > 0:
        return [_finding("idle cores", "ok", f"look for work for up to {polled_ns / 1000:.0f} us before they halt")]
    detail = "this virtual machine's cores halt at once, and its host may keep one that has"
    return [_finding("idle cores", "info", detail, f"echo {WANTED_HALT_POLL_NS} > {HALT_POLL_NS}")]


def probe_collectives() -> list[Finding]:
    distributed: Any = importlib.import_module("torch.distributed")
    if not distributed.is_available():
        detail = "this torch was built without torch.distributed; training is limited to one process"
        return [_finding("collectives", "missing", detail, "make setup")]
    backends = {"gloo": distributed.is_gloo_available(), "nccl": distributed.is_nccl_available()}
    names = [name for name, available in backends.items() if available]
    return [_finding("collectives", "ok", " ".join(names) or "none")]
