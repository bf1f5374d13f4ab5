"""`POST /placement`: taken or refused whole, with the reason, and for those who have a key."""

import json
from collections.abc import Iterator

import httpx
import pytest

from antiphon.specs.placement import ExpertPlacement, placement_to_json
from tests.serve.api_harness import Live, fake_engine, live

HERE = ExpertPlacement(2, {0: ((0,), (0,), (1,), (1,))})
MOVED = ExpertPlacement(2, {0: ((0, 1), (1,), (1,), (0,))})


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    with live(fake_engine(), api_keys=("secret",)) as running:
        yield running


def place(server: Live, text: str) -> httpx.Response:
    headers = {"authorization": "Bearer secret", "content-type": "application/json"}
    return httpx.post(f"{server.url}/placement", content=text, headers=headers)


def test_a_placement_is_taken(server: Live) -> None:
    answer = place(server, placement_to_json(MOVED))
    assert (answer.status_code, answer.json()) == (202, {"status": "moving", "experts_to_load": 3})
    assert server.engine.placement.owners == MOVED.owners
    assert place(server, placement_to_json(MOVED)).json() == {"status": "in place", "experts_to_load": 0}
    assert place(server, placement_to_json(HERE)).json()["experts_to_load"] == 2


def test_it_needs_the_key(server: Live) -> None:
    assert httpx.post(f"{server.url}/placement", json={}).status_code == 401


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"num_workers": 3, "owners": {"0": [[2], [0], [1], [1]]}}, "is for 3 expert workers, 2 run"),
        ({"num_workers": 2, "owners": {"0": [[2], [0], [1], [1]]}}, "expert 0 of layer 0 is placed on [2]"),
        ({"num_workers": 2, "owners": {"0": [[0], [], [1], [1]]}}, "expert 1 of layer 0 is placed on no worker"),
        ({"num_workers": 2, "owners": {"0": [[0], [0], [0], [0]]}}, "4 experts of layer 0 on worker 0, which has 3"),
        ({"num_workers": 2, "owners": {"0": [[0], [1]]}}, "has 2 experts in layer 0, this model has 4"),
        ({"num_workers": 2, "owners": {"1": [[0], [1]]}}, "is for layers 1 to 1, this model has experts in 0 to 0"),
        ({"num_workers": 2}, "the body is no placement"),
        ({"num_workers": 2, "owners": {}, "speeds": []}, "the body is no placement"),
    ],
)
def test_what_cannot_be_served_is_refused_whole(server: Live, body: object, message: str) -> None:
    before = server.engine.placement
    answer = place(server, json.dumps(body))
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]
    assert server.engine.placement is before
