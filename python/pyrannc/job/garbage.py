"""Python's searches for garbage, each of which takes as long as there are objects."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from pyrannc.job.device_memory import collect

_FROZEN = 10_000
"""More objects than Python itself freezes: a script has."""


@contextmanager
def older_objects_left_alone(device: torch.device) -> Iterator[None]:
    """Until the end, Python looks for garbage only among the objects that are made meanwhile.

    Where torch is loaded there are half a million others, and a look at all of them takes tenths of a second. What they
    hold of a GPU's memory in vain is given back before. A script that has frozen objects, or lets Python look for no
    garbage, has its own way.
    """
    if not gc.isenabled() or gc.get_freeze_count() > _FROZEN:
        yield
        return
    collect(device)
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
