"""Tensors of which each Replica keeps a part: whole in form, this rank's piece in contents.

What a script does to every element alike, such as ``param.grad.mul_(0.5)``, is done to the pieces; what would need the
whole raises.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from pyrannc.capture.torch_internals.tensors import DisableTorchFunctionSubclass, pytree
from pyrannc.store.buckets import elements, elements_by, strides_of
from pyrannc.store.elsewhere import (
    Elsewhere,
    ElsewhereParameter,
    ElsewhereTensor,
    guard,
    ids_of_params,
    in_place_of,
    is_elsewhere,
    made_elsewhere,
    stays_itself,
    without_out,
)
from pyrannc.store.home import Guarded, Home
from pyrannc.store.note_changes import at, note_changed, note_dropped, note_replaced
from pyrannc.store.sending import is_sending
from pyrannc.store.torch_functions import DRAWN, METADATA, OF_AUTOGRAD, function_name, is_write, named
from pyrannc.store.unscale import UNSCALE, unscale_own


class Spread(Elsewhere):
    """What both classes of tensors share.

    Attributes:
        piece: this rank's part, possibly without elements.
        start: its place among the elements as they lie in memory.
    """

    piece: Tensor
    start: int

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = function_name(func)
        if name.startswith("grad.") and isinstance(args[0], Spread):
            if name != "grad.get":
                note_dropped(args)
            with DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if name in METADATA or name in OF_AUTOGRAD or name in DRAWN:
            return super().__torch_function__(func, types, args, kwargs)
        return _done_to_pieces(func, name, args, dict(kwargs or {}))


class SpreadTensor(Spread, ElsewhereTensor):  # type: ignore[misc]  # their text is another
    """A gradient, or a parameter's data."""


class SpreadParameter(Spread, ElsewhereParameter):  # type: ignore[misc]  # likewise
    """A parameter."""


def spread_gradient(param: Tensor, name: str, ranks: tuple[int, ...], piece: Tensor, start: int) -> SpreadTensor:
    """What stands in a parameter's ``.grad``.

    Args:
        name: first name of the parameter.
        ranks: that have the pieces.
        piece: this rank's.
        start: place of its first element.
    """
    home = Home(
        "the gradient of parameter",
        name,
        ranks,
        param.device,
        param.stride(),
        spread=True,
        param=id(param),
        covers="all",
    )
    return _made(param, home, piece, start)


def spread_param(param: nn.Parameter, name: str, ranks: tuple[int, ...], piece: Tensor, start: int) -> None:
    """Leaves a parameter its form, without gaps, and a piece, on whose device it then is; the object stays the same."""
    home = Home("parameter", name, ranks, piece.device, strides_of(param), type(param), spread=True, param=id(param))
    guard(param, home, SpreadParameter)
    assert isinstance(param, SpreadParameter)
    param.piece, param.start = piece, start


def spread_state(
    size: torch.Size, strides: tuple[int, ...], name: str, ranks: tuple[int, ...], piece: Tensor, start: int
) -> SpreadTensor:
    """What scripts find of the optimizer's state of a parameter.

    Args:
        size: of the parameter, and its ``strides``.
        name: its first name.
        ranks: that have the pieces.
        piece: this rank's.
        start: place of its first element.
    """
    home = Home("the optimizer's state of parameter", name, ranks, piece.device, strides, spread=True)
    return _made(torch.empty_strided(size, strides, dtype=piece.dtype, device="meta"), home, piece, start)


def own_gradient(param: Tensor) -> Tensor | None:
    """What this rank has of a parameter's gradient."""
    with DisableTorchFunctionSubclass():
        grad = param.grad
    return None if grad is None else own_piece(grad)


def own_gradients(params: Iterable[Tensor]) -> list[Tensor]:
    """What this rank has of parameters' gradients, where that is any element."""
    with DisableTorchFunctionSubclass():
        grads = [param.grad for param in params]
    own = [own_piece(grad) for grad in grads if grad is not None]
    return [grad for grad in own if grad.numel()]


def own_piece(tensor: Tensor) -> Tensor:
    """This rank's piece of a tensor, or the whole."""
    return tensor.piece if isinstance(tensor, Spread) else tensor


def is_spread(tensor: Tensor) -> bool:
    """True for what this rank has a piece of."""
    return isinstance(tensor, Spread)


def is_absent(tensor: Tensor) -> bool:
    """True for what this rank has nothing of."""
    return is_elsewhere(tensor) and not is_spread(tensor)


_IN_PLACE = named(
    "zero_ fill_ copy_ add_ sub_ subtract_ mul_ multiply_ div_ divide_ true_divide_ neg_ clamp_ clamp_min_ clamp_max_ "
    "clip_ nan_to_num_ lerp_ addcmul_ addcdiv_ __iadd__ __isub__ __imul__ __idiv__ __itruediv__ _foreach_zero_ "
    "_foreach_copy_ _foreach_add_ _foreach_sub_ _foreach_mul_ _foreach_div_ _foreach_clamp_min_ _foreach_clamp_max_ "
    "_foreach_lerp_ _foreach_addcmul_ _foreach_addcdiv_"
)
_COPIES = named("clone detach data.get")
_MOVES = named("to cpu cuda")


def _done_to_pieces(func: Callable[..., Any], name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Does to the pieces what a script does to tensors, where that is to each element alike."""
    leaves = pytree.tree_leaves((tuple(args), kwargs))
    first = next(leaf for leaf in leaves if isinstance(leaf, Spread))
    if is_sending(func):
        first.home.refuse_sending(f"dist.{name}()")
    in_place = in_place_of(name, args, kwargs)
    if in_place is not None:
        return _done_to_pieces(in_place, function_name(in_place), args, without_out(kwargs))
    if stays_itself(name, first, args, kwargs):
        return first
    if name == UNSCALE:
        own = [own_piece(grad) for grad in args[0] if not is_absent(grad)]
        note_replaced(args[0])
        return unscale_own(func, [grad for grad in own if grad.numel()], ids_of_params(args[0]), *args[1:])
    if name in _MOVES and first.home.is_of_state:
        moved = func(first.piece, *args[1:], **kwargs)
        return _made(first.stand_in().to(moved.dtype), replace(first.home, device=moved.device), moved, first.start)
    if name in _COPIES and (name == "data.get" or not isinstance(first, SpreadParameter)):
        home = replace(first.home, covers="") if name == "clone" else first.home
        with DisableTorchFunctionSubclass():
            return _made(first, home, func(first.piece, *args[1:], **kwargs), first.start)
    if name not in _IN_PLACE:
        is_target = not args or args[0] is first
        first.home.refuse_call(name, writes=is_write(name) and is_target and _has_no_other(first, leaves))
    note_changed(func, name, args, kwargs)
    if not isinstance(args[0], (list, tuple)):
        _change(func, name, args, kwargs)
    else:
        for place in range(len(args[0])):
            _change(func, name, [at(place, arg) for arg in args], kwargs)
    return args[0]


def _has_no_other(target: Spread, leaves: Sequence[Any]) -> bool:
    """True where a call gets no contents of other ranks' but those of its target."""
    return not any(isinstance(leaf, Guarded) and leaf is not target for leaf in leaves)


def _change(func: Callable[..., Any], name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Changes one target in place."""
    (target,) = pytree.tree_leaves(args[0])
    leaves = pytree.tree_leaves((tuple(args[1:]), kwargs))
    if not isinstance(target, Spread):
        wrong = next((leaf for leaf in (target, *leaves) if isinstance(leaf, Guarded)), None)
        if wrong is not None:
            wrong.home.refuse_call(name, writes=False)
        func(*args, **kwargs)
        return
    if not all(_can_be_taken(leaf, target) for leaf in leaves):
        target.home.refuse_call(name, writes=_has_no_other(target, leaves))
    assert isinstance(target, Tensor)
    if torch.is_grad_enabled() and target.requires_grad:
        # torch refuses a change in place of what requires gradients, and says why.
        target.stand_in().mul_(1)
    plain_args, plain_kwargs = pytree.tree_map(lambda item: _taken(item, target), (tuple(args), kwargs))
    with torch.no_grad():
        func(*plain_args, **plain_kwargs)


def _can_be_taken(item: Any, target: Spread) -> bool:
    """True for what pieces can be changed with: pieces of the same elements, numbers, whole tensors of that form."""
    if not isinstance(item, Tensor) or (not item.dim() and not is_elsewhere(item)):
        return True
    assert isinstance(target, Tensor)
    if isinstance(item, Spread):
        has = target.piece.numel()
        return item.shape == target.shape and item.piece.numel() == has and (item.start == target.start or not has)
    return not is_elsewhere(item) and item.shape == target.shape


def _taken(item: Any, target: Spread) -> Any:
    """Of a tensor the elements of the target's piece, in one dimension; others as they are."""
    if isinstance(item, Spread):
        return elements(item.piece, 0, item.piece.numel())
    if not isinstance(item, Tensor) or not item.dim():
        return item
    return elements_by(target.home.strides, item.detach(), target.start, target.start + target.piece.numel())


def _made(like: Any, home: Home, piece: Tensor, start: int) -> SpreadTensor:
    made = made_elsewhere(like.stand_in() if isinstance(like, Guarded) else like, home, SpreadTensor)
    made.piece, made.start = piece, start
    return made
