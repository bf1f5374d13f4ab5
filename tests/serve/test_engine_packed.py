"""Checkpoints in few bits through whole engines: texts are those of what they multiply out to, in both layouts."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from gguf import GGMLQuantizationType as Kind
from transformers import AutoModelForCausalLM

from antiphon.base.errors import UserError
from antiphon.models.config import load_model_spec
from antiphon.serve.worker_handle import WorkerName
from antiphon.specs.counts import count_parameters
from antiphon.specs.placement import ExpertPlacement
from tests.models.float8_specimens import FORMATS, quantize_checkpoint
from tests.models.gguf_specimens import all_of, wide_gguf, write_gguf
from tests.models.packed_specimens import PACKED, pack_checkpoint
from tests.serve.engine_harness import (
    NUM_TOKENS,
    TinyModel,
    complete,
    config,
    kill,
    random_prompts,
    running,
    save_tiny_model,
)
from tests.waiting import wait_until

SIZES = {"hidden_size": 64, "moe_intermediate_size": 32, "head_dim": 16}


@pytest.mark.parametrize(
    ("form", "layout"),
    [
        ("compressed-tensors int4", "1"),
        ("compressed-tensors int4", "1+2/m2"),
        ("GPTQ, zero points", "1t2+1t3/m2"),
        ("AWQ", "1t2"),
        ("compressed-tensors int8", "2t2*1"),
    ],
)
def test_texts_of_packed_weights(form: str, layout: str, tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "checkpoint", **SIZES, intermediate_size=48).folder
    wide_folder = pack_checkpoint(folder, PACKED[form])
    wide = TinyModel(folder, AutoModelForCausalLM.from_pretrained(wide_folder, attn_implementation="eager").eval())
    prompts = random_prompts([1, 40] * 3, seed=5)
    expected = wide.greedy(prompts)
    with running(config(wide, layout)) as engine:
        assert complete(engine, prompts) == expected


QUICK = ("GPTQ, desc_act", "AWQ", "compressed-tensors mxfp4")


def packed_and_wide(form: str, tmp_path: Path) -> tuple[Path, Path]:
    """A checkpoint in this format, and one with what it multiplies out to."""
    changes = SIZES | {"moe_intermediate_size": 64, "intermediate_size": 64, "decoder_sparse_step": 1}
    folder = save_tiny_model(tmp_path / "checkpoint", **changes).folder
    if form in FORMATS:
        return folder, quantize_checkpoint(folder, FORMATS[form])
    if form in PACKED:
        return folder, pack_checkpoint(folder, PACKED[form])
    file = tmp_path / f"{form}.gguf"
    return file, wide_gguf(folder, file, all_of(Kind[form]))


@pytest.mark.parametrize(
    "form",
    [
        pytest.param(each, marks=() if each in (*QUICK, "Q4_0", "fp8, blocks of 128 x 128") else pytest.mark.slow)
        for each in (*PACKED, *FORMATS, "Q4_0", "Q5_1", "Q8_0", "MXFP4")
    ],
)
def test_packed_experts_move_and_their_workers_die(form: str, tmp_path: Path) -> None:
    """Two expert workers of two ranks each; each expert changes its worker, then one of these is lost."""
    path, wide = packed_and_wide(form, tmp_path)
    prompts = random_prompts([1, 40] * 3, seed=5)
    with running(config(TinyModel(wide, None), "1", dtype="float32")) as engine:
        expected = complete(engine, prompts)
    first, second = ((0,), (0,), (0,), (1,), (1,)), ((1,), (1,), (1,), (0,), (0,))
    places = [ExpertPlacement(2, dict.fromkeys(range(3), owners)) for owners in (first, second)]
    ranks = config(TinyModel(path, None), "1t2+2t2/m2", dtype="float32", expert_slots=4)
    with running(replace(ranks, placement=places[0])) as engine:
        assert complete(engine, prompts) == expected
        assert engine.place(places[1]) > 0
        placing = engine.workforce.groups[0].placing
        assert placing is not None
        wait_until(lambda: placing.current.owners[1] == second, "the second placement")
        assert complete(engine, prompts) == expected
        kill(engine, "experts", 1)
        assert complete(engine, prompts) == expected


@pytest.mark.parametrize("layout", ["1", "1+2/m2"])
def test_texts_of_a_gguf_file(layout: str, tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "checkpoint", **SIZES, decoder_sparse_step=1)
    write_gguf(model.folder, tmp_path / "model.gguf", all_of(Kind.F32))
    prompts = random_prompts([1, 40] * 3, seed=5)
    expected = model.greedy(prompts)
    with running(config(TinyModel(tmp_path / "model.gguf", model.model), layout)) as engine:
        assert complete(engine, prompts) == expected


def test_an_expert_worker_of_packed_experts_that_dies(tmp_path: Path) -> None:
    """Its successor reads the same bytes."""
    folder = save_tiny_model(tmp_path / "checkpoint", **SIZES, decoder_sparse_step=1).folder
    write_gguf(folder, tmp_path / "model.gguf", all_of(Kind.Q8_0))
    prompts = random_prompts([1, 40] * 3, seed=5)
    with running(config(TinyModel(tmp_path / "model.gguf", None), "1+2/m2")) as engine:
        before = complete(engine, prompts)
        kill(engine, "experts", 1)
        assert complete(engine, prompts) == before


@pytest.mark.parametrize(("form", "num_bytes"), [("plain", 320 << 10), ("compressed-tensors int4", 160 << 10)])
def test_experts_in_the_file_give_the_same_text(form: str, num_bytes: int, tmp_path: Path) -> None:
    """Two of three layers' experts fit; prompts need all of a layer, so layers take each other's places."""
    changes = SIZES | {"num_hidden_layers": 3, "decoder_sparse_step": 1}
    model = save_tiny_model(tmp_path / "checkpoint", **changes, intermediate_size=48)
    if form != "plain":
        wide_folder = pack_checkpoint(model.folder, PACKED[form])
        wide = AutoModelForCausalLM.from_pretrained(wide_folder, attn_implementation="eager").eval()
        model = TinyModel(model.folder, wide)
    prompts = random_prompts([1, 40] * 3, seed=5)
    expected = model.greedy(prompts)
    with running(replace(config(model, "1"), expert_bytes=num_bytes)) as engine:
        assert complete(engine, prompts) == expected
        counts = engine.stats().prefetch
        assert counts.num_copies > 0, "read ahead of their layer"
        assert counts.num_late > 0
        kill(engine, "replica", 0)
        assert complete(engine, prompts) == expected


@pytest.mark.parametrize("layout", ["1+2/m2", pytest.param("2+2t2/m2 free", marks=pytest.mark.slow)])
def test_expert_workers_read_theirs_from_the_file(layout: str, tmp_path: Path) -> None:
    """Of three layers' experts two fit; text is the same, also after a worker was lost."""
    changes = SIZES | {"num_hidden_layers": 3, "decoder_sparse_step": 1}
    model = save_tiny_model(tmp_path / "checkpoint", **changes)
    prompts = random_prompts([1, 40] * 3, seed=5)
    expected = model.greedy(prompts)
    with running(replace(config(model, layout), expert_bytes=192 << 10)) as engine:
        assert complete(engine, prompts) == expected
        kill(engine, "experts", 1)
        assert complete(engine, prompts) == expected


def test_resident_memory_is_the_pool_and_one_expert(tmp_path: Path) -> None:
    """Eight layers with 15 MiB of experts each: a worker that keeps them all has 120 MiB, one with a pool of two layers
    never more than that and what one read takes."""
    sizes = SIZES | {"num_hidden_layers": 8, "decoder_sparse_step": 1, "moe_intermediate_size": 4096}
    model = save_tiny_model(tmp_path / "checkpoint", **sizes)
    spec = load_model_spec(model.folder)
    layer_bytes = 4 * spec.router.num_experts * count_parameters(spec).expert
    prompts = random_prompts([1, 40] * 2, seed=5)

    def peak_and_text(**changes: Any) -> tuple[int, list[list[int]]]:
        with running(replace(config(model, "1"), **changes)) as engine:
            text = complete(engine, prompts)
            status = Path(f"/proc/{engine.worker_pid(WorkerName('replica', 0))}/status").read_text()
            return 1024 * int(status.partition("VmHWM:")[2].split()[0]), text

    whole_bytes, text = peak_and_text()
    pool_bytes, same = peak_and_text(expert_bytes=2 * layer_bytes + (1 << 20))
    assert same == text
    assert whole_bytes - pool_bytes > 5 * layer_bytes, "six layers' experts are not there; one expert is being read"


def test_too_little_memory_for_experts(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "checkpoint", **SIZES, num_hidden_layers=3, decoder_sparse_step=1)
    with (
        pytest.raises(UserError, match=r"--expert-memory 1000 B holds 0 experts of .*: give at least .* 2 layers"),
        running(replace(config(model, "1"), expert_bytes=1000)),
    ):
        pass
    with pytest.raises(UserError, match="--expert-memory 1000 needs experts on CPUs that stay where they are"):
        replace(config(model, "1+1/m2", balance="window"), expert_bytes=1000)
    with pytest.raises(UserError, match="--expert-memory 1000 needs experts on CPUs"):
        replace(config(model, "1t2"), expert_bytes=1000)


def test_layers_in_different_formats_and_expert_memory(tmp_path: Path) -> None:
    """As in many GGUF files, whose down projections have more bits in some layers."""
    folder = save_tiny_model(tmp_path / "checkpoint", **SIZES, num_hidden_layers=3, decoder_sparse_step=1).folder

    def kind_of(name: str, shape: tuple[int, ...]) -> Kind:
        return all_of(Kind.Q8_0 if "blk.2.ffn_down" in name else Kind.Q4_0)(name, shape)

    write_gguf(folder, tmp_path / "model.gguf", kind_of)
    settings = config(TinyModel(tmp_path / "model.gguf", None), "1")
    with running(settings) as engine:
        assert len(complete(engine, random_prompts([9]))[0]) == NUM_TOKENS
    message = r"layer 0 has gate and up int4 .*, down int4 in groups of 32, layer 2 .*, down int8 .*; leave it out"
    with pytest.raises(UserError, match=message), running(replace(settings, expert_bytes=400 << 10)):
        pass
