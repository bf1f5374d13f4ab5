"""`antiphon generate`: complete prompts offline, with the same engine that serves."""

import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from antiphon.base.errors import UserError
from antiphon.cli import options
from antiphon.cli.commands import takes_groups
from antiphon.cli.engine_run import config_here, report_timeline, start_with_progress
from antiphon.cli.output import JsonOption, check_output_file, emit_json, show, table
from antiphon.models.config import load_model_spec
from antiphon.serve.engine import Engine
from antiphon.serve.engine_api import EngineOutput
from antiphon.serve.outputs import ThreadSink
from antiphon.serve.policy.request import check_request, new_request
from antiphon.serve.prepare import prepare
from antiphon.serve.text.tokenizer import TextTokenizer
from antiphon.serve.text.tokenizer_reading import TokenizerReader
from antiphon.specs.sampling import SamplingParams, TokenLogprob

_CAPACITY = options.CapacityOptions(max_running=32)  # one request runs; memory is set aside for no more than a few


@dataclass(frozen=True, kw_only=True)
class PromptOptions:
    """What to complete: text or token ids."""

    text: Annotated[str | None, typer.Argument(metavar="TEXT", help="Text to complete, as --prompt.")] = None
    prompt: Annotated[str | None, typer.Option(metavar="TEXT", help="Text to complete.")] = None
    token_ids: Annotated[str | None, typer.Option(metavar="IDS", help="Token ids instead, e.g. 1,2,3.")] = None

    def __post_init__(self) -> None:
        if sum(each is not None for each in (self.text, self.prompt, self.token_ids)) != 1:
            raise UserError("give one of TEXT, --prompt TEXT and --token-ids 1,2,3")

    def read(self, model: Path) -> tuple[list[int], TextTokenizer | None]:
        """The token ids, and the tokenizer if text was given: ids need none."""
        spec = load_model_spec(model)
        prompt = self.text if self.prompt is None else self.prompt
        if prompt is None:
            ids = options.numbers_of("--token-ids", str(self.token_ids), "1,2,3", may_repeat=True)
            if wrong := [token for token in ids if not 0 <= token < spec.vocab_size]:
                raise UserError(f"--token-ids names token {wrong[0]}: this model's are 0 to {spec.vocab_size - 1}")
            return ids, None
        with TokenizerReader(model) as reader:
            tokenizer = reader.read()
            ids = reader.encode(prompt)
        if ids:
            return ids, tokenizer
        raise UserError(f"--prompt {prompt!r} holds no token: give at least one")


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """How tokens are chosen."""

    max_tokens: Annotated[int, typer.Option(metavar="N", min=1, help="Tokens to generate.")] = 64
    temperature: Annotated[float, typer.Option(metavar="T", help="Randomness; 0: greedy.")] = 0.0
    seed: Annotated[int | None, typer.Option(metavar="N", help="For a temperature above 0.")] = None
    logprobs: Annotated[int | None, typer.Option(metavar="K", help="Report K alternatives a token.")] = None
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after the end.")] = False

    def params(self) -> SamplingParams:
        return options.sampling_params(partial(SamplingParams, **vars(self)))


@takes_groups
def generate(
    context: typer.Context,
    model: options.ModelFolder,
    prompt: PromptOptions,
    sampling: SamplingOptions,
    workers: options.WorkerOptions,
    timeline: options.TimelineOption = None,
    json: JsonOption = None,
) -> None:
    """Complete a prompt with MODEL, without a server."""
    check_output_file("--timeline", timeline)
    params = sampling.params()
    config = config_here(context, model, workers, _CAPACITY, trace=timeline is not None)
    ids, tokenizer = prompt.read(model)
    run = prepare(config)
    # before the weights are loaded, which may take minutes
    check_request(new_request("generate", ids, params, arrival=0, seed=0, eos_token_ids=()), run.scheduler)
    engine = start_with_progress(run)
    try:
        result = complete(engine, ids, params, tokenizer, stream=json != "-")
        if params.logprobs is not None:
            show_logprobs(result, tokenizer, json)
        emit_json(json, result)
        if timeline is not None:
            report_timeline(engine, timeline, json)
    finally:
        engine.stop()


def complete(
    engine: Engine, ids: list[int], params: SamplingParams, tokenizer: TextTokenizer | None, *, stream: bool
) -> dict[str, Any]:
    """Run one request; text (or token ids) appear on standard output as they come."""
    sink = ThreadSink()
    engine.submit_to(sink, "generate", ids, params)
    detokenizer = tokenizer.detokenizer() if tokenizer is not None else None
    if detokenizer is not None:
        detokenizer.follow(ids, echoed=False)
    tokens: list[int] = []
    logprobs: list[TokenLogprob] = []
    text = ""
    last: EngineOutput | None = None
    for output in sink.outputs(1):
        last = output
        tokens.extend(output.token_ids)
        logprobs.extend(output.logprobs or [])
        if detokenizer is not None:
            piece = "".join(detokenizer.feed(token) for token in output.token_ids)
            if output.finish_reason is not None:
                piece += detokenizer.flush()
            text += piece
        else:
            piece = "".join(f"{token} " for token in output.token_ids)
        if stream:
            sys.stdout.write(piece)
            sys.stdout.flush()
    assert last is not None, "every request ends with an output"
    if last.error is not None:
        raise UserError(f"the request failed: {last.error}")
    if stream:
        sys.stdout.write("\n")
    return {
        "token_ids": tokens,
        "text": text if tokenizer is not None else None,
        "finish_reason": last.finish_reason,
        "logprobs": [{"token_id": t.token_id, "logprob": t.logprob, "top": t.top} for t in logprobs],
    }


def show_logprobs(result: dict[str, Any], tokenizer: TextTokenizer | None, json: str | None) -> None:
    """Each token with its alternatives, as a table."""

    def name(token_id: int) -> str:
        return repr(tokenizer.token_string(token_id)) if tokenizer is not None else str(token_id)

    rows = [
        (name(entry["token_id"]), entry["logprob"], "  ".join(f"{name(i)} {p:.3f}" for i, p in entry["top"]))
        for entry in result["logprobs"]
    ]
    show(table(("token", "logprob", "alternatives"), rows), json=json)
