"""Searches with what was measured under smaller and smaller memory budgets, as long as memory is short."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from pyrannc._native import Cluster, Plan, Profile
from pyrannc.capture.torch_internals.compiler import has_compiler_of_host, memory_budget_in_force
from pyrannc.core.plan import PlanFacts
from pyrannc.errors import MemoryShortageError, PlanError
from pyrannc.job import phases, process
from pyrannc.planning.machine import in_words
from pyrannc.planning.measured import measures, save_profile
from pyrannc.planning.search import Request, search

_LEAN_PERCENTS = (80, 30, 0)
"""Of what compiled Spans would keep, where memory is short. A layer of BERT (1,600 wide, 16 x 512 tokens, bfloat16,
H200) keeps 409 MiB and takes 3.25 ms; 280 and 3.28, 127 and 3.77, 26 and 4.32 with these."""
_LEAST_GAIN = 0.02
"""By which share a step with them must be shorter: predictions may be off by so much."""


class Attempts:
    """Rank 0's searches, of which the fastest Plan stands.

    As long as memory is short, Spans are measured as they are compiled to keep less from forward to backward: what is
    cheap is computed again first.
    """

    def __init__(self, request: Request, cluster: Cluster) -> None:
        self._request = request
        self._cluster = cluster
        self._left: list[int] | None = None
        self._first: Sequence[Profile] | None = None
        self._ample_us: float | None = None
        self._plan: Plan | None = None
        self._has_gained = False

    def take(self, profiles: Sequence[Profile], percent: int | None) -> Plan | int:
        """Searches with other measurements.

        Args:
            percent: of what they would keep, how much compiled Spans kept at most; None for all.

        Returns:
            The Plan, or with which percentage there may be a faster one.

        Raises:
            PlanError: there is no Plan.
        """
        request, world_size = self._request, process.get_world_size()
        if self._left is None or self._first is None:
            self._left, self._first = list(_LEAN_PERCENTS) if _can_keep_less(request) else [], profiles
        kept = "" if percent is None else f", with a memory budget of {percent}% for compiled Spans"
        phases.note(f"searched for {in_words(world_size)} and a global batch of {request.batch_rows} rows{kept}")
        try:
            is_better = self._takes(search(request, self._cluster, profiles, world_size), profiles, percent)
        except MemoryShortageError:
            if self._plan is None and not self._left:
                raise
            is_better = False
        except PlanError:
            if self._plan is None:
                raise
            return self._plan
        if self._left and (is_better or not self._has_gained) and self._is_short():
            return self._left.pop(0)
        assert self._plan is not None, "where there is none, memory is short"
        return self._plan

    def _takes(self, found: Plan, profiles: Sequence[Profile], percent: int | None) -> bool:
        """Takes a Plan if it is clearly faster than the one before, and tells whether it is."""
        if self._plan is not None:
            if _step_us(found) >= (1 - _LEAST_GAIN) * _step_us(self._plan):
                return False
            phases.note(f"{_step_us(found) / 1e3:.2f} instead of {_step_us(self._plan) / 1e3:.2f} ms a step")
        if percent is not None and self._request.config.save_graph_profile:
            save_profile(profiles[0], Path(self._request.config.graph_profile_file))
        self._plan, self._has_gained = found, percent is not None
        return True

    def _is_short(self) -> bool:
        """True where a step would take less if there were more memory; Blocks were measured in what there is."""
        if self._plan is None:
            return True
        if self._ample_us is None:
            self._ample_us = self._step_with_ample_memory_us()
        return self._ample_us < (1 - _LEAST_GAIN) * _step_us(self._plan)

    def _step_with_ample_memory_us(self) -> float:
        request = replace(self._request, config=replace(self._request.config, mem_limit_gb=0.0))
        assert self._first is not None, "there was a search"
        ample = self._cluster.with_ample_memory()
        try:
            return _step_us(search(request, ample, self._first, process.get_world_size(), tells=False))
        except PlanError:  # the time was over
            return math.inf


def _can_keep_less(request: Request) -> bool:
    """True where Spans are compiled and measured, and nothing else says what they keep."""
    compiles = request.config.compiles_on(request.device.type) and has_compiler_of_host()
    # On the host nothing tells what they keep.
    return compiles and measures(request) and request.device.type != "cpu" and memory_budget_in_force() == 1


def _step_us(plan: Plan) -> float:
    return PlanFacts.of(plan).predicted.step_us
