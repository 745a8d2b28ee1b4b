"""Full state dicts: gathered from, and given back to, the ranks that hold the parts, one tensor at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from torch import Tensor, nn

from pyrannc.capture.torch_internals.modules import EXTRA_STATE, reparametrized
from pyrannc.capture.trace.attributes import PlainAttributes, PlainChange
from pyrannc.checkpoint.recording import recording
from pyrannc.errors import RaNNCError
from pyrannc.job import agree, process
from pyrannc.store.store import ParamStore


def full_state_dict(
    model: nn.Module, store: ParamStore, args: Sequence[Any], kwargs: Mapping[str, Any], *, rank0_only: bool
) -> dict[str, Any]:
    """The model's state dict with the tensors of their owners, on the host. All ranks call it.

    Args:
        args: of the model's ``state_dict``.
        kwargs: likewise.
        rank0_only: only rank 0 gets it; the others get an empty dict.
    """
    gathered = full_tensors(model, store, rank0_only=rank0_only)
    if rank0_only and process.get_rank() != 0:
        return {}
    with reparametrized(model, dict(_by_place(model, gathered))):
        state: dict[str, Any] = model.state_dict(*args, **kwargs)
    return state


def full_tensors(model: nn.Module, store: ParamStore, *, rank0_only: bool) -> dict[int, Tensor]:
    """All parameters and buffers on the host, by ``id``; with ``rank0_only`` none but on rank 0. All ranks call it.

    Raises:
        RaNNCError: the model has parameters that no call has seen; on all ranks.
    """
    agree.together(lambda: _refuse_late_params(model, store))
    take = store.on_first if rank0_only else store.full
    found = {id(tensor): take(name, tensor) for name, tensor in store.tensors()}
    # No call has read those that the script has put there since.
    late = _late_buffers(model, store).values()
    found.update((id(buffer), buffer.detach().to("cpu", copy=True)) for buffer in late)
    return {key: tensor for key, tensor in found.items() if tensor is not None}


def _late_buffers(model: nn.Module, store: ParamStore) -> dict[str, Tensor]:
    known = _known(store)
    return {name: buffer for name, buffer in model.named_buffers() if id(buffer) not in known}


def _refuse_late_params(model: nn.Module, store: ParamStore) -> None:
    known = _known(store)
    for name, param in model.named_parameters():
        if id(param) not in known:
            refuse_late(name)


def _known(store: ParamStore) -> set[int]:
    """``id`` of all that a call has seen."""
    return {id(tensor) for _, tensor in store.tensors()}


def refuse_late(name: str) -> NoReturn:
    """Raises of a parameter that no call has seen."""
    raise RaNNCError(
        f'parameter "{name}" was put into the model after its last call, so no rank knows its values yet: call the '
        "model first"
    )


@dataclass
class _Loaded:
    """What rank 0 has found out about a state dict.

    Attributes:
        keys: what ``torch.nn.Module.load_state_dict`` returns.
        error: what it raises.
        names: of the parameters and buffers that it sets.
        extra: what ``set_extra_state`` of sub-modules is called with, by path.
        attributes: what else the model's own code has changed while it was loaded, likewise.
    """

    keys: Any = None
    error: str | None = None
    names: list[str] = field(default_factory=list)
    extra: dict[str, Any] = field(default_factory=dict)
    attributes: dict[str, list[PlainChange]] = field(default_factory=dict)


def load_full_state_dict(
    model: nn.Module, store: ParamStore, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
) -> Any:
    """Loads rank 0's state dict into the parts that each rank holds. All ranks call it.

    Nothing is changed unless all of it fits.

    Returns:
        What ``torch.nn.Module.load_state_dict`` returns.

    Raises:
        RaNNCError: ``assign`` is set.
        RuntimeError: keys or shapes do not fit, as torch says it; on all ranks.
    """
    agree.together(lambda: _refuse_assign(assign))
    loaded, failure = _Loaded(), None
    contents: dict[str, Tensor] = {}
    if process.get_rank() == 0:
        before = PlainAttributes(model)
        try:
            loaded, contents = _try(model, store, state_dict, strict)
        except Exception as error:
            failure = error
            loaded.error = str(error) if isinstance(error, RuntimeError) else f"{type(error).__name__}: {error}"
        loaded.attributes = before.changed()
    loaded = agree.broadcast_object(loaded)
    if failure is not None:
        raise failure
    if loaded.error is not None:
        _set_attributes(model, loaded.attributes)
        raise RuntimeError(loaded.error)
    tensors = {**dict(store.tensors()), **_late_buffers(model, store)}
    for name in loaded.names:
        tensor, given = tensors[name], contents.get(name)
        if given is not None:
            given = given.detach().to(tensor.dtype).expand(tensor.shape)
        store.take_from_first(name, tensor, given)
    if process.get_rank() != 0:
        for path, extra in loaded.extra.items():
            model.get_submodule(path).set_extra_state(extra)
        _set_attributes(model, loaded.attributes)
    return loaded.keys


def _set_attributes(model: nn.Module, attributes: Mapping[str, Sequence[PlainChange]]) -> None:
    """As rank 0's hooks have left them, which no other rank has run."""
    for path, changes in attributes.items():
        for change in changes:
            change.do_to(model.get_submodule(path))


def _refuse_assign(assign: bool) -> None:
    if assign:
        raise RaNNCError(
            "load_state_dict(..., assign=True) would replace parameters of a deployed model; leave out assign=True"
        )


def _try(
    model: nn.Module, store: ParamStore, state_dict: Mapping[str, Any], strict: bool
) -> tuple[_Loaded, dict[str, Tensor]]:
    """Lets torch load the dict, and keeps what it would have copied where."""
    with recording([*store.tensors(), *_late_buffers(model, store).items()]) as recorded:
        keys = model.load_state_dict(state_dict, strict=strict)
    loaded = _Loaded(keys=keys, names=list(recorded))
    for path, module in model.named_modules():
        key = f"{path}.{EXTRA_STATE}" if path else EXTRA_STATE
        if key in state_dict and type(module).set_extra_state is not nn.Module.set_extra_state:
            loaded.extra[path] = state_dict[key]
    return loaded, recorded


def _by_place(model: nn.Module, gathered: Mapping[int, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """The tensors by the path of each module, which a model may have several times, that refers to them."""
    for path, module in model.named_modules():
        for name, tensor in (*module.named_parameters(path, False, False), *module.named_buffers(path, False, False)):
            yield name, gathered[id(tensor)]
