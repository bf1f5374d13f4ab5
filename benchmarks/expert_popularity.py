"""Which experts real text chooses, and how well that is known before a layer runs: Lina's sample paths (section 5.2)
beside the next layer's router.

    python benchmarks/expert_popularity.py                               # estimates; some minutes
    python benchmarks/expert_popularity.py --record out/routing.trace    # for `antiphon bench balance --routing`

Estimate: the demo model routes text it was trained on and text it was not (the files of `demo_loss.py`), in windows of
its training length. Sample paths (`popularity`) are profiled on other text of the first kind. A step is either 2,048
rows of prompts or one row of each of 128 windows. Lina takes an estimate for right if the 2 k experts chosen most often
are those it names (section 7.3.2; k = 2 here, 1 in the paper); else phase two places again. "In order" asks for the
same order too. "Rows elsewhere" is the share of choices that would have to change for the estimate to be right.
Balancedness: 16 experts on 4 workers with 4 copies, placed for the estimate, split by the step's own counts. `window`
is placed for the 8 steps before, `fresh` for the step itself. "Packed as Lina": by n_e and first-fit-decreasing.

Record: the demo model goes on with beginnings of the standard library's text, at a temperature of 1. Requests follow
each other in the order of the files, and a new one begins when one ends. So those that run together are about similar
code, and popularity drifts as they do.
"""

import argparse
import random
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from demo_loss import FOLDER, HELD_OUT, LIBRARY
from numpy.typing import NDArray
from popularity import PathProfile, pack_first_fit

from antiphon.base.errors import UserError
from antiphon.kernels.select import make_backend
from antiphon.models.attention_half import AttentionHalf
from antiphon.models.batch import make_attention_batch
from antiphon.models.config import load_model_spec
from antiphon.models.expert_half import ExpertHalf
from antiphon.models.load import load_attention_half, load_expert_half, open_checkpoint
from antiphon.placement.place import place, recent_loads
from antiphon.placement.routing_trace import read_routing_trace
from antiphon.placement.split import balancedness, most_popular, needs_phase_two, split_rows
from antiphon.serve.config import ServeConfig
from antiphon.serve.launch import start_engine
from antiphon.serve.outputs import ThreadSink
from antiphon.specs.sampling import SamplingParams
from antiphon.train.config import read_config
from antiphon.train.documents import find_files
from antiphon.train.encoder import load_tokenizer

LENGTH, BLOCK = 256, 16
PROMPT_ROWS, DECODE_ROWS, WINDOW_STEPS = 2048, 128, 8
NUM_WORKERS, SLOTS = 4, 5
PATHS = (1, 2, 3, 6)
COLUMNS = (
    *("estimate", "layers", "right %", "in order %", "phase two %", "rows elsewhere %"),
    *("balancedness", "p5", "packed as Lina"),
)
Ids = NDArray[np.int64]
PROMPT_TOKENS = 64


@dataclass(frozen=True)
class Routed:
    """Choices of every row, [L, windows, positions, K]: of each layer's router, and of the next layer's on its input
    (`ahead[l]` is for layer l, so there is none for layer 0)."""

    ids: Ids
    ahead: Ids


class RoutingRecorder:
    """The demo model, and a cache for one batch of windows."""

    def __init__(self, folder: Path) -> None:
        self.spec = load_model_spec(folder)
        backend = make_backend("auto", torch.device("cpu"), torch.bfloat16)
        checkpoint = open_checkpoint(folder, self.spec)
        self.half: AttentionHalf = load_attention_half(checkpoint, self.spec, backend)
        self.experts: ExpertHalf = load_expert_half(checkpoint, self.spec, backend)
        blocks = LENGTH // BLOCK
        self.num_windows = PROMPT_ROWS // LENGTH
        self.cache = self.half.new_cache(self.num_windows * blocks, BLOCK)
        tables = [list(range(first * blocks, (first + 1) * blocks)) for first in range(self.num_windows)]
        lengths = [LENGTH] * self.num_windows
        self.batch = make_attention_batch(lengths, lengths, tables, BLOCK, "cpu")

    def run(self, windows: Ids) -> Routed:
        """`windows` [W, LENGTH], a multiple of `num_windows` of them."""
        parts = [self._run(torch.from_numpy(windows[at : at + self.num_windows])) for at in self._begins(windows)]
        return Routed(*(np.concatenate(each, axis=1) for each in zip(*parts, strict=True)))

    def _begins(self, windows: Ids) -> range:
        return range(0, len(windows) - self.num_windows + 1, self.num_windows)

    @torch.inference_mode()
    def _run(self, windows: torch.Tensor) -> tuple[Ids, Ids]:
        half, num_layers = self.half, self.spec.num_layers
        x_TH, delta_TH = half.embed(windows.flatten()), None
        shape = (num_layers, *windows.shape, self.spec.router.top_k)
        ids, ahead = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64)
        for layer in range(num_layers):
            x_TH, y_TH = half.attend(layer, x_TH, delta_TH, self.cache, self.batch)
            ids_TK, weights_TK = half.gate(layer, y_TH)
            ids[layer] = ids_TK.numpy().reshape(shape[1:])
            if layer + 1 < num_layers:
                ahead[layer + 1] = half.gate(layer + 1, y_TH)[0].numpy().reshape(shape[1:])
            delta_TH = self.experts.forward(layer, y_TH, self.experts.to_local(layer, ids_TK), weights_TK)
        return ids, ahead


def windows_of(files: list[Path], count: int) -> Ids:
    """Up to `count` windows of the files' text, in their order."""
    tokenizer, ids = load_tokenizer(FOLDER), []
    for file in files:
        ids += [*tokenizer.encode(file.read_text(errors="replace"), add_special_tokens=False).ids, 0]
        if len(ids) >= count * LENGTH:
            break
    num_windows = min(count, len(ids) // LENGTH)
    return np.asarray(ids[: num_windows * LENGTH], dtype=np.int64).reshape(num_windows, LENGTH)


def steps_of(routed: Routed, is_decode: bool) -> list[Routed]:
    """[L, T, K] by step."""
    num_layers, num_windows, length, top_k = routed.ids.shape

    def cut(ids: Ids) -> list[Ids]:
        if is_decode:
            return [ids[:, :DECODE_ROWS, position] for position in range(length)]
        rows = ids.reshape(num_layers, num_windows * length, top_k)
        return [rows[:, at : at + PROMPT_ROWS] for at in range(0, rows.shape[1] - PROMPT_ROWS + 1, PROMPT_ROWS)]

    return [Routed(*pair) for pair in zip(cut(routed.ids), cut(routed.ahead), strict=True)]


def counts_of(ids_TK: Ids, num_experts: int) -> Ids:
    return np.bincount(ids_TK.reshape(-1), minlength=num_experts)


class Score:
    """The score of one predictor: rightness by step and layer, counts that it placed for and those that came."""

    def __init__(self) -> None:
        self.same: list[bool] = []
        self.in_order: list[bool] = []
        self.estimates: list[NDArray[np.float64]] = []
        self.actual: list[Ids] = []

    def add(self, estimate: NDArray[np.float64], actual: Ids, top_k: int) -> None:
        named, chosen = most_popular(estimate, 2 * top_k), most_popular(actual, 2 * top_k)
        self.same.append(not needs_phase_two(estimate, actual, top_k))
        self.in_order.append(named == chosen)
        self.estimates.append(estimate)
        self.actual.append(actual)

    def row(self, name: str, layers: str) -> str:
        if not self.same:
            return f"| {name} | none | | | | | | | |"
        held = place(np.stack(self.estimates), NUM_WORKERS, SLOTS)
        balance = balancedness(split_rows(np.stack(self.actual), held))
        packed = np.stack(
            [pack_first_fit(NUM_WORKERS * each / each.sum(), NUM_WORKERS, SLOTS) for each in self.estimates]
        )
        of_lina = balancedness(split_rows(np.stack(self.actual), packed))
        right = np.mean(self.same)
        shares, actual = (np.stack(each) for each in (self.estimates, self.actual))
        apart = np.abs(shares / shares.sum(axis=1, keepdims=True) - actual / actual.sum(axis=1, keepdims=True))
        percents = (100 * right, 100 * np.mean(self.in_order), 100 * (1 - right), 50 * apart.sum(axis=1).mean())
        cells = [f"{value:.1f}" for value in percents]
        cells += [f"{value:.3f}" for value in (balance.mean(), np.quantile(balance, 0.05), of_lina.mean())]
        return f"| {name} | {layers} | {' | '.join(cells)} |"


def print_table(profiles: dict[int, PathProfile], steps: list[Routed], num_experts: int, top_k: int) -> None:
    print(f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|")
    num_layers = steps[0].ids.shape[0]
    counts = np.stack([[counts_of(ids_TK, num_experts) for ids_TK in step.ids] for step in steps])
    for only in (range(1, num_layers), range(num_layers - 1, num_layers)):
        layers = f"{only[0] + 1} to {num_layers}" if len(only) > 1 else f"{num_layers}"
        scores = {
            name: Score() for name in (*(f"paths, l = {length}" for length in PATHS), "next router", "window", "fresh")
        }
        for number in range(WINDOW_STEPS, len(steps)):
            step = steps[number]
            for layer in only:
                actual = counts[number, layer]
                for length, profile in profiles.items():
                    if layer >= profile.length:
                        estimate = profile.popularity(step.ids[:layer, :, 0], layer)
                        scores[f"paths, l = {length}"].add(estimate, actual, top_k)
                scores["next router"].add(counts_of(step.ahead[layer], num_experts).astype(float), actual, top_k)
                window = recent_loads(counts[number - WINDOW_STEPS : number, layer][:, None])[0]
                scores["window"].add(window, actual, top_k)
                scores["fresh"].add(actual.astype(float), actual, top_k)
        for name, score in scores.items():
            if len(only) == 1 or not name.startswith("paths") or name == "paths, l = 1":
                print(score.row(name, layers), flush=True)


def estimate(arguments: argparse.Namespace) -> None:
    recorder = RoutingRecorder(FOLDER)
    library = ['data.files=["${PYTHON_LIBRARY}/**/*.py"]']
    files = find_files(read_config(FOLDER / "train.toml", library).data)
    random.Random(0).shuffle(files)
    trained = windows_of(files, arguments.profile_windows + arguments.windows)
    profiled, seen = np.split(trained, [arguments.profile_windows])
    unseen = windows_of([LIBRARY / name for name in HELD_OUT if (LIBRARY / name).is_file()], arguments.windows)
    ids = recorder.run(profiled).ids
    num_experts, top_k = recorder.spec.router.num_experts, recorder.spec.router.top_k
    rows = ids.reshape(ids.shape[0], -1, top_k)
    profiles = {length: PathProfile(rows, num_experts, length) for length in PATHS}
    print(f"Profile: {rows.shape[1]:,} rows of text that the model was trained on.")
    for name, windows in (("other text it was trained on", seen), ("text it was not trained on", unseen)):
        routed = recorder.run(windows)
        for is_decode in (False, True):
            steps = steps_of(routed, is_decode)
            kind = f"{len(steps)} steps of {steps[0].ids.shape[1]:,} rows, {'decode' if is_decode else 'prompts'}"
            print(f"\n{name}, {kind}:\n")
            print_table(profiles, steps, num_experts, top_k)


def record(arguments: argparse.Namespace) -> None:
    prompts = windows_of(sorted(LIBRARY.glob("*/*.py")), arguments.requests)[:, :PROMPT_TOKENS]
    config = ServeConfig(
        model=FOLDER, layout="colocated", max_running=arguments.at_once, record_routing=arguments.record
    )
    engine = start_engine(config)
    try:
        sink = ThreadSink()
        for number, prompt in enumerate(prompts):
            params = SamplingParams(max_tokens=arguments.tokens, temperature=1.0, seed=number, ignore_eos=True)
            engine.submit_to(sink, str(number), prompt.tolist(), params)
        for output in sink.outputs(len(prompts)):
            if output.error is not None:
                raise UserError(output.error)
    finally:
        engine.stop()
    trace = read_routing_trace(arguments.record)
    print(f"{arguments.record}: {trace.num_rows:,} rows of {len(trace.counts_of_steps())} steps")


def main() -> None:
    parser = argparse.ArgumentParser(description="Which experts the demo model's rows choose on real text.")
    parser.add_argument("--profile-windows", type=int, default=1024)
    parser.add_argument("--windows", type=int, default=256)
    parser.add_argument("--record", type=Path, metavar="FILE", help="write a record of requests instead")
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--at-once", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=128)
    arguments = parser.parse_args()
    if arguments.record is None:
        estimate(arguments)
    else:
        record(arguments)


if __name__ == "__main__":
    main()
