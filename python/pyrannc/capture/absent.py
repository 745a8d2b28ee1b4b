"""What stands for a value that is not there: any use of it raises, instead of giving an old or wrong one."""

from __future__ import annotations

from typing import Any

from pyrannc.errors import RaNNCError

from .torch_internals import pytree


class Absent:
    """Such a value; ``text`` says why it is not there and what to do."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __str__(self) -> str:
        return self._text

    def __repr__(self) -> str:
        return f"<{self._text}>"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise RaNNCError(self._text)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Raises: torch calls it for any function of tensors that has one of these among its arguments."""
        leaves = pytree.tree_leaves((args, kwargs or {}))
        raise RaNNCError(next(str(item) for item in leaves if isinstance(item, cls)))

    def _refuse(self, *_: Any) -> Any:
        raise RaNNCError(self._text)

    __bool__ = __len__ = __iter__ = __int__ = __float__ = __index__ = __call__ = __getitem__ = __contains__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __pow__ = _refuse
    __matmul__ = __rmatmul__ = __neg__ = __abs__ = __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = _refuse
    __hash__ = object.__hash__
