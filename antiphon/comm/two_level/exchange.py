"""Rows to their experts and back over a `TwoLevel` topology: MixServe's fused AG-Dispatch and fused RS-Combine.

Dispatch (Algorithm 2). All ranks of an attention group have the same rows, so each sends one shard of them, a slice of
the hidden size, to the same place of every node that holds one of a row's experts; each row once a node's part. What
arrives is gathered inside the expert group. Combine (Algorithm 1) mirrors it: partial sums are reduce-scattered inside,
each rank returns its shard to where the rows came from, adds up what the nodes return, and the shards are gathered.

Round i talks to the node i further. Fused: all sends are on their way before the first gather, and round i is gathered
while the messages of later rounds travel; the combine posts round i's shard before it reduces round i + 1's.
Synchronous: a level begins when the other has ended, and the rows of all nodes go through one inner collective in
place of one a round. Results have the same bits: nodes are added in the order of their numbers.

Requests for copies of experts may ride in front of a dispatch's rows (`serve/worker/expert_prefetch`): where one
attention group fills a node, each rank of an expert group gets those of every node.

Algorithm 1 as printed sends before it reduces; what it sends would then be summed in the wrong group. Here the
reduction comes first, as in the paper's Figure 8 and text. Rows of the own node need no message.

Rows stay where the caller has them, on a GPU if the groups inside a node take its tensors, else they go by host memory.
Choices are in host memory, because the host counts by them, and so are messages between nodes.

Letters: T rows here, R rows received, H hidden, K choices, W = H / shards.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from antiphon.base.errors import UserError
from antiphon.comm.rank_group import RankGroup
from antiphon.comm.two_level.levels import Levels, TwoLevel

_CHOICE_BYTES = 8  # an id and a weight
MOST_REQUESTS = 2  # that ride on a message: of this layer, and of the next one
_REQUEST_BYTES = MOST_REQUESTS * 8  # layer and expert each
Requests = Mapping[int, Sequence[tuple[int, int]]]  # by part of the experts: layer and expert of copies for it


def message_bytes(topology: TwoLevel, max_rows: int, hidden_size: int, top_k: int, dtype: torch.dtype) -> int:
    """The largest message between nodes. `UserError` if a row cannot be cut into the topology's shards."""
    if hidden_size % topology.num_shards:
        raise UserError(f"a hidden size of {hidden_size} cannot be cut into {topology.num_shards} equal shards")
    return _REQUEST_BYTES + max_rows * (hidden_size // topology.num_shards * dtype.itemsize + _CHOICE_BYTES * top_k)


@dataclass(frozen=True)
class ChosenRows:
    """Rows with their choices: whole ones, or one shard of them. `ids_RK`: -1 where an expert is elsewhere."""

    rows: Tensor
    ids_RK: Tensor
    weights_RK: Tensor


class Dispatch:
    """Rows under way. Its creation sends this rank's; `wait` returns what came; then `combine` returns the results.

    After `wait`: `counts[node][i]`: how many rows came from attention group i of those of a node that this expert group
    serves, in the order in which they lie. `requests`: (node, layer, expert) of copies that are asked of this part."""

    def __init__(
        self,
        levels: Levels,
        parts_TK: Tensor,
        x_TH: Tensor,
        ids_TK: Tensor,
        weights_TK: Tensor,
        *,
        fused: bool = True,
        requests: Requests | None = None,
    ) -> None:
        """`parts_TK`: which part of the experts, of `expert_ep`, serves each choice; equal on all ranks of an attention
        group. `requests`: of copies; None on all ranks where there never are any. Waits only for free slots."""
        self._levels, self._fused = levels, fused
        self._topology = levels.topology
        self._asked = requests
        assert requests is None or not self._gathers_own, "a part hears of all requests where a group fills its node"
        self.requests: list[tuple[int, int, int]] = []
        self._num_rows, self._hidden = x_TH.shape
        self._dtype, self._given, self._top_k = x_TH.dtype, x_TH.device, ids_TK.shape[1]
        x_TH = x_TH if levels.takes(x_TH.device) else x_TH.cpu()
        self._device = x_TH.device
        parts_TK, ids_TK, weights_TK = (each.cpu() for each in (parts_TK, ids_TK, weights_TK))
        self._rows_of: list[Tensor] = []
        outgoing: list[ChosenRows] = []
        for node in range(self._topology.num_nodes):
            here_TK = parts_TK == self._topology.part_at(node, levels.rank)
            rows = here_TK.any(dim=1).nonzero().squeeze(1)
            self._rows_of.append(rows)
            ids_RK = torch.where(here_TK, ids_TK, -1)[rows].to(torch.int32)
            sent = x_TH if node == levels.node and not self._gathers_own else self._shard(x_TH)
            outgoing.append(ChosenRows(sent[rows.to(self._device)], ids_RK, weights_TK[rows].float()))
        self._own = outgoing[levels.node]
        self._exchange = levels.across.open_exchange()
        for turn in range(1, self._topology.num_nodes):
            node = self._after(turn)
            self._post(node, outgoing[node])
        self.counts: list[list[int]] = []

    @property
    def _gathers_own(self) -> bool:
        """Whether rows of the own node lie on some ranks of the expert group only."""
        return self._topology.sets_per_expert_group > 1

    def wait(self) -> ChosenRows:
        """Everything that came for the experts here, by node. Raises as the groups' collectives do."""
        levels, num_nodes = self._levels, self._topology.num_nodes
        arrived: list[list[ChosenRows]] = [[] for _ in range(num_nodes)]
        turns = range(1, num_nodes)
        if not self._gathers_own:
            arrived[levels.node] = [self._own]
        for nodes in self._rounds([*([levels.node] if self._gathers_own else []), *map(self._before, turns)]):
            shards = [self._own if node == levels.node else self._take(node) for node in nodes]
            for node, parts in zip(nodes, self._gather(shards), strict=True):
                arrived[node] = parts
        self.counts = [[part.rows.shape[0] for part in parts] for parts in arrived]
        flat = [part for parts in arrived for part in parts]
        result = ChosenRows(
            torch.cat([part.rows for part in flat]),
            torch.cat([part.ids_RK for part in flat]),
            torch.cat([part.weights_RK for part in flat]),
        )
        self.requests += ((levels.node, *each) for each in self._asked_of(levels.node))
        for turn in turns:  # only now: some of the parts are views of messages
            levels.across.release(self._exchange, self._before(turn))
        return result

    def combine(self, partial_RH: Tensor) -> Tensor:
        """[T, H]: the sums of what all experts made of the rows. `partial_RH`: this rank's share of the weighted sums
        of the rows that `wait` returned, in their order; ranks of an expert group are added. Raises as `wait` does."""
        levels, num_nodes = self._levels, self._topology.num_nodes
        exchange = levels.across.open_exchange()
        partial_RH = partial_RH.to(self._device)
        partials = torch.split(partial_RH, [sum(counts) for counts in self.counts])
        own = partial_RH
        for nodes in self._rounds([self._after(turn) for turn in range(1, num_nodes + 1)]):  # the own node is last
            shards = self._reduce([partials[node] for node in nodes], [self.counts[node] for node in nodes])
            for node, shard_RW in zip(nodes, shards, strict=True):
                if node == levels.node:
                    own = shard_RW
                else:
                    self._return(exchange, node, shard_RW)
        total = torch.zeros(self._num_rows, self._hidden // self._topology.num_shards, device=self._device)
        for node in range(num_nodes):
            rows = self._rows_of[node].to(self._device)
            if node == levels.node:
                total.index_add_(0, rows, own.float())
                continue
            came = levels.across.take(exchange, node).view(self._dtype).view(-1, total.shape[1])
            total.index_add_(0, rows, came.to(self._device).float())
            levels.across.release(exchange, node)
        return self._complete(total.to(self._dtype)).to(self._given)

    def _rounds(self, nodes: list[int]) -> list[list[int]]:
        """The nodes whose rows go through one inner collective together: fused each alone, else all."""
        if self._fused:
            return [[node] for node in nodes]
        return [nodes] if nodes else []

    # --- between nodes ---

    def _after(self, turn: int) -> int:
        return (self._levels.node + turn) % self._topology.num_nodes

    def _before(self, turn: int) -> int:
        return (self._levels.node - turn) % self._topology.num_nodes

    def _shard(self, x_TH: Tensor) -> Tensor:
        width = self._hidden // self._topology.num_shards
        shard = self._topology.shard_of(self._levels.rank)
        return x_TH[:, shard * width : (shard + 1) * width]

    def _post(self, node: int, part: ChosenRows) -> None:
        pieces = [part.ids_RK, part.weights_RK, part.rows.cpu()]
        if self._asked is not None:
            asked = torch.full((MOST_REQUESTS, 2), -1, dtype=torch.int32)
            for number, each in enumerate(self._asked_of(node)):
                asked[number] = torch.tensor(each)
            pieces.insert(0, asked)
        self._levels.across.post(self._exchange, node, pieces)
        self._levels.ledger.sent("across.dispatch", part.rows.nbytes)
        self._levels.ledger.sent("across.routing", part.ids_RK.nbytes + part.weights_RK.nbytes)

    def _asked_of(self, node: int) -> Sequence[tuple[int, int]]:
        return (self._asked or {}).get(self._topology.part_at(node, self._levels.rank), ())

    def _return(self, exchange: int, node: int, shard_RW: Tensor) -> None:
        self._levels.across.post(exchange, node, [shard_RW.cpu()])
        self._levels.ledger.sent("across.combine", shard_RW.nbytes)

    def _take(self, node: int) -> ChosenRows:
        """The shard that `node` sent, in host memory as views of its message."""
        message = self._levels.across.take(self._exchange, node)
        if self._asked is not None:
            asked: list[list[int]] = message[:_REQUEST_BYTES].view(torch.int32).view(-1, 2).tolist()
            self.requests += [(node, layer, expert) for layer, expert in asked if layer >= 0]
            message = message[_REQUEST_BYTES:]
        width = self._hidden // self._topology.num_shards
        row_bytes = width * self._dtype.itemsize
        num_rows = message.shape[0] // (row_bytes + _CHOICE_BYTES * self._top_k)
        sizes = [num_rows * n for n in (4 * self._top_k, 4 * self._top_k, row_bytes)]
        ids, weights, rows = torch.split(message, sizes)
        return ChosenRows(
            rows.view(self._dtype).view(num_rows, width).to(self._device),
            ids.view(torch.int32).view(num_rows, self._top_k),
            weights.view(torch.float32).view(num_rows, self._top_k),
        )

    # --- inside a node ---

    def _gather(self, shards: Sequence[ChosenRows]) -> list[list[ChosenRows]]:
        """Whole rows from the shards of the expert group, which came from some nodes: those of each attention group of
        each node that it serves."""
        group = self._levels.experts
        if group.size == 1:
            return [[shard] for shard in shards]
        rows = _joined([shard.rows for shard in shards])
        own_counts = [shard.rows.shape[0] for shard in shards]
        if not self._gathers_own:
            blocks = self._all_gather(group, rows, [rows.shape[0]] * group.size, "dispatch")
            by_node = torch.split(_side_by_side(blocks), own_counts)
            return [
                [ChosenRows(rows, shard.ids_RK, shard.weights_RK)] for rows, shard in zip(by_node, shards, strict=True)
            ]
        counts = group.all_gather(torch.tensor([own_counts]), [1] * group.size)
        sent = [_joined([shard.ids_RK for shard in shards]), _joined([shard.weights_RK for shard in shards]), rows]
        blocks, ids, weights = self._gather_uneven(group, sent, counts.sum(dim=1).tolist())
        found: list[list[ChosenRows]] = [[] for _ in shards]
        for first in range(0, group.size, self._topology.num_shards):
            whole = _side_by_side(blocks[first : first + self._topology.num_shards])
            pieces = (torch.split(tensor, counts[first].tolist()) for tensor in (whole, ids[first], weights[first]))
            for parts, (rows, ids_RK, weights_RK) in zip(found, zip(*pieces, strict=True), strict=True):
                parts.append(ChosenRows(rows, ids_RK, weights_RK))
        return found

    def _gather_uneven(
        self, group: RankGroup, sent: Sequence[Tensor], sizes: Sequence[int]
    ) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """Rows, choices and weights of all ranks, in one message a pair. `sent`: this rank's choices, weights, rows."""
        parts = [tensor.contiguous().to(self._device).view(torch.uint8) for tensor in sent]
        self._levels.ledger.sent("inside.dispatch", (group.size - 1) * sent[2].nbytes)
        self._levels.ledger.sent("inside.routing", (group.size - 1) * (sent[0].nbytes + sent[1].nbytes))
        together = torch.split(group.all_gather(torch.cat(parts, dim=1), sizes), list(sizes))
        pieces = [torch.split(block, [part.shape[1] for part in parts], dim=1) for block in together]
        ids, weights, rows = (
            [block[index].contiguous().view(tensor.dtype) for block in pieces] for index, tensor in enumerate(sent)
        )
        return rows, [each.cpu() for each in ids], [each.cpu() for each in weights]

    def _all_gather(self, group: RankGroup, rows: Tensor, counts: Sequence[int], purpose: str) -> list[Tensor]:
        self._levels.ledger.sent(f"inside.{purpose}", (group.size - 1) * rows.nbytes)
        return list(torch.split(group.all_gather(rows, counts), list(counts)))

    def _reduce(self, partials: Sequence[Tensor], counts: Sequence[Sequence[int]]) -> Sequence[Tensor]:
        """This rank's shard of the sums over the expert group, for the rows of each node: those of its own attention
        group. `counts[node][i]`: rows of attention group i."""
        group, shards = self._levels.experts, self._topology.num_shards
        if group.size == 1:
            return partials
        width = self._hidden // shards
        by_node = [torch.split(partial_RH, list(of)) for partial_RH, of in zip(partials, counts, strict=True)]
        by_group = [_joined(parts) for parts in zip(*by_node, strict=True)]
        stacked = torch.cat([part.reshape(-1, shards, width).transpose(0, 1).reshape(-1, width) for part in by_group])
        rows_by_rank = [part.shape[0] for part in by_group for _ in range(shards)]
        shard = group.reduce_scatter(stacked, rows_by_rank)
        self._levels.ledger.sent("inside.combine", stacked.nbytes - shard.nbytes)
        mine = group.rank // shards if len(by_group) > 1 else 0
        return torch.split(shard, [of[mine] for of in counts])

    def _complete(self, shard_TW: Tensor) -> Tensor:
        """Whole rows from the shards of the attention group. Where it spans several expert groups, each has the sum
        over its own part of the experts of every node, and they are added."""
        group, shards = self._levels.attention, self._topology.num_shards
        if group.size == 1:
            return shard_TW
        blocks = self._all_gather(group, shard_TW, [self._num_rows] * group.size, "combine")
        if group.size == shards:
            return _side_by_side(blocks)
        columns = []
        for shard in range(shards):
            total = blocks[shard].float()
            for block in blocks[shard + shards :: shards]:
                total = total + block.float()
            columns.append(total.to(self._dtype))
        return _side_by_side(columns)


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def _side_by_side(blocks: Sequence[Tensor]) -> Tensor:
    return blocks[0] if len(blocks) == 1 else torch.cat(list(blocks), dim=1)
