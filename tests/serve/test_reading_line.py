"""How much one turn of the event loop handles, and of whom: counted in turns and requests, not in seconds."""

import asyncio
import itertools
from dataclasses import dataclass, field

import pytest

from antiphon.serve.api.guard.connections import ReadingLine
from tests.serve.api_harness import Live, fake_engine, live, post, read_answer

GET = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"


@dataclass(eq=False)
class Client:
    """Stands in the line again behind each piece, until it has no more."""

    line: ReadingLine
    num_pieces: int
    starts: bool = False
    turns: list[int] = field(default_factory=list)  # in which its pieces were taken

    def take_piece(self) -> bool:
        self.turns.append(self.line.num_turns)
        self.num_pieces -= 1
        if self.num_pieces:
            self.line.add(self, is_first=False)
        return self.starts


async def until_empty(line: ReadingLine) -> None:
    while line:
        await asyncio.sleep(0)


def test_one_turn_takes_a_few_pieces_whatever_waits() -> None:
    async def run() -> tuple[list[int], list[int]]:
        line = ReadingLine()
        readers = [Client(line, 1) for _ in range(400)]
        starters = [Client(line, 1, starts=True) for _ in range(100)]
        for client in (*readers, *starters):
            line.add(client, is_first=True)
        await until_empty(line)
        return [client.turns[0] for client in readers], [client.turns[0] for client in starters]

    for turns, most in zip(asyncio.run(run()), (8, 2), strict=True):
        assert max(len(list(same)) for _, same in itertools.groupby(sorted(turns))) <= most


@pytest.mark.parametrize("starts", [False, True])
def test_a_newcomer_is_next_among_thousands_that_go_on(starts: bool) -> None:
    async def run() -> tuple[int, list[Client]]:
        line = ReadingLine()
        crowd = [Client(line, 20, starts=starts) for _ in range(2500)]
        for client in crowd:
            line.add(client, is_first=False)
        for _ in range(10):
            await asyncio.sleep(0)
        newcomer, before = Client(line, 1), line.num_turns
        line.add(newcomer, is_first=True)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return newcomer.turns[0] - before, crowd

    waited_turns, crowd = asyncio.run(run())
    assert waited_turns == 1
    assert max(len(client.turns) for client in crowd) == 1, "one went on twice before all had gone on once"


def test_those_that_go_on_move_on_in_a_crowd_of_newcomers() -> None:
    async def run() -> int:
        line = ReadingLine()
        patient = Client(line, 1)
        line.add(patient, is_first=False)
        for _ in range(1000):
            line.add(Client(line, 1, starts=True), is_first=True)
        while not patient.turns:
            await asyncio.sleep(0)
        return patient.turns[0]

    assert asyncio.run(run()) <= 8


def test_a_few_are_taken_in_the_order_of_arrival() -> None:
    async def run() -> list[int]:
        line = ReadingLine()
        clients = [Client(line, 1, starts=True) for _ in range(16)]
        for client in clients:
            line.add(client, is_first=True)
        await until_empty(line)
        return [client.turns[0] for client in clients]

    assert asyncio.run(run()) == [turn // 2 for turn in range(2, 18)]


def test_the_newest_is_next_in_a_crowd_that_came_at_once_and_the_oldest_is_soon() -> None:
    async def run() -> list[int]:
        line = ReadingLine()
        clients = [Client(line, 1, starts=True) for _ in range(2000)]
        for client in clients:
            line.add(client, is_first=True)
        for _ in range(10):
            await asyncio.sleep(0)
        newest = Client(line, 1, starts=True)
        before = line.num_turns
        line.add(newest, is_first=True)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return [newest.turns[0] - before, clients[0].turns[0]]

    waited_turns, turn_of_oldest = asyncio.run(run())
    assert waited_turns == 1
    assert turn_of_oldest <= 4


def test_a_line_outlives_what_leaves_it() -> None:
    async def run() -> list[int]:
        line = ReadingLine()
        clients = [Client(line, 1) for _ in range(3)]
        for client in clients:
            line.add(client, is_first=True)
        line.discard(clients[1])
        await until_empty(line)
        return [len(client.turns) for client in clients]

    assert asyncio.run(run()) == [1, 0, 1]


def crowded(server: Live, data: bytes, num: int) -> list[int]:
    """Starts of requests seen in each of the server's turns while `num` clients send `data` at once."""
    starts: list[int] = []
    line = server.server._connections.line
    begin_turn = line._begin_turn

    def counting() -> None:
        starts.append(line._num_starts)  # of the turn that has ended
        begin_turn()

    line._begin_turn = counting  # type: ignore[method-assign]
    clients = [server.connect() for _ in range(num)]
    try:
        for client in clients:
            client.sendall(data)
        for client in clients:
            assert read_answer(client)[0] == 200
    finally:
        for client in clients:
            client.close()
    return starts


@pytest.mark.parametrize(
    "data",
    [GET * 20, post("/v1/completions", {"prompt": "x", "max_tokens": 1})],
    ids=["pipelined", "completions"],
)
def test_the_server_starts_two_requests_in_a_turn_at_most(data: bytes) -> None:
    with live(fake_engine()) as server:
        starts = crowded(server, data, 40)
        assert sum(starts) >= 40
        assert max(starts) <= 2


def test_pipelined_requests_take_turns_and_all_are_answered() -> None:
    with live(fake_engine()) as server:
        clients = [server.connect() for _ in range(20)]
        for client in clients:
            client.sendall(GET * 50)
        with server.connect() as newcomer:
            newcomer.sendall(GET)
            assert read_answer(newcomer)[0] == 200
        for client in clients:
            received = b""
            while received.count(b"HTTP/1.1 200 ") < 50:
                part = client.recv(65536)
                assert part, received[-300:]
                received += part
            client.close()


def test_a_large_body_arrives_whole_in_a_crowd() -> None:
    with live(fake_engine(max_model_len=100_000)) as server:
        clients = [server.connect() for _ in range(15)]
        body = post("/tokenize", {"prompt": "x", "model": " " * 200_000})
        for client in clients:
            client.sendall(body)
        lengths = set()
        for client in clients:
            status, _, answer = read_answer(client)
            assert status == 404, answer[:300]  # which names what came
            lengths.add(len(answer))
            client.close()
        assert len(lengths) == 1
