"""A projection of attention and the exchange beside it, as one operator in tiles (MegaScale-MoE, 4.2).

With ranks that share positions (Ulysses):

    HeadsLeaving    the projection to queries, keys and values, then the all-to-all to those who work on their heads:
                    columns for other ranks are multiplied first and sent tile by tile, the own ones last
    HeadsArriving   the all-to-all of attention's output, then the output projection: own columns are multiplied first,
                    then each tile that has come, and the products are added

With ranks that share heads (tensor parallelism), rows whole:

    RowsArriving    the all-gather of rows, then the first projection: own rows are multiplied first, then as they come
    RowsLeaving     the output projection, then the reduce-scatter: rows for other ranks are multiplied and sent first

The backward of each is the other one's forward, so there are two loops for either pair. A tile is some rows: with the
columns of one rank, or whole. Products that are added to the same rows take turns (`comm/tiles`) or are added in order
of rank, so sums have the same bits however tiles arrive.

Per-head norms, clipping and rotation come behind the all-to-all here, at all positions of the heads of this rank: each
needs its own head alone. Rejected: in each tile. Backward would need an autograd graph a tile.

Letters: T rows, of this rank or of all, H hidden, X fused width of queries, keys and values, I and O inputs and outputs
of a product, W columns of all heads, w those of the heads of one rank, B sequences, S positions, s those of this rank,
P rows of all positions in order of rank.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from antiphon.comm.tile_flight import TileFlight, TileLinks, launch_in_tiles
from antiphon.models.shares import Ranges, pick
from antiphon.train.operators import LayerContext, RowExchange, WeightProduct, exchange
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


@dataclass(frozen=True, kw_only=True)
class RowsArriving(Tiled):
    @staticmethod
    def of(exchange: RowExchange, product: WeightProduct, links: TileLinks) -> "RowsArriving":
        return RowsArriving(
            name=f"{exchange.name}_{product.name}",
            reads=exchange.reads,
            makes=(*product.reads, *product.makes),
            saves=product.saves,
            exchange=exchange,
            product=product,
            parts=(exchange.name, product.name),
            arrives=True,
            links=links,
        )

    def start(self, here: LayerContext, values: Values, run: TiledRun, wanted: frozenset[str]) -> dict[str, Tensor]:
        x_BsH = values[self.reads[0]]
        run.collective = here.sequences.parallel.in_rows(self.exchange.collective(here, x_BsH), x_BsH)
        run.flight = launch_in_tiles(run.collective, self.links, _rows(x_BsH))
        return {}

    def finish(self, here: LayerContext, values: Values, run: TiledRun, wanted: frozenset[str]) -> dict[str, Tensor]:
        flight, num_sequences = run.land(), here.sequences.cos_BSR.shape[0]
        multiplies = self.product.makes[0] in wanted
        weight_HX = here.weights[self.product.weight].mT if multiplies else None
        came_TH, out_TX = _multiply_arrivals(flight, weight_HX, here.weights.dtype)
        made = {self.product.reads[0]: _sequences(came_TH, num_sequences)}
        if out_TX is not None:
            bias_X = self.product.bias(here.weights)
            made[self.product.makes[0]] = _sequences(out_TX if bias_X is None else out_TX + bias_X, num_sequences)
        return made

    def start_gradient(self, here: LayerContext, values: Values, run: TiledRun, grad: Tensor) -> dict[str, Tensor]:
        run.product_grad = grad
        weight_XH = here.weights[self.product.weight]
        run.gradient_flight = TileFlight(run.reverse, self.links, weight_XH.shape[1], grad.dtype)
        _send_rows(run.gradient_flight, _rows(grad), weight_XH)
        return {}

    def finish_gradient(self, here: LayerContext, values: Values, run: TiledRun) -> dict[str, Tensor]:
        grad_TH = run.land_gradient().land().to(here.weights.dtype)
        return {self.reads[0]: _sequences(grad_TH, here.sequences.cos_BSR.shape[0])}


@dataclass(frozen=True, kw_only=True)
class RowsLeaving(Tiled):
    @staticmethod
    def of(product: WeightProduct, exchange: RowExchange, links: TileLinks) -> "RowsLeaving":
        return RowsLeaving(
            name=f"{product.name}_{exchange.name}",
            reads=product.reads,
            makes=exchange.makes,
            saves=product.saves,
            exchange=exchange,
            product=product,
            parts=(product.name, exchange.name),
            arrives=False,
            links=links,
        )

    def start(self, here: LayerContext, values: Values, run: TiledRun, wanted: frozenset[str]) -> dict[str, Tensor]:
        x_BSW, weight_WH = values[self.reads[0]], here.weights[self.product.weight].mT
        run.collective = here.sequences.parallel.in_rows(self.exchange.collective(here, x_BSW), x_BSW)
        run.flight = TileFlight(run.collective, self.links, weight_WH.shape[1], x_BSW.dtype)
        _send_rows(run.flight, _rows(x_BSW), weight_WH)
        return {}

    def finish(self, here: LayerContext, values: Values, run: TiledRun, wanted: frozenset[str]) -> dict[str, Tensor]:
        sum_TH = run.land().land().to(here.weights.dtype)
        return {self.makes[0]: _sequences(sum_TH, here.sequences.cos_BSR.shape[0])}

    def start_gradient(self, here: LayerContext, values: Values, run: TiledRun, grad: Tensor) -> dict[str, Tensor]:
        run.gradient_flight = launch_in_tiles(run.reverse, self.links, _rows(grad))
        return {}

    def finish_gradient(self, here: LayerContext, values: Values, run: TiledRun) -> dict[str, Tensor]:
        num_sequences, weight_HW = here.sequences.cos_BSR.shape[0], here.weights[self.product.weight]
        grad_TH, grad_TW = _multiply_arrivals(run.land_gradient(), weight_HW, here.weights.dtype)
        assert grad_TW is not None
        run.product_grad = _sequences(grad_TH, num_sequences)
        return {self.reads[0]: _sequences(grad_TW, num_sequences)}


def _rows(x_BSH: Tensor) -> Tensor:
    """[T, H], positions first: so the rows of each rank are one run."""
    return x_BSH.transpose(0, 1).flatten(0, 1)


def _sequences(x_TH: Tensor, num_sequences: int) -> Tensor:
    """[B, S, H] of rows with positions first."""
    return x_TH.view(-1, num_sequences, x_TH.shape[1]).transpose(0, 1).contiguous()


def _send_rows(flight: TileFlight, x_TI: Tensor, weight_IO: Tensor) -> None:
    """Sends each rank the products of its rows, tile by tile."""
    begins = [sum(flight.routes.send[:rank]) for rank in range(len(flight.routes.send))]
    for tile in flight.to_send:
        rows = slice(begins[tile.rank] + tile.first, begins[tile.rank] + tile.last)
        flight.send(tile, x_TI[rows] @ weight_IO)


def _multiply_arrivals(
    flight: TileFlight, weight_IO: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """All rows that came, in order of rank and in `dtype`, and their products with a weight if there is one."""
    out_TO = None if weight_IO is None else weight_IO.new_empty(flight.received.shape[0], weight_IO.shape[1])
    begins = [sum(flight.routes.receive[:rank]) for rank in range(len(flight.routes.receive))]
    for tile in flight.arrivals():
        rows = slice(begins[tile.rank] + tile.first, begins[tile.rank] + tile.last)
        if weight_IO is not None and out_TO is not None:
            torch.mm(flight.received[rows].to(dtype), weight_IO, out=out_TO[rows])
    return flight.received.to(dtype), out_TO


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
