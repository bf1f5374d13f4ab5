"""`antiphon plan`: what it writes, and every way of asking wrongly. Long because each wrong question is a row."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from antiphon.specs.plan import plan_from_json, read_plan
from tests.cli.plan_harness import FIVE_EXPERTS, ODD_CLUSTER, PlanCommand

ROOT = Path(__file__).parents[2]


@pytest.fixture
def antiphon(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> PlanCommand:
    return PlanCommand(monkeypatch, capfd)


@pytest.fixture
def odd_cluster(tmp_path: Path) -> Path:
    path = tmp_path / "odd.toml"
    path.write_text(ODD_CLUSTER)
    return path


@pytest.fixture
def five_experts(tmp_path: Path) -> Path:
    path = tmp_path / "five" / "config.json"
    path.parent.mkdir()
    path.write_text(json.dumps(FIVE_EXPERTS))
    return path


def check_contract(phase: dict[str, Any], num_experts: int) -> None:
    """The keys that other programs rely on, and that they fit together."""
    assert {"layout", "micro_batches", "batch", "devices", "placement", "predicted", "rejected"} <= phase.keys()
    assert {"attention_tp", "attention_dp", "expert_tp", "expert_ep", "expert_workers", "pp"} <= phase.keys()
    predicted = {
        "tokens_per_s",
        "per_gpu",
        "per_cost",
        "per_power",
        "t_a_s",
        "t_e_s",
        "t_c_s",
        "memory_bytes",
        "bound_by",
    }
    assert predicted <= phase["predicted"].keys()
    assert len(phase["placement"]) == num_experts
    for shares in phase["placement"].values():
        assert sum(shares.values()) == pytest.approx(1)
    layouts = [phase["layout"], *(loser["layout"] for loser in phase["rejected"])]
    assert sorted(layouts) == ["disaggregated", "dp_ep", "hybrid", "tp_pp"]
    assert all(loser["reason"] for loser in phase["rejected"])


def test_small_models_have_millions_of_parameters(antiphon: PlanCommand) -> None:
    out = antiphon.plans(ROOT / "examples" / "demo-moe", "--cluster", "laptop", "--slo-tpot", "none")
    assert re.search(r"^5 M parameters, 2\.25 M active; ", out, re.MULTILINE), out[:400]


def test_json_keeps_the_contract(antiphon: PlanCommand) -> None:
    out = antiphon.plans("mixtral-8x22b", "--cluster", "msi-hetero", "--phase", "both", "--json", "-")
    plan = json.loads(out)
    assert {"version", "model", "cluster", "workload", "objective", "phases"} <= plan.keys()
    assert (plan["model"], plan["cluster"], plan["workload"]) == ("mixtral-8x22b", "msi-hetero", "msi-production")
    assert plan["model_config"]["num_local_experts"] == 8
    assert plan["phases"].keys() == {"prefill", "decode"}
    for phase in plan["phases"].values():
        check_contract(phase, num_experts=8)
    assert plan["phases"]["decode"]["predicted"]["tpot_s"] <= 0.15
    assert plan["phases"]["prefill"]["predicted"]["ttft_s"] > 0
    assert plan_from_json(plan).num_candidates > 1000


def test_json_and_page_and_terminal_say_the_same(
    antiphon: PlanCommand, odd_cluster: Path, five_experts: Path, tmp_path: Path
) -> None:
    written = tmp_path / "written"
    written.mkdir()
    file, page = written / "plan.json", written / "plan.html"
    outputs = ("--json", file, "--html", page)
    out = antiphon.plans(five_experts, "--cluster", odd_cluster, "--objective", "per-cost", "--explain", *outputs)
    plan = read_plan(file)
    predicted = plan.phases["decode"].predicted
    assert predicted.per_cost is not None
    assert predicted.tpot_s is not None
    text = page.read_text(encoding="utf-8")
    embedded = re.search(r'<script type="application/json" id="plan">(.*?)</script>', text, re.DOTALL)
    assert embedded is not None
    assert plan_from_json(json.loads(embedded.group(1))) == plan
    parts = ("deployment", "frontier", "pipeline", "memory", "parts")
    for name in (*(f"decode-{part}" for part in parts), *(f"sensitivity-{index}" for index in range(3))):
        assert text.count(f'id="{name}"') == 1
    assert len(text) < 1_500_000
    rate = f"{predicted.per_cost:,.0f}"
    assert re.search(rf">chosen: [^<]*: {rate}<", text)
    assert f"<b>{rate}</b>" in text
    assert "antiphon serve /models/five --plan plan.json" in text
    assert "vllm serve /models/five" in text
    assert rate in out
    assert "conditions of the ping-pong pipeline" in out or plan.phases["decode"].layout != "disaggregated"
    assert "candidates considered" in out
    assert [path.name for path in written.iterdir() if path.name.startswith(".")] == []


def test_planning_needs_no_torch(odd_cluster: Path) -> None:
    source = (
        "import sys\n"
        "sys.modules['torch'] = None\n"
        f"sys.argv = ['antiphon', 'plan', 'mixtral-8x7b', '--cluster', '{odd_cluster}', '--explain']\n"
        "from antiphon.cli.main import main\n"
        "main()\n"
    )
    ended = subprocess.run([sys.executable, "-c", source], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "Decode: " in ended.stdout


@pytest.mark.parametrize("layout", ["disaggregated", "hybrid", "tp_pp", "dp_ep"])
def test_a_layout_alone(antiphon: PlanCommand, layout: str, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    out = antiphon.plans("mixtral-8x22b", "--cluster", "msi-hetero", "--layout", layout, "--json", file)
    phase = read_plan(file).phases["decode"]
    assert phase.layout == layout
    assert phase.rejected == ()
    assert "other layouts" not in out


def test_odd_counts_give_a_right_answer(
    antiphon: PlanCommand, odd_cluster: Path, five_experts: Path, tmp_path: Path
) -> None:
    """Three nodes of seven, one of five, five experts, seven layers."""
    file = tmp_path / "plan.json"
    antiphon.plans(five_experts, "--cluster", odd_cluster, "--phase", "both", "--json", file)
    plan = read_plan(file)
    assert plan.model == "five"
    used: dict[str, int] = {}
    for phase in plan.phases.values():
        assert len(phase.placement) == 5
        for use in phase.devices:
            used[use.device] = used.get(use.device, 0) + use.num_devices
    assert used.get("H20", 0) <= 21
    assert used.get("L40S", 0) <= 5


def test_the_smallest_cluster_says_its_nodes(antiphon: PlanCommand, odd_cluster: Path, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    out = antiphon.plans(
        "mixtral-8x7b", "--cluster", odd_cluster, "--workload", "chat", "--rate", 5, "--size", "--json", file
    )
    nodes = re.search(r"smallest cluster for 5 requests/s, in nodes: (.*)", out)
    assert nodes is not None
    counts = {device: int(count) for count, device in re.findall(r"(\d+) of (\S+)", nodes.group(1))}
    per_node = {"H20": 7, "L40S": 5}
    for phase in read_plan(file).phases.values():
        for use in phase.devices:
            assert use.num_devices <= counts[use.device] * per_node[use.device]


def test_overrides_reach_the_search(antiphon: PlanCommand) -> None:
    def decode(*more: object) -> dict[str, Any]:
        arguments = ("mixtral-8x22b", "--cluster", "msi-hetero", "--objective", "per-cost", "--json", "-", *more)
        found = json.loads(antiphon.plans(*arguments))["phases"]["decode"]
        assert isinstance(found, dict)
        return found

    base = decode()
    tight = decode("--slo-tpot", "60ms")
    assert tight["predicted"]["tpot_s"] <= 0.06
    assert tight["predicted"]["per_cost"] <= base["predicted"]["per_cost"]
    free = decode("--price", "H20=0.001")
    assert {use["device"] for use in free["devices"]} == {"H20"}
    fp8 = decode("--precision", "fp8")
    assert fp8["predicted"]["per_cost"] > base["predicted"]["per_cost"]


@pytest.mark.parametrize(("name", "starts"), [("vllm", "vllm serve "), ("sglang", "python -m sglang.launch_server")])
def test_emit_prints_a_command_and_nothing_else(antiphon: PlanCommand, name: str, starts: str) -> None:
    out = antiphon.plans("mixtral-8x22b", "--cluster", "msi-hetero", "--emit", name)
    lines = [line for line in out.splitlines() if line and not line.startswith("#")]
    assert lines[0].startswith(starts)
    assert all(line.startswith(("  --", starts)) for line in lines)


def test_emit_k8s(antiphon: PlanCommand) -> None:
    out = antiphon.plans("mixtral-8x22b", "--cluster", "msi-hetero", "--layout", "disaggregated", "--emit", "k8s")
    assert "kind: LeaderWorkerSet" in out
    assert "exec antiphon serve /models/mixtral-8x22b" in out


def test_the_list_names_what_is_shipped(antiphon: PlanCommand) -> None:
    out = antiphon.plans("--list")
    for name in ("H20", "msi-hetero", "msi-production", "mixtral-8x22b"):
        assert f"\n{name} " in out


def test_a_checkpoint_folder_is_a_model(antiphon: PlanCommand, checkpoint: Path) -> None:
    plan = json.loads(antiphon.plans(checkpoint, "--cluster", "laptop", "--workload", "offline", "--json", "-"))
    assert plan["model"] == checkpoint.name


WRONG: list[tuple[int, str, str]] = [
    (2, "--cluster is missing: give a file, or one of .*msi-hetero.*", "mixtral-8x22b"),
    (2, "cluster 'msi-hetro' is unknown: did you mean msi-hetero.*", "mixtral-8x22b --cluster msi-hetro"),
    (2, "model 'mixtrl' is unknown: did you mean mixtral-8x.*", "mixtrl --cluster msi-hetero"),
    (2, "workload 'chatt' is unknown: did you mean chat.*", "mixtral-8x22b --cluster msi-hetero --workload chatt"),
    (2, "none.toml: there is no such file: give a cluster file, or one of .*", "dbrx --cluster none.toml"),
    (
        2,
        "--phase is tran: it must be one of decode, .*, train",
        "dbrx --cluster msi-hetero --phase tran",
    ),
    (2, "--layout apart does not exist: use auto or .*", "dbrx --cluster msi-hetero --layout hybrid,apart"),
    (2, "--objective is speed: it must be one of .*", "dbrx --cluster msi-hetero --objective speed"),
    (2, "--max-micro-batches is 0: it must be at least 1", "dbrx --cluster msi-hetero --max-micro-batches 0"),
    (
        2,
        "--max-micro-batches is 9*: it must be at most 64",
        f"dbrx --cluster msi-hetero --max-micro-batches {'9' * 20}",
    ),
    (2, "--max-micro-batches is 'x': it must be a valid integer; .*", "dbrx --max-micro-batches x"),
    (2, "--slo-tpot is '0': it must be above 0", "dbrx --cluster msi-hetero --slo-tpot 0"),
    (2, "--slo-ttft is 'soon': write seconds or .*", "dbrx --cluster msi-hetero --slo-ttft soon"),
    (2, "--percentile is 99.0: it must lie between 0 and 1.*", "dbrx --cluster msi-hetero --percentile 99"),
    (2, "--rate is 0: it must be above 0 requests per second", "dbrx --cluster msi-hetero --rate 0"),
    (2, "--rate is -3: it must be above 0 requests per second", "dbrx --cluster msi-hetero --rate -3"),
    (2, "--price 'H20': write a device and a price .*", "dbrx --cluster msi-hetero --price H20"),
    (2, "--price H200: cluster msi-hetero has no such device: .*", "dbrx --cluster msi-hetero --price H200=1"),
    (
        2,
        "there is no price of H100: give one .*--price H100=.*",
        "dbrx --cluster one-h100-server --objective per-cost",
    ),
    (2, "--emit is tgi: it must be one of vllm, sglang, k8s", "dbrx --cluster msi-hetero --emit tgi"),
    (2, "--emit and --json - both write to standard output: .*", "dbrx --cluster msi-hetero --emit vllm --json -"),
    (
        2,
        "--html none/p.html: the folder .*none does not exist; create it",
        "dbrx --cluster msi-hetero --html none/p.html",
    ),
    (
        2,
        "--json none/p.json: the folder .*none does not exist; create it",
        "dbrx --cluster msi-hetero --json none/p.json",
    ),
    (2, "none.json: cannot be read .*", "dbrx --cluster msi-hetero --profile none.json"),
    (2, "--size needs a rate, workload msi-production has none: give --rate", "dbrx --cluster msi-hetero --size"),
    (2, ".*A800 has no fp8 arithmetic.*", "dbrx --cluster msi-ampere --precision fp8"),
    (2, "--emit k8s writes attention and expert workers, .*", "dbrx --cluster msi-hetero --layout tp_pp --emit k8s"),
]


@pytest.mark.parametrize(("code", "message", "arguments"), WRONG)
def test_wrong_questions(antiphon: PlanCommand, code: int, message: str, arguments: str) -> None:
    antiphon.refuses(code, message, *arguments.split())


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("num_nodes = 3", "num_nodes"),
        ("devices_per_node = 7", "devices_per_node"),
        ("num_nodes = 1", "num_nodes"),
    ],
)
@pytest.mark.parametrize("value", ["0", "-2", "2.5", '"many"'])
def test_sizes_that_are_none(antiphon: PlanCommand, tmp_path: Path, line: str, message: str, value: str) -> None:
    path = tmp_path / "odd.toml"
    path.write_text(ODD_CLUSTER.replace(line, f"{line.partition('=')[0]}= {value}"))
    antiphon.refuses(2, f".*{message}.*", "dbrx", "--cluster", path)


def test_an_unknown_device_offers_the_nearest(antiphon: PlanCommand, tmp_path: Path) -> None:
    path = tmp_path / "odd.toml"
    path.write_text(ODD_CLUSTER.replace('"H20"', '"H2O"'))
    antiphon.refuses(2, r".*device 'H2O' is unknown: did you mean .*H20.*", "dbrx", "--cluster", path)


def test_an_impossible_promise_names_the_nearest_which_is_feasible(antiphon: PlanCommand) -> None:
    question = ("mixtral-8x22b", "--cluster", "msi-hetero")
    code, out, err = antiphon.run(*question, "--slo-tpot", "1ms")
    assert (code, out) == (1, "")
    found = re.search(r"nearest feasible promise is (\S+) ms", err)
    assert found is not None
    antiphon.plans(*question, "--slo-tpot", f"{found.group(1)}ms")
    code, _, _ = antiphon.run(*question, "--slo-tpot", f"{float(found.group(1)) * 0.98}ms")
    assert code == 1


def test_too_many_requests_name_how_many_there_may_be(antiphon: PlanCommand) -> None:
    code, out, err = antiphon.run("mixtral-8x22b", "--cluster", "msi-hetero", "--rate", "1e6")
    assert (code, out) == (1, "")
    assert "are too many for msi-hetero: it takes" in err


def test_a_cluster_too_small_for_the_weights_says_what_is_missing(antiphon: PlanCommand, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    message = r"one-h100-server is too small for the weights: .*13\d\d GB.*576 GB.* 7\d\d(\.\d)? GB .*missing.*"
    antiphon.refuses(1, message, "deepseek-r1", "--cluster", "one-h100-server", "--json", file)
    assert not file.exists(), "a plan that cannot be met is no file"
