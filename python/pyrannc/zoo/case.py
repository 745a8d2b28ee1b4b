"""A model of a public library with the arguments of a training call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

ROWS = 4
"""Rows of the global batch."""
_MOVED = 0.03
"""Standard deviation of what is added to parameters that are moved."""


@dataclass(frozen=True)
class Case:
    """A model to train.

    Attributes:
        library: its name.
        family: what models of one design share.
        name: of the model, once in its library.
        make: the model and the named arguments of a call with so many rows; same seed, same result. With a second
            argument that is true, the model keeps the dropout that it trains with by default.
    """

    library: str
    family: str
    name: str
    make: Callable[[int, bool], tuple[nn.Module, dict[str, Any]]]

    def __str__(self) -> str:
        return f"{self.library}/{self.name}"


def moved(case: Case) -> Case:
    """The model with its parameters moved a little, as a training moves them.

    Those that start at zero, or all alike, may lead to ties and to where a derivative jumps: a rounding decides there.
    """

    def make(rows: int, as_they_are: bool) -> tuple[nn.Module, dict[str, Any]]:
        model, arguments = case.make(rows, as_they_are)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for param in filter(Tensor.is_floating_point, model.parameters()):
                param.add_(torch.randn(param.shape, generator=generator, dtype=param.dtype), alpha=_MOVED)
        return model, arguments

    return replace(case, make=make)


class NotByRuleError(Exception):
    """The rules make no small model of this class, or no arguments that it takes."""


def quiet(model: nn.Module) -> nn.Module:
    """The model in training mode without what differs from call to call or by design: dropout, batch statistics."""
    model.train()
    for module in model.modules():
        if getattr(module, "running_mean", None) is not None:
            module.eval()
        for name in ("p", "drop_prob", "drop_rate", "attention_dropout", "dropout", "activation_dropout", "layerdrop"):
            if isinstance(vars(module).get(name), float):
                setattr(module, name, 0.0)
    return model


def loss_of(result: Any) -> Tensor:
    """What a call is differentiated by: its loss, or else a mean of squares of all it returns."""
    loss = getattr(result, "loss", None)
    if loss is None and isinstance(result, dict):
        loss = result.get("loss")
    if isinstance(loss, Tensor) and loss.dim() == 0:
        return loss
    return torch.stack([leaf.pow(2).mean() for leaf in differentiable(result)]).sum()


def differentiable(result: Any) -> list[Tensor]:
    """The tensors of a result that lead back to parameters."""
    from pyrannc.capture import flatten

    return [leaf for leaf in flatten(result)[0] if leaf.requires_grad and leaf.is_floating_point()]
