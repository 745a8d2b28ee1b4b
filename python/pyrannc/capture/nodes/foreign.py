"""What a hook of gradients uses of the forward that it stands in: captured calls have that anew, and it does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from pyrannc.capture.torch_internals.fakes import FakeTensor
from pyrannc.capture.torch_internals.symbols import SYMBOLIC
from pyrannc.capture.torch_internals.tensors import TorchDispatchMode, pytree


class ForeignOperands(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types for it
    """Sees operands without data that were not made while it is active, and numbers of a trace.

    Args:
        gradient: what may be an operand.

    Attributes:
        found: whether there was one.
    """

    def __init__(self, gradient: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found = False
        # Kept, so that an id names one object.
        self._known = {id(gradient): gradient}

    def __torch_dispatch__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Looks at the operands; torch calls it."""
        self.found = self.found or any(map(self._is_foreign, pytree.tree_leaves((args, kwargs or {}))))
        made = function(*args, **(kwargs or {}))
        self._known |= {id(item): item for item in pytree.tree_leaves(made) if isinstance(item, Tensor)}
        return made

    def _is_foreign(self, item: Any) -> bool:
        return isinstance(item, SYMBOLIC) or (isinstance(item, FakeTensor) and id(item) not in self._known)
