"""Peers meet at one address; who is missing is named."""

import threading
import time
from pathlib import Path

import pytest

from antiphon.base.errors import PeerLost, PeerTimeout, UserError
from antiphon.comm.m2n.rendezvous import Rendezvous


def test_tickets_are_found_whatever_comes_first() -> None:
    server = Rendezvous("127.0.0.1:0", serve=True)
    client = Rendezvous(server.address)
    client.publish("experts[0]", b"\x00ticket\xff")
    late = threading.Timer(0.1, client.publish, args=("experts[1]", b"second"))
    late.start()
    assert server.collect(["experts[0]", "experts[1]"], 10.0) == {
        "experts[0]": b"\x00ticket\xff",
        "experts[1]": b"second",
    }
    late.join()


def test_a_restarted_peer_replaces_its_ticket() -> None:
    server = Rendezvous("127.0.0.1:0", serve=True)
    server.publish("experts[0]", b"old")
    server.publish("experts[0]", b"new")
    assert server.collect(["experts[0]"], 1.0) == {"experts[0]": b"new"}


def test_the_missing_are_listed() -> None:
    server = Rendezvous("127.0.0.1:0", serve=True)
    server.publish("attention[0]", b"here")
    started = time.monotonic()
    with pytest.raises(PeerTimeout, match=r"experts\[0\], experts\[1\] within 0.2 s") as caught:
        server.collect(["attention[0]", "experts[0]", "experts[1]"], 0.2)
    assert caught.value.peers == ["experts[0]", "experts[1]"]
    assert time.monotonic() - started < 30.0


def test_nobody_there_is_a_timeout_that_names_the_address() -> None:
    with pytest.raises(PeerTimeout, match=r"127\.0\.0\.1:1 within"):
        Rendezvous("127.0.0.1:1", timeout_s=1.0)


def test_the_server_listens_only_where_it_was_told() -> None:
    server = Rendezvous("127.0.0.1:0", serve=True)
    port = int(server.address.rpartition(":")[2])
    listening = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            address, state = line.split()[1], line.split()[3]
            if state == "0A" and int(address.split(":")[1], 16) == port:
                listening.append(address)
    assert listening == [f"0100007F:{port:04X}"]


def test_tickets_and_numbers_of_one_name_do_not_mix() -> None:
    meeting = Rendezvous("127.0.0.1:0", serve=True, timeout_s=10.0)
    meeting.publish("a", b"\x01\x02")
    assert (meeting.number("a"), meeting.number("a")) == (0, 1)
    assert meeting.collect((name for name in "a"), 1.0) == {"a": b"\x01\x02"}


def test_timeouts_and_names_that_cannot_be_are_refused() -> None:
    for timeout_s in (float("inf"), float("nan"), -1.0):
        with pytest.raises(UserError, match="a timeout of"):
            Rendezvous("127.0.0.1:0", serve=True, timeout_s=timeout_s)
    meeting = Rendezvous("127.0.0.1:0", serve=True, timeout_s=10.0)
    with pytest.raises(UserError, match="a timeout of nan s"):
        meeting.collect(["a"], float("nan"))
    with pytest.raises(UserError, match="names are 'ab': give a list"):
        meeting.collect("ab", 1.0)


def test_a_server_that_is_gone_is_named() -> None:
    meeting = Rendezvous("127.0.0.1:0", serve=True, timeout_s=10.0)
    other, address = Rendezvous(meeting.address, timeout_s=10.0), meeting.address
    del meeting
    with pytest.raises(PeerLost, match=f"lost rendezvous at {address}"):
        other.collect(["a"], 5.0)
