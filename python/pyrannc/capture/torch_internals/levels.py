"""The levels of ``torch.vmap``, ``torch.func.grad`` and the like."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch._functorch import pyfunctorch

VMAP_BEGIN, VMAP_END = "_vmap_increment_nesting", "_vmap_decrement_nesting"
"""Names of the nodes round a ``torch.vmap``. Public: ``torch.vmap``, which leaves them."""


def functorch_is_active() -> bool:
    """True inside ``torch.vmap``, ``torch.func.grad`` and the like. Public: none."""
    return bool(torch._C._are_functorch_transforms_active())


def only_vmap_is_active() -> bool:
    """Likewise, but true for ``torch.vmap`` alone, which differentiates nothing. Public: none."""
    levels = pyfunctorch.retrieve_all_functorch_interpreters()
    return bool(levels) and all(level.key() == torch._C._functorch.TransformType.Vmap for level in levels)


@contextmanager
def vmap_levels_ended() -> Iterator[None]:
    """At the end, also by an error, levels of ``torch.vmap`` that captured Ops have begun are over. Public: none."""
    before = len(pyfunctorch.retrieve_all_functorch_interpreters())
    try:
        yield
    finally:
        for _ in range(len(pyfunctorch.retrieve_all_functorch_interpreters()) - before):
            torch._C._functorch._vmap_decrement_nesting()


def without_levels(tensor: Tensor) -> Tensor:
    """What a tensor inside of ``torch.vmap`` and the like is made of, which alone tells of gradients. Public: none."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor
