"""`antiphon train`: train a model as a TOML file says; `antiphon export`: a checkpoint of it in Hugging Face format."""

import json as jsonlib
import multiprocessing
import os
import sys
import uuid
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from mmap import mmap
from pathlib import Path
from typing import Annotated, Literal

import torch
import typer
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from antiphon.base.allowance import share_of_threads
from antiphon.base.errors import ResourceError, UserError
from antiphon.base.progress import progress
from antiphon.base.units import format_bytes
from antiphon.cli import options
from antiphon.cli.output import DEBUG, JsonOption, check_output_file, emit_json, run_command, show, table
from antiphon.models.config import load_model_spec, model_spec
from antiphon.report.run import comparisons, read_run, write_run_page
from antiphon.specs.training_plan import TrainingPlan, read_training_plan
from antiphon.train import checkpoint as checkpoints
from antiphon.train.config import TrainConfig, config_of, read_config
from antiphon.train.hugging_face import export as write_export
from antiphon.train.planned_run import planned_config
from antiphon.train.ranks import leave, sizes_of
from antiphon.train.setup import build_model, cache_of, plan_options, prepare, prepare_data, tokenizer_of
from antiphon.train.shards import Shards
from antiphon.train.tokens import SPLITS, open_tokens
from antiphon.train.trainer import TrainedStep, Trainer

MOST_RANKS, RESTARTS = 256, 3
ConfigFile = Annotated[Path, typer.Argument(metavar="FILE", help="What to train, on what, how: a TOML file.")]


def train(
    config: ConfigFile,
    changes: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a key; may be repeated.")
    ] = None,
    print_config: Annotated[bool, typer.Option("--print-config", help="Print all keys as JSON, and stop.")] = False,
    tokenize: Annotated[bool, typer.Option("--tokenize", help="Write the token ids, and stop.")] = False,
    timeline: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a Perfetto trace of some of the first steps.")
    ] = None,
    nproc: Annotated[
        int | None, typer.Option(metavar="N", min=1, max=MOST_RANKS, help="Start N ranks on this machine.")
    ] = None,
    plan: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Obey a plan of 'antiphon plan --phase train'.")
    ] = None,
    json: JsonOption = None,
) -> None:
    """Train the model that FILE describes. It goes on from the newest checkpoint in output.folder."""
    check_output_file("--timeline", timeline)
    read, planned = read_config(config, changes or []), None
    if plan is not None:
        planned = read_training_plan(plan)
        read = planned_config(planned, read, load_model_spec(Path(read.model.path)), plan, changes or [])
    if print_config:
        print(jsonlib.dumps(read.as_table(), indent=2))
        return
    if tokenize:
        _tokenize(read, json)
        return
    ranks = _ranks(nproc, planned, plan)
    run = partial(_run, config, read, plan, planned, timeline, json)
    if "RANK" in os.environ or (ranks == 1 and nproc is None):
        run()
    else:
        _start_ranks(read, ranks, run)


def _run(
    file: Path,
    config: TrainConfig,
    plan: Path | None,
    planned: TrainingPlan | None,
    timeline: Path | None,
    json: str | None,
) -> None:
    """One rank's part of the run; the first one speaks."""
    if int(os.environ.get("RANK", "0")):
        Trainer(prepare(config, planned), timeline=timeline).run()
        leave()
        return
    with progress(f"training {file.stem}", format_amount=lambda step: f"step {step:,.0f}") as report:

        def on_step(result: TrainedStep) -> None:
            report(result.step + 1, config.steps)
            if (result.step + 1) % config.output.log_every == 0 or result.step + 1 == config.steps:
                _show_step(result, config, json)

        facts = Trainer(prepare(config, planned), on_step, timeline).run()
    leave()
    page = write_run_page(Path(config.output.folder))
    compared = comparisons(read_run(Path(config.output.folder)))
    emit_json(json, facts | {"page": page, "compared": [asdict(each) for each in compared]})
    if planned is not None:
        rows = [each.words() for each in compared]
        show(table(("", "predicted", "measured", "measured / predicted"), rows, title=str(plan)), json=json)
    show(f"\n{facts['checkpoint']}\n{page}", json=json)
    if facts["held_out_loss"] is not None:
        show(f"held-out loss {facts['held_out_loss']:.4f} nats a token", json=json)
    show(f"Next: antiphon export {facts['checkpoint']} DIR", json=json)


def _ranks(nproc: int | None, plan: TrainingPlan | None, file: Path | None) -> int:
    """How many ranks the run has: as torchrun says, or `--nproc`, or the plan's devices."""
    started = int(os.environ["WORLD_SIZE"]) if "RANK" in os.environ else nproc
    if plan is None:
        return 1 if started is None else started
    if started not in (None, plan.layout.num_devices):
        raise UserError(f"{started} ranks are asked for, {file} is for {plan.layout.num_devices}: start as many")
    return plan.layout.num_devices


def _start_ranks(config: TrainConfig, ranks: int, run: Callable[[], None]) -> None:
    """Call `run` on `ranks` ranks, as torchrun would: they are started anew when one dies. They are forks of this
    process, which has imported all that they need and computed nothing, and share its cores. What can be checked is
    checked first, and the token ids are written."""
    options.check_count("--nproc", ranks, MOST_RANKS)
    spec = load_model_spec(Path(config.model.path))
    plan_options(spec, config, sizes_of(config, spec, ranks))
    prepare_data(config, spec)
    os.environ["OMP_NUM_THREADS"] = str(share_of_threads(ranks))
    _check_semaphores(ranks)
    refused = mmap(-1, 1)  # of all ranks
    how = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=RESTARTS,
        start_method="fork",
    )
    try:
        elastic_launch(how, _rank)(run, refused)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        how_it_ended = f"by {failure.signal_name()}" if failure.exitcode < 0 else f"with code {failure.exitcode}"
        raise ResourceError(
            f"rank {rank} of {ranks} ended {how_it_ended} after {RESTARTS} restarts: see what it said above; the same "
            "command goes on from the newest checkpoint"
        ) from error
    if refused[0]:  # said by the rank itself
        raise typer.Exit(UserError.exit_code)


def _check_semaphores(ranks: int) -> None:
    """torch's launcher talks with its ranks through queues, whose locks are files of `/dev/shm`."""
    try:
        multiprocessing.get_context("fork").Lock()
    except OSError as error:
        raise ResourceError(
            f"--nproc {ranks} needs semaphores, and /dev/shm cannot hold them ({error.strerror}): mount a tmpfs there "
            f"(docker run --shm-size=64m), or start torchrun --nproc-per-node {ranks} -m antiphon.cli.main train"
        ) from error


def _rank(run: Callable[[], None], refused: mmap) -> None:
    """A rank that ends with an error ends the others. After a user's mistake they are started anew once, and return at
    once: they would fail in the same way. `refused`: shared by all, 1 after one."""
    if refused[0]:
        return
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    if code := run_command(run, debug=DEBUG in sys.argv):
        refused[0] = int(code == UserError.exit_code)
        sys.exit(code)


def _tokenize(config: TrainConfig, json: str | None) -> None:
    prepare_data(config, load_model_spec(Path(config.model.path)))
    cache = cache_of(config)
    sizes = {split: open_tokens(cache, split) for split in SPLITS}
    counts = {split: int(tokens.ids.shape[0]) for split, tokens in sizes.items()}
    emit_json(json, {"cache": cache, "tokens": counts})
    rows = [(split, counts[split], len(tokens.starts), tokens.num_text_bytes) for split, tokens in sizes.items()]
    show(table(("split", "tokens", "documents", "bytes of text"), rows, title=str(cache)), json=json)


def _show_step(result: TrainedStep, config: TrainConfig, json: str | None) -> None:
    fullest = max(result.fullest)
    speed = config.tokens_per_step / result.duration_s
    dropped = f"dropped {int(result.dropped_L.sum()):,} rows  " if config.loss.drops else ""
    show(
        f"step {result.step + 1:>6,}  loss {result.loss:.4f}  gradient {result.norm:.3f}  rate {result.rate:.2e}  "
        f"fullest expert {fullest:.2f} x mean  {dropped}{speed:,.0f} tokens/s",
        json=json,
    )


def export(
    checkpoint: Annotated[Path, typer.Argument(metavar="CHECKPOINT", help="A folder step-…, or a run's output.")],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="New folder in Hugging Face format.")],
    dtype: Annotated[
        Literal["bfloat16", "float16", "float32"], typer.Option(metavar="NAME", help="bfloat16, float16 or float32.")
    ] = "bfloat16",
    json: JsonOption = None,
) -> None:
    """Write a training checkpoint as a folder that transformers loads and 'antiphon serve' serves."""
    found = checkpoints.find_checkpoints(checkpoint / "checkpoints")
    source = found[-1] if found else checkpoint
    facts = checkpoints.read_facts(source)
    config = config_of(facts["config"], f"{source}/run.json")
    spec = model_spec(facts["model_config"])
    model = build_model(spec, config, max_positions=1)
    checkpoints.load(source, model, Shards(model), None)
    tokenizer = tokenizer_of(config)
    beside = tokenizer if tokenizer.is_dir() else tokenizer.parent
    with progress("exporting", format_amount=format_bytes) as report:
        num_bytes = write_export(model, folder, facts["model_config"], beside, getattr(torch, dtype), report)
    emit_json(json, {"folder": folder, "bytes": num_bytes, "step": facts["state"]["step"]})
    show(f"{folder}: step {facts['state']['step']:,}, {format_bytes(num_bytes)}, {dtype}", json=json)
    show(f"Next: antiphon serve {folder}", json=json)
