"""lm-evaluation-harness on an export: train, export, serve, evaluate by `local-completions` over a local task.

It needs `lm_eval`: that of `make clients-check` (`.clients/lm-eval`), of `ANTIPHON_LM_EVAL`, or one on the path.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from antiphon.train.config import read_config
from antiphon.train.setup import prepare
from antiphon.train.trainer import Trainer
from tests.serve.fork_server import PROGRAMS
from tests.serve.server_harness import serve
from tests.train.harness import LINES, write_run

CLIENT = Path(__file__).parents[2] / ".clients" / "lm-eval" / "bin" / "lm_eval"
TIMEOUT_S = 280.0
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
TASK: dict[str, Any] = {
    "task": "goes_on",
    "dataset_path": "json",
    "test_split": "test",
    "doc_to_text": "{{begin}}",
    "doc_to_choice": "{{choices}}",
    "doc_to_target": "answer",
    "output_type": "multiple_choice",
    "target_delimiter": "",
    "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    "metadata": {"version": 1},
}


def lm_eval() -> str:
    found = os.environ.get("ANTIPHON_LM_EVAL") or (str(CLIENT) if CLIENT.exists() else shutil.which("lm_eval"))
    if not found:
        pytest.skip("lm_eval is not installed: make clients-check installs it, or set ANTIPHON_LM_EVAL to its path")
    return found


def write_task(folder: Path) -> list[dict[str, Any]]:
    """How a line goes on: its own end, or that of another one; the answer at places that differ."""
    rows = []
    for number, line in enumerate(LINES):
        words = line.split(" ")
        ends = [" " + " ".join(each.split(" ")[3:]) for each in (line, LINES[(number + 1) % len(LINES)])]
        answer = number % 2
        rows.append({"begin": " ".join(words[:3]), "choices": ends[::-1] if answer else ends, "answer": answer})
    data = folder / "goes_on.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = TASK | {"dataset_kwargs": {"data_files": {"test": str(data)}}}
    (folder / "goes_on.yaml").write_text(json.dumps(task))  # JSON is YAML
    return rows


def log_likelihoods(folder: Path, rows: list[dict[str, Any]]) -> list[list[float]]:
    """By transformers, of the export itself."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def of(begin: str, end: str) -> float:
        ids = tokenizer(begin + end, add_special_tokens=False, return_tensors="pt").input_ids
        first = len(tokenizer(begin, add_special_tokens=False).input_ids)
        with torch.no_grad():
            logs = model(ids).logits.log_softmax(-1)[0, :-1]
        return float(logs.gather(1, ids[0, 1:, None])[first - 1 :].sum())

    return [[of(row["begin"], each) for each in row["choices"]] for row in rows]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_an_export_is_evaluated_as_transformers_sees_it(tmp_path: Path) -> None:
    program = lm_eval()
    file = write_run(tmp_path, max_position_embeddings=128)
    changes = ("steps=150", "sequence_length=32", "output.checkpoint_every=0", "output.log_every=50")
    Trainer(prepare(read_config(file, changes))).run()
    export = tmp_path / "export"
    command = [sys.executable, "-m", "antiphon.cli.main", "export", str(tmp_path / "out"), str(export)]
    ended = PROGRAMS.run([*command, "--dtype", "float32"], text=True, timeout=TIMEOUT_S)
    assert ended.returncode == 0, ended.stderr
    rows = write_task(tmp_path)
    with serve(export, tmp_path) as server:
        url = f"{server.facts['url']}/v1/completions"
        arguments = f"model={server.facts['model']},tokenizer={export},base_url={url},max_length=128"
        evaluated = subprocess.run(
            [program, "run", "--model", "local-completions", "--tasks", "goes_on", "--include_path", str(tmp_path),
             "--model_args", f"{arguments},tokenized_requests=True,num_concurrent=4", "--log_samples",
             "--output_path", str(tmp_path / "report")],
            env=os.environ | OFFLINE, capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
        )  # fmt: skip
    assert evaluated.returncode == 0, evaluated.stderr[-2000:]
    results = json.loads(next((tmp_path / "report").rglob("results_*.json")).read_text())["results"]["goes_on"]
    assert results["acc,none"] == 1.0, "it has learned how its lines go on"
    samples = next((tmp_path / "report").rglob("samples_goes_on_*.jsonl")).read_text().splitlines()
    found = {each["doc_id"]: [float(pair[0]) for pair in each["filtered_resps"]] for each in map(json.loads, samples)}
    for number, expected in enumerate(log_likelihoods(export, rows)):
        assert found[number] == pytest.approx(expected, abs=2e-3)
