"""What a traced call reads of the Python attributes of a model, and what it does to them."""

from __future__ import annotations

import copy
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from pyrannc.capture.nodes.facts import PLACE, memory
from pyrannc.capture.nodes.operands import arguments, mutated_arguments
from pyrannc.capture.nodes.ops import aliased_arguments, may_return_view
from pyrannc.capture.nodes.untraceable import UntraceableError
from pyrannc.capture.reads.assumptions import Attribute, PythonState
from pyrannc.capture.reads.beside import STAND_INS, BesideLog
from pyrannc.capture.reads.global_reads import GlobalReads
from pyrannc.capture.reads.new_tree import Left
from pyrannc.capture.torch_internals.modules import attribute_access
from pyrannc.capture.torch_internals.operators import OpOverload, schema
from pyrannc.capture.torch_internals.symbols import SYMBOLIC
from pyrannc.capture.torch_internals.tensors import pytree, storage_address, version
from pyrannc.capture.user.containers import CONTAINERS, content, fill
from pyrannc.capture.user.flatten import flatten
from pyrannc.capture.user.holdings import SCALARS, is_users_own
from pyrannc.capture.user.kinds import is_of
from pyrannc.capture.user.plain import PLAIN, is_plain
from pyrannc.capture.user.references import referents_in
from pyrannc.capture.user.source import Place, SourceTracker, belongs_to_user
from pyrannc.errors import CaptureError

_Key = tuple[int, str]
_ALL = "__dict__"
_HOOKED = "_output_capturing_hooks_installed"
"""Where transformers notes that a call has put hooks on sub-modules. They stay, and so does the note."""
INTERNAL = frozenset(vars(nn.Module())) - {"training"} | {_HOOKED}
"""Attributes that torch itself keeps in every module, and that note."""
_BUILT_IN = (dict, list, set)
_DEPTH = 4
"""How deep in containers and objects tensors are looked for."""
_MOST_ITEMS = 4096
"""Nor are they in longer ones."""
_MOST_VALUES = 20_000
"""So many values are looked at for them."""


@dataclass
class _Kept:
    """A sub-module before the call."""

    module: nn.Module
    path: str
    attributes: dict[str, Any]
    contents: dict[str, Any]

    def put_back(self) -> None:
        now = vars(self.module)
        self.attributes.update({_HOOKED: now[_HOOKED]} if _HOOKED in now else {})
        now.clear()
        now.update(self.attributes)
        for name, held in self.contents.items():
            fill(self.attributes[name], held)

    def changed(self) -> Iterator[PlainChange]:
        """Attributes that are not what they were, with what they are."""
        now = vars(self.module)
        for name, value in now.items():
            if name in INTERNAL:
                continue
            before = self.attributes.get(name, _MISSING)
            if name in self.contents:
                same = type(before) is type(value) and _same(self.contents[name], content(value))
            else:
                same = _same(before, value)
            if not same:
                yield PlainChange(name, value, before is value)


class PlainChange(NamedTuple):
    """An attribute that has changed.

    Attributes:
        name: of it.
        value: what it is now.
        in_place: it is the same container, with other items.
    """

    name: str
    value: Any
    in_place: bool

    def do_to(self, module: nn.Module) -> None:
        """Does the same to a copy of the sub-module in another process."""
        now = vars(module).get(self.name, _MISSING)
        if _same(now, self.value):
            return
        if self.in_place and type(now) is type(self.value):
            # The script may have it elsewhere too.
            fill(now, content(self.value))
        else:
            vars(module)[self.name] = self.value


_MISSING = object()


class PlainAttributes:
    """The plain Python attributes of a model's sub-modules as they are now.

    Args:
        model: the user's.
    """

    def __init__(self, model: nn.Module) -> None:
        self._kept = [_kept(path, module) for path, module in model.named_modules()]

    def changed(self) -> dict[str, list[PlainChange]]:
        """Those that have changed since, by path of the sub-module."""
        found = {kept.path: [change for change in kept.changed() if is_plain(change.value)] for kept in self._kept}
        return {path: changes for path, changes in found.items() if changes}


def _same(before: Any, now: Any) -> bool:
    if before is now:
        return True
    if type(before) is not type(now):
        return False
    if isinstance(before, dict):
        return before.keys() == now.keys() and all(_same(value, now[key]) for key, value in before.items())
    if isinstance(before, (list, tuple, deque)):
        return len(before) == len(now) and all(map(_same, before, now))
    return is_plain(before) and is_plain(now) and bool(before == now)


Carried = tuple[Attribute, Any]


class AttributeLog:
    """The Python attributes of a model's sub-modules, before and after a traced call.

    Args:
        model: as it is before the call.
        tracker: tells where the model writes.

    Attributes:
        written: what the call has set without having read it.
        carried: what it has changed for later calls, with what these find there.
        beside: what it has left elsewhere.
        left: all plain values that it has set.
    """

    def __init__(self, model: nn.Module, tracker: SourceTracker) -> None:
        self._model, self._tracker = model, tracker
        self._kept = [_kept(path, module) for path, module in model.named_modules()]
        self.beside = BesideLog(model, INTERNAL)
        self._paths = {id(kept.module): kept.path for kept in self._kept}
        self._read_first: dict[_Key, bool] = {}
        self._where: dict[_Key, Place] = {}
        self._left: set[_Key] = set()
        self._watching = True
        self.written: list[Attribute] = []
        self.carried: list[Carried] = []
        self.left: list[Left] = []

    @cached_property
    def _tensors(self) -> list[tuple[str, str, Tensor]]:
        """Tensors of the model that are neither parameters nor buffers: what holds one, its name, and the tensor."""
        held = [(what, name, tensor) for what, name, found in _tensors_held(self._model) for tensor in found]
        return [item for item in held if not item[2].is_inference()]

    def where(self, module: nn.Module, name: str) -> Place | None:
        """Where the model has last set an attribute, or a sub-module or tensor that is registered as one."""
        return self._where.get((id(module), name))

    @contextmanager
    def restoring(self) -> Iterator[None]:
        """Puts back every attribute at the end, so that no tensor of the trace stays behind."""
        self.beside.lift()
        try:
            yield
        finally:
            for kept in self._kept:
                kept.put_back()
            self.beside.put_back()

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Notes what is read and written while active.

        Raises:
            UntraceableError: the model reads a tensor that what runs again at each call has left in an attribute.
        """
        first, left = self._read_first, self._left

        def read(module: nn.Module, name: str) -> None:
            # Torch itself asks for it whenever a parameter is read.
            if name == _ALL and not belongs_to_user(sys._getframe(2).f_code.co_filename):
                return
            for one in (name, *(vars(module) if name == _ALL else ())):
                key = id(module), one
                if self._watching:
                    if key in left:
                        self._refuse_tensors(module, one)
                    first.setdefault(key, True)

        def write(module: nn.Module, name: str) -> None:
            key = id(module), name
            if self._watching:
                first.setdefault(key, False)
                left.discard(key)
            else:
                left.add(key)
            self._where[key] = self._tracker.here()

        with attribute_access(read, write):
            yield

    def _refuse_tensors(self, module: nn.Module, name: str) -> None:
        if flatten(object.__getattribute__(module, "__dict__").get(name))[0]:
            here, path = self._tracker.here(), self._paths.get(id(module), "")
            cause = f"it reads the tensors that sub-module '{path}', which stays whole, has left in attribute '{name}'"
            raise UntraceableError(f"{here}: {cause}; return them from that sub-module instead", here, cause)

    @contextmanager
    def unwatched(self) -> Iterator[None]:
        """What runs here runs at each call: what it reads decides then.

        Raises:
            CaptureError: it changes in place a tensor that it is not given, as it would for each part of a batch.
        """
        before, self._watching = self._watching, False
        versions = [version(tensor) for _, _, tensor in self._tensors]
        try:
            yield
        finally:
            self._watching = before
        for (held, name, tensor), seen in zip(self._tensors, versions, strict=True):
            if version(tensor) != seen:
                raise CaptureError(_changes_tensor(self._tracker.here(), held, name))

    def note_changes(self, depends_on_data: Callable[[Any], bool]) -> None:
        """Finds out what the call has changed, right after it.

        Args:
            depends_on_data: asked of tensors and of numbers of the trace.

        Raises:
            CaptureError: the model keeps a tensor for its next call in a Python attribute.
        """
        self.beside.note(depends_on_data)
        for kept in self._kept:
            for name, value, _ in kept.changed():
                key = id(kept.module), name
                attribute = Attribute(kept.module, kept.path, name, self._where.get(key))
                if is_plain(value):
                    # A container is emptied when it is put back.
                    self.left.append((kept.module, name, copy.copy(value)))
                if not self._read_first.get(key, True):
                    self.written.append(attribute)
                elif any(map(depends_on_data, flatten(content(value))[0])):
                    raise CaptureError(_carries_tensor(attribute))
                elif is_plain(value) or _symbolic(value) or any(map(depends_on_data, _numbers(value))):
                    self.carried.append((attribute, _for_a_second(value, depends_on_data)))

    def state(self, grad_mode: bool | None) -> PythonState:
        """What the call has read and written.

        Args:
            grad_mode: as in :class:`PythonState`.
        """
        modules = {id(kept.module): kept.module for kept in self._kept}
        read = [
            Attribute(modules[module], self._paths[module], name)
            for (module, name), is_read in self._read_first.items()
            if is_read and module in modules
        ]
        own = [function for attribute in read for function in _functions(attribute)]
        held = [vars(attribute.module).get(attribute.name) for attribute in read]
        found = GlobalReads(self._tracker.codes, own, referents_in(held))
        strangers = [*self._tracker.strangers.values()]
        beside = self.beside.unset, self.beside.cached, self.beside.unseen
        return PythonState(read, self.written, *beside, [*found], strangers, grad_mode)


def _functions(attribute: Attribute) -> Iterator[FunctionType]:
    """What runs where an attribute is a method or a property."""
    for kind in type(attribute.module).__mro__:
        if attribute.name in vars(kind):
            value = vars(kind)[attribute.name]
            value = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
            if isinstance(value, FunctionType):
                yield value
            return


def _kept(path: str, module: nn.Module) -> _Kept:
    attributes = dict(vars(module))
    # Hooks stand in torch's own, of other classes: those that a call sets stay.
    contents = {
        name: content(value)
        for name, value in attributes.items()
        if type(value) in _BUILT_IN or (name not in INTERNAL and is_of(value, CONTAINERS))
    }
    return _Kept(module, path, attributes, contents)


def _symbolic(value: Any) -> bool:
    return isinstance(value, SYMBOLIC)


def _numbers(value: Any) -> list[Any]:
    """Numbers of the trace in a structure."""
    return list(filter(_symbolic, pytree.tree_leaves(content(value))))


def _for_a_second(value: Any, depends_on_data: Callable[[Any], bool]) -> Any:
    """What a call leaves, for a second trace: with other numbers where data decide, so that their use is seen, and in
    containers."""

    def stand_in(leaf: Any) -> Any:
        return STAND_INS[type(leaf)] if _symbolic(leaf) and (leaf is not value or depends_on_data(leaf)) else leaf

    found = pytree.tree_map(stand_in, content(value))
    # A container is emptied when it is put back.
    made = copy.copy(value if isinstance(value, CONTAINERS) else found)
    if isinstance(value, CONTAINERS):
        fill(made, found)
    return made


def refuse_changed_tensors(model: nn.Module, gm: fx.GraphModule) -> None:
    """Raises CaptureError when the forward changes tensors in place that are no parameters, buffers or arguments.

    Args:
        model: which may hold them.
        gm: a raw trace, in which they are constants.
    """
    for node in gm.graph.nodes:
        for operand in mutated_arguments(node):
            constant = _constant_of(operand)
            if constant is not None:
                held = _holder(model, getattr(gm, str(constant.target)))
                raise CaptureError(_changes_tensor(node.meta.get(PLACE, Place("")), *held))


def _constant_of(node: fx.Node) -> fx.Node | None:
    """The constant whose memory a traced node shows."""
    while node.op == "call_function" and (operands := aliased_arguments(node)):
        if _is_copy(node, operands[0]):
            return None
        node = operands[0]
    return node if node.op == "get_attr" else None


def _is_copy(node: fx.Node, operand: fx.Node) -> bool:
    """True for what its schema takes for a view of an operand, and is none."""
    name = schema(node.target).name if isinstance(node.target, OpOverload) else ""
    if name != "aten::to" and not may_return_view(node):
        return False
    made, given = memory(node), memory(operand)
    if made and given:
        return made.isdisjoint(given)
    # The memory of a constant is not noted.
    after, before = node.meta["val"], operand.meta["val"]
    converted = (after.dtype, after.device) != (before.dtype, before.device)
    moved = name in ("aten::to", "aten::contiguous") and after.stride() != before.stride()
    return converted or moved or bool(arguments(node).get("copy"))


def _holder(model: nn.Module, tensor: Tensor) -> tuple[str, ...]:
    """What holds a tensor, and its name, if that can be found."""
    address = _address(tensor)
    for held, name, found in _tensors_held(model):
        if any(item is tensor or (address and _address(item) == address) for item in found):
            return held, name
    return ()


def _holders(model: nn.Module) -> Iterator[tuple[str, str, Any]]:
    """Attributes of sub-modules, but for torch's own, and global variables beside classes of the user.

    Of each, what it is, its name and its value.
    """
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if name not in INTERNAL:
                yield str(Attribute(module, path, name)), name, value
    forwards = [type(module).forward for module in model.modules() if is_users_own(type(module))]
    variables = [forward.__globals__ for forward in forwards if isinstance(forward, FunctionType)]
    for own in {id(names): names for names in variables}.values():
        for name, value in list(own.items()):
            yield f'global variable "{name}" of {own.get("__name__")}', name, value


def _tensors_held(model: nn.Module) -> Iterator[tuple[str, str, list[Tensor]]]:
    """What holds tensors, its name, and the tensors: those in containers and in objects of the user's own classes too.

    A script may have its data there: so many values are looked at, each once.
    """
    seen: set[int] = set()
    for held, name, value in _holders(model):
        found, nearest = list[Tensor](), [value]
        for _ in range(_DEPTH + 1):
            new = {id(item): item for item in nearest if id(item) not in seen and not is_of(item, (*SCALARS, *PLAIN))}
            seen.update(new)
            found += [item for item in new.values() if isinstance(item, Tensor)]
            others = [item for item in new.values() if not isinstance(item, (Tensor, nn.Module))]
            nearest = [item for other in others for item in _inside(other)] if len(seen) < _MOST_VALUES else []
        yield held, name, found


def _inside(value: Any) -> Iterable[Any]:
    inside = content(value)
    if not isinstance(inside, (dict, list, tuple, deque)):
        inside = vars(value) if hasattr(value, "__dict__") and is_users_own(type(value)) else ()
    if len(inside) > _MOST_ITEMS:
        return ()
    return [*inside.values()] if isinstance(inside, dict) else inside


def _address(tensor: Tensor) -> int | None:
    """Tells the memory of one tensor from that of others, where it has any."""
    return storage_address(tensor.untyped_storage()) if tensor.layout is torch.strided else None


def _changes_tensor(place: Place, held: str = "", name: str = "state") -> str:
    where = f"in the {held}" if held else "from outside, such as a variable of a function round the model"
    return (
        f"{place} keeps tensors for the next call: it changes in place a tensor {where}. A captured call runs in parts "
        "and on several ranks, each of which would change one of its own. Register it as a buffer of a sub-module "
        f'(self.register_buffer("{name}", ...)) and change that with copy_(), or return it from the forward'
    )


def _carries_tensor(attribute: Attribute) -> str:
    return (
        f"{attribute.where or 'the forward'} keeps tensors for the next call: it reads and changes the {attribute}, "
        "which a captured call would find unchanged for ever. Register it as a buffer "
        f'(self.register_buffer("{attribute.name}", ...)) and change it with copy_(), or return it from the forward'
    )


def carries_number(attribute: Attribute) -> CaptureError:
    """The error for a Python value that each call changes for the next one."""
    return CaptureError(
        f"{attribute.where or 'the forward'} counts from call to call: it reads and changes the {attribute}, which a "
        "captured call would find unchanged for ever. Change it outside of the forward and pass it as an argument, or "
        f'register a tensor as a buffer (self.register_buffer("{attribute.name}", torch.tensor(...))) and change '
        "that in place"
    )


def not_kept(carried: Sequence[Carried], written: Sequence[Attribute]) -> str:
    """For an error of a second call: which attributes it finds as the first one leaves them, and which it does not."""
    for attribute, _ in carried:
        unset = [f'"{other.name}"' for other in written if other.module is attribute.module]
        if unset:
            return (
                f". A second call comes there: it finds the {attribute} as the first one leaves it, but not "
                f"{', '.join(unset)}, which captured calls do not set. Make in __init__ what calls keep for later "
                "ones, such as tables for the longest sequence, or call the model once on the longest batch before "
                "RaNNCModule(model, ...) is made"
            )
    return ""


@contextmanager
def assigned(values: Sequence[Carried]) -> Iterator[None]:
    """Attributes with other values while active."""
    before = [(vars(attribute.module), attribute.name, vars(attribute.module).get(attribute.name, _MISSING))
              for attribute, _ in values]  # fmt: skip
    assign(values)
    try:
        yield
    finally:
        for attributes, name, value in before:
            attributes.pop(name) if value is _MISSING else attributes.update({name: value})


def assign(values: Sequence[Carried]) -> None:
    """Leaves attributes with other values."""
    for attribute, value in values:
        vars(attribute.module)[attribute.name] = value
