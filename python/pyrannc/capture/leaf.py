"""Calls that stay whole in the graph: custom autograd functions, gradient hooks, chosen sub-modules."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, fx, nn
from torch.autograd.function import Function

from pyrannc.errors import CaptureError

from .fallback import BatchSizes, insert_node
from .flatten import Structure, flatten
from .oracle import Oracle, real_execution
from .torch_internals import (
    FUNCTION_APPLY,
    REGISTER_HOOK,
    FakeTensorMode,
    current_tracer,
    disable_proxy_modes_tracing,
    forget_new_sizes,
    functorch_is_active,
    proxy_of,
    reparametrized,
    version,
)


class OpaqueCall:
    """A callable node target whose inside was not captured. Takes tensors by position."""

    def __init__(self, name: str, call: Callable[..., Any], source_class: str) -> None:
        self.__name__ = self.__qualname__ = name
        self.__module__ = "pyrannc.opaque"
        self.title = f"pyrannc.opaque.{source_class}"
        self._call = call

    def __call__(self, *tensors: Any) -> Any:
        """Runs the call."""
        return self._call(*tensors)


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

    def __init__(self, path: str, module: nn.Module, oracle: Oracle, mode: FakeTensorMode, sizes: BatchSizes) -> None:
        self._path = path
        self._module = module
        self._oracle = oracle
        self._mode = mode
        self._sizes = sizes
        self._forward = module.forward
        state = [*module.named_parameters(), *module.named_buffers()]
        self._state_names = [name for name, _ in state]

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
        if tracer is None:
            return self._forward(*args, **kwargs)
        current = dict([*self._module.named_parameters(), *self._module.named_buffers()])
        state = [current[name] for name in self._state_names]
        inputs, structure = flatten((args, kwargs))
        operands = [*state, *inputs]
        if not operands:
            raise CaptureError(
                f"sub-module '{self._path}' stays whole, but has neither parameters nor tensor arguments"
            )
        proxies = [proxy_of(operand, tracer) for operand in operands]
        call = self._runtime_call(structure)
        results, output = self._fake_results(call, structure, operands, proxies)
        target = OpaqueCall(f"module_{self._path.replace('.', '_')}", call, f"module.{self._path}")
        arguments = tuple(p if p is not None else o for p, o in zip(proxies, operands, strict=True))
        insert_node(tracer, target, arguments, {}, results)
        return output.rebuild(results)

    def _runtime_call(self, structure: Structure) -> Callable[..., tuple[Tensor, ...]]:
        names, module, forward = self._state_names, self._module, self._forward

        def call(*tensors: Tensor) -> tuple[Tensor, ...]:
            args, kwargs = structure.rebuild(tensors[len(names) :])
            with reparametrized(module, dict(zip(names, tensors[: len(names)], strict=True))):
                return tuple(flatten(forward(*args, **kwargs))[0])

        return call

    def _fake_results(
        self,
        call: Callable[..., tuple[Tensor, ...]],
        structure: Structure,
        operands: list[Tensor],
        proxies: list[fx.Proxy | None],
    ) -> tuple[tuple[Tensor, ...], Structure]:
        """Results without data, from a run of the sub-module on the real samples at two batch sizes."""
        title = f"sub-module '{self._path}'"
        if not isinstance(self._module, torch.jit.ScriptModule):
            args, kwargs = structure.rebuild(operands[len(self._state_names) :])
            try:
                with disable_proxy_modes_tracing(), unchanged(operands, title):
                    results, output = flatten(self._forward(*args, **kwargs))
                # Sizes inside that depend on data are nobody's business.
                forget_new_sizes(self._mode)
                return tuple(results), output
            except CaptureError:
                raise
            except Exception:  # it cannot run without data: learn the shapes from the real sample
                pass
        reals = [
            self._oracle.sample_of(proxy.node) if proxy is not None else operand
            for proxy, operand in zip(proxies, operands, strict=True)
        ]
        found: list[Structure] = []

        def run(tensors: Sequence[Any]) -> list[Tensor]:
            args, kwargs = structure.rebuild(tensors[len(self._state_names) :])
            state = dict(zip(self._state_names, tensors[: len(self._state_names)], strict=True))
            with reparametrized(self._module, state):
                made, output = flatten(self._forward(*args, **kwargs))
            found.append(output)
            return list(made)

        with real_execution(), unchanged(reals, title):
            made = self._sizes.at_two_sizes(run, reals, operands)
        wants_grad = torch.is_grad_enabled() and any(operand.requires_grad for operand in operands)
        return self._sizes.fakes(made, operands[0].device, wants_grad, self._mode), found[0]


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
