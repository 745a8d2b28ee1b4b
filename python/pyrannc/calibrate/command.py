"""``python -m pyrannc calibrate``: what this machine's devices and links can do, as a cluster file."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from pyrannc._native import Cluster
from pyrannc.calibrate.action_cost import measure_action_us
from pyrannc.calibrate.shares import Figures, measure_device
from pyrannc.config import Config
from pyrannc.core.profile import LevelPoint
from pyrannc.errors import RaNNCError
from pyrannc.files import write_atomically
from pyrannc.job import agree, process
from pyrannc.planning.machine import find_cluster, own_device
from pyrannc.profile.links import measure_links, measure_products_slowdown

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_DESCRIPTION = "Measures how fast this machine computes and communicates, and writes it as a cluster file."
_EPILOG = """\
Examples:
  python -m pyrannc calibrate -o cluster.toml
  torchrun --nproc-per-node 8 -m pyrannc calibrate -o cluster.toml    # links between the 8 devices, too

Then plan with these figures: `rannc plan GRAPH --cluster cluster.toml`, or train with RANNC_CLUSTER_FILE=cluster.toml.
"""


def main(argv: Sequence[str]) -> int:
    """Runs ``calibrate`` with the arguments after that word and returns the exit status. All ranks call it."""
    arguments = _parser().parse_args(argv)
    try:
        device = process.ensure_process_group().device
        agree.together(lambda: _check_folder(arguments.output) if process.get_rank() == 0 else None)
        ranks = agree.gather_objects(own_device(device))
        cluster = find_cluster(Config(), ranks)
        names = [rank.name for rank in ranks]
        measured = agree.together(lambda: _measure_if_first(names, device))
        found = {name: figures for name, figures in agree.gather_objects(measured) if figures}
        common: Figures = {"action_us": agree.gather_objects(measure_action_us(device))[0]}
        links: list[LevelPoint] = []
        if len(ranks) > 1:
            links = measure_links([rank.host for rank in ranks], cluster.level_names, device)
            slowdown = measure_products_slowdown(device)
            common |= {} if slowdown is None else {"collective_slowdown": slowdown}
        text = calibrated(cluster, {name: {**figures, **common} for name, figures in found.items()}, links)
        agree.together(lambda: _write(arguments.output, text) if process.get_rank() == 0 else None)
    except RaNNCError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    finally:
        process.clear()
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m pyrannc calibrate",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("-o", "--output", type=Path, help="the cluster file; without it, it is printed")
    return parser


def _check_folder(path: Path | None) -> None:
    """Nobody waits for figures that cannot be kept."""
    if path is not None and not path.parent.is_dir():
        raise RaNNCError(f"cannot write {path}: there is no folder {path.parent}")


def _write(path: Path | None, text: str) -> None:
    if path is None:
        print(text, end="")
        return
    try:
        write_atomically(path, text)
    except OSError as error:
        raise RaNNCError(f"cannot write {path}: {error}") from error
    print(f"wrote {path}", file=sys.stderr)


def _measure_if_first(names: Sequence[str], device: torch.device) -> tuple[str, Figures]:
    """The figures of this rank's device, if no rank before has the same kind."""
    rank = process.get_rank()
    return names[rank], measure_device(device) if names.index(names[rank]) == rank else {}


def calibrated(cluster: Cluster, devices: Mapping[str, Figures], links: Sequence[LevelPoint]) -> str:
    """The text of a cluster file.

    Args:
        cluster: what is kept where nothing was measured.
        devices: measured fields by name of the device.
        links: measured levels.
    """
    table = tomllib.loads(cluster.to_toml())
    for device in table["device"].values():
        device.update(devices[device["name"]])
    measured = {level.name: level for level in links}
    for level in table["level"]:
        if level["name"] in measured:
            send, collective = measured[level["name"]].send, measured[level["name"]].collective
            level["latency_us"], level["gb_per_s"] = send.latency_us, send.bytes_per_s / 1e9
            level["collective_latency_us"] = collective.latency_us
            level["collective_gb_per_s"] = collective.bytes_per_s / 1e9
    lines = [f"name = {json.dumps(table['name'])}"]
    for key, device in table["device"].items():
        lines += [f"[device.{key}]", *_fields(device)]
    for section in ("node", "level"):
        for entry in table[section]:
            lines += [f"[[{section}]]", *_fields(entry)]
    return Cluster.from_toml("\n".join(lines)).to_toml()


def _fields(table: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """The lines of a table; JSON writes its values as TOML does."""
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _fields(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key} = {json.dumps(value)}"
