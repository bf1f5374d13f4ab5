"""One GPU and the memory of its machine: planned, said, and served as planned."""

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from antiphon.cli import generate as generate_module
from antiphon.cli.commands import single_command
from antiphon.serve.config import ServeConfig
from antiphon.specs.model import BYTES_OF
from antiphon.specs.plan import PhasePlan, read_plan
from tests.cli.plan_harness import PlanCommand
from tests.serve.server_harness import write_checkpoint

# a GPU in which the tiny model's attention fits and its experts do not, two slow sockets, one machine
TINY_MACHINE = """
name = "tiny-machine"
[[groups]]
num_nodes = 1
devices_per_node = 1
[groups.device]
name = "small-gpu"
kind = "gpu"
memory_bytes = 360_000
memory_bytes_per_s = 1e12
flops_per_s = { bfloat16 = 1e14, float32 = 5e13 }
scale_up_bytes_per_s = 32e9
scale_up_domain = 1
scale_out_bytes_per_s = 32e9
power_w = 100.0
num_processors = 100
[[groups]]
num_nodes = 1
devices_per_node = 2
[groups.device]
name = "socket"
kind = "cpu"
memory_bytes = 8_000_000
memory_bytes_per_s = 1e8
flops_per_s = { bfloat16 = 1e10, float32 = 1e10 }
scale_up_bytes_per_s = 1e9
scale_up_domain = 2
scale_out_bytes_per_s = 32e9
power_w = 100.0
"""
SHORT_REQUESTS = """
name = "short"
[input_tokens]
median = 16
sigma = 0.0
[output_tokens]
median = 16
sigma = 0.0
"""


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> PlanCommand:
    return PlanCommand(monkeypatch, capfd)


def planned(command: PlanCommand, file: Path, *arguments: object) -> tuple[PhasePlan, str]:
    """The decode phase of the plan, and what was printed."""
    said = command.plans(*arguments, "--json", file)
    return read_plan(file).phases["decode"], " ".join(said.split())


@pytest.mark.parametrize("model", ["deepseek-v3", "kimi-k2.5"])
def test_attention_goes_to_the_gpu_and_experts_to_the_memory(model: str, command: PlanCommand, tmp_path: Path) -> None:
    """Both are too large for the GPU; of all layouts on these machines this one has the shortest time per token."""
    asked = (model, "--cluster", "gpu-workstation", "--precision", "int4", "--objective", "tpot", "--in-flight", "1")
    phase, said = planned(command, tmp_path / "plan.json", *asked)
    assert phase.layout == "disaggregated"
    assert [(use.role, use.device) for use in phase.devices] == [("attention", "RTX-4090"), ("experts", "Xeon-6454S")]
    assert "1 × RTX-4090 attention, 2 × Xeon-6454S experts" in said
    assert "attention on RTX-4090, experts on Xeon-6454S in the same machines" in said
    assert "starts attention workers on cuda and expert workers on cpu" in said
    sizes = phase.parallel
    assert (phase.micro_batches, sizes.attention_dp, sizes.expert_workers * sizes.expert_tp) == (1, 1, 2)


def test_no_other_number_of_micro_batches_is_faster(command: PlanCommand, tmp_path: Path) -> None:
    asked = ("--cluster", "gpu-workstation", "--precision", "int4", "--objective", "tpot", "--in-flight", "8")
    asked += ("--slo-tpot", "none")
    best, _ = planned(command, tmp_path / "plan.json", "deepseek-v3", *asked)
    assert best.layout == "disaggregated"
    for count in (1, 2, 4):
        pins = ("--layout", "disaggregated", "--pin", f"micro_batches={count}")
        other, _ = planned(command, tmp_path / "other.json", "deepseek-v3", *asked, *pins)
        assert other.micro_batches == count
        assert (best.predicted.tpot_s or 0.0) <= (other.predicted.tpot_s or 0.0) * (1 + 1e-9)


@pytest.mark.parametrize(("sockets", "low", "high"), [(1, 8.73, 8.73), (2, 12.208, 13.4)])
def test_published_times_of_such_a_machine(
    sockets: int, low: float, high: float, command: PlanCommand, tmp_path: Path
) -> None:
    """KTransformers' tutorial: DeepSeek-V3 in Q4_K_M, 4.85 bits a weight, prompts of 500 to 1,000 tokens, one request.
    One socket chose the device's `streamed`, two are a check."""
    asked = ("--cluster", "gpu-workstation", "--precision", "int4", "--objective", "tpot", "--in-flight", "1")
    pins = ("--pin", "experts.ep=1", "--pin", f"experts.tp={sockets}", "--layout", "disaggregated")
    phase, _ = planned(command, tmp_path / "plan.json", "deepseek-v3", *asked, *pins)
    assert phase.predicted.tpot_s is not None
    assert phase.predicted.t_e_s is not None
    more = 4.85 / (8 * BYTES_OF["int4"]) - 1  # bytes of experts, which 58 layers read
    tpot_s = phase.predicted.tpot_s + 58 * more * phase.predicted.t_e_s
    assert low / 1.25 < 1 / tpot_s < high * 1.25


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("mixed") / "tiny")


@pytest.fixture
def plan_file(command: PlanCommand, checkpoint: Path, tmp_path: Path) -> Path:
    (tmp_path / "machine.toml").write_text(TINY_MACHINE)
    (tmp_path / "short.toml").write_text(SHORT_REQUESTS)
    asked = (checkpoint, "--cluster", tmp_path / "machine.toml", "--workload", tmp_path / "short.toml")
    phase, _ = planned(command, tmp_path / "plan.json", *asked, "--objective", "tpot", "--in-flight", "4")
    assert [use.device for use in phase.devices] == ["small-gpu", "socket"]
    return tmp_path / "plan.json"


def test_the_plans_devices_micro_batches_and_split_reach_the_engine(
    checkpoint: Path, plan_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[ServeConfig] = []

    def prepare(config: ServeConfig) -> None:
        seen.append(config)
        raise KeyboardInterrupt

    monkeypatch.setattr(generate_module, "prepare", prepare)
    arguments = [str(checkpoint), "--plan", str(plan_file), "--token-ids", "1,2"]
    CliRunner().invoke(single_command(generate_module.generate), arguments)
    (config,), phase = seen, read_plan(plan_file).phases["decode"]
    assert (config.own("attention").device, config.own("experts").device) == ("cuda", "cpu")
    assert (config.layout, config.num_experts) == ("disaggregated", phase.parallel.expert_workers)
    assert (config.expert_tp, config.num_micro_batches) == (phase.parallel.expert_tp, phase.micro_batches)
    assert config.own("attention").num_threads == 1, "the GPU's worker needs a core to drive it, experts have the rest"
    assert (config.uses_streams("attention"), config.uses_streams("experts")) == (True, False)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_the_gpu_the_plan_is_refused(checkpoint: Path, plan_file: Path) -> None:
    arguments = [str(checkpoint), "--plan", str(plan_file), "--token-ids", "1,2"]
    result = CliRunner().invoke(single_command(generate_module.generate), arguments)
    assert "cuda" in str(result.exception).lower()


def test_the_same_plan_runs_with_both_roles_on_the_cpu(checkpoint: Path, plan_file: Path, tmp_path: Path) -> None:
    texts = []
    for given in (["--plan", str(plan_file), "--attention-device", "cpu"], []):
        arguments = [str(checkpoint), *given, "--token-ids", "1,2,3", "--max-tokens", "6", "--json", "-"]
        result = CliRunner().invoke(single_command(generate_module.generate), arguments)
        assert result.exit_code == 0, result.exception
        texts.append(json.loads(result.stdout)["token_ids"])
    assert texts[0] == texts[1]
