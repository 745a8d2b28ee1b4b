"""Python attributes that the forward sets and a captured call does not: reading one is an error, not an old value."""

from __future__ import annotations

from typing import Any

from torch import nn

from pyrannc.call.variant import Variant
from pyrannc.errors import RaNNCError


class Stale:
    """Stands for a value that is not there; any use of it raises."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return f"<{self._text}>"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise RaNNCError(self._text)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Raises: torch calls it for any function of tensors that has one of these among its arguments."""
        found = next(item for item in [*args, *(kwargs or {}).values()] if isinstance(item, cls))
        raise RaNNCError(found._text)

    def _refuse(self, *_: Any) -> Any:
        raise RaNNCError(self._text)

    __bool__ = __len__ = __iter__ = __int__ = __float__ = __index__ = __call__ = __getitem__ = __contains__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __pow__ = _refuse
    __matmul__ = __rmatmul__ = __neg__ = __abs__ = __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = _refuse
    __hash__ = object.__hash__


_NOTHING = object()


class StaleAttributes:
    """The attributes of a deployed model that captured calls set."""

    def __init__(self) -> None:
        self._before: dict[tuple[int, str], tuple[nn.Module, Any]] = {}

    def mark(self, variant: Variant) -> None:
        """Puts what raises in the place of what a captured call would set."""
        for attribute in variant.captured.python_state.written:
            own = vars(attribute.module)
            key = id(attribute.module), attribute.name
            self._before.setdefault(key, (attribute.module, own.get(attribute.name, _NOTHING)))
            own[attribute.name] = Stale(
                f"the {attribute} is set by the forward ({attribute.where}), which runs when the model is captured and "
                "never again, so it has no value; return it from the forward instead"
            )

    def clear(self) -> None:
        """Puts back what was there."""
        for (_, name), (module, value) in self._before.items():
            if isinstance(vars(module).get(name), Stale):
                del vars(module)[name]
                if value is not _NOTHING:
                    vars(module)[name] = value
        self._before.clear()
