"""What a script has done to gradients that other ranks hold, to be done to samples of their elements."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_ANEW_BY = frozenset(("zero_", "copy_", "_foreach_zero_", "_foreach_copy_"))
"""What writes all elements anew; what is copied is taken to be finite."""

_SUMS_AND_PRODUCTS = (
    "add_ sub_ subtract_ mul_ multiply_ div_ divide_ true_divide_ __iadd__ __isub__ __imul__ __idiv__ __itruediv__ "
    "addcmul_ addcdiv_ "
    "_foreach_add_ _foreach_sub_ _foreach_mul_ _foreach_div_ _foreach_addcmul_ _foreach_addcdiv_"
)
_LEAVES_INFINITE = frozenset(_SUMS_AND_PRODUCTS.split())
"""What leaves an element that is not finite so, with tensors that are."""

_OF_NUMBERS = (
    "neg_ abs_ sign_ clamp_ clamp_min_ clamp_max_ clip_ nan_to_num_ fill_ _foreach_clamp_min_ _foreach_clamp_max_"
)
_KNOWN = _LEAVES_INFINITE | frozenset(_OF_NUMBERS.split())
"""What becomes of an element depends on numbers alone, and on whether it is NaN, infinite, or another."""


@dataclass(frozen=True, eq=False)
class Change:
    """A call that has changed every element of a gradient alike.

    Attributes:
        function: changes its first argument in place.
        args: the others: numbers, or tensors without dimensions.
        kwargs: likewise.
        of_lists: the first argument is a list.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] | None = None
    of_lists: bool = False

    @property
    def key(self) -> Hashable:
        """Equal for calls that do the same."""
        kwargs = sorted((self.kwargs or {}).items())
        return self.function, self.of_lists, *map(_key, self.args), *((name, _key(value)) for name, value in kwargs)

    def do_to(self, samples: Tensor) -> None:
        """Does it to other elements of the same type."""
        self.function([samples] if self.of_lists else samples, *self.args, **(self.kwargs or {}))


def _key(item: Any) -> Hashable:
    if isinstance(item, Tensor):
        return id(item)
    return tuple(map(_key, item)) if isinstance(item, (list, tuple)) else item


_ZEROS = Change(torch.zero_)


@dataclass
class Changes:
    """What has been done to a gradient since ranks told each other whether it is finite.

    Attributes:
        dtype: of the gradient.
        done: in order.
        doubt: what might have made it finite, and might not have, by name; "" if nothing might.
        joined: what has put gradients of other backwards into it, by name; "" if nothing has.
    """

    dtype: torch.dtype
    done: list[Change]
    doubt: str = ""
    joined: str = ""

    def add(self, function: Callable[..., Any], name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Takes note of a call.

        Args:
            name: of the function.
            args: those behind what is changed; of each list, what belongs to this gradient, in a list.
        """
        change = Change(function, tuple(args), dict(kwargs), name.startswith("_foreach_"))
        is_known = name in _KNOWN and all(map(_is_number, (*args, *kwargs.values())))
        if name in _ANEW_BY or (is_known and name == "fill_"):
            self.done, self.doubt = [change if is_known else _ZEROS], ""
        elif is_known:
            self.done.append(change)
        else:
            self.add_to_some(name)

    def add_to_some(self, name: str) -> None:
        """Takes note of a call that has changed some elements, or each otherwise."""
        if name not in _LEAVES_INFINITE:
            self.doubt = name.removesuffix(".set")

    @property
    def key(self) -> Hashable:
        """Equal for those whose samples can be changed together."""
        return self.dtype, *(change.key for change in self.done)


def _is_number(item: Any) -> bool:
    if isinstance(item, (list, tuple)):
        return all(map(_is_number, item))
    return not isinstance(item, Tensor) or (not item.dim() and type(item) is Tensor)


def left(kinds: Tensor, changes: Changes) -> Tensor:
    """Tells whether something that is not finite is left of gradients that have been changed alike.

    Args:
        kinds: (gradients, 3): true where one had NaN, infinity, or minus infinity.
    """
    values = (torch.nan, torch.inf, -torch.inf)
    bad = torch.stack([torch.full((), value, dtype=changes.dtype, device=kinds.device) for value in values])
    # Others may become infinite, or NaN.
    samples = torch.cat([torch.where(kinds, bad, 1), torch.ones_like(bad[:1]).expand(len(kinds), 1)], 1)
    for change in changes.done:
        change.do_to(samples)
    return ~samples.isfinite().all()
