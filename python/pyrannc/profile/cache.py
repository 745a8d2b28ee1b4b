"""Profiles on disk, so that the second start of a program measures nothing."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from pyrannc._native import Profile
from pyrannc.core.profile import BlockPoint, Links, ProfileFacts
from pyrannc.errors import ProfileError
from pyrannc.files import write_atomically
from pyrannc.job import phases
from pyrannc.log import get_logger
from pyrannc.profile.conditions import Conditions, Surroundings

_log = get_logger("DPStaging")


_COVERS = 16
"""A Profile serves so many times fewer rows than it was measured for."""


@dataclass(frozen=True)
class BlocksKey:
    """What the Blocks of a Graph were measured for, on any number of devices.

    Attributes:
        graph_hash: of the Graph.
        blocks: distinct hashes of its Spans and Blocks.
        starts: its outputs that get gradients from outside.
        optimizer: what the time of the optimizer depends on.
        conditions: on the devices.
        surroundings: of the ranks with such devices, each once, as far as devices depend on them.
    """

    graph_hash: str
    blocks: tuple[str, ...]
    starts: tuple[int, ...]
    optimizer: str
    conditions: Conditions
    surroundings: tuple[Surroundings, ...]


@dataclass(frozen=True)
class Beside:
    """A Span that runs while gradients are summed.

    Attributes:
        span: its hash.
        rows: with which it runs.
        eager: it is not compiled.
        starts: the Graph's outputs that get gradients from outside.
    """

    span: str
    rows: int
    eager: bool
    starts: tuple[int, ...]


@dataclass(frozen=True)
class LinksKey:
    """What the links between ranks were measured for, or what sums over them take from computations.

    Attributes:
        ranks_per_node: how the ranks are spread.
        level_names: the levels of the links.
        conditions: on the devices, each once.
        surroundings: of all ranks, each once.
        beside: what was computed meanwhile; None for the links alone.
    """

    ranks_per_node: tuple[int, ...]
    level_names: tuple[str, ...]
    conditions: tuple[Conditions, ...]
    surroundings: tuple[Surroundings, ...]
    beside: Beside | None = None


class ProfileCache:
    """A folder of profile files: those of Blocks have no links, those of links no Blocks. Only rank 0 uses it.

    Args:
        folder: None for a cache that keeps nothing.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    def find(self, key: BlocksKey, row_counts: Sequence[int]) -> Profile | None:
        """The Profile that was kept under ``key``, if it tells what ``row_counts`` cost, which increase.

        One that cannot be used counts as none, with a warning.
        """
        profile = self._read(key)
        if profile is None:
            return None
        if not _is_of(profile, key):
            _log.warning("ignoring the profile in %s: it was measured for something else than its name says",
                         self._path(key))  # fmt: skip
            return None
        if not all(map(_covers(row_counts), ProfileFacts.of(profile).blocks.values())):
            return None
        phases.note(f"from the cache, {self._path(key)}")
        return profile

    def find_links(self, key: LinksKey) -> Links | None:
        """The links that were kept under ``key``."""
        profile = self._read(key)
        if profile is None:
            return None
        if profile.graph_hash != _digest(key):
            _log.warning("ignoring the links in %s: they were measured for others than its name says", self._path(key))
            return None
        return Links.of(profile)

    def keep(self, key: BlocksKey, profile: Profile) -> None:
        """Writes a Profile; a folder that cannot be written is no failure, but a warning."""
        if self._write(key, profile):
            phases.note(f"kept in {self._path(key)}")

    def keep_links(self, key: LinksKey, links: Links) -> None:
        """Writes links, likewise."""
        nothing: dict[str, object] = {"device": "", "precision": "", "versions": {}, "blocks": {}, "update": None}
        content = nothing | {"graph_hash": _digest(key)} | asdict(links)
        self._write(key, Profile.seal(json.dumps(content)))

    def _path(self, key: BlocksKey | LinksKey) -> Path | None:
        return None if self._folder is None else self._folder / f"{_digest(key)}.json"

    def _read(self, key: BlocksKey | LinksKey) -> Profile | None:
        path = self._path(key)
        try:
            return Profile.read(path) if path is not None and path.exists() else None
        except (ProfileError, OSError) as error:
            _log.warning("ignoring the profile in %s: %s", path, error)
            return None

    def _write(self, key: BlocksKey | LinksKey, profile: Profile) -> bool:
        path = self._path(key)
        if path is None:
            return False
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, profile.to_json())
        except OSError as error:
            _log.warning("the profile is not kept for the next start: %s", error)
            return False
        return True


def _digest(key: BlocksKey | LinksKey) -> str:
    """A name that no other key has."""
    return hashlib.sha256(json.dumps([type(key).__name__, asdict(key)]).encode()).hexdigest()[:32]


def _covers(row_counts: Sequence[int]) -> Callable[[Sequence[BlockPoint]], bool]:
    """Whether what was measured of a Block tells what these row counts cost, of which none is measured far below."""
    least, most = row_counts[0], row_counts[-1]

    def covers(points: Sequence[BlockPoint]) -> bool:
        first, last = points[0], points[-1]
        reaches = not last.fits or most <= last.rows
        return first.rows <= least and reaches and last.rows <= _COVERS * most

    return covers


def default_folder() -> Path:
    """Where this user's profiles are."""
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "pyrannc"


def _is_of(profile: Profile, key: BlocksKey) -> bool:
    conditions = key.conditions
    return (
        profile.graph_hash == key.graph_hash
        and profile.device == conditions.device
        and profile.precision == conditions.precision
        and profile.versions == dict(conditions.versions)
        and set(profile.block_hashes) <= set(key.blocks)
    )
