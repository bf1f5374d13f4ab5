"""`antiphon worker`: one worker on this machine for an engine on another. One plain command a node."""

import os
import platform
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from antiphon.base.errors import UserError
from antiphon.cli.output import show
from antiphon.serve.join_secret import exchange_secret, read_join_secret
from antiphon.serve.joining import JoinRole, join_engine
from antiphon.serve.worker.messages import Configure, ToWorker
from antiphon.serve.worker.process import run_worker


def worker(
    role: Annotated[str, typer.Option("--role", metavar="NAME", help="attention or experts.")],
    join: Annotated[str, typer.Option("--join", metavar="HOST:PORT", help="The engine's --join-address.")],
    model: Annotated[
        Path | None, typer.Option("--model", metavar="MODEL", show_default="the engine's path", help="Checkpoint here.")
    ] = None,
    host: Annotated[
        str,
        typer.Option("--host", metavar="ADDRESS", show_default="as the engine sees it", help="Where others reach it."),
    ] = "",
    secret_file: Annotated[
        Path | None, typer.Option("--secret-file", metavar="FILE", help="The secret shared with the engine.")
    ] = None,
    threads: Annotated[int, typer.Option("--threads", metavar="N", show_default="all cores", help="Threads.")] = 0,
    patience: Annotated[float, typer.Option("--patience", metavar="S", help="Wait for the engine so long.")] = 60.0,
) -> None:
    """Join an engine as an attention or expert worker; ends when the engine ends, or says so.

    The secret comes from --secret-file or from ANTIPHON_JOIN_SECRET."""
    if role not in {"attention", "experts"}:
        raise UserError(f"--role is {role}: it must be attention or experts")
    checked: JoinRole = "attention" if role == "attention" else "experts"
    secret = read_join_secret(secret_file)
    name = f"{checked} on {platform.node()}"
    channel = join_engine(join, secret, role=checked, name=name, host=host, pid=os.getpid(), patience_s=patience)
    show(f"joined {join} as {checked}", json=None)

    def adapt(configure: Configure) -> Configure:
        cores = len(os.sched_getaffinity(0))
        exchange = configure.exchange
        if exchange is None:
            raise UserError(f"the engine at {join} exchanges nothing: it does not run the disaggregated layout")
        return msgspec.structs.replace(
            configure,
            model=str(model or configure.model),
            num_threads=threads or cores,
            cores=[],
            exchange=msgspec.structs.replace(exchange, secret=exchange_secret(secret)),
        )

    channel.speak("engine", ToWorker)
    raise typer.Exit(run_worker(channel, adapt))
