"""`antiphon profile` as users run it: three files and two tables, and one line for what cannot be."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from antiphon.base.errors import UserError
from antiphon.base.progress import Report
from antiphon.base.system import one_writer
from antiphon.bench.profile.local_times import Wanted
from antiphon.bench.profile.measure import QUICK
from antiphon.cli.commands import single_command
from antiphon.cli.profile import parse_counts, profile
from antiphon.cost.curves import Curve
from antiphon.cost.profile import HostTimes, LocalTimes, read_profile
from antiphon.specs.cluster import load_cluster
from tests.cost.training.specimens import training_tables
from tests.planner.local_times_harness import local_times

HOST = HostTimes(
    request_s=1e-3,
    token_s=Curve((1.0, 8.0), (4e-4, 3e-4), may_fall=True),
    client_request_s=2e-3,
    client_token_s=Curve((1.0,), (5e-5,), may_fall=True),
    wait_s=4e-4,
)
SERVED = local_times(read_bytes_per_s={1: 2e10, 2: 4e10}, gemm_flops_per_s={1: 4e11, 2: 8e11})


def no_server(*arguments: object) -> HostTimes:
    raise UserError("the server ended: no memory")


def test_profile_writes_what_plan_and_predict_read(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The measuring itself is tested in tests/bench; here it is replaced by tables made by hand."""
    asked: list[Wanted] = []

    def measure(wanted: Wanted, report: Report) -> LocalTimes:
        asked.append(wanted)
        report(1, 1)
        return SERVED

    monkeypatch.setattr("antiphon.cli.profile.measure", measure)
    monkeypatch.setattr("antiphon.cli.profile.host_times", lambda *arguments: HOST)
    folder, out = tmp_path / "measured", tmp_path / "profile.json"
    arguments = [str(checkpoint), "--quick", "--max-rows", "4", "--folder", str(folder), "--json", str(out)]
    result = CliRunner().invoke(single_command(profile), arguments)
    assert result.exit_code == 0, result.output
    assert {path.name for path in folder.iterdir()} == {"profile.json", "this-machine.json"}
    times = read_profile(folder / "profile.json").engine
    assert times is not None
    assert asked == [Wanted(model=checkpoint, effort=QUICK, max_rows=4)]
    assert json.loads(out.read_text()) == json.loads((folder / "profile.json").read_text())
    assert read_profile(out).machine.num_cores == times.num_cores
    assert read_profile(out).host == HOST
    assert "HTTP with 8 streams, of a core: 1.00 ms a request, 300.00 µs a token" in result.output
    assert load_cluster(folder / "this-machine.json").num_devices == times.num_cores
    assert "reads 40.0 GB/s, multiplies 800 GFLOP/s" in result.output
    lines = result.output.splitlines()
    assert any(line.split()[:3] == ["threads", "sides", "rows"] for line in lines)
    assert any(line.split()[:3] == ["rows", "message", "dispatch"] for line in lines)
    assert lines[-1] == f"written to {folder}: profile.json, this-machine.json"


def test_both_phases_are_kept_in_one_file(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tables = training_tables(256)
    monkeypatch.setattr("antiphon.cli.profile.measure", lambda wanted, report: replace(SERVED, model=checkpoint.name))
    monkeypatch.setattr("antiphon.cli.profile.host_times", no_server)
    monkeypatch.setattr("antiphon.cli.profile.measure_training", lambda wanted, report: tables)
    command = [str(checkpoint), "--quick", "--folder", str(tmp_path)]
    for more in (["--phase", "train"], [], ["--phase", "train"]):
        result = CliRunner().invoke(single_command(profile), command + more)
        assert result.exit_code == 0, result.output
    found = read_profile(tmp_path / "profile.json")
    assert (found.training, bool(found.attention), found.engine is None) == (tables, True, False)
    assert found.host is None
    assert {"sequence,", "expert,", "all_to_all"} <= set(result.output.split())  # lines may be broken in between


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--threads 1,x", "--threads '1,x' is not a list of numbers: write for example 2,1"),
        ("--threads 0", "--threads '0': give numbers of 1 to 256"),
        ("--threads 2,2", "--threads has 2 twice: write it once"),
        ("--max-rows 0", "--max-rows is 0: it must be at least 1"),
        ("--phase train --ranks 1,two", "--ranks '1,two' is not a list of numbers: write for example 2,1"),
        ("--phase train --dtype float16", "--dtype is float16: to train it must be float32 or bfloat16"),
        ("--threads 2 --phase train", "--threads does not apply with --phase train; leave it out"),
        ("--ranks 2", "--ranks does not apply with --phase serve; leave it out"),
        ("--dtype int3", "--dtype int3 is not supported: use one of auto, bfloat16, float16, float32"),
        ("--kernels fast", "--kernels fast do not exist: use auto, cpu, triton or reference"),
    ],
)
def test_wrong_options_are_refused_before_anything_starts(checkpoint: Path, options: str, message: str) -> None:
    result = CliRunner().invoke(single_command(profile), [str(checkpoint), *options.split()])
    assert isinstance(result.exception, UserError)
    assert str(result.exception) == message


@pytest.mark.parametrize("option", ["--phase train", "--quick", "--threads 2", "--ranks 1", "--dtype float32"])
@pytest.mark.parametrize("end", ["--listen", "--join"])
def test_a_link_has_no_options_of_a_model(option: str, end: str) -> None:
    result = CliRunner().invoke(single_command(profile), [end, "127.0.0.1:1", *option.split()])
    assert isinstance(result.exception, UserError)
    assert str(result.exception).startswith(f"{option.split(maxsplit=1)[0]} does not apply with --listen or --join")


def test_a_folder_that_is_a_file_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    result = CliRunner().invoke(single_command(profile), [str(checkpoint), "--folder", str(tmp_path / "taken")])
    assert isinstance(result.exception, UserError)
    assert str(result.exception).endswith("is a file: name a folder, it is made if it does not exist")


def test_two_do_not_measure_into_one_folder(checkpoint: Path, tmp_path: Path) -> None:
    for more in ([], ["--phase", "train"]):
        with one_writer(tmp_path, ""):
            result = CliRunner().invoke(single_command(profile), [str(checkpoint), "--folder", str(tmp_path), *more])
        assert (
            str(result.exception)
            == f"{tmp_path}: another antiphon profile measures into it: wait for it, or name another"
        )


def test_a_profile_that_cannot_be_gone_on_with_is_found_before_measuring(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "profile.json").write_text("{}")
    arguments = [str(checkpoint), "--folder", str(tmp_path)]
    result = CliRunner().invoke(single_command(profile), arguments)
    assert isinstance(result.exception, UserError)
    assert "its profile.json is in the way: " in str(result.exception)
    assert str(result.exception).endswith("; or remove it")


def test_threads_are_a_list() -> None:
    assert parse_counts("--threads", "") == ()
    assert parse_counts("--threads", "4,2,1") == (4, 2, 1)
