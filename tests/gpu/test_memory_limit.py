"""torch takes no more of a GPU than ``mem_limit_gb`` leaves it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

import pyrannc
from pyrannc._native import Plan, framework_bytes
from pyrannc.store.store import ParamStore
from tests.gpu.loops import LOOPS, train
from tests.ranks import RankPool
from tests.runtime.equivalence import environment
from tests.runtime.plans import divided

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


def _peak_of_a_move(folder: Path) -> tuple[int, int]:
    """The most memory there is while parameters go to the device in parts, and what they take as a whole."""
    width, file, peaks = 2048, folder / "plan.json", list[int]()
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(24)))
    batch = torch.ones(4, width, device="cuda")
    module = pyrannc.RaNNCModule(model, torch.optim.AdamW(model.parameters()))
    module(batch)
    if pyrannc.get_rank() == 0:
        divided(Plan.from_json(json.dumps(module.plan)), "params").write(file)
    module.undeploy()
    pyrannc.barrier()
    move = ParamStore.move

    def watched(*args: Any) -> None:
        torch.cuda.reset_peak_memory_stats()
        move(*args)
        peaks.append(torch.cuda.max_memory_allocated())

    with environment({"RANNC_LOAD_DEPLOYMENT": "1", "RANNC_DEPLOYMENT_FILE": str(file)}):
        module = pyrannc.RaNNCModule(model, torch.optim.AdamW(model.parameters()))
    with patch.object(ParamStore, "move", watched):
        module(batch)
    assert {param.device for param in model.parameters()} == {batch.device}
    return peaks[0], sum(param.nbytes for param in model.parameters())


def test_a_rank_never_has_the_whole_of_parameters_that_it_keeps_in_parts(ranks: Ranks, tmp_path: Path) -> None:
    env = {"RANNC_PROFILE": "never", "RANNC_COMPILE_SPANS": "off", "RANNC_PARTITION_NUM": "1"}
    for peak, whole in ranks(2).run(_peak_of_a_move, tmp_path, env=env):
        assert peak < 0.9 * whole
