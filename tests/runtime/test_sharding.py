"""What Replicas divide among them (ZeRO): equal to one process, and whole for whom it must be."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adafactor, Adam, AdamW, Muon, Optimizer

import pyrannc
from pyrannc.errors import RaNNCError
from pyrannc.job import process
from pyrannc.store.by_element import is_by_element
from pyrannc.store.shown_state import kept_state
from pyrannc.store.spread_tensor import is_absent
from tests.ranks import RankPool

from .equivalence import Case, Twins, check, double_precision
from .reference import OPTIMIZERS
from .test_training import accumulate, backward_twice, clip, delay, losses_in_other_orders

Ranks = Callable[[int], RankPool]
HOST = torch.device("cpu")

ONE_STAGE = Case("loss_inside", (2, 3, 1), replicas=(3,), microbatches=2, optimizer="adamw")
TWO_STAGES = Case("tied", (3, 2, 2), replicas=(2, 1), microbatches=2)
UNEVEN = Case("loss_inside", (1, 0, 1), replicas=(1, 2), microbatches=3, schedule="1f1b", optimizer="sgd")
CASES = [ONE_STAGE, TWO_STAGES, UNEVEN]
LEVELS = ["optimizer", "gradients", "kept_params", "params"]

ALL = pytest.mark.parametrize("sharding", LEVELS)
EACH = pytest.mark.parametrize("case", CASES, ids=["one_stage", "two_stages", "uneven"])
HABITS: dict[str, Callable[[Case, str], list[str]]] = {
    "steps": check,
    "accumulate": accumulate,
    "delay": lambda case, folder: delay(case, folder, explicitly=True),
    "backward_twice": backward_twice,
    "clip": lambda case, folder: clip(case, folder, 0.25),
    "orders": losses_in_other_orders,
}


def habits(case: Case, folder: str) -> dict[str, list[str]]:
    return {name: habit(case, folder) for name, habit in HABITS.items()}


@ALL
@EACH
def test_equals_one_process(case: Case, sharding: str, ranks: Ranks, tmp_path: Path) -> None:
    for found in ranks(3).run(habits, replace(case, sharding=sharding), str(tmp_path)):
        assert {name: told for name, told in found.items() if told} == {}
        assert found.keys() == HABITS.keys()


def muon(params: Any) -> Optimizer:
    return Muon([param for param in params if param.dim() == 2], lr=0.01)


WHOLE: dict[str, Callable[[Any], Optimizer]] = {"adafactor": lambda params: Adafactor(params, lr=0.01), "muon": muon}


def with_optimizer(case: Case, folder: str, optimizer: str) -> tuple[list[str], int]:
    OPTIMIZERS[optimizer] = WHOLE[optimizer]
    with double_precision():
        twins = Twins(case, folder)
        for number in range(4):
            twins.step(number)
        twins.compare_state("after the steps")
        kept = sum(_numel(kept_state(state)) for state in twins.optimizer.state.values())
        twins.module.undeploy()
        return twins.differences.found, kept


def _numel(state: dict[str, Any]) -> int:
    return sum(value.numel() for value in state.values() if isinstance(value, Tensor) and value.dim())


@pytest.mark.parametrize("optimizer", list(WHOLE))
def test_optimizers_that_need_whole_parameters(optimizer: str, ranks: Ranks, tmp_path: Path) -> None:
    case = replace(ONE_STAGE, optimizer=optimizer, sharding="optimizer")
    everyone = ranks(3).run(with_optimizer, case, str(tmp_path), optimizer)
    assert [found for found, _ in everyone] == [[], [], []]
    # Each rank has the state of other parameters.
    assert all(kept < sum(kept for _, kept in everyone) for _, kept in everyone)


def saved_and_loaded(case: Case, folder: str) -> tuple[list[str], list[int]]:
    with double_precision():
        twins = Twins(case, folder)
        twins.step(0)
        sizes = [_numel(kept_state(state)) for state in twins.optimizer.state.values()]
        twins.step(1)
        right = copy.deepcopy(twins.reference.optimizer.state_dict())
        with pytest.raises(RuntimeError, match="from_global=True"):
            twins.optimizer.state_dict()
        mine = twins.optimizer.state_dict(from_global=True)
        if mine:
            twins.differences.compare("saved", mine["state"], right["state"])
        twins.step(2)
        twins.optimizer.load_state_dict(mine, from_global=True)
        twins.reference.optimizer.load_state_dict(right)
        twins.step(3)
        # Frozen and thawed: the parts become others.
        for frozen in (True, False):
            for model in (twins.module.model, twins.reference.model):
                next(iter(model.parameters())).requires_grad_(not frozen)
            twins.module.zero_grad()
            twins.step(4)
        twins.compare_state("after all that")
        twins.module.undeploy()
        after = {number: twins.optimizer.state[param] for number, param in enumerate(_params(twins.optimizer))}
        twins.differences.compare("undeployed", after, twins.reference.optimizer.state_dict()["state"])
        twins.rewrap(replace(case, sharding="none", replicas=(3,)), folder)
        twins.step(5)
        twins.compare_state("deployed anew")
        twins.module.undeploy()
        return twins.differences.found, sizes


def _params(optimizer: Optimizer) -> list[Any]:
    return [param for group in optimizer.param_groups for param in group["params"]]


@ALL
def test_state_is_that_of_whole_parameters(sharding: str, ranks: Ranks, tmp_path: Path) -> None:
    case = replace(ONE_STAGE, sharding=sharding)
    everyone = ranks(3).run(saved_and_loaded, case, str(tmp_path))
    assert [found for found, _ in everyone] == [[], [], []]
    # Two moments of each element, once over all ranks.
    whole = 2 * sum(param.numel() for param in model_params(case))
    assert sum(sum(sizes) for _, sizes in everyone) == whole


def model_params(case: Case) -> list[nn.Parameter]:
    from .models import RECIPES

    return list(RECIPES[case.model].make().parameters())


def changed_by_hand(case: Case, folder: str) -> list[str]:
    """New data between backward and step, and in the place of an optimizer's step."""
    with double_precision():
        twins = Twins(case, folder)
        for number in range(2):
            twins.step(number)
            twins.optimizer.zero_grad()
            mine, right = twins.losses(7)
            mine.backward()
            right.backward()
            for model in (twins.module.model, twins.reference.model):
                for param in model.parameters():
                    param.data = param.data.clone() * 0.9
            twins.optimizer.step()
            twins.reference.optimizer.step()
            twins.reference.optimizer.zero_grad()
            twins.module.zero_grad()
        twins.step(3)
        twins.compare_state("with other data")
        twins.module.undeploy()
        return twins.differences.found


@pytest.mark.parametrize("sharding", ["optimizer", "gradients"])
def test_data_that_a_script_replaces(sharding: str, ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(3).run(changed_by_hand, replace(ONE_STAGE, sharding=sharding), str(tmp_path)) == [[], [], []]


def with_closure(case: Case, folder: str) -> list[str]:
    with double_precision():
        twins = Twins(case, folder)
        listed = len(_params(twins.optimizer))
        for number in range(3):
            pairs = zip((twins.optimizer, twins.reference.optimizer), (0, 1), strict=True)
            for optimizer, which in pairs:

                def closure(optimizer: Optimizer = optimizer, which: int = which, number: int = number) -> Tensor:
                    optimizer.zero_grad()
                    loss = twins.losses(number)[which]
                    loss.backward()
                    twins.differences.demand(len(_params(optimizer)) == listed, "all parameters are listed")
                    return loss

                optimizer.step(closure)
        twins.compare_state("after steps with closures")
        twins.module.undeploy()
        return twins.differences.found


@ALL
@EACH
def test_steps_with_closures(case: Case, sharding: str, ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(3).run(with_closure, replace(case, sharding=sharding), str(tmp_path)) == [[], [], []]


def with_failed_steps(case: Case, folder: str) -> list[str]:
    def fails(*_: Any) -> None:
        raise RaNNCError("this step fails")

    with double_precision():
        twins = Twins(case, folder)
        optimizer: Any = twins.optimizer
        params, demand = list(twins.module.parameters()), twins.differences.demand
        listed = list(map(id, _params(optimizer)))
        twins.step(0)
        for number, closure in enumerate((fails, None), 1):
            optimizer.zero_grad()
            twins.losses(number)[0].backward()
            demand(any(not is_absent(param) and param.grad is not None for param in params), "there are gradients")
            optimizer._init_group = fails
            try:
                optimizer.step(closure)
                demand(False, "the step fails")
            except RaNNCError:
                found = list(map(id, _params(optimizer)))
                demand(closure is None or found == listed, "all parameters are listed in the handler")
                optimizer.zero_grad()
            del optimizer._init_group
            left = [param for param in params if not is_absent(param) and param.grad is not None]
            demand(not left, f"{len(left)} gradients are left")
            demand(list(map(id, _params(optimizer))) == listed, "all parameters are listed")
        twins.losses(3)[0].backward()
        optimizer._init_group = fails
        demand(bool(met(optimizer.step)), "the step fails")
        del optimizer._init_group
        # The state of all, and what is listed, after a step that failed.
        twins.compare_state("after failed steps")
        twins.step(4)
        twins.compare_state("after a step behind them")
        twins.module.undeploy()
        return twins.differences.found


@ALL
@EACH
def test_steps_that_fail(case: Case, sharding: str, ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(3).run(with_failed_steps, replace(case, sharding=sharding), str(tmp_path)) == [[], [], []]


def met(job: Callable[[], Any]) -> str:
    """The error that a script meets, or nothing."""
    try:
        job()
    except RaNNCError as error:
        return str(error)
    return ""


def seen(case: Case, folder: str) -> tuple[list[str], dict[str, str]]:
    """The table of docs/sharding.md."""
    with double_precision():
        twins = Twins(case, folder)
        twins.step(0)
        model, reference = twins.module.model, twins.reference.model
        param, right = (net.get_parameter("chain.layers.1.weight") for net in (model, reference))
        found = {
            "contents": met(lambda: param.sum()),
            "average": met(lambda: torch.optim.swa_utils.AveragedModel(model)),
            "another optimizer": met(SGD([param], lr=0.0).step),
            "state": met(lambda: twins.optimizer.state_dict()),
        }
        twins.differences.demand(param.shape == right.shape and param.numel() == right.numel(), "shapes are whole")
        twins.optimizer.zero_grad()
        for loss in twins.losses(1):
            loss.backward()
        grads = [p.grad for p in model.parameters()]
        found["gradient"] = met(lambda: param.grad.norm())
        found["clipping"] = met(lambda: nn.utils.clip_grad_norm_(model.parameters(), 1e9))
        found["norm"] = met(lambda: nn.utils.get_total_norm(grads))
        for one in (param, right):
            assert one.grad is not None
            one.grad.mul_(0.5)
            one.grad.add_(one.data, alpha=0.1)
            one.data.mul_(0.9)
        for net in (model, reference):
            torch._foreach_mul_([p.grad for p in net.parameters()], 0.5)
            nn.utils.clip_grad_value_(net.parameters(), 0.01)
        twins.compare_gradients("changed by hand")
        twins.optimizer.step()
        twins.reference.optimizer.step()
        twins.reference.optimizer.zero_grad()
        twins.optimizer.zero_grad()
        found["autograd.grad"] = met(lambda: torch.autograd.grad(twins.losses(2)[0], param))
        twins.step(3)
        twins.compare_state("at the end")
        twins.module.undeploy()
        return twins.differences.found, found


FROM_2 = ("gradient", "clipping", "norm", "autograd.grad", "another optimizer")
FROM_3 = ("contents", "average")


@ALL
def test_what_a_script_sees(sharding: str, ranks: Ranks, tmp_path: Path) -> None:
    case = replace(ONE_STAGE, sharding=sharding)
    from_3 = FROM_3 if sharding in ("kept_params", "params") else ()
    raises = {"state", *(FROM_2 if sharding != "optimizer" else ()), *from_3}
    for differences, found in ranks(3).run(seen, case, str(tmp_path)):
        assert differences == []
        assert {name for name, error in found.items() if error} == raises
        assert all("RANNC_ENABLE_ZERO" in error or "from_global" in error for error in found.values() if error)


@pytest.mark.parametrize("sharding", ["kept_params", "params"])
def test_a_backward_again_beside_replicas_without_rows(sharding: str, ranks: Ranks, tmp_path: Path) -> None:
    case = Case("tied", (2, 1, 0), replicas=(3,), microbatches=2, sharding=sharding)
    assert ranks(3).run(backward_twice, case, str(tmp_path)) == [[], [], []]


def hooked(case: Case, folder: str) -> tuple[list[str], list[int]]:
    """Hooks from the beginning, from later on, and between a call and its backward."""
    with double_precision():
        twins = Twins(case, folder)
        told: list[list[Tensor]] = [[], []]
        nets = (twins.module.model, twins.reference.model)
        for net, notes in zip(nets, told, strict=True):
            net.get_parameter("chain.layers.0.weight").register_hook(lambda grad, notes=notes: notes.append(grad * 2))
        twins.step(0)
        for net, notes in zip(nets, told, strict=True):
            net.get_parameter("chain.layers.2.bias").register_post_accumulate_grad_hook(
                lambda param, notes=notes: notes.append(param.grad.clone())
            )
        for number in (1, 2):
            twins.step(number)
        twins.differences.compare("what hooks saw", told[0], told[1])
        counts = [len(notes) for notes in told]
        mine, _ = twins.losses(3)
        handle = twins.module.model.get_parameter("chain.layers.1.bias").register_hook(lambda grad: None)
        twins.optimizer.zero_grad()
        error = met(mine.backward)
        twins.differences.demand(("hook" in error) == (case.sharding != "optimizer"), f"a late hook: {error}")
        handle.remove()
        twins.module.undeploy()
        return twins.differences.found, counts


@ALL
def test_hooks_get_whole_gradients(sharding: str, ranks: Ranks, tmp_path: Path) -> None:
    for differences, counts in ranks(3).run(hooked, replace(ONE_STAGE, sharding=sharding), str(tmp_path)):
        assert differences == []
        assert counts == [5, 5]


class Clipped(SGD):
    """Divides each update by the gradient's norm."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                param.data.sub_(group["lr"] * param.grad / param.grad.norm())


class Late(SGD):
    """Does so from a step on, or where the norm is large."""

    def __init__(self, params: Any, *, start: int = 0, limit: float = 0.0) -> None:
        super().__init__(params, lr=0.1)
        for group in self.param_groups:
            group.update(start=start, limit=limit, count=0)

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["count"] += 1
            for param in group["params"]:
                norm = param.grad.norm()
                late = group["count"] > group["start"] and norm > group["limit"]
                param.data.sub_(group["lr"] * (param.grad / norm if late else param.grad))


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda p: Late(p, start=70), False),
        (lambda p: Late(p, start=300), False),
        (lambda p: Late(p, start=10**6), False),
        (lambda p: Late(p, limit=100.0), False),
        (lambda p: Late(p, limit=1e6), True),
        (lambda p: Adam(p), True),
        (lambda p: AdamW(p, amsgrad=True, fused=True), True),
        (lambda p: SGD(p, lr=0.1, momentum=0.9, nesterov=True), True),
        (lambda p: torch.optim.Adagrad(p), True),
        (lambda p: torch.optim.RMSprop(p, centered=True), True),
        (lambda p: torch.optim.Rprop(p), True),
        (lambda p: torch.optim.NAdam(p), True),
        (lambda p: Adafactor(p), False),
        (lambda p: Muon(p), False),
        (lambda p: Clipped(p, lr=0.1), False),
    ],
)
def test_by_element(make: Callable[[Any], Optimizer], expected: bool) -> None:
    params = [nn.Parameter(torch.randn(4, 5)), nn.Parameter(torch.randn(3, 2))]
    optimizer = make(params)
    before = [param.detach().clone() for param in params]
    assert is_by_element(optimizer, HOST) is expected
    assert all(torch.equal(param, then) for param, then in zip(params, before, strict=True))
    assert all(_numel(state) == param.numel() for param, state in optimizer.state.items())


def divided_by_element_on_one_rank() -> str:
    """How gradients are divided where trials of the optimizer have shown different things."""
    model = nn.Linear(8, 8)
    optimizer = SGD(model.parameters(), lr=0.1)
    optimizer.by_element = process.get_rank() == 0  # type: ignore[attr-defined]  # of users' optimizers
    module = pyrannc.RaNNCModule(model, optimizer)
    module(torch.ones(4, 8)).square().mean().backward()
    optimizer.step()
    deployed = module._deployment
    assert deployed is not None
    module.undeploy()
    return deployed.buckets.to_json()


def test_ranks_divide_alike(ranks: Ranks) -> None:
    first, second = ranks(2).run(divided_by_element_on_one_rank, env={"RANNC_ENABLE_ZERO": "1"})
    assert first == second


def second_sets(case: Case, folder: str) -> list[int]:
    """Bytes of second sets of gradients in a plain loop, and when a script keeps gradients."""
    with double_precision():
        twins = Twins(case, folder)
        for number in range(3):
            twins.step(number)
            twins.optimizer.zero_grad()
        deployed = twins.module._deployment
        assert deployed is not None
        plain = deployed.gradients.second_bytes
        twins.step(3)
        kept = [param.grad for param in twins.module.parameters()]
        twins.step(4)
        assert all(grad is not None for grad in kept)
        held = deployed.gradients.second_bytes
        twins.module.undeploy()
        return [plain, held]


@ALL
def test_gradients_are_written_to_anew_unless_somebody_holds_them(sharding: str, ranks: Ranks, tmp_path: Path) -> None:
    for plain, held in ranks(3).run(second_sets, replace(ONE_STAGE, sharding=sharding), str(tmp_path)):
        assert plain == 0
        assert held > 0


def used_outside(case: Case, folder: str) -> list[str]:
    """A penalty outside of the model, in one backward with the loss, before it and after it."""
    with double_precision():
        twins = Twins(case, folder)
        twins.step(0)
        for number, order in enumerate(("together", "before", "after"), start=1):
            for model, optimizer, which in (
                (twins.module.model, twins.optimizer, 0),
                (twins.reference.model, twins.reference.optimizer, 1),
            ):
                optimizer.zero_grad()
                for _ in range(2):
                    loss = twins.losses(number)[which]
                    penalty = sum(param.square().sum() for param in model.parameters())
                    together = [loss + penalty]
                    for part in {"together": together, "before": [penalty, loss], "after": [loss, penalty]}[order]:
                        part.backward()
            twins.compare_gradients(order)
            twins.optimizer.step()
            twins.reference.optimizer.step()
        twins.compare_state("after steps with penalties")
        twins.module.undeploy()
        return twins.differences.found


@pytest.mark.parametrize("sharding", ["optimizer", "gradients"])
def test_parameters_used_outside_of_the_model(sharding: str, ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(3).run(used_outside, replace(ONE_STAGE, sharding=sharding), str(tmp_path)) == [[], [], []]


def watched_and_frozen(case: Case, folder: str) -> list[str]:
    """A script's hook after steps, registered before the first call, and layers frozen while they have gradients."""
    with double_precision():
        twins = Twins(case, folder)
        seen: list[list[Any]] = [[], []]
        pairs = [(twins.optimizer, twins.module.model), (twins.reference.optimizer, twins.reference.model)]

        def watch(optimizer: Optimizer, net: nn.Module, notes: list[Any]) -> None:
            def hook(*_: Any) -> None:
                notes.append(len(optimizer.param_groups[0]["params"]))
                notes.extend(param.detach().clone() for param in net.parameters() if case.sharding[-6:] != "params")

            optimizer.register_step_post_hook(hook)

        for (optimizer, net), notes in zip(pairs, seen, strict=True):
            watch(optimizer, net, notes)
        twins.step(0)
        twins.optimizer.zero_grad()
        for number, trained in enumerate((True, False, True)):
            for _, net in pairs:
                net.get_submodule("chain.layers.0").requires_grad_(trained)
            for loss in twins.losses(number):
                loss.backward()
            twins.compare_gradients(f"after backward {number}")
            for optimizer, _ in pairs:
                optimizer.step()
        twins.compare_state("after steps")
        twins.differences.compare("what hooks saw", *seen)
        twins.module.undeploy()
        return twins.differences.found


@ALL
def test_hooks_after_steps_and_frozen_layers_with_gradients(sharding: str, ranks: Ranks, tmp_path: Path) -> None:
    case = replace(ONE_STAGE, sharding=sharding)
    assert ranks(3).run(watched_and_frozen, case, str(tmp_path)) == [[], [], []]
