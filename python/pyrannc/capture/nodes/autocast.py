"""``torch.autocast`` as casts: what it would convert for each operator becomes Ops of the Graph.

torch's own kernels decide: each converts what it is given and calls its operator again, and both are traced. The cache
of converted parameters works while a trace runs, so that a parameter that is read several times has one cast.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from pyrannc.capture.torch_internals.operators import (
    ENTER_AUTOCAST,
    EXIT_AUTOCAST,
    OpOverload,
    autocast_kernel,
    decomposition,
    schema,
)
from pyrannc.capture.torch_internals.tensors import TorchDispatchMode, pytree
from pyrannc.capture.torch_internals.tracing import disable_proxy_modes_tracing

KINDS = ("cpu", "cuda")
"""Types of devices, each of which has an autocast of its own."""
OF_ONE_OP = "rannc_of_one_op"
"""In the ``meta`` of the nodes that open and close a region of one Op."""


@dataclass(frozen=True)
class Autocast:
    """What ``torch.autocast`` is set to.

    Attributes:
        dtypes: by type of device, where it is on.
        cache: a parameter is converted once in a region.
    """

    dtypes: tuple[tuple[str, torch.dtype], ...]
    cache: bool

    @staticmethod
    def now() -> Autocast:
        """As it is set now."""
        on = tuple((kind, torch.get_autocast_dtype(kind)) for kind in KINDS if torch.is_autocast_enabled(kind))
        return Autocast(on, torch.is_autocast_cache_enabled())

    def __str__(self) -> str:
        return ", ".join(f"{kind}: {str(dtype).removeprefix('torch.')}" for kind, dtype in self.dtypes) or "off"

    def number(self) -> int:
        """What a capture rests on as one number: 0 while autocast is off."""
        number = int(self.cache and bool(self.dtypes))
        for kind in KINDS:
            dtype = dict(self.dtypes).get(kind)
            number = number * (len(_DTYPES) + 1) + (_DTYPES.index(dtype) + 1 if dtype in _DTYPES else 0)
        return number

    @contextmanager
    def restored(self) -> Iterator[None]:
        """This, while active, in regions of their own."""
        dtypes = dict(self.dtypes)
        with ExitStack() as stack:
            for kind in KINDS:
                if kind in dtypes or torch.is_autocast_enabled(kind):
                    dtype = dtypes.get(kind)
                    region = torch.autocast(kind, dtype=dtype, enabled=dtype is not None, cache_enabled=self.cache)
                    stack.enter_context(region)
            yield


_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def autocast_state() -> Hashable:
    """What a capture rests on: nothing while autocast is off."""
    now = Autocast.now()
    return (now.dtypes, now.cache) if now.dtypes else ()


@contextmanager
def no_autocast() -> Iterator[None]:
    """Ops do what they say: every conversion is one of them."""
    on = [kind for kind in KINDS if torch.is_autocast_enabled(kind)]
    for kind in on:
        torch.set_autocast_enabled(kind, False)
    try:
        yield
    finally:
        for kind in on:
            torch.set_autocast_enabled(kind, True)


@contextmanager
def cached_casts(cache: bool) -> Iterator[None]:
    """Parameters are converted once in a region, as ``cache`` says, though a trace switches that off."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(cache)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)
        torch.clear_autocast_cache()


class CastsAsOps:
    """Finds the operators that a trace must see as what autocast makes of them."""

    def __init__(self) -> None:
        self._known: dict[Hashable, bool] = {}

    def made_of(self, func: Any, args: Any, kwargs: Any) -> Callable[..., Any] | None:
        """What runs in an operator's place, and is to be traced instead; None for the operator itself."""
        if not any(map(torch.is_autocast_enabled, KINDS)) or not isinstance(func, OpOverload):
            return None
        devices = {item.device.type for item in pytree.tree_leaves((args, kwargs)) if isinstance(item, Tensor)}
        # That of the GPU comes first where both are there.
        kernels = (autocast_kernel(func, kind) for kind in ("cuda", "cpu") if kind in devices)
        kernel = next((found for found in kernels if found is not None), None)
        if kernel is None and self._converts_inside(func, args, kwargs):
            return decomposition(func)
        return kernel

    def _converts_inside(self, func: OpOverload, args: Any, kwargs: Any) -> bool:
        """True for an operator made of others some of which autocast converts operands for."""
        own = schema(func)
        gives_tensors = any("Tensor" in str(result.type) for result in own.returns)
        if not gives_tensors or own.is_mutable or func.is_view or decomposition(func) is None:
            return False
        key = (func, *map(_form, pytree.tree_leaves((args, kwargs))), Autocast.now())
        if key not in self._known:
            with_it = _ops_of(func, args, kwargs)
            with no_autocast():
                self._known[key] = with_it != _ops_of(func, args, kwargs)
        return self._known[key]


def _form(item: Any) -> Any:
    """What of an argument can decide about conversions."""
    if isinstance(item, Tensor):
        return item.dtype, item.dim(), item.device
    return item if isinstance(item, (bool, str, torch.dtype, type(None))) else type(item)


def _ops_of(func: Any, args: Any, kwargs: Any) -> list[Any]:
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        with disable_proxy_modes_tracing(), torch.no_grad(), _Ops() as ops:
            func(*args, **kwargs)
    finally:
        torch.set_autocast_cache_enabled(before)
    seen: list[Any] = ops.seen
    return seen


class _Ops(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types for it
    """Notes which operators run, and on what types."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # likewise
        self.seen: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves = pytree.tree_leaves((args, kwargs))
        self.seen.append((func, [item.dtype for item in leaves if isinstance(item, Tensor)]))
        return func(*args, **(kwargs or {}))


def join_casts(graph: fx.Graph, params: Sequence[fx.Node]) -> None:
    """Casts of each of these parameters, which get no gradients, become one, as torch's cache does for others."""
    for param in params:
        first: dict[Any, fx.Node] = {}
        for node in list(param.users):
            if node.target is torch.ops.aten.to.dtype and not node.kwargs:
                made = first.setdefault(node.args[1:], node)
                if made is not node:
                    node.replace_all_uses_with(made)
                    graph.erase_node(node)


@contextmanager
def region_of_one_op(tracer: Any, device: torch.device) -> Iterator[None]:
    """What is traced inside runs under autocast as it is set, where no casts can stand for that."""
    if not torch.is_autocast_enabled(device.type):
        yield
        return
    arguments = (device.type, torch.get_autocast_dtype(device.type), True, False)
    opened = tracer.create_proxy("call_function", ENTER_AUTOCAST, arguments, {})
    opened.node.meta[OF_ONE_OP] = True
    yield
    closed = tracer.create_proxy("call_function", EXIT_AUTOCAST, (opened,), {})
    closed.node.meta[OF_ONE_OP] = True
