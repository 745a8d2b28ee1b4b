"""Calls that stay whole in the graph: custom autograd functions, gradient hooks, chosen sub-modules."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.function import Function
from torch.fx.experimental import proxy_tensor
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, get_proxy_mode
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils import _pytree as pytree

from pyrannc.errors import CaptureError

from .flatten import Structure, flatten
from .oracle import Oracle, real_execution
from .source import SourceTracker


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


def proxy_of(item: Any, tracer: Any) -> fx.Proxy | None:
    """The proxy that stands for a tensor or symbolic number in the trace, if any."""
    if not isinstance(item, (Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)):
        return None
    slot: Any = proxy_tensor.get_proxy_slot(item, tracer, None)  # type: ignore[call-overload]  # any of the types above
    if isinstance(slot, proxy_tensor._ProxyTensor):
        slot = slot.proxy
    if slot is None or isinstance(slot, fx.Proxy):
        return slot
    proxy = slot.force()
    return proxy if isinstance(proxy, fx.Proxy) else None


def _insert(target: OpaqueCall, proxies: Sequence[Any], result: Any, tracer: Any) -> Any:
    proxy = tracer.create_proxy("call_function", target, tuple(proxies), {}, name=target.__name__)
    proxy_tensor.track_tensor_tree(result, proxy, constant=None, tracer=tracer)
    return result


@contextmanager
def opaque_autograd_functions() -> Iterator[None]:
    """Keeps calls of custom ``autograd.Function``s whole, so that their own backward is what runs."""
    original = Function.__dict__["apply"]

    def apply(cls: type[Function], *args: Any, **kwargs: Any) -> Any:
        mode = get_proxy_mode()
        plain = original.__get__(None, cls)
        if mode is None or torch._C._are_functorch_transforms_active():
            return plain(*args, **kwargs)
        if cls is torch.utils.checkpoint.CheckpointFunction:
            run_function, _preserve_rng, *operands = args
            return run_function(*operands)  # what to recompute is decided by the plan
        needs_backward = torch.is_grad_enabled() and any(isinstance(a, Tensor) and a.requires_grad for a in args)
        if not needs_backward:
            return plain(*args, **kwargs)
        tracer: Any = mode.tracer  # type: ignore[attr-defined]  # a ProxyTorchDispatchMode
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
        return _insert(target, list(proxies.values()), result, tracer)

    Function.apply = classmethod(apply)  # type: ignore[assignment,method-assign]  # undone below
    try:
        yield
    finally:
        Function.apply = original  # type: ignore[method-assign]


class _NoHandle:
    """Stands for the handle of a captured hook, which lives as long as the graph."""

    def remove(self) -> None:
        """Does nothing: the hook is part of the graph."""


@contextmanager
def captured_tensor_hooks() -> Iterator[None]:
    """Turns ``Tensor.register_hook`` into a node of the graph."""
    original = Tensor.register_hook

    def register_hook(self: Tensor, hook: Callable[[Tensor], Tensor | None]) -> Any:
        mode: Any = get_proxy_mode()
        proxy = proxy_of(self, mode.tracer) if mode is not None else None
        if proxy is None:
            return original(self, hook)

        def call(tensor: Tensor) -> None:
            if tensor.requires_grad:
                tensor.register_hook(hook)

        title = f"hook.{getattr(hook, '__qualname__', type(hook).__qualname__)}"
        mode.tracer.create_proxy("call_function", GradientHook("grad_hook", call, title), (proxy,), {})
        return _NoHandle()

    Tensor.register_hook = register_hook  # type: ignore[method-assign]  # undone below
    try:
        yield
    finally:
        Tensor.register_hook = original  # type: ignore[method-assign]


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
        proxy_mode: Any = get_proxy_mode()
        if proxy_mode is None:
            return self._forward(*args, **kwargs)
        tracer = proxy_mode.tracer
        current = dict([*self._module.named_parameters(), *self._module.named_buffers()])
        state = [current[name] for name in self._state_names]
        inputs, structure = flatten((args, kwargs))
        operands = [*state, *inputs]
        proxies = [proxy_of(operand, tracer) for operand in operands]
        call = self._runtime_call(structure)
        results, output = self._fake_results(call, structure, operands, proxies)
        target = OpaqueCall(f"module_{self._path.replace('.', '_')}", call, f"module.{self._path}")
        _insert(target, [p if p is not None else o for p, o in zip(proxies, operands, strict=True)], results, tracer)
        return output.rebuild(results)

    def _runtime_call(self, structure: Structure) -> Callable[..., tuple[Tensor, ...]]:
        names, module, forward = self._state_names, self._module, self._forward

        def call(*tensors: Tensor) -> tuple[Tensor, ...]:
            args, kwargs = structure.rebuild(tensors[len(names) :])
            with _reparametrize_module(module, dict(zip(names, tensors[: len(names)], strict=True))):
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
        args, kwargs = structure.rebuild(operands[len(self._state_names) :])
        try:
            with disable_proxy_modes_tracing():
                results, output = flatten(self._forward(*args, **kwargs))
            return tuple(results), output
        except CaptureError:
            raise
        except Exception:  # it cannot run without data: learn the shapes from the real sample
            reals = [
                self._oracle.value_of(proxy.node) if proxy is not None else operand
                for proxy, operand in zip(proxies, operands, strict=True)
            ]
        with real_execution():
            args, kwargs = structure.rebuild(reals[len(self._state_names) :])
            state = dict(zip(self._state_names, reals[: len(self._state_names)], strict=True))
            with _reparametrize_module(self._module, state):
                real_results, output = flatten(self._forward(*args, **kwargs))
        wants_grad = torch.is_grad_enabled() and any(operand.requires_grad for operand in operands)
        with disable_proxy_modes_tracing(), self._mode:
            fakes = tuple(self._sizes.fake_like(real, operands[0].device, wants_grad) for real in real_results)
        return fakes, output


class BatchSizes:
    """Recognises the batch dimension of a real result."""

    def __init__(self, rows: int, symbol_size: torch.SymInt | None) -> None:
        self.rows = rows
        self.symbol_size = symbol_size

    def fake_like(self, real: Tensor, device: torch.device, requires_grad: bool) -> Tensor:
        """An empty tensor of the same type and shape, with the batch symbol where the extent is a multiple of it."""
        shape = [self._symbolic(size) for size in real.shape]
        fake = torch.empty(shape, dtype=real.dtype, device=device)
        return fake.requires_grad_(requires_grad and (real.is_floating_point() or real.is_complex()))

    def _symbolic(self, size: int) -> int | torch.SymInt:
        if self.symbol_size is None or size == 0 or size % self.rows:
            return size
        return self.symbol_size * (size // self.rows)


@contextmanager
def leaf_modules_installed(leaves: Sequence[LeafModule]) -> Iterator[None]:
    """All of ``leaves`` are opaque while active."""
    with ExitStack() as stack:
        for leaf in leaves:
            stack.enter_context(leaf.installed())
        yield


@contextmanager
def sampled_results(oracle: Oracle, mode: FakeTensorMode, sizes: BatchSizes, tracker: SourceTracker) -> Iterator[None]:
    """Learns the result shapes of ops that cannot run without data from a run on the real samples."""
    from torch._subclasses.fake_tensor import DynamicOutputShapeException, UnsupportedOperatorException

    original = proxy_tensor.proxy_call

    def proxy_call(proxy_mode: Any, func: Any, pre_dispatch: bool, args: Any, kwargs: Any) -> Any:
        try:
            return original(proxy_mode, func, pre_dispatch, args, kwargs)
        except DynamicOutputShapeException as error:
            raise CaptureError(
                f"{tracker.here()} calls {func}, whose result has a shape that depends on the data; use a mask, "
                "or name the sub-module in leaf_modules"
            ) from error
        except UnsupportedOperatorException as error:
            if torch.Tag.dynamic_output_shape in func.tags:
                raise
            return _sampled(error, proxy_mode, func, args, kwargs)

    def _sampled(error: Exception, proxy_mode: Any, func: Any, args: Any, kwargs: Any) -> Any:
        flat, spec = pytree.tree_flatten((args, kwargs))
        proxies = [proxy_of(item, proxy_mode.tracer) for item in flat]
        if any(proxy is None and isinstance(item, Tensor) for proxy, item in zip(proxies, flat, strict=True)):
            raise error
        reals = [
            oracle.value_of(proxy.node) if proxy is not None else item
            for proxy, item in zip(proxies, flat, strict=True)
        ]
        with real_execution():
            real_args, real_kwargs = pytree.tree_unflatten(reals, spec)
            result = func(*real_args, **real_kwargs)
        tensors = [item for item in flat if isinstance(item, Tensor)]
        wants_grad = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
        with disable_proxy_modes_tracing(), mode:
            fake = pytree.tree_map_only(
                Tensor, lambda real: sizes.fake_like(real, tensors[0].device, wants_grad), result
            )
        node_args, node_kwargs = pytree.tree_unflatten(
            [item if proxy is None else proxy for proxy, item in zip(proxies, flat, strict=True)], spec
        )
        proxy = proxy_mode.tracer.create_proxy("call_function", func, node_args, node_kwargs)
        proxy_tensor.track_tensor_tree(fake, proxy, constant=None, tracer=proxy_mode.tracer)
        return fake

    proxy_tensor.proxy_call = proxy_call
    try:
        yield
    finally:
        proxy_tensor.proxy_call = original
