"""The outputs of a training call that a script asks for; what it does not ask for is neither kept nor moved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from pyrannc.capture.user.absent import Absent
from pyrannc.capture.user.flatten import flatten
from pyrannc.errors import CaptureError


def only_asked(result: Any, outputs: Sequence[str | int] | None) -> Any:
    """What a model returns, with what raises when it is used in the place of tensors that nobody asks for.

    Args:
        result: of a call.
        outputs: keys, attributes or positions of what is asked for; ``None``: all.

    Raises:
        CaptureError: the result has no such part, or only others lead back to parameters.
    """
    if outputs is None:
        return result
    parts = _parts(result)
    missing = [name for name in outputs if name not in parts]
    if missing:
        raise CaptureError(f"RaNNCModule(..., outputs={list(outputs)}): the model returns {_told(result, parts)}")
    asked = {id(tensor) for name in outputs for tensor in flatten(parts[name])[0]}
    leaves, structure = flatten(result)
    kept = [id(leaf) in asked for leaf in leaves]
    if not any(leaf.requires_grad for leaf, keep in zip(leaves, kept, strict=True) if keep) and any(
        leaf.requires_grad for leaf in leaves
    ):
        raise CaptureError(
            f"RaNNCModule(..., outputs={list(outputs)}): nothing of this leads back to parameters, so the model would "
            f"not train; it returns {_told(result, parts)}"
        )
    names = {id(tensor): name for name, part in parts.items() for tensor in flatten(part)[0]}
    return structure.rebuild(
        [leaf if keep else _left_out(names.get(id(leaf)), outputs) for leaf, keep in zip(leaves, kept, strict=True)]
    )


def _left_out(name: str | int | None, outputs: Sequence[str | int]) -> Absent:
    return Absent(
        f"output {name!r} of the model was left where it was made, since RaNNCModule(..., outputs={list(outputs)}) "
        "does not ask for it: add it there, or call model.eval() first, for in evaluation mode all outputs come back"
    )


def _parts(result: Any) -> dict[str | int, Any]:
    """What a result has, by key, attribute or position."""
    if isinstance(result, Mapping):
        return _by_position(result) | dict(result)
    if isinstance(result, (list, tuple)):
        fields: Sequence[str] = getattr(result, "_fields", ())
        return dict(enumerate(result)) | dict(zip(fields, result, strict=bool(fields)))
    return {} if isinstance(result, Tensor) else dict(getattr(result, "__dict__", {}))


def _by_position(result: Mapping[Any, Any]) -> dict[str | int, Any]:
    """What ``result[0]`` and so on give, of a dict that takes positions as those of transformers do."""
    to_tuple = getattr(result, "to_tuple", None)
    return dict(enumerate(to_tuple())) if callable(to_tuple) else {}


def _told(result: Any, parts: Mapping[str | int, Any]) -> str:
    held = [repr(name) for name, part in parts.items() if flatten(part)[0]]
    if isinstance(result, Tensor):
        return "one tensor"
    return f"a {type(result).__name__} with {', '.join(held)}" if held else f"a {type(result).__name__} without tensors"
