"""Masks that are drawn together before they are asked for.

A launch for each dropout would cost the host as much as the rest of a small layer. What a Stage has asked for rows
once it asks for the same rows again, so from then on one launch draws all of it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from pyrannc.blocks import philox
from pyrannc.blocks.stream import CallKey, Draw, RowsInHand

_Asked: TypeAlias = tuple[Draw, int]
_ANY_KEY = CallKey(0, torch.device("cpu"))
# Divisions of the batch whose masks are remembered: more than the microbatches of a training's usual batches.
_MOST = 64


class Ahead:
    """What is asked, by who asks and for which rows.

    Args:
        device: where masks are drawn.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._known: WeakKeyDictionary[Hashable, dict[RowsInHand, _Together]] = WeakKeyDictionary()
        self._ready: dict[_Asked, Tensor] = {}
        self._used: dict[_Asked, None] = {}

    def keep(self, draw: Draw, threshold: int) -> Tensor:
        """What :func:`philox.keep` gives."""
        asked = draw._replace(key=_ANY_KEY), threshold
        self._used[asked] = None
        ready = self._ready.pop(asked, None)
        return philox.keep(draw, threshold, self._device) if ready is None else ready

    def known(self, who: Hashable, rows: RowsInHand) -> object:
        """What :meth:`drawn` draws from now on for the same."""
        return self._known.get(who, {}).get(rows)

    @contextmanager
    def drawn(self, who: Hashable, key: CallKey, rows: RowsInHand) -> Iterator[None]:
        """Draws what ``who`` has asked for when it worked on these rows the last time."""
        by_rows = self._known.setdefault(who, {})
        together = by_rows.get(rows)
        self._ready, self._used = {} if together is None else together.draw(key), {}
        try:
            yield
            if self._used and (together is None or self._used.keys() != together.asked.keys()):
                if len(by_rows) >= _MOST:
                    by_rows.clear()
                by_rows[rows] = _Together(self._used, self._device)
        finally:
            self._ready, self._used = {}, {}


class _Together:
    """What is drawn in one launch."""

    def __init__(self, asked: dict[_Asked, None], device: torch.device) -> None:
        self.asked = asked
        self._able = [(draw, threshold) for draw, threshold in asked if draw.numel and threshold < philox.ALWAYS]
        self._masks = philox.masks_of(self._able, device)

    def draw(self, key: CallKey) -> dict[_Asked, Tensor]:
        """The masks by what was asked for, as far as they can be drawn together."""
        return {} if self._masks is None else dict(zip(self._able, self._masks.draw(key), strict=True))
