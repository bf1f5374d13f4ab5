"""The number of micro-batches where nobody gives one: measured, predicted, chosen; and where nothing is measured."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from antiphon.base.errors import ResourceError
from antiphon.cli.options import CapacityOptions, WorkerOptions
from antiphon.kernels.api import KernelBackend
from antiphon.models.config import load_model_spec
from antiphon.serve import config as serve_config
from antiphon.serve import micro_batch_choice
from antiphon.serve.config import OneRole, ServeConfig
from antiphon.serve.micro_batch_choice import (
    UNMEASURED,
    TurnTimes,
    best_micro_batches,
    choose_micro_batches,
    measure_layer,
    predicted_layer_s,
)
from tests.serve.engine_harness import TinyModel, config


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> dict[int, TurnTimes]:
    """Sides of equal speed, half of the work in half of the time; two cores."""
    found = {
        m: TurnTimes(rows=-(-64 // m), attention_s=6e-3 / m, experts_s=6e-3 / m, exchange_s=3e-4 / m)
        for m in range(1, 5)
    }
    monkeypatch.setattr(micro_batch_choice, "measure_layer", lambda config: found)
    monkeypatch.setattr(micro_batch_choice, "_num_cores", lambda: 2)
    return found


def test_the_least_that_is_nearly_as_good_is_chosen() -> None:
    assert best_micro_batches({1: 2.0, 2: 1.02, 3: 1.0, 4: 1.0}) == 2
    assert best_micro_batches({1: 2.0, 2: 1.1, 3: 1.0, 4: 1.0}) == 3
    assert best_micro_batches({1: 1.0, 2: 1.2, 3: 1.3, 4: 1.4}) == 1


def test_a_layer_takes_as_long_as_its_pipeline_or_the_shared_cores(
    tiny_model: TinyModel, times: dict[int, TurnTimes]
) -> None:
    one_each = config(tiny_model, "1+1/m2", num_threads=1)
    assert predicted_layer_s(one_each, 1, times[1]) == pytest.approx(12.6e-3)
    assert predicted_layer_s(one_each, 2, times[2]) == pytest.approx(6.3e-3)
    assert predicted_layer_s(one_each, 3, times[3]) == pytest.approx(6e-3)
    more = config(tiny_model, "2+2/m2", num_threads=1)  # four workers on two cores
    assert predicted_layer_s(more, 3, times[3]) == pytest.approx(12e-3)


def test_a_mix_of_devices_is_measured(
    tiny_model: TinyModel, times: dict[int, TurnTimes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attention on a GPU, experts on CPUs: cores are shared by the experts alone, GPUs by attention."""
    monkeypatch.setattr(micro_batch_choice, "_num_gpus", lambda: 1)
    mixed = config(tiny_model, "2+2/m2", num_threads=1, of_attention=OneRole(device="cuda"))
    mixed = replace(mixed, of_experts=OneRole(device="cpu"), device="cuda")
    assert predicted_layer_s(mixed, 3, times[3]) == pytest.approx(12e-3)  # two attention workers on one GPU
    monkeypatch.setattr(micro_batch_choice, "_num_gpus", lambda: 2)
    assert predicted_layer_s(mixed, 3, times[3]) == pytest.approx(6e-3)  # the pipeline; two experts have a core each
    assert choose_micro_batches(mixed).num_micro_batches == 3
    reverse = replace(mixed, of_attention=OneRole(device="cpu"), of_experts=OneRole(device="cuda"))
    assert choose_micro_batches(reverse).num_micro_batches == 3
    assert choose_micro_batches(replace(mixed, of_experts=OneRole())).num_micro_batches == UNMEASURED


def test_each_side_is_measured_on_its_own_device(tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU stands for the GPU; the other side has kernels of its own."""
    asked: list[tuple[str, str]] = []
    made = micro_batch_choice.make_backend
    monkeypatch.setattr(micro_batch_choice, "resolve_device", lambda name, index: torch.device("cpu"))

    def remember(kernels: str, device: torch.device, dtype: torch.dtype) -> KernelBackend:
        backend = made("reference" if not asked else kernels, device, dtype)
        asked.append((backend.name, str(dtype)))
        return backend

    monkeypatch.setattr(micro_batch_choice, "make_backend", remember)
    monkeypatch.setattr(micro_batch_choice, "_most_in_caches", lambda config, spec: 4)  # it asks the GPU
    mixed = replace(config(tiny_model, "1+1/m2", max_running=4), of_attention=OneRole(device="cuda"))
    found = measure_layer(mixed)
    assert [name for name, _ in asked] == ["reference", "cpu"]
    assert all(min(each.attention_s, each.experts_s, each.exchange_s) > 0 for each in found.values())


def test_workers_on_cpus_share_the_cores_that_gpus_leave(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(serve_config, "allowance", lambda: SimpleNamespace(num_cores=16))
    monkeypatch.setattr(serve_config, "share_of_threads", lambda workers: 16 // workers)
    mixed = replace(config(tiny_model, "2+3/m2"), num_threads=None, of_attention=OneRole(device="cuda"))
    assert (mixed.own("attention").num_threads, mixed.own("experts").num_threads) == (1, 4)  # 14 for three
    alike = replace(mixed, of_attention=OneRole())
    assert alike.own("attention").num_threads == alike.own("experts").num_threads == 3


def test_options_and_plans_that_say_a_number_are_obeyed(tiny_model: TinyModel, times: dict[int, TurnTimes]) -> None:
    def chosen(**options: object) -> ServeConfig:
        workers = WorkerOptions(num_threads=1, **options)  # type: ignore[arg-type]
        return workers.with_micro_batches(workers.config(tiny_model.folder, CapacityOptions(), trace=False))

    assert chosen(experts=1).num_micro_batches == 3
    assert chosen(experts=1, micro_batches=2).num_micro_batches == 2
    assert chosen().num_micro_batches == 1  # colocated
    pools = chosen(prefill="1+1/m4", decode="1+1")
    assert pools.prefill is not None
    assert (pools.prefill.num_micro_batches, pools.num_micro_batches) == (4, 3)


def test_a_long_head_makes_each_micro_batch_step_for_itself(
    tiny_model: TinyModel, times: dict[int, TurnTimes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless an option says how they step, or copies are forecast for steps that all take together."""
    num_layers = load_model_spec(tiny_model.folder).num_moe_layers
    half_s = 3e-3  # attention takes half as long as the experts, the head as long as attention in all layers
    long = {m: replace(each, attention_s=half_s / m, head_s=num_layers * half_s / m) for m, each in times.items()}

    def chosen(**options: object) -> tuple[str, int]:
        workers = WorkerOptions(num_threads=1, **options)  # type: ignore[arg-type]
        found = workers.with_micro_batches(workers.config(tiny_model.folder, CapacityOptions(), trace=False))
        return found.stepping, found.num_micro_batches

    assert chosen(experts=1) == ("barrier", 3)
    monkeypatch.setattr(micro_batch_choice, "measure_layer", lambda config: long if config.side_by_side else times)
    assert chosen(experts=1)[0] == "free"
    assert chosen(experts=1, stepping="barrier")[0] == "barrier"
    assert chosen(experts=1, micro_batches=2) == ("barrier", 2)
    assert chosen(experts=1, attention=2)[0] == "barrier"
    assert chosen(experts=1, balance="predict", expert_slots=6)[0] == "barrier"
    assert chosen(prefill="1", decode="1+1")[0] == "free"
    monkeypatch.setattr(micro_batch_choice, "_num_cores", lambda: 1)  # heads and experts share it
    assert chosen(experts=1)[0] == "barrier"


def test_steps_of_several_workers_on_too_few_cores_are_not_cut(
    tiny_model: TinyModel, times: dict[int, TurnTimes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where attention workers step each for itself: more steps of fewer rows would only take more processor time."""

    def chosen(layout: str) -> int:
        return choose_micro_batches(config(tiny_model, layout)).num_micro_batches

    assert chosen("3+1/m2 free") == 1
    assert all(chosen(layout) > 1 for layout in ("3+1/m2", "1+3/m2 free", "1+1/m2 free"))
    monkeypatch.setattr(micro_batch_choice, "_num_cores", lambda: 4)
    assert chosen("3+1/m2 free") > 1


def test_other_machines_are_not_measured(tiny_model: TinyModel, times: dict[int, TurnTimes]) -> None:
    here = config(tiny_model, "1+1/m2")
    joined = replace(here, joined_experts=1, join_address="127.0.0.1:7000", join_secret=b"s", num_micro_batches=4)
    assert choose_micro_batches(joined).num_micro_batches == UNMEASURED
    alone = replace(here, max_running=1)
    assert choose_micro_batches(alone) == alone


def test_a_layer_of_the_model_is_measured(tiny_model: TinyModel) -> None:
    found = measure_layer(config(tiny_model, "2+2/m2", num_threads=1, max_running=6))
    assert set(found) == {1, 2, 3, 4}
    assert all(min(each.attention_s, each.experts_s, each.exchange_s) > 0 for each in found.values())


def test_measuring_takes_no_more_memory_than_the_caches_may(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[int, int]] = []

    def seconds(config: object, spec: object, checkpoint: object, rows: dict[int, int]) -> dict[int, float]:
        asked.append(rows)
        return dict.fromkeys(rows, 1e-3)

    monkeypatch.setattr(micro_batch_choice, "_attention_s", seconds)
    monkeypatch.setattr(micro_batch_choice, "_experts_s", seconds)
    monkeypatch.setattr(micro_batch_choice, "_exchange_s", lambda config, spec, rows: dict.fromkeys(rows, 1e-4))
    each = -(-min(256, config(tiny_model, "1+1/m2").context_length(load_model_spec(tiny_model.folder))) // 16)
    found = measure_layer(config(tiny_model, "1+1/m2", max_running=64, num_blocks=6 * each))
    assert asked[0] == {1: 6, 2: 3, 3: 2, 4: 2}
    assert found[2].rows == 3
    with pytest.raises(ResourceError, match=r"--kv-bytes .* is too small"):
        measure_layer(config(tiny_model, "1+1/m2", kv_bytes=1))


def test_each_pool_is_measured_with_its_part_of_the_threads(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both pools' workers share the cores."""
    measured: list[ServeConfig] = []

    def measure(config: ServeConfig) -> dict[int, TurnTimes]:
        measured.append(config)
        return {3: TurnTimes(rows=1, attention_s=1.0, experts_s=1.0, exchange_s=0.1)}

    monkeypatch.setattr(micro_batch_choice, "measure_layer", measure)
    workers = WorkerOptions(prefill="1+1", decode="2+1")
    chosen = workers.with_micro_batches(workers.config(tiny_model.folder, CapacityOptions(), trace=False))
    assert [each.num_workers for each in measured] == [5, 5]
    assert chosen.prefill is not None
    assert (chosen.prefill.num_micro_batches, chosen.num_micro_batches, chosen.prefill.workers_beside) == (3, 3, 0)
