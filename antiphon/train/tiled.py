"""A grouped product and the exchange of rows beside it, as one operator that works tile by tile (MegaScale-MoE, 4.2).

    Arriving    rows come, go to their experts and are multiplied: all-to-all or all-gather, scatter, first product
    Leaving     rows are multiplied, summed for their owners and go: second product, gather, all-to-all or
                reduce-scatter

Each is made of the three operators whose place it takes, and its backward is the other one's forward: gradients of what
left arrive and are multiplied; gradients of what arrived are multiplied, summed and leave. So there are two loops, and
`comm/tiles` says in which order tiles pass them. Which tiles there are depends on routing and not on time, so a step
has the same bits every time.

Rejected: tiles of the whole layer, each through both products before the next one. Their rows would be too few for a
product each, and backward needs what lies between the products in whole.

Letters: P rows that arrived, K experts a row, R rows in order of expert, E experts, H hidden.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from antiphon.comm.collectives import Collective
from antiphon.comm.tile_flight import TileFlight, TileLinks, launch_in_tiles
from antiphon.comm.tiles import Tile, boundaries, tiles_of
from antiphon.kernels.ops.permute import RowMap, sum_rows
from antiphon.train.operators import Compute, LayerContext, Operator, RowExchange, WeightProduct

Values = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Tiled(Operator):
    """`exchange` and `product`: what it is made of; `parts`: the names of the operators whose place it takes.
    `arrives`: rows come and are multiplied, else they are multiplied and go."""

    exchange: RowExchange
    product: WeightProduct
    parts: tuple[str, ...]
    arrives: bool
    links: TileLinks

    def reads_at(self, verb: str) -> tuple[str, ...]:
        """Which of `reads` and `saves` a step of it needs."""
        return {"start": self.reads, "start again": self.reads, "weights": self.product.saves}.get(verb, ())

    def start(self, here: LayerContext, values: Values, run: "TiledRun", wanted: frozenset[str]) -> dict[str, Tensor]:
        """Begin; what is made meanwhile, by name. Of what it makes only `wanted` is needed."""
        raise NotImplementedError

    def finish(self, here: LayerContext, values: Values, run: "TiledRun", wanted: frozenset[str]) -> dict[str, Tensor]:
        """The rest of what it makes. Waits."""
        raise NotImplementedError

    def start_gradient(self, here: LayerContext, values: Values, run: "TiledRun", grad: Tensor) -> dict[str, Tensor]:
        """Begin, with the gradient of what it gives; gradients that are known by then."""
        raise NotImplementedError

    def finish_gradient(self, here: LayerContext, values: Values, run: "TiledRun") -> dict[str, Tensor]:
        """The other gradients of what it reads. Waits."""
        raise NotImplementedError


@dataclass
class TiledRun:
    """Between the steps of one operator in one pass. `product_grad`: of what its product gives."""

    collective: Collective | None = None
    flight: TileFlight | None = None
    gradient_flight: TileFlight | None = None
    product_grad: Tensor | None = None

    def land(self) -> TileFlight:
        """What was started forward, or again."""
        flight, self.flight = self.flight, None
        assert flight is not None, "this exchange was waited for before"
        return flight

    def land_gradient(self) -> TileFlight:
        flight, self.gradient_flight = self.gradient_flight, None
        assert flight is not None, "this exchange was waited for before"
        return flight

    @property
    def reverse(self) -> Collective:
        assert self.collective is not None, "forward comes first"
        return self.collective.reverse()


@dataclass(frozen=True, kw_only=True)
class Arriving(Tiled):
    permutation: Compute

    @staticmethod
    def of(exchange: RowExchange, scatter: Compute, product: WeightProduct, links: TileLinks) -> "Arriving":
        return Arriving(
            name=f"{exchange.name}_{product.name}",
            reads=(*exchange.reads, "row_map"),
            makes=(*scatter.makes, *product.makes),
            saves=product.saves,
            exchange=exchange,
            permutation=scatter,
            product=product,
            parts=(exchange.name, scatter.name, product.name),
            arrives=True,
            links=links,
        )

    def reads_at(self, verb: str) -> tuple[str, ...]:
        return {
            "start": self.exchange.reads,
            "start again": self.exchange.reads,
            "wait": ("row_map",),
            "wait again": ("row_map",),
            "start gradient": ("row_map",),
            "weights": self.product.saves,
        }.get(verb, ())

    def start(self, here: LayerContext, values: Values, run: TiledRun, wanted: frozenset[str]) -> dict[str, Tensor]:
        run.collective = self.exchange.collective(here, *(values[name] for name in self.exchange.reads))
        run.flight = launch_in_tiles(run.collective, self.links, values[self.exchange.reads[0]])
        return {}

    def finish(self, here: LayerContext, values: Values, run: TiledRun, wanted: frozenset[str]) -> dict[str, Tensor]:
        flight, rows = run.land(), values["row_map"]
        rows_RH = flight.received.new_empty(len(rows.order_R), flight.received.shape[1], dtype=here.weights.dtype)
        multiply = _Multiply.forward(self.product, here) if self.product.makes[0] in wanted else None
        made = {self.permutation.makes[0]: rows_RH}
        if multiply is not None:
            made[self.product.makes[0]] = multiply.result(rows_RH)
        parts = parts_of(rows, flight.routes.receive, flight.tile_rows)
        for _, of_experts in works(flight.arrivals(), parts, flight.own):
            for expert, part in of_experts:
                rows_RH[part] = flight.received.index_select(0, rows.token_R[part])
                if multiply is not None:
                    multiply(rows_RH, made[self.product.makes[0]], expert, part)
        return made

    def start_gradient(self, here: LayerContext, values: Values, run: TiledRun, grad: Tensor) -> dict[str, Tensor]:
        rows: RowMap = values["row_map"]
        multiply = _Multiply.backward(self.product, here)
        present = None if rows.present_TK is None else rows.present_TK.to(grad.dtype)
        run.product_grad = grad
        run.gradient_flight = TileFlight(run.reverse, self.links, multiply.width, grad.dtype)
        _send_products(run.gradient_flight, rows, multiply, grad.contiguous(), present)
        return {}

    def finish_gradient(self, here: LayerContext, values: Values, run: TiledRun) -> dict[str, Tensor]:
        return {self.reads[0]: run.land_gradient().land()}


@dataclass(frozen=True, kw_only=True)
class Leaving(Tiled):
    """`weights`: the name of those that multiply in its sums, if any do."""

    permutation: Compute
    weights: str | None

    @staticmethod
    def of(product: WeightProduct, gather: Compute, exchange: RowExchange, links: TileLinks) -> "Leaving":
        weights = gather.reads[2:]
        return Leaving(
            name=f"{product.name}_{exchange.name}",
            reads=(product.reads[0], "row_map", exchange.reads[1], *weights),
            makes=(*product.makes, *exchange.makes),
            saves=(*product.saves, *gather.saves),
            exchange=exchange,
            permutation=gather,
            product=product,
            parts=(product.name, gather.name, exchange.name),
            arrives=False,
            links=links,
            weights=weights[0] if weights else None,
        )

    def reads_at(self, verb: str) -> tuple[str, ...]:
        return {
            "start": self.reads,
            "start again": self.reads,
            "wait gradient": ("row_map", *self.permutation.saves, *((self.weights,) if self.weights else ())),
            "weights": self.product.saves,
        }.get(verb, ())

    def start(self, here: LayerContext, values: Values, run: TiledRun, wanted: frozenset[str]) -> dict[str, Tensor]:
        x_RJ, rows = values[self.reads[0]], values["row_map"]
        multiply = _Multiply.forward(self.product, here)
        if self.exchange.makes[0] not in wanted:  # again, for its product alone
            return {self.product.makes[0]: self.product.forward(here.weights, [x_RJ, rows])}
        run.collective = self.exchange.collective(here, None, values[self.exchange.reads[1]])
        run.flight = TileFlight(run.collective, self.links, multiply.width, x_RJ.dtype)
        factors_PK = None if self.weights is None else rows.without_absent(values[self.weights].to(x_RJ.dtype))
        if factors_PK is None and rows.present_TK is not None:
            factors_PK = rows.present_TK.to(x_RJ.dtype)
        return {self.product.makes[0]: _send_products(run.flight, rows, multiply, x_RJ, factors_PK)}

    def finish(self, here: LayerContext, values: Values, run: TiledRun, wanted: frozenset[str]) -> dict[str, Tensor]:
        return {self.exchange.makes[0]: run.land().land()} if run.flight is not None else {}

    def start_gradient(self, here: LayerContext, values: Values, run: TiledRun, grad: Tensor) -> dict[str, Tensor]:
        run.gradient_flight = launch_in_tiles(run.reverse, self.links, grad)
        return {}

    def finish_gradient(self, here: LayerContext, values: Values, run: TiledRun) -> dict[str, Tensor]:
        flight, rows, dtype = run.land_gradient(), values["row_map"], here.weights.dtype
        multiply = _Multiply.backward(self.product, here)
        grad_RH = flight.received.new_empty(len(rows.order_R), flight.received.shape[1], dtype=dtype)
        grad_x_RJ = multiply.result(grad_RH)
        weights_PK = None if self.weights is None else values[self.weights]
        factor_R1 = None
        if weights_PK is not None:
            factor_R1 = weights_PK.to(dtype).flatten().index_select(0, rows.order_R).unsqueeze(1)
        y_RH = values.get(self.product.makes[0]) if self.product.makes[0] in self.permutation.saves else None
        grad_weight_R = None if y_RH is None else grad_RH.new_empty(len(rows.order_R))
        parts = parts_of(rows, flight.routes.receive, flight.tile_rows)
        for _, of_experts in works(flight.arrivals(), parts, flight.own):
            for expert, part in of_experts:
                grad_RH[part] = flight.received.index_select(0, rows.token_R[part])
                if grad_weight_R is not None and y_RH is not None:
                    grad_weight_R[part] = (grad_RH[part] * y_RH[part]).sum(1)
                if factor_R1 is not None:
                    grad_RH[part] *= factor_R1[part]
                multiply(grad_RH, grad_x_RJ, expert, part)
        run.product_grad = grad_RH
        found = {self.reads[0]: grad_x_RJ}
        if grad_weight_R is not None and weights_PK is not None and self.weights is not None:
            grad_PK = torch.zeros_like(weights_PK, dtype=dtype).flatten()
            grad_PK[rows.order_R] = grad_weight_R
            found[self.weights] = grad_PK.view_as(weights_PK).to(weights_PK.dtype)
        return found


@dataclass(frozen=True)
class _Multiply:
    """`matrices[e]`: [in, out] of an expert; `bias_EO` is added."""

    matrices: Tensor
    bias_EO: Tensor | None

    @staticmethod
    def forward(product: WeightProduct, here: LayerContext) -> "_Multiply":
        return _Multiply(here.weights[product.weight].mT, product.bias(here.weights))

    @staticmethod
    def backward(product: WeightProduct, here: LayerContext) -> "_Multiply":
        return _Multiply(here.weights[product.weight], None)

    @property
    def width(self) -> int:
        return int(self.matrices.shape[2])

    def result(self, x_RI: Tensor) -> Tensor:
        """Room for the products of these rows; zeros, for sums may multiply a row that is not there yet by 0."""
        return x_RI.new_zeros(x_RI.shape[0], self.width)

    def __call__(self, x_RI: Tensor, out_RO: Tensor, expert: int, part: slice) -> None:
        torch.mm(x_RI[part], self.matrices[expert], out=out_RO[part])
        if self.bias_EO is not None:
            out_RO[part] += self.bias_EO[expert]


def _send_products(
    flight: TileFlight, rows: RowMap, multiply: _Multiply, x_RI: Tensor, factors_PK: Tensor | None
) -> Tensor:
    """[R, O]: the products. Tile by tile they are made, summed by row and sent."""
    out_RO, parts = multiply.result(x_RI), parts_of(rows, flight.routes.send, flight.tile_rows)
    begins = [sum(flight.routes.send[:rank]) for rank in range(len(flight.routes.send))]
    for tiles, of_experts in works(flight.to_send, parts, flight.own):
        for expert, part in of_experts:
            multiply(x_RI, out_RO, expert, part)
        first = begins[tiles[0].rank]
        these = slice(first + tiles[0].first, first + tiles[-1].last)
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
