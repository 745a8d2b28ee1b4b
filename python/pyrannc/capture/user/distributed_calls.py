"""Which function of ``torch.distributed`` is called, told from the frames inside of it."""

from __future__ import annotations

from types import FrameType

from .source import module_of

_TORCH = "torch.distributed"
C10D = f"{_TORCH}.distributed_c10d"
"""Where most of its functions stand."""
LOGGER = f"{_TORCH}.c10d_logger"
"""Stands round most of them."""


def called_function(frame: FrameType | None, caller: FrameType) -> str:
    """The function that ``caller`` calls, as scripts name it; empty where it is none of these.

    Args:
        frame: inside of it.
    """
    found = ""
    while frame is not None and frame is not caller:
        module, name = module_of(frame), frame.f_code.co_name
        if module == C10D:
            # Methods with such a name make an object of that class.
            found = f"{_TORCH}.{'P2POp' if name.startswith('__') else name}"
        elif module.startswith(_TORCH) and module != LOGGER:
            found = f"{module}.{name}"
        frame = frame.f_back
    return found
