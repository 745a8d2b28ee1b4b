"""Sub-modules, methods of sub-modules and functions that stay whole: each call of one is an opaque Op."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pyrannc.capture.nodes.chance import TorchGenerators, refused_draws, trial_draws
from pyrannc.capture.nodes.facts import memory
from pyrannc.capture.nodes.fallback import BatchSizes, TwoSizes, argument_of, insert_node
from pyrannc.capture.nodes.form import Form
from pyrannc.capture.nodes.leaf import OpaqueCall
from pyrannc.capture.nodes.oracle import Oracle, real_execution
from pyrannc.capture.nodes.progress import is_at
from pyrannc.capture.nodes.untraceable import UntraceableError
from pyrannc.capture.nodes.untraced_backwards import backwards_tried
from pyrannc.capture.torch_internals.fakes import FakeTensorMode
from pyrannc.capture.torch_internals.levels import functorch_is_active
from pyrannc.capture.torch_internals.modules import own_buffers, reparametrized
from pyrannc.capture.torch_internals.symbols import SYMBOLIC
from pyrannc.capture.torch_internals.tensors import TorchDispatchMode, pytree, version
from pyrannc.capture.torch_internals.tracing import current_tracer, proxy_of
from pyrannc.capture.user.flatten import Structure, flatten
from pyrannc.capture.user.row_lists import has_row_lists, unpacked
from pyrannc.capture.user.source import Part, Place
from pyrannc.errors import CaptureError

from .plain_control_flow import plain_control_flow
from .unknown_lists import has_lists, shared_structure, without_unknown


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
        hands_on: it need not run to return its arguments.
    """

    suffix = ""
    advice = ""
    hands_on = False

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
        # State that branches of torch.cond compute with, taken or not.
        self._branched: set[str] = set()

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
        if any(isinstance(constant, SYMBOLIC) for constant in structure.constants()):
            raise self._untraceable("it is called with a number made of the batch size or of data")
        current = self._state()
        # What a module keeps is its own; of a method, only what it is found to use, unless chance decides that.
        names, operands, trial = self._tried(self._names, current, inputs, structure, tracer)
        if (self._part.method or self._part.around) and len(trial.used) < len(names) and not trial.draws_elsewhere:
            names = [name for name in names if name in trial.used]
            names, operands, trial = self._tried(names, current, inputs, structure, tracer)
        if not operands:
            if self._part.function:
                return self.original(*args, **kwargs)
            raise CaptureError(f"{self._part} stays whole, but has neither parameters nor tensor arguments")
        sizes = self._trials.sizes
        results = sizes.fakes(trial.made, operands[0].device, trial.gradients, self._trials.mode)
        # The Op takes each tensor once, and rows come first in what it takes and gives.
        distinct = list({id(item): item for item in operands}.values())
        order = [next(i for i, item in enumerate(distinct) if item is operand) for operand in operands]
        taken_dims, given_dims = [sizes.row_dim(item) for item in distinct], [sizes.row_dim(item) for item in results]
        call = _with_rows_first(self._runtime_call(names, structure, trial), order, taken_dims, given_dims)
        firsts = [item.movedim(dim, 0) if dim else item for item, dim in zip(distinct, taken_dims, strict=True)]
        results = tuple(
            sizes.rows_first(item, dim, self._trials.mode) if dim else item
            for item, dim in zip(results, given_dims, strict=True)
        )
        target = OpaqueCall(self._part.identifier, call, self._part.title + self.suffix)
        target.changes = trial.changes
        target.draws_elsewhere = True
        target.row_wise = trial.row_wise
        target.repeats = trial.repeats and not names
        target.types = trial.types
        target.form = Form.of(firsts, results, sizes.reader, str(self._part), self.advice)
        arguments = tuple(argument_of(operand, tracer) for operand in firsts)
        insert_node(tracer, target, arguments, {}, results)
        results = tuple(item.movedim(0, dim) if dim else item for item, dim in zip(results, given_dims, strict=True))
        return trial.output.rebuild(self._written(trial, inputs, operands, results, tracer))

    def _written(
        self, trial: Tried, inputs: Sequence[Tensor], operands: Sequence[Tensor], results: Sequence[Tensor], tracer: Any
    ) -> list[Tensor]:
        """What it returns, after Ops that change its arguments as it does."""
        places = [set() if p is None else memory(p.node) for p in (proxy_of(item, tracer) for item in operands)]
        held = len(operands) - len(inputs)
        for place in trial.writes:
            others = (own for other, own in enumerate(places) if other != held + place)
            if any(places[held + place] & own for own in others):
                raise self._untraceable("it changes in place a tensor whose memory it is called with twice")
        own = trial.given.count(None)
        for place, new in zip(trial.writes, results[own:], strict=True):
            inputs[place].copy_(new)
        made = iter(results[:own])
        return [next(made) if place is None else inputs[place] for place in trial.given]

    def _state(self) -> dict[str, Tensor]:
        """Parameters and buffers as they are now, under all their names."""
        every = self._module.named_parameters(remove_duplicate=False)
        return {**dict(every), **dict(self._module.named_buffers(remove_duplicate=False))}

    def _untraceable(self, what: str, rows: int = 0) -> UntraceableError:
        """``rows``: it was tried with so many, where their number may be why."""
        message = f"{self._part} cannot stay whole: {what}"
        return UntraceableError(message, Place(self._part.path), what, part=self._part, rows=rows)

    def _run(
        self,
        names: Sequence[str],
        structure: Structure,
        tensors: Sequence[Any],
        expected: Structure | None = None,
        *,
        looks: bool = False,
    ) -> tuple[list[Tensor], Structure]:
        """A call; buffers that are assigned anew get the new contents.

        Args:
            expected: what may stand round the results but for lists of unknown lengths, which are left out then.
            looks: find out with what branches compute that may not be taken.
        """
        args, kwargs = structure.rebuild(tensors[len(names) :])
        state = dict(zip(names, tensors[: len(names)], strict=True))
        every = {alias: item for name, item in (self._others(names) | state).items() for alias in self._aliases[name]}

        def look(function: Callable[..., Any], operands: Sequence[Any]) -> None:
            with torch.no_grad(), _Used() as seen:
                function(*operands)
            self._branched.update(name for name in names if id(state[name]) in seen.ids)

        idle = [state[name] for name in names if name in self._branched]
        # One module may be there under two names.
        with plain_control_flow(idle, look if looks else None), reparametrized(self._module, every, stack_weights=True):
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
        known = None if expected is None else without_unknown(made, output, expected)
        return (made, output) if known is None or expected is None else (known, expected)

    def _others(self, names: Sequence[str]) -> dict[str, Tensor]:
        """In the place of state that no trial has used, tensors that no call can use."""
        return {name: torch.empty(0, device="meta") for name in self._names if name not in names}

    def _runtime_call(
        self, names: Sequence[str], structure: Structure, trial: Tried
    ) -> Callable[..., tuple[Tensor, ...]]:
        changed = [len(names) + place for place in trial.writes]

        def call(*tensors: Tensor) -> tuple[Tensor, ...]:
            handed = [tensor.clone() if place in changed else tensor for place, tensor in enumerate(tensors)]
            # An argument that it asks a gradient of, by `x.requires_grad_()`, stays without one outside.
            handed[len(names) :] = [item if item.requires_grad else item.detach() for item in handed[len(names) :]]
            made, found = self._run(names, structure, handed, trial.output)
            if found != trial.output:
                raise CaptureError(
                    f"{self._part} stays whole and has returned other Python values, or another structure, than when "
                    f"it was captured: return tensors alone from it{self.advice}"
                )
            taken = {tensor.untyped_storage().data_ptr() for tensor in (*tensors, *handed) if tensor.numel()}
            results = [tensor for tensor, place in zip(made, trial.given, strict=True) if place is None]
            # The graph takes results for memory of their own.
            own = [t.clone() if t.untyped_storage().data_ptr() in taken else t for t in results]
            return (*own, *(handed[place] for place in changed))

        return call

    def _tried(
        self,
        names: Sequence[str],
        current: dict[str, Tensor],
        inputs: Sequence[Tensor],
        structure: Structure,
        tracer: Any,
        shared: Structure | None = None,
    ) -> tuple[Sequence[str], list[Tensor], Tried]:
        """What runs on the real samples, at several batch sizes, tell of the results.

        Args:
            shared: what stands round the results at all of them.
        """
        operands = [*(current[name] for name in names), *inputs]
        oracle = self._trials.oracle
        proxies = [proxy_of(operand, tracer) for operand in operands]
        reals = [o if p is None else oracle.sample_of(p.node) for p, o in zip(proxies, operands, strict=True)]

        longer = partial(oracle.longer_values_of, proxies, operands)
        run = _Runs(
            self._part,
            lambda tensors: self._run(names, structure, tensors, shared, looks=True),
            names,
            operands,
            hands_on=self.hands_on,
        )
        cause: Exception | None = None
        try:
            with real_execution(), self._trials.unwatched():
                made = self._trials.sizes.at_two_sizes(run, reals, operands, longer)
                if made.second is None and has_lists(run.outputs[0]):
                    with suppress(Exception):
                        run(longer(1))
                if made.second is None and run.generators.drawn:
                    run(reals)
        except CaptureError:
            raise
        except Exception as error:
            fault, cause = f"{type(error).__name__}: {error}", error
        else:
            fault = run.fault(self._buffers)
        if fault and shared is None and (shared := self._shared(run.outputs)) is not None:
            return self._tried(names, current, inputs, structure, tracer, shared)
        if fault:
            raise self._untraceable(fault, 0 if cause is None else self._trials.sizes.rows) from cause
        tried = run.shown(made)
        if has_row_lists(structure.rebuild(inputs)):
            # Extents in lists of rows are no numbers to make up: the whole batch shows what it can.
            tried.row_wise = False
            if not any(tried.gradients):
                oracle.ask_rows(Place(self._part.path))
                with real_execution(), self._trials.unwatched():
                    tried.row_wise = self._trials.sizes.are_apart(run, reals, operands, made, oracle.rows)
        self._examine(tried)
        return names, operands, tried

    def _shared(self, outputs: Sequence[Structure]) -> Structure | None:
        """What stands round the results in all runs, where these show lists of several lengths."""
        error = self._untraceable("it returns a list whose length depends on the batch, which the model uses")
        return shared_structure(outputs, error) if len(set(outputs)) > 1 else None

    def _examine(self, tried: Tried) -> None:
        """Raises UntraceableError for what a part of a special kind may not do."""


def _with_rows_first(
    call: Callable[..., tuple[Tensor, ...]], order: Sequence[int], taken: Sequence[int], given: Sequence[int]
) -> Callable[..., tuple[Tensor, ...]]:
    """A call that takes each tensor once, and takes and gives tensors with the dimensions of rows first.

    Args:
        order: by operand of ``call``, which of the tensors it is.
        taken: by tensor, the dimension in which ``call`` has its rows.
        given: likewise, by result.
    """

    def moved(*tensors: Tensor) -> tuple[Tensor, ...]:
        pairs = zip(tensors, taken, strict=True)
        own = [item.movedim(0, dim).contiguous() if dim else item for item, dim in pairs]
        made = call(*(own[place] for place in order))
        return tuple(item.movedim(dim, 0) if dim else item for item, dim in zip(made, given, strict=True))

    return moved


def _names_of_each(state: dict[str, Tensor]) -> dict[str, list[str]]:
    """All names of each tensor, under the first of them."""
    found: dict[int, list[str]] = {}
    for name, tensor in state.items():
        found.setdefault(id(tensor), []).append(name)
    return {names[0]: names for names in found.values()}


@dataclass
class Tried:
    """What runs have shown.

    Attributes:
        made: results that are no arguments, then the new contents of arguments that it changes.
        output: what stands round the results.
        given: by result, the place of the argument that it is, if it is one.
        writes: places of the arguments that it changes.
        gradients: of what is made, which require some.
        changes: buffers that it changes.
        used: state that is used.
        types: inside.
        repeats: no run has drawn random numbers or given what has gradients.
        draws_elsewhere: a run has drawn from Python or NumPy.
        row_wise: it treats each row by itself, if that is known already.
    """

    made: TwoSizes
    output: Structure
    given: tuple[int | None, ...]
    writes: tuple[int, ...]
    gradients: tuple[bool, ...]
    changes: tuple[int, ...]
    used: frozenset[str]
    types: frozenset[torch.dtype]
    repeats: bool
    draws_elsewhere: bool
    row_wise: bool | None = None


class _Runs:
    """Runs of a part on real tensors, and what they show.

    Attributes:
        generators: from which they draw.

    Args:
        part: which runs.
        call: gives results, and what stands round them.
        names: of the state among the operands, which comes first.
        operands: as the trace has them.
        hands_on: it need not run to return its arguments.
    """

    def __init__(
        self,
        part: Part,
        call: Callable[[Sequence[Any]], tuple[list[Tensor], Structure]],
        names: Sequence[str],
        operands: Sequence[Tensor],
        *,
        hands_on: bool,
    ) -> None:
        self._part = part
        self._hands_on = hands_on
        self._call = call
        self._names = names
        self._operands = operands
        self._grad_enabled = torch.is_grad_enabled()
        self._forms: list[tuple[Structure, tuple[int | None, ...], tuple[int, ...]]] = []
        self._gradients: list[tuple[bool, ...]] = []
        self._changes: set[int] = set()
        self._reshaped = self._draws = self._draws_elsewhere = False
        self._used: set[str] = set()
        self._types: set[torch.dtype] = set()
        self.generators = TorchGenerators()

    def __call__(self, tensors: Sequence[Any]) -> list[Tensor]:
        """The results of a run that are none of its arguments, then the new contents of those that it has changed."""
        is_at(f"runs of {self._part}, which stays whole")
        given, count = self._copies(tensors), len(self._names)
        before, state = [version(item) for item in given], _generators()
        with trial_draws(len(self._forms)) as drew, torch.set_grad_enabled(self._grad_enabled), _Used() as seen:
            with backwards_tried():
                made, output = self._call(given)
            self._draws_elsewhere |= drew()
        if self.generators.go_on(seen.generators):
            raise refused_draws(Place(self._part.path), "draws random numbers from a torch.Generator of its own")
        self._draws |= _generators() != state
        own = {id(item): name for name, item in zip(self._names, given, strict=False)}
        self._used.update(own[key] for key in own.keys() & (seen.ids | set(map(id, made))))
        self._types.update(seen.types)
        changed = [
            place
            for place, (item, old, original) in enumerate(zip(given, before, tensors, strict=True))
            if version(item) != old or not _same_contents(item, original)
        ]
        self._changes.update(place for place in changed if place < count)
        writes = tuple(place - count for place in changed if place >= count)
        self._reshaped |= any(given[place].shape != tensors[place].shape for place in changed)
        args = {id(item): place for place, item in enumerate(given[count:])}
        if not writes and not self._hands_on and all(id(tensor) in args for tensor in made):
            # What gives nothing would not run.
            args = {}
        self._forms.append((output, tuple(args.get(id(tensor)) for tensor in made), writes))
        made = [tensor for tensor in made if id(tensor) not in args] + [given[count + place] for place in writes]
        self._gradients.append(tuple(tensor.requires_grad for tensor in made))
        return [tensor.detach() for tensor in made]

    def _copies(self, tensors: Sequence[Any]) -> list[Any]:
        """Operands that may be changed; arguments are no leaves of autograd, which may not."""
        given = [_own(item, like.requires_grad) for item, like in zip(tensors, self._operands, strict=True)]
        count = len(self._names)
        with torch.set_grad_enabled(self._grad_enabled):
            arguments = [item.clone() if isinstance(item, Tensor) else item for item in given[count:]]
        return [*given[:count], *arguments]

    @property
    def outputs(self) -> list[Structure]:
        """What stood round the results, run by run."""
        return [output for output, _, _ in self._forms]

    def fault(self, buffers: Set[str]) -> str:
        """Why no Op can stand for it; empty if one can."""
        outputs, given, writes = map(set, zip(*self._forms, strict=True))
        if len(outputs) > 1:
            return "it returns Python values that depend on data, on chance or on the batch size"
        if len(given) > 1 or len(writes) > 1:
            return "data, chance or the batch size decide whether it changes or returns a tensor that it is called with"
        if any(self._names[place] not in buffers for place in self._changes):
            return "it changes a parameter in place"
        return "it gives another shape to a tensor that it is called with" if self._reshaped else ""

    def shown(self, made: TwoSizes) -> Tried:
        """What the runs have shown, which gave ``made``."""
        gradients = tuple(map(any, zip(*self._gradients, strict=True)))
        draws = self._draws or self._draws_elsewhere
        return Tried(
            made,
            *self._forms[0],
            gradients=gradients,
            changes=tuple(sorted(self._changes)),
            used=frozenset(self._used),
            types=frozenset(self._types),
            repeats=not draws and not any(gradients) and not self._changes,
            draws_elsewhere=self._draws_elsewhere,
        )


def _same_contents(item: Any, original: Any) -> bool:
    """True where nothing has been written past autograd, as by NumPy; absent numbers are equal."""
    if not isinstance(item, Tensor) or item.is_meta or item.shape != original.shape:
        return True
    with torch.no_grad():
        return bool(((item == original) | ((item != item) & (original != original))).all())


def _generators() -> list[list[int]]:
    """What torch's generators have come to."""
    own = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return [state.tolist() for state in (torch.get_rng_state(), *own)]


class _Used(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types for it
    """Sees the tensors that operators take, and the types of those that they make.

    Attributes:
        generators: from which operators draw.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # likewise
        self.ids: set[int] = set()
        self.types: set[torch.dtype] = set()
        self.generators = TorchGenerators()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        taken = pytree.tree_leaves((args, kwargs))
        self.ids.update(id(item) for item in taken if isinstance(item, Tensor))
        for item in taken:
            if isinstance(item, torch.Generator):
                self.generators.note(item)
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
