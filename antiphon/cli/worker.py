"""`antiphon worker`: one worker on this machine for an engine on another. One plain command a node."""

from pathlib import Path
from typing import Annotated

import typer

from antiphon.cli.options import check_not_empty, check_timeout
from antiphon.cli.output import show
from antiphon.models.checkpoint_folder import model_folder
from antiphon.serve.config import MAX_THREADS
from antiphon.serve.joining import JoinRole, read_join_secret
from antiphon.serve.worker.joined import JoinOrder, run_joined_worker


def worker(
    role: Annotated[JoinRole, typer.Option("--role", metavar="NAME", help="attention, experts or replica.")],
    join: Annotated[str, typer.Option("--join", metavar="HOST:PORT", help="The engine's --join-address.")],
    model: Annotated[
        Path | None, typer.Option("--model", metavar="MODEL", show_default="the engine's path", help="Checkpoint here.")
    ] = None,
    host: Annotated[
        str | None,
        typer.Option("--host", metavar="ADDRESS", show_default="as the engine sees it", help="Where others reach it."),
    ] = None,
    secret_file: Annotated[
        Path | None, typer.Option("--secret-file", metavar="FILE", help="The secret shared with the engine.")
    ] = None,
    threads: Annotated[
        int | None,
        typer.Option("--threads", metavar="N", min=1, max=MAX_THREADS, show_default="all cores", help="Threads."),
    ] = None,
    patience: Annotated[float, typer.Option("--patience", metavar="S", help="How long to wait for the engine.")] = 60.0,
) -> None:
    """Join an engine as a worker, or as one rank of one; ends when the engine ends, or says so.

    The secret comes from --secret-file or from ANTIPHON_JOIN_SECRET."""
    check_timeout("--patience", patience)
    check_not_empty("--host", host)
    order = JoinOrder(
        address=join,
        role=role,
        host=host or "",
        model="" if model is None else str(model_folder(model)),
        num_threads=threads or 0,
        patience_s=patience,
    )
    secret = read_join_secret(secret_file)
    raise typer.Exit(run_joined_worker(order, secret, lambda: show(f"joined {join} as {role}", json=None)))
