"""`antiphon serve`: an OpenAI-compatible server over one checkpoint; `antiphon batch`: the same for a file of requests,
in OpenAI's batch format, without a port."""

import asyncio
import re
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from fastapi import FastAPI

from antiphon.base.errors import UserError
from antiphon.base.progress import progress
from antiphon.cli import options
from antiphon.cli.commands import takes_groups
from antiphon.cli.engine_run import (
    banner,
    check_plan_fits,
    config_here,
    join_lines,
    machine_name,
    plan_lines,
    planned_config,
    report_timeline,
    server_facts,
    start_with_progress,
)
from antiphon.cli.options import check_not_empty
from antiphon.cli.output import (
    EXIT_FAILED,
    JsonOption,
    check_json,
    check_output_file,
    emit_json,
    emit_json_beside,
    show,
    table,
    tell,
)
from antiphon.cli.top import read_api_keys
from antiphon.models.checkpoint_folder import model_folder
from antiphon.models.config import load_model_spec
from antiphon.serve.api.server import build_grammars, check_apart, create_app, reserve, run_server
from antiphon.serve.api.settings import ServerSettings
from antiphon.serve.batch_file import BatchCounts, answer_batch, answers_file, check_requests
from antiphon.serve.config import ServeConfig
from antiphon.serve.engine import Engine
from antiphon.serve.joining import read_join_secret
from antiphon.serve.prepare import prepare
from antiphon.serve.ray_cluster import RayCluster
from antiphon.serve.ray_placement import RayPlacement
from antiphon.serve.served_plan import ServedPlan
from antiphon.serve.text.text_process import MAX_TEMPLATE_CHARACTERS
from antiphon.serve.text.tokenizer import TextTokenizer
from antiphon.serve.text.tokenizer_reading import read_tokenizer

ReadyOption = Annotated[
    str | None,
    typer.Option(metavar="FILE", callback=check_json, help="When ready, write URL and processes as JSON."),
]


@dataclass(frozen=True, kw_only=True)
class HttpOptions:
    """Where the server listens, who may use it, and how much one request may ask: fields of `ServerSettings`, as they
    are written on the command line."""

    host: Annotated[str, typer.Option(metavar="ADDRESS", help="Address to listen on.")] = ServerSettings.host
    port: Annotated[int, typer.Option(metavar="N", help="Port to listen on; 0: any.")] = ServerSettings.port
    api_keys: Annotated[Path | None, typer.Option("--api-key-file", metavar="FILE", help="API keys, one a line.")] = (
        None
    )
    allowed_hosts: Annotated[
        str | None, options.rare_option(metavar="NAMES", help="Names of this server, a,b; others: 403.")
    ] = None
    served_model_names: Annotated[
        str | None,
        typer.Option("--served-model-name", metavar="NAME", show_default="the folder's", help="Its names, a,b."),
    ] = None
    cors_origins: Annotated[
        str | None, options.rare_option("--cors-origin", metavar="ORIGINS", help="Pages that may use it, a,b or *.")
    ] = None
    own_chat_template: Annotated[
        Path | None,
        options.rare_option("--chat-template", metavar="FILE", show_default="the model's", help="Jinja file."),
    ] = None
    chat_template_kwargs: Annotated[
        str | None, options.rare_option(metavar="JSON", help="Variables of the chat template.")
    ] = None
    reasoning_parser: Annotated[
        str | None, options.rare_option(metavar="NAME", show_default="by the chat template", help="Marks of reasoning.")
    ] = None
    tool_parser: Annotated[
        str | None,
        options.rare_option(metavar="NAME", show_default="by the chat template", help="Format of tool calls."),
    ] = None
    root_path: Annotated[
        str, options.rare_option(metavar="PATH", show_default="none", help="What a proxy puts before paths.")
    ] = ServerSettings.root_path
    return_tokens_as_token_ids: Annotated[
        bool, options.rare_option("--return-tokens-as-token-ids", help="Tokens of logprobs as token_id:N.")
    ] = False
    force_include_usage: Annotated[
        bool, options.rare_option("--force-include-usage", help="Token counts in all events of streams.")
    ] = False
    max_streams: Annotated[int, typer.Option(metavar="N", help="HTTP requests at once; more: 429.")] = (
        ServerSettings.max_streams
    )
    # Only in `--help-all`; the log and the metrics name them where they matter.
    max_connections: Annotated[int, options.rare_option(metavar="N", help="Connections at once; more: 503.")] = (
        ServerSettings.max_connections
    )
    max_slow_bodies: Annotated[int, options.rare_option(metavar="N", help="Late bodies of an address.")] = (
        ServerSettings.max_slow_bodies
    )
    send_timeout_s: Annotated[
        float, options.rare_option("--send-timeout", metavar="S", help="Patience with clients that do not read.")
    ] = ServerSettings.send_timeout_s
    max_body_bytes: Annotated[
        str | None, options.rare_option(metavar="SIZE", show_default="by context", help="Largest request body.")
    ] = None
    max_answer_bytes: Annotated[str, options.rare_option(metavar="SIZE", help="Largest answer.")] = "64MiB"
    max_prompt_tokens: Annotated[
        int | None, options.rare_option(metavar="N", show_default="no limit", help="Longest prompt.")
    ] = None
    drain_timeout_s: Annotated[
        float, options.rare_option("--drain-timeout", metavar="S", help="Time to finish at the end.")
    ] = ServerSettings.drain_timeout_s

    def settings(self) -> ServerSettings:
        """The validated settings; `UserError` for a wrong value or key file."""
        options.check_not_empty("--host", self.host)  # would be every address of this machine
        options.check_not_empty("--served-model-name", self.served_model_names)
        options.check_not_empty("--cors-origin", self.cors_origins)
        options.check_not_empty("--allowed-hosts", self.allowed_hosts)
        parsed: dict[str, Any] = {
            "api_keys": read_api_keys(self.api_keys) if self.api_keys else (),
            "allowed_hosts": tuple(options.words_of(self.allowed_hosts or "")),
            "served_model_names": tuple(options.words_of(self.served_model_names or "")),
            "cors_origins": tuple(options.words_of(self.cors_origins or "")),
            "chat_template_kwargs": options.parse_json_object("--chat-template-kwargs", self.chat_template_kwargs),
            "max_answer_bytes": options.parse_size("--max-answer-bytes", self.max_answer_bytes),
        }
        if self.own_chat_template is not None:
            parsed["own_chat_template"] = options.read_text_file(
                "--chat-template", self.own_chat_template, MAX_TEMPLATE_CHARACTERS
            )
        if self.max_body_bytes is not None:
            parsed["max_body_bytes"] = options.parse_size("--max-body-bytes", self.max_body_bytes)
        return ServerSettings(**(vars(self) | parsed))


@dataclass(frozen=True, kw_only=True)
class ElsewhereOptions:
    """Workers of other machines (`antiphon worker`), or all workers on a Ray cluster."""

    join_address: Annotated[str | None, typer.Option(metavar="HOST:PORT", help="Where workers join.")] = None
    join_workers: Annotated[
        str, typer.Option(metavar="A+E", show_default=False, help="How many join: attention (or replicas) + experts.")
    ] = "0+0"
    # Out of the help, which fills its screen; docs/ranks.md has it.
    ranks_here: Annotated[int, options.rare_option(metavar="N", help="Ranks of the first of them.")] = 0
    secret_file: Annotated[Path | None, typer.Option(metavar="FILE", help="Secret shared with them.")] = None
    ray: Annotated[bool, typer.Option("--ray", help="Place all workers on a Ray cluster.")] = False
    ray_address: Annotated[
        str | None, options.rare_option(metavar="ADDRESS", show_default="auto", help="auto, local or HOST:PORT.")
    ] = None

    def by_plan(self, served: ServedPlan | None) -> "ElsewhereOptions":
        """Who joins as the plan has it, where nothing else was said."""
        if served is None or not served.node_devices or not self.join_address or self.join_workers != "0+0":
            return self
        attention, experts, ranks_here = served.join_workers
        return replace(self, join_workers=f"{attention}+{experts}", ranks_here=ranks_here)

    def add_to(self, config: ServeConfig) -> ServeConfig:
        """The configuration with these workers from outside; validated."""
        options.check_not_empty("--join-address", self.join_address)
        example = "0+2" if config.prefill is None else "1+0,0+2 (prefill, decode)"
        pools = self.join_workers.split(",")
        if len(pools) == 1 and self.join_workers == "0+0":
            pools *= 1 if config.prefill is None else 2
        counts = [re.fullmatch(r"(\d+)\+(\d+)", each.strip()) for each in pools]
        if len(counts) != (1 if config.prefill is None else 2) or None in counts:
            raise UserError(f"--join-workers is {self.join_workers}: write attention + experts, for example {example}")
        if config.prefill is not None and self.ranks_here:
            raise UserError(f"--ranks-here {self.ranks_here} does not apply with --prefill and --decode")
        joined = [(int(each.group(1)), int(each.group(2))) for each in counts if each is not None]
        if config.prefill is not None and self.join_address and not any(map(any, joined)):
            raise UserError("--join-address without --join-workers: say how many workers of each pool join")
        if self.secret_file is not None and not self.join_address:
            raise UserError(
                f"--secret-file {self.secret_file}: no worker joins without --join-address HOST:PORT and "
                "--join-workers: give them, or leave it out"
            )
        secret = read_join_secret(self.secret_file) if self.join_address else b""
        prefill = None if config.prefill is None else self._joined(config.prefill, *joined[0], secret)
        return replace(self._joined(config, *joined[-1], secret), prefill=prefill)

    def _joined(self, config: ServeConfig, attention: int, experts: int, secret: bytes) -> ServeConfig:
        return replace(
            config,
            join_address=self.join_address or "",
            join_secret=secret,
            joined_attention=attention,
            joined_experts=experts,
            ranks_here=self.ranks_here,
        )

    def placement(self, config: ServeConfig) -> AbstractContextManager[RayPlacement | None]:
        """Within it the workers are on their way to their nodes; None where the engine starts its workers itself."""
        check_not_empty("--ray-address", self.ray_address)
        if self.ray_address and not self.ray:
            raise UserError(f"--ray-address {self.ray_address} does nothing without --ray: add it")
        return RayPlacement(config, RayCluster(self.ray_address or "auto")) if self.ray else nullcontext()


@takes_groups
def serve(
    context: typer.Context,
    model: options.ModelFolder,
    workers: options.WorkerOptions,
    capacity: options.CapacityOptions,
    elsewhere: ElsewhereOptions,
    http: HttpOptions,
    timeline: options.TimelineOption = None,
    json: ReadyOption = None,
) -> None:
    """Serve MODEL over HTTP; attention and experts in one process or apart."""
    check_output_file("--timeline", timeline)
    asked, served = planned_config(context, model, workers, capacity, trace=timeline is not None)
    config = elsewhere.by_plan(served).add_to(asked)
    if not elsewhere.ray:
        config = workers.with_micro_batches(config)
    settings = replace(http.settings(), model_root=str(model.resolve()))
    if served is not None:
        if config.join_address:
            tell(join_lines(config), json=json)
        if not elsewhere.ray:
            check_plan_fits(config, served)
        settings = replace(settings, predicted=served.predicted)
    run(config, settings, served, elsewhere, timeline, json)


def run(
    asked: ServeConfig,
    settings: ServerSettings,
    served: ServedPlan | None,
    elsewhere: ElsewhereOptions,
    timeline: Path | None,
    json: str | None,
) -> None:
    """Start engine and server, serve until a signal, write the timeline, stop everything.

    `StartFailed` if the engine gave up meanwhile."""
    spec = load_model_spec(asked.model, asked.rope_scaling)
    tokenizer = read_tokenizer(asked.model, spec.vocab_size)
    if asked.join_address:
        check_apart("--join-address", asked.join_address, settings)
    address = reserve(settings.host, settings.port)
    with closing(address), elsewhere.placement(asked) as placement:
        config = asked if placement is None else placement.config
        with _app(config, tokenizer, settings, placement) as (engine, app):

            def on_listening(url: str) -> None:
                facts = server_facts(engine, config, spec, app.state.context.model_name, url)
                if served is not None:
                    facts["plan"] = {"file": str(served.file), "predicted": asdict(served.predicted)}
                    tell(plan_lines(served, machine_name(config.device)), json=json)
                tell(banner(facts, needs_key=bool(settings.api_keys)), json=json)
                emit_json_beside(json, facts)  # this is the event loop

            run_server(app, settings, on_listening, address)
            if engine.fatal is not None:
                raise engine.failure()
            if timeline is not None:
                report_timeline(engine, timeline, json)


@contextmanager
def _app(
    config: ServeConfig, tokenizer: TextTokenizer, settings: ServerSettings, placement: RayPlacement | None = None
) -> Iterator[tuple[Engine, FastAPI]]:
    """A running engine and the app over it; both are stopped afterwards. A node of `placement` that fails while the
    engine loads ends the start."""
    prepared = prepare(config)
    grammars = build_grammars(prepared.info, tokenizer)
    engine: Engine | None = None
    check = (lambda: None) if placement is None else placement.check
    try:
        engine = start_with_progress(prepared, check, None if grammars is None else grammars.matcher)
        yield engine, create_app(engine, tokenizer, settings, grammars)
    finally:
        if grammars is not None:
            grammars.close()
        if placement is not None:
            placement.expect_end()
        if engine is not None:
            engine.stop()


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
    config = config_here(context, model, workers, capacity, trace=False)
    spec = load_model_spec(config.model, config.rope_scaling)
    tokenizer = read_tokenizer(config.model, spec.vocab_size)
    with answers_file(answers) as (output, before), _app(config, tokenizer, ServerSettings()) as (_, app):
        began_s = time.monotonic()
        try:
            with progress("answering") as report:
                counts = asyncio.run(answer_batch(app, requests, output, before, at_once, report))
        finally:
            app.state.context.texts.close()
    show_counts(counts, time.monotonic() - began_s, json)
    check_refusals(counts, answers)


def check_refusals(counts: BatchCounts, answers: Path) -> None:
    """`UserError` with exit code 1, because the command itself was right, if requests were refused."""
    if counts.num_refused:
        error = UserError(f"requests refused: {counts.num_refused:,}; {answers} says why, each in its line")
        error.exit_code = EXIT_FAILED
        raise error


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
