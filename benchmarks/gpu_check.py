"""Check, then time, what needs a GPU: parts that can be run alone, the riskiest first; where there is none, all skip.

Usage: `python benchmarks/gpu_check.py [--parts NAME,NAME] [--minutes N] [--list]`.

Method
1. Each part is a program of its own with a limit of its own, so a crash, a hang or a wrong result ends that part and no
   other. What the driver of a broken part leaves behind dies with its process.
2. Parts that check come before parts that time, and the newest code first: kernels, graphs, streams, landing, sums,
   packages, families, layouts, kills, training; then the machine's limits, the kernels' times, serving.
3. After every part `gpu_check.json` and `gpu_check.md` are written anew, in the folder that $OUT names or in ./out. So
   what was seen is there whatever happens next.

All of it ends within the given minutes (default 9.5): a part that would not is stopped, later ones are "not run", and
the exit code is 1, as it is for a part that failed. `--device cpu` runs the parts that time at tiny sizes, and of those
that check the ones that have a form for CPUs (gloo in place of NCCL, a driver and a card without a device, packages'
CPU code or stand-ins): it tries this program, not the machine.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch

ROOT = Path(__file__).resolve().parents[1]
COLUMNS = {
    "engine": "engine", "concurrency": "conc.", "input_tokens": "in", "output_tokens": "out",
    "output_tokens_per_s": "out tok/s", "decode_tokens_per_s": "decode tok/s", "prefill_tokens_per_s": "prefill tok/s",
    "itl_s_median": "ITL s", "decode_fraction_of_bound": "of decode bound",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class GpuPart:
    """`commands` run one after another, as arguments of `python`, until one fails. They may write `{json}`, a file
    with "rows", and `{junit}`, pytest's totals. `skip`: why it cannot run here; empty: it can."""

    name: str
    what: str
    commands: Sequence[Sequence[str]]
    limit_s: float
    skip: str = ""


@dataclass(kw_only=True)
class PartOutcome:
    """How a part ended: passed, failed, stopped (at its limit or that of all), skipped, or not run for want of time."""

    name: str
    what: str
    outcome: str
    reason: str = ""
    duration_s: float = 0.0
    command: str = ""
    tests: dict[str, int] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)
    last_lines: list[str] = field(default_factory=list)


def why_no_gpu() -> str:
    """Why nothing can be checked here; empty if it can."""
    if torch.cuda.is_available():
        return ""
    if torch.version.cuda is None:
        return f"this PyTorch ({torch.__version__}) is a build without CUDA"
    return "PyTorch finds no CUDA device on this machine"


def parts_of(device: str) -> list[GpuPart]:
    """All parts, the riskiest first."""
    no_gpu = why_no_gpu()
    tiny = device == "cpu"

    def tests(name: str, what: str, limit_s: float, *chosen: str, on_cpu: Sequence[str] = ()) -> GpuPart:
        """`on_cpu`: what `--device cpu` runs in the place of the chosen tests."""
        pytest = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-n0", "--junit-xml={junit}"]
        if tiny:
            skip = "" if on_cpu else "it has no form for CPUs"
            return GpuPart(name=name, what=what, commands=[[*pytest, *on_cpu]], limit_s=limit_s, skip=skip)
        return GpuPart(name=name, what=what, commands=[[*pytest, "-m", "gpu", *chosen]], limit_s=limit_s, skip=no_gpu)

    def times(name: str, what: str, limit_s: float, *commands: Sequence[str]) -> GpuPart:
        return GpuPart(name=name, what=what, commands=commands, limit_s=limit_s, skip="" if tiny else no_gpu)

    parity, reference = "tests/gpu/test_gpu_parity.py", "tests/kernels/test_reference.py"
    both = "colocated,1+1/m2"
    small, shape = ("tiny", "tiny") if tiny else ("small", "qwen3-30b")
    return [
        tests("kernels", "every kernel against its reference", 120, "tests/kernels/triton", reference),
        tests("graphs", "a recorded decode step against an eager one", 60, "tests/serve/test_captured_step.py"),
        tests("streams", "rows exchanged in stream order", 60, "tests/gpu/test_gpu_streams.py"),
        tests("landing", "rows that arrive in the GPU's memory, registered and flushed", 60,
              "tests/gpu/test_gpu_landing.py",
              on_cpu=("tests/comm/m2n/test_streams.py", "-k", "devices_memory or flush or staged")),
        tests("sums", "sums of ranks by NCCL, with the bits of the host's", 60, "tests/gpu/test_gpu_sums.py",
              on_cpu=("tests/comm/test_device_group.py",)),
        tests("packages", "grouped_mm, DeepGEMM, FlashAttention and FlashInfer, where installed", 60,
              "tests/gpu/test_gpu_packages.py", on_cpu=("tests/kernels/test_packages.py",)),
        tests("families", "logits of all families", 90, parity, "-k", "family or agree"),
        tests("layouts", "tokens in every layout, and the server", 120, parity, "-k", "layout or server"),
        tests("kills", "a killed worker costs no token", 60, "tests/gpu/test_gpu_kills.py"),
        tests("training", "steps on the GPU against the CPU", 60, "tests/gpu/test_gpu_training.py"),
        times("limits", "bandwidth of copies, products", 60, gpu_times(device, "limits")),
        times("kernel-times", "kernels beside PyTorch's operators", 120, gpu_times(device, "kernels")),
        times("yardstick", "serving the yardstick", 150, make_model(small), bench(small, device, "1,8", both)),
        times("qwen3-30b", "4 of 48 layers of Qwen3-30B-A3B's shape, random weights", 240, make_model(shape),
              bench(shape, device, "1,2" if tiny else "1,8,64,256", "colocated")),
    ]  # fmt: skip


def gpu_times(device: str, what: str) -> list[str]:
    tiny = ["--tiny"] if device == "cpu" else []
    return ["benchmarks/gpu_times.py", what, "--device", device, "--json", "{json}", *tiny]


def make_model(preset: str) -> list[str]:
    return ["benchmarks/make_model.py", preset, f"out/yardstick-{preset}", "--keep"]


def bench(preset: str, device: str, concurrency: str, layouts: str) -> list[str]:
    """vLLM takes part where `make peers` has installed it; PyTorch's operators as transformers uses them."""
    peers = ["transformers"] + (["vllm"] if (ROOT / ".peers" / "vllm").exists() else [])
    tiny = device == "cpu"
    options = {
        "--device": device,
        "--concurrency": concurrency,
        "--layouts": layouts,
        "--peers": "" if tiny else ",".join(peers),
        "--input-tokens": "8" if tiny else "128",
        "--output-tokens": "4" if tiny else "32",
        "--prefill": "1x8" if tiny else "8x512",
        "--rounds": "1" if tiny else "3",
        "--json": "{json}",
    }
    command = ["-m", "antiphon.cli.main", "bench", "serve", f"out/yardstick-{preset}"]
    return [*command, *(word for option in options.items() for word in option)]


def run_part(part: GpuPart, out: Path, deadline_s: float) -> PartOutcome:
    """Run the part's commands until one fails, at most until its limit or `deadline_s` (monotonic)."""
    outcome = PartOutcome(name=part.name, what=part.what, outcome="skipped", reason=part.skip)
    if part.skip:
        return outcome
    started_s = time.monotonic()
    until_s = min(deadline_s, started_s + part.limit_s)
    if until_s - started_s < 1.0:
        outcome.outcome, outcome.reason = "not run", "no time was left"
        return outcome
    limit = f"its limit of {part.limit_s:.0f} s"
    if deadline_s < started_s + part.limit_s:
        limit = f"the time for everything ended after {until_s - started_s:.0f} of its {part.limit_s:.0f} s"
    results, junit, log = (out / f"{part.name}.{kind}" for kind in ("json", "xml", "log"))
    for old in (results, junit, log):
        old.unlink(missing_ok=True)
    outcome.outcome = "passed"
    for command in part.commands:
        arguments = [each.replace("{json}", str(results)).replace("{junit}", str(junit)) for each in command]
        outcome.command = " ".join(["python", *arguments])
        exit_code = run_command(arguments, log, until_s)
        if exit_code != 0:
            outcome.outcome = "stopped" if exit_code is None else "failed"
            outcome.reason = limit if exit_code is None else f"exit code {exit_code}"
            break
    outcome.duration_s = time.monotonic() - started_s
    outcome.tests = count_tests(junit)
    if outcome.outcome == "passed" and outcome.tests and outcome.tests["skipped"] == outcome.tests["tests"]:
        outcome.outcome, outcome.reason = "skipped", "all of its tests skipped"
    outcome.rows = rows_of(results)
    if outcome.outcome != "passed" and log.exists():
        outcome.last_lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-15:]
    return outcome


def run_command(arguments: Sequence[str], log: Path, until_s: float) -> int | None:
    """Exit code of `python ARGUMENTS` in the repository's root; None: it was stopped, with all that it started."""
    print(f"== python {' '.join(arguments)}", flush=True)
    with log.open("a", encoding="utf-8") as output:
        process = subprocess.Popen(
            [sys.executable, *arguments], cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            return process.wait(max(0.1, until_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            return None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def count_tests(report: Path) -> dict[str, int]:
    """Totals from a JUnit file; empty when there is none, or half of one."""
    try:
        suites = list(ElementTree.parse(report).getroot().iter("testsuite"))
    except (OSError, ElementTree.ParseError):
        return {}
    names = ("tests", "failures", "errors", "skipped")
    return {name: sum(int(suite.get(name, 0)) for suite in suites) for name in names}


def rows_of(results: Path) -> list[dict[str, Any]]:
    try:
        rows: list[dict[str, Any]] = json.loads(results.read_text(encoding="utf-8"))["rows"]
    except (OSError, ValueError, KeyError):
        return []
    return rows


def markdown(outcomes: list[PartOutcome], device: str) -> str:
    """What happened, as a page."""
    lines = [f"# GPU check on {device}", "", "| part | what | result | seconds | tests |", "|---|---|---|---|---|"]
    for each in outcomes:
        tests = ", ".join(f"{count} {name}" for name, count in each.tests.items() if count or name == "tests")
        result = each.outcome + (f": {each.reason}" if each.reason else "")
        lines.append(f"| {each.name} | {each.what} | {result} | {each.duration_s:.0f} | {tests} |")
    for each in outcomes:
        if each.rows:
            lines += ["", f"## {each.name}", "", *table(each.rows)]
        if each.last_lines:
            lines += ["", f"## {each.name}: {each.outcome}", "", f"`{each.command}`"]
            lines += ["", "```", *each.last_lines, "```"]
    return "\n".join(lines) + "\n"


def table(rows: list[dict[str, Any]]) -> list[str]:
    """The columns of serving, or of other rows all that they have."""
    columns = COLUMNS if "engine" in rows[0] else {name: name for name in rows[0]}
    lines = [f"|{'|'.join(columns.values())}|", "|" + "---|" * len(columns)]
    return lines + ["|" + "|".join(cell(row.get(key)) for key in columns) + "|" for row in rows]


def cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
    return "" if value is None else str(value)


def commit() -> str:
    ended = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    return ended.stdout.strip() or "unknown"


def check(parts: Sequence[GpuPart], out: Path, minutes: float, device: str) -> list[PartOutcome]:
    """Run all parts; the results are written after each."""
    out.mkdir(parents=True, exist_ok=True)
    deadline_s = time.monotonic() + 60 * minutes
    machine = {"device": device, "torch": torch.__version__, "cuda": torch.version.cuda}
    outcomes: list[PartOutcome] = []
    for part in parts:
        outcome = run_part(part, out, deadline_s)
        outcomes.append(outcome)
        print(f"{outcome.name}: {outcome.outcome}{f' ({outcome.reason})' if outcome.reason else ''}", flush=True)
        command = " ".join(["python", *sys.argv])
        result = {"bench": "gpu_check", "commit": commit(), "command": command, "machine": machine}
        result |= {"parts": [asdict(each) for each in outcomes]}
        (out / "gpu_check.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
        (out / "gpu_check.md").write_text(markdown(outcomes, device), encoding="utf-8")
    return outcomes


def chosen_parts(parts: list[GpuPart], names: str) -> list[GpuPart]:
    """Those that are named, in their own order; all if none is."""
    wanted = [name for name in names.split(",") if name]
    if unknown := sorted(set(wanted) - {part.name for part in parts}):
        known = ", ".join(part.name for part in parts)
        raise SystemExit(f"--parts: no part is called {', '.join(unknown)}; there are {known}")
    return [part for part in parts if not wanted or part.name in wanted]


def main() -> int:
    parser = argparse.ArgumentParser(description="Check, then time, what needs a GPU.")
    parser.add_argument("--parts", default="", help="only these, separated by commas")
    parser.add_argument("--minutes", type=float, default=9.5, help="time for everything (default 9.5)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: try this program at tiny sizes")
    parser.add_argument("--list", action="store_true", help="name the parts and stop")
    given = parser.parse_args()
    parts = chosen_parts(parts_of(given.device), given.parts)
    if given.list:
        print("\n".join(f"{part.name:13}{part.what} (at most {part.limit_s:.0f} s)" for part in parts))
        return 0
    device = f"cuda: {torch.cuda.get_device_name(0)}" if given.device == "cuda" and not why_no_gpu() else given.device
    out = Path(os.environ.get("OUT") or ROOT / "out").resolve()
    outcomes = check(parts, out, given.minutes, device)
    print(f"written: {out / 'gpu_check.json'}, {out / 'gpu_check.md'}")
    return 0 if all(each.outcome in ("passed", "skipped") for each in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
