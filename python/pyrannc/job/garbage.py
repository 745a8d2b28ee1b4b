"""Python's searches for garbage, each of which takes as long as there are objects."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

import torch

from pyrannc.frozen import many_are_frozen
from pyrannc.job.device_memory import collect


@contextmanager
def older_objects_left_alone(device: torch.device) -> Iterator[None]:
    """Until the end, Python looks for garbage only among the objects that are made meanwhile.

    Where torch is loaded there are half a million others, and a look at all of them takes tenths of a second. What they
    hold of a GPU's memory in vain is given back before. A script that has frozen objects, or lets Python look for no
    garbage, has its own way.
    """
    if not gc.isenabled() or many_are_frozen():
        yield
        return
    collect(device)
    gc.freeze()
    _LeftAlone.value = True
    try:
        yield
    finally:
        _LeftAlone.value = False
        gc.unfreeze()


class _LeftAlone:
    """Whether older objects are left alone now."""

    value: ClassVar[bool] = False


def collect_older() -> None:
    """Looks among all objects once."""
    if _LeftAlone.value:
        gc.unfreeze()
    gc.collect()
    if _LeftAlone.value:
        gc.freeze()
