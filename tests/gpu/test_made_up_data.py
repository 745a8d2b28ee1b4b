"""What Blocks are measured on, and what steps are rehearsed with, ends no GPU and raises nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributions as D
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn.utils.rnn import pack_padded_sequence
from torch.optim import SGD

import pyrannc
from pyrannc.job import process
from tests.ranks import RankPool

Ranks = Callable[[int], RankPool]
ROWS, TOKENS, WIDTH = 8, 5, 6


class Permuted(nn.Module):
    """Takes rows by numbers that count over the global batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))

    def forward(self, x: Tensor, order: Tensor) -> Tensor:
        y = self.layers(x)
        return (y - y[order].detach() - 1).square().mean()


class Recurrent(nn.Module):
    """Takes lengths, which may not be 0, and stays whole."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        return self.recurrent(packed)[1][-1]  # type: ignore[no-any-return]


class Packed(nn.Module):
    """A recurrent layer behind others."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
        self.recurrent = Recurrent()

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        return self.recurrent(self.layers(x), lengths).square().mean()  # type: ignore[no-any-return]


@torch.jit.script
def gelu(x: Tensor) -> Tensor:
    return x * 0.5 * (1.0 + torch.erf(x / 1.41421))


class Scripted(nn.Module):
    """Its kernels are made by torch.jit."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        for layer in self.layers:
            x = gelu(layer(x))
        return (x * other).square().mean()


class Mapped(nn.Module):
    """Maps over rows, behind Spans that are compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        return torch.func.vmap(torch.dot)(self.layers(x), x * other).square().mean()


class Mixture(nn.Module):
    """Asks of all that it computes whether it is valid, which made-up answers say it is not."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
        self.heads = nn.Linear(WIDTH, 9)

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        shares, means, sizes = self.heads(self.layers(x)).chunk(3, 1)
        parts = D.Categorical(shares.softmax(1)), D.Normal(means, sizes.exp())
        return -D.MixtureSameFamily(*parts, validate_args=True).log_prob(other.squeeze(1)).mean()  # type: ignore[no-untyped-call]  # torch has no types for it


class NotNegative(Function):
    """What the host raises an error for, and a GPU ends the process."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        torch._assert_async((x >= 0).all())
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


class Asserting(nn.Module):
    """Has a function that made-up numbers are not for."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        return (NotNegative.apply(self.layers(x).square()) * other).mean()  # type: ignore[no-any-return]


MODELS = {
    "permuted": Permuted,
    "packed": Packed,
    "mapped": Mapped,
    "scripted": Scripted,
    "mixture": Mixture,
    "asserting": Asserting,
}


def _batch(name: str, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    shape = (ROWS, TOKENS, WIDTH) if name == "packed" else (ROWS, WIDTH)
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    if name == "packed":
        return x, torch.randint(1, TOKENS + 1, (ROWS,), generator=generator)
    if name == "permuted":
        return x, torch.randperm(ROWS, generator=generator)
    return x, torch.rand(ROWS, 1, generator=generator)


def _trained(name: str, wraps: bool) -> dict[str, Tensor]:
    device = process.ensure_process_group().device
    torch.manual_seed(0)
    net = MODELS[name]().double()
    optimizer = SGD(net.parameters(), lr=0.1)
    model: Any = net.to(device)
    rows = slice(None)
    if wraps:
        model = pyrannc.RaNNCModule(net, optimizer, batch_arguments=["x", "lengths"] if name == "packed" else None)
        rows = slice(0, 5) if pyrannc.get_rank() == 0 else slice(5, ROWS)
    for step in range(6):
        x, other = (tensor[rows].to(device) for tensor in _batch(name, step))
        optimizer.zero_grad()
        model(x, other).backward()
        optimizer.step()
    if not wraps:
        return net.state_dict()
    state: dict[str, Tensor] = model.state_dict(rank0_only=False)
    model.undeploy()
    return state


def _both(name: str) -> float:
    wrapped, plain = _trained(name, True), _trained(name, False)
    return max(float((wrapped[key].cpu() - value.cpu()).abs().max()) for key, value in plain.items())


@pytest.mark.parametrize("stages", ["1", "2"])
@pytest.mark.parametrize("name", MODELS)
def test_equals_one_process(name: str, stages: str, ranks: Ranks) -> None:
    for apart in ranks(2).run(_both, name, env={"RANNC_PARTITION_NUM": stages}):
        assert apart < 1e-10
