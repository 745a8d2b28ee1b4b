"""Sub-modules, methods of sub-modules and functions that stay whole: each call of one is an opaque Op."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pyrannc.errors import CaptureError

from .fallback import BatchSizes, TwoSizes, insert_node
from .flatten import Structure, flatten
from .form import Form
from .leaf import OpaqueCall
from .oracle import Oracle, real_execution
from .plain_control_flow import plain_control_flow
from .row_lists import has_row_lists, unpacked
from .source import Part, Place
from .torch_internals import (
    FakeTensorMode,
    TorchDispatchMode,
    current_tracer,
    functorch_is_active,
    own_buffers,
    proxy_of,
    pytree,
    reparametrized,
    version,
)
from .untraceable import UntraceableError

_NUMBERS = (torch.SymInt, torch.SymFloat, torch.SymBool)


@dataclass(frozen=True)
class Trials:
    """What runs of real code inside a trace need.

    Attributes:
        oracle: gives real samples.
        mode: of the trace.
        sizes: tells extents that depend on the batch.
        unwatched: what runs in it runs again at each call, so that nobody need note what it reads.
    """

    oracle: Oracle
    mode: FakeTensorMode
    sizes: BatchSizes
    unwatched: Callable[[], AbstractContextManager[None]]


class WholeCall:
    """Makes calls of one part of the model opaque: a node that takes its parameters, buffers and tensor arguments.

    Attributes:
        original: what is called.
        suffix: of the title in the Graph, where one part makes several Ops.
        advice: against results that a later call does not give.
    """

    suffix = ""
    advice = ""

    def __init__(self, model: nn.Module, part: Part, trials: Trials) -> None:
        self._part = part
        self._trials = trials
        self._module = nn.Module() if part.function else model.get_submodule(part.path)
        # Where the name is looked up at each call.
        self._owner = vars(sys.modules[part.function[0]]) if part.function else vars(self._module)
        self._name = part.function[1] if part.function else part.method or "forward"
        self.original = self._owner[self._name] if part.function else getattr(self._module, self._name)
        self._aliases = _names_of_each(self._state())
        self._names = list(self._aliases)
        self._buffers = {name for name, _ in self._module.named_buffers(remove_duplicate=False)}

    @contextmanager
    def installed(self) -> Iterator[None]:
        """The part is opaque while active."""
        had_own = self._name in self._owner
        before = self._owner.get(self._name)
        self._owner[self._name] = self._traced
        try:
            yield
        finally:
            del self._owner[self._name]
            if had_own:
                self._owner[self._name] = before

    def _traced(self, *args: Any, **kwargs: Any) -> Any:
        tracer = current_tracer()
        if tracer is None or functorch_is_active():
            return self.original(*args, **kwargs)
        inputs, structure = flatten((args, kwargs))
        if any(isinstance(constant, _NUMBERS) for constant in structure.constants()):
            raise self._untraceable("it is called with a number made of the batch size or of data")
        current = self._state()
        # What a module keeps is its own; of a method, only what it is found to use.
        names, operands, trial = self._tried(self._names, current, inputs, structure, tracer)
        if (self._part.method or self._part.around) and len(trial.used) < len(names):
            names = [name for name in names if name in trial.used]
            names, operands, trial = self._tried(names, current, inputs, structure, tracer)
        if not operands:
            if self._part.function:
                return self.original(*args, **kwargs)
            raise CaptureError(f"{self._part} stays whole, but has neither parameters nor tensor arguments")
        sizes = self._trials.sizes
        results = sizes.fakes(trial.made, operands[0].device, trial.gradients, self._trials.mode)
        call = self._runtime_call(names, structure, trial.output)
        target = OpaqueCall(self._part.identifier, call, self._part.title + self.suffix)
        target.changes = trial.changes
        target.row_wise = trial.row_wise
        target.repeats = trial.repeats and not names
        target.types = trial.types
        target.form = Form.of(operands, results, sizes.reader, str(self._part), self.advice)
        proxies = (proxy_of(operand, tracer) for operand in operands)
        arguments = tuple(p if p is not None else o for p, o in zip(proxies, operands, strict=True))
        insert_node(tracer, target, arguments, {}, results)
        return trial.output.rebuild(results)

    def _state(self) -> dict[str, Tensor]:
        """Parameters and buffers as they are now, under all their names."""
        every = self._module.named_parameters(remove_duplicate=False)
        return {**dict(every), **dict(self._module.named_buffers(remove_duplicate=False))}

    def _untraceable(self, what: str) -> UntraceableError:
        message = f"{self._part} cannot stay whole: {what}"
        return UntraceableError(message, Place(self._part.path), what, part=self._part)

    def _run(
        self, names: Sequence[str], structure: Structure, tensors: Sequence[Any]
    ) -> tuple[list[Tensor], Structure]:
        """A call; buffers that are assigned anew get the new contents."""
        args, kwargs = structure.rebuild(tensors[len(names) :])
        state = dict(zip(names, tensors[: len(names)], strict=True))
        every = {alias: item for name, item in (self._others(names) | state).items() for alias in self._aliases[name]}
        # One module may be there under two names.
        with plain_control_flow(), reparametrized(self._module, every, stack_weights=True):
            own_args, own_kwargs = unpacked((args, kwargs))
            made, output = flatten(self.original(*own_args, **own_kwargs))
            for name in self._buffers.intersection(names):
                path, _, attribute = name.rpartition(".")
                now = own_buffers(self._module.get_submodule(path)).get(attribute)
                if now is not None and now is not state[name]:
                    with torch.no_grad():
                        state[name].copy_(now)
        after, form = flatten((args, kwargs))
        if form != structure or any(a is not b for a, b in zip(after, tensors[len(names) :], strict=True)):
            raise self._untraceable("it changes an object that it is called with")
        return made, output

    def _others(self, names: Sequence[str]) -> dict[str, Tensor]:
        """In the place of state that no trial has used, tensors that no call can use."""
        return {name: torch.empty(0, device="meta") for name in self._names if name not in names}

    def _runtime_call(
        self, names: Sequence[str], structure: Structure, output: Structure
    ) -> Callable[..., tuple[Tensor, ...]]:
        def call(*tensors: Tensor) -> tuple[Tensor, ...]:
            made, found = self._run(names, structure, tensors)
            if found != output:
                raise CaptureError(
                    f"{self._part} stays whole and has returned other Python values, or another structure, than when "
                    f"it was captured: return tensors alone from it{self.advice}"
                )
            given = {tensor.untyped_storage().data_ptr() for tensor in tensors if tensor.numel()}
            # The graph takes results for memory of their own.
            return tuple(t.clone() if t.untyped_storage().data_ptr() in given else t for t in made)

        return call

    def _tried(
        self,
        names: Sequence[str],
        current: dict[str, Tensor],
        inputs: Sequence[Tensor],
        structure: Structure,
        tracer: Any,
    ) -> tuple[Sequence[str], list[Tensor], Tried]:
        """What runs on the real samples, at several batch sizes, tell of the results."""
        operands = [*(current[name] for name in names), *inputs]
        oracle, count = self._trials.oracle, len(names)
        proxies = [proxy_of(operand, tracer) for operand in operands]
        reals = [o if p is None else oracle.sample_of(p.node) for p, o in zip(proxies, operands, strict=True)]
        outputs: list[Structure] = []
        gradients: list[bool] = []
        changed: set[int] = set()
        used: set[str] = set()
        drawn: set[bool] = set()
        types: set[torch.dtype] = set()
        enabled = torch.is_grad_enabled()

        def run(tensors: Sequence[Any]) -> list[Tensor]:
            given = [_own(item, like.requires_grad) for item, like in zip(tensors, operands, strict=True)]
            before, state = [version(item) for item in given], _generators()
            with torch.set_grad_enabled(enabled), _Used() as seen:
                made, output = self._run(names, structure, given)
            drawn.add(_generators() != state)
            used.update(name for name, item in zip(names, given, strict=False) if id(item) in seen.ids)
            types.update(seen.types)
            used.update(name for name, item in zip(names, given, strict=False) if any(item is t for t in made))
            changed.update(place for place, item in enumerate(given) if version(item) != before[place])
            outputs.append(output)
            gradients[:] = [tensor.requires_grad for tensor in made]
            return [tensor.detach() for tensor in made]

        try:
            with real_execution(), self._trials.unwatched():
                made = self._trials.sizes.at_two_sizes(run, reals, operands)
        except CaptureError:
            raise
        except Exception as error:
            raise self._untraceable(f"{type(error).__name__}: {error}") from error
        if any(output != outputs[0] for output in outputs):
            raise self._untraceable("it returns Python values that depend on data or on the batch size")
        if any(place >= count for place in changed):
            raise self._untraceable("it changes a tensor that it is called with in place")
        if any(names[place] not in self._buffers for place in changed):
            raise self._untraceable("it changes a parameter in place")
        kinds = frozenset(types)
        tried = Tried(made, outputs[0], tuple(gradients), tuple(sorted(changed)), frozenset(used), kinds)
        tried.repeats = not any(drawn) and not any(gradients) and not changed
        if has_row_lists(structure.rebuild(inputs)):
            # Extents in lists of rows are no numbers to make up: the whole batch shows what it can.
            tried.row_wise = False
            if not any(gradients):
                oracle.asked_rows = oracle.asked_rows or Place(self._part.path)
                with real_execution(), self._trials.unwatched():
                    tried.row_wise = self._trials.sizes.are_apart(run, reals, operands, made, oracle.rows)
        self._examine(tried)
        return names, operands, tried

    def _examine(self, tried: Tried) -> None:
        """Raises UntraceableError for what a part of a special kind may not do."""


def _names_of_each(state: dict[str, Tensor]) -> dict[str, list[str]]:
    """All names of each tensor, under the first of them."""
    found: dict[int, list[str]] = {}
    for name, tensor in state.items():
        found.setdefault(id(tensor), []).append(name)
    return {names[0]: names for names in found.values()}


@dataclass
class Tried:
    """Results: the tensors and what stands round them, which require gradients; changed buffers; state that is used;
    types inside.

    ``row_wise`` says whether it treats each row by itself, if that is known already, ``repeats`` whether no run has
    drawn random numbers or given what has gradients.
    """

    made: TwoSizes
    output: Structure
    gradients: tuple[bool, ...]
    changes: tuple[int, ...]
    used: frozenset[str]
    types: frozenset[torch.dtype]
    row_wise: bool | None = None
    repeats: bool = False


def _generators() -> list[list[int]]:
    """What torch's generators have come to; others are watched all through a trace."""
    own = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return [state.tolist() for state in (torch.get_rng_state(), *own)]


class _Used(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types for it
    """Sees the tensors that operators take, and the types of those that they make."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # likewise
        self.ids: set[int] = set()
        self.types: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ids.update(id(item) for item in pytree.tree_leaves((args, kwargs)) if isinstance(item, Tensor))
        made = func(*args, **(kwargs or {}))
        self.types.update(item.dtype for item in pytree.tree_leaves(made) if isinstance(item, Tensor))
        return made


def _own(item: Any, requires_grad: bool) -> Any:
    """A copy that may be changed."""
    return item.detach().clone().requires_grad_(requires_grad) if isinstance(item, Tensor) else item


@contextmanager
def whole_calls_installed(calls: Sequence[WholeCall]) -> Iterator[None]:
    """All of them are opaque while active."""
    with ExitStack() as stack:
        for call in calls:
            stack.enter_context(call.installed())
        yield
