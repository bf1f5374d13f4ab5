"""Who takes part: our transports, and what they are compared with.

| name | what it is |
|---|---|
| shm, tcp, libfabric | ours; "in place": the payload lies in the slot before the clock starts, nothing is copied |
| gloo | `torch.distributed` isend and irecv, a four-byte message back as acknowledgement |
| gloo-all-to-all | one `all_to_all_single` for the data and one for the acknowledgements |
| mpi | persistent sends and receives between ranks of one `mpiexec`, the same acknowledgement |
| ucx | tagged messages of UCX, the same acknowledgement |
| memcpy | as many processes as cores copy the same bytes through shared memory, with a barrier: the machine's bound |
"""

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from antiphon.base.allowance import allowance
from antiphon.base.errors import UserError
from antiphon.bench.m2n.api import Role, Seat, Traffic
from antiphon.bench.m2n.launch import find_mpiexec

TRANSPORTS = ("shm", "tcp", "libfabric")
BASELINES = ("gloo", "gloo-all-to-all", "memcpy", "mpi", "ucx")
WAITING = ("auto", "poll", "spin", "block")


@dataclass(frozen=True, kw_only=True)
class Contestant:
    """`kind` is the implementation (see `process.MODULES`), `options` are its own; reports show `transport`."""

    name: str
    transport: str
    kind: str
    options: Mapping[str, str] = field(default_factory=dict)
    in_place: bool = False

    def seats(self, traffic: Traffic, timeout_s: float) -> list[Seat]:
        """Its processes for rounds of `traffic`, by rank."""
        places: list[tuple[Role, int, bool]] = []
        if self.kind == "memcpy":
            num_copiers = min(allowance().num_cores, traffic.num_processes)
            places += [("copier", index, True) for index in range(num_copiers)]
        else:
            places += [("sender", index, True) for index in range(traffic.num_senders)]
            places += [("receiver", index, traffic.both_ways) for index in range(traffic.num_receivers)]
        return [
            Seat(
                role=role,
                index=index,
                rank=rank,
                num_seats=len(places),
                timed=timed,
                traffic=traffic,
                timeout_s=timeout_s,
            )
            for rank, (role, index, timed) in enumerate(places)
        ]


def choose_contestants(
    transports: Sequence[str], baselines: Sequence[str], *, in_place: bool, waiting: str
) -> list[Contestant]:
    """Contestants by name, ours first; `in_place` adds a second form of each of ours. `UserError` for unknown names."""
    if waiting not in WAITING:
        raise UserError(f"--waiting {waiting} does not exist: use one of {', '.join(WAITING)}")
    chosen = []
    for name in transports:
        if name not in TRANSPORTS:
            why = " connects threads of one process only" if name == "loopback" else " does not exist"
            raise UserError(f"--transport {name}{why}: use some of {', '.join(TRANSPORTS)}")
        chosen += [_ours(name, False, waiting), *([_ours(name, True, waiting)] if in_place else [])]
    for name in baselines:
        if name not in BASELINES:
            raise UserError(f"--against {name} is not known: use some of {', '.join(BASELINES)}")
        if name == "mpi":
            find_mpiexec()  # or say what is missing before anything starts
        if name == "ucx" and importlib.util.find_spec("ucxx") is None:
            raise UserError("--against ucx: there is no ucxx here: pip install 'antiphon[ucx]'")
        chosen.append(Contestant(name=name, transport=name, kind=name))
    if not chosen:
        raise UserError("nothing to measure: give --transport or --against")
    if len({contestant.name for contestant in chosen}) < len(chosen):
        raise UserError("--transport and --against may name each only once")
    return chosen


def _ours(transport: str, in_place: bool, waiting: str) -> Contestant:
    return Contestant(
        name=f"{transport} in place" if in_place else transport,
        transport=transport,
        kind="antiphon",
        options={"transport": transport, "waiting": waiting, "in_place": "yes" if in_place else "no"},
        in_place=in_place,
    )
