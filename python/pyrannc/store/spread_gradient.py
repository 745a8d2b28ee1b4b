"""The gradient of a parameter of which each Replica keeps a part: whole in form, this rank's piece in contents.

What a script does to every element alike, such as ``param.grad.mul_(0.5)``, is done to the pieces; what would need the
whole raises.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pyrannc.capture.torch_internals import pytree
from pyrannc.store.elsewhere import METADATA, ElsewhereTensor, Home, function_name, is_elsewhere, made_elsewhere, named
from pyrannc.store.unscale import UNSCALE, unscale_own


class SpreadGradient(ElsewhereTensor):
    """A gradient of which other ranks keep the other parts.

    Attributes:
        piece: this rank's part, possibly without elements.
    """

    piece: Tensor

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = function_name(func)
        if name not in METADATA and not name.startswith("grad."):
            return _done_to_pieces(func, name, args, dict(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs)


def spread_gradient(param: Tensor, name: str, ranks: tuple[int, ...], piece: Tensor) -> SpreadGradient:
    """What stands in a parameter's ``.grad``.

    Args:
        name: first name of the parameter.
        ranks: that have the pieces.
        piece: this rank's.
    """
    home = Home("the gradient of parameter", name, ranks, param.device, param.stride(), spread=True)
    made = made_elsewhere(param, home, SpreadGradient)
    made.piece = piece
    return made


def own_gradient(param: Tensor) -> Tensor | None:
    """What this rank has of a parameter's gradient."""
    grad = param.grad
    return grad.piece if isinstance(grad, SpreadGradient) else grad


_IN_PLACE = named(
    "zero_ fill_ copy_ add_ sub_ subtract_ mul_ multiply_ div_ divide_ true_divide_ neg_ clamp_ clamp_min_ clamp_max_ "
    "clip_ nan_to_num_ __iadd__ __isub__ __imul__ __idiv__ __itruediv__ _foreach_zero_ _foreach_copy_ _foreach_add_ "
    "_foreach_sub_ _foreach_mul_ _foreach_div_ _foreach_clamp_min_ _foreach_clamp_max_ _foreach_lerp_"
)
_COPIES = named("clone detach")


def _done_to_pieces(func: Callable[..., Any], name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Does to the pieces what a script does to gradients, where that is to each element alike."""
    leaves = pytree.tree_leaves((tuple(args), kwargs))
    spread = [leaf for leaf in leaves if isinstance(leaf, SpreadGradient)]
    home = spread[0].home
    if name == UNSCALE:
        own = [_piece(grad) for grad in args[0] if isinstance(grad, SpreadGradient) or not is_elsewhere(grad)]
        return unscale_own(func, [grad for grad in own if grad.numel()], *args[1:])
    if name in _COPIES:
        made = made_elsewhere(spread[0].stand_in(), home, SpreadGradient)
        made.piece = func(spread[0].piece, *args[1:], **kwargs)
        return made
    if name not in _IN_PLACE or not all(map(_is_here, pytree.tree_leaves(args[0]))) or not _are_alike(args[1:], kwargs):
        home.refuse(f"{name}()")
    plain_args, plain_kwargs = pytree.tree_map(_piece, (tuple(args), kwargs))
    with torch.no_grad():
        func(*plain_args, **plain_kwargs)
    return args[0]


def _is_here(item: Any) -> bool:
    return isinstance(item, SpreadGradient) or not is_elsewhere(item)


def _are_alike(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """True when the other tensors are numbers or in pieces too."""
    others = [leaf for leaf in pytree.tree_leaves((tuple(args), dict(kwargs))) if isinstance(leaf, Tensor)]
    return all(isinstance(other, SpreadGradient) or not other.dim() for other in others)


def _piece(item: Any) -> Any:
    return item.piece if isinstance(item, SpreadGradient) else item
