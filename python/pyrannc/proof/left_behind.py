"""Tensors of a capture that the forward has left in Python objects, which no later call may read."""

from __future__ import annotations

from typing import Any

import torch

from pyrannc.capture.torch_internals.fakes import FakeTensor, TraceMode
from pyrannc.capture.torch_internals.tensors import BesideCompiler, pytree
from pyrannc.capture.user.source import Place, raised_at
from pyrannc.errors import CaptureError

_DESCRIBE = (torch.ops.prim.device.default, torch.ops.prim.layout.default)
"""What reads no contents: torch ends the process where one of these raises."""


class LeftBehindError(Exception):
    """An operator is given a tensor that has no contents."""


class RefusesLeftBehind(BesideCompiler):  # type: ignore[no-untyped-call]  # torch has no types for it
    """While active, operators take no tensors of a capture."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _DESCRIBE and any(map(_is_of_capture, pytree.tree_leaves((args, kwargs)))):
            raise LeftBehindError(str(func))
        return func(*args, **(kwargs or {}))


def _is_of_capture(item: object) -> bool:
    return isinstance(item, FakeTensor) and isinstance(item.fake_mode, TraceMode)


def refusal(error: LeftBehindError) -> CaptureError:
    """What the user is told."""
    return CaptureError(
        f"{raised_at(error, Place(''))} reads a tensor that an earlier call of the model has left in a Python object, "
        "such as a helper, a dict or a global variable, where a captured call leaves nothing. Register it as a buffer "
        "(self.register_buffer(...)) and change it with copy_(), or return it from the forward and give it to the next "
        "call as an argument"
    )
