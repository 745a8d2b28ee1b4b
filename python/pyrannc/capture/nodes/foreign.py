"""What a hook of gradients uses and changes. What the forward has computed, captured calls have anew."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from pyrannc.capture.torch_internals.fakes import FakeTensor
from pyrannc.capture.torch_internals.operators import OpOverload
from pyrannc.capture.torch_internals.symbols import SYMBOLIC
from pyrannc.capture.torch_internals.tensors import TorchDispatchMode, pytree

from .operands import named_arguments, written_arguments


class ForeignOperands(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types for it
    """Sees operands without data that were not made while it is active, numbers of a trace, and changes in place.

    Args:
        gradient: what may be an operand.

    Attributes:
        found: whether there were operands of the trace.
        changes: whether a tensor was changed that was not made while it is active.
    """

    def __init__(self, gradient: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # likewise
        self.found = self.changes = False
        # Kept, so that an id names one object.
        self._known = {id(gradient): gradient}

    def __torch_dispatch__(
        self, function: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Looks at the operands; torch calls it."""
        named = named_arguments(function, args, kwargs or {})
        written = pytree.tree_leaves(written_arguments(function, named))
        self.found = self.found or any(map(self._is_foreign, pytree.tree_leaves(named)))
        self.changes = self.changes or any(isinstance(item, Tensor) and not self._is_known(item) for item in written)
        made = function(*args, **(kwargs or {}))
        self._known |= {id(item): item for item in pytree.tree_leaves(made) if isinstance(item, Tensor)}
        return made

    def _is_foreign(self, item: Any) -> bool:
        return isinstance(item, SYMBOLIC) or (isinstance(item, FakeTensor) and not self._is_known(item))

    def _is_known(self, item: Any) -> bool:
        return id(item) in self._known
