"""What stands for a value that is not there: any use of it raises, instead of giving an old or wrong one."""

from __future__ import annotations

from typing import Any

from pyrannc.capture.torch_internals.tensors import pytree
from pyrannc.errors import RaNNCError


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
        raise self.error()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Raises: torch calls it for any function of tensors that has one of these among its arguments."""
        leaves = pytree.tree_leaves((args, kwargs or {}))
        raise next(item.error() for item in leaves if isinstance(item, cls))

    def error(self) -> RaNNCError:
        """What any use of it raises."""
        return RaNNCError(self._text)

    def __format__(self, spec: str) -> str:
        return str(self) if not spec else self._refuse()

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise self.error()

    __bool__ = __len__ = __iter__ = __int__ = __float__ = __complex__ = __index__ = __round__ = __call__ = _refuse
    __getitem__ = __setitem__ = __delitem__ = __contains__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _refuse
    __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __pow__ = __rpow__ = __matmul__ = __rmatmul__ = _refuse
    __and__ = __rand__ = __or__ = __ror__ = __xor__ = __rxor__ = __invert__ = __neg__ = __pos__ = __abs__ = _refuse
    __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = _refuse
    # NumPy would make an array of one object.
    __array__ = __dlpack__ = __dlpack_device__ = _refuse
    __hash__ = object.__hash__
