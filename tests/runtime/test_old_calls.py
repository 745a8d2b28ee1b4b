"""Every call of RaNNC 0.7.5 that scripts make, once each, on two ranks with a Stage each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import pyrannc
from tests.ranks import RankPool

from .equivalence import double_precision, environment

Ranks = Callable[[int], RankPool]
NAMES = ["0.weight", "0.bias", "2.weight", "2.bias"]


class Script:
    """A script of RaNNC 0.7.5 before and after the first call."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.rank, self.size = pyrannc.get_rank(), pyrannc.get_world_size()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3, affine=False), nn.Linear(3, 2), nn.Dropout(0.5))
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=0.1)
        self.model = pyrannc.RaNNCModule(
            self.net, self.optimizer, True, None, False, False, False, check_unused_values=True, offload_params=False
        )

    def step(self) -> None:
        self.model.zero_grad()
        self.model(torch.ones(2, 3)).square().mean().backward()

    def delayed(self) -> bool:
        pyrannc.delay_grad_allreduce(True)
        self.step()
        pyrannc.delay_grad_allreduce(False)
        self.model.allreduce_grads()
        return self.model.get_param_grad("0.weight") is not None

    def kept(self) -> bool:
        pyrannc.keep_graph(True)
        loss = self.model(torch.ones(2, 3)).square().mean()
        pyrannc.keep_graph(False)
        loss.backward(retain_graph=True)
        loss.backward()
        return True

    def gathered(self) -> list[float]:
        buffer = torch.empty(self.size)
        pyrannc.all_gather(torch.full((1,), float(self.rank)), buffer)
        return buffer.tolist()

    def loaded(self) -> bool:
        self.model.load_state_dict(self.model.state_dict())
        self.optimizer.load_state_dict(self.optimizer.state_dict(from_global=True), from_global=True)
        return True

    def saved(self) -> bool:
        file = Path(self.folder) / "plan.json"
        self.model.save_deployment(file)
        pyrannc.barrier()
        pyrannc.show_deployment(file, 4)
        return True

    def left(self) -> bool:
        self.model.undeploy()
        pyrannc.recreate_all_communicators()
        return not self.model.ready

    def refused(self, call: Callable[[], Any]) -> str:
        with pytest.raises(pyrannc.RaNNCError) as caught:
            call()
        return str(caught.value)


def _first(script: Script) -> bool:
    return script.rank == 0


BEFORE: dict[str, tuple[Callable[[Script], Any], Any]] = {
    "get_rank": (lambda script: script.rank in (0, 1), True),
    "get_world_size": (lambda script: script.size, 2),
    "barrier": (lambda script: pyrannc.barrier(), None),
    "sync_params_on_init": (lambda script: pyrannc.sync_params_on_init(True), None),
    "all_gather": (Script.gathered, [0.0, 1.0]),
    "ready": (lambda script: script.model.ready, False),
    "parameters": (lambda script: len(list(script.model.parameters())), 4),
    "parameters(from_global=False)": (lambda script: len(list(script.model.parameters(from_global=False))), 4),
    "state_dict": (lambda script: len(script.model.state_dict()), 7),
    "get_param": (lambda script: script.model.get_param("0.bias").shape, (3,)),
    "clip_grad_norm": (lambda s: "needs a deployed" in s.refused(lambda: s.model.clip_grad_norm(1.0)), True),
    "enable_apex_amp": (
        lambda s: "torch.autocast" in s.refused(lambda: pyrannc.RaNNCModule(s.net, enable_apex_amp=True)),
        True,
    ),
    "store_dist_param": (
        lambda s: "not available yet" in s.refused(lambda: pyrannc.store_dist_param(s.net[0].weight)),
        True,
    ),
    "DistributeModelParams": (lambda s: "not available yet" in s.refused(pyrannc.DistributeModelParams), True),
}
AFTER: dict[str, tuple[Callable[[Script], Any], Any]] = {
    "ready": (lambda script: script.model.ready, True),
    "model": (lambda script: script.model.model is script.net, True),
    "optimizer": (lambda script: script.model.optimizer is script.optimizer, True),
    "device": (lambda script: str(script.model.device), "cpu"),
    "name_to_param": (lambda script: list(script.model.name_to_param), NAMES),
    "used_param_ids": (lambda script: script.model.used_param_ids == set(map(id, script.net.parameters())), True),
    "an attribute of the model": (lambda script: type(script.model[0]).__name__, "Linear"),
    "param_groups": (lambda script: [len(group["params"]) for group in script.optimizer.param_groups], [4]),
    "parameters": (lambda script: len(list(script.model.parameters())), 4),
    "parameters(from_global=True)": (lambda script: len(list(script.model.parameters(from_global=True))), 4),
    "named_parameters(from_global=False)": (
        lambda s: (
            [name for name, _ in s.model.named_parameters(from_global=False)]
            == (NAMES[:2] if s.rank == 0 else NAMES[2:])
        ),
        True,
    ),
    "buffers": (lambda script: len(list(script.model.buffers())), 3),
    "named_buffers(from_global=False)": (
        lambda s: len(list(s.model.named_buffers(from_global=False))) in (0, 3),
        True,
    ),
    "get_param": (lambda script: script.model.get_param("2.bias", False).shape, (2,)),
    "get_param_grad": (lambda script: script.model.get_param_grad("0.weight").shape, (3, 3)),
    "clip_grad_norm": (lambda script: bool(script.model.clip_grad_norm(1.0) > 0), True),
    "state_dict": (lambda script: len(script.model.state_dict()) == (7 if _first(script) else 0), True),
    "state_dict(rank0_only=False)": (lambda script: len(script.model.state_dict(rank0_only=False)), 7),
    "optimizer.state_dict(from_global=True)": (
        lambda s: len(s.optimizer.state_dict(from_global=True)) == (2 if _first(s) else 0),
        True,
    ),
    "load_state_dict": (Script.loaded, True),
    "delay_grad_allreduce": (Script.delayed, True),
    "keep_graph": (Script.kept, True),
    "enable_dropout": (lambda script: (script.model.enable_dropout(False), script.net[3].training)[1], False),
    "train": (lambda script: script.model.train().training, True),
    "eval": (lambda script: script.model.eval().training, False),
    "to": (lambda script: script.model.to("cpu") is script.model, True),
    "cuda": (lambda script: script.model.cuda() is script.model, True),
    "zero_grad": (lambda script: script.model.zero_grad(), None),
    "save_deployment": (Script.saved, True),
    "undeploy": (Script.left, True),
}


def call_all(folder: str) -> list[str]:
    """Which calls did not come to what they should, or raised."""
    wrong = []
    with double_precision(), environment({"RANNC_PARTITION_NUM": "2", "RANNC_PIPELINE_NUM": "1"}):
        script = Script(folder)
        for table in (BEFORE, AFTER):
            for name, (call, expected) in table.items():
                found = call(script)
                if found != expected:
                    wrong.append(f"{name}: {found} instead of {expected}")
            if table is BEFORE:
                script.step()
                script.optimizer.step()
        return wrong


def test_every_call_of_the_old_api(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(2).run(call_all, str(tmp_path)) == [[], []]
