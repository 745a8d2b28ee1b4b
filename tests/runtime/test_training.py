"""Gradients: accumulated, delayed, kept, clipped, and never asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import pyrannc
from pyrannc.runtime.loss import Weights
from pyrannc.store.spread_tensor import own_gradient
from tests.ranks import RankPool, run_ranks

from .equivalence import Case, Differences, Twins, check, double_precision
from .plans import cut_plan, graph_of

Ranks = Callable[[int], RankPool]

OUTSIDE = Case("tied", (3, 2, 2), replicas=(2, 1), microbatches=2)
INSIDE = Case("loss_inside", (2, 3, 1), replicas=(1, 2), microbatches=3, schedule="1f1b")
FILLED = replace(INSIDE, schedule="fill_drain")
BOTH = pytest.mark.parametrize(
    "case", [OUTSIDE, INSIDE, FILLED], ids=["criterion_outside", "loss_inside", "fill_drain"]
)


def accumulate(case: Case, folder: str) -> list[str]:
    with double_precision():
        twins = Twins(case, folder)
        for seed in range(3):
            mine, right = twins.losses(seed)
            (0.5 * mine).backward()
            (0.5 * right).backward()
        twins.compare_gradients("three calls")
        twins.optimizer.step()
        twins.reference.optimizer.step()
        for seed in range(3, 5):
            twins.module.zero_grad(set_to_none=False)
            twins.reference.optimizer.zero_grad(set_to_none=False)
            held = [own_gradient(param) for param in twins.module.parameters(from_global=False) if param.numel()]
            twins.differences.demand(all(grad is not None and not grad.any() for grad in held), "gradients are zero")
            mine, right = twins.losses(seed)
            mine.backward()
            right.backward()
            twins.compare_gradients("after zeroing")
        twins.module.undeploy()
        return twins.differences.found


@BOTH
def test_gradients_add_up_over_calls(case: Case, ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(3).run(accumulate, case, str(tmp_path)) == [[], [], []]


def delay(case: Case, folder: str, explicitly: bool) -> list[str]:
    with double_precision():
        twins = Twins(case, folder)
        # A gradient that is reduced already when the delay begins must not be reduced twice.
        for seed, delayed in enumerate([False, True, True, *([] if explicitly else [False])]):
            pyrannc.delay_grad_allreduce(delayed)
            mine, right = twins.losses(seed)
            mine.backward()
            right.backward()
        if explicitly:
            twins.module.allreduce_grads()
        pyrannc.delay_grad_allreduce(False)
        twins.compare_gradients("after the reduction")
        twins.module.zero_grad()
        twins.reference.optimizer.zero_grad()
        twins.step(7)
        twins.module.undeploy()
        return twins.differences.found


@BOTH
@pytest.mark.parametrize("explicitly", [True, False], ids=["allreduce_grads", "next_backward"])
def test_delayed_reduction(case: Case, explicitly: bool, ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(3).run(delay, case, str(tmp_path), explicitly) == [[], [], []]


def backward_twice(case: Case, folder: str) -> list[str]:
    with double_precision():
        twins = Twins(case, folder)
        for step, switch in enumerate((False, True)):
            pyrannc.keep_graph(switch)
            mine, right = twins.losses(step)
            pyrannc.keep_graph(False)
            for loss in (mine, right):
                loss.backward(retain_graph=True)
                loss.backward()
            twins.compare_gradients("two backwards")
        mine, _ = twins.losses(2)
        mine.backward()
        with pytest.raises(RuntimeError, match="second time"):
            mine.backward()
        twins.module.zero_grad()
        twins.reference.optimizer.zero_grad()
        twins.step(3)
        twins.module.undeploy()
        return twins.differences.found


@BOTH
def test_backward_twice(case: Case, ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(3).run(backward_twice, case, str(tmp_path)) == [[], [], []]


def inputs_twice(folder: str) -> list[Tensor]:
    """An input's gradient after one backward, and after a second one."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    x = torch.randn(4, 3, requires_grad=True)
    file = Path(folder) / f"plan{pyrannc.get_rank()}"
    cut_plan(graph_of(model, (torch.randn(8, 3, requires_grad=True),), {}, 8), [1], [[0], [1]], 2).write(file)
    wrapped = pyrannc.RaNNCModule(model, None, load_deployment=file)
    loss = wrapped(x).sum()
    found = []
    for again in (True, False):
        loss.backward(retain_graph=again)
        assert x.grad is not None
        found.append(x.grad.clone())
    wrapped.undeploy()
    return found


def test_inputs_get_the_gradients_of_each_backward(ranks: Ranks, tmp_path: Path) -> None:
    for first, second in ranks(2).run(inputs_twice, str(tmp_path)):
        torch.testing.assert_close(second, 2 * first)


def clip(case: Case, folder: str, share: float) -> list[str]:
    with double_precision():
        twins = Twins(case, folder)
        mine, right = twins.losses(0)
        mine.backward()
        right.backward()
        params = list(twins.reference.model.parameters())
        limit = share * torch.nn.utils.get_total_norm([p.grad for p in params if p.grad is not None]).item()
        norm = twins.module.clip_grad_norm(limit)
        twins.differences.compare("norm", norm, torch.nn.utils.clip_grad_norm_(params, limit))
        twins.compare_gradients("clipped")
        twins.module.undeploy()
        return twins.differences.found


@BOTH
@pytest.mark.parametrize("share", [0.25, 2.0], ids=["above", "below"])
def test_clip_grad_norm(case: Case, share: float, ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(3).run(clip, case, str(tmp_path), share) == [[], [], []]


def losses_in_other_orders(case: Case, folder: str) -> list[str]:
    with double_precision():
        twins = Twins(case, folder)
        twins.losses(0)
        twins.differences.demand(
            all(param.grad is None for param in twins.module.parameters(from_global=False)),
            "a call alone leaves no gradient",
        )
        first, second = twins.losses(1), twins.losses(2)
        for one, other in zip(first, second, strict=True):
            (one + 2 * other).backward()
        twins.compare_gradients("the sum of two losses")
        first, second = twins.losses(3), twins.losses(4)
        for one, other in zip(first, second, strict=True):
            other.backward()
            one.backward()
        twins.compare_gradients("the later loss first")
        twins.module.undeploy()
        return twins.differences.found


@BOTH
def test_losses_in_other_orders(case: Case, ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(3).run(losses_in_other_orders, case, str(tmp_path)) == [[], [], []]


def gradient_besides_the_loss(case: Case, folder: str) -> str:
    with double_precision():
        twins = Twins(case, folder)
        x = torch.randn(2, 6)
        output = twins.module(x, x)
        with pytest.raises(pyrannc.RaNNCError) as caught:
            (output["loss"] + output["output"].sum()).backward()
        twins.module.undeploy()
        return str(caught.value)


def test_gradient_besides_the_loss_is_refused(ranks: Ranks, tmp_path: Path) -> None:
    case = Case("loss_among_outputs", (2, 2), stages=2)
    for message in ranks(2).run(gradient_besides_the_loss, case, str(tmp_path)):
        assert "besides the loss" in message


def in_a_group_of_the_user(case: Case, folder: str) -> list[str]:
    dist.init_process_group("gloo")
    found = check(case, folder)
    pyrannc.clear()
    dist.barrier()
    dist.destroy_process_group()
    return found


def test_process_group_of_the_user(tmp_path: Path) -> None:
    case = Case("fork_join", (3, 2), stages=2, microbatches=2)
    assert run_ranks(2, in_a_group_of_the_user, case, str(tmp_path)) == [[], []]


def check_with_wrong_weights(case: Case, folder: str) -> list[str]:
    right = Weights.share
    Weights.share = lambda weights, microbatch: right(weights, microbatch) * (1 + 1e-8)  # type: ignore[method-assign]  # on purpose
    try:
        return check(case, folder)
    finally:
        Weights.share = right  # type: ignore[method-assign]  # likewise


def test_the_proof_finds_wrong_gradients(ranks: Ranks, tmp_path: Path) -> None:
    for found in ranks(3).run(check_with_wrong_weights, INSIDE, str(tmp_path)):
        assert any(text.startswith("gradient of chain.layers.0.weight, step 0") for text in found)


@pytest.mark.parametrize(
    ("got", "expected"),
    [
        (torch.ones(2), torch.tensor([1.0, 1.0 + 1e-6])),
        (torch.ones(2), torch.tensor([1.0, float("nan")])),
        (torch.ones(2), torch.ones(2, 1)),
        (torch.ones(2), torch.ones(2, dtype=torch.float64)),
        (torch.ones(2), None),
        (None, torch.ones(2)),
        ({"a": torch.ones(2)}, {"b": torch.ones(2)}),
        ([torch.ones(2)], [torch.ones(2), torch.ones(2)]),
        ("text", "other"),
    ],
)
def test_comparison_finds_differences(got: Any, expected: Any) -> None:
    differences = Differences()
    differences.compare("same", got, got)
    assert differences.found == []
    differences.compare("different", got, expected)
    assert len(differences.found) == 1
