"""What ranks that exchange tiles are told of each other."""

import os
from functools import partial
from pathlib import Path
from typing import Any

import torch

from antiphon.comm.m2n import tile_links
from antiphon.comm.mesh import Sizes, connect
from antiphon.models.config import model_spec
from antiphon.train.setup import connect_tiles
from tests.comm.ranks import on_ranks
from tests.models.conftest import family_config

RANKS = 4


def told(kernels: Path, rank: int) -> list[int]:
    """With how many others each link of this rank believes to share cores: on one machine, and on two. Each rank is
    alone on its node, as in a container, and half of them are in its group."""
    os.environ["LOCAL_WORLD_SIZE"] = "1"
    spec = model_spec(family_config("mixtral", num_hidden_layers=1).to_dict())
    mesh, found, endpoint = connect(Sizes(world_size=RANKS, expert=2), rank, 60), list[int](), tile_links._m2n.Endpoint

    def noted(*arguments: Any, local_processes: int, **options: Any) -> Any:
        found.append(local_processes)
        return endpoint(*arguments, local_processes=local_processes, **options)

    tile_links._m2n.Endpoint = noted  # type: ignore[assignment, misc]
    for kernel in (tile_links.KERNEL, kernels / str(rank // 3)):
        tile_links.KERNEL = kernel
        for links in connect_tiles(spec, 128, mesh):
            torch.distributed.barrier()
            links.close()
    return found


def test_ranks_that_share_cores_are_counted_whatever_their_nodes_are(tmp_path: Path) -> None:
    """Else each of them looks for tiles without end, on cores that the others need."""
    for machine in ("0", "1"):
        (tmp_path / machine).write_text(machine)
    assert on_ranks(RANKS, tmp_path, partial(told, tmp_path)) == [[4, 3], [4, 3], [4, 3], [4, 1]]
