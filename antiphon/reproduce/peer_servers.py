"""Measured servers beside NVIDIA's aiconfigurator, and the section of docs/reproduction.md about them.

1. The tool runs in an interpreter of its own (`aiconfigurator_peer.py`) and says one line a server.
2. What it said is kept in `data/aiconfigurator_servers.csv`, so that the page can be written without it.
3. Both are judged on the servers that both price.

Rejected: all servers. It takes seconds for each, and neighbours are nearly the same server.
"""

import csv
import json
import signal
import subprocess
import tempfile
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from antiphon.base.errors import UserError
from antiphon.base.progress import Report
from antiphon.reproduce.measured_servers import (
    DATA,
    FIRST_GOAL,
    WITHIN,
    Judged,
    PointSlice,
    cross_validated,
    measured_points,
    slice_of,
    slices,
)
from antiphon.specs.catalog import names
from antiphon.specs.engine import load_engine

STEP = 7
TIMEOUT_S = 300.0  # for one server; a database is loaded for some
STORED = DATA.with_name("aiconfigurator_servers.csv")
HEAD = """| slice | points | ratio | within 25% | in band | median error | first token: ratio | within 25% |
| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"""
PeerTimes = Mapping[int, tuple[float, float]]
"""By place in the file: seconds a token, seconds to the first one."""


def peer_times(python: str, report: Report | None = None) -> PeerTimes:
    """What aiconfigurator, which the interpreter `python` has, says of every seventh server without pools; those that
    it refuses are left out. Five minutes. `UserError` if that interpreter does not do it."""
    program = Path(__file__).with_name("aiconfigurator_peer.py")
    theirs: dict[int, dict[str, Any]] = {}
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as said:
        try:
            process = subprocess.Popen(
                [python, str(program), str(DATA), str(STEP)], stdout=subprocess.PIPE, stderr=said, text=True
            )
        except OSError as error:
            raise UserError(f"--peer {python}: it does not run ({error.strerror}): give a Python") from error
        with process:
            assert process.stdout is not None
            silent = threading.Timer(TIMEOUT_S, process.kill)
            silent.start()
            for line in process.stdout:
                if not line.startswith('{"index"'):
                    continue  # what a library prints
                found = json.loads(line)
                theirs[found["index"]] = found
                silent.cancel()
                silent = threading.Timer(TIMEOUT_S, process.kill)
                silent.start()
                if report is not None:
                    report(len(theirs), found["of"])
            silent.cancel()
        said.seek(0)
        _check_ended(python, process.returncode, said.read().strip().splitlines())
    priced = {
        index: (found["tpot_ms"] / 1e3, found["ttft_ms"] / 1e3)
        for index, found in sorted(theirs.items())
        if "error" not in found
    }
    if not priced:
        raise UserError(f"--peer {python}: aiconfigurator refused all {len(theirs)} servers: is it of version 0.12?")
    return priced


def _check_ended(python: str, code: int, lines: list[str]) -> None:
    if code == -signal.SIGKILL:
        raise UserError(f"--peer {python}: it said nothing for {TIMEOUT_S:.0f} s and was killed")
    if code:
        reason = lines[-1] if lines else f"exit code {code}"
        raise UserError(
            f"--peer {python}: {reason}: give a Python that has aiconfigurator (pip install aiconfigurator)"
        )


def stored_times() -> PeerTimes:
    """What it said when it was last asked."""
    lines = STORED.read_text(encoding="utf-8").splitlines()
    rows = csv.DictReader(line for line in lines if not line.startswith("#"))
    return {int(row["index"]): (float(row["tpot_s"]), float(row["ttft_s"])) for row in rows}


def times_file(times: PeerTimes) -> str:
    """As `STORED` has it."""
    lines = [
        "# What aiconfigurator 0.12 (Apache-2.0) predicts for measured_servers.csv; index: the row there, from 0.",
        "# Made by: antiphon reproduce --deployments --peer PYTHON --fit FOLDER",
        "index,tpot_s,ttft_s",
        *(f"{index},{tpot_s:.4g},{ttft_s:.4g}" for index, (tpot_s, ttft_s) in times.items()),
    ]
    return "\n".join(lines) + "\n"


def compare(judged: Judged, times: PeerTimes) -> list[PointSlice]:
    """Two slices over the servers that both price: aiconfigurator and this project."""
    both = [index for index in times if np.isfinite(judged.tpot_s[index])]
    tpot_s, ttft_s = np.full((2, len(judged.points)), np.nan)
    for index in both:
        tpot_s[index], ttft_s[index] = times[index]
    peer = replace(judged, tpot_s=tpot_s, ttft_s=ttft_s)
    chosen = np.isin(np.arange(len(judged.points)), both)
    return [slice_of("aiconfigurator", peer, chosen), slice_of("antiphon", judged, chosen)]


def section() -> str:
    """The section of docs/reproduction.md about measured servers. Ten seconds."""
    judged = cross_validated(measured_points())
    engines = [load_engine(name) for name in names("engine")]
    whole, *_ = lines = slices(judged, engines)
    theirs, ours = compare(judged, stored_times())
    first_within = whole.first_within or 0.0
    missed = "" if first_within >= FIRST_GOAL else ", **missed**"
    head = f"""## Servers that others measured

{len(judged.points):,} runs of vLLM, SGLang and TensorRT-LLM on Hopper and Blackwell GPUs: the part of NVIDIA's
`silicon_sample.csv` ([aiconfigurator](https://github.com/ai-dynamo/aiconfigurator), Apache-2.0) that states its
concurrency and its numbers of workers. The constants of an engine (`specs/data/engines`) are fitted to its runs, none
to a model or a device. What stands here of a model on a device is by constants that were fitted without it
(`antiphon reproduce --deployments`; `--fit FOLDER` fits them anew). `antiphon plan --explain` shows these times for
plans of such servers.

| of {whole.num_points:,} aggregated servers | | goal |
| --- | ---: | ---: |
| time per token within {WITHIN:.0%} | {whole.within:.0%} | 80% |
| its median error | {whole.error:.0%} | 12% |
| within the engine's band of four of five | {whole.in_band or 0.0:.0%} | 75 to 85% |
| time to the first token within {WITHIN:.0%} | {first_within:.0%} | {FIRST_GOAL:.0%}{missed} |

Why first tokens are missed: clients of a closed loop begin together, and each engine orders their prompts beside
decoding in its own way; SGLang's releases differ twofold on one model and device. [log.md](log.md) has what was tried.

By slice. Ratio: predicted over measured, at the median. In band: the share of points in the engine's band.

{HEAD}"""
    beside = f"""
Beside aiconfigurator 0.12 on the same {ours.num_points} servers: every seventh aggregated one, but the few that it
refuses. Ours are by constants that were fitted without the model on the device, as above. `antiphon reproduce
--deployments --peer PYTHON` asks it anew in about five minutes, where PYTHON has had `pip install aiconfigurator`.

{HEAD}"""
    return "\n".join([head, *map(_line, lines), beside, _line(theirs), _line(ours)]) + "\n"


def _line(one: PointSlice) -> str:
    return f"| {' | '.join(one.cells())} |"
