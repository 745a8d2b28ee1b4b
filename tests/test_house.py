"""The arrows of the house: which package of ``pyrannc`` may import which, and who may talk to other ranks."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

HOUSE = Path(__file__).parents[1] / "python" / "pyrannc"

ALL = {"capture", "core", "blocks", "job", "profile", "call", "store", "planning", "runtime", "checkpoint"}
MAY_IMPORT = {
    "job": set(),
    "core": set(),
    "capture": {"core"},
    "blocks": {"capture", "core"},
    "profile": {"blocks", "capture", "core", "job"},
    "call": {"blocks", "capture", "core", "job"},
    "store": {"blocks", "capture", "core", "job"},
    "planning": {"profile", "call", "blocks", "capture", "core", "job"},
    "runtime": {"call", "store", "blocks", "capture", "core", "job"},
    "checkpoint": {"store", "job"},
    "ledger": {"runtime", "core", "job"},
    "module": ALL | {"ledger"},
    "calibrate": ALL - {"checkpoint"},
}
BELOW_ALL = {"_native", "config", "errors", "log", "suggest", "switches"}
FACES = {"__init__", "__main__", "command", "distributed"}
TALKS_TO_RANKS = {
    "distributed.py",
    "profile/links.py",
    "runtime/channels.py",
    "runtime/collectives.py",
}


def imports() -> Iterator[tuple[str, str]]:
    """Each file of the house with each module that it imports."""
    for file in sorted(HOUSE.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                yield from ((str(file.relative_to(HOUSE)), alias.name) for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module is not None:
                yield from ((str(file.relative_to(HOUSE)), f"{node.module}.{alias.name}") for alias in node.names)


def room_of(path: str) -> str:
    return path.split("/")[0].removesuffix(".py")


def test_arrows_point_one_way() -> None:
    found: dict[str, set[str]] = {room: set() for room in MAY_IMPORT}
    for file, imported in imports():
        room, (house, *rest) = room_of(file), imported.split(".")
        if house == "pyrannc" and room not in FACES | BELOW_ALL:
            found[room] |= set(rest[:1]) - {room} - BELOW_ALL
    assert {room: rooms - MAY_IMPORT[room] for room, rooms in found.items() if rooms - MAY_IMPORT[room]} == {}
    assert all(found[room] for room in ("blocks", "profile", "call", "store", "planning", "runtime", "module"))


def test_all_rooms_are_known() -> None:
    rooms = {room_of(str(file.relative_to(HOUSE))) for file in HOUSE.rglob("*.py")}
    assert rooms == MAY_IMPORT.keys() | (BELOW_ALL - {"_native"}) | FACES


def test_few_files_talk_to_other_ranks() -> None:
    found = {file for file, imported in imports() if imported.startswith("torch.distributed")}
    assert {file for file in found if room_of(file) != "job"} == TALKS_TO_RANKS
