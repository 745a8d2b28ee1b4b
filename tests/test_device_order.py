"""What models compute waits for what was computed on another stream before; streams are stand-ins."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch

from pyrannc.job import device_order
from pyrannc.job.device_order import follow_the_last

GPU = torch.device("cuda", 0)


class Streams:
    """Of one GPU, by name.

    Attributes:
        current: on which something is computed.
        waits: who has waited for whom.
    """

    def __init__(self) -> None:
        self.known: dict[str, Stream] = {}
        self.current = self.of("main")
        self.waits: list[str] = []

    def of(self, name: str) -> Stream:
        return self.known.setdefault(name, Stream(name, self))

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before


class Stream:
    """One of them."""

    def __init__(self, name: str, streams: Streams) -> None:
        self.name, self._streams = name, streams

    def wait_stream(self, other: Stream) -> None:
        self._streams.waits.append(f"{self.name} for {other.name}")


@pytest.fixture
def follow() -> Iterator[Callable[[str], list[str]]]:
    """Who waits for whom when something is computed on a stream; its name begins with "graph" where it is recorded."""
    streams = Streams()

    def followed(name: str) -> list[str]:
        streams.waits.clear()
        with streams.on(streams.of(name)):
            follow_the_last(GPU)
        return list(streams.waits)

    with (
        patch.object(device_order, "_last", {}),
        patch.multiple(
            torch.cuda,
            current_stream=lambda _: streams.current,
            stream=streams.on,
            is_current_stream_capturing=lambda: streams.current.name.startswith("graph"),
        ),
    ):
        yield followed


def test_streams_follow_each_other(follow: Callable[[str], list[str]]) -> None:
    waits = [follow(name) for name in ("main", "main", "side", "side", "main", "third")]
    assert waits == [[], [], ["side for main"], [], ["main for side"], ["third for main"]]


def test_a_graph_of_the_script_waits_for_nothing_outside_of_it(follow: Callable[[str], list[str]]) -> None:
    waits = [follow(name) for name in ("main", "graph", "graph's branch", "main")]
    assert waits == [[], [], ["graph's branch for graph"], ["main for graph's branch"]]


def test_the_host_has_no_streams() -> None:
    follow_the_last(torch.device("cpu"))
