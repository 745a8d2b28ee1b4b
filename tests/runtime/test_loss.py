"""A loss inside the model is that of the global batch, whatever microbatches, Replicas and rows of each rank."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Generator, Tensor, nn
from torch.optim import SGD

import pyrannc
from pyrannc.job import agree, process
from pyrannc.runtime.seat import Seat
from tests.ranks import RankPool

from .equivalence import Differences, double_precision, environment, local_slice
from .loss_models import RECIPES, WIDTH, Arguments, Recipe

STEPS = 2
SLOW_S = 1.0
PLANS = [
    # Stages, microbatches, rows of each rank, rows of all ranks count.
    (1, 2, (5, 2), True),
    (2, 4, (4, 5), True),
    (2, 2, (3, 0), True),
    (2, 3, (7, 2), False),
]


def test_losses_are_those_of_the_global_batch(ranks: Callable[[int], RankPool]) -> None:
    assert ranks(2).run(check_all, timeout_s=400) == [[], []]


def test_one_process_with_microbatches(ranks: Callable[[int], RankPool]) -> None:
    assert ranks(1).run(check_alone, timeout_s=200) == [[]]


def test_the_loss_waits_for_no_backward_of_others(ranks: Callable[[int], RankPool]) -> None:
    (first, _), (last, outcome) = ranks(2).run(time_calls)
    assert outcome == "equal losses"
    # The last Stage has handed on all gradients long before the first one has done what it does with them.
    assert first - last > SLOW_S / 2


def time_calls() -> tuple[float, str]:
    """When the second call has come back on this rank, where the first Stage's last backward takes long."""
    recipe, rows = RECIPES["mse_sum"], (4, 4)
    with environment({"RANNC_PARTITION_NUM": "2", "RANNC_PIPELINE_NUM": "2"}):
        model = recipe.make()
        module = pyrannc.RaNNCModule(model, SGD(model.parameters(), lr=0.1))
    backward = Seat.backward

    def slow(seat: Seat, microbatch: int, *args: Any, **kwargs: Any) -> None:
        backward(seat, microbatch, *args, **kwargs)
        if microbatch == 1 and process.get_rank() == 0:
            time.sleep(SLOW_S)

    losses = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Seat, "backward", slow)
        for step in range(2):
            output = module(**_own(recipe.batch(8, Generator().manual_seed(step)), 8, rows, True))
            ended = time.monotonic()
            losses.append(output.item())
            recipe.loss(output, {}).backward()
    equal = agree.gather_objects(losses)
    module.undeploy()
    return ended, "equal losses" if equal[0] == equal[1] else str(equal)


def check_all() -> list[str]:
    found = []
    with double_precision():
        for name, recipe in RECIPES.items():
            for plan in PLANS:
                found += check(name, recipe, *plan)
    return found


def check_alone() -> list[str]:
    with double_precision():
        return [text for name, recipe in RECIPES.items() for text in check(name, recipe, 1, 3, (7,), True)]


def check(name: str, recipe: Recipe, stages: int, microbatches: int, rows: tuple[int, ...], gather: bool) -> list[str]:
    """What differs between RaNNC and one process with the global batch."""
    differences = Differences()
    total = sum(rows) if gather else rows[0]
    torch.manual_seed(1)
    plain = recipe.make()
    torch.manual_seed(1)
    model = recipe.make()
    optimizers = [SGD(plain.parameters(), lr=0.1), SGD(model.parameters(), lr=0.1)]
    plan = {"RANNC_PARTITION_NUM": str(stages), "RANNC_PIPELINE_NUM": str(microbatches)}
    with environment(plan):
        module = pyrannc.RaNNCModule(model, optimizers[1], gather)
    for step in range(STEPS):
        batch = recipe.batch(total, Generator().manual_seed(step))
        own = _own(batch, total, rows, gather)
        expected = plain(**batch)
        recipe.loss(expected, batch).backward()
        output = module(**own)
        differences.compare(f"outputs of step {step}", output, _own_outputs(expected, total, rows, gather))
        recipe.loss(output, own).backward()
        for key, param in plain.named_parameters():
            differences.compare(f"gradient of {key}, step {step}", module.get_param_grad(key), param.grad)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    differences.compare("state", dict(module.state_dict(rank0_only=False)), dict(plain.state_dict()))
    with torch.no_grad():
        batch = recipe.batch(total, Generator().manual_seed(99))
        output = module(**_own(batch, total, rows, gather))
        differences.compare("without gradients", output, _own_outputs(plain(**batch), total, rows, gather))
    differences.demand(len(module.plan["stages"]) == stages, "other Stages")
    inside = module._variants.first.loss_inside
    differences.demand(inside == recipe.inside, f"backwards inside the call: {inside}")
    module.undeploy()
    case = f"{name}, {stages} stages, {microbatches} microbatches, rows {rows}"
    return [f"{case}: {text}" for text in differences.found]


def _own(batch: Arguments, total: int, rows: tuple[int, ...], gather: bool) -> Arguments:
    """This rank's arguments; where only rank 0's count, the others pass something else."""
    if not gather:
        return batch if process.get_rank() == 0 else {key: torch.zeros_like(item) for key, item in batch.items()}
    return {key: _rows_of(item, total, rows) for key, item in batch.items()}


def _rows_of(tensor: Tensor, total: int, rows: tuple[int, ...]) -> Tensor:
    has_rows = tensor.dim() > 0 and tensor.shape[0] == total
    return tensor[local_slice(rows)] if has_rows else tensor


def _own_outputs(output: object, total: int, rows: tuple[int, ...], gather: bool) -> object:
    if isinstance(output, tuple):
        return tuple(_own_outputs(item, total, rows, gather) for item in output)
    assert isinstance(output, Tensor)
    return output if not gather else _rows_of(output, total, rows)


def mixed_by_microbatch() -> list[str]:
    """Each microbatch of 2 rows on one Replica is centered by itself."""
    with double_precision(), environment({"RANNC_PARTITION_NUM": "1", "RANNC_PIPELINE_NUM": "2"}):
        torch.manual_seed(1)
        recipe = RECIPES["centered"]
        plain, model = recipe.make(), recipe.make()
        plain.load_state_dict(model.state_dict())
        module = pyrannc.RaNNCModule(model, row_mixing="microbatch")
        x = torch.randn(4, WIDTH)
        differences = Differences()
        output = module(x)
        expected = torch.cat([plain(part) for part in x.split(2)])
        differences.compare("output", output, expected)
        _squares(output).backward()
        _squares(expected).backward()
        for name, param in plain.named_parameters():
            differences.compare(f"gradient of {name}", module.get_param_grad(name), param.grad)
        module.undeploy()
        return differences.found


def _squares(output: Tensor) -> Tensor:
    return output.square().mean()


def test_a_microbatch_may_mix_its_own_rows(ranks: Callable[[int], RankPool]) -> None:
    assert ranks(1).run(mixed_by_microbatch) == [[]]


def single_row() -> str:
    model = nn.Sequential(nn.Linear(WIDTH, 3), nn.BatchNorm1d(3))
    with environment({"RANNC_PARTITION_NUM": "1", "RANNC_PIPELINE_NUM": "2"}):
        module = pyrannc.RaNNCModule(model)
    with pytest.raises(pyrannc.RaNNCError) as caught:
        # Rank 1 has one row in its second microbatch.
        module(torch.randn(4 if process.get_rank() == 0 else 3, WIDTH))
    return str(caught.value)


def test_batch_normalisation_of_one_row_is_refused(ranks: Callable[[int], RankPool]) -> None:
    for message in ranks(2).run(single_row):
        assert "sub-module '1'" in message
        assert "one value for each channel" in message
