"""Searches with what was measured under smaller and smaller memory budgets, as long as memory is short."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from pyrannc._native import Cluster, Plan, Profile
from pyrannc.capture.torch_internals.compiler import has_compiler_of_host, memory_budget_in_force
from pyrannc.core.plan import PlanFacts
from pyrannc.errors import MemoryShortageError
from pyrannc.job import phases, process
from pyrannc.planning.machine import in_words
from pyrannc.planning.measured import measures, save_profile
from pyrannc.planning.search import Request, search

_LEAN_PERCENTS = (80, 30, 0)
"""Of what compiled Spans would keep, where memory is short. A layer of BERT (1,600 wide, 16 x 512 tokens, bfloat16,
H200) keeps 409 MiB and takes 3.25 ms; 280 and 3.28, 127 and 3.77, 26 and 4.32 with these."""
_LEAST_GAIN = 0.02
"""By which share a step with them must be shorter: predictions may be off by so much."""


def budgets_percent(request: Request) -> tuple[int | None, ...]:
    """Of what compiled Spans would keep, how much they may, in the order in which that is tried; first all."""
    compiles = request.config.compiles_on(request.device.type) and measures(request)
    # On the host nothing tells what they keep.
    return (None, *_LEAN_PERCENTS) if compiles and request.device.type != "cpu" else (None,)


class Attempts:
    """Rank 0's searches, of which the fastest Plan stands.

    As long as memory is short, Spans are measured as they are compiled to keep less from forward to backward: what is
    cheap is computed again first.
    """

    def __init__(self, request: Request, cluster: Cluster) -> None:
        self._request = request
        self._cluster = cluster
        self._first: Sequence[Profile] | None = None
        self._plan: Plan | None = None
        self._is_lean = False
        self._shortage: MemoryShortageError | None = None

    def take(self, profiles: Sequence[Profile], percent: int | None, *, last: bool) -> Plan | None:
        """Searches with other measurements; None where still others may give a faster Plan.

        Args:
            percent: of what they would keep, how much compiled Spans did.
            last: there are no others.

        Raises:
            PlanError: there is no Plan.
        """
        request, world_size = self._request, process.get_world_size()
        self._first = profiles if self._first is None else self._first
        kept = "" if percent is None else f", with a memory budget of {percent}% for compiled Spans"
        phases.note(f"searched for {in_words(world_size)} and a global batch of {request.batch_rows} rows{kept}")
        is_better = False
        try:
            found = search(request, self._cluster, profiles, world_size)
        except MemoryShortageError as error:
            self._shortage = error
        else:
            is_better = self._takes(found, profiles)
        if not last and (is_better or not self._is_lean) and self._is_short():
            return None
        if self._plan is None:
            assert self._shortage is not None, "the search has failed"
            raise self._shortage
        return self._plan

    def _takes(self, found: Plan, profiles: Sequence[Profile]) -> bool:
        """Takes a Plan if it is clearly faster than the one before, and tells whether it is."""
        if self._plan is not None:
            if _step_us(found) >= (1 - _LEAST_GAIN) * _step_us(self._plan):
                return False
            phases.note(f"{_step_us(found) / 1e3:.2f} instead of {_step_us(self._plan) / 1e3:.2f} ms a step")
        if profiles is not self._first and self._request.config.save_graph_profile:
            save_profile(profiles[0], Path(self._request.config.graph_profile_file))
        self._plan, self._is_lean = found, profiles is not self._first
        return True

    def _is_short(self) -> bool:
        """True where a step would take less if there were more memory, and Spans can be compiled to keep less."""
        if not has_compiler_of_host() or memory_budget_in_force() != 1:
            return False
        if self._plan is None:
            return True
        request = replace(self._request, config=replace(self._request.config, mem_limit_gb=0.0))
        assert self._first is not None, "there was a search"
        ample = search(request, self._cluster.with_ample_memory(), self._first, process.get_world_size())
        return _step_us(ample) < (1 - _LEAST_GAIN) * _step_us(self._plan)


def _step_us(plan: Plan) -> float:
    return PlanFacts.of(plan).predicted.step_us
