"""Parameters and buffers that other ranks hold: shape and type can be read, contents cannot.

Every rank runs the same script. What it does to each parameter by itself, such as ``p.data.clamp_(-1, 1)`` or an
optimizer by hand, is done by the ranks that hold the parameter, and is nothing here; what would need contents raises.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from pyrannc.capture.torch_internals.tensors import DisableTorchFunctionSubclass, pytree, refuse_reading
from pyrannc.job import process
from pyrannc.store.home import Guarded, Home
from pyrannc.store.note_changes import note_changed, note_dropped, note_replaced
from pyrannc.store.sending import is_sending, watch_sending
from pyrannc.store.torch_functions import (
    COPIES_OF_GRADIENT,
    DRAWN,
    EACH_BY_ITSELF,
    IN_PLACE,
    LIKE_ANOTHER,
    OF_AUTOGRAD,
    OF_DEVICE,
    OF_SHAPE,
    SHOW_ALL,
    SHOW_ALL_WITHOUT_GAPS,
    SHOW_SOME,
    function_name,
    is_write,
    title,
)
from pyrannc.store.unscale import UNSCALE, is_told, unscale_own


class Elsewhere(Guarded):
    """What both classes of tensors share."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return _answer(func, args, dict(kwargs or {}))


class ElsewhereParameter(Elsewhere, nn.Parameter):  # type: ignore[misc]  # its text is another
    """A parameter of other ranks."""


class ElsewhereTensor(Elsewhere, Tensor):  # type: ignore[misc]  # likewise
    """A buffer of other ranks, or what was computed of what other ranks hold."""


Made = TypeVar("Made", bound=ElsewhereTensor)


def send_away(tensor: Tensor, kind: str, name: str, ranks: tuple[int, ...], device: torch.device) -> None:
    """Frees a parameter or buffer that other ranks hold, and guards it; the object stays the same."""
    if isinstance(tensor, Guarded):
        return
    home = Home(kind, name, ranks, device, tensor.stride(), type(tensor), param=id(tensor))
    guard(tensor, home, ElsewhereParameter if isinstance(tensor, nn.Parameter) else ElsewhereTensor)


def guard(tensor: Tensor, home: Home, kind: type[ElsewhereParameter] | type[ElsewhereTensor]) -> None:
    """Frees a tensor, and guards it; the object stays the same."""
    watch_sending()
    tensor.grad = None
    tensor.data = _blank(home, tensor.shape, tensor.dtype, process.get_rank())
    tensor._home = home  # type: ignore[attr-defined]  # of the class it gets
    tensor.__class__ = kind


@lru_cache(maxsize=1 << 16)
def _blank(home: Home, shape: torch.Size, dtype: torch.dtype, rank: int) -> ElsewhereTensor:
    """What has no memory, kept for the next step. Code that goes round the guard, as scripted functions do, is told so.

    Args:
        rank: this one, which stands in what is told.
    """
    with torch.inference_mode(False):
        made: Any = torch.empty_strided(shape, [0] * len(shape), dtype=dtype, device=home.device)
    refuse_reading(made, home.why_not("this code"))
    made._home = home
    made.__class__ = ElsewhereTensor
    return made  # type: ignore[no-any-return]  # of the class it got


def keep_with(tensor: Tensor, store: object) -> None:
    """Keeps what can bring it back for as long as the script has the tensor, if that is guarded."""
    if is_elsewhere(tensor):
        vars(tensor)["_store"] = store


def bring_here(tensor: Tensor, contents: Tensor) -> None:
    """Takes the guard off, and gives the parameter or buffer contents."""
    if is_elsewhere(tensor):
        for name in ("_gradient", "_store", "piece", "start"):
            vars(tensor).pop(name, None)
        home: Home = vars(tensor).pop("_home")
        tensor.__class__ = home.plain
    tensor.data = contents


def is_elsewhere(tensor: Tensor) -> bool:
    """True for a parameter or buffer that other ranks hold."""
    return isinstance(tensor, Guarded)


def ids_of_params(tensors: Iterable[object]) -> set[int]:
    """``id`` of the parameters or buffers that those of other ranks are, or were made of."""
    return {tensor.home.param for tensor in tensors if isinstance(tensor, Guarded)}


# What scripts may do.


def _answer(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """What a function of torch gives that was called with a tensor of other ranks."""
    name = function_name(func)
    if name.startswith("grad."):
        if name == "grad.get":
            return _gradient(args[0])
        note_dropped(args)
        return None
    tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    first: Any = next(tensor for tensor in tensors if isinstance(tensor, Guarded))
    if is_sending(func):
        first.home.refuse_sending(f"dist.{name}()")
    if name == UNSCALE:
        own = [grad for grad in args[0] if not isinstance(grad, Guarded)]
        note_replaced(args[0])
        return unscale_own(func, own, ids_of_params(args[0]), *args[1:])
    if first is not tensors[0]:
        if name in LIKE_ANOTHER:
            return func(args[0], first.stand_in())
        if func is torch.autograd.grad:
            first.home.refuse_differentiating()
        first.home.refuse(title(name))
    if stays_itself(name, first, args, kwargs):
        return first
    if name in OF_AUTOGRAD:
        with DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    if name in OF_DEVICE:
        return OF_DEVICE[name](first.home.device)
    if name in OF_SHAPE:
        return func(first.stand_in(), *args[1:], **kwargs)
    if name in DRAWN:
        return _drawn(func, first, args, kwargs)
    return _written_or_computed(func, name, tensors, args, kwargs)


def _written_or_computed(
    func: Any, name: str, tensors: Sequence[Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
    """What a function gives that writes contents, or needs them, where that is to each element by itself."""
    first = tensors[0]
    if name == "data.set":
        note_changed(func, name, args, kwargs)
        return None
    if name in IN_PLACE and args and all(isinstance(item, Guarded) for item in pytree.tree_leaves(args[0])):
        note_changed(func, name, args, kwargs)
        return _changed(first, args[0])
    in_place = in_place_of(name, args, kwargs)
    if in_place is not None:
        return _answer(in_place, args, without_out(kwargs))
    guarded = sum(isinstance(tensor, Guarded) for tensor in tensors)
    by_itself = name in EACH_BY_ITSELF or (name in COPIES_OF_GRADIENT and first.home.is_of_gradient)
    if by_itself and "device" not in kwargs and guarded == len(tensors):
        if kwargs.get("out") is not None:
            return _put_out(func, name, args, kwargs)
        return _computed(func, args, kwargs, replace(first.home, covers=_covered(name, first)))
    first.home.refuse_call(name, writes=is_write(name) and guarded == 1)


def in_place_of(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Callable[..., Any] | None:
    """What does in place what ``out=`` of the first argument does; None for other calls."""
    out = kwargs.get("out")
    return getattr(Tensor, f"{name}_", None) if args and isinstance(out, Guarded) and out is args[0] else None


def without_out(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments by name, but for ``out``."""
    return {key: value for key, value in kwargs.items() if key != "out"}


def _put_out(func: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Takes note of results that replace all contents of ``out``."""
    out = kwargs["out"]
    note_changed(func, name, (out, *args), without_out(kwargs))
    return _changed(out, out)


def _changed(first: Guarded, what: Any) -> Any:
    """Nothing is changed here; but what torch refuses of a parameter, it refuses here too."""
    plain = first.stand_in()
    if torch.is_grad_enabled() and plain.requires_grad:
        plain.mul_(1)
    return what


def _covered(name: str, source: Guarded) -> str:
    """How many elements of a gradient what a function makes of another tensor shares."""
    if name in SHOW_ALL or name == "detach" or (name in SHOW_ALL_WITHOUT_GAPS and source.stand_in().is_contiguous()):
        return source.home.covers
    return "some" if name in SHOW_SOME and source.home.covers else ""


def stays_itself(name: str, source: Guarded, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """True for what gives its argument back, as ``contiguous()`` of what is so."""
    if name == "detach_" and isinstance(source, ElsewhereTensor):
        return True
    return name == "contiguous" and source.stand_in().is_contiguous(*args[1:], **kwargs)


def _drawn(func: Any, like: Guarded, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """A plain tensor, as all ranks have it."""
    device = kwargs.get("device")
    asked = {**kwargs, "device": like.home.device if device is None else device}
    asked.pop("input", None)
    return func(like.stand_in(), *args[1:], **asked)


def _computed(func: Any, args: Sequence[Any], kwargs: dict[str, Any], home: Home) -> Any:
    """Shapes and types of results, which are elsewhere too."""
    kind = home.kind if home.kind.startswith("what ") else f"what was computed of {home.kind}"

    def plain(item: Any) -> Any:
        return item.stand_in() if isinstance(item, Guarded) else item

    plain_args, plain_kwargs = pytree.tree_map(plain, (tuple(args), kwargs))
    with torch.no_grad():
        made = func(*plain_args, **plain_kwargs)
    return pytree.tree_map(lambda item: _value(item, replace(home, kind=kind)), made)


def _gradient(param: Any) -> Any:
    """What stands for a gradient, made once: scripts ask for it at every step."""
    own, home = vars(param), param._home
    with DisableTorchFunctionSubclass():
        # What was frozen after a backward keeps its gradient.
        if not param.requires_grad and not is_told(home.param):
            return None
    if "_gradient" not in own:
        own["_gradient"] = _value(param.stand_in(), replace(home, kind=f"the gradient of {home.kind}", covers="all"))
    return own["_gradient"]


def _value(made: Any, home: Home) -> Any:
    if not isinstance(made, Tensor):
        return made
    return made_elsewhere(made, home, ElsewhereTensor)


def made_elsewhere(like: Tensor, home: Home, kind: type[Made]) -> Made:
    """A guarded tensor of the form of another."""
    watch_sending()
    found = _blank(home, like.shape, like.dtype, process.get_rank()).as_subclass(kind)
    found._home = replace(home, strides=like.stride())
    return found
