"""Decode steps without the host: nothing asks it, shapes are a bucket's, padding changes no bit, texts are the same."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from antiphon.base.errors import UserError
from antiphon.kernels.cpu import CpuBackend
from antiphon.kernels.reference import ReferenceBackend
from antiphon.models.batch import BlockTables
from antiphon.serve.policy.request import SequenceStart, SequenceStep
from antiphon.serve.worker import decode_steps
from antiphon.serve.worker.decode_steps import CapturedSteps
from antiphon.serve.worker.messages import RunStep, Sampled
from antiphon.serve.worker.row_sampler import RowOperations, RowSampler
from antiphon.serve.worker.sampling import (
    Draws,
    RowDraw,
    counter_uniform,
    draw_on_device,
)
from antiphon.specs.sampling import SamplingParams
from tests.models.conftest import load_decoder
from tests.serve.engine_harness import (
    GREEDY,
    Prompts,
    TinyModel,
    complete,
    config,
    random_prompts,
    running,
    save_tiny_model,
)
from tests.serve.no_host import without_host

DRAWN = SamplingParams(max_tokens=8, temperature=0.9, top_k=20, top_p=0.9, min_p=0.01, seed=3, ignore_eos=True)
KINDS = [
    replace(GREEDY, max_tokens=8),
    DRAWN,
    replace(DRAWN, top_k=0, top_p=1.0, min_p=0.0),
    replace(DRAWN, presence_penalty=0.5),
    replace(DRAWN, logprobs=2, temperature=0.0),
]
BLOCK_SIZE, NUM_BLOCKS = 16, 32


class Worker:
    """`CapturedSteps` over a model, and sequences that it knows: sequence i has `lengths[i]` tokens."""

    def __init__(self, folder: Path, device: str = "cpu") -> None:
        backend = ReferenceBackend(device)
        decoder = load_decoder(folder, backend)
        half = decoder.attention_half
        torch.manual_seed(0)
        self.cache = half.new_cache(NUM_BLOCKS + 1, BLOCK_SIZE)
        for table in (*self.cache.keys, *self.cache.values):
            table.normal_()
        self.sampler = RowSampler(backend)
        tables = BlockTables(BLOCK_SIZE, 8, 8, backend.device)
        self.steps = CapturedSteps(half, decoder.expert_half, self.cache, tables, self.sampler, pad_block=NUM_BLOCKS)

    def step(self, lengths: list[int], params: SamplingParams, token: int = 5) -> RunStep:
        sequences = []
        for index, length in enumerate(lengths):
            start = SequenceStart(str(index), index, (token,) * length, length - 1, params, index, ())
            self.sampler.add(start)
            blocks = tuple(range(4 * index, 4 * index + 4))
            sequences.append(SequenceStep(str(index), index, (token + index,), length - 1, 0, blocks, True, 0, 0))
        return RunStep(step=1, released=[], starts=[], micro_batches=[sequences], participants=[[0]])

    def run(self, lengths: list[int], params: SamplingParams = GREEDY, token: int = 5) -> list[Sampled]:
        sampled = self.steps.run(self.step(lengths, params, token))
        assert sampled is not None
        return sampled


@pytest.fixture(scope="module", params=["qwen2_moe", "gpt_oss", "deepseek_v3"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("captured") / "model", request.param).folder


@pytest.mark.parametrize("form", ["greedy", "drawn", "logits"])
@torch.inference_mode()
def test_nothing_between_the_first_layer_and_the_token_asks_the_host(
    folder: Path, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = Worker(folder)
    seen = []
    for lengths, token in (([9, 30, 17], 5), ([40, 3, 12, 33], 50)):  # one bucket, other values
        worker.run(lengths, DRAWN if form == "drawn" else GREEDY, token)
        (bucket,) = worker.steps._buckets.values()
        _, operations = without_host(partial(worker.steps.forward, bucket, form), monkeypatch)
        seen.append(operations)
    assert seen[0] == seen[1]
    assert len(seen[0]) > 50


@torch.inference_mode()
def test_what_asks_the_host_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.arange(4)
    for work in (
        lambda: x[x > 1],
        lambda: torch.where(x > 1)[0],
        lambda: torch.unique(x),
        lambda: torch.tensor([1, 2]),
        lambda: x[: int(x[1].item())],
        lambda: torch.from_numpy(x.numpy()),
        lambda: x.cpu() + 1,
        lambda: x if x.sum() > 1 else x + 1,
    ):
        with pytest.raises(AssertionError, match=r"host|values|reads|moves"):
            without_host(work, monkeypatch)


@torch.inference_mode()
def test_buckets_are_made_before_the_first_request(folder: Path) -> None:
    """All numbers of rows, both forms that draw; the cache keeps what it had, and the first step finds its bucket."""
    fresh, warm = Worker(folder), Worker(folder)
    kept = [table[: NUM_BLOCKS * BLOCK_SIZE].clone() for table in (*warm.cache.keys, *warm.cache.values)]
    forms = []
    forward = warm.steps.forward
    warm.steps.forward = lambda bucket, form: forms.append(form) or forward(bucket, form)  # type: ignore[method-assign]
    warm.steps.warm_up(3)
    assert forms == ["greedy", "drawn"] * 2 * 3
    assert list(warm.steps._buckets) == [(1, 8), (2, 8), (4, 8)]
    for table, old in zip((*warm.cache.keys, *warm.cache.values), kept, strict=True):
        assert torch.equal(table[: NUM_BLOCKS * BLOCK_SIZE], old)
    assert warm.run([9, 30, 17]) == fresh.run([9, 30, 17])
    assert len(warm.steps._buckets) == 3


@torch.inference_mode()
def test_padding_changes_neither_bits_nor_the_cache(folder: Path) -> None:
    """Rows beyond a step's own: whatever another step left there, the logits are the same, and so are all keys."""
    outputs, caches = [], []
    for before in ([30, 31, 32, 33], [3, 3, 3, 3]):
        worker = Worker(folder)
        kept = [table[: NUM_BLOCKS * BLOCK_SIZE].clone() for table in (*worker.cache.keys, *worker.cache.values)]
        worker.run(before, token=40)
        for table, old in zip((*worker.cache.keys, *worker.cache.values), kept, strict=True):
            table[: NUM_BLOCKS * BLOCK_SIZE] = old
        worker.run([9, 30, 17])
        (bucket,) = worker.steps._buckets.values()
        outputs.append(worker.steps.forward(bucket, "logits")[:3].clone())
        caches.append(
            [table[: NUM_BLOCKS * BLOCK_SIZE].clone() for table in (*worker.cache.keys, *worker.cache.values)]
        )
        touched = sum(int((new != old).flatten(1).any(1).sum()) for new, old in zip(caches[-1], kept, strict=True))
        assert touched == 3 * len(kept)  # a row of each table for each sequence
    assert torch.equal(outputs[0], outputs[1])
    assert all(torch.equal(a, b) for a, b in zip(*caches, strict=True))


@torch.inference_mode()
def test_padded_rows_touch_no_expert(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker(folder)
    worker.run([9, 30, 17])
    (bucket,) = worker.steps._buckets.values()
    experts, rows = worker.steps.experts, []
    forward = experts.forward
    monkeypatch.setattr(experts, "forward", lambda layer, x, ids, w: (rows.append(ids), forward(layer, x, ids, w))[1])
    worker.steps.forward(bucket, "greedy")
    assert rows
    assert all((ids[3:] == -1).all() and (ids[:3] >= 0).all() for ids in rows)


def test_other_steps_do_not_qualify(folder: Path) -> None:
    worker = Worker(folder)
    step = worker.step([9, 30], GREEDY)
    decode, other = step.micro_batches[0]
    for sequences in (
        [[decode._replace(token_ids=(1, 2)), other]],  # a prompt
        [[decode._replace(samples=False), other]],
        [[decode._replace(logprob_end=1), other]],
        [[decode], [other]],  # micro-batches
        [],
    ):
        changed = RunStep(step=1, released=[], starts=[], micro_batches=sequences, participants=[])
        assert worker.steps.run(changed) is None


def test_draws_on_the_device_are_those_of_the_native_kernel() -> None:
    torch.manual_seed(1)
    logits = torch.randn(64, 1000) * 3
    params = [
        replace(DRAWN, temperature=t, top_k=k, top_p=p, min_p=m)
        for t in (0.0, 0.5, 1.0, 3.0)
        for k in (0, 1, 40, 2000)
        for p, m in ((1.0, 0.0), (0.7, 0.0), (0.9, 0.05), (1.0, 0.3))
    ]
    rows = [RowDraw(each, counter_uniform(9, index)) for index, each in enumerate(params)]
    expected = RowOperations.of(CpuBackend(torch.float32)).choose(logits, rows)
    assert draw_on_device(logits, Draws.of(rows, 1000, logits.device)).tolist() == expected


def test_the_text_is_that_of_the_normal_path(tiny_model: TinyModel) -> None:
    prompts: Prompts = random_prompts([1, 9, 33, 60, 17])
    made = []
    for graphs in ("off", "on"):
        with running(config(tiny_model, "1", kernels="reference", graphs=graphs)) as engine:
            made.append((complete(engine, prompts, KINDS[:3] + KINDS[:2]), complete(engine, prompts, KINDS)))
    assert made[0] == made[1]


@pytest.mark.parametrize(
    ("layout", "changes", "message"),
    [
        ("1+1", {}, "--graphs on: a disaggregated layout exchanges rows between layers"),
        ("1t2", {}, "--graphs on: the ranks of a worker"),
        ("1", {"record_routing": Path("x")}, "--graphs on: a record of the routing"),
        (
            "1",
            {"kernels": "auto"},
            "--graphs on: the native kernels of a CPU work on the host; add --kernels reference",
        ),
    ],
)
def test_what_cannot_be_captured_is_refused(
    tiny_model: TinyModel, layout: str, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        config(tiny_model, layout, **({"kernels": "reference", "graphs": "on"} | changes))


def test_gpus_use_graphs_where_they_can(tiny_model: TinyModel) -> None:
    assert config(tiny_model, "1", device="cuda").uses_graphs("replica")
    assert not config(tiny_model, "1", device="cuda", graphs="off").uses_graphs("replica")
    assert not config(tiny_model, "1+1", device="cuda").uses_graphs("attention")
    assert not config(tiny_model, "1").uses_graphs("replica")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine: graphs are not recorded")
@torch.inference_mode()
def test_a_recorded_step_has_the_bits_of_an_eager_one(folder: Path) -> None:
    worker = Worker(folder, "cuda")
    for _ in range(3):  # eager, recorded, replayed
        worker.run([9, 30, 17], DRAWN)
        (bucket,) = worker.steps._buckets.values()
        output = worker.steps._compute(bucket, "logits").clone()
        assert torch.equal(output, worker.steps.forward(bucket, "logits"))


def test_a_step_that_cannot_be_recorded_is_computed_all_the_same(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As on a GPU without memory for the graph."""
    tried: list[object] = []

    def fails(graph: object, pool: object) -> object:
        tried.append(graph)
        raise RuntimeError("CUDA error: out of memory")

    worker = Worker(tiny_model.folder)
    expected = worker.run([20, 33])
    monkeypatch.setattr(decode_steps, "_cuda", SimpleNamespace(CUDAGraph=object, graph=fails))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    worker.steps._records = True
    with caplog.at_level("WARNING"):
        assert [worker.run([20, 33]) for _ in range(4)] == [expected] * 4
    assert len(tried) == 1
    assert caplog.text.count("cannot be recorded") == 1
