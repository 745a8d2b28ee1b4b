"""What was measured of a Graph's Blocks and of the links.

The classes mirror the core's JSON (crates/cost: ``Profile``).
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from pyrannc._native import Profile


@dataclass(frozen=True)
class BlockPoint:
    """Cost of a Block for some rows: the core's ``BlockPoint``.

    Attributes:
        rows: number of rows.
        fits: False when the device's memory is too small; everything else is 0 then.
        forward_us: time of the forward on the device.
        backward_us: time of the whole backward on the device, gradients added up included.
        forward_host_us: time in which the host starts the forward; 0 where it computes itself.
        backward_host_us: time in which the host starts the whole backward; 0 where it computes itself.
        backward_input_us: of a backward in two parts, time of the first: the gradients of what came in.
        backward_weight_us: time of the second: the gradients of parameters.
        saved_bytes: what is held from the forward to the backward beyond what came in; results count.
        workspace_bytes: the most that either direction needs on top of that.
    """

    rows: int
    fits: bool = True
    forward_us: float = 0.0
    backward_us: float = 0.0
    forward_host_us: float = 0.0
    backward_host_us: float = 0.0
    backward_input_us: float = 0.0
    backward_weight_us: float = 0.0
    saved_bytes: int = 0
    workspace_bytes: int = 0


@dataclass(frozen=True)
class LinkPoint:
    """A link: the core's ``Link``.

    Attributes:
        latency_us: time of an empty message, or of one step of a collective.
        bytes_per_s: bandwidth of one device in one direction.
    """

    latency_us: float
    bytes_per_s: float


@dataclass(frozen=True)
class LevelPoint:
    """The links of one level: the core's ``MeasuredLevel``.

    Attributes:
        name: of the level.
        send: of messages.
        collective: of sums.
    """

    name: str
    send: LinkPoint
    collective: LinkPoint


@dataclass(frozen=True)
class ProfileFacts:
    """A Profile, as far as it is read here.

    Attributes:
        blocks: points of each Block, by its hash.
        levels: links, from the inner level out.
        eager_spans: hashes of the Spans that are not compiled.
    """

    blocks: dict[str, tuple[BlockPoint, ...]]
    levels: tuple[LevelPoint, ...]
    eager_spans: frozenset[str]

    @staticmethod
    def of(profile: Profile) -> ProfileFacts:
        """Reads a Profile."""
        content = json.loads(profile.to_json())
        return ProfileFacts(
            blocks={block: tuple(_point(item) for item in points) for block, points in content["blocks"].items()},
            levels=tuple(_level(item) for item in content["levels"]),
            eager_spans=frozenset(content.get("eager_spans", ())),
        )


@dataclass(frozen=True)
class Links:
    """What was measured between ranks.

    Attributes:
        levels: from the inner one out.
        collective_slowdown: see :func:`pyrannc.profile.links.measure_collective_slowdown`.
    """

    levels: tuple[LevelPoint, ...] = ()
    collective_slowdown: float | None = None

    @staticmethod
    def of(profile: Profile) -> Links:
        """Those of a Profile."""
        content = json.loads(profile.to_json())
        return Links(tuple(_level(item) for item in content["levels"]), content["collective_slowdown"])

    def joined_to(self, profile: Profile) -> Profile:
        """The Profile with these links."""
        return Profile.seal(json.dumps(json.loads(profile.to_json()) | asdict(self)))


def _point(item: dict[str, Any]) -> BlockPoint:
    return BlockPoint(**{name: item[name] for name in BlockPoint.__dataclass_fields__})


def _level(item: dict[str, Any]) -> LevelPoint:
    return LevelPoint(item["name"], _link(item["send"]), _link(item["collective"]))


def _link(item: dict[str, Any]) -> LinkPoint:
    return LinkPoint(item["latency_us"], item["bytes_per_s"])
