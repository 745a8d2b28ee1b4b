"""What a script is given: its batches, a way to wrap its model, and a place to note what it computes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Generator, Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

import pyrannc
from pyrannc.job.process import own_device

ROWS = 8
"""Rows of the global batch."""

Data = Callable[[int, Generator], tuple[Any, ...]]
"""Makes the arguments of a call with some rows."""

Note = tuple[str, str, Any]
"""A name, ``"same"`` or ``"rows"``, and a structure of tensors, numbers and texts."""


class Job:
    """One process with the global batch.

    Attributes:
        rank: number of this process.
        notes: what the script has computed, in order.
        modules: what RaNNC has wrapped.
    """

    rank = 0
    ranks = 1

    def __init__(self) -> None:
        self.notes: list[Note] = []
        self.modules: list[pyrannc.RaNNCModule] = []

    def wrap(self, net: nn.Module, optimizer: Optimizer | None = None, **options: Any) -> nn.Module:
        """The model as the script calls it; ``options`` are RaNNC's."""
        return net

    def own(self, tensor: Tensor, dim: int = 0) -> Tensor:
        """This process's rows of a tensor of the global batch."""
        return tensor.clone()

    def batches(self, data: Data, steps: int = 3, rows: int = ROWS) -> Iterator[tuple[Any, ...]]:
        """This process's part of some global batches; tensors with ``rows`` in dimension 0 are divided."""
        for step in range(steps):
            yield self.batch(data, step, rows)

    def batch(self, data: Data, step: int = 0, rows: int = ROWS) -> tuple[Any, ...]:
        """This process's part of one global batch."""

        def part(item: Any) -> Any:
            return self.own(item) if isinstance(item, Tensor) and item.dim() and len(item) == rows else item

        parts: tuple[Any, ...] = pytree.tree_map(part, data(rows, Generator().manual_seed(step)))
        return parts

    def same(self, name: str, value: Any) -> None:
        """Notes what must be the same on every rank as in one process."""
        self.notes.append((name, "same", _kept(value)))

    def rows(self, name: str, value: Any) -> None:
        """Notes what has rows in dimension 0: those of all ranks together must be those of one process."""
        self.notes.append((name, "rows", _kept(value)))

    def gradients(self, model: nn.Module) -> None:
        """Notes the gradients of all parameters."""
        for name, param in model.named_parameters():
            self.same(f"gradient of {name}", param.grad)

    def state(self, model: nn.Module) -> None:
        """Notes all parameters and buffers."""
        for name, tensor in model.state_dict().items():
            self.same(name, tensor)


class RankJob(Job):
    """One of RaNNC's ranks with its own rows, on its GPU if this machine has some."""

    def __init__(self, rank: int, rows: tuple[int, ...]) -> None:
        super().__init__()
        self.rank, self.ranks, self._rows = rank, len(rows), rows

    def wrap(self, net: nn.Module, optimizer: Optimizer | None = None, **options: Any) -> nn.Module:
        self.modules.append(pyrannc.RaNNCModule(net, optimizer, **options))
        return self.modules[-1]

    def own(self, tensor: Tensor, dim: int = 0) -> Tensor:
        whole = tensor.shape[dim]
        assert whole % ROWS == 0, "the rows of all ranks are a multiple of those that settings divide"
        parts = [count * whole // ROWS for count in self._rows]
        return tensor.narrow(dim, sum(parts[: self.rank]), parts[self.rank]).clone().to(own_device())

    def batch(self, data: Data, step: int = 0, rows: int = ROWS) -> tuple[Any, ...]:
        device = own_device()
        parts: tuple[Any, ...] = pytree.tree_map(
            lambda item: item.to(device) if isinstance(item, Tensor) else item, super().batch(data, step, rows)
        )
        return parts

    def gradients(self, model: nn.Module) -> None:
        if not isinstance(model, pyrannc.RaNNCModule):
            return super().gradients(model)
        for name, _ in model.named_parameters(from_global=True):
            self.same(f"gradient of {name}", model.get_param_grad(name))

    def state(self, model: nn.Module) -> None:
        if not isinstance(model, pyrannc.RaNNCModule):
            return super().state(model)
        for name, tensor in model.state_dict(rank0_only=False).items():
            self.same(name, tensor)


def _kept(value: Any) -> Any:
    return pytree.tree_map(lambda item: item.detach().clone().cpu() if isinstance(item, Tensor) else item, value)
