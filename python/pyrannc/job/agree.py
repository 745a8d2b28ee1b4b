"""What the ranks tell each other on the host, and how they fail together."""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable
from typing import Any, TypeVar

from pyrannc.errors import MismatchError, RaNNCError
from pyrannc.job import faults, process

_Result = TypeVar("_Result")

_NUMBERS, _OBJECTS, _OBJECT = range(3)


def gather_objects(item: Any) -> list[Any]:
    """Every rank's ``item``, in rank order, on every rank."""
    if process.get_world_size() == 1:
        return [item]
    return [pickle.loads(text) for text in faults.gather(_OBJECTS, pickle.dumps(item))]


def broadcast_object(item: Any) -> Any:
    """Rank 0's ``item``."""
    if process.get_world_size() == 1:
        return item
    texts = faults.gather(_OBJECT, pickle.dumps(item) if process.get_rank() == 0 else b"")
    return item if process.get_rank() == 0 else pickle.loads(texts[0])


def gather_numbers(numbers: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Every rank's numbers, of 64 bits with a sign, in rank order. As many on every rank."""
    if process.get_world_size() == 1:
        return [numbers]
    form = struct.Struct(f"={len(numbers)}q")
    return [form.unpack(text) for text in faults.gather(_NUMBERS, form.pack(*numbers))]


def together(attempt: Callable[[], _Result]) -> _Result:
    """Runs ``attempt`` on every rank; when it fails on one, all fail.

    Raises:
        MismatchError: another rank failed and this one did not; the message is the other's.
        Exception: what ``attempt`` raised here.
    """
    failure: Exception | None = None
    result: _Result | None = None
    try:
        result = attempt()
    except Exception as error:
        failure = error
    raise_together(failure)
    return result  # type: ignore[return-value]  # no rank failed


def raise_together(failure: Exception | None) -> None:
    """Raises on every rank when there is a failure on any."""
    texts: list[str | None] = gather_objects(None if failure is None else _one_line(failure))
    if failure is not None:
        raise failure
    for rank, text in enumerate(texts):
        if text is not None:
            raise MismatchError(f"rank {rank} cannot go on: {text}")


def _one_line(error: Exception) -> str:
    return str(error) if isinstance(error, RaNNCError) else f"{type(error).__name__}: {error}"
