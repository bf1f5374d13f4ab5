"""A projection of attention and the exchange beside it, as one operator in tiles (MegaScale-MoE, 4.2).

With ranks that share positions (Ulysses):

    heads_leaving    the projection to queries, keys and values, then the all-to-all to those who work on their heads:
                     columns for other ranks are multiplied first and sent tile by tile, the own ones last
    heads_arriving   the all-to-all of attention's output, then the output projection: own columns are multiplied first,
                     then each tile that has come, and the products are added

With ranks that share heads (tensor parallelism), rows whole:

    rows_arriving    the all-gather of rows, then the first projection: own rows are multiplied first, then as they come
    rows_leaving     the output projection, then the reduce-scatter: rows for other ranks are multiplied and sent first

The backward of each is the other one's forward, so either pair is one class. A tile is some rows: with the columns of
one rank, or whole. Products that are added to the same rows take turns (`comm/tile_flight`) or are added in order of
rank, so sums have the same bits however tiles arrive.

Per-head norms, clipping and rotation come behind the all-to-all here, at all positions of the heads of this rank: each
needs its own head alone. Rejected: in each tile. Backward would need an autograd graph a tile.

Letters: T rows, of this rank or of all, H hidden, X fused width of queries, keys and values, I and O inputs and outputs
of a product, W columns of all heads, w those of the heads of one rank, B sequences, S positions, s those of this rank,
P rows of all positions in order of rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from antiphon.comm.collectives import Collective
from antiphon.comm.tile_flight import TileFlight, TileLinks, launch_in_tiles
from antiphon.models.shares import Ranges, pick
from antiphon.train.operators import LayerContext, RowExchange, WeightProduct, exchange
from antiphon.train.tiled import Tiled, TiledRun, tiled_fields


def heads_leaving(product: WeightProduct, links: TileLinks) -> "TiledHeads":
    """Makes the projection of this rank's heads, [B, S, w]."""
    a2a = exchange(
        "heads_a2a",
        f"{product.reads[0]} -> qkv_a2a",
        lambda here, x_BsH: here.sequences.parallel.rows_to_heads(x_BsH.shape[0]),
    )
    fields = tiled_fields(a2a, product, links, "pack_heads", arrives=False)
    return TiledHeads(**fields, reads=product.reads, makes=a2a.makes)


def heads_arriving(product: WeightProduct, links: TileLinks) -> "TiledHeads":
    """Reads attention's output of this rank's heads, [P, w]."""
    a2a = exchange(
        "rows_a2a",
        f"rows_sent -> {product.reads[0]}",
        lambda here, x_Pw: here.sequences.parallel.heads_to_rows(x_Pw.shape[0]),
    )
    fields = tiled_fields(a2a, product, links, "unpack_rows", arrives=True)
    return TiledHeads(**fields, reads=a2a.reads, makes=(*product.reads, *product.makes))


def rows_arriving(gather: RowExchange, product: WeightProduct, links: TileLinks) -> "TiledRows":
    fields = tiled_fields(gather, product, links, arrives=True)
    return TiledRows(**fields, reads=gather.reads, makes=(*product.reads, *product.makes))


def rows_leaving(product: WeightProduct, scatter: RowExchange, links: TileLinks) -> "TiledRows":
    return TiledRows(**tiled_fields(scatter, product, links, arrives=False), reads=product.reads, makes=scatter.makes)


@dataclass(frozen=True, kw_only=True)
class TiledHeads(Tiled):
    """A row travels with the heads of one rank."""

    def _columns(self, here: LayerContext) -> list[Ranges]:
        """For each rank, what it makes, or works on, of the W columns of all heads."""
        parallel = here.sequences.parallel
        return parallel.output_columns if self.arrives else parallel.projected_columns

    def _weight_WH(self, here: LayerContext) -> Tensor:
        weight = here.weights[self.product.weight]
        return weight.mT if self.arrives else weight

    def launch(self, run: TiledRun, collective: Collective, x: Tensor) -> TileFlight:
        rows_PW = x if self.arrives else run.here.sequences.parallel.by_rank(x)
        return launch_in_tiles(collective, self.links, rows_PW, [_width(each) for each in self._columns(run.here)])

    def send(self, run: TiledRun, collective: Collective, x: Tensor) -> TileFlight:
        """Sends each rank its columns of the product of all rows."""
        columns, weight_WH, rows_TH = self._columns(run.here), self._weight_WH(run.here), x.flatten(0, 1)
        flight = TileFlight(collective, self.links, _width(columns[collective.group.index]), x.dtype)
        bias_W = None if self.arrives else self.product.bias(run.here.weights)
        matrices = [pick(weight_WH, 0, ranges).mT for ranges in columns]
        biases = None if bias_W is None else [pick(bias_W, 0, ranges) for ranges in columns]
        for tile in flight.to_send:
            product = rows_TH[tile.first : tile.last] @ matrices[tile.rank]
            flight.send(tile, product if biases is None else product + biases[tile.rank])
        return flight

    def multiply(self, run: TiledRun, flight: TileFlight, *, multiplies: bool) -> Sequence[Tensor]:
        """[B, s, W] and [B, s, H]. What came for the same columns is added: a key-value head that several ranks have.
        Products are added in float32 at least."""
        columns, weight_WH = self._columns(run.here), self._weight_WH(run.here)
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
        made = [came_TW, total_TH.to(dtype)] if multiplies else [came_TW]
        return [each.view(-1, run.here.sequences.parallel.num_rows, each.shape[1]) for each in made]

    def land(self, run: TiledRun, flight: TileFlight) -> Tensor:
        found = flight.land()
        return found if self.arrives else run.here.sequences.parallel.by_position(found)


@dataclass(frozen=True, kw_only=True)
class TiledRows(Tiled):
    """A row travels whole. Rows have positions first here, so that those of each rank are one run."""

    def collective(self, run: TiledRun) -> Collective:
        return run.here.sequences.parallel.in_rows(super().collective(run), run.values[self.reads[0]])

    def launch(self, run: TiledRun, collective: Collective, x: Tensor) -> TileFlight:
        return launch_in_tiles(collective, self.links, _rows(x))

    def send(self, run: TiledRun, collective: Collective, x: Tensor) -> TileFlight:
        """Sends each rank the products of its rows."""
        weight, rows_TI = run.here.weights[self.product.weight], _rows(x)
        weight_IO = weight if self.arrives else weight.mT
        flight = TileFlight(collective, self.links, weight_IO.shape[1], x.dtype)
        begins = [sum(flight.routes.send[:rank]) for rank in range(len(flight.routes.send))]
        for tile in flight.to_send:
            rows = slice(begins[tile.rank] + tile.first, begins[tile.rank] + tile.last)
            flight.send(tile, rows_TI[rows] @ weight_IO)
        return flight

    def multiply(self, run: TiledRun, flight: TileFlight, *, multiplies: bool) -> Sequence[Tensor]:
        """[B, S, I] and [B, S, O], of all rows that came."""
        weights, out_TO, weight_IO = run.here.weights, None, None
        if multiplies:
            weight = weights[self.product.weight]
            weight_IO = weight.mT if self.arrives else weight
            out_TO = weight_IO.new_empty(flight.received.shape[0], weight_IO.shape[1])
        begins = [sum(flight.routes.receive[:rank]) for rank in range(len(flight.routes.receive))]
        for tile in flight.arrivals():
            rows = slice(begins[tile.rank] + tile.first, begins[tile.rank] + tile.last)
            if weight_IO is not None and out_TO is not None:
                torch.mm(flight.received[rows].to(weights.dtype), weight_IO, out=out_TO[rows])
        came = _sequences(run, flight.received.to(weights.dtype))
        if out_TO is None:
            return [came]
        bias_O = self.product.bias(weights) if self.arrives else None
        return [came, _sequences(run, out_TO if bias_O is None else out_TO + bias_O)]

    def land(self, run: TiledRun, flight: TileFlight) -> Tensor:
        return _sequences(run, flight.land().to(run.here.weights.dtype))


def _rows(x_BSH: Tensor) -> Tensor:
    """[T, H], positions first."""
    return x_BSH.transpose(0, 1).flatten(0, 1)


def _sequences(run: TiledRun, x_TH: Tensor) -> Tensor:
    """[B, S, H] of rows with positions first."""
    num_sequences = run.here.sequences.cos_BSR.shape[0]
    return x_TH.view(-1, num_sequences, x_TH.shape[1]).transpose(0, 1).contiguous()


def _width(ranges: Ranges) -> int:
    return sum(last - first for first, last in ranges)
