"""Profiles on disk, so that the second start of a program measures nothing."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from pyrannc._native import Profile
from pyrannc.errors import ProfileError
from pyrannc.job import phases
from pyrannc.log import get_logger
from pyrannc.profile.conditions import Conditions, Surroundings

_log = get_logger("DPStaging")


@dataclass(frozen=True)
class Key:
    """What a Profile was measured for.

    Attributes:
        graph_hash: of the Graph.
        blocks: hashes of its Blocks, in order.
        row_counts: at which the Blocks were measured.
        ranks_per_node: how the ranks are spread, for the links.
        optimizer: what the time of the optimizer depends on.
        conditions: on the devices.
        surroundings: of all ranks, each once.
    """

    graph_hash: str
    blocks: tuple[str, ...]
    row_counts: tuple[int, ...]
    ranks_per_node: tuple[int, ...]
    optimizer: str
    conditions: Conditions
    surroundings: tuple[Surroundings, ...]

    def file_name(self) -> str:
        """A name that no other key has."""
        return hashlib.sha256(json.dumps(asdict(self)).encode()).hexdigest()[:32] + ".json"


class ProfileCache:
    """A folder of profile files. Only rank 0 uses it.

    Args:
        folder: None for a cache that keeps nothing.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    def find(self, key: Key) -> Profile | None:
        """The Profile that was kept under ``key``; one that cannot be used counts as none, with a warning."""
        if self._folder is None:
            return None
        path = self._folder / key.file_name()
        try:
            if not path.exists():
                return None
            profile = Profile.read(path)
        except (ProfileError, OSError) as error:
            _log.warning("ignoring the profile in %s: %s", path, error)
            return None
        if not _is_of(profile, key):
            _log.warning("ignoring the profile in %s: it was measured for something else than its name says", path)
            return None
        phases.note(f"from the cache, {path}")
        return profile

    def keep(self, key: Key, profile: Profile) -> None:
        """Writes a Profile; a folder that cannot be written is no failure, but a warning."""
        if self._folder is None:
            return
        path = self._folder / key.file_name()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, profile.to_json())
        except OSError as error:
            _log.warning("the profile is not kept for the next start: %s", error)
            return
        phases.note(f"kept in {path}")


def default_folder() -> Path:
    """Where this user's profiles are."""
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "pyrannc"


def write_atomically(path: Path, text: str) -> None:
    """Writes a file that is whole whenever it is there.

    Raises:
        OSError: it cannot be written.
    """
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=path.name, delete=False) as file:
        try:
            file.write(text)
            file.close()
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise


def _is_of(profile: Profile, key: Key) -> bool:
    conditions = key.conditions
    return (
        profile.graph_hash == key.graph_hash
        and profile.device == conditions.device
        and profile.precision == conditions.precision
        and profile.versions == dict(conditions.versions)
        and set(profile.block_hashes) <= set(key.blocks)
    )
