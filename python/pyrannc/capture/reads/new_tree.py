"""Sub-modules that a call puts in the place of others, over the same parameters: later calls find them there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from pyrannc.capture.torch_internals.fakes import FakeTensor
from pyrannc.capture.torch_internals.modules import own_buffers, own_modules, own_params
from pyrannc.capture.torch_internals.symbols import SYMBOLIC
from pyrannc.capture.user.flatten import flatten
from pyrannc.capture.user.source import Place
from pyrannc.errors import CaptureError

Left = tuple[nn.Module, str, Any]
"""A sub-module, an attribute of it, and the plain value that a call leaves there."""
Written = Callable[[nn.Module, str], Place | None]
"""Where the forward has last set an attribute of a sub-module."""
_ADVICE = (
    "call the model once on such a batch before the optimizer and RaNNCModule(model, ...) are made, or make in "
    "__init__ what it needs"
)


@dataclass(frozen=True)
class NewTree:
    """The sub-modules that a traced call leaves in a model, where they are not those that it has found.

    Attributes:
        kinds: the class of each, by path.
        children: those of each sub-module that was there before and has others now.
        where: the forward puts one there.
    """

    kinds: Mapping[str, type[nn.Module]]
    children: Mapping[nn.Module, Mapping[str, nn.Module | None]]
    where: Place | None

    @contextmanager
    def adopted(self, left: Sequence[Left]) -> Iterator[None]:
        """The model is as after the call, attributes too; it stays so unless an error is raised."""
        changed = dict.fromkeys([*self.children, *(module for module, _, _ in left)])
        own: list[dict[str, Any]] = [mapping for module in changed for mapping in (vars(module), own_modules(module))]
        before = [dict(mapping) for mapping in own]
        for module, children in self.children.items():
            _fill(own_modules(module), children)
        for module, name, value in left:
            vars(module)[name] = value
        try:
            yield
        except BaseException:
            for mapping, content in zip(own, before, strict=True):
                _fill(mapping, content)
            raise

    def is_like(self, later: NewTree | None) -> bool:
        """Whether the call after it leaves the same: these sub-modules, or such ones again."""
        return later is None or later.kinds == self.kinds

    def refusal(self) -> CaptureError:
        """The error for a call after which the next one does something else."""
        return CaptureError(
            f"{self.where or 'the forward'} puts a sub-module in the place of another one, and the call after that "
            f"does something else: {_ADVICE}"
        )


class Tree:
    """The sub-modules of a model before a call, with its parameters and buffers."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._children = {module: _children(module) for module in model.modules()}
        self._held = _held(model)

    def after(self, given: Mapping[str, Tensor], written: Written) -> NewTree | None:
        """What a traced call has made of it; None where the sub-modules are those from before.

        Args:
            given: what stands in the place of parameters and buffers meanwhile, by all their names.
            written: tells where attributes were.

        Raises:
            CaptureError: it makes parameters or takes some away, or makes sub-modules that hold tensors of their own.
        """
        every = dict(self._model.named_modules(remove_duplicate=False))
        self._refuse_other_tensors(every, given, written)
        changed = [module for module, children in self._children.items() if _children(module) != children]
        if not changed:
            return None
        for path, module in every.items():
            if module not in self._children:
                self._give_back(path, module)
                _refuse_kept(path, module, _where(path, every, written))
        places = (written(module, name) for module in changed for name in self._other_children(module))
        return NewTree(
            kinds={path: type(module) for path, module in every.items()},
            children={module: _children(module) for module in changed},
            where=next((place for place in places if place is not None), None),
        )

    def _refuse_other_tensors(
        self, every: Mapping[str, nn.Module], given: Mapping[str, Tensor], written: Written
    ) -> None:
        """Raises CaptureError for the first name under which there is not the tensor that the call has found there.

        Buffers may be made and assigned where the sub-module stays.
        """
        now = _held(self._model)
        for name, (kind, _) in (self._held | now).items():
            if kind == "buffer" and every.get(_owner(name)) in self._children:
                continue
            if name in now and now[name][1] is given.get(name):
                continue
            does = "takes away" if name not in now else "puts another tensor into" if name in given else "makes"
            raise CaptureError(
                f"{_where(name, every, written) or 'the forward'} {does} {kind} '{name}' in the forward, of which "
                f"neither the optimizer nor a plan would know: {_ADVICE}"
            )

    def _other_children(self, module: nn.Module) -> Iterator[str]:
        before = self._children[module]
        return (name for name, child in own_modules(module).items() if before.get(name) is not child)

    def _give_back(self, path: str, module: nn.Module) -> None:
        """A new sub-module holds the model's own tensors in the place of those that it was traced with."""
        own: list[dict[str, Any]] = [own_params(module), own_buffers(module)]
        for mapping in own:
            mapping.update(
                {name: self._held[f"{path}.{name}"][1] for name, item in mapping.items() if item is not None}
            )


def _children(module: nn.Module) -> dict[str, nn.Module | None]:
    """Sub-modules by attribute; what a scripted module has them in is no dictionary."""
    return dict(own_modules(module))


def _held(model: nn.Module) -> dict[str, tuple[str, Tensor]]:
    """Parameters and buffers, by all their names."""
    params = model.named_parameters(remove_duplicate=False)
    buffers = model.named_buffers(remove_duplicate=False)
    return {name: ("parameter", item) for name, item in params} | {name: ("buffer", item) for name, item in buffers}


def _refuse_kept(path: str, module: nn.Module, where: Place | None) -> None:
    """Raises CaptureError for a new sub-module with a tensor or a number of the trace in an attribute."""
    for name, value in vars(module).items():
        tensors, structure = flatten(value)
        if any(isinstance(item, FakeTensor) for item in tensors) or any(
            isinstance(item, SYMBOLIC) for item in structure.constants()
        ):
            raise CaptureError(
                f"{where or 'the forward'} makes sub-module '{path}' in the forward, which keeps in attribute "
                f'"{name}" what comes from this batch: {_ADVICE}'
            )


def _where(name: str, every: Mapping[str, nn.Module], written: Written) -> Place | None:
    """Where the forward has last set what has this name, or else a sub-module that holds it."""
    while name:
        owner, attribute = _owner(name), name.rpartition(".")[2]
        where = written(every[owner], attribute) if owner in every else None
        if where is not None:
            return where
        name = owner
    return None


def _owner(name: str) -> str:
    return name.rpartition(".")[0]


def _fill(mapping: dict[str, Any], content: Mapping[str, Any]) -> None:
    mapping.clear()
    mapping.update(content)
