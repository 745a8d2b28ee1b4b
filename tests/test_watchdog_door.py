"""Where the watchdog of rank 0 listens: who is let in, and who is not."""

from __future__ import annotations

import json
import os
import socket
import time

import pytest

from pyrannc._native import Watchdog
from pyrannc.errors import PeerError


def port_of(dog: Watchdog) -> int:
    return int(dog.address.partition(",")[0].partition("/")[0].rpartition(":")[2])


def shake_hands(dog: Watchdog, rank: int, world_size: int) -> socket.socket:
    """What a rank says first, by hand."""
    hello = {"hello": {"token": dog.address.rpartition("/")[2], "rank": rank, "world_size": world_size}}
    connection = socket.create_connection(("127.0.0.1", port_of(dog)))
    connection.sendall(json.dumps(hello).encode() + b"\n")
    answer = b'"welcome"\n'
    # Not a byte more: the next line may have come already.
    assert connection.recv(len(answer), socket.MSG_WAITALL) == answer
    return connection


def test_strangers_are_ignored() -> None:
    dog = Watchdog.listen(2, "127.0.0.1", heartbeat_s=0.05)
    port = port_of(dog)
    for line in (b"", b"GET / HTTP/1.1\r\n\r\n", b'{"hello":{"token":"","rank":1,"world_size":2}}\n'):
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(line)
    peer = Watchdog.connect(dog.address, 1, 2)
    peer.close()
    dog.close()


def test_errors_of_connect() -> None:
    dog = Watchdog.listen(3, "127.0.0.1")
    with pytest.raises(PeerError, match="refused rank 1: it counts 2 ranks, rank 0 counts 3"):
        Watchdog.connect(dog.address, 1, 2)
    Watchdog.connect(dog.address, 1, 3).close()
    with pytest.raises(PeerError, match="there is a rank 1 already"):
        Watchdog.connect(dog.address, 1, 3)
    with pytest.raises(PeerError, match="is not the address of a watchdog"):
        Watchdog.connect("127.0.0.1", 1, 2)
    with pytest.raises(PeerError, match=r"cannot reach rank 0 at 127\.0\.0\.1:9: Connection refused"):
        Watchdog.connect("127.0.0.1:9/x", 1, 2, connect_timeout_s=0.1)
    with pytest.raises(ValueError, match="heartbeat_s must be a positive number of seconds, not 0"):
        Watchdog.listen(2, "127.0.0.1", heartbeat_s=0)
    with pytest.raises(ValueError, match=r"rank must be in 1\.\.2, not 2"):
        Watchdog.connect(dog.address, 2, 2)
    dog.close()


def test_nobody_orders_rank_0_to_stop() -> None:
    dog = Watchdog.listen(2, "127.0.0.1", heartbeat_s=0.05)
    with shake_hands(dog, 1, 2) as rank:
        rank.sendall(b'{"stop":{"cause":"x","said_by":null,"grace_ms":0}}\n"bye"\n')
        time.sleep(0.3)
    dog.close()


def test_the_door_is_closed_behind_the_last_rank() -> None:
    dog = Watchdog.listen(3, "127.0.0.1")
    with shake_hands(dog, 2, 3) as second, shake_hands(dog, 1, 3) as first:
        time.sleep(0.3)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(first.getpeername())
        for rank in (first, second):
            rank.sendall(b'"bye"\n')
        dog.close()


def test_silent_callers_keep_no_rank_out() -> None:
    """64 at a time are heard out, for 5 s in all, however they spread what they say."""
    dog = Watchdog.listen(2, "127.0.0.1")
    strangers = [socket.create_connection(("127.0.0.1", port_of(dog))) for _ in range(70)]
    start = time.monotonic()
    for _ in range(10):
        for stranger in strangers:
            stranger.sendall(b"x")
        time.sleep(0.4)
    peer = Watchdog.connect(dog.address, 1, 2)
    assert 4 < time.monotonic() - start < 8
    strangers[69].settimeout(0.1)
    assert strangers[0].recv(1) == b""
    with pytest.raises(TimeoutError):
        strangers[69].recv(1)
    for stranger in strangers:
        stranger.close()
    peer.close()
    dog.close()


@pytest.mark.parametrize(
    ("host", "elsewhere"), [("127.0.0.1", "127.0.0.2"), ("localhost", "127.0.0.2"), ("::1", "127.0.0.1")]
)
def test_it_listens_where_it_says_and_nowhere_else(host: str, elsewhere: str) -> None:
    # Another program may have a port of the same number there.
    assert any(_refuses(host, elsewhere) for _ in range(3))


def _refuses(host: str, elsewhere: str) -> bool:
    dog = Watchdog.listen(2, host)
    try:
        socket.create_connection((elsewhere, port_of(dog))).close()
    except ConnectionRefusedError:
        Watchdog.connect(dog.address, 1, 2).close()
        return True
    finally:
        dog.close()
    return False


def test_all_addresses_are_tried() -> None:
    dog = Watchdog.listen(2, os.uname().nodename)
    good, token = dog.address.rsplit("/", 1)
    Watchdog.connect(f"127.0.0.1:9,[::1]:9,no-such-host.invalid:9,{good}/{token}", 1, 2).close()
    dog.close()
