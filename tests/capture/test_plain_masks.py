"""Masks of attention that are not needed are left out, and no others."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import BertConfig, BertModel, LlamaConfig, LlamaModel, PreTrainedModel

from pyrannc.capture import Captured, capture

ROWS, STEPS = 4, 6


def places(x: Tensor) -> Tensor:
    return torch.arange(x.shape[1], device=x.device)


def packed(x: Tensor) -> Tensor:
    """As libraries find sequences that were packed into one row: positions that go back."""
    at = places(x).expand(x.shape[0], -1)
    sequence = (torch.diff(at, prepend=at[:, :1] - 1) != 1).cumsum(-1)
    rows = torch.arange(x.shape[0])[:, None, None, None]
    same = sequence[rows, places(x)[:, None]] == sequence[rows, places(x)]
    return (places(x) <= places(x)[:, None]) & same


def deep(x: Tensor) -> Tensor:
    for _ in range(sys.getrecursionlimit()):
        x = x.tanh()
    return x


MASKS: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "nothing hidden": ("none", lambda x: torch.ones(x.shape[0], 1, STEPS, STEPS, dtype=torch.bool)),
    "all places from the first one": ("none", lambda x: (places(x) >= 0).expand(x.shape[0], 1, STEPS, -1)),
    "the future": ("causal", lambda x: places(x) <= places(x)[:, None]),
    "the future, by a triangle": ("causal", lambda x: torch.ones(STEPS, STEPS, dtype=torch.bool).tril()),
    "the future, in sequences that are not packed": ("causal", packed),
    "the past": ("kept", lambda x: places(x) >= places(x)[:, None]),
    "all but a window": ("kept", lambda x: (places(x)[:, None] - places(x)).abs() < 3),
    "rows with large numbers": ("kept", lambda x: (torch.arange(x.shape[0]) < 100)[:, None, None, None]),
    "many rows": ("kept", lambda x: torch.full((1, 1, 1, 1), x.shape[0]) < 100),
    "as many places as rows": ("kept", lambda x: (torch.arange(100)[: x.shape[0]] < 50)[:, None, None, None]),
    "what the batch says": ("kept", lambda x: (x[:, :, 0] < 100)[:, None, None, :]),
    "what a deep network says": ("kept", lambda x: (deep(x)[:, :, 0] < 100)[:, None, None, :]),
}


class Attends(nn.Module):
    def __init__(self, mask: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.mask = mask

    def forward(self, x: Tensor) -> Tensor:
        mask = self.mask(x).expand(x.shape[0], 1, STEPS, STEPS)
        heads = x[:, None]
        return F.scaled_dot_product_attention(heads, heads * 2, heads + 1, mask)


def kinds(found: Captured) -> set[str]:
    """What the attentions of a captured call have for a mask."""
    calls = [op for op in json.loads(found.graph_json)["ops"] if "scaled_dot_product" in op["target"]]
    return {
        "kept" if len(op["args"]) > 3 else "causal" if op["kwargs"]["is_causal"]["bool"] else "none" for op in calls
    }


@pytest.mark.parametrize("name", MASKS)
def test_a_mask_goes_only_where_none_is_needed(name: str) -> None:
    expected, mask = MASKS[name]
    torch.manual_seed(0)
    net = Attends(mask)
    found = capture(net, (torch.randn(ROWS, STEPS, 8),), {}, device=torch.device("cpu"), rows=ROWS)
    assert kinds(found) == {expected}
    for rows in (1, 2, 7):
        x = torch.randn(rows, STEPS, 8, dtype=torch.float64)
        (got,) = found.gm(x)
        torch.testing.assert_close(got, net(x))


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (BertModel(BertConfig(vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2)), "none"),
        (LlamaModel(LlamaConfig(vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2)), "causal"),
    ],
    ids=["bert", "llama"],
)
def test_libraries_masks(model: PreTrainedModel, expected: str) -> None:
    tokens = torch.randint(0, 50, (ROWS, STEPS))
    found = capture(model, (), {"input_ids": tokens}, device=torch.device("cpu"), rows=ROWS)
    assert kinds(found) == {expected}
    given = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    assert kinds(capture(model, (), given, device=torch.device("cpu"), rows=ROWS)) == {"kept"}
