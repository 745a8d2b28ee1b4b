"""``flex_attention``: one Op, with what it does to scores and which it masks as graphs of their own."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, fx
from torch.overrides import TorchFunctionMode

from pyrannc.capture.nodes.fallback import argument_of, insert_node
from pyrannc.capture.nodes.leaf import OpaqueCall
from pyrannc.capture.torch_internals.fakes import FakeTensor
from pyrannc.capture.torch_internals.operators import flex_attention_operator, flex_attention_results, lookup
from pyrannc.capture.torch_internals.patching import FLEX_ATTENTION
from pyrannc.capture.torch_internals.symbols import expression
from pyrannc.capture.torch_internals.tensors import pytree
from pyrannc.capture.torch_internals.tracing import current_tracer, disable_proxy_modes_tracing, proxy_of
from pyrannc.capture.user.source import SourceTracker

from .inner_graph import InnerGraph, empty_like, inner_graph, operator_of, refuse_transforms

_QKV, _SAID = 3, 7
"""Query, key and value; with the functions, the mask's blocks, the scale and options."""
_PLACES = 4
"""Batch, head, and which query and key, by which both functions are asked."""
_MOST_KERNELS = 64


@contextmanager
def flex_attention_as_op(tracker: SourceTracker) -> Iterator[None]:
    """Calls of ``flex_attention`` become Ops while active, instead of being compiled."""
    original = FLEX_ATTENTION.original

    def attention(self: Any, *items: Any) -> Any:
        tracer = current_tracer()
        if tracer is None:
            return original(self, *items)
        refuse_transforms("flex_attention", tracker)
        return _Attention(tracer, tracker).of(items[:_QKV], *items[_QKV:_SAID])

    with FLEX_ATTENTION.replaced_by(attention):
        yield


class _Attention:
    """Calls of the operator."""

    def __init__(self, tracer: Any, tracker: SourceTracker) -> None:
        self._tracer = tracer
        self._tracker = tracker

    def of(self, qkv: Sequence[Tensor], score_mod: Any, block_mask: Sequence[Any], scale: float, options: Any) -> Any:
        """Traces both functions, and returns what stands for the results."""
        *blocks, mask_mod = block_mask
        score = qkv[0].new_zeros(())
        places = [score.new_zeros((), dtype=torch.int32) for _ in range(_PLACES)]
        with _Lookups(self._tracer):
            scores = inner_graph(score_mod, [score, *places], self._tracer, self._tracker)
            masks = inner_graph(mask_mod, places, self._tracer, self._tracker)
        own = [argument_of(item, self._tracer) for item in (*qkv, *blocks)]
        reads = [self._tracer.proxy(node) for node in (*scores.reads, *masks.reads)]
        with disable_proxy_modes_tracing(), torch.no_grad():
            found = flex_attention_results(qkv[0], qkv[2])
        wants = any(item.requires_grad for item in (*qkv, *scores.results))
        fakes = tuple(empty_like(item, requires_grad=wants and item is not found[2]) for item in found)
        target = _operator(scores, masks, blocks, scale, options)
        target.row_wise = (
            _has_rows_first((*qkv, *blocks)) and _goes_by_rows(scores, 1, qkv[0]) and _goes_by_rows(masks, 0, qkv[0])
        )
        return insert_node(self._tracer, target, (*own, *reads), {}, fakes)


def _has_rows_first(taken: Sequence[Any]) -> bool:
    """True where the batch, whose parts attention computes apart, is rows, and nothing else has any."""
    tensors = [item for item in taken if isinstance(item, Tensor)]
    return isinstance(tensors[0].shape[0], torch.SymInt) and not any(map(_has_rows_within, tensors))


def _has_rows_within(tensor: Tensor) -> bool:
    return any(isinstance(size, torch.SymInt) for size in tensor.shape[1:])


def _goes_by_rows(part: InnerGraph, place: int, query: Tensor) -> bool:
    """True for a function that uses a row's number to look that row up, and tables with rows for nothing else.

    Args:
        place: of that number among its operands.
        query: tables have as many rows as it, or none.
    """
    taken = list(part.module.graph.find_nodes(op="placeholder"))
    number, made = taken[place], [node.meta["val"] for node in part.reads]
    if any(not isinstance(item, Tensor) or _has_rows_within(item) for item in made):
        return False
    read = zip(taken[len(taken) - len(made) :], made, strict=True)
    tables = {node: item.shape[0] for node, item in read if item.dim() and isinstance(item.shape[0], torch.SymInt)}
    if {expression(rows) for rows in tables.values()} - {expression(query.shape[0])}:
        return False
    users = {user for node in (number, *tables) for user in node.users}
    return all(_looks_up_row(user, number, tables) for user in users)


def _looks_up_row(node: fx.Node, number: fx.Node, tables: Collection[fx.Node]) -> bool:
    if node.target is not lookup():
        return False
    table, indices = node.args
    assert isinstance(indices, Sequence)
    return table in tables and indices[0] is number and number not in indices[1:]


class _Lookups(TorchFunctionMode):
    """``table[i]`` with a number in a tensor is a lookup, whose number torch would read otherwise."""

    def __init__(self, tracer: Any) -> None:
        super().__init__()
        self._tracer = tracer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        table, *indices = pytree.tree_leaves(args)
        if func is not Tensor.__getitem__ or not all(isinstance(item, (Tensor, int)) for item in indices):
            return func(*args, **(kwargs or {}))
        known = [item if isinstance(item, Tensor) else torch.tensor(item, device=table.device) for item in indices]
        proxies = [proxy_of(item, self._tracer) for item in (table, *known)]
        with disable_proxy_modes_tracing():
            found = lookup()(table, known)
        return insert_node(self._tracer, lookup(), (proxies[0], proxies[1:]), {}, found)


def _operator(scores: InnerGraph, masks: InnerGraph, blocks: Sequence[Any], scale: float, options: Any) -> OpaqueCall:
    own = _QKV + len(blocks)
    split = own + len(scores.reads)

    def unfused(*tensors: Any) -> Any:
        def score_mod(*items: Any) -> Tensor:
            return scores.call(*items)[0]

        def mask_mod(*items: Any) -> Tensor:
            return masks.call(*items)[0]

        mask = (*tensors[_QKV:own], mask_mod)
        read, read_by_masks = tensors[own:split], tensors[split:]
        return flex_attention_operator(*tensors[:_QKV], score_mod, mask, scale, options, read, read_by_masks)

    def fused(*tensors: Any) -> Any:
        if not tensors[0].is_cuda or isinstance(tensors[0], FakeTensor):
            return unfused(*tensors)
        read, read_by_masks = tensors[own:split], tensors[split:]

        # The compiler finds what they read in their closures.
        def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return scores.call(score, b, h, i, j, *read)[0]

        def mask_mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return masks.call(b, h, i, j, *read_by_masks)[0]

        mask = (*tensors[_QKV:own], mask_mod)
        return _kernels(target.title)(*tensors[:_QKV], score_mod, mask, scale, options)

    fixed = [item for item in blocks if not isinstance(item, Tensor)]
    target = operator_of("flex_attention", (fixed, scale, sorted(options.items())), [scores, masks], fused)
    return target


@lru_cache(maxsize=_MOST_KERNELS)
def _kernels(_title: str) -> Callable[..., Any]:
    """Kernels that hold no matrix of scores, of what an operator's title tells."""

    def attention(*items: Any) -> Any:
        return flex_attention_operator(*items)

    # The compiler counts by code how often it has compiled something, and stops.
    own = FunctionType(attention.__code__.replace(), attention.__globals__)
    return torch.compile(own, dynamic=False, fullgraph=True)
