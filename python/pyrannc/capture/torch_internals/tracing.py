"""The trace, and what torch is told of it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, fx
from torch._guards import TracingContext, tracing
from torch._subclasses import fake_tensor
from torch.fx import _lazy_graph_module
from torch.fx.experimental import proxy_tensor

from .fakes import FakeTensor, runs_without_data
from .patching import PatchPoint
from .symbols import SYMBOLIC


@contextmanager
def told_of_no_trace(is_traced: Callable[[Tensor], bool]) -> Iterator[None]:
    """Who asks is told that nothing is compiled, and which tensors have no data. Public: none.

    Args:
        is_traced: of a tensor without data, whether that is told.
    """

    class Asked(type):
        def __instancecheck__(cls, item: Any) -> bool:
            # Rules for fake tensors ask too.
            return isinstance(item, FakeTensor) and (runs_without_data() or is_traced(item))

    class Told(metaclass=Asked):
        pass

    def is_compiling() -> bool:
        return False

    compiling, fake = PatchPoint(torch.compiler, "is_compiling"), PatchPoint(torch._subclasses, "FakeTensor")
    with compiling.replaced_by(is_compiling), fake.replaced_by(Told):
        yield


LazyGraphModule = _lazy_graph_module._LazyGraphModule
"""Makes code of its graph when it is called, if ever. Public: ``fx.GraphModule``, at once."""


def trace_before_dispatch(call: Callable[..., Any], *args: Any) -> fx.GraphModule:
    """The Ops of a call as autograd sees them. Public: ``make_fx`` without ``_allow_non_fake_inputs``, or export."""
    trace = proxy_tensor.make_fx(call, pre_dispatch=True, tracing_mode="real", _allow_non_fake_inputs=True)
    _tracing.append(threading.get_ident())
    try:
        with _lazy_graph_module._use_lazy_graph_module(True):
            return trace(*args)
    finally:
        _tracing.pop()


_tracing: list[int] = []
"""The thread of each trace that runs: torch holds its modes for all threads alike."""


def current_tracer() -> Any:
    """The fx tracer of the trace that runs in this thread, None outside of one. Public: none."""
    if _tracing and threading.get_ident() not in _tracing:
        return None
    mode: Any = proxy_tensor.get_proxy_mode()
    return None if mode is None else mode.tracer


disable_proxy_modes_tracing = proxy_tensor.disable_proxy_modes_tracing
"""What runs under it leaves no node. Public: none."""


def proxy_of(item: Any, tracer: Any) -> fx.Proxy | None:
    """What stands for a tensor or a symbolic number in the trace, if anything does. Public: none."""
    if not isinstance(item, (Tensor, *SYMBOLIC)):
        return None
    slot: Any = proxy_tensor.get_proxy_slot(item, tracer, None)
    if isinstance(slot, proxy_tensor._ProxyTensor):
        slot = slot.proxy
    if slot is None or isinstance(slot, fx.Proxy):
        return slot
    proxy = slot.force()
    return proxy if isinstance(proxy, fx.Proxy) else None


def track(result: Any, proxy: fx.Proxy, tracer: Any) -> None:
    """``proxy`` stands for ``result`` from now on: for Ops whose inside is not traced. Public: custom operators."""
    proxy_tensor.track_tensor_tree(result, proxy, constant=None, tracer=tracer)


def note_new_nodes(graph: fx.Graph, note: Callable[[fx.Node], None]) -> None:
    """Calls ``note`` on every node made in ``graph``. Public: none; ``create_node`` is, yet not to be shadowed."""
    create = graph.create_node

    def create_noted(*args: Any, **kwargs: Any) -> fx.Node:
        node = create(*args, **kwargs)
        note(node)
        return node

    graph.create_node = create_noted  # type: ignore[method-assign]  # shadows it on this graph only


def non_strict_functions() -> AbstractContextManager[None]:
    """Lets Python code of a model work on symbolic sizes (indexing, ``math`` functions). Public: non-strict export."""
    from torch._export.non_strict_utils import _NonStrictTorchFunctionHandler

    handler: AbstractContextManager[None] = _NonStrictTorchFunctionHandler()
    return handler


def override_builtin_ops() -> AbstractContextManager[None]:
    """Likewise for ``max``, ``min`` and ``pow`` of Python. Public: non-strict export."""
    from torch._export.non_strict_utils import _override_builtin_ops

    return _override_builtin_ops()


@contextmanager
def functions_as_operators() -> Iterator[None]:
    """Custom autograd functions that ask export for an operator of their own, with a graph, get none. Public: none."""
    from torch._export import wrappers

    def is_class(item: Any) -> bool:
        return False

    # They ask whether they are called on a class, as they always are.
    with PatchPoint(wrappers, "inspect").replaced_by(SimpleNamespace(isclass=is_class)):
        yield


def compiling_state() -> AbstractContextManager[None]:
    """``torch.compiler.is_compiling()`` is True in it: models leave out what cannot be traced, ``torch.vmap`` leaves
    nodes. Public: none."""
    from torch._export.utils import _compiling_state_context

    return _compiling_state_context()


@contextmanager
def not_compiling() -> Iterator[None]:
    """The opposite: scripted code runs, as it does outside of a trace, instead of its Python original. Public: none."""
    compiler: Any = torch.compiler
    before = compiler._is_compiling_flag, compiler._is_exporting_flag
    compiler._is_compiling_flag = compiler._is_exporting_flag = False
    try:
        yield
    finally:
        compiler._is_compiling_flag, compiler._is_exporting_flag = before


@contextmanager
def tracing_context(mode: fake_tensor.FakeTensorMode) -> Iterator[None]:
    """Parts of torch that are traced find the mode in force here. Public: none."""
    with tracing(TracingContext(mode)):
        yield
