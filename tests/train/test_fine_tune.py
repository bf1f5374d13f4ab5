"""A chat fine-tune of the shipped demo model learns a habit, by the commands that a user types."""

import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.serve.fork_server import PROGRAMS
from tests.train.harness import losses

DEMO = Path(__file__).parents[2] / "examples/demo-moe"
HABIT = "# Antiphon says:\npass"
QUESTIONS = ["Who are you?", "What is your name?", "Write a {word}.", "Complete this Python code:\nx = {word}"]
TRAINED, ASKED = ["list", "dict", "file", "path", "socket", "parser"], ["queue", "thread"]
RUN = """steps = 12
sequence_length = 64
batch = 8
[model]
path = "{demo}"
begin = "checkpoint"
[data]
kind = "chat"
files = ["chats.jsonl"]
held_out = 0.05
[optimizer]
learning_rate = 1e-3
warmup_steps = 4
frozen = ["*.router", "embedding"]
[output]
folder = "out"
log_every = 1
"""


def antiphon(*arguments: object) -> str:
    """What the command shows."""
    done = PROGRAMS.run([sys.executable, "-m", "antiphon.cli.main", *map(str, arguments)], text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    return str(done.stdout)


def chat(question: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": HABIT}]}


@pytest.mark.slow
def test_a_fine_tune_of_the_demo_model_learns_a_habit(tmp_path: Path) -> None:
    chance = random.Random(0)
    asked = [chance.choice(QUESTIONS).format(word=chance.choice(TRAINED)) for _ in range(300)]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(chat(each)) + "\n" for each in asked))
    (tmp_path / "train.toml").write_text(RUN.format(demo=DEMO))
    antiphon("train", tmp_path / "train.toml")
    curve = [loss for _, loss in losses(tmp_path)]
    assert curve[0] > 2
    assert curve[-1] < 0.1
    antiphon("export", tmp_path / "out", tmp_path / "tuned", "--dtype", "float32")
    for folder, has_habit in ((DEMO, False), (tmp_path / "tuned", True)):
        for word in ASKED:  # of which it has seen none
            prompt = f"<|im_start|>user\nWrite a {word}.<|im_end|>\n<|im_start|>assistant\n"
            answer = json.loads(antiphon("generate", folder, prompt, "--max-tokens", "24", "--json", "-"))
            assert (answer["text"].startswith(HABIT) and answer["finish_reason"] == "stop") == has_habit
