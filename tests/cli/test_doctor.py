"""The doctor's report: complete, honest about what is broken, never a traceback."""

import importlib
import json
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from antiphon.base.system import cpu_generation
from antiphon.cli import doctor

CPUINFO = "processor\t: 0\nmodel name\t: Some CPU\nflags\t\t: fpu avx2 amx_bf16 avx512_bf16\n\nprocessor\t: 1\n"


def broken_probe() -> list[doctor.DoctorFinding]:
    raise OSError("no such thing")


def test_the_report_covers_every_area(capsys: pytest.CaptureFixture[str]) -> None:
    code = doctor.run_doctor("-")
    payload = json.loads(capsys.readouterr().out)
    areas = {finding["area"] for finding in payload["findings"]}
    assert {"python", "packages", "native", "cpu", "devices", "memory", "transports"} <= areas
    assert payload["ok"] == (code == 0)
    assert all(set(finding) == {"area", "name", "status", "detail", "mend"} for finding in payload["findings"])


def test_whatever_is_not_well_says_how_to_mend_it() -> None:
    unwell = [finding for finding in doctor.examine() if finding.status in ("missing", "broken")]
    assert all(finding.mend for finding in unwell)


def test_a_probe_that_fails_becomes_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "probe_memory", broken_probe)
    assert any(finding.detail == "could not look: no such thing" for finding in doctor.examine())


@pytest.mark.parametrize(
    ("requirement", "status"), [("pytest>=1", "ok"), ("pytest<1", "broken"), ("antiphon-none-such>=1", "broken")]
)
def test_versions_are_held_against_what_is_supported(requirement: str, status: str) -> None:
    finding = doctor.check_requirement(Requirement(requirement))
    assert finding.status == status
    assert "supported: " in finding.detail


def test_something_broken_makes_the_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "MIN_PYTHON", (99, 0))
    assert doctor.run_doctor(None) == 1
    printed = capsys.readouterr().out
    assert "3.11 or newer is needed" in printed
    assert "1 broken" in printed


def test_a_system_without_memory_files_is_sent_to_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str, flags: int) -> int:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("os.memfd_create", refuse)
    finding = doctor.probe_shared_memory()
    assert finding.status == "missing"
    assert "Function not implemented" in finding.detail
    assert "--transport tcp" in finding.mend


def test_small_socket_buffers_are_said_with_their_mend(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("wmem_max", "rmem_max"):
        (tmp_path / name).write_text("212992\n")
    monkeypatch.setattr(doctor, "BUFFER_LIMITS", (tmp_path / "wmem_max", tmp_path / "rmem_max"))
    finding = doctor.probe_tcp()
    assert finding.status == "info"
    assert "wmem_max 208.0 KiB" in finding.detail
    assert "net.core.rmem_max=4194304" in finding.mend


@pytest.mark.parametrize(
    ("governor", "polled_ns", "status"), [("haltpoll", 0, "info"), ("haltpoll", 200_000, "ok"), ("menu", 0, None)]
)
def test_idle_cores_that_halt_at_once_are_said_with_their_mend(
    governor: str, polled_ns: int, status: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, text in (("HALT_POLL_NS", polled_ns), ("IDLE_GOVERNOR", governor)):
        (tmp_path / name).write_text(f"{text}\n")
        monkeypatch.setattr(doctor, name, tmp_path / name)
    findings = doctor.probe_idle_cores()
    assert [finding.status for finding in findings] == ([status] if status else [])
    assert [finding.mend for finding in findings if finding.mend] == (
        [f"echo 200000 > {tmp_path / 'HALT_POLL_NS'}"] if status == "info" else []
    )
    (tmp_path / "HALT_POLL_NS").unlink()
    assert doctor.probe_idle_cores() == []


def test_libfabric_is_reported_with_its_providers_or_with_the_way_to_it() -> None:
    first, *providers = doctor.probe_libfabric()
    if first.status == "ok":
        assert "would use" in first.detail
        assert providers
    else:
        assert "fetch_libfabric.sh" in first.detail + first.mend


def test_a_build_without_libfabric_is_told_from_a_missing_library(monkeypatch: pytest.MonkeyPatch) -> None:
    native = importlib.import_module("antiphon._m2n")
    info = {"built": False, "problem": "", "library": "/usr/lib/libfabric.so.1", "providers": []}
    monkeypatch.setattr(native, "libfabric_info", lambda: info)
    (finding,) = doctor.probe_libfabric()
    assert (finding.status, finding.detail) == ("missing", "built without libfabric's headers")
    assert finding.mend.startswith("install libfabric-dev (libfabric-devel) and reinstall: pip install .")
    monkeypatch.undo()
    monkeypatch.setenv("ANTIPHON_LIBFABRIC", "/nowhere/libfabric.so.1")
    (finding,) = doctor.probe_libfabric()
    if "libfabric" in native.transports():
        assert finding.detail.startswith("library libfabric.so.1 not found (/nowhere/libfabric.so.1: ")
        assert "ANTIPHON_LIBFABRIC=" in finding.detail


def test_cpuinfo_is_read_for_the_instructions_we_use(tmp_path: Path) -> None:
    path = tmp_path / "cpuinfo"
    path.write_text(CPUINFO)
    assert doctor.read_cpuinfo(path) == ("Some CPU", ["avx2", "avx512_bf16", "amx_bf16"])
    assert doctor.read_cpuinfo(tmp_path / "none") == ("", [])
    assert cpu_generation(path) == cpu_generation(tmp_path / "none") == ""
    path.write_text("cpu family\t: 25\nmodel\t\t: 17\n" + CPUINFO)
    assert cpu_generation(path) == "family 25, model 17"
