"""The example that shows the library alone does what it says, with nothing else of Antiphon."""

import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[3] / "examples" / "m2n.py"


def test_the_example_hands_three_payloads_over() -> None:
    ended = subprocess.run([sys.executable, EXAMPLE], check=False, capture_output=True, text=True, timeout=240)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines() == [
        f"step {step}: 1,048,576 bytes from source 0: [{step} {step} {step} {step}]" for step in range(3)
    ]
    assert not ended.stderr


def test_the_example_is_short_and_needs_only_the_library() -> None:
    lines = EXAMPLE.read_text().splitlines()
    assert len(lines) <= 40
    assert [line for line in lines if "antiphon" in line] == ["from antiphon import _m2n"]
