"""Parameters, buffers and optimizer states: seen as a whole, saved, and taken back under another Plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import pyrannc
from pyrannc.job import process
from tests.ranks import RankPool

from .equivalence import Case, Differences, Twins, check, double_precision, environment, make_batch, make_model
from .models import RECIPES
from .reference import OPTIMIZERS

Ranks = Callable[[int], RankPool]


def whole_state(case: Case, folder: str) -> list[str]:
    with double_precision():
        twins = Twins(case, folder)
        module, differences = twins.module, twins.differences
        differences.compare("keys before deployment", list(module.state_dict()), list(twins.expected_state()))
        for step in range(2):
            twins.step(step)
        twins.compare_state("after training")
        on_first = module.state_dict()
        differences.compare(
            "state on rank 0", dict(on_first), twins.expected_state() if process.get_rank() == 0 else {}
        )
        for name in twins.reference.model.state_dict():
            if name in dict(twins.reference.model.named_parameters(remove_duplicate=False)):
                expected = twins.reference.model.get_parameter(name).detach()
                differences.compare(f"get_param({name})", module.get_param(name), expected)
        _load_and_go_on(twins)
        module.undeploy()
        return differences.found


def _load_and_go_on(twins: Twins) -> None:
    other = make_model(twins.recipe, seed=9).state_dict()
    twins.reference.model.load_state_dict(other)
    # What other ranks pass does not count.
    passed = other if process.get_rank() == 0 else {}
    outcome = twins.module.load_state_dict(passed)
    twins.differences.demand(not outcome.missing_keys and not outcome.unexpected_keys, f"loaded with {outcome}")
    twins.compare_state("after loading")
    twins.step(2)
    twins.compare_state("after loading and training")
    if process.get_rank() == 0:
        passed = {f"other.{name}": tensor for name, tensor in other.items()}
    with pytest.raises(RuntimeError, match="Missing key"):
        twins.module.load_state_dict(passed)


@pytest.mark.parametrize(
    "case",
    [
        Case("tied", (3, 2, 2), replicas=(2, 1), microbatches=2),
        Case("conv_net", (4, 4), stages=2, microbatches=2, optimizer="sgd"),
        Case("bert", (2, 2), stages=2),
    ],
    ids=str,
)
def test_state_dict_before_and_after_deployment(case: Case, ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(len(case.rows)).run(whole_state, case, str(tmp_path)) == [[] for _ in case.rows]


def load_before_deployment(case: Case, folder: str) -> list[str]:
    with double_precision():
        twins = Twins(case, folder)
        other = make_model(twins.recipe, seed=9).state_dict()
        twins.module.load_state_dict(other)
        twins.reference.model.load_state_dict(other)
        twins.step(0)
        twins.compare_state("after training")
        twins.module.undeploy()
        return twins.differences.found


def test_load_before_deployment(ranks: Ranks, tmp_path: Path) -> None:
    case = Case("tied", (3, 1), stages=2)
    assert ranks(2).run(load_before_deployment, case, str(tmp_path)) == [[], []]


def resume(case: Case, second: Case, folder: str) -> list[str]:
    """Trains, saves, and goes on in a new module with another Plan."""
    with double_precision():
        twins = Twins(case, folder)
        for step in range(2):
            twins.step(step)
        saved = twins.module.state_dict()
        optimizer_saved = twins.optimizer.state_dict(from_global=True)
        if process.get_rank() == 0:
            expected = twins.reference.optimizer.state_dict()
            twins.differences.compare("optimizer state", optimizer_saved, expected)
        else:
            twins.differences.compare("optimizer state elsewhere", optimizer_saved, {})
        twins.module.undeploy()

        later = Twins(second, folder)
        later.reference = twins.reference
        with torch.no_grad():
            # Deploys, without training.
            later.module(*later.local(make_batch(later.recipe, second.total_rows, 0))[0])
        later.module.load_state_dict(saved)
        later.optimizer.load_state_dict(optimizer_saved, from_global=True)
        for step in range(2, 4):
            later.step(step)
        later.compare_state("after going on")
        later.module.undeploy()
        return twins.differences.found + later.differences.found


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
@pytest.mark.parametrize("model", ["tied", "frozen"])
def test_resume_under_another_plan(model: str, optimizer: str, ranks: Ranks, tmp_path: Path) -> None:
    first = Case(model, (3, 2, 2), replicas=(2, 1), microbatches=2, optimizer=optimizer)
    second = Case(model, (1, 5, 1), replicas=(1, 1, 1), microbatches=3, optimizer=optimizer)
    assert ranks(3).run(resume, first, second, str(tmp_path)) == [[], [], []]


def deploy_again(case: Case, second: Case, folder: str) -> list[str]:
    """One model and one optimizer, with their states, under several Plans in turn."""
    with double_precision():
        twins = Twins(case, folder)
        for step in range(2):
            twins.step(step)
        twins.module.undeploy()
        state = twins.optimizer.state_dict()
        twins.differences.compare("optimizer, undeployed", state, twins.reference.optimizer.state_dict())
        twins.differences.demand(not twins.module.ready, "not ready after undeploy()")
        twins.step(2)
        twins.module.undeploy()
        twins.rewrap(second, folder)
        twins.step(3)
        twins.compare_state("under the second plan")
        twins.module.undeploy()
        _train_plainly(twins, 4)
        return twins.differences.found


def _train_plainly(twins: Twins, seed: int) -> None:
    """An undeployed model and its optimizer are as if RaNNC had never been there."""
    model = twins.module.model
    for trained, optimizer in ((model, twins.optimizer), (twins.reference.model, twins.reference.optimizer)):
        args, kwargs, target = make_batch(twins.recipe, twins.case.total_rows, seed)
        optimizer.zero_grad()
        twins.recipe.criterion(trained(*args, **kwargs), target).backward()
        optimizer.step()
    twins.differences.compare("trained plainly", dict(model.state_dict()), twins.expected_state())


def test_undeploy_and_deploy_again(ranks: Ranks, tmp_path: Path) -> None:
    first = Case("tied", (3, 2, 2), replicas=(2, 1), microbatches=2)
    second = Case("tied", (3, 2, 2), stages=3)
    assert ranks(3).run(deploy_again, first, second, str(tmp_path)) == [[], [], []]


def look_at_parts(case: Case, folder: str) -> dict[str, Any]:
    with double_precision():
        twins = Twins(case, folder)
        module = twins.module
        all_names = [name for name, _ in module.named_parameters()]
        twins.step(0)
        seen = {
            "all": all_names,
            "from_global": [name for name, _ in module.named_parameters(from_global=True)],
            "default": [name for name, _ in module.named_parameters()],
            "names": [name for name, _ in module.named_parameters(from_global=False)],
            "params": list(map(id, module.parameters(from_global=False)))
            == [id(param) for _, param in module.named_parameters(from_global=False)],
            "buffers": [name for name, _ in module.named_buffers(from_global=False)],
            "all_buffers": [name for name, _ in module.named_buffers()],
            "optimizer": [[_name_of(module, param) for param in group["params"]] for group in _groups(module)],
            "ready": module.ready,
            "device": str(module.device),
            "layers": len(module.blocks),
            "to": module.to("meta") is module and module.cuda() is module,
        }
        with pytest.raises(AttributeError):
            _ = module.no_such_attribute
        with pytest.raises(pyrannc.RaNNCError, match=r'no parameter "head\.bais"'):
            module.get_param("head.bais")
        module.undeploy()
        return seen


def _groups(module: pyrannc.RaNNCModule) -> list[dict[str, Any]]:
    assert module.optimizer is not None
    return module.optimizer.param_groups


def _name_of(module: pyrannc.RaNNCModule, param: nn.Parameter) -> str:
    return next(name for name, found in module.name_to_param.items() if found is param)


def test_ranks_hold_their_parts_only(ranks: Ranks, tmp_path: Path) -> None:
    case = Case("conv_net", (2, 2, 2, 2), replicas=(2, 2), optimizer="sgd")
    seen = ranks(4).run(look_at_parts, case, str(tmp_path))
    names = [name for name, _ in make_model(RECIPES["conv_net"]).named_parameters()]
    assert seen[0] == seen[1]
    assert seen[2] == seen[3]
    assert seen[0]["names"] + seen[2]["names"] == names
    assert len(seen[0]["names"]) > 0
    assert len(seen[2]["names"]) > 0
    assert seen[0]["buffers"] + seen[2]["buffers"] == seen[0]["all_buffers"]
    for found in seen:
        assert found["all"] == found["from_global"] == found["default"] == names
        assert found["optimizer"] == [names]
        assert (found["params"], found["ready"], found["device"], found["layers"]) == (True, True, "cpu", 3)
        assert found["to"]


def own_parameters(case: Case, folder: str) -> bool:
    pyrannc.sync_params_on_init(False)
    try:
        with double_precision():
            twins = Twins(case, folder)
            own = next(twins.module.model.parameters()).detach().clone()
            twins.losses(0)
            kept = torch.equal(own, next(twins.module.model.parameters()))
            twins.module.undeploy()
            return kept
    finally:
        pyrannc.sync_params_on_init(True)


def test_without_sync_every_rank_keeps_its_parameters(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(2).run(own_parameters, Case("chain", (2, 2)), str(tmp_path)) == [True, True]


def several_groups(folder: str) -> list[str]:
    """Param groups with settings of their own, some of which have no parameter on a rank."""
    with double_precision():
        recipe = RECIPES["chain"]
        differences = Differences()
        models = [make_model(recipe), make_model(recipe)]
        optimizers = []
        for model in models:
            params = list(model.parameters())
            groups = [{"params": params[:3], "lr": 0.1}, {"params": params[3:4], "lr": 0.2}, {"params": params[4:]}]
            optimizers.append(torch.optim.SGD(groups, lr=0.01, momentum=0.5))
        with environment({"RANNC_PARTITION_NUM": "2"}):
            module = pyrannc.RaNNCModule(models[0], optimizers[0], gather_inputs=False)
        for seed in range(2):
            args, _, target = make_batch(recipe, 4, seed)
            for model, optimizer in ((module, optimizers[0]), (models[1], optimizers[1])):
                optimizer.zero_grad()
                recipe.criterion(model(*args), target).backward()
                optimizer.step()
        differences.demand(len(optimizers[0].param_groups) == 3, "three groups")
        state = module.state_dict(rank0_only=False)
        differences.compare("parameters", dict(state), dict(models[1].state_dict()))
        module.undeploy()
        differences.compare("optimizer", optimizers[0].state_dict(), optimizers[1].state_dict())
        return differences.found


def test_param_groups(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(2).run(several_groups, str(tmp_path)) == [[], []]


def made_later() -> list[str]:
    """An optimizer of ``module.parameters()``, all of them, which the module has not been given."""
    with double_precision(), environment({"RANNC_PARTITION_NUM": "2"}):
        recipe = RECIPES["chain"]
        differences = Differences()
        models = [make_model(recipe), make_model(recipe)]
        module = pyrannc.RaNNCModule(models[0], gather_inputs=False)
        module(*make_batch(recipe, 4, 9)[0])
        optimizers = [torch.optim.Adam(module.parameters()), torch.optim.Adam(models[1].parameters())]
        for seed in range(2):
            args, _, target = make_batch(recipe, 4, seed)
            for model, optimizer in zip((module, models[1]), optimizers, strict=True):
                optimizer.zero_grad()
                recipe.criterion(model(*args), target).backward()
                optimizer.step()
        found = optimizers[0].state_dict(from_global=True)  # type: ignore[call-arg]  # since it has stepped
        expected = optimizers[1].state_dict()
        differences.compare("whole state", found, expected if process.get_rank() == 0 else {})
        module.undeploy()
        differences.compare("undeployed", optimizers[0].state_dict(), expected)
        differences.compare("parameters", dict(models[0].state_dict()), dict(models[1].state_dict()))
        return differences.found


def test_an_optimizer_of_all_parameters(ranks: Ranks) -> None:
    assert ranks(2).run(made_later) == [[], []]


def saved_plan(case: Case, folder: str) -> list[str]:
    with double_precision():
        file = Path(folder) / "saved.json"
        twins = Twins(case, folder)
        with pytest.raises(pyrannc.RaNNCError, match="needs a deployed model"):
            twins.module.save_deployment(file)
        twins.step(0)
        twins.module.save_deployment(file)
        twins.module.undeploy()
        pyrannc.barrier()
        model = make_model(twins.recipe)
        again = pyrannc.RaNNCModule(model, OPTIMIZERS["adam"](model.parameters()), load_deployment=file)
        again(*twins.local(make_batch(twins.recipe, case.total_rows, 0))[0])
        held = [name for name, _ in again.named_parameters(from_global=False)]
        again.undeploy()
        return held


def test_saved_deployment_is_the_same_again(ranks: Ranks, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    case = Case("chain", (2, 2), stages=2, microbatches=2)
    first, second = ranks(2).run(saved_plan, case, str(tmp_path))
    assert first + second == [name for name, _ in make_model(RECIPES["chain"]).named_parameters()]
    pyrannc.show_deployment(tmp_path / "saved.json", 4)
    assert "layers" in capsys.readouterr().out


def check_twice(case: Case, folder: str) -> list[str]:
    found = check(case, folder)
    pyrannc.recreate_all_communicators()
    return found + check(replace(case, rows=(1, 2)), folder)


def test_communicators_are_made_again(ranks: Ranks, tmp_path: Path) -> None:
    case = Case("chain", (3, 2), stages=2, microbatches=2)
    assert ranks(2).run(check_twice, case, str(tmp_path)) == [[], []]
