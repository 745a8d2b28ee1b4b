"""Measures a Graph's distinct Blocks and Spans, shared out over the ranks, and the links between ranks."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from pyrannc._native import Blocks, Profile
from pyrannc.blocks.randomness import Randomness
from pyrannc.core.partition import Parts
from pyrannc.core.profile import BlockPoint, Links, ProfileFacts
from pyrannc.job import agree, phases, process
from pyrannc.job.device_memory import collect
from pyrannc.job.progress import Bar
from pyrannc.log import get_logger
from pyrannc.profile.block import BlockCode, BlockSource
from pyrannc.profile.cache import Beside, BlocksKey, LinksKey, ProfileCache
from pyrannc.profile.conditions import Conditions, Surroundings, conditions, of_devices, surroundings
from pyrannc.profile.links import (
    buckets_to_sum,
    measure_collective_slowdown,
    measure_links,
    measure_products_slowdown,
)
from pyrannc.profile.measure import BlockMeter, slowed_down
from pyrannc.profile.meter import Meter
from pyrannc.profile.update import UpdatePoint, describe, measure_update

_log = get_logger("DPStaging")

_MOST_POINTS = 4


@dataclass(frozen=True)
class Runs:
    """All Blocks of a Graph, or all its Spans if it were one Stage.

    Attributes:
        parts: what belongs to each.
        source: the captured model, divided so.
    """

    blocks: Blocks
    parts: Parts
    source: BlockSource

    @property
    def hashes(self) -> list[str]:
        """Of each; those with the same compute the same."""
        return self.blocks.hashes

    @property
    def times_us(self) -> dict[str, float]:
        """Estimated time of each distinct one."""
        return dict(zip(self.hashes, self.blocks.times_us, strict=True))

    def code(self, place: int, device: torch.device) -> BlockCode:
        """One of them, ready to run."""
        return BlockCode(self.source, place, self.parts.stages[place], self.blocks.ops(place), device)


@dataclass(frozen=True)
class Subject:
    """What is profiled.

    Attributes:
        graph_hash: of the Graph.
        blocks: its Blocks.
        spans: its Spans, of which those of one Block are Blocks. They are what a Stage runs, compiled where it does
            that; a Block of a longer one is measured as it is, for its share.
        row_counts: for how many rows, increasing.
        hosts: the host of each rank.
        level_names: the levels of the links between ranks, from those inside a host outwards.
        optimizer: the user's, if there is one.
    """

    graph_hash: str
    blocks: Runs
    spans: Runs
    row_counts: tuple[int, ...]
    hosts: tuple[str, ...]
    level_names: tuple[str, ...]
    optimizer: Optimizer | None

    @property
    def times_us(self) -> dict[str, float]:
        """Estimated time of each distinct Block and Span."""
        return self.spans.times_us | self.blocks.times_us

    @property
    def leading(self) -> str:
        """The Span of which all together take most of a step."""
        counts, times_us = Counter(self.spans.hashes), self.spans.times_us
        return max(counts, key=lambda span: (counts[span] * times_us[span], span))

    def find(self, found: str) -> tuple[Runs, int]:
        """The first Block with a hash, else the first Span."""
        runs = self.blocks if found in self.blocks.hashes else self.spans
        return runs, runs.hashes.index(found)


def row_counts(batch_rows: int, world_size: int) -> tuple[int, ...]:
    """For how many rows to measure: up to what one rank has when all are Replicas and there is one microbatch.

    Every other division of a batch that is worth it gives a Replica fewer rows at a time, mostly a power of two fewer.

    >>> row_counts(512, 8)
    (1, 4, 16, 64)
    >>> row_counts(8, 8)
    (1,)
    """
    most = max(1, -(-batch_rows // world_size))
    ratio = 2
    while ratio ** (_MOST_POINTS - 1) < most:
        ratio *= 2
    return tuple(sorted({max(1, most // ratio**step) for step in range(_MOST_POINTS)}))


def profile(subject: Subject, device: torch.device, cache: ProfileCache) -> list[Profile]:
    """A Profile for each kind of device, from the cache or measured. All ranks call it.

    Returns:
        On rank 0, in the order of the ranks that have those devices first; nothing on other ranks.
    """
    source = subject.spans.source
    kind = conditions(
        device,
        fused_dropout=source.fused_dropout,
        compiled=source.compiler is not None,
        replayed=source.replayed,
        memory_budget_percent=source.memory_budget_percent,
    )
    own = kind, surroundings()
    told: list[tuple[Conditions, Surroundings]] = agree.gather_objects(own)
    blocks = _profiles_of_blocks(subject, device, cache, told)
    links = _links(subject, device, cache, told, blocks)
    return agree.together(lambda: [links.joined_to(profile) for profile in blocks])


_Told = Sequence[tuple[Conditions, Surroundings]]


def _profiles_of_blocks(subject: Subject, device: torch.device, cache: ProfileCache, told: _Told) -> list[Profile]:
    """Profiles without links. All ranks call it; only rank 0 gets them."""
    everyone = [kind for kind, _ in told]
    keys = [_blocks_key(subject, kind, told) for kind in dict.fromkeys(everyone)]
    first = process.get_rank() == 0
    known = agree.together(lambda: [cache.find(key, subject.row_counts) for key in keys] if first else [])
    if agree.broadcast_object(None not in known):
        return [found for found in known if found is not None]
    measured = _measure_blocks(subject, device, everyone)
    updates: list[UpdatePoint | None] = agree.gather_objects(
        measure_update(subject.optimizer, device, replayed=subject.spans.source.replayed)
    )

    def keep() -> list[Profile]:
        budget = subject.spans.source.memory_budget_percent
        profiles = [
            _seal(key, measured[key.conditions], updates[everyone.index(key.conditions)], budget) for key in keys
        ]
        for key, found in zip(keys, profiles, strict=True):
            cache.keep(key, found)
        return profiles

    return agree.together(lambda: keep() if first else [])


def _links(subject: Subject, device: torch.device, cache: ProfileCache, told: _Told, blocks: list[Profile]) -> Links:
    """What is between the ranks. All ranks call it; rank 0 needs it.

    Args:
        blocks: the Profiles, on rank 0.
    """
    if process.get_world_size() == 1:
        return Links()
    key = LinksKey(
        ranks_per_node=tuple(subject.hosts.count(host) for host in dict.fromkeys(subject.hosts)),
        level_names=subject.level_names,
        conditions=tuple(dict.fromkeys(kind.of_links() for kind, _ in told)),
        surroundings=tuple(dict.fromkeys(around for _, around in told)),
    )
    levels = _kept(cache, key, lambda: Links(tuple(measure_links(subject.hosts, subject.level_names, device))))
    if device.type != "cuda":
        return levels
    first = process.get_rank() == 0
    beside: Beside | None = agree.broadcast_object(agree.together(lambda: _beside(subject, blocks) if first else None))
    slowdown = _kept(cache, replace(key, beside=beside), lambda: Links((), _slowdown(subject, device, beside)))
    return Links(levels.levels, slowdown.collective_slowdown)


def _kept(cache: ProfileCache, key: LinksKey, measure: Callable[[], Links]) -> Links:
    """From the cache or measured. All ranks call it; rank 0 gets it."""
    first = process.get_rank() == 0
    known = agree.together(lambda: cache.find_links(key) if first else None)
    if agree.broadcast_object(known is not None):
        return known or Links()
    measured = measure()
    agree.together(lambda: cache.keep_links(key, measured) if first else None)
    return measured


def _beside(subject: Subject, blocks: Sequence[Profile]) -> Beside | None:
    """The leading Span with the most rows that fit on all devices; None if none do."""
    span, facts = subject.leading, [ProfileFacts.of(profile) for profile in blocks]
    fitting = [[point.rows for point in found.blocks.get(span, ()) if point.fits] for found in facts]
    if not all(fitting):
        return None
    rows = min(*map(max, fitting), subject.row_counts[-1])
    runs, place = subject.find(span)
    eager = any(runs.parts.stages[place].spans[-1].hash in found.eager_spans for found in facts)
    return Beside(span, rows, eager, tuple(sorted(subject.spans.source.starts)))


def _slowdown(subject: Subject, device: torch.device, beside: Beside | None) -> float | None:
    """What sums take from a Span; where it cannot run so on some rank, from products. All ranks call it."""
    found = None if beside is None else _slowdown_of(subject, device, beside)
    Meter(device).release()
    if found is not None:
        return found
    phases.note("what sums cost computations is measured beside products, not beside the leading span")
    return measure_products_slowdown(device)


def _slowdown_of(subject: Subject, device: torch.device, beside: Beside) -> float | None:
    """None on all ranks where one of them cannot run the Span so, or has no room for what is summed."""
    runs, place = subject.find(beside.span)
    meter = BlockMeter(device, replayed=subject.spans.source.replayed)
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        Randomness(device).borrowed(),
        meter.in_steps(partial(runs.code, place, device), beside.rows, eager=beside.eager) as step,
    ):
        buckets = None if step is None else _if_there_is_room(partial(buckets_to_sum, device))
        if not all(agree.gather_objects(buckets is not None)) or step is None or buckets is None:
            return None
        return measure_collective_slowdown(buckets, partial(_repeat, step))


def _if_there_is_room(make: Callable[[], list[Tensor]]) -> list[Tensor] | None:
    try:
        return make()
    except torch.OutOfMemoryError:
        return None


def _repeat(step: Callable[[], object], times: int) -> None:
    for _ in range(times):
        step()


def _blocks_key(subject: Subject, kind: Conditions, told: _Told) -> BlocksKey:
    return BlocksKey(
        graph_hash=subject.graph_hash,
        blocks=tuple(subject.times_us),
        starts=tuple(sorted(subject.spans.source.starts)),
        optimizer=describe(subject.optimizer),
        conditions=kind,
        surroundings=tuple(dict.fromkeys(of_devices(around) for other, around in told if other == kind)),
    )


def _measure_blocks(
    subject: Subject, device: torch.device, everyone: Sequence[Conditions]
) -> dict[Conditions, _Measured]:
    """What was measured on each kind of device. All ranks call it."""
    rank = process.get_rank()
    alike = [other for other, kind in enumerate(everyone) if kind == everyone[rank]]
    times_us = subject.times_us
    own = share_out(times_us, len(alike))[alike.index(rank)]
    blocks, spans = subject.blocks.hashes, subject.spans.hashes
    whole = len(set(spans) - set(blocks))
    told = f", and {whole} distinct runs of them" if whole else ""
    phases.note(f"measured {len(set(blocks))} distinct blocks of {len(blocks)}{told}")
    measured = agree.together(lambda: _measure_share(subject, device, {block: times_us[block] for block in own}))
    shares: list[_Share] = agree.gather_objects(measured)
    found = {kind: _Measured({}, set()) for kind in everyone}
    for kind, share in zip(everyone, shares, strict=True):
        found[kind].points.update(share.points)
        found[kind].eager_spans.update(share.eager_spans)
    for kind, share in zip(everyone, shares, strict=True):
        if share.slowdown is not None:
            points = _as_in_training(found[kind].points, share.slowdown)
            found[kind] = found[kind]._replace(points=points, message_slowdown=share.message_slowdown)
    return found


class _Measured(NamedTuple):
    """Of one kind of device: points by hash of the Block, what is not compiled, and by what share a message beside
    computations prolongs them."""

    points: dict[str, list[BlockPoint]]
    eager_spans: set[str]
    message_slowdown: float | None = None


class _Share(NamedTuple):
    """What one rank has measured, and how much longer the leading Block takes in a training and beside a message."""

    points: dict[str, list[BlockPoint]]
    eager_spans: set[str]
    slowdown: float | None
    message_slowdown: float | None


def _as_in_training(points: Mapping[str, Sequence[BlockPoint]], slowdown: float) -> dict[str, list[BlockPoint]]:
    if slowdown > 1.0:
        phases.note(f"a device that is busy all the time takes {slowdown - 1.0:.1%} longer")
    return {block: [slowed_down(point, slowdown) for point in found] for block, found in points.items()}


def share_out(times_us: Mapping[str, float], shares: int) -> list[list[str]]:
    """Divides Blocks into shares of about equal time: the longest first, each to the share with least so far.

    >>> share_out({"a": 1.0, "b": 5.0, "c": 4.0}, 2)
    [['b'], ['c', 'a']]
    """
    divided: list[list[str]] = [[] for _ in range(shares)]
    filled_us = [0.0] * shares
    for block in sorted(times_us, key=lambda block: (-times_us[block], block)):
        least = filled_us.index(min(filled_us))
        divided[least].append(block)
        filled_us[least] += times_us[block]
    return divided


def _measure_share(subject: Subject, device: torch.device, times_us: Mapping[str, float]) -> _Share:
    """The points of some Blocks; those that cannot be measured are left out."""
    points: dict[str, list[BlockPoint]] = {}
    shown = process.get_rank() == 0
    spans, leading = set(subject.spans.hashes), subject.leading
    # Launches cost the same for every Block.
    weights = {block: us + sum(times_us.values()) / len(times_us) for block, us in times_us.items()}
    with (
        # The plan is to train under, even if the first call does not.
        torch.inference_mode(False),
        torch.enable_grad(),
        Randomness(device).borrowed(),
        Bar("profiling blocks", sum(weights.values()), len(weights), shown=shown) as bar,
    ):
        meter = BlockMeter(device, replayed=subject.spans.source.replayed)
        for block in times_us:
            runs, place = subject.find(block)
            name = f"{'block' if runs is subject.blocks else 'span'} {place}"
            compiles, code = block in spans, partial(runs.code, place, device)
            found = meter.points(name, code, subject.row_counts, compiles=compiles, leads=block == leading)
            meter.release()
            _log.debug("%s measured: %s", name, found)
            if found is not None:
                points[block] = found
            bar.advance(weights[block])
    # Code that is measured again, under a memory budget, has as much of the device.
    collect(device)
    return _Share(points, meter.eager_spans, meter.slowdown, meter.message_slowdown)


def _seal(
    key: BlocksKey, measured: _Measured, update: UpdatePoint | None, memory_budget_percent: int | None
) -> Profile:
    content = {
        "graph_hash": key.graph_hash,
        "device": key.conditions.device,
        "precision": key.conditions.precision,
        "versions": dict(key.conditions.versions),
        "blocks": {block: [asdict(point) for point in points] for block, points in measured.points.items()},
        "eager_spans": sorted(measured.eager_spans),
        "memory_budget_percent": memory_budget_percent,
        "update": None if update is None else asdict(update),
        "message_slowdown": measured.message_slowdown,
    }
    return Profile.seal(json.dumps(content | asdict(Links())))
