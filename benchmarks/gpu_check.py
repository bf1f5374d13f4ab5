"""Check, then time, what a GPU adds; says so and stops where there is none.

Usage: `python benchmarks/gpu_check.py [--minutes N]`.

1. the tests marked `gpu`: one GPU computes what the CPU computes, in every layout
2. only if they pass: `antiphon bench serve` on the yardstick (1.6 GB of bf16 weights) on the GPU, with attention and
   experts in one process and apart, beside transformers
3. `gpu_check.json` and `gpu_check.md`, in the folder that $OUT names or in ./out

Everything ends within the given minutes (default 9.5): a part that would not is stopped and reported as such.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch

ROOT = Path(__file__).resolve().parents[1]
YARDSTICK = ROOT / "out" / "yardstick-small"
COLUMNS = (
    ("engine", "engine"),
    ("concurrency", "conc."),
    ("input_tokens", "in"),
    ("output_tokens", "out"),
    ("output_tokens_per_s", "out tok/s"),
    ("decode_tokens_per_s", "decode tok/s"),
    ("prefill_tokens_per_s", "prefill tok/s"),
    ("itl_s_median", "ITL s"),
    ("decode_fraction_of_bound", "of decode bound"),
)


@dataclass(frozen=True, kw_only=True)
class CheckPart:
    """One command of this check: how it ended (None: stopped at its limit), and how long it took."""

    name: str
    command: str
    exit_code: int | None
    duration_s: float

    @property
    def passed(self) -> bool:
        return self.exit_code == 0


def reason_to_skip() -> str | None:
    """Why there is nothing to check here; None if there is."""
    if torch.cuda.is_available():
        return None
    if torch.version.cuda is None:
        return f"this PyTorch ({torch.__version__}) is a build without CUDA"
    return "PyTorch finds no CUDA device on this machine"


def run_part(name: str, arguments: list[str], deadline_s: float) -> CheckPart:
    """Run `python ARGUMENTS` from the repository's root until it ends or `deadline_s` (monotonic) is reached."""
    print(f"== {name}", flush=True)
    started_s = time.monotonic()
    exit_code: int | None = None
    with subprocess.Popen([sys.executable, *arguments], cwd=ROOT, start_new_session=True) as process:
        try:
            exit_code = process.wait(max(1.0, deadline_s - started_s))
        except subprocess.TimeoutExpired:
            print(f"{name}: stopped, its time is up", flush=True)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    command = " ".join(["python", *arguments])
    return CheckPart(name=name, command=command, exit_code=exit_code, duration_s=time.monotonic() - started_s)


def count_tests(report: Path) -> dict[str, int]:
    """Totals from a JUnit file; empty when there is none."""
    if not report.exists():
        return {}
    suites = ElementTree.parse(report).getroot().iter("testsuite")
    totals = {"tests": 0, "failures": 0, "errors": 0, "skipped": 0}
    for suite in suites:
        for name in totals:
            totals[name] += int(suite.get(name, 0))
    return totals


def check_and_time(out: Path, deadline_s: float) -> tuple[list[CheckPart], dict[str, Any]]:
    """(parts, the result to write). Timing is left out when the tests fail."""
    started_s = time.monotonic()
    junit, bench_json = out / "gpu_tests.xml", out / "gpu_bench.json"
    tests_until_s = started_s + 0.55 * (deadline_s - started_s)
    pytest = ["-m", "pytest", "-m", "gpu", "tests", f"--junit-xml={junit}", "-p", "no:cacheprovider"]
    parts = [run_part("tests marked gpu", pytest, tests_until_s)]
    result: dict[str, Any] = {"tests": count_tests(junit), "rows": []}
    if not parts[0].passed:
        return parts, result
    if not (YARDSTICK / "config.json").exists():
        make = ["benchmarks/make_model.py", "small", str(YARDSTICK.relative_to(ROOT))]
        parts.append(run_part("write the yardstick", make, deadline_s))
    if parts[-1].passed:
        bench = ["-m", "antiphon.cli.main", "bench", "serve", str(YARDSTICK.relative_to(ROOT)), "--device", "cuda"]
        bench += [
            "--layouts",
            "colocated,1+1/m2",
            "--peers",
            "transformers",
            "--concurrency",
            "1,8,32",
            "--rounds",
            "3",
        ]
        bench += ["--input-tokens", "128", "--output-tokens", "32", "--prefill", "8x512", "--json", str(bench_json)]
        parts.append(run_part("bench serve", bench, deadline_s))
    if bench_json.exists():
        result |= json.loads(bench_json.read_text())
    return parts, result


def markdown(parts: list[CheckPart], result: dict[str, Any], device: str) -> str:
    """What happened, as a page."""
    lines = [f"# GPU check on {device}", "", "| part | result | seconds |", "|---|---|---|"]
    for part in parts:
        outcome = "passed" if part.passed else "stopped at its limit" if part.exit_code is None else "failed"
        lines.append(f"| {part.name} | {outcome} | {part.duration_s:.0f} |")
    if result["tests"]:
        lines += ["", ", ".join(f"{count} {name}" for name, count in result["tests"].items())]
    if result["rows"]:
        header = "|".join(title for _, title in COLUMNS)
        lines += ["", f"|{header}|", "|" + "---|" * len(COLUMNS)]
        lines += ["|" + "|".join(cell(row.get(key)) for key, _ in COLUMNS) + "|" for row in result["rows"]]
    return "\n".join(lines) + "\n"


def cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
    return "" if value is None else str(value)


def commit() -> str:
    ended = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    return ended.stdout.strip() or "unknown"


def main() -> int:
    parser = argparse.ArgumentParser(description="Check, then time, what a GPU adds.")
    parser.add_argument("--minutes", type=float, default=9.5, help="time for everything (default 9.5)")
    minutes = parser.parse_args().minutes
    if (reason := reason_to_skip()) is not None:
        print(f"nothing to check: {reason}")
        return 0
    out = Path(os.environ.get("OUT") or ROOT / "out")
    out.mkdir(parents=True, exist_ok=True)
    device = torch.cuda.get_device_name(0)
    parts, result = check_and_time(out, time.monotonic() + 60 * minutes)
    result = {
        **result,
        "bench": "gpu_check",
        "commit": commit(),
        "command": " ".join(["python", *sys.argv]),
        "machine": {"device": f"cuda: {device}", "torch": torch.__version__, **result.get("machine", {})},
        "parts": [asdict(part) for part in parts],
    }
    page = markdown(parts, result, device)
    (out / "gpu_check.json").write_text(json.dumps(result, indent=2) + "\n")
    (out / "gpu_check.md").write_text(page)
    print(page)
    print(f"written: {out / 'gpu_check.json'}, {out / 'gpu_check.md'}")
    return 0 if all(part.passed for part in parts) else 1


if __name__ == "__main__":
    sys.exit(main())
