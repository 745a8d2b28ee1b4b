"""What a hook of gradients uses and changes. What the forward has computed, captured calls have anew."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from pyrannc.capture.torch_internals.fakes import FakeTensor
from pyrannc.capture.torch_internals.operators import schema
from pyrannc.capture.torch_internals.symbols import SYMBOLIC
from pyrannc.capture.torch_internals.tensors import TorchDispatchMode, pytree


class ForeignOperands(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types for it
    """Sees operands without data that were not made while it is active, numbers of a trace, and changes in place.

    Args:
        gradient: what may be an operand.

    Attributes:
        found: whether there were operands of the trace.
        changes: whether a tensor was changed that was not made while it is active.
    """

    def __init__(self, gradient: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found = self.changes = False
        # Kept, so that an id names one object.
        self._known = {id(gradient): gradient}

    def __torch_dispatch__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Looks at the operands; torch calls it."""
        named = kwargs or {}
        self.found = self.found or any(map(self._is_foreign, pytree.tree_leaves((args, named))))
        self.changes = self.changes or any(id(item) not in self._known for item in _written(function, args, named))
        made = function(*args, **named)
        self._known |= {id(item): item for item in pytree.tree_leaves(made) if isinstance(item, Tensor)}
        return made

    def _is_foreign(self, item: Any) -> bool:
        return isinstance(item, SYMBOLIC) or (isinstance(item, FakeTensor) and id(item) not in self._known)


def _written(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Any]:
    for place, argument in enumerate(schema(function).arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield args[place] if place < len(args) else kwargs.get(argument.name)
