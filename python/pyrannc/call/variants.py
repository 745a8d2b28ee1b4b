"""The captured forms of one model: in training and evaluation mode, with inputs of other shapes."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any

from pyrannc.call.variant import Variant
from pyrannc.capture.nodes.row_conditions import first_other

CallKey = tuple[tuple[Hashable, ...], Hashable]
"""The signature of a call, and which parameters require gradients."""
MOST_VALUES = 50_000
"""Of all captured forms that are kept, which take about ten kilobytes of the host's memory for each."""
_LEAST_VARIANTS = 16
"""So many are kept in any case."""


class Variants:
    """The captured forms of one model, numbered alike on all ranks; of too many, the oldest in use goes."""

    def __init__(self) -> None:
        self._kept: dict[CallKey, list[Variant]] = {}
        self._by_use: dict[Variant, CallKey] = {}
        self._first: Variant | None = None
        self.made = self.traced = 0

    @property
    def first(self) -> Variant:
        """The one that the Plan was made for."""
        assert self._first is not None, "there is a captured form"
        return self._first

    def that_hold(self, key: CallKey) -> Iterator[Variant]:
        """The captured forms with this key whose guards hold, the latest first; what data or rows answer differs."""
        return (variant for variant in self._kept.get(key, ()) if variant.guards.hold())

    def like(self, key: CallKey) -> list[tuple[CallKey, Variant]]:
        """Those of calls that differ from this one in extents only, the one used last first."""
        kind = kind_of(key)
        return [(known, variant) for variant, known in reversed(self._by_use.items()) if kind_of(known) == kind]

    def add(self, key: CallKey, variant: Variant) -> list[Variant]:
        """Keeps a captured form under the next number, and returns those that had to go for it."""
        self._first = self._first or variant
        variant.number = self.made
        self.made += 1
        self.traced += variant.has_own_trace
        self._kept.setdefault(key, []).insert(0, variant)
        self._by_use[variant] = key
        dropped = []
        while len(self._by_use) > _LEAST_VARIANTS and sum(map(_size, self._by_use)) > MOST_VALUES:
            oldest = next(known for known in self._by_use if known is not self._first)
            self._kept[self._by_use.pop(oldest)].remove(oldest)
            dropped.append(oldest)
        return dropped

    def use(self, variant: Variant) -> None:
        """Counts a call, which all ranks make."""
        variant.calls += 1
        self._by_use[variant] = self._by_use.pop(variant)

    def why_new(self, key: CallKey, rows: int) -> str:
        """What makes the captured form with this key, for so many rows, differ from the one used last."""
        last = next(reversed(self._by_use))
        before = self._by_use[last]
        other = first_other(last.whole.captured.row_conditions, rows)
        if before == key and rows > last.most_rows:
            return f"a batch of {rows} rows, where trials had shown what holds for up to {last.most_rows}"
        if before == key and other is not None:
            return f"a batch of {rows} rows, where {other.where} had asked ({other})"
        if before == key:
            return last.guards.changed() or "a sub-module"
        names = (
            "Python values or structure of the arguments", "shapes or types of tensors", "mode", "autocast",
            "torch's default type",
        )  # fmt: skip
        parts = [name for name, old, new in zip(names, before[0], key[0], strict=True) if old != new]
        return ", ".join(parts + ["requires_grad"] * (before[1] != key[1]))

    def clear(self) -> None:
        """Forgets all."""
        self._kept.clear()
        self._by_use.clear()
        self._first = None
        self.made = self.traced = 0


def _size(variant: Variant) -> int:
    return len(variant.whole.facts.values)


def extents_of(key: CallKey) -> tuple[tuple[int, ...], ...]:
    """Of each tensor of a call, the extents besides the rows."""
    described: Any = key[0][1]
    return tuple(extents for _, extents, *_ in described)


def kind_of(key: CallKey) -> Hashable:
    """What calls share that differ in these extents only."""
    (structure, _, *rest), flags = key
    described: Any = key[0][1]
    return structure, tuple((rows, len(extents), *of) for rows, extents, *of in described), *rest, flags
