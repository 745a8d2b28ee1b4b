"""A training loop as a row of the array wants it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

import pyrannc
from tests.contract.job import Data, Job
from tests.contract.training import clipped

from .array import Row
from .models import ROWS, Inside, criterion, pairs
from .precision import Precision


def momentum(params: Any) -> Optimizer:
    return SGD(params, lr=0.1, momentum=0.9)


class Loop:
    """A model, its optimizer and its scaler.

    Attributes:
        model: what the script calls.
        optimizer: of the model's parameters that require gradients, if ``make_optimizer`` does not say otherwise.
    """

    def __init__(
        self,
        job: Job,
        row: Row,
        precision: Precision,
        net: nn.Module,
        data: Data = pairs,
        make_optimizer: Callable[[Any], Optimizer] = momentum,
    ) -> None:
        self.job, self.row, self.precision, self._data = job, row, precision, data
        net = net.to(precision.params)
        net = net.double() if precision.exact else net
        self.net = Inside(net) if row.loss == "inside" else net
        self.optimizer = make_optimizer([param for param in net.parameters() if param.requires_grad])
        self.model = job.wrap(self.net, self.optimizer)
        self.scaler = precision.scaler()

    def batch(self, number: int, rows: int = ROWS) -> tuple[Tensor, Tensor]:
        """This rank's part of a global batch."""
        x, target = self.job.batch(self._data, number, rows)
        return self.precision.kept(x), self.precision.kept(target)

    def loss(self, x: Tensor, target: Tensor) -> Tensor:
        """Of this rank's rows, or of all where the model returns it; noted."""
        with self.precision.region():
            if self.row.loss == "inside":
                loss: Tensor = self.model(x, target)
                self.job.same("loss", loss)
                return loss
            out = self.model(x)
            self.job.rows("output", out)
            return criterion(out, target)

    def backward(self, loss: Tensor, **options: Any) -> None:
        self.scaler.scale(loss / self.row.calls).backward(**options)

    def gradients(self, numbers: Sequence[int], rows: int = ROWS) -> None:
        """Of batches of these numbers, added up."""
        self.optimizer.zero_grad()
        for number in numbers:
            self.backward(self.loss(*self.batch(number, rows)))

    def update(self) -> None:
        """Takes the scale off the gradients, clips and notes them, and steps."""
        self.scaler.unscale_(self.optimizer)
        if self.row.clipping:
            self.job.same("norm", clipped(self.model, self.row.clipping).double())
        self.job.gradients(self.model)
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def step(self, number: int, rows: int = ROWS) -> None:
        """One step of as many calls as the row says."""
        self.gradients([number * self.row.calls + call for call in range(self.row.calls)], rows)
        self.update()

    def train(self, steps: int = 3) -> None:
        for number in range(steps):
            self.step(number)
        self.state()

    def state(self) -> None:
        """Notes parameters and buffers."""
        self.job.state(self.model)

    def whole(self) -> dict[str, bool]:
        """What the optimizer's state dict wants to be told, to mean that of all ranks."""
        return {"from_global": True} if isinstance(self.model, pyrannc.RaNNCModule) else {}


def evaluated(loop: Loop, number: int) -> None:
    """A call of the model in evaluation, without gradients."""
    loop.model.eval()
    with torch.no_grad():
        loop.loss(*loop.batch(number))
    loop.model.train()
