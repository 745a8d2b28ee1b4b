"""What a deployment took for granted of this rank's own parameters and buffers, checked before each call."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter, getitem, is_
from typing import Any, TypeVar

from torch import Tensor, nn

from pyrannc.capture.reads.lacking import Lacking
from pyrannc.capture.torch_internals.gradients import tensor_hooks
from pyrannc.capture.torch_internals.modules import own_buffers, own_modules, own_params
from pyrannc.capture.torch_internals.tensors import DisableTorchFunctionSubclass
from pyrannc.errors import InputError, MismatchError
from pyrannc.job import agree

_requires_grad = attrgetter("requires_grad")
_Held = TypeVar("_Held", bound=Tensor)


class ParamGuards:
    """This rank's parameters and buffers as they were at deployment.

    Args:
        model: the user's.
        params: that this rank computes with, by first name.
        leaves: what it computes with in their place.
        buffers: that this rank holds, by first name.
        trainable: whether each parameter of the model that some rank holds requires gradients.
        spread: parameters of whose gradients each rank keeps a part; none has hooks.
    """

    def __init__(
        self,
        model: nn.Module,
        params: Mapping[str, nn.Parameter],
        leaves: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
        trainable: Iterable[bool],
        spread: Sequence[Tensor] = (),
    ) -> None:
        self.flags = tuple(trainable)
        # Those that are kept in parts have no data that a script could replace.
        whole = {name: param for name, param in params.items() if not isinstance(param, Lacking)}
        self._whole, self._whole_names = list(whole.values()), list(whole)
        self._leaves = [leaves[name] for name in whole]
        self._spread = spread
        self._model = model
        self._names, self._params = _under_all_names(params, model.named_parameters(remove_duplicate=False))
        self._keys = list(map(_last, self._names))
        self._pointers = list(map(Tensor.data_ptr, self._leaves))
        self._own_flags = list(map(_requires_grad, self._params))
        self._buffer_names, self._buffers = _under_all_names(buffers, model.named_buffers(remove_duplicate=False))
        self._buffer_keys = list(map(_last, self._buffer_names))
        self._find_homes()

    def _find_homes(self) -> None:
        """Where the model has its parameters and buffers now, and the sub-modules on the way there.

        Raises:
            AttributeError: there is no such sub-module.
        """
        owners = [_owner(name) for name in (*self._names, *self._buffer_names)]
        homes = {path: self._model.get_submodule(path) for path in owners}
        self._homes = [own_params(homes[_owner(name)]) for name in self._names]
        self._buffer_homes = [own_buffers(homes[_owner(name)]) for name in self._buffer_names]
        ways = dict.fromkeys(path for owner in homes for path in _way_to(owner))
        self._families = [own_modules(self._model.get_submodule(_owner(path))) for path in ways]
        self._children = list(map(_last, ways))
        self._on_way = list(map(getitem, self._families, self._children))

    def check(self) -> bool:
        """False when ``requires_grad`` of some parameter has changed, or one has a hook that may not.

        New ``.data`` is taken over.

        Raises:
            InputError: a parameter or buffer was replaced, or its data has another form.
        """
        try:
            if not all(map(is_, map(getitem, self._families, self._children), self._on_way)):
                self._find_homes()
            params = list(map(getitem, self._homes, self._keys))
            kept = all(map(is_, params, self._params))
            kept = kept and all(map(is_, map(getitem, self._buffer_homes, self._buffer_keys), self._buffers))
        except (KeyError, AttributeError):
            kept = False
        if not kept:
            raise InputError(self._replaced())
        if list(map(Tensor.data_ptr, self._whole)) != self._pointers:
            self._take_over_data()
        with DisableTorchFunctionSubclass():
            hooked = any(map(any, map(tensor_hooks, self._spread)))
            return not hooked and list(map(_requires_grad, self._params)) == self._own_flags

    def _take_over_data(self) -> None:
        for place, (name, param, leaf) in enumerate(zip(self._whole_names, self._whole, self._leaves, strict=True)):
            if param.data_ptr() == self._pointers[place]:
                continue
            form, known = _form(param), _form(leaf)
            if form != known:
                raise InputError(
                    f'the data of parameter "{name}" was replaced by {form}, where the deployed model has {known}; '
                    "give it data of the same form, or call undeploy() first"
                )
            leaf.data = param.data
            self._pointers[place] = param.data_ptr()

    def _replaced(self) -> str:
        now: dict[str, Tensor] = dict(self._model.named_parameters(remove_duplicate=False))
        now |= self._model.named_buffers(remove_duplicate=False)
        known = zip((*self._names, *self._buffer_names), (*self._params, *self._buffers), strict=True)
        gone = [name for name, tensor in known if now.get(name) is not tensor]
        return (
            f'"{gone[0]}" of the model is another object than at deployment; change it in place (with torch.no_grad(): '
            "param.copy_(...)), or call undeploy() before it or its sub-module is replaced"
        )


def agree_on_trainable(params: Mapping[str, nn.Parameter], own: Iterable[str]) -> None:
    """Gives every rank the ``requires_grad`` that parameters have on the ranks that hold them. All ranks call it.

    Args:
        params: of the whole model, by first name.
        own: that this rank holds.

    Raises:
        MismatchError: ranks that hold a parameter disagree.
    """
    everyone: list[dict[str, bool]] = agree.gather_objects({name: params[name].requires_grad for name in own})
    for name, param in params.items():
        flags = {rank: found[name] for rank, found in enumerate(everyone) if name in found}
        if len(set(flags.values())) > 1:
            told = ", ".join(f"{flag} on rank {rank}" for rank, flag in flags.items())
            raise MismatchError(f'requires_grad of parameter "{name}" is {told}; set it on all ranks')
        if flags:
            param.requires_grad_(next(iter(flags.values())))


def _under_all_names(own: Mapping[str, _Held], named: Iterable[tuple[str, Tensor]]) -> tuple[list[str], list[_Held]]:
    """The names that a model has for some of its tensors, and the tensor of each."""
    known = {id(tensor): tensor for tensor in own.values()}
    names = {name: known[id(tensor)] for name, tensor in named if id(tensor) in known}
    return list(names), list(names.values())


def _owner(path: str) -> str:
    """The path of the sub-module that has it."""
    return path.rpartition(".")[0]


def _last(path: str) -> str:
    """What it is called there."""
    return path.rpartition(".")[2]


def _way_to(path: str) -> list[str]:
    """The paths of the sub-modules from the model's own to this one."""
    names = path.split(".") if path else []
    return [".".join(names[:count]) for count in range(1, len(names) + 1)]


def _form(tensor: Any) -> str:
    return f"{tensor.dtype} {tuple(tensor.shape)} on {tensor.device}"
