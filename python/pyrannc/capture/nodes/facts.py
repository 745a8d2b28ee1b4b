"""What is noted about each node while it is traced, since the finished graph does not tell."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from pyrannc.capture.torch_internals.levels import without_levels
from pyrannc.capture.torch_internals.patching import TRACK_TENSOR_TREE
from pyrannc.capture.torch_internals.tensors import leads_nowhere, storage_address
from pyrannc.capture.torch_internals.tracing import note_new_nodes
from pyrannc.capture.user.source import SourceTracker

FACTS = "rannc_facts"
PLACE = "rannc_place"
CALLS = "rannc_calls"
GRAD_ENABLED = "rannc_grad_enabled"
OF_PLACE = (PLACE, CALLS, GRAD_ENABLED)
"""What a node that stands for another one has of it."""


class TensorFacts(NamedTuple):
    """Facts of one tensor: does a gradient flow into it, and which storage (of the trace) holds it."""

    requires_grad: bool
    storage: int | None


def memory(node: fx.Node) -> set[int]:
    """The storages of what a traced node gives, or takes if it gives nothing."""
    facts = node.meta.get(FACTS)
    if facts is None:
        return {storage for operand in node.all_input_nodes for storage in memory(operand)} if node.args else set()
    return {found.storage for found in facts.values() if found.storage is not None}


class FactRecorder:
    """Notes facts in the ``meta`` of nodes: place, gradient mode, and :class:`TensorFacts` per result.

    ``meta[FACTS]`` maps the place in the returned tuple (None for a single tensor) to the facts.
    """

    def __init__(self, tracker: SourceTracker) -> None:
        self._tracker = tracker
        self._storages: list[torch.UntypedStorage] = []  # kept alive, so that an address names one storage
        self._seen: set[int] = set()

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Records tensor facts while active."""
        original = TRACK_TENSOR_TREE.original

        def track(inner: Any, proxy: Any, *, constant: Any, tracer: Any) -> Any:
            result = original(inner, proxy, constant=constant, tracer=tracer)
            self._record(inner, proxy)
            return result

        with TRACK_TENSOR_TREE.replaced_by(track):
            yield

    def annotate_nodes_of(self, graph: fx.Graph) -> None:
        """From now on, every node made in ``graph`` carries its place, the calls round it and gradient mode."""

        def annotate(node: fx.Node) -> None:
            node.meta[PLACE] = self._tracker.here()
            node.meta[CALLS] = self._tracker.calls
            self._tracker.note_code()
            node.meta[GRAD_ENABLED] = torch.is_grad_enabled()

        note_new_nodes(graph, annotate)

    def _record(self, inner: Any, proxy: Any) -> None:
        if isinstance(inner, Tensor) and isinstance(proxy, fx.Proxy):
            proxy.node.meta[FACTS] = {None: self._facts(inner)}
        elif isinstance(inner, (list, tuple)) and isinstance(proxy, fx.Proxy):
            proxy.node.meta[FACTS] = {
                index: self._facts(item) for index, item in enumerate(inner) if isinstance(item, Tensor)
            }
        elif isinstance(inner, (list, tuple)) and isinstance(proxy, (list, tuple)):
            for item, item_proxy in zip(inner, proxy, strict=True):
                self._record(item, item_proxy)

    def _facts(self, tensor: Tensor) -> TensorFacts:
        plain = without_levels(tensor)
        return TensorFacts(plain.requires_grad and not leads_nowhere(plain), self._storage_id(tensor))

    def _storage_id(self, tensor: Tensor) -> int | None:
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):  # tensors inside vmap, sparse tensors
            return None
        address = storage_address(storage)
        if address not in self._seen:
            self._seen.add(address)
            self._storages.append(storage)
        return address
