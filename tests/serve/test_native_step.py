"""Decode steps, or their layers, in one native call: the same tokens and bits as kernel by kernel from Python, for any
rows, families and orders."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from antiphon.kernels.cpu import CpuBackend
from antiphon.models.batch import BlockTables
from antiphon.models.noted_half import NotedHalf
from antiphon.serve.policy.request import PENDING, SequenceStart, SequenceStep
from antiphon.serve.worker.attention import AllLayers, AttentionRunner
from antiphon.serve.worker.decode_steps import NativeSteps, native_steps
from antiphon.serve.worker.exchange import LocalExperts, RowRouting, StepExchange
from antiphon.serve.worker.messages import RunStep, Sampled
from antiphon.serve.worker.row_sampler import RowSampler
from antiphon.serve.worker.spans import ATTENTION, DISPATCH, INPUTS, SAMPLE, STEP, SpanRecorder
from antiphon.specs.sampling import SamplingParams
from tests.models.conftest import FAMILIES, load_decoder
from tests.serve.engine_harness import GREEDY, random_prompts, save_tiny_model

LENGTHS = (1, 40, 17, 33)
REPORTED = replace(GREEDY, logprobs=3)
PARAMS = (
    GREEDY,
    REPORTED,
    SamplingParams(max_tokens=64, temperature=0.9, top_k=20, seed=4, logprobs=0),
    replace(GREEDY, presence_penalty=0.5, min_tokens=3),
)
# Between the kernels of the others PyTorch computes: latent attention, layer norms, clipping, multipliers.
NOTED = {
    "dots1",
    "ernie4_5_moe",
    "glm4_moe",
    "gpt_oss",
    "minimax_m2",
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "solar_open",
}


class Replica:
    """A worker's runner over all layers and experts, and what it was given so far."""

    def __init__(
        self, folder: Path, *, native: bool, by_layers: bool = False, dtype: torch.dtype = torch.float32
    ) -> None:
        backend = CpuBackend(dtype)
        decoder = load_decoder(folder, backend)
        half = self.half = decoder.attention_half
        if by_layers:
            half = self.half = NotedHalf.of(half, 8, 192, 16)
        cache, tables = half.new_cache(64, 16), BlockTables(16, 8, 12, backend.device)
        sampler, self.recorder = RowSampler(backend), SpanRecorder(keeps_all=True)
        local = LocalExperts(decoder.expert_half)
        self.native: NativeSteps | None = None
        if native:
            self.native = native_steps(half, local, cache, tables, sampler, self.recorder, most_rows=8)
        exchange, stage = StepExchange(local, half, self.recorder, 1.0), AllLayers(half, sampler)
        self.runner = AttentionRunner(exchange, cache, tables, stage, RowRouting(half), decode_steps=self.native)
        self.step = 0

    def run(
        self,
        sequences: list[SequenceStep],
        starts: Sequence[SequenceStart] = (),
        num_micro_batches: int = 1,
        bitmasks: dict[str, bytes] | None = None,
    ) -> list[Sampled] | None:
        self.step += 1
        step = RunStep(
            step=self.step,
            released=[],
            starts=list(starts),
            micro_batches=[sequences[first::num_micro_batches] for first in range(num_micro_batches)],
            participants=[[0]] * num_micro_batches,
            bitmasks=bitmasks or {},
        )
        result = self.runner.run(step)
        return None if result is None else result.requests

    def begin(self, params: Sequence[SamplingParams] = PARAMS) -> list[Sampled]:
        """All prompts in one step."""
        prompts = random_prompts(LENGTHS, seed=3)
        starts = [
            SequenceStart(str(slot), slot, tuple(prompt), len(prompt), own, slot, (2,))
            for slot, (prompt, own) in enumerate(zip(prompts, params, strict=True))
        ]
        sequences = [
            SequenceStep(str(slot), slot, tuple(prompt), 0, 0, blocks(slot), True, 0, 0)
            for slot, prompt in enumerate(prompts)
        ]
        sampled = self.run(sequences, starts)
        assert sampled is not None
        return sampled


def blocks(slot: int) -> tuple[int, ...]:
    return tuple(range(8 * slot + 7, 8 * slot - 1, -1))  # from the last one down


def one(slot: int, token: int | None, place: int) -> SequenceStep:
    """The row `place` tokens behind its prompt."""
    assert token is not None
    return SequenceStep(str(slot), slot, (token,), LENGTHS[slot] + place, 8, (), True, 0, 0)


def tokens_of(sampled: list[Sampled] | None) -> dict[int, int | None]:
    assert sampled is not None
    return {int(each.request_id): each.token_id for each in sampled}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_bits_as_kernel_by_kernel(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Steps of all sequences and of some, in any order: tokens, and the log-probabilities of those that ask."""
    folder = save_tiny_model(tmp_path / "model", family).folder
    plain, quick = Replica(folder, native=False, dtype=dtype), Replica(folder, native=True, dtype=dtype)
    known = tokens_of(plain.begin())
    assert tokens_of(quick.begin()) == known
    places = dict.fromkeys(known, 0)
    for slots in ([0, 1, 2, 3], [2], [3, 0], [1, 3, 2, 0], [1], [0, 1, 2, 3]):
        sequences = [one(slot, known[slot], places[slot]) for slot in slots]
        sampled = plain.run(sequences)
        assert quick.run(sequences) == sampled
        known |= tokens_of(sampled)
        places |= {slot: places[slot] + 1 for slot in slots}
    assert quick.native is not None
    assert (quick.native._buffers is not None) == (family in NOTED)
    out_TH = torch.full((5, quick.half.spec.hidden_size), 7.0, dtype=dtype)
    quick.half.embedder(out_TH)([6, 0, 6])
    assert torch.equal(out_TH[:3], quick.half.embed(torch.tensor([6, 0, 6])))
    assert (out_TH[3:] == 7.0).all(), "rows of none"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_bits_layer_by_layer(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Micro-batches in turns, of one row and of several, one of them with rows of a prompt."""
    folder = save_tiny_model(tmp_path / "model", family).folder
    plain = Replica(folder, native=False, dtype=dtype)
    quick = Replica(folder, native=False, by_layers=True, dtype=dtype)
    known = tokens_of(plain.begin())
    assert tokens_of(quick.begin()) == known
    places = dict.fromkeys(known, 0)
    for slots, count in (([0, 1, 2, 3], 2), ([2], 1), ([3, 0, 1], 3), ([1, 3, 2, 0], 1), ([0, 1, 2, 3], 2)):
        sequences = [one(slot, known[slot], places[slot]) for slot in slots]
        if count == 3:
            sequences[1] = sequences[1]._replace(token_ids=(*sequences[1].token_ids, 5, 6))
            places[0] += 2
        sampled = plain.run(sequences, num_micro_batches=count)
        assert quick.run(sequences, num_micro_batches=count) == sampled
        known |= tokens_of(sampled)
        places |= {slot: places[slot] + 1 for slot in slots}
    assert isinstance(quick.half, NotedHalf)
    assert quick.half._cannot == (family not in NOTED)
    assert len(quick.half._lanes) == (2 if family in NOTED else 1)


def test_norms_over_all_heads_are_noted_where_nothing_is_clipped(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "model", "olmoe", clip_qkv=None).folder
    plain, quick = Replica(folder, native=False), Replica(folder, native=True)
    known = tokens_of(plain.begin())
    quick.begin()
    sequences = [one(slot, token, 0) for slot, token in known.items()]
    assert quick.run(sequences) == plain.run(sequences)
    assert quick.native is not None
    assert quick.native._buffers is not None


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("native") / "model").folder


def test_what_does_not_qualify_runs_as_ever(folder: Path) -> None:
    """A prompt beside a decoding sequence; more rows than there are buffers for."""
    plain, quick = Replica(folder, native=False), Replica(folder, native=True)
    known = tokens_of(plain.begin())
    quick.begin()
    mixed = [one(0, known[0], 0), replace_rows(one(1, known[1], 0), (5, 6, 7))]
    assert quick.run(mixed) == plain.run(mixed)
    assert quick.native is not None
    assert quick.native._buffers is None, "no step of single rows has come"


def replace_rows(sequence: SequenceStep, token_ids: tuple[int, ...]) -> SequenceStep:
    return sequence._replace(token_ids=token_ids)


def test_spans_of_every_layer_and_of_the_head(folder: Path) -> None:
    quick = Replica(folder, native=True)
    known = tokens_of(quick.begin())
    quick.recorder.take()
    quick.run([one(0, known[0], 0), one(3, known[3], 0)])
    spans = quick.recorder.take()
    sparse = (ATTENTION, DISPATCH)  # every second layer of this model is dense
    assert spans.name_index == [INPUTS, ATTENTION, *sparse, ATTENTION, SAMPLE, SAMPLE, STEP]
    assert spans.layers == [-1, 0, 1, 1, 2, -1, -1, -1]
    assert spans.rows == [2, 2, 2, 2, 2, 2, 0, 2]
    assert all(start <= end for start, end in zip(spans.starts_ns, spans.ends_ns, strict=True))
    assert spans.starts_ns[2:6] == spans.ends_ns[1:5], "one begins where the one before it ends"


def test_only_rows_of_plain_greedy_requests_take_the_largest_logit_as_it_is(folder: Path) -> None:
    """Tokens that end a request are banned at first, or a grammar forbids tokens; a name begins again as another."""
    plain, quick = Replica(folder, native=False), Replica(folder, native=True)
    known = tokens_of(plain.begin((GREEDY,) * 4))
    assert tokens_of(quick.begin((GREEDY,) * 4)) == known
    every = [one(slot, token, 0) for slot, token in known.items()]
    sampled = plain.run(every)
    assert quick.run(every) == sampled
    assert sampled is not None
    forbidden = {"2": bytes([0b10101010]) * 64}
    assert plain.run(every, bitmasks=forbidden) != sampled
    assert quick.run(every, bitmasks=forbidden) == plain.run(every, bitmasks=forbidden)
    last, banned = known[1], tokens_of(sampled)[1]
    assert last is not None
    assert banned is not None
    for params in (REPORTED, replace(GREEDY, min_tokens=9), GREEDY):
        prompt = random_prompts(LENGTHS, seed=3)[1]
        start = SequenceStart("1", 1, (*prompt, last), len(prompt), params, 1, (banned,))
        again = quick.run(every, [start])
        assert again == plain.run(every, [start])
        assert (tokens_of(again)[1] == banned) == (params.min_tokens == 0)


def test_a_step_planned_ahead_takes_the_tokens_of_the_one_before(folder: Path) -> None:
    plain, ahead = Replica(folder, native=True), Replica(folder, native=True)
    first = plain.begin((GREEDY,) * 4)
    assert ahead.begin((GREEDY,) * 4) == first
    known = tokens_of(first)
    for place in range(3):
        slots = [3, 1] if place else [3, 1, 0]  # one ends
        sampled = plain.run([one(slot, known[slot], place) for slot in slots])
        assert ahead.run([one(slot, PENDING, place) for slot in slots]) == sampled
        known |= tokens_of(sampled)


def test_a_step_planned_behind_one_that_failed_is_not_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine sends both again; the tokens of an earlier step are not taken for those of the one that failed."""
    quick = Replica(folder, native=True)
    known = tokens_of(quick.begin((GREEDY,) * 4))
    assert quick.native is not None
    with monkeypatch.context() as patch:

        def fail(_: object) -> None:
            raise RuntimeError("once")

        patch.setattr(quick.native, "run", fail)
        with pytest.raises(RuntimeError, match="once"):
            quick.run([one(1, known[1], 0)])
    assert quick.run([one(1, PENDING, 1)]) is None
    again = quick.run([one(1, known[1], 0)])
    assert quick.run([one(1, PENDING, 1)]) is not None
    assert again is not None
