"""Six questions that people bring, by command: the right answer, and soon (5 s of processor time with the start)."""

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest

MOST_S = 5.0
THREE_SERVERS = """
name = "three"
[[groups]]
device = "H100"
num_nodes = 3
devices_per_node = 8
"""
SEVEN_NODES = """
name = "seven"
[[groups]]
device = "H20"
num_nodes = 3
devices_per_node = 8
[[groups]]
device = "L40S"
num_nodes = 4
devices_per_node = 8
"""
ONE_GPU = """
name = "one"
[[groups]]
device = "H100"
num_nodes = 1
devices_per_node = 1
"""


def asked(folder: Path, cluster: str, *arguments: str) -> tuple[int, str]:
    """Exit code and everything said, within the time."""
    file = folder / "cluster.toml"
    file.write_text(cluster)
    where = str(file) if "\n" in cluster else cluster
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    ended = subprocess.run(
        [Path(sys.executable).with_name("antiphon"), "plan", *arguments, "--cluster", where],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime < MOST_S
    return ended.returncode, ended.stdout + ended.stderr


def test_one_gpu_is_too_small(tmp_path: Path) -> None:
    code, said = asked(tmp_path, ONE_GPU, "deepseek-v3", "--precision", "fp8")
    assert code == 1
    assert "one is too small for the weights: they take 6" in said
    assert "more" in said


def test_mixed_nodes_have_a_plan_that_says_how_sure_it_is(tmp_path: Path) -> None:
    code, said = asked(tmp_path, SEVEN_NODES, "mixtral-8x22b", "--objective", "per-cost")
    assert code == 0
    assert "3 nodes of 8 H20, 4 nodes of 8 L40S" in said
    assert "isaggregate" in said


def test_chat_at_a_rate_keeps_its_promise(tmp_path: Path) -> None:
    targets = ("--rate", "8", "--slo-ttft", "2s", "--slo-tpot", "60ms", "--percentile", "0.9")
    file = tmp_path / "plan.json"
    code, said = asked(tmp_path, THREE_SERVERS, "qwen3-235b-a22b", "--precision", "fp8", *targets, "--json", str(file))
    assert code == 0, said
    plan = json.loads(file.read_text())
    notes = [note for phase in plan["phases"].values() for note in phase["notes"]]
    kept = next(note for note in notes if note.startswith("simulated with "))
    assert float(kept.split(": ")[1].split("%")[0]) >= 85.0
    assert plan["request_tokens_per_s"] > 0
    in_words = " ".join(said.split())
    assert "One pool for prompts and tokens: a pool for prefill and one for decode would give" in in_words
    assert "One request: " in in_words


def test_an_impossible_time_per_token_names_the_nearest(tmp_path: Path) -> None:
    code, said = asked(tmp_path, THREE_SERVERS, "deepseek-v3", "--precision", "fp8", "--slo-tpot", "1ms")
    assert code == 1
    assert "no layout keeps 1 ms per output token" in said
    assert "the nearest feasible promise is" in said


def test_a_laptop_has_a_plan(tmp_path: Path) -> None:
    code, said = asked(tmp_path, "laptop", "deepseek-moe-16b", "--precision", "weights=int4", "--slo-tpot", "none")
    assert code == 0, said
    assert "1 × " in said


def test_a_million_requests_a_second_are_too_many_and_how_many_are_not(tmp_path: Path) -> None:
    code, said = asked(tmp_path, THREE_SERVERS, "qwen3-235b-a22b", "--precision", "fp8", "--rate", "1e6")
    assert code == 1
    assert "1e+06 requests/s are too many for three: it takes" in said


@pytest.mark.parametrize("more", [(), ("--phase", "both")])
def test_deepseek_v3_on_64_nodes_is_planned_in_time(tmp_path: Path, more: tuple[str, ...]) -> None:
    code, said = asked(tmp_path, "h800-h20-64", "deepseek-v3", "--precision", "fp8", *more)
    assert code == 0, said
