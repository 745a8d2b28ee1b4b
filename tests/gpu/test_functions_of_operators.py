"""Operators that take functions: ``flex_attention``, whose gradients torch has on GPUs only, and ``torch.cond``."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.optim import AdamW, Optimizer

import pyrannc
from pyrannc.job import process
from tests.ranks import run_ranks

Gradients = dict[str, Tensor]
ROWS, LENGTH, HEADS, WIDTH, STEPS = 8, 256, 4, 128, 4
_fused = torch.compile(flex_attention, dynamic=False)


class Layer(nn.Module):
    """Attention within documents, with slopes that are trained; the feed-forward branches on its parameters."""

    def __init__(self, *, fused: bool) -> None:
        super().__init__()
        self.norm, self.to_qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.one, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.slopes = nn.Parameter(torch.rand(HEADS))
        self.fused = fused

    def forward(self, x: Tensor, documents: Tensor) -> Tensor:
        def sloped(score: Tensor, _b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return score - self.slopes[h] * (i - j).abs()

        def same(b: Tensor, _h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return documents[b, i] == documents[b, j]

        q, k, v = self.to_qkv(self.norm(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        mask = create_block_mask(same, x.shape[0], None, LENGTH, LENGTH, device=x.device.type)
        attention: Any = _fused if self.fused else flex_attention
        x = x + self.out(attention(q, k, v, score_mod=sloped, block_mask=mask).transpose(1, 2).flatten(2))
        more = torch.cond(self.one.weight.sum() > 0, lambda x: self.one(x).relu(), lambda x: self.other(x).tanh(), (x,))
        assert isinstance(more, Tensor)
        return x + more


class Model(nn.Module):
    def __init__(self, *, fused: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(fused=fused) for _ in range(4))

    def forward(self, x: Tensor, documents: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, documents)
        return F.mse_loss(x, torch.ones_like(x))


def _batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    documents = torch.randint(0, 4, (ROWS, LENGTH), generator=generator).sort().values
    return torch.randn(ROWS, LENGTH, WIDTH, generator=generator).cuda(), documents.cuda()


def _train(model: nn.Module, optimizer: Optimizer, now: Callable[[], Gradients]) -> tuple[list[float], Gradients]:
    """Losses of a few steps on this rank's rows, and the last gradients."""
    count, rank = ROWS // process.get_world_size(), process.get_rank()
    losses, gradients = [], Gradients()
    for number in range(STEPS):
        optimizer.zero_grad()
        loss = model(*(item[rank * count : (rank + 1) * count] for item in _batch(number)))
        loss.backward()
        losses.append(float(loss))
        gradients = now()
        optimizer.step()
    return losses, gradients


def _plain(fused: bool) -> tuple[list[float], Gradients]:
    torch.manual_seed(0)
    model = Model(fused=fused).cuda()

    def now() -> Gradients:
        return {name: param.grad.cpu() for name, param in model.named_parameters() if param.grad is not None}

    return _train(model, AdamW(model.parameters(), lr=1e-3), now)


def _with_rannc(fused: bool) -> tuple[list[float], Gradients, list[str]]:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.manual_seed(0)
    model = Model(fused=fused)
    optimizer = AdamW(model.parameters(), lr=1e-3)
    wrapped = pyrannc.RaNNCModule(model, optimizer, batch_arguments=["x", "documents"])

    def now() -> Gradients:
        found = {name: wrapped.get_param_grad(name) for name in wrapped.name_to_param}
        return {name: gradient.cpu() for name, gradient in found.items() if gradient is not None}

    losses, gradients = _train(wrapped, optimizer, now)
    kept = [path for item in wrapped._variants.first.whole.captured.kept_whole for path in item.paths]
    return losses, gradients, kept


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("fused", [False, True])
def test_equal_to_one_process(stages: int, fused: bool) -> None:
    expected, right = run_ranks(1, _plain, fused)[0]
    env = {"RANNC_PROFILE": "never", "RANNC_PARTITION_NUM": str(stages)}
    for losses, gradients, kept in run_ranks(2, _with_rannc, fused, env=env, timeout_s=240):
        assert kept == []
        torch.testing.assert_close(losses, expected, rtol=1e-4, atol=1e-5)
        assert gradients.keys() == right.keys()
        for name, gradient in right.items():
            least = 1e-4 * float(gradient.abs().max() + 1e-6)
            torch.testing.assert_close(gradients[name], gradient, rtol=1e-2, atol=least, msg=name)
