"""A model that nobody uses any more is freed."""

import gc
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pyrannc
from pyrannc.job import process
from pyrannc.runtime.batch import Batch
from pyrannc.runtime.rows import Pieces
from tests.ranks import RankPool, run_ranks

TWO_STAGES = {"RANNC_PARTITION_NUM": "2", "RANNC_PIPELINE_NUM": "2"}

PROGRAM = """
import gc, weakref
import torch
import pyrannc

model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
# As what a script keeps for a parameter may lead back to the optimizer that updates it.
model[0].weight.register_hook(lambda grad: grad / optimizer.param_groups[0]["lr"])
wrapped = pyrannc.RaNNCModule(model, optimizer)
for _ in range(2):
    optimizer.zero_grad()
    wrapped(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
watched = [weakref.ref(model), weakref.ref(model[0].weight), weakref.ref(wrapped)]
del model, optimizer, wrapped
gc.collect()
assert all(watch() is None for watch in watched), watched
pyrannc.clear()
"""


def test_a_deployed_model_is_freed_with_its_parameters() -> None:
    ended = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr


def alive_with_divided_parameters() -> list[bool]:
    """Optimizer, parameter and module, after a script that has used them is over."""

    def script() -> list[weakref.ref[Any]]:
        model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        model[0].weight.optimizer = optimizer  # type: ignore[assignment]  # what a script may do
        wrapped = pyrannc.RaNNCModule(model, optimizer)
        for _ in range(2):
            wrapped(torch.ones(4, 8)).square().mean().backward()
            optimizer.step()
        return [weakref.ref(item) for item in (optimizer, model[0].weight, wrapped)]

    watched = script()
    gc.collect()
    return [watch() is not None for watch in watched]


@pytest.mark.parametrize("level", ["off", "1", "3"])
def test_an_optimizer_is_freed_to_which_its_parameters_lead(ranks: Callable[[int], RankPool], level: str) -> None:
    env = {"RANNC_ENABLE_ZERO": level, "RANNC_PARTITION_NUM": "1"}
    assert ranks(2).run(alive_with_divided_parameters, env=env) == [[False] * 3] * 2


def told_of_further_optimizers(dropped: bool) -> list[int]:
    """How many numbers a call compares, as a script makes an optimizer for each step."""
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    wrapped = pyrannc.RaNNCModule(model)
    made, found = [], []
    for step in range(30):
        wrapped.zero_grad()
        wrapped(torch.ones(4, 8)).square().mean().backward()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        optimizer.step()
        if not dropped:
            made.append(optimizer)
        del optimizer
        # Each rank collects at a time of its own.
        if step % (2 + process.get_rank()) == 0:
            gc.collect()
        found.append(len(wrapped._agreement.hyper_parameters.fingerprints()))
    return found


@pytest.mark.parametrize("dropped", [True, False])
def test_optimizers_that_no_rank_has_any_more_are_forgotten(ranks: Callable[[int], RankPool], dropped: bool) -> None:
    one, other = ranks(2).run(told_of_further_optimizers, dropped, env=TWO_STAGES)
    assert one == other
    each = one[1] - one[0]
    assert max(one) <= 17 * each if dropped else one[-1] == 30 * each


def gloo_workers() -> int:
    """Threads of this process that serve Gloo's communicators."""
    names = [(thread / "comm").read_text().strip() for thread in Path("/proc/self/task").glob("*")]
    return names.count("pt_gloo_runloop")


def trained() -> pyrannc.RaNNCModule:
    """After one step."""
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    wrapped = pyrannc.RaNNCModule(model, torch.optim.SGD(model.parameters(), lr=0.1))
    wrapped(torch.ones(4, 8)).square().mean().backward()
    return wrapped


def workers_with_each_model() -> list[int]:
    """With models one after another, of which rank 1 keeps the third."""
    found, kept = [], []
    for number in range(5):
        model = trained()
        found.append(gloo_workers())
        if number == 2 and process.get_rank() == 1:
            kept.append(model)
        del model
        gc.collect()
    process.barrier()
    return found


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="the system tells nothing of threads")
def test_communicators_end_when_no_rank_has_their_model() -> None:
    for first, second, third, fourth, fifth in run_ranks(2, workers_with_each_model, env=TWO_STAGES):
        assert 0 < first == second == third
        assert third < fourth == fifth


def bytes_of_tensors() -> int:
    found = [tensor for tensor in gc.get_objects() if type(tensor) in (torch.Tensor, nn.Parameter)]
    storages = [tensor.untyped_storage() for tensor in found]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def left_by_trials() -> tuple[int, int]:
    """Bytes after a first call in a region of autocast, and those that torch keeps for the region alone."""
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    wrapped = pyrannc.RaNNCModule(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with torch.autocast("cpu", torch.bfloat16):
        wrapped(torch.ones(4, 64))
        before = bytes_of_tensors()
        torch.clear_autocast_cache()
        return before, before - bytes_of_tensors()


def test_what_the_model_was_compared_with_is_freed_before_the_region_of_autocast_ends(
    ranks: Callable[[int], RankPool],
) -> None:
    for before, kept in ranks(2).run(left_by_trials):
        assert before > 0
        assert kept == 0


class Padded(nn.Module):
    """Gives a few columns of a wide product, and its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 64)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        found = self.last(self.first(x).relu())[:, :3]
        return found.square().mean(), found


def kept_of_padded() -> tuple[list[int], bool]:
    """Bytes that this rank keeps of each microbatch's outputs with rows, and whether the user's are dense."""
    kept: list[int] = []
    outputs = Batch.outputs

    def watched(batch: Batch, made: dict[tuple[int, int], Tensor]) -> dict[int, Pieces]:
        kept.extend(tensor.untyped_storage().nbytes() for tensor in made.values() if tensor.dim())
        return outputs(batch, made)

    torch.manual_seed(0)
    model = Padded()
    wrapped = pyrannc.RaNNCModule(model, torch.optim.SGD(model.parameters(), lr=0.1))
    x = torch.arange(32.0).reshape(4, 8).add(process.get_rank()).sin()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Batch, "outputs", watched)
        loss, found = wrapped(x)
    loss.backward()
    torch.manual_seed(0)
    torch.testing.assert_close(found, Padded()(x)[1])
    return kept, found.is_contiguous()


def test_of_an_output_that_is_a_part_of_a_larger_tensor_only_the_part_is_kept(ranks: Callable[[int], RankPool]) -> None:
    found = ranks(2).run(kept_of_padded, env=TWO_STAGES)
    # Four rows of three columns in each of two microbatches.
    assert [kept for both, _ in found for kept in both] == [4 * 3 * 4] * 2
    assert all(is_dense for _, is_dense in found)
