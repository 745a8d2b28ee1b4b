"""Where memory is short, Spans are compiled to keep less before Blocks compute all again."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import pyrannc
from tests.ranks import RankPool

ROWS, WIDTH, LAYERS = 8192, 512, 8


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.first, self.last = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.last(nn.functional.gelu(self.first(self.norm(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def _steps(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(0)).cuda()
    for _ in range(4):
        optimizer.zero_grad()
        model(x).backward()
        optimizer.step()


def _train() -> tuple[dict[str, Any], float, int]:
    """The Plan, how far parameters are from those of a training without RaNNC, and the most memory that was taken."""
    torch.manual_seed(0)
    model = Model()
    plain = copy.deepcopy(model).cuda()
    _steps(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    torch.cuda.reset_peak_memory_stats()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    module = pyrannc.RaNNCModule(model, optimizer)
    _steps(module, optimizer)
    state = module.state_dict()
    apart = max(float((state[name].cuda() - value).abs().max()) for name, value in plain.state_dict().items())
    return module.plan, apart, torch.cuda.max_memory_allocated()


def test_spans_keep_less_where_memory_is_short(ranks: Callable[[int], RankPool], tmp_path: Path) -> None:
    env = {
        "RANNC_PIPELINE_NUM": "1",
        "RANNC_MEM_MARGIN": "0",
        "RANNC_PROFILE_CACHE_DIR": str(tmp_path),
    }
    ((free, apart, most),) = ranks(1).run(_train, env=env)
    assert "memory_budget_percent" not in free
    assert apart < 1e-5
    memory = free["stages"][0]["predicted"]["memory"]
    limit = sum(memory.values()) - memory["activations_bytes"] // 4
    ((short, apart, less),) = ranks(1).run(_train, env=env | {"RANNC_MEM_LIMIT_GB": str(limit / 2**30)})
    assert short["memory_budget_percent"] in (80, 30, 0)
    assert {block["recompute"] for stage in short["stages"] for block in stage["blocks"]} == {"none"}
    assert apart < 1e-5
    print(f"{(most - less) / 2**20:.0f} MiB less, gelu {LAYERS * ROWS * WIDTH / 2**16:.0f}")
    # What gelu makes of each layer, in float32.
    assert most - less > 0.8 * LAYERS * ROWS * 4 * WIDTH * 4
