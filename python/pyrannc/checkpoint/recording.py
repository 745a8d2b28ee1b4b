"""What torch would copy into the parameters and buffers of a model, kept instead of copied."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from pyrannc.capture.torch_internals.tensors import DisableTorchFunctionSubclass
from pyrannc.errors import RaNNCError
from pyrannc.store.torch_functions import METADATA, function_name


class _Recorder:
    """What both classes of tensors share.

    Attributes:
        _record: what would have been copied where, by name.
        _record_name: first name in the model.
    """

    _record: dict[str, Tensor]
    _record_name: str

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = function_name(func)
        if name in METADATA:
            with DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        target = args[0] if args else None
        if isinstance(target, _Recorder):
            if name in ("data.get", "detach"):
                return target
            if name == "copy_" and args[1] is target:
                return target
            if name == "copy_" and not isinstance(args[1], _Recorder):
                target._record[target._record_name] = args[1]
                return target
        where = next(item for item in args if isinstance(item, _Recorder))._record_name
        raise RaNNCError(
            f'load_state_dict() of the model does more to "{where}" than to copy into it ({name}), which a deployed '
            "model cannot follow; call undeploy() first"
        )


class _RecordingParameter(_Recorder, nn.Parameter):
    """A parameter while a state dict is tried."""


class _RecordingTensor(_Recorder, Tensor):
    """A buffer while a state dict is tried."""


@contextmanager
def recording(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    """While active, copying into one of the tensors only notes what would have been copied, by name."""
    found: dict[str, Tensor] = {}
    before: list[tuple[Any, type]] = []
    try:
        for name, tensor in tensors:
            before.append((tensor, type(tensor)))
            tensor.__class__ = _RecordingParameter if isinstance(tensor, nn.Parameter) else _RecordingTensor
            vars(tensor).update(_record=found, _record_name=name)
        yield found
    finally:
        for tensor, kind in before:
            tensor.__class__ = kind
            del tensor._record, tensor._record_name
