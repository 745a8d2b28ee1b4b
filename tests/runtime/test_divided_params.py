"""Parameters that Replicas divide are whole where they are computed with, and no longer."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

import pyrannc
from pyrannc.job import process
from pyrannc.runtime.seat import Seat
from pyrannc.store import gathered
from pyrannc.store.gathered import GatheredBucket

from .equivalence import Case, Twins, double_precision
from .plans import divided, graph_of, searched_plan
from .test_sharding import ONE_STAGE, UNEVEN, Ranks, model_params


def held_bytes(case: Case, folder: str) -> tuple[list[str], int, int]:
    """Bytes of parameters on this rank between steps, and of what is gathered in a step at most."""
    with double_precision():
        twins = Twins(case, folder)
        most = [0]
        start = GatheredBucket.start

        def watched(bucket: GatheredBucket, types: Iterable[torch.dtype]) -> None:
            start(bucket, types)
            most[0] = max(most[0], sum(found.nbytes for found in buckets))

        twins.step(0)
        deployed = twins.module._deployment
        assert deployed is not None
        buckets = set(deployed.gradients.gathered.values())
        GatheredBucket.start = watched  # type: ignore[method-assign]  # to look on
        try:
            twins.step(1)
        finally:
            GatheredBucket.start = start  # type: ignore[method-assign]  # likewise
        twins.differences.demand(not any(bucket.nbytes for bucket in buckets), "all is freed after a step")
        own = sum(bucket.own.nbytes for bucket in buckets)
        twins.module.undeploy()
        return twins.differences.found, own, most[0]


def test_parameters_stay_whole_to_the_end_of_a_step(ranks: Ranks, tmp_path: Path) -> None:
    case = replace(ONE_STAGE, sharding="kept_params")
    sizes = [param.numel() * 8 for param in model_params(case)]
    for found, own, most in ranks(3).run(held_bytes, case, str(tmp_path)):
        assert found == []
        assert sum(sizes) / 3 <= own < most
        assert sum(sizes) <= most <= sum(sizes) + len(sizes) * 3 * 16 * 8


def events(case: Case, folder: str) -> tuple[int, list[str]]:
    """How many buckets are gathered, and the gathers and forwards of a step in their order."""
    with double_precision():
        twins, found = Twins(case, folder), []
        start, forward = GatheredBucket.start, Seat.forward

        def started(bucket: GatheredBucket, types: Iterable[torch.dtype]) -> None:
            if not bucket.nbytes:
                found.append("gather")
            start(bucket, types)

        def computed(seat: Seat, microbatch: int) -> None:
            found.append("forward")
            forward(seat, microbatch)

        twins.step(0)
        GatheredBucket.start = started  # type: ignore[method-assign]  # to look on
        Seat.forward = computed  # type: ignore[method-assign]  # likewise
        try:
            twins.step(1)
        finally:
            GatheredBucket.start, Seat.forward = start, forward  # type: ignore[method-assign]  # likewise
        deployed = twins.module._deployment
        assert deployed is not None
        buckets = set(deployed.gradients.gathered.values())
        twins.module.undeploy()
        return len(buckets), found


def test_first_parameters_that_stay_whole_are_gathered_before_a_stage_waits_for_rows(
    ranks: Ranks, tmp_path: Path
) -> None:
    case = replace(UNEVEN, sharding="kept_params")
    first, *replicas = ranks(3).run(events, case, str(tmp_path))
    assert first == (0, ["forward"])
    for count, found in replicas:
        # One for each Span; a few are started at once.
        assert count > 4
        assert found == ["gather"] * 4 + ["forward"] + ["gather"] * (count - 4)


def test_parameters_are_whole_two_spans_at_a_time(ranks: Ranks, tmp_path: Path) -> None:
    case = replace(ONE_STAGE, sharding="params")
    everyone = ranks(3).run(held_bytes, case, str(tmp_path))
    sizes = [param.numel() * 8 for param in model_params(case)]
    layer = max(one + other for one, other in pairwise(sizes))
    padding = 3 * 16 * 8
    for found, own, most in everyone:
        assert found == []
        assert sum(sizes) / 3 <= own <= sum(sizes) / 3 + len(sizes) * padding
        assert layer <= most <= layer + 2 * padding


def gathered_under_autocast(sharding: str, folder: str) -> tuple[int, int]:
    """Bytes that are gathered at most in a step, and elements of what is only converted."""
    model = nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(16, 16), nn.LayerNorm(16))))
    module = _deployed(model, torch.randn(2, 16), sharding, folder)
    most, start = [0], GatheredBucket.start

    def watched(bucket: GatheredBucket, types: Iterable[torch.dtype]) -> None:
        start(bucket, types)
        deployed = module._deployment
        assert deployed is not None
        most[0] = max(most[0], sum(found.nbytes for found in set(deployed.gradients.gathered.values())))

    GatheredBucket.start = watched  # type: ignore[method-assign]  # to look on
    try:
        with torch.autocast("cpu", torch.bfloat16):
            module(torch.randn(2, 16)).sum().backward()
    finally:
        GatheredBucket.start = start  # type: ignore[method-assign]  # likewise
    module.undeploy()
    return most[0], sum(p.numel() for layer in model[::2] for p in layer.parameters())


def _deployed(model: nn.Module, rows: Tensor, sharding: str, folder: str) -> pyrannc.RaNNCModule:
    """With one Stage on two ranks, which divide as much."""
    file = Path(folder) / f"{sharding}{process.get_rank()}.json"
    with torch.autocast("cpu", torch.bfloat16, enabled=rows.is_floating_point()):
        graph = graph_of(model, (rows,), {}, len(rows))
    divided(searched_plan(graph, [2], 1, 2 * len(rows)), sharding).write(file)
    return pyrannc.RaNNCModule(model, SGD(model.parameters(), lr=0.1), load_deployment=file)


def test_each_parameter_is_gathered_in_the_type_that_spans_compute_in(ranks: Ranks, tmp_path: Path) -> None:
    for most, converted in ranks(2).run(gathered_under_autocast, "kept_params", str(tmp_path)):
        norms = 3 * 2 * 16
        padding = 6 * 2 * 16 * 4
        assert 2 * converted + 4 * norms <= most <= 2 * converted + 4 * norms + padding


def broken_off(sharding: str, folder: str) -> list[float]:
    """Losses of steps after an evaluation that has failed on all ranks."""
    torch.manual_seed(0)
    with double_precision():
        model = nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 1))
        reference = copy.deepcopy(model)
        ids = torch.arange(12).view(4, 3) % 9
        own = ids[2 * process.get_rank() :][:2]
        module = _deployed(model, own, sharding, folder)
        optimizer, plain = module.optimizer, SGD(reference.parameters(), lr=0.1)
        apart = []
        for step in range(3):
            loss, right = module(own).square().mean(), reference(ids).square().mean()
            loss.backward()
            right.backward()
            if step == 0:
                module.eval()
                with torch.no_grad(), pytest.raises(IndexError):
                    module(own + 100)
                module.train()
            _update(optimizer, plain)
            apart += _apart(module, reference)
        module.undeploy()
        return apart


def _update(*optimizers: Optimizer) -> None:
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def _apart(module: pyrannc.RaNNCModule, reference: nn.Module) -> list[float]:
    """The largest difference of each tensor of the state."""
    parts = module.state_dict(rank0_only=False)
    return [(parts[name] - tensor).abs().max().item() for name, tensor in reference.state_dict().items()]


@pytest.mark.parametrize("sharding", ["kept_params", "params"])
def test_nothing_stays_of_a_call_that_breaks_off(sharding: str, ranks: Ranks, tmp_path: Path) -> None:
    for apart in ranks(2).run(broken_off, sharding, str(tmp_path)):
        assert max(apart) < 1e-12


def freed_too_soon(sharding: str, folder: str) -> int:
    """How often memory went while parameters were gathered into it, in a call that has failed and in the next one."""
    gather, empty = gathered.gather_parts, GatheredBucket._empty
    under_way: list[Tensor] = []
    early = [0]

    class Noted:
        def __init__(self, work: Any, whole: Tensor) -> None:
            self._work, self._whole = work, whole
            under_way.append(whole)

        def wait(self) -> None:
            under_way[:] = [whole for whole in under_way if whole is not self._whole]
            self._work.wait()

    def gather_noted(whole: Tensor, *args: Any) -> list[Any]:
        return [Noted(work, whole) for work in gather(whole, *args)]

    def noted(bucket: GatheredBucket) -> None:
        early[0] += sum(whole is found for whole in bucket._wholes.values() for found in under_way)
        empty(bucket)

    with patch.object(gathered, "gather_parts", gather_noted), patch.object(GatheredBucket, "_empty", noted):
        assert max(broken_off(sharding, folder)) < 1e-12
    return early[0]


@pytest.mark.parametrize("sharding", ["kept_params", "params"])
def test_what_a_call_that_breaks_off_has_under_way_keeps_its_memory(
    sharding: str, ranks: Ranks, tmp_path: Path
) -> None:
    assert ranks(2).run(freed_too_soon, sharding, str(tmp_path)) == [0, 0]


class Repeated(nn.Module):
    """Several layers use one view of a parameter, repeated for each row."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 8)
        self.row = nn.Parameter(torch.randn(8))
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, ids: Tensor) -> Tensor:
        hidden, row = self.embed(ids), self.row.expand(ids.shape[0], -1)
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden)) * row
        return hidden


def with_repeated(sharding: str, folder: str) -> list[float]:
    torch.manual_seed(0)
    with double_precision():
        model = Repeated()
        reference = copy.deepcopy(model)
        ids = torch.arange(4)
        own = ids[2 * process.get_rank() :][:2]
        module = _deployed(model, own, sharding, folder)
        optimizer, plain = module.optimizer, SGD(reference.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            plain.zero_grad()
            module(own).square().mean().backward()
            reference(ids).square().mean().backward()
            optimizer.step()
            plain.step()
        apart = _apart(module, reference)
        module.undeploy()
        return apart


@pytest.mark.parametrize("sharding", ["kept_params", "params"])
def test_views_of_a_parameter_that_several_spans_use(sharding: str, ranks: Ranks, tmp_path: Path) -> None:
    for apart in ranks(2).run(with_repeated, sharding, str(tmp_path)):
        assert max(apart) < 1e-12


def with_gaps(sharding: str, folder: str) -> list[float]:
    """Every second column of a tensor is a parameter, which had a gradient before it was divided."""
    torch.manual_seed(0)
    with double_precision():
        model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        model[2].weight = nn.Parameter(torch.randn(8, 16)[:, ::2])
        rows = torch.randn(4, 8)
        reference = copy.deepcopy(model)
        for each in (model, reference):
            each(rows).square().mean().backward()
        own = rows[2 * process.get_rank() :][:2]
        module = _deployed(model, own, sharding, folder)
        optimizer, plain = module.optimizer, SGD(reference.parameters(), lr=0.1)
        apart = []
        for _ in range(3):
            # The first gradients add to those that were there.
            module(own).square().mean().backward()
            reference(rows).square().mean().backward()
            grads = [(module.get_param_grad(name), param.grad) for name, param in reference.named_parameters()]
            apart += [(grad - right).abs().max().item() for grad, right in grads]
            _update(optimizer, plain)
        apart += _apart(module, reference)
        module.undeploy()
        return apart


@pytest.mark.parametrize("sharding", ["optimizer", "gradients", "kept_params", "params"])
def test_parameters_with_gaps(sharding: str, ranks: Ranks, tmp_path: Path) -> None:
    for apart in ranks(2).run(with_gaps, sharding, str(tmp_path)):
        assert max(apart) < 1e-12
