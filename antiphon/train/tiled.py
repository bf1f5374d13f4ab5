"""A grouped product and the exchange of rows beside it, as one operator that works tile by tile (MegaScale-MoE, 4.2).

    Arriving    rows come, go to their experts and are multiplied: all-to-all or all-gather, scatter, first product
    Leaving     rows are multiplied, summed for their owners and go: second product, gather, all-to-all or
                reduce-scatter

Each is made of the three operators whose place it takes, and its backward is the other one's forward: gradients of what
left arrive and are multiplied; gradients of what arrived are multiplied, summed and leave. So there are two loops, and
`comm/tile_flight` says in which order tiles pass them. Which tiles there are depends on routing and not on time, so a
step has the same bits every time.

Rejected: tiles of the whole layer, each through both products before the next one. Their rows would be too few for a
product each, and backward needs what lies between the products in whole.

Letters: P rows that arrived, K experts a row, R rows in order of expert, E experts, H hidden.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from antiphon.comm.collectives import Collective
from antiphon.comm.m2n.tile_links import Tile, TileLinks
from antiphon.comm.tile_flight import TileFlight, boundaries, launch_in_tiles, rows_of, tiles_of
from antiphon.kernels.ops.route import RowMap, sum_rows
from antiphon.train.operators import Compute, LayerContext, Operator, RowExchange, WeightProduct

Values = Mapping[str, Any]


@dataclass
class TiledRun:
    """One operator in one pass, between its steps. `flight`: what was started forward, or again, and not waited for;
    `gradient_flight`: in backward. `product_grad`: of what its product gives."""

    here: LayerContext
    values: Values
    collective: Collective | None = None
    flight: TileFlight | None = None
    gradient_flight: TileFlight | None = None
    product_grad: Tensor | None = None

    def take_flight(self, name: Literal["flight", "gradient_flight"]) -> TileFlight:
        """The one of this name, to be waited for."""
        flight: TileFlight | None = getattr(self, name)
        assert flight is not None, "this exchange was waited for before"
        setattr(self, name, None)
        return flight

    @property
    def reverse(self) -> Collective:
        assert self.collective is not None, "forward comes first"
        return self.collective.reverse()


@dataclass(frozen=True, kw_only=True)
class Tiled(Operator):
    """`exchange` and `product`: what it is made of; `parts`: the names of the operators whose place it takes.
    `arrives`: rows come and are multiplied, else they are multiplied and go; in backward it is the other way round. A
    kind says how rows go that are there (`launch`) or are being multiplied (`send`), and what becomes of those that
    come (`multiply`) or have come (`land`). `Leaving` has no `send` and no `multiply`: they are within its `start` and
    its `finish_gradient`, which give more."""

    exchange: RowExchange
    product: WeightProduct
    parts: tuple[str, ...]
    arrives: bool
    links: TileLinks

    def reads_at(self, verb: str) -> tuple[str, ...]:
        """Which of `reads` and `saves` a step of it needs."""
        return {"start": self.reads, "start again": self.reads, "weights": self.product.saves}.get(verb, ())

    def start(self, run: TiledRun, wanted: frozenset[str]) -> dict[str, Tensor]:
        """Begin; what is made meanwhile, by name. Of what it makes only `wanted` is needed."""
        x = run.values[self.reads[0]]
        run.collective = self.collective(run)
        run.flight = (self.launch if self.arrives else self.send)(run, run.collective, x)
        return {}

    def finish(self, run: TiledRun, wanted: frozenset[str]) -> dict[str, Tensor]:
        """The rest of what it makes. Waits."""
        flight = run.take_flight("flight")
        if not self.arrives:
            return {self.makes[-1]: self.land(run, flight)}
        made = self.multiply(run, flight, multiplies=self.product.makes[0] in wanted)
        return dict(zip(self.makes, made, strict=False))

    def start_gradient(self, run: TiledRun, grad: Tensor) -> None:
        """Begin, with the gradient of what it gives."""
        if self.arrives:
            run.product_grad = grad
        run.gradient_flight = (self.send if self.arrives else self.launch)(run, run.reverse, grad)

    def finish_gradient(self, run: TiledRun) -> dict[str, Tensor]:
        """The gradients of what it reads. Waits."""
        flight = run.take_flight("gradient_flight")
        if self.arrives:
            return {self.reads[0]: self.land(run, flight)}
        run.product_grad, grad = self.multiply(run, flight, multiplies=True)
        return {self.reads[0]: grad}

    def collective(self, run: TiledRun) -> Collective:
        """The exchange of a pass, forward."""
        others = [run.values[name] for name in self.exchange.reads[1:]]
        return self.exchange.collective(run.here, run.values[self.reads[0]], *others)

    def launch(self, run: TiledRun, collective: Collective, x: Tensor) -> TileFlight:
        """Rows that are all there go."""
        return launch_in_tiles(collective, self.links, x)

    def send(self, run: TiledRun, collective: Collective, x: Tensor) -> TileFlight:
        """Rows are multiplied and go, tile by tile."""
        raise NotImplementedError(f"{self.name} has steps of its own")

    def multiply(self, run: TiledRun, flight: TileFlight, *, multiplies: bool) -> Sequence[Tensor]:
        """Rows that come, and, where it `multiplies`, their products. Waits."""
        raise NotImplementedError(f"{self.name} has steps of its own")

    def land(self, run: TiledRun, flight: TileFlight) -> Tensor:
        """Rows that have come. Waits."""
        return flight.land()


def tiled_fields(
    exchange: RowExchange, product: WeightProduct, links: TileLinks, between: str = "", *, arrives: bool
) -> dict[str, Any]:
    """The fields of a `Tiled`. `between`: the operator that stands between exchange and product."""
    first, last = (exchange, product) if arrives else (product, exchange)
    return {
        "name": f"{first.name}_{last.name}",
        "reads": first.reads,
        "makes": (*product.reads, *product.makes) if arrives else exchange.makes,
        "saves": product.saves,
        "exchange": exchange,
        "product": product,
        "parts": (first.name, *between.split(), last.name),
        "arrives": arrives,
        "links": links,
    }


@dataclass(frozen=True, kw_only=True)
class Arriving(Tiled):
    @staticmethod
    def of(exchange: RowExchange, scatter: Compute, product: WeightProduct, links: TileLinks) -> "Arriving":
        fields = tiled_fields(exchange, product, links, scatter.name, arrives=True)
        own = {"reads": (*exchange.reads, "row_map"), "makes": (*scatter.makes, *product.makes)}
        return Arriving(**(fields | own))

    def reads_at(self, verb: str) -> tuple[str, ...]:
        rows = dict.fromkeys(("wait", "wait again", "start gradient"), ("row_map",))
        started = dict.fromkeys(("start", "start again"), self.exchange.reads)
        return (rows | started | {"weights": self.product.saves}).get(verb, ())

    def send(self, run: TiledRun, collective: Collective, x: Tensor) -> TileFlight:
        rows: RowMap = run.values["row_map"]
        present, weight_EIO = rows.present_TK, run.here.weights[self.product.weight]
        flight = TileFlight(collective, self.links, weight_EIO.shape[2], x.dtype)
        factors_PK = None if present is None else present.to(x.dtype)
        _send_products(flight, rows, x.contiguous(), weight_EIO, None, factors_PK)
        return flight

    def multiply(self, run: TiledRun, flight: TileFlight, *, multiplies: bool) -> Sequence[Tensor]:
        rows, weights = run.values["row_map"], run.here.weights
        rows_RH = _room(flight, rows, weights.dtype)
        if not multiplies:
            for _ in _arrivals(flight, rows, rows_RH):
                pass
            return [rows_RH]
        weight_EHJ, bias_EJ = weights[self.product.weight].mT, self.product.bias(weights)
        out_RJ = _zeros(rows_RH, weight_EHJ)
        for expert, part in _arrivals(flight, rows, rows_RH):
            _multiply(rows_RH, weight_EHJ, bias_EJ, out_RJ, expert, part)
        return [rows_RH, out_RJ]


@dataclass(frozen=True, kw_only=True)
class Leaving(Tiled):
    """`permutation`: the gather in it; `weights`: the name of those that multiply in its sums, if any do."""

    permutation: Compute
    weights: str | None

    @staticmethod
    def of(product: WeightProduct, gather: Compute, exchange: RowExchange, links: TileLinks) -> "Leaving":
        weights = gather.reads[2:]
        fields = tiled_fields(exchange, product, links, gather.name, arrives=False)
        own = {
            "saves": (*product.saves, *gather.saves),
            "reads": (product.reads[0], "row_map", exchange.reads[1], *weights),
            "makes": (*product.makes, *exchange.makes),
        }
        return Leaving(**(fields | own), permutation=gather, weights=weights[0] if weights else None)

    def reads_at(self, verb: str) -> tuple[str, ...]:
        if verb == "wait gradient":
            return ("row_map", *self.permutation.saves, *((self.weights,) if self.weights else ()))
        return super().reads_at(verb)

    def start(self, run: TiledRun, wanted: frozenset[str]) -> dict[str, Tensor]:
        x_RJ, rows, weights = run.values[self.reads[0]], run.values["row_map"], run.here.weights
        if self.exchange.makes[0] not in wanted:  # again, for its product alone
            return {self.product.makes[0]: self.product.forward(weights, [x_RJ, rows])}
        weight_EJH, bias_EH = weights[self.product.weight].mT, self.product.bias(weights)
        run.collective = self.collective(run)
        flight = run.flight = TileFlight(run.collective, self.links, weight_EJH.shape[2], x_RJ.dtype)
        factors_PK = None if self.weights is None else rows.without_absent(run.values[self.weights].to(x_RJ.dtype))
        if factors_PK is None and rows.present_TK is not None:
            factors_PK = rows.present_TK.to(x_RJ.dtype)
        return {self.product.makes[0]: _send_products(flight, rows, x_RJ, weight_EJH, bias_EH, factors_PK)}

    def finish(self, run: TiledRun, wanted: frozenset[str]) -> dict[str, Tensor]:
        return super().finish(run, wanted) if run.flight is not None else {}

    def finish_gradient(self, run: TiledRun) -> dict[str, Tensor]:
        flight, rows, dtype = run.take_flight("gradient_flight"), run.values["row_map"], run.here.weights.dtype
        weight_EHJ = run.here.weights[self.product.weight]
        grad_RH = _room(flight, rows, dtype)
        grad_x_RJ = _zeros(grad_RH, weight_EHJ)
        weights_PK = None if self.weights is None else run.values[self.weights]
        factor_R1 = None
        if weights_PK is not None:
            factor_R1 = weights_PK.to(dtype).flatten().index_select(0, rows.order_R).unsqueeze(1)
        y_RH = run.values.get(self.product.makes[0]) if self.product.makes[0] in self.permutation.saves else None
        grad_weight_R = None if y_RH is None else grad_RH.new_empty(len(rows.order_R))
        for expert, part in _arrivals(flight, rows, grad_RH):
            if grad_weight_R is not None and y_RH is not None:
                grad_weight_R[part] = (grad_RH[part] * y_RH[part]).sum(1)
            if factor_R1 is not None:
                grad_RH[part] *= factor_R1[part]
            _multiply(grad_RH, weight_EHJ, None, grad_x_RJ, expert, part)
        run.product_grad = grad_RH
        found = {self.reads[0]: grad_x_RJ}
        if grad_weight_R is not None and weights_PK is not None and self.weights is not None:
            grad_PK = torch.zeros_like(weights_PK, dtype=dtype).flatten()
            grad_PK[rows.order_R] = grad_weight_R
            found[self.weights] = grad_PK.view_as(weights_PK).to(weights_PK.dtype)
        return found


def _zeros(x_RI: Tensor, matrices_EIO: Tensor) -> Tensor:
    """[R, O]: room for products; zeros, for sums may multiply a row that is not there yet by 0."""
    return x_RI.new_zeros(x_RI.shape[0], matrices_EIO.shape[2])


def _multiply(
    x_RI: Tensor, matrices_EIO: Tensor, bias_EO: Tensor | None, out_RO: Tensor, expert: int, part: slice
) -> None:
    """The products of an expert's rows."""
    torch.mm(x_RI[part], matrices_EIO[expert], out=out_RO[part])
    if bias_EO is not None:
        out_RO[part] += bias_EO[expert]


def _room(flight: TileFlight, rows: RowMap, dtype: torch.dtype) -> Tensor:
    """[R, H], for the rows that come."""
    return flight.received.new_empty(len(rows.order_R), flight.received.shape[1], dtype=dtype)


def _arrivals(flight: TileFlight, rows: RowMap, into_RH: Tensor) -> Iterator[tuple[int, slice]]:
    """Each expert with rows that have come, and where they lie in `into_RH`."""
    parts = parts_of(rows, flight.routes.receive, flight.tile_rows)
    for _, of_experts in works(flight.arrivals(), parts, flight.own):
        for expert, part in of_experts:
            into_RH[part] = flight.received.index_select(0, rows.token_R[part])
            yield expert, part


def _send_products(
    flight: TileFlight,
    rows: RowMap,
    x_RI: Tensor,
    matrices_EIO: Tensor,
    bias_EO: Tensor | None,
    factors_PK: Tensor | None,
) -> Tensor:
    """[R, O]: the products. Tile by tile they are made, summed by row and sent."""
    out_RO, parts = _zeros(x_RI, matrices_EIO), parts_of(rows, flight.routes.send, flight.tile_rows)
    for tiles, of_experts in works(flight.to_send, parts, flight.own):
        for expert, part in of_experts:
            _multiply(x_RI, matrices_EIO, bias_EO, out_RO, expert, part)
        these = slice(rows_of(tiles[0], flight.routes.send).start, rows_of(tiles[-1], flight.routes.send).stop)
        sums = sum_rows(out_RO, rows.place_TK[these], None if factors_PK is None else factors_PK[these])
        for tile in tiles:
            flight.send(tile, sums[tile.first - tiles[0].first : tile.last - tiles[0].first])
    return out_RO


Parts = list[tuple[int, slice]]  # experts, and where their rows lie


def works(tiles: Iterable[Tile], parts: Mapping[Tile, Parts], own: int) -> Iterator[tuple[list[Tile], Parts]]:
    """What is multiplied at once: a tile of another rank as it comes or goes; all tiles of this rank's own rows, the
    one at place `own`, together. These are there without waiting, and products of more rows cost less a row."""
    mine = [tile for tile in parts if tile.rank == own]
    left = len(mine)
    for tile in tiles:
        if tile.rank != own:
            yield [tile], parts[tile]
            continue
        left -= 1
        if not left:
            yield mine, _joined([parts[each] for each in mine])


def _joined(parts: Sequence[Parts]) -> Parts:
    """Rows of one expert in tiles that follow each other lie behind one another."""
    ends: dict[int, slice] = {}
    for expert, part in (pair for of_tile in parts for pair in of_tile):
        before = ends.get(expert)
        assert before is None or before.stop == part.start, "an expert's rows of one rank lie together"
        ends[expert] = part if before is None else slice(before.start, part.stop)
    return list(ends.items())


def parts_of(rows: RowMap, by_rank: Sequence[int], tile_rows: int) -> dict[Tile, Parts]:
    """By tile of rows that lie in order of rank: each expert that has some of them, and where these lie in order of
    expert. Within an expert rows are in order of token, so those of a tile are one run."""
    num_tokens, num_experts = rows.place_TK.shape[0], len(rows.counts_E)
    device = rows.token_R.device
    firsts_E = num_tokens * torch.arange(num_experts, device=device)
    keys_R = rows.token_R + firsts_E.repeat_interleave(torch.tensor(rows.counts_E, device=device))
    bounds = torch.tensor(boundaries(by_rank, tile_rows), device=device)
    cuts_EB = torch.searchsorted(keys_R, firsts_E.unsqueeze(1) + bounds).tolist()
    tiles = [tile for rank, count in enumerate(by_rank) for tile in tiles_of(rank, count, tile_rows)]
    return {
        tile: [(e, slice(cuts[i], cuts[i + 1])) for e, cuts in enumerate(cuts_EB) if cuts[i] < cuts[i + 1]]
        for i, tile in enumerate(tiles)
    }
