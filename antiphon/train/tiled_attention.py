"""A projection of attention and the all-to-all beside it (Ulysses), as one operator in tiles (MegaScale-MoE, 4.2).

    HeadsLeaving    the projection to queries, keys and values, then the all-to-all to those who work on their heads:
                    columns for other ranks are multiplied first and sent tile by tile, the own ones last
    HeadsArriving   the all-to-all of attention's output, then the output projection: own columns are multiplied first,
                    then each tile that has come, and the products are added

The backward of each is the other one's forward, so there are two loops. A tile is some rows with the columns of one
rank. Products that are added to the same rows take turns (`comm/tiles`), so sums have the same bits however tiles
arrive.

Per-head norms, clipping and rotation come behind the all-to-all here, at all positions of the heads of this rank: each
needs its own head alone. Rejected: in each tile. Backward would need an autograd graph a tile.

Letters: T rows of this rank, H hidden, W columns of all heads, w those of the heads of one rank, B sequences,
S positions, s those of this rank, P rows of all positions in order of rank.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from antiphon.comm.tile_flight import TileFlight, TileLinks, launch_in_tiles
from antiphon.models.shares import Ranges, pick
from antiphon.train.operators import LayerContext, WeightProduct, exchange
from antiphon.train.tiled import Tiled, TiledRun, Values


@dataclass(frozen=True, kw_only=True)
class HeadsLeaving(Tiled):
    @staticmethod
    def of(product: WeightProduct, makes: str, links: TileLinks) -> "HeadsLeaving":
        """`makes`: the name of the projection of this rank's heads, [B, S, w]."""
        a2a = exchange(
            "heads_a2a",
            f"{product.reads[0]} -> {makes}",
            lambda here, x_BsH: here.sequences.parallel.rows_to_heads(x_BsH.shape[0]),
        )
        return HeadsLeaving(
            name=f"{product.name}_{a2a.name}",
            reads=product.reads,
            makes=(makes,),
            saves=product.saves,
            exchange=a2a,
            product=product,
            parts=(product.name, "pack_heads", a2a.name),
            arrives=False,
            links=links,
        )

    def start(self, here: LayerContext, values: Values, run: TiledRun, wanted: frozenset[str]) -> dict[str, Tensor]:
        x_BsH, columns = values[self.reads[0]], here.sequences.parallel.projected_columns
        run.collective = self.exchange.collective(here, x_BsH)
        width = _width(columns[run.collective.group.index])
        run.flight = TileFlight(run.collective, self.links, width, x_BsH.dtype)
        bias_W = self.product.bias(here.weights)
        _send_products(run.flight, x_BsH.flatten(0, 1), here.weights[self.product.weight], bias_W, columns)
        return {}

    def finish(self, here: LayerContext, values: Values, run: TiledRun, wanted: frozenset[str]) -> dict[str, Tensor]:
        return {self.makes[0]: here.sequences.parallel.by_position(run.land().land())}

    def start_gradient(self, here: LayerContext, values: Values, run: TiledRun, grad: Tensor) -> dict[str, Tensor]:
        parallel = here.sequences.parallel
        widths = [_width(ranges) for ranges in parallel.projected_columns]
        run.gradient_flight = launch_in_tiles(run.reverse, self.links, parallel.by_rank(grad), widths)
        return {}

    def finish_gradient(self, here: LayerContext, values: Values, run: TiledRun) -> dict[str, Tensor]:
        parallel, weight_WH = here.sequences.parallel, here.weights[self.product.weight]
        run.product_grad, grad_TH = _add_arrivals(run.land_gradient(), weight_WH, parallel.projected_columns)
        return {self.reads[0]: grad_TH.view(-1, parallel.num_rows, grad_TH.shape[1])}


@dataclass(frozen=True, kw_only=True)
class HeadsArriving(Tiled):
    @staticmethod
    def of(reads: str, product: WeightProduct, links: TileLinks) -> "HeadsArriving":
        """`reads`: the name of attention's output of this rank's heads, [P, w]."""
        a2a = exchange(
            "rows_a2a",
            f"{reads} -> {product.reads[0]}",
            lambda here, x_Pw: here.sequences.parallel.heads_to_rows(x_Pw.shape[0]),
        )
        return HeadsArriving(
            name=f"{a2a.name}_{product.name}",
            reads=(reads,),
            makes=(*product.reads, *product.makes),
            saves=product.saves,
            exchange=a2a,
            product=product,
            parts=(a2a.name, "unpack_rows", product.name),
            arrives=True,
            links=links,
        )

    def start(self, here: LayerContext, values: Values, run: TiledRun, wanted: frozenset[str]) -> dict[str, Tensor]:
        x_Pw, columns = values[self.reads[0]], here.sequences.parallel.output_columns
        run.collective = self.exchange.collective(here, x_Pw)
        run.flight = launch_in_tiles(run.collective, self.links, x_Pw, [_width(ranges) for ranges in columns])
        return {}

    def finish(self, here: LayerContext, values: Values, run: TiledRun, wanted: frozenset[str]) -> dict[str, Tensor]:
        parallel, weight_WH = here.sequences.parallel, here.weights[self.product.weight].mT
        multiplies = self.product.makes[0] in wanted
        found = _add_arrivals(run.land(), weight_WH, parallel.output_columns, multiplies=multiplies)
        made = zip(self.makes, found if multiplies else found[:1], strict=False)
        return {name: each.view(-1, parallel.num_rows, each.shape[1]) for name, each in made}

    def start_gradient(self, here: LayerContext, values: Values, run: TiledRun, grad: Tensor) -> dict[str, Tensor]:
        columns = here.sequences.parallel.output_columns
        run.product_grad = grad
        width = _width(columns[run.reverse.group.index])
        run.gradient_flight = TileFlight(run.reverse, self.links, width, grad.dtype)
        weight_WH = here.weights[self.product.weight].mT
        _send_products(run.gradient_flight, grad.flatten(0, 1), weight_WH, None, columns)
        return {}

    def finish_gradient(self, here: LayerContext, values: Values, run: TiledRun) -> dict[str, Tensor]:
        return {self.reads[0]: run.land_gradient().land()}


def _send_products(
    flight: TileFlight, x_TH: Tensor, weight_WH: Tensor, bias_W: Tensor | None, columns: list[Ranges]
) -> None:
    """Sends each rank its columns of the product of all rows."""
    matrices = [pick(weight_WH, 0, ranges).mT for ranges in columns]
    biases = None if bias_W is None else [pick(bias_W, 0, ranges) for ranges in columns]
    for tile in flight.to_send:
        product = x_TH[tile.first : tile.last] @ matrices[tile.rank]
        flight.send(tile, product if biases is None else product + biases[tile.rank])


def _add_arrivals(
    flight: TileFlight, weight_WH: Tensor, columns: list[Ranges], *, multiplies: bool = True
) -> tuple[Tensor, Tensor]:
    """What came, [T, W], and its product, [T, H]: zeros unless it `multiplies`. What came for the same columns is
    added: a key-value head that several ranks have. Products are added in float32 at least."""
    num_rows, dtype = flight.routes.receive[0], weight_WH.dtype
    came_TW = weight_WH.new_zeros(num_rows, weight_WH.shape[0])
    wide = torch.promote_types(dtype, torch.float32)
    total_TH = weight_WH.new_zeros(num_rows, weight_WH.shape[1], dtype=wide)
    matrices = [pick(weight_WH, 0, ranges) for ranges in columns]
    for tile in flight.arrivals_in_turns():
        part = slice(tile.first, tile.last)
        came_Tw = flight.received_from[tile.rank][part]
        pieces = torch.split(came_Tw, [last - first for first, last in columns[tile.rank]], dim=1)
        for (first_column, last_column), piece in zip(columns[tile.rank], pieces, strict=True):
            came_TW[part, first_column:last_column] += piece
        if multiplies:
            total_TH[part] += came_Tw @ matrices[tile.rank]
    return came_TW, total_TH.to(dtype)


def _width(ranges: Ranges) -> int:
    return sum(last - first for first, last in ranges)
