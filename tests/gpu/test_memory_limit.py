"""torch takes no more of a GPU than ``mem_limit_gb`` leaves it."""

from __future__ import annotations

from collections.abc import Callable

import torch

import pyrannc
from pyrannc._native import framework_bytes
from tests.gpu.loops import LOOPS, train
from tests.ranks import RankPool

Ranks = Callable[[int], RankPool]
LIMIT_GIB = 3


def _train(name: str) -> tuple[int, int, bool]:
    """What torch has of the GPU after a training, then when as much is asked for as there may be, and whether more is
    refused."""
    train(LOOPS[name], 5, "auto")
    trained, pieces, refused = torch.cuda.memory_reserved(), [], False
    for _ in range(64):
        try:
            pieces.append(torch.empty(LIMIT_GIB * 2**30 // 64, dtype=torch.uint8, device="cuda"))
        except torch.OutOfMemoryError:
            refused = True
            break
    taken = torch.cuda.memory_reserved()
    pieces.clear()
    torch.cuda.empty_cache()
    return trained, taken, refused


def _allowed() -> float:
    model = torch.nn.Linear(4, 4)
    pyrannc.RaNNCModule(model, torch.optim.SGD(model.parameters(), lr=0.1))(torch.ones(2, 4, device="cuda"))
    return torch.cuda.get_per_process_memory_fraction()


def test_a_limit_is_kept(ranks: Ranks) -> None:
    env = {"RANNC_PROFILE": "never", "RANNC_COMPILE_SPANS": "off", **LOOPS["Stages, loss inside"].env}
    for trained, taken, refused in ranks(2).run(
        _train, "Stages, loss inside", env=env | {"RANNC_MEM_LIMIT_GB": str(LIMIT_GIB)}
    ):
        assert refused
        assert trained <= taken <= LIMIT_GIB * 2**30 - framework_bytes


def test_a_limit_ends_with_its_setting(ranks: Ranks) -> None:
    whole = torch.cuda.get_device_properties(0).total_memory
    env = {"RANNC_PROFILE": "never", "RANNC_COMPILE_SPANS": "off"}
    held = (LIMIT_GIB * 2**30 - framework_bytes) / whole
    for limit, share in ((str(LIMIT_GIB), held), ("0", 1.0)):
        allowed = ranks(2).run(_allowed, env=env | {"RANNC_MEM_LIMIT_GB": limit})
        assert all(abs(found - share) < 1e-6 for found in allowed)
