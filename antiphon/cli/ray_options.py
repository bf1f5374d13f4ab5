"""`antiphon serve --ray`: the options, and the workers they place, or nobody to place without them."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Protocol

import typer

from antiphon.base.errors import UserError
from antiphon.cli.options import check_not_empty
from antiphon.serve.config import ServeConfig
from antiphon.serve.ray_cluster import RayCluster
from antiphon.serve.ray_placement import RayPlacement


class PlacedWorkers(Protocol):
    """Who places the workers that the engine does not start itself; `serve/ray_placement` explains the members."""

    config: ServeConfig

    def check(self) -> None: ...

    def expect_end(self) -> None: ...


@dataclass
class PlacedByNobody:
    """The engine starts its workers, and people those that join."""

    config: ServeConfig

    def check(self) -> None:
        pass

    def expect_end(self) -> None:
        pass


@dataclass(frozen=True, kw_only=True)
class RayOptions:
    """All workers on a Ray cluster."""

    ray: Annotated[bool, typer.Option("--ray", help="Place all workers on a Ray cluster.")] = False
    ray_address: Annotated[
        str | None, typer.Option(metavar="ADDRESS", show_default="auto", help="auto, local or HOST:PORT.", hidden=True)
    ] = None

    @contextmanager
    def placed(self, config: ServeConfig) -> Iterator[PlacedWorkers]:
        """The workers on their way to their nodes; the configuration to start the engine with is theirs."""
        check_not_empty("--ray-address", self.ray_address)
        if self.ray_address and not self.ray:
            raise UserError(f"--ray-address {self.ray_address} does nothing without --ray: add it")
        if not self.ray:
            yield PlacedByNobody(config)
            return
        with RayPlacement(config, RayCluster(self.ray_address or "auto")) as placement:
            yield placement
