"""What was measured of a Graph's Blocks and of the links.

The classes mirror the core's JSON (crates/cost: ``Profile``).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from pyrannc._native import Profile


@dataclass(frozen=True)
class BlockPoint:
    """Cost of a Block for some rows; the meanings stand at ``profile.measure.Point``, which writes it."""

    rows: int
    fits: bool
    forward_us: float
    backward_us: float
    backward_input_us: float
    backward_weight_us: float
    saved_bytes: int


@dataclass(frozen=True)
class Link:
    """A link between devices."""

    latency_us: float
    bytes_per_s: float


@dataclass(frozen=True)
class Level:
    """The links of one level: of messages, and of collectives."""

    name: str
    send: Link
    collective: Link


@dataclass(frozen=True)
class ProfileFacts:
    """A Profile, as far as it is read here: points of each Block by its hash, and links from the inner level out."""

    blocks: dict[str, tuple[BlockPoint, ...]]
    levels: tuple[Level, ...]

    @staticmethod
    def of(profile: Profile) -> ProfileFacts:
        """Reads a Profile."""
        content = json.loads(profile.to_json())
        return ProfileFacts(
            blocks={block: tuple(_point(item) for item in points) for block, points in content["blocks"].items()},
            levels=tuple(_level(item) for item in content["levels"]),
        )


def _point(item: dict[str, Any]) -> BlockPoint:
    return BlockPoint(**{name: item[name] for name in BlockPoint.__dataclass_fields__})


def _level(item: dict[str, Any]) -> Level:
    return Level(item["name"], _link(item["send"]), _link(item["collective"]))


def _link(item: dict[str, Any]) -> Link:
    return Link(item["latency_us"], item["bytes_per_s"])
