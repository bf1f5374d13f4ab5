"""`antiphon train`: train a model as a TOML file says; `antiphon export`: a checkpoint of it in Hugging Face format."""

import errno
import itertools
import json as jsonlib
import multiprocessing
import os
import signal
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict
from functools import partial
from mmap import mmap
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Literal

import torch
import typer
from rich.text import Text
from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from antiphon.base.allowance import share_of_threads
from antiphon.base.errors import CheckpointError, ResourceError, UserError, why_unwritten
from antiphon.base.logging import get_logger
from antiphon.base.progress import progress
from antiphon.base.system import keep_freed_memory, memory_kills, raise_limit
from antiphon.base.units import format_bytes
from antiphon.cli import options
from antiphon.cli.output import (
    DEBUG,
    EXIT_INTERRUPTED,
    JsonOption,
    OutputError,
    check_output_file,
    emit_json,
    run_command,
    show,
    table,
    tell,
)
from antiphon.comm.mesh import Sizes, connect
from antiphon.kernels.ops.cross_entropy import IGNORED
from antiphon.models.config import load_model_spec, model_spec
from antiphon.models.write_quantized import writing
from antiphon.report.training_run import comparisons, read_run, write_run_page
from antiphon.specs.training_plan import TrainingPlan, read_training_plan
from antiphon.train import checkpoint as checkpoints
from antiphon.train.checkpoint_parts import StoredParameters
from antiphon.train.config import TrainConfig, read_config
from antiphon.train.encoder import load_tokenizer
from antiphon.train.further_token import FURTHER_LAYERS
from antiphon.train.hugging_face import FLOAT8, files_beside
from antiphon.train.hugging_face import export as write_export
from antiphon.train.planned_run import planned_config
from antiphon.train.ranks import leave, outlives_terminal, rank, sizes_of, world_size
from antiphon.train.run_folder import OutputLock
from antiphon.train.samples import Samples
from antiphon.train.setup import cache_of, open_data, plan_options, prepare, prepare_data, stream_of, tokenizer_of
from antiphon.train.token_stream import TokenStream
from antiphon.train.tokens import open_held_out, open_tokens
from antiphon.train.trainer import TrainedStep, Trainer

MOST_RANKS, RESTARTS = 256, 3
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
_OF_A_RUN = ("timeline", "nproc", "allow_change", "max_hours")  # options without effect where no step is taken
SHOWN_SEQUENCES = 2  # by --show-data
ENDED_S = 3.0  # from the end of a rank to that of its process, at most
SAVE_S = 600  # for the ranks to save in after a signal
_log = get_logger("train")
ConfigFile = Annotated[Path, typer.Argument(metavar="FILE", help="What to train, on what, how: a TOML file.")]


def train(
    context: typer.Context,
    config: ConfigFile,
    changes: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a key; may be repeated.")
    ] = None,
    print_config: Annotated[bool, typer.Option("--print-config", help="Print all keys as JSON, and stop.")] = False,
    tokenize: Annotated[bool, typer.Option("--tokenize", help="Write the token ids, and stop.")] = False,
    show_data: Annotated[
        bool, typer.Option("--show-data", help="Print two sequences, what is learned in colour, and stop.")
    ] = False,
    timeline: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a Perfetto trace of some of the first steps.")
    ] = None,
    nproc: Annotated[
        int | None, typer.Option(metavar="N", min=1, max=MOST_RANKS, help="Start N ranks on this machine.")
    ] = None,
    plan: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Obey a plan of 'antiphon plan --phase train'.")
    ] = None,
    allow_change: Annotated[
        list[str] | None,
        typer.Option("--allow-change", metavar="KEY", help="Go on though this key differs; may be repeated."),
    ] = None,
    max_hours: Annotated[
        float | None, typer.Option(metavar="H", min=0.0, help="Save and end after H hours; the same command goes on.")
    ] = None,
    json: JsonOption = None,
) -> None:
    """Train the model that FILE describes. It goes on from the newest checkpoint in output.folder."""
    check_output_file("--timeline", timeline)
    ends = {"--tokenize": tokenize, "--show-data": show_data, "--print-config": print_config}
    if len(asked := [option for option, is_asked in ends.items() if is_asked]) > 1:
        raise UserError(f"{' and '.join(asked)}: each says where to stop, leave one of them out")
    if asked:
        unused = [*_OF_A_RUN, *(() if tokenize else ("json",))]
        options.refuse_given(context, unused, f"{asked[0]} stops before that would do anything, leave one of them out")
    read, planned = read_config(config, changes or []), None
    if plan is not None:
        planned = read_training_plan(plan)
        read = planned_config(planned, read, load_model_spec(Path(read.model.path)), plan, changes or [])
    if print_config:
        print(jsonlib.dumps(read.as_table(), indent=2))
        return
    if tokenize or show_data:
        with _room(read), closing(OutputLock(Path(read.output.folder))):
            prepare_data(read, load_model_spec(Path(read.model.path)))
            if tokenize and read.data.stream_tokens:
                with progress("tokenizing", format_amount=format_bytes) as report:
                    stream_of(read).write_all(report)
        _show_data(read) if show_data else _show_tokens(read, json)
        return
    ranks = _ranks(nproc, planned, plan)
    allowed = tuple(allow_change or ())
    run = partial(_run, config, read, plan, planned, allowed, timeline, max_hours, json)
    with _room(read):
        code = run() if "RANK" in os.environ or (ranks == 1 and nproc is None) else _start_ranks(read, ranks, run)
    raise typer.Exit(code)


@contextmanager
def _room(config: TrainConfig) -> Iterator[None]:
    """Within it, what a disk or `output.folder` does not take is a `CheckpointError` with the way out."""
    try:
        yield
    except OSError as error:
        is_output = Path(str(error.filename)).is_relative_to(config.output.folder)
        if not (error.errno in NO_ROOM or is_output) or isinstance(error, OutputError):
            raise
        why = why_unwritten(error.strerror or "")
        raise CheckpointError(
            f"{error.filename or config.output.folder}: cannot be written ({why}): make room, or change "
            "output.folder; the same command goes on from what is there"
        ) from error


def _run(
    file: Path,
    config: TrainConfig,
    plan: Path | None,
    planned: TrainingPlan | None,
    allowed: tuple[str, ...],
    timeline: Path | None,
    max_hours: float | None,
    json: str | None,
) -> int:
    """One rank's part of the run; the first one speaks. Returns the exit code."""
    if config.memory.offload == "none":  # else what is mapped should go
        keep_freed_memory()
    if rank():
        Trainer(prepare(config, planned, allowed), timeline=timeline, max_hours=max_hours).run()
        leave()
        return 0
    with progress(f"training {file.stem}", format_amount=lambda step: f"step {step:,.0f}") as report:

        def on_step(result: TrainedStep) -> None:
            report(result.step + 1, config.steps)
            if (result.step + 1) % config.output.log_every == 0 or result.step + 1 == config.steps:
                _show_step(result, config, json)

        facts = Trainer(prepare(config, planned, allowed), on_step, timeline, max_hours).run()
    leave()
    page = write_run_page(Path(config.output.folder))
    compared = comparisons(read_run(Path(config.output.folder)))
    emit_json(json, facts | {"page": page, "compared": [asdict(each) for each in compared]})
    if planned is not None:
        rows = [each.words() for each in compared]
        tell(table(("", "predicted", "measured", "measured / predicted"), rows, title=str(plan)), json=json)
    tell(f"\n{facts['checkpoint']}\n{page}", json=json)
    if facts["held_out_loss"] is not None:
        tell(f"held-out loss {_with_error(facts)}", json=json)
    if facts["stopped_by"]:
        tell(f"stopped by {facts['stopped_by']} after step {facts['steps']:,}: the same command goes on", json=json)
        return EXIT_INTERRUPTED if facts["stopped_by"] == "SIGINT" else 0
    tell(f"Next: antiphon export {facts['checkpoint']} DIR", json=json)
    return 0


def _with_error(facts: dict[str, Any]) -> str:
    error = f" ± {facts['held_out_error']:.4f}" if "held_out_error" in facts else ""
    sources = ", ".join(f"{name} {loss:.4f}" for name, loss in facts.get("held_out_loss_by_source", {}).items())
    sources += "".join(f"; {name} {loss:.4f}" for name, loss in facts.get("evaluation_loss", {}).items())
    shares = f" ({sources.removeprefix('; ')})" if sources else ""
    return f"{facts['held_out_loss']:.4f}{error} nats a token, over {facts['held_out_targets']:,} tokens{shares}"


def _ranks(nproc: int | None, plan: TrainingPlan | None, file: Path | None) -> int:
    """How many ranks the run has: as torchrun says, or `--nproc`, or the plan's devices."""
    started = world_size() if "RANK" in os.environ else nproc
    if plan is None:
        return 1 if started is None else started
    if started not in (None, plan.layout.num_devices):
        raise UserError(f"{started} ranks are asked for, {file} is for {plan.layout.num_devices}: start as many")
    return plan.layout.num_devices


def _start_ranks(config: TrainConfig, ranks: int, run: Callable[[], int]) -> int:
    """Call `run` on `ranks` ranks, as torchrun would: they are started anew when one dies. They are forks of this
    process, which has imported all that they need and computed nothing, and share its cores. What can be checked is
    checked first, and the token ids are written. Returns the exit code."""
    options.check_count("--nproc", ranks, MOST_RANKS)
    raise_limit()
    spec = load_model_spec(Path(config.model.path))
    plan_options(spec, config, sizes_of(config, spec, ranks))
    lock = OutputLock(Path(config.output.folder))
    prepare_data(config, spec)
    lock.close()  # for the first rank
    os.environ["OMP_NUM_THREADS"] = str(share_of_threads(ranks))
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(SAVE_S))
    if outlives_terminal():  # torch's launcher would listen all the same
        os.environ.setdefault("TORCHELASTIC_SIGNALS_TO_HANDLE", "SIGTERM,SIGINT")
    _check_semaphores(ranks)
    ended = mmap(-1, 2)  # of all ranks: 1 + the exit code of one that must not start again; of the first one
    logs = TemporaryDirectory(prefix="antiphon-train-")  # of torch's launcher, which leaves its own behind
    how = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=RESTARTS,
        start_method="fork",
        logs_specs=DefaultLogsSpecs(log_dir=logs.name),
    )
    kills = memory_kills()
    try:
        with logs:
            elastic_launch(how, _rank)(config, run, ended)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        how_it_ended = f"by {failure.signal_name()}" if failure.exitcode < 0 else f"with code {failure.exitcode}"
        if failure.exitcode == -signal.SIGKILL and memory_kills() > kills:
            how_it_ended += ", probably because memory was short (see dmesg),"
        raise ResourceError(
            f"rank {rank} of {ranks} ended {how_it_ended} after {RESTARTS} restarts: see what it said above; the same "
            "command goes on from the newest checkpoint"
        ) from error
    except SignalException as error:  # the launcher has passed it on to the ranks and waited for them
        if not ended[1]:
            raise ResourceError(f"{error.sigval.name}: the ranks ended before they had saved") from error
    # said by the ranks themselves
    return ended[0] or (ended[1] - 1 if ended[1] else 0)


def _check_semaphores(ranks: int) -> None:
    """torch's launcher talks with its ranks through queues, whose locks are files of `/dev/shm`."""
    try:
        multiprocessing.get_context("fork").Lock()
    except OSError as error:
        raise ResourceError(
            f"--nproc {ranks} needs semaphores, and /dev/shm cannot hold them ({error.strerror}): mount a tmpfs there "
            f"(docker run --shm-size=64m), or start torchrun --nproc-per-node {ranks} -m antiphon.cli.main train"
        ) from error


def _rank(config: TrainConfig, run: Callable[[], int], ended: mmap) -> None:
    """A rank that ends with an error ends the others. After a user's mistake, or a checkpoint that cannot be written,
    they are started anew once, and return at once: they would fail in the same way. `ended`: shared by all; its first
    byte is the code of such an end, its second one more than that of a whole run."""
    if ended[0]:
        return

    def work() -> None:
        try:
            with _room(config):
                code = run()
            if not rank():
                ended[1] = 1 + code
        except CheckpointError as error:
            ended[0] = error.exit_code
            raise

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    if code := run_command(work, debug=DEBUG in sys.argv):
        if code == UserError.exit_code:
            ended[0] = code
        sys.exit(code)
    # A launcher that was told to end waits for processes, not for results, which a rank's process waits to be fetched.
    end = threading.Timer(ENDED_S, os._exit, (0,))
    end.daemon = True
    end.start()


def _show_data(config: TrainConfig) -> None:
    """Two sequences of the first pass: what a loss is taken on in green, documents apart."""
    tokenizer, (samples, _, _) = load_tokenizer(tokenizer_of(config)), open_data(config)
    num = min(SHOWN_SEQUENCES, samples.num_windows) if isinstance(samples, Samples) else SHOWN_SEQUENCES
    for number in range(num):
        batch = samples.batch([number], torch.device("cpu"))
        ids = [*batch.ids_BS[0].tolist(), *[each for each in batch.targets_BS[0, -1:].tolist() if each != IGNORED]]
        learned = [False, *(batch.targets_BS[0] != IGNORED).tolist()]
        begins = [position == 0 for position in batch.positions_BS[0].tolist()] + [False]
        runs = itertools.groupby(zip(ids, learned, itertools.accumulate(begins), strict=False), lambda each: each[1:])
        text, document = Text(), 1
        for (is_learned, place), run in runs:
            text.append("\n" if place > document else "")
            document = place
            shown = tokenizer.decode([token for token, *_ in run], skip_special_tokens=False)
            text.append(shown, "green" if is_learned else "dim")
        show(f"sequence {number}: {sum(learned):,} of {len(ids):,} tokens are learned, {sum(begins):,} documents begin")
        show(text)
        show("")


def _show_tokens(config: TrainConfig, json: str | None) -> None:
    cache = cache_of(config)
    if config.data.stream_tokens:
        _show_stream(stream_of(config), json)
        return
    sizes = {"train": open_tokens(cache, "train"), "held_out": open_held_out(config.data, cache)}
    counts = {split: int(tokens.ids.shape[0]) for split, tokens in sizes.items()}
    emit_json(json, {"cache": cache, "tokens": counts})
    rows = [(split, counts[split], len(tokens.starts), tokens.num_text_bytes) for split, tokens in sizes.items()]
    show(table(("split", "tokens", "documents", "bytes of text"), rows, title=str(cache)), json=json)


def _show_stream(stream: TokenStream, json: str | None) -> None:
    written = [(each.source.name, stream.written(number)) for number, each in enumerate(stream.sources)]
    emit_json(json, {"cache": stream.folder, "tokens": {name: each.num_ids for name, each in written}})
    rows = [(name, each.num_ids, each.num_documents) for name, each in written]
    show(table(("source", "tokens", "documents"), rows, title=str(stream.folder)), json=json)


def _show_step(result: TrainedStep, config: TrainConfig, json: str | None) -> None:
    fullest = max(result.fullest)
    speed = config.tokens_per_step / result.duration_s
    dropped = f"dropped {int(result.dropped_L.sum()):,} rows  " if config.loss.drops else ""
    tell(  # a run does not end with its terminal, or with `| head`
        f"step {result.step + 1:>6,}  loss {result.loss:.4f}  gradient {result.norm:.3f}  rate {result.rate:.2e}  "
        f"fullest expert {fullest:.2f} x mean  {dropped}{speed:,.0f} tokens/s  MFU {result.mfu:.0%}",
        json=json,
    )


def export(
    checkpoint: Annotated[Path, typer.Argument(metavar="CHECKPOINT", help="A folder step-…, or a run's output.")],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="New folder in Hugging Face format.")],
    dtype: Annotated[
        Literal["bfloat16", "float16", "float32", "float64", "fp8"],
        typer.Option(metavar="NAME", help="bfloat16, float16, float32, float64, or fp8: blocks of 128 x 128."),
    ] = "bfloat16",
    best: Annotated[
        bool, typer.Option("--best", help="Of a run's checkpoints, that of the lowest held-out loss.")
    ] = False,
    json: JsonOption = None,
) -> None:
    """Write a training checkpoint as a folder that transformers loads and 'antiphon serve' serves."""
    found = checkpoints.find_checkpoints(checkpoint / "checkpoints")
    source = found[-1] if found else checkpoint
    if best:
        lowest = checkpoints.best_checkpoint(checkpoint / "checkpoints")
        if lowest is None:
            raise UserError(f"--best: no checkpoint in {checkpoint} was evaluated: set output.keep_best for the run")
        source = lowest
    facts = checkpoints.read_facts(source)
    if changed := checkpoints.changed_file(source, facts, connect(Sizes(), 0).world):
        raise CheckpointError(f"{source}/{changed} is not what was written: it is damaged, take another checkpoint")
    config = checkpoints.config_in(facts, source)
    spec = model_spec(facts["model_config"])
    left = f"; what is in {folder} is not whole, remove it"
    with progress("exporting", format_amount=format_bytes) as report, writing(folder, left):
        further_is_trained = config.loss.mtp > 0
        stored = StoredParameters(source, spec, further=further_is_trained)
        written_as = FLOAT8 if dtype == "fp8" else getattr(torch, dtype)
        further = None if further_is_trained else _further_from(config, facts)
        beside = files_beside(tokenizer_of(config), Path(config.model.path))
        num_bytes = write_export(stored, folder, facts["model_config"], beside, written_as, report, further)
    emit_json(json, {"folder": folder, "bytes": num_bytes, "step": facts["state"].step})
    show(f"{folder}: step {facts['state'].step:,}, {format_bytes(num_bytes)}, {dtype}", json=json)
    show(f"Next: antiphon serve {folder}", json=json)


def _further_from(config: TrainConfig, facts: dict[str, Any]) -> Path | None:
    """The folder whose layers for further tokens are copied; says where there are none to copy."""
    if not facts["model_config"].get(FURTHER_LAYERS):
        return None
    path = Path(config.model.path)
    if config.model.begin == "checkpoint" and path.is_dir():
        _log.warning("the layers for further tokens (%s) are not trained: copied from %s", FURTHER_LAYERS, path)
        return path
    why = "the run began with random weights" if config.model.begin == "random" else f"{path} is not there"
    _log.warning("%s is 0 in the export: these layers are not trained, and %s", FURTHER_LAYERS, why)
    return None
