"""`antiphon batch`: answer a file of requests in OpenAI's batch format, without a server."""

import asyncio
import time
from pathlib import Path
from typing import Annotated

import typer

from antiphon.base.errors import UserError
from antiphon.base.progress import progress
from antiphon.cli import options
from antiphon.cli.commands import takes_groups
from antiphon.cli.engine_run import start_with_progress
from antiphon.cli.output import JsonOption, emit_json, show, table
from antiphon.models.checkpoint_folder import model_folder
from antiphon.models.config import load_model_spec
from antiphon.serve.api.app import build_grammars, create_app
from antiphon.serve.api.settings import ServerSettings
from antiphon.serve.batch import BatchCounts, answer_batch, check_requests
from antiphon.serve.prepare import prepare
from antiphon.serve.text.tokenizer_reading import read_tokenizer


@takes_groups
def batch(
    context: typer.Context,
    requests: Annotated[Path, typer.Argument(metavar="IN", help="Requests, one a line (JSONL).")],
    answers: Annotated[Path, typer.Argument(metavar="OUT", help="Answers; a file of an earlier run is gone on with.")],
    model: Annotated[Path, typer.Option("--model", metavar="MODEL", help="Checkpoint folder.", callback=model_folder)],
    workers: options.WorkerOptions,
    capacity: options.CapacityOptions,
    at_once: Annotated[int, typer.Option("--at-once", metavar="N", help="Requests at once.")] = 256,
    json: JsonOption = None,
) -> None:
    """Answer the requests in IN (OpenAI's batch format) with a model, into OUT."""
    options.check_count("--at-once", at_once, ServerSettings.max_streams)
    check_requests(requests)
    if answers.exists() and answers.samefile(requests):
        raise UserError(f"{answers} holds the requests: name another file for the answers")
    planned, served = options.planned_config(context, model, workers, capacity, trace=False)
    config = workers.with_micro_batches(planned)
    if served is not None:
        options.check_plan_fits(config, served)
    spec = load_model_spec(config.model, config.rope_scaling)
    tokenizer = read_tokenizer(config.model, spec.vocab_size)
    prepared = prepare(config)
    grammars = build_grammars(prepared.info, tokenizer)
    engine = start_with_progress(prepared, make_matcher=None if grammars is None else grammars.matcher)
    began_s = time.monotonic()
    try:
        app = create_app(engine, tokenizer, ServerSettings(), grammars)
        try:
            with progress("answering") as report:
                counts = asyncio.run(answer_batch(app, requests, answers, at_once, report))
        finally:
            app.state.context.texts.close()
    finally:
        if grammars is not None:
            grammars.close()
        engine.stop()
    show_counts(counts, time.monotonic() - began_s, json)
    if counts.num_refused:
        raise UserError(f"{counts.num_refused} requests were refused: {answers} says why, each in its line")


def show_counts(counts: BatchCounts, time_s: float, json: str | None) -> None:
    """What came of the requests, as a table or as JSON."""
    result = {
        "answered": counts.num_answered,
        "refused": counts.num_refused,
        "answered_before": counts.num_skipped,
        "prompt_tokens": counts.tokens["prompt"],
        "completion_tokens": counts.tokens["completion"],
        "time_s": time_s,
    }
    rows = [(name.replace("_", " "), value) for name, value in result.items()]
    show(table(("requests", ""), rows), json=json)
    emit_json(json, result)
