"""Runs a habit's script, in one process or as one of RaNNC's ranks."""

from __future__ import annotations

import logging
import random
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from unittest.mock import patch
from zlib import crc32

import numpy as np
import torch

import pyrannc
from pyrannc.log import COMPONENTS, get_logger
from pyrannc.runtime import rehearsal
from tests.runtime.equivalence import double_precision

from .habits import HABITS
from .job import Job, Note, RankJob
from .settings import Setting


@dataclass(frozen=True)
class Run:
    """What a script came to on one rank.

    Attributes:
        notes: what it has computed, up to an error.
        error: class and text of RaNNC's error that it met, or nothing.
        told: warnings.
        plans: Stages and microbatches of the deployed Plans.
    """

    notes: list[Note] = field(default_factory=list)
    error: tuple[str, str] | None = None
    told: tuple[str, ...] = ()
    plans: tuple[tuple[int, int], ...] = ()


def run_plain(name: str) -> Run:
    """The script with the plain model and the global batch in this process."""
    job, habit = Job(), HABITS[name]
    # What RaNNC refuses may fail without it as well.
    with fresh(), suppress(*[Exception] * (habit.outcome == "refused")):
        habit.script(job)
    return Run(job.notes)


def run_rank(name: str, setting: Setting) -> Run:
    """The script on this rank, with this rank's rows. All ranks call it; other errors than RaNNC's are raised."""
    job = RankJob(pyrannc.get_rank(), setting.rows)
    error: pyrannc.RaNNCError | None = None
    with fresh(), _rehearsals(name), _warnings() as told:
        try:
            HABITS[name].script(job)
        except pyrannc.RaNNCError as caught:
            error = caught
        plans = tuple((len(m.plan["stages"]), int(m.plan["microbatches"])) for m in job.modules if m.ready)
        if error is None:
            for module in job.modules:
                if module.ready:
                    module.undeploy()
    met = None if error is None else (type(error).__name__, str(error))
    return Run(job.notes, met, tuple(told), plans)


@contextmanager
def fresh() -> Iterator[None]:
    """The state of a process that has just started, and the former one again."""
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    try:
        with double_precision(), torch.enable_grad():
            yield
    finally:
        torch.set_rng_state(before[0])
        random.setstate(before[1])
        np.random.set_state(before[2])
        pyrannc.delay_grad_allreduce(False)
        pyrannc.keep_graph(False)
        pyrannc.sync_params_on_init(True)


@contextmanager
def _rehearsals(name: str) -> Iterator[None]:
    """Every other habit's ranks rehearse their steps, as on GPUs, where what stays whole waits for the device."""
    if crc32(name[::-1].encode()) % 2:
        with patch.multiple(rehearsal, is_needed=lambda *_: True, waits_noted=lambda _: nullcontext(["a place"])):
            yield
    else:
        yield


@contextmanager
def _warnings() -> Iterator[list[str]]:
    """What is logged or warned inside."""
    told: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            told.append(record.getMessage())

    pyrannc.barrier()  # Joining sets the levels of the loggers.
    loggers = [get_logger(component) for component in COMPONENTS]
    levels = [logger.level for logger in loggers]
    root, handler = logging.getLogger("pyrannc"), Handler(logging.WARNING)
    others = root.handlers[:]
    root.handlers[:] = [handler]
    for logger in loggers:
        logger.setLevel(logging.WARNING)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield told
        told += [str(item.message) for item in caught]
    finally:
        root.handlers[:] = others
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
