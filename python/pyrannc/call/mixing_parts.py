"""Sub-modules in which rows of the batch meet, though each row of what they return depends on that row alone.

A mixture of experts sorts all tokens by expert, and puts them back. As a row group, where trials say so, such a part
keeps what follows it out of the tail.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from math import prod

from torch import nn

from pyrannc._native import Divided, Graph
from pyrannc.capture import Captured, KeptWhole
from pyrannc.capture.nodes.untraceable import alike, has_own_forward
from pyrannc.capture.rows.trial import within
from pyrannc.core.graph import GraphFacts
from pyrannc.core.tail import DividedFacts
from pyrannc.errors import CaptureError

_LARGE_TAIL = 0.2
"""Share of the parameters from which on a tail is worth another capture."""
_LARGE_GROUP = 0.5
"""Share of the parameters above which one group, which no cut divides, is no better than a tail."""
_MOST_TRIES = 4
_TRIALS_S = 60.0
_MOST_ELEMENTS = 1 << 26
"""Of the parameters of a part: trials run on the host, and those of larger ones would outlast what they save."""


@dataclass(frozen=True)
class DividedCapture:
    """A captured call, divided into body and tail."""

    captured: Captured
    graph: Graph
    native: Divided
    divided: DividedFacts

    @cached_property
    def _facts(self) -> GraphFacts:
        return GraphFacts.from_json(self.captured.graph_json, self.graph.row_dims())

    @cached_property
    def _sizes(self) -> dict[int, int]:
        return {param.value: prod(self._facts.values[param.value].shape_at(0)) for param in self._facts.params}

    def _share(self, values: Iterable[int]) -> float:
        return sum(self._sizes.get(value, 0) for value in values) / max(1, sum(self._sizes.values()))

    @cached_property
    def in_tail(self) -> float:
        """Share of the parameters, by elements, that the tail uses."""
        return self._share(self._facts.params[param].value for param in self.divided.tail.params)

    @cached_property
    def in_one_piece(self) -> float:
        """The largest share that one Op or one row group uses, which no cut divides."""
        groups: dict[int, set[int]] = defaultdict(set)
        for number, op in enumerate(self._facts.ops):
            groups[number if op.row_group is None else -1 - op.row_group].update(op.operands)
        return max(map(self._share, groups.values()), default=0.0)

    def is_better_than(self, other: DividedCapture) -> bool:
        """Its tail is smaller, and no group of it too large."""
        return self.in_tail < other.in_tail and self.in_one_piece <= max(other.in_one_piece, _LARGE_GROUP)


def without_mixing(
    model: nn.Module, first: DividedCapture, again: Callable[[Sequence[str]], DividedCapture]
) -> DividedCapture:
    """The capture with the smallest tail that row groups give. All ranks call it.

    Args:
        first: with no group that was tried.
        again: captures with those of these sub-modules that trials show to be groups.
    """
    best, own = first, list[KeptWhole]()
    left = _MOST_TRIES
    while left and best.in_tail >= _LARGE_TAIL and best.divided.tail.mixing:
        parts = (kept for kept in _parts_round(model, best, own) if best.captured.can_be_groups(kept.paths))
        for kept in islice(parts, left):
            left -= 1
            found = _with_group(kept, own, again)
            if found is not None and found.is_better_than(best):
                best, own = found, [*(part for part in own if not _is_inside(part, kept)), kept]
                break
        else:
            break
    captured = replace(best.captured, tested_together=tuple(own))
    return replace(best, captured=captured)


def _with_group(
    kept: KeptWhole, own: Sequence[KeptWhole], again: Callable[[Sequence[str]], DividedCapture]
) -> DividedCapture | None:
    """The capture with one more part as a group, if trials show it to be one, and there is such a capture."""
    try:
        with within(_TRIALS_S):
            # First, as it may hold some of the others: no Op is in two groups.
            return again([path for part in (kept, *own) for path in part.paths])
    except CaptureError:
        return None


def _is_inside(part: KeptWhole, outer: KeptWhole) -> bool:
    return any(part.paths[0].startswith(f"{path}.") for path in outer.paths)


def _parts_round(model: nn.Module, found: DividedCapture, own: Sequence[KeptWhole]) -> Iterator[KeptWhole]:
    """What may be a row group with the first Op that mixes rows, the smallest first."""
    op, how = found.divided.tail.mixing[0]
    place = found.captured.place(op)
    known = {path for kept in (*own, *found.captured.kept_whole) for path in kept.paths}
    path = place.module
    while path:
        module = model.get_submodule(path)
        if sum(param.numel() for param in module.parameters()) > _MOST_ELEMENTS:
            return
        if path not in known and has_own_forward(module):
            yield KeptWhole(tuple(alike(model, path)), place, f"rows of the batch meet in it ({how})")
        path = path.rpartition(".")[0]
