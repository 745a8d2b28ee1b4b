"""Calls that stay whole in the graph: custom autograd functions, gradient hooks, and what else is opaque."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.autograd.function import Function

from pyrannc.capture.torch_internals.functions import functions_applied_by
from pyrannc.capture.torch_internals.levels import functorch_is_active, only_vmap_is_active, without_levels
from pyrannc.capture.torch_internals.patching import REGISTER_HOOK
from pyrannc.capture.torch_internals.tensors import pytree, version
from pyrannc.capture.torch_internals.tracing import (
    current_tracer,
    disable_proxy_modes_tracing,
    functions_as_operators,
    proxy_of,
)
from pyrannc.errors import CaptureError

from .autocast import Autocast
from .fallback import insert_node
from .form import Form
from .untraced_backwards import UntracedBackwards


class OpaqueCall:
    """A callable node target whose inside was not captured. Takes tensors by position.

    Attributes:
        title: its name in the Graph.
        changes: the operands that it changes in place.
        draws: it may draw random numbers.
        draws_elsewhere: it may draw from Python or NumPy too.
        form: the extents that its results must have.
        autocast: under which it runs: as it was set where the call was made.
        row_wise: whether it treats each row by itself, if made-up operands need not show it.
        repeats: it gives the same for the same operands, and changes nothing, as far as trials have shown.
        does: calls that are equal in this do the same with the same operands; None where nobody knows.
        types: of the tensors inside of it, as far as they are known.
        is_known: its title tells what it computes, as no other does in the same capture, without draws: like any
            operator, it may run in several places.
        tried: what trials call instead, where a call may leave out some of what it can do.
    """

    def __init__(self, name: str, call: Callable[..., Any], source_class: str) -> None:
        self.__name__ = self.__qualname__ = name
        self.__module__ = "pyrannc.opaque"
        self.title = f"pyrannc.opaque.{source_class}"
        self.changes: tuple[int, ...] = ()
        self.draws = True
        self.draws_elsewhere = False
        self.form: Form | None = None
        self.autocast = Autocast.now()
        self.row_wise: bool | None = None
        self.repeats = False
        self.does: Hashable | None = None
        self.types: frozenset[torch.dtype] = frozenset()
        self.is_known = False
        self.tried: Callable[..., Any] | None = None
        self._call = call

    def __call__(self, *tensors: Any) -> Any:
        """Runs the call."""
        with self.autocast.restored():
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
    """``Tensor.register_hook``: no result, but the gradient of its operand passes through the hook.

    Attributes:
        takes_parts: parts of the batch may pass through it one after another.
    """

    def __init__(self, hook: Callable[[Tensor], Tensor | None]) -> None:
        super().__init__("grad_hook", self._register, f"hook.{getattr(hook, '__qualname__', type(hook).__qualname__)}")
        self.hook = hook
        self.takes_parts = True
        self._last: Callable[[], Tensor | None] = lambda: None

    def _register(self, tensor: Tensor) -> None:
        # What depends on no rows is made once for all microbatches.
        if tensor.requires_grad and self._last() is not tensor:
            REGISTER_HOOK.original(tensor, self.hook)
            self._last = weakref.ref(tensor)


@contextmanager
def opaque_autograd_functions(backwards: UntracedBackwards) -> Iterator[None]:
    """Keeps calls of custom ``autograd.Function``s whole, so that their own backward is what runs.

    Args:
        backwards: is told of each.
    """

    def apply(original: Callable[..., Any], cls: type[Function], /, *args: Any, **kwargs: Any) -> Any:
        tracer = current_tracer()
        plain = partial(original, cls)
        if tracer is None:
            return plain(*args, **kwargs)
        if functorch_is_active():
            return _under_transforms(cls, plain, args, kwargs)
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
        backwards.note_call(args, result)
        name = f"autograd_function_{cls.__name__}"
        target = OpaqueCall(name, call, f"{cls.__module__}.{cls.__qualname__}")
        return insert_node(tracer, target, tuple(proxies.values()), {}, result)

    def bypassed(cls: type[Function], args: Sequence[Any]) -> None:
        if current_tracer() is not None and any(isinstance(item, Tensor) and item.requires_grad for item in args):
            raise CaptureError(
                f"{cls.__qualname__}.apply is called by another name, as with f = {cls.__qualname__}.apply, by which "
                f"this version of torch hides its backward from RaNNC: write {cls.__qualname__}.apply(...) there"
            )

    with functions_applied_by(apply, bypassed), functions_as_operators():
        yield


def _under_transforms(cls: type[Function], plain: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """A call inside of ``torch.vmap`` and the like, where nothing can stay whole."""
    tensors = [without_levels(item) for item in pytree.tree_leaves((args, kwargs)) if isinstance(item, Tensor)]
    if _needs_backward(tensors):
        raise NotImplementedError(f"{cls.__qualname__} has a backward of its own, which is lost under torch.vmap")
    if only_vmap_is_active() and cls.generate_vmap_rule:
        # It says that vmap may pass through its forward.
        return cls.forward(*args, **kwargs)
    return plain(*args, **kwargs)


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
def captured_tensor_hooks(backwards: UntracedBackwards) -> Iterator[None]:
    """Turns ``Tensor.register_hook`` into a node of the graph.

    Args:
        backwards: is told of each hook.
    """
    original = REGISTER_HOOK.original

    def register_hook(self: Tensor, hook: Callable[[Tensor], Tensor | None]) -> Any:
        tracer = current_tracer()
        proxy = proxy_of(self, tracer) if tracer is not None else None
        if proxy is None:
            # What runs beside a trace records no gradients.
            return original(self, hook) if self.requires_grad or torch.is_grad_enabled() else _NoHandle()
        backwards.note_hook(hook, self)
        tracer.create_proxy("call_function", GradientHook(hook), (proxy,), {})
        return _NoHandle()

    with REGISTER_HOOK.replaced_by(register_hook):
        yield


@contextmanager
def traced_data() -> Iterator[None]:
    """``x.data`` of a traced tensor is ``x.detach()``, and what is put there is copied: both would leave no trace.

    Only of what the call is given: what is computed may have views, which keep what they show.
    """
    # It stands in the class that Tensor is made from.
    owner: Any = Tensor
    original = owner.data

    def read(self: Tensor) -> Tensor:
        tracer = current_tracer()
        if tracer is None or functorch_is_active() or proxy_of(self, tracer) is None:
            data: Tensor = original.__get__(self)
            return data
        return self.detach()

    def write(self: Tensor, new: Tensor) -> None:
        tracer = current_tracer()
        proxy = None if tracer is None else proxy_of(self, tracer)
        if proxy is None:
            original.__set__(self, new)
        elif proxy.node.op == "placeholder" and (self.shape, self.dtype) == (new.shape, new.dtype):
            self.detach().copy_(new)
        else:
            raise NotImplementedError("it puts other contents into a tensor's `.data`: use `tensor.copy_(...)`")

    owner.data = property(read, write)
    try:
        yield
    finally:
        del owner.data


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
