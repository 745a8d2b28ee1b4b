"""Random numbers of Python and NumPy, which a captured graph would draw once for all calls."""

from __future__ import annotations

import pickle
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from pyrannc.errors import CaptureError

from .source import Place, SourceTracker


class OtherGenerators:
    """The generators of ``random`` and ``numpy.random``, and those that sub-modules hold as attributes."""

    def __init__(self, model: nn.Module) -> None:
        numpy: Any = sys.modules.get("numpy")
        self._numpy = getattr(numpy, "random", None)
        self._held = [
            (f'"{name}" of sub-module "{path}"' if path else f'"{name}" of the model', value)
            for path, module in model.named_modules()
            for name, value in vars(module).items()
            if isinstance(value, random.Random) or self._is_numpy(value)
        ]

    def _is_numpy(self, value: Any) -> bool:
        return self._numpy is not None and isinstance(value, (self._numpy.Generator, self._numpy.RandomState))

    def states(self) -> list[tuple[str, bytes]]:
        """Each by name, with a state that compares by value."""
        found: list[tuple[str, Any]] = [("Python's random module", random.getstate())]
        if self._numpy is not None:
            found.append(("numpy.random", self._numpy.get_state(legacy=False)))
        found += [(f"the generator {name}", _state(value)) for name, value in self._held]
        return [(name, pickle.dumps(state)) for name, state in found]

    @contextmanager
    def unused(self, tracker: SourceTracker) -> Iterator[None]:
        """Raises CaptureError at the end of the sub-module's call that draws from one."""
        before = self.states()

        def check() -> None:
            for (name, old), (_, new) in zip(before, self.states(), strict=True):
                if old != new:
                    raise CaptureError(
                        f"{Place(tracker.module)} draws random numbers from {name}, which a captured call would draw "
                        "once and keep for ever; use torch's (torch.rand), or pass the number as a tensor argument"
                    )

        tracker.after_calls = check
        yield


def _state(generator: Any) -> Any:
    if isinstance(generator, random.Random):
        return generator.getstate()
    bits = getattr(generator, "bit_generator", None)
    return bits.state if bits is not None else generator.get_state(legacy=False)
