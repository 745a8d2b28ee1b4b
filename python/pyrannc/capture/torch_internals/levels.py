"""The levels of ``torch.vmap``, ``torch.func.grad`` and the like, and other regions that captured Ops open."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._functorch import pyfunctorch
from torch.autograd import forward_ad

VMAP_BEGIN, VMAP_END = "_vmap_increment_nesting", "_vmap_decrement_nesting"
"""Names of the nodes round a ``torch.vmap``. Public: ``torch.vmap``, which leaves them."""


def functorch_is_active() -> bool:
    """True inside ``torch.vmap``, ``torch.func.grad`` and the like. Public: none."""
    return bool(torch._C._are_functorch_transforms_active())


def transforms_are_active() -> bool:
    """Inside of a transform of ``torch.func``, or of forward-mode differentiation. Public: none."""
    return functorch_is_active() or forward_ad._current_level >= 0


def is_batched_backward() -> bool:
    """Inside of a backward: true when it computes several gradients at once (``is_grads_batched``). Public: none."""
    level: int = torch._C._vmapmode_increment_nesting()
    torch._C._vmapmode_decrement_nesting()
    return level > 1 or functorch_is_active()


def is_batched(tensor: Tensor) -> bool:
    """True for a tensor that stands for several, as the gradients of such a backward do. Public: none.

    Where torch runs a backward on a thread of its own, as on GPUs, nothing else tells.
    """
    return tensor.layout == torch.strided and not torch._C._has_storage(tensor)


def only_vmap_is_active() -> bool:
    """Likewise, but true for ``torch.vmap`` alone, which differentiates nothing. Public: none."""
    levels = pyfunctorch.retrieve_all_functorch_interpreters()
    return bool(levels) and all(level.key() == torch._C._functorch.TransformType.Vmap for level in levels)


@contextmanager
def regions_ended() -> Iterator[None]:
    """At the end, also by an error, what captured Ops have begun is over. Public: none.

    That is levels of ``torch.vmap``, and parts with autocast or without gradients: generated code opens and closes them
    by calls, so that an error in between leaves them open.
    """
    before = _open()
    try:
        yield
    finally:
        _end(before)


def ending_regions(call: Callable[..., Any]) -> Callable[..., Any]:
    """A call of captured Ops that leaves nothing open when it fails; quick where it does not. Public: none."""

    @wraps(call)
    def ended(*args: Any) -> Any:
        before = _open()
        try:
            return call(*args)
        except BaseException:
            _end(before)
            raise

    return ended


class _Open(NamedTuple):
    """What stands open in this thread, and the settings of autocast."""

    levels: int
    grad: bool
    nesting: int
    caches: bool
    kinds: tuple[tuple[str, bool, torch.dtype], ...]


def _open() -> _Open:
    nesting = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    return _Open(
        torch._C._functorch.maybe_current_level() or 0,
        torch.is_grad_enabled(),
        nesting,
        torch.is_autocast_cache_enabled(),
        (
            ("cpu", torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
            ("cuda", torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")),
        ),
    )


def _end(before: _Open) -> None:
    now = _open()
    for _ in range(now.levels - before.levels):
        torch._C._functorch._vmap_decrement_nesting()
    torch.set_grad_enabled(before.grad)
    for _ in range(now.nesting - before.nesting):
        if torch.autocast_decrement_nesting() == 0:
            # Or a later region would find casts of weights that have been trained since.
            torch.clear_autocast_cache()
    if now.nesting > before.nesting:
        torch.set_autocast_cache_enabled(before.caches)
        for kind, enabled, dtype in before.kinds:
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, dtype)


def without_levels(tensor: Tensor) -> Tensor:
    """What a tensor inside of ``torch.vmap`` and the like is made of, which alone tells of gradients. Public: none."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor
