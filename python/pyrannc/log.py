"""Loggers, one for each component of RaNNC.

``RANNC_LOG`` sets levels: ``RANNC_LOG=debug`` for all components, ``RANNC_LOG=info,DPStaging=debug`` for single ones.
Rank 0 shows ``info`` and above, the other ranks ``warning`` and above; a level below ``info`` that was asked for holds
on all ranks.
"""

import logging
import os
import sys
from collections.abc import Mapping

from pyrannc.errors import ConfigError
from pyrannc.suggest import nearest

COMPONENTS = ("RaNNCProcess", "RaNNCModule", "Decomposer", "DPStaging", "ParamStorage")

_LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "critical": logging.CRITICAL,
    "off": logging.CRITICAL + 10,
}
_ROOT = "pyrannc"


def get_logger(component: str) -> logging.Logger:
    """Return the logger of one of :data:`COMPONENTS`."""
    if component not in COMPONENTS:
        raise ValueError(f"{component!r} is not a component; the components are {', '.join(COMPONENTS)}")
    return logging.getLogger(f"{_ROOT}.{component}")


def configure(rank: int, environ: Mapping[str, str] = os.environ) -> None:
    """Set the levels for ``rank`` and, unless the program has handlers of its own, print to stderr.

    Raises:
        ConfigError: ``RANNC_LOG`` names an unknown component or level.
    """
    levels = parse_levels(environ.get("RANNC_LOG", ""))
    for component, level in levels.items():
        get_logger(component).setLevel(max(level, logging.WARNING) if rank != 0 and level >= logging.INFO else level)
    root = logging.getLogger(_ROOT)
    if root.hasHandlers():
        return
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Formatter(rank))
    root.addHandler(handler)


def parse_levels(text: str) -> dict[str, int]:
    """Return the level of every component for a value of ``RANNC_LOG``.

    >>> parse_levels("warning,DPStaging=debug")["DPStaging"] == logging.DEBUG
    True
    """
    levels = dict.fromkeys(COMPONENTS, logging.INFO)
    single: dict[str, int] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        component, equals, level = part.rpartition("=")
        if not equals:
            levels = dict.fromkeys(COMPONENTS, _level(level))
        elif component.strip() in COMPONENTS:
            single[component.strip()] = _level(level)
        else:
            raise ConfigError(f"RANNC_LOG: unknown component {component.strip()!r}{nearest(component, COMPONENTS)}")
    return levels | single


def _level(name: str) -> int:
    found = _LEVELS.get(name.strip().lower())
    if found is None:
        raise ConfigError(f"RANNC_LOG: unknown level {name.strip()!r}; the levels are {', '.join(_LEVELS)}")
    return found


class _Formatter(logging.Formatter):
    """``[time] [component] [level] [rank] text``."""

    default_msec_format = "%s.%03d"

    def __init__(self, rank: int) -> None:
        super().__init__(f"[%(asctime)s] [%(component)s] [%(level)s] [rank {rank}] %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        record.component = record.name.rpartition(".")[2]
        record.level = record.levelname.lower()
        return super().format(record)
