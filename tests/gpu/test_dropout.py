"""Attention that drops inside of its kernel is compiled with what surrounds it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pyrannc
from pyrannc.job import process
from tests.ranks import RankPool

ROWS, TOKENS, WIDTH, HEADS = 4, 64, 256, 4
_UNMEASURED = {"RANNC_PROFILE": "never"}


class Masked(nn.Module):
    """Attention that some tokens are hidden from.

    Args:
        bias: of the scores, which is learnt: ``"dense"``, or ``"by head"`` with a column for each as in T5, for which
            torch has no kernel; or none.
    """

    def __init__(self, bias: str) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.to_qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.by_head = bias == "by head"
        shape = (1, TOKENS, TOKENS, HEADS) if self.by_head else (1, HEADS, TOKENS, TOKENS)
        self.bias = nn.Parameter(torch.randn(shape)) if bias else None

    def forward(self, x: Tensor, shown: Tensor) -> Tensor:
        q, k, v = self.to_qkv(self.norm(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        mask = shown
        if self.bias is not None:
            bias = self.bias.permute(0, 3, 1, 2) if self.by_head else self.bias
            mask = torch.where(shown, bias, -1e4).to(q.dtype)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=0.1 if self.training else 0.0)
        return x + F.dropout(self.out(mixed.transpose(1, 2).flatten(2)), 0.1, self.training)


class Layer(nn.Module):
    """So many attentions, one after another."""

    def __init__(self, attentions: int, bias: str) -> None:
        super().__init__()
        self.attentions = nn.ModuleList(Masked(bias) for _ in range(attentions))

    def forward(self, x: Tensor, shown: Tensor) -> Tensor:
        for attention in self.attentions:
            x = attention(x, shown)
        return x


class Layers(nn.Module):
    def __init__(self, attentions: int, bias: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(attentions, bias) for _ in range(3))

    def forward(self, x: Tensor, shown: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, shown[:, None, None])
        return x


def _trained(attentions: int, bias: str, autocast: bool) -> tuple[list[float], str, Any]:
    device = process.ensure_process_group().device
    torch.manual_seed(1)
    module = Layers(attentions, bias).to(device)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    model = pyrannc.RaNNCModule(module, optimizer)
    torch.manual_seed(2)
    generator = torch.Generator().manual_seed(process.get_rank())
    x = torch.randn(ROWS, TOKENS, WIDTH, generator=generator).to(device)
    shown = (torch.rand(ROWS, TOKENS, generator=generator) < 0.9).to(device)
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            loss = model(x, shown).float().square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, model.report().compiled, dict(model.state_dict(rank0_only=False))


@pytest.mark.parametrize(("autocast", "tolerance"), [(False, 1e-4), (True, 2e-2)])
@pytest.mark.parametrize("bias", ["", "dense", "by head"])
@pytest.mark.parametrize("attentions", [1, 2])
def test_spans_with_attention_that_drops(
    attentions: int, bias: str, autocast: bool, tolerance: float, ranks: Callable[[int], RankPool]
) -> None:
    plain, compiled = (
        ranks(2).run(_trained, attentions, bias, autocast, env={**_UNMEASURED, "RANNC_COMPILE_SPANS": spans})
        for spans in ("off", "on")
    )
    for (expected, _, before), (losses, told, after) in zip(plain, compiled, strict=True):
        done, whole = told.split(" Spans")[0].split(" of ")
        assert done == whole, told
        assert losses == pytest.approx(expected, rel=tolerance)
        for name, tensor in before.items():
            assert (after[name] - tensor).norm() <= tolerance * tensor.norm(), name
