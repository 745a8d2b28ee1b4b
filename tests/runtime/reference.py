"""One process that runs the plain model on the global batch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.utils import _pytree as pytree

from .models import Batch, Recipe

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "adam": lambda params: Adam(params, lr=0.01),
    "adamw": lambda params: AdamW(params, lr=0.01, weight_decay=0.1),
    "sgd": lambda params: SGD(params, lr=0.05, momentum=0.9),
}


@dataclass(frozen=True)
class Division:
    """How the rows of a global batch are computed together.

    Attributes:
        rows_per_rank: rows of each rank's batch.
        microbatches: number of microbatches.
        replicas: number of Replicas of every Stage.
    """

    rows_per_rank: tuple[int, ...]
    microbatches: int
    replicas: int

    def slices(self) -> list[tuple[int, Tensor]]:
        """Replica and rows of the global batch of everything that is computed at once, in order of microbatches."""
        starts = [sum(self.rows_per_rank[:rank]) for rank in range(len(self.rows_per_rank))]
        own = [
            torch.arange(start, start + rows).tensor_split(self.microbatches)
            for start, rows in zip(starts, self.rows_per_rank, strict=True)
        ]
        found = []
        for microbatch in range(self.microbatches):
            rows = torch.cat([parts[microbatch] for parts in own])
            found += [(replica, part) for replica, part in enumerate(rows.tensor_split(self.replicas)) if len(part)]
        return found


class Reference:
    """The plain model with its optimizer."""

    def __init__(self, model: nn.Module, recipe: Recipe, optimizer: str) -> None:
        self.model = copy.deepcopy(model)
        self.recipe = recipe
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())
        self._buffers: dict[int, dict[str, Tensor]] = {0: dict(self.model.named_buffers())}

    def step(self, batch: Batch, total_rows: int, division: Division | None = None) -> Any:
        """Outputs and gradients of a global batch; by the slices of ``division``, if given.

        Returns:
            The model's outputs for the global batch, in the order of its rows.
        """
        slices = [(0, torch.arange(total_rows))] if division is None else division.slices()
        outputs = []
        counts = {name: buffer.clone() for name, buffer in self._buffers[0].items() if not buffer.is_floating_point()}
        for replica, rows in slices:
            args, kwargs, target = take(batch, rows, total_rows, self.recipe.whole)
            buffers = self._buffers_of(replica)
            for name, count in counts.items():
                # What does not depend on rows changes once a step.
                buffers[name].copy_(count)
            if division is None:
                output = self.model(*args, **kwargs)
            else:
                output = functional_call(self.model, buffers, args, kwargs)
            loss = self.recipe.criterion(output, target)
            (loss * (len(rows) / total_rows)).backward()
            outputs.append(output)
        if division is None:
            return outputs[0]
        return _joined(outputs, [rows for _, rows in slices])

    def _buffers_of(self, replica: int) -> dict[str, Tensor]:
        """Every Replica has buffers of its own; the first one's are the model's."""
        if replica not in self._buffers:
            self._buffers[replica] = {name: buffer.clone() for name, buffer in self._buffers[0].items()}
        return self._buffers[replica]


def take(batch: Batch, rows: Tensor | slice, total_rows: int, whole: frozenset[str] = frozenset()) -> Batch:
    """Some rows of a batch."""

    def rows_of(item: Any) -> Any:
        has_rows = isinstance(item, Tensor) and item.dim() > 0
        return item[rows] if has_rows else item

    args, kwargs, target = batch
    taken = {name: item if name in whole else rows_of(item) for name, item in kwargs.items()}
    return tuple(rows_of(item) for item in args), taken, target[rows]


def _joined(outputs: Sequence[Any], rows: Sequence[Tensor]) -> Any:
    """Outputs of slices as outputs of the whole: rows in order, averages weighted by rows."""
    order = torch.cat(list(rows)).argsort()
    shares = [len(part) / len(order) for part in rows]

    def join(*leaves: Any) -> Any:
        if not isinstance(leaves[0], Tensor):
            return leaves[0]
        if leaves[0].dim() == 0:
            return sum(leaf * share for leaf, share in zip(leaves, shares, strict=True))
        return torch.cat(leaves)[order]

    return pytree.tree_map(join, *outputs)
