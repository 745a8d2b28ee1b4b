"""Calls that stay whole in the graph: custom autograd functions, gradient hooks, chosen sub-modules."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.autograd.function import Function

from pyrannc.errors import CaptureError

from .fallback import BatchSizes, TwoSizes, insert_node
from .flatten import Structure, flatten
from .form import Form
from .oracle import Oracle, real_execution
from .source import Place
from .torch_internals import (
    FUNCTION_APPLY,
    REGISTER_HOOK,
    FakeTensorMode,
    current_tracer,
    disable_proxy_modes_tracing,
    functorch_is_active,
    own_buffers,
    proxy_of,
    reparametrized,
    version,
)
from .untraceable import UntraceableError

_NUMBERS = (torch.SymInt, torch.SymFloat, torch.SymBool)


class OpaqueCall:
    """A callable node target whose inside was not captured. Takes tensors by position.

    Attributes:
        title: its name in the Graph.
        changes: the operands that it changes in place.
        draws: it may draw random numbers.
        form: the extents that its results must have.
    """

    def __init__(self, name: str, call: Callable[..., Any], source_class: str) -> None:
        self.__name__ = self.__qualname__ = name
        self.__module__ = "pyrannc.opaque"
        self.title = f"pyrannc.opaque.{source_class}"
        self.changes: tuple[int, ...] = ()
        self.draws = True
        self.form: Form | None = None
        self._call = call

    def __call__(self, *tensors: Any) -> Any:
        """Runs the call."""
        made = self._call(*tensors)
        if self.form is not None:
            self.form.check(tensors, made)
        return made


class Apart(OpaqueCall):
    """A copy of a tensor with rows."""

    def __init__(self) -> None:
        super().__init__("apart", torch.clone, "apart")
        self.draws = False


class GradientHook(OpaqueCall):
    """``Tensor.register_hook``: no result, but the gradient of its operand passes through the hook."""


@contextmanager
def opaque_autograd_functions() -> Iterator[None]:
    """Keeps calls of custom ``autograd.Function``s whole, so that their own backward is what runs."""
    original = FUNCTION_APPLY.original

    def apply(cls: type[Function], *args: Any, **kwargs: Any) -> Any:
        tracer = current_tracer()
        plain = original.__get__(None, cls)
        if tracer is None or functorch_is_active():
            return plain(*args, **kwargs)
        if cls is torch.utils.checkpoint.CheckpointFunction:
            return _inlined_checkpoint(*args)
        if not _needs_backward(args):
            return plain(*args, **kwargs)
        proxies = {place: proxy for place, item in enumerate(args) if (proxy := proxy_of(item, tracer)) is not None}
        template = [None if place in proxies else item for place, item in enumerate(args)]

        def call(*tensors: Any) -> Any:
            operands = list(template)
            for place, tensor in zip(proxies, tensors, strict=True):
                operands[place] = tensor
            return plain(*operands, **kwargs)

        with disable_proxy_modes_tracing():
            result = plain(*args, **kwargs)
        name = f"autograd_function_{cls.__name__}"
        target = OpaqueCall(name, call, f"{cls.__module__}.{cls.__qualname__}")
        return insert_node(tracer, target, tuple(proxies.values()), {}, result)

    with FUNCTION_APPLY.replaced_by(classmethod(apply)):
        yield


def _needs_backward(args: Sequence[Any]) -> bool:
    return torch.is_grad_enabled() and any(isinstance(item, Tensor) and item.requires_grad for item in args)


def _inlined_checkpoint(run_function: Callable[..., Any], _preserve_rng: bool, *args: Any) -> Any:
    """Runs a checkpointed function in place: what to recompute is decided by the plan.

    Like reentrant checkpointing, it gives no gradients when no argument needs one.
    """
    with torch.set_grad_enabled(_needs_backward(args)):
        return run_function(*args)


class _NoHandle:
    """Stands for the handle of a captured hook, which lives as long as the graph."""

    def remove(self) -> None:
        """Does nothing: the hook is part of the graph."""


@contextmanager
def captured_tensor_hooks() -> Iterator[None]:
    """Turns ``Tensor.register_hook`` into a node of the graph."""
    original = REGISTER_HOOK.original

    def register_hook(self: Tensor, hook: Callable[[Tensor], Tensor | None]) -> Any:
        tracer = current_tracer()
        proxy = proxy_of(self, tracer) if tracer is not None else None
        if proxy is None:
            return original(self, hook)

        def call(tensor: Tensor) -> None:
            if tensor.requires_grad:
                original(tensor, hook)

        title = f"hook.{getattr(hook, '__qualname__', type(hook).__qualname__)}"
        tracer.create_proxy("call_function", GradientHook("grad_hook", call, title), (proxy,), {})
        return _NoHandle()

    with REGISTER_HOOK.replaced_by(register_hook):
        yield


class LeafModule:
    """Makes calls of one sub-module opaque: a node that takes its parameters, buffers and tensor arguments."""

    def __init__(
        self,
        path: str,
        module: nn.Module,
        oracle: Oracle,
        mode: FakeTensorMode,
        sizes: BatchSizes,
        unwatched: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._path = path
        self._title = f"sub-module '{path}'" if path else "the model"
        self._module = module
        self._oracle = oracle
        self._mode = mode
        self._sizes = sizes
        self._unwatched = unwatched
        self._forward = module.forward
        self._state_names = [name for name, _ in (*module.named_parameters(), *module.named_buffers())]
        self._buffer_names = [name for name, _ in module.named_buffers()]

    @contextmanager
    def installed(self) -> Iterator[None]:
        """The sub-module is opaque while active."""
        had_own = self._module.__dict__.get("forward")
        self._module.forward = self._traced_forward
        try:
            yield
        finally:
            del self._module.forward
            if had_own is not None:
                self._module.forward = had_own

    def _traced_forward(self, *args: Any, **kwargs: Any) -> Any:
        tracer = current_tracer()
        if tracer is None or functorch_is_active():
            return self._forward(*args, **kwargs)
        current = dict([*self._module.named_parameters(), *self._module.named_buffers()])
        inputs, structure = flatten((args, kwargs))
        if any(isinstance(constant, _NUMBERS) for constant in structure.constants()):
            raise self._untraceable("it is called with a number made of the batch size or of data")
        operands = [*(current[name] for name in self._state_names), *inputs]
        if not operands:
            raise CaptureError(f"{self._title} stays whole, but has neither parameters nor tensor arguments")
        proxies = [proxy_of(operand, tracer) for operand in operands]
        reals = [
            self._oracle.sample_of(proxy.node) if proxy is not None else operand
            for proxy, operand in zip(proxies, operands, strict=True)
        ]
        trial = self._tried(structure, reals, operands)
        results = self._sizes.fakes(trial.made, operands[0].device, trial.gradients, self._mode)
        target = OpaqueCall(
            f"module_{self._path.replace('.', '_')}",
            self._runtime_call(structure, trial.output),
            f"module.{self._path}",
        )
        target.changes = trial.changes
        target.form = Form.of(operands, results, self._sizes.reader, self._title)
        arguments = tuple(p if p is not None else o for p, o in zip(proxies, operands, strict=True))
        insert_node(tracer, target, arguments, {}, results)
        return trial.output.rebuild(results)

    def _untraceable(self, what: str) -> UntraceableError:
        return UntraceableError(f"{self._title} cannot stay whole: {what}", Place(self._path), what)

    def _run(self, structure: Structure, tensors: Sequence[Any]) -> tuple[list[Tensor], Structure]:
        """A call; buffers that are assigned anew get the new contents."""
        count = len(self._state_names)
        args, kwargs = structure.rebuild(tensors[count:])
        state = dict(zip(self._state_names, tensors[:count], strict=True))
        with reparametrized(self._module, state):
            made, output = flatten(self._forward(*args, **kwargs))
            for name in self._buffer_names:
                path, _, attribute = name.rpartition(".")
                now = own_buffers(self._module.get_submodule(path)).get(attribute)
                if now is not None and now is not state[name]:
                    with torch.no_grad():
                        state[name].copy_(now)
        after, form = flatten((args, kwargs))
        if form != structure or any(a is not b for a, b in zip(after, tensors[count:], strict=True)):
            raise self._untraceable("it changes an object that it is called with")
        return made, output

    def _runtime_call(self, structure: Structure, output: Structure) -> Callable[..., tuple[Tensor, ...]]:
        def call(*tensors: Tensor) -> tuple[Tensor, ...]:
            made, found = self._run(structure, tensors)
            if found != output:
                raise CaptureError(
                    f"{self._title} stays whole and has returned other Python values, or another structure, than when "
                    "it was captured: return tensors alone from it"
                )
            return tuple(made)

        return call

    def _tried(self, structure: Structure, reals: Sequence[Any], operands: Sequence[Any]) -> _Tried:
        """What runs of the sub-module on the real samples, at several batch sizes, tell of its results."""
        outputs: list[Structure] = []
        gradients: list[bool] = []
        changed: set[int] = set()
        enabled = torch.is_grad_enabled()

        def run(tensors: Sequence[Any]) -> list[Tensor]:
            given = [_own(item, like.requires_grad) for item, like in zip(tensors, operands, strict=True)]
            before = [version(item) for item in given]
            with torch.set_grad_enabled(enabled):
                made, output = self._run(structure, given)
            changed.update(place for place, item in enumerate(given) if version(item) != before[place])
            outputs.append(output)
            gradients[:] = [tensor.requires_grad for tensor in made]
            return [tensor.detach() for tensor in made]

        try:
            with real_execution(), self._unwatched():
                made = self._sizes.at_two_sizes(run, reals, operands)
        except CaptureError:
            raise
        except Exception as error:
            raise self._untraceable(f"{type(error).__name__}: {error}") from error
        if any(output != outputs[0] for output in outputs):
            raise self._untraceable("it returns Python values that depend on data or on the batch size")
        if len(self._state_names) <= max(changed, default=-1):
            raise self._untraceable("it changes a tensor that it is called with in place")
        count = len(self._state_names) - len(self._buffer_names)
        if any(place < count for place in changed):
            raise self._untraceable("it changes a parameter in place")
        return _Tried(made, outputs[0], tuple(gradients), tuple(sorted(changed)))


@dataclass(frozen=True)
class _Tried:
    """Results of a sub-module: the tensors and what stands round them, which require gradients, changed buffers."""

    made: TwoSizes
    output: Structure
    gradients: tuple[bool, ...]
    changes: tuple[int, ...]


def _own(item: Any, requires_grad: bool) -> Any:
    """A copy that may be changed."""
    return item.detach().clone().requires_grad_(requires_grad) if isinstance(item, Tensor) else item


@contextmanager
def unchanged(operands: Sequence[Any], title: str) -> Iterator[None]:
    """Raises CaptureError at the end if what stays whole has changed a tensor that it was given."""
    tensors = [item for item in operands if isinstance(item, Tensor) and not item.is_inference()]
    before = list(map(version, tensors))
    yield
    if list(map(version, tensors)) != before:
        raise CaptureError(
            f"{title} stays whole and changes one of its buffers or arguments in place, which would be done once for "
            "each part of the batch; take that out of it, or do not keep it whole"
        )


@contextmanager
def leaf_modules_installed(leaves: Sequence[LeafModule]) -> Iterator[None]:
    """All of ``leaves`` are opaque while active."""
    with ExitStack() as stack:
        for leaf in leaves:
            stack.enter_context(leaf.installed())
        yield
