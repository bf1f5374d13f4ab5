"""Who runs what: the command, environment and numbers of every rank of a run. Pure.

Ranks count through node 0, then node 1, ... The names are those of `torchrun` beside our own, so that
`torch.distributed.init_process_group()` needs nothing else.
"""

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from antiphon.base.errors import UserError

from . import topology

MASTER_PORT = 29500  # every box is a network of its own, so no other run can hold it
PLACEHOLDER = re.compile(r"\{(node|rank|local_rank|num_nodes|world_size|addresses|address(\d*))\}")


@dataclass(frozen=True, kw_only=True)
class RankPlan:
    """One process: where, which, what."""

    rank: int
    node: int
    local_rank: int
    args: list[str]
    env: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class NodeCommand:
    nodes: frozenset[int]
    args: list[str]


def parse_node_command(text: str, num_nodes: int) -> NodeCommand:
    """From `NODES:COMMAND`: nodes as 0 or 0,2 or 1-3, the command with a shell's quotes but without a shell."""
    where, colon, command = text.partition(":")
    if not colon or not re.fullmatch(r"\d+(-\d+)?(,\d+(-\d+)?)*", where):
        raise UserError(f"--node-command {text!r}; write NODES:COMMAND, as in 0:'python server.py' or 1,3-5:...")
    nodes: set[int] = set()
    for part in where.split(","):
        first, _, last = part.partition("-")
        nodes.update(range(int(first), int(last or first) + 1))
    if not nodes or max(nodes) >= num_nodes:
        raise UserError(f"--node-command {text!r} names nodes {where}; this box has nodes 0 to {num_nodes - 1}")
    try:
        args = shlex.split(command)
    except ValueError as error:
        raise UserError(f"--node-command {text!r}: {error}; close what is open") from None
    if not args:
        raise UserError(f"--node-command {text!r} has no command after the colon")
    return NodeCommand(nodes=frozenset(nodes), args=args)


def plan_ranks(
    *, num_nodes: int, num_local_ranks: int, command: Sequence[str], node_commands: Sequence[NodeCommand] = ()
) -> list[RankPlan]:
    """Every rank in order. `command` is for nodes that no entry of `node_commands` names; the last entry wins."""
    topology.check_num_nodes(num_nodes)
    if num_local_ranks < 1:
        raise UserError(f"{num_local_ranks} processes per node; give at least 1")
    chosen = {node: entry.args for entry in node_commands for node in entry.nodes}
    without = [node for node in range(num_nodes) if node not in chosen]
    if without and not command:
        raise UserError(f"no command for node {without[0]}; give one after -- or with --node-command")
    return [
        _plan(node, local_rank, num_nodes, num_local_ranks, chosen.get(node, command))
        for node in range(num_nodes)
        for local_rank in range(num_local_ranks)
    ]


def _plan(node: int, local_rank: int, num_nodes: int, num_local_ranks: int, command: Sequence[str]) -> RankPlan:
    rank, world_size = node * num_local_ranks + local_rank, num_nodes * num_local_ranks
    addresses = ",".join(topology.address(other) for other in range(num_nodes))
    numbers = {
        "node": str(node),
        "rank": str(rank),
        "local_rank": str(local_rank),
        "num_nodes": str(num_nodes),
        "world_size": str(world_size),
        "address": topology.address(node),
        "addresses": addresses,
    }
    env = {f"BOX_{name.upper()}": value for name, value in numbers.items()}
    env |= {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(local_rank)}
    env |= {"LOCAL_WORLD_SIZE": str(num_local_ranks), "GROUP_RANK": str(node)}
    env |= {"MASTER_ADDR": topology.address(0), "MASTER_PORT": str(MASTER_PORT)}
    args = [fill(argument, numbers, num_nodes) for argument in command]
    return RankPlan(rank=rank, node=node, local_rank=local_rank, args=args, env=env)


def fill(argument: str, numbers: dict[str, str], num_nodes: int) -> str:
    """Replace the placeholders; every other brace stays, because arguments may be JSON."""

    def value(match: re.Match[str]) -> str:
        if not match[2]:
            return numbers[match[1]]
        if int(match[2]) >= num_nodes:
            raise UserError(f"{match[0]} in {argument!r}; this box has nodes 0 to {num_nodes - 1}")
        return topology.address(int(match[2]))

    return PLACEHOLDER.sub(value, argument)
