"""What cannot work is one clear error, on every rank."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pyrannc
from pyrannc.capture import capture
from pyrannc.job import process
from tests.ranks import RankPool

from .equivalence import double_precision, environment, make_batch
from .models import RECIPES, WIDTH, Chain
from .plans import graph_of, searched_plan

Ranks = Callable[[int], RankPool]

Told = tuple[str, str]
"""Class and message of an error."""


def told(call: Callable[[], Any]) -> Told:
    """The error that a call raises."""
    try:
        call()
    except pyrannc.RaNNCError as error:
        return type(error).__name__, str(error)
    raise AssertionError("nothing was raised")


def wrapped_in_ddp() -> Told:
    process.ensure_process_group()
    module = pyrannc.RaNNCModule(nn.Linear(2, 2))
    return told(lambda: nn.parallel.DistributedDataParallel(module))


def test_a_module_is_not_wrapped_in_ddp(ranks: Ranks) -> None:
    for kind, text in ranks(2).run(wrapped_in_ddp):
        assert (kind, "leave it out of DistributedDataParallel" in text) == ("RaNNCError", True)


def on_second_rank(here: Any, elsewhere: Any) -> Any:
    return here if process.get_rank() == 1 else elsewhere


class AddsInPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x += 1
        return self.linear(x) * y  # type: ignore[no-any-return]


def given_twice() -> list[Told]:
    found = []
    for first in (True, False):
        module = pyrannc.RaNNCModule(AddsInPlace())
        x = torch.randn(2, 2 * WIDTH)
        if not first:
            module(x[:, :WIDTH], x[:, WIDTH:])
        whole, later = x[:, :WIDTH], x[:, 1 : WIDTH + 1]
        found.append(told(lambda module=module, whole=whole: module(whole, whole)))
        found.append(told(lambda module=module, whole=whole, later=later: module(whole, later)))
    return found


def test_a_tensor_that_is_given_twice_or_overlaps_is_not_changed_in_place(ranks: Ranks) -> None:
    for errors in ranks(2).run(given_twice):
        for kind, text in errors:
            assert kind == "InputError"
            assert "changes tensor 0 of the arguments in place" in text
            assert "x.clone()" in text


def different_depths() -> Told:
    module = pyrannc.RaNNCModule(Chain(on_second_rank(4, 5)))
    return told(lambda: module(torch.randn(2, WIDTH)))


def different_functions() -> Told:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), on_second_rank(nn.ReLU(), nn.Tanh()))
    return told(lambda: pyrannc.RaNNCModule(model)(torch.randn(2, WIDTH)))


def different_parameters() -> Told:
    model = nn.Linear(WIDTH, on_second_rank(4, 5))
    return told(lambda: pyrannc.RaNNCModule(model)(torch.randn(2, WIDTH)))


@pytest.mark.parametrize(
    ("job", "parts"),
    [
        (different_depths, ["different models", "rank 0 has", "rank 1 has"]),
        (different_functions, ["different models", "tanh", "relu"]),
        (different_parameters, ["different models", "rank 1"]),
    ],
)
def test_different_models(job: Callable[[], Told], parts: list[str], ranks: Ranks) -> None:
    for kind, message in ranks(2).run(job):
        assert kind == "MismatchError"
        for part in parts:
            assert part in message


def different_shapes(deployed: bool) -> Told:
    with double_precision():
        recipe = RECIPES["transposed_output"]
        module = pyrannc.RaNNCModule(recipe.make())
        if deployed:
            module(torch.randn(2, 3, WIDTH))
        found = told(lambda: module(torch.randn(2, on_second_rank(4, 3), WIDTH)))
        # The next call works as if nothing had been.
        module(torch.randn(2, 3, WIDTH))
        module.undeploy()
        return found


@pytest.mark.parametrize("deployed", [False, True])
def test_different_shapes(deployed: bool, ranks: Ranks) -> None:
    for kind, message in ranks(2).run(different_shapes, deployed):
        assert kind == "MismatchError"
        if deployed:
            assert "rank 0: torch.float64 (2, 3, 6), in training mode" in message
            assert "rank 1: torch.float64 (2, 4, 6), in training mode" in message
        else:
            assert "different models" in message


def different_dtypes() -> Told:
    model = nn.Sequential(nn.Embedding(5, WIDTH), nn.Linear(WIDTH, WIDTH))
    tokens = torch.ones(2, 3, dtype=on_second_rank(torch.int32, torch.int64))
    return told(lambda: pyrannc.RaNNCModule(model)(tokens))


def test_different_dtypes(ranks: Ranks) -> None:
    for kind, message in ranks(2).run(different_dtypes):
        assert (kind, "rank 1" in message) == ("MismatchError", True)


def different_modes(gradients: bool) -> Told:
    module = pyrannc.RaNNCModule(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout()))
    x = torch.randn(2, WIDTH)
    module(x)
    if gradients:
        torch.set_grad_enabled(on_second_rank(False, True))
    else:
        module.train(on_second_rank(False, True))
    found = told(lambda: module(x))
    torch.set_grad_enabled(True)
    module.train()
    module.undeploy()
    return found


def test_different_modes(ranks: Ranks) -> None:
    for kind, message in ranks(2).run(different_modes, False):
        assert kind == "MismatchError"
        assert "rank 0: torch.float32 (2, 6), in training mode" in message
        assert "rank 1: torch.float32 (2, 6), in evaluation mode" in message
    for kind, message in ranks(2).run(different_modes, True):
        assert kind == "MismatchError"
        assert "rank 1: torch.float32 (2, 6), in training mode without gradients" in message


def input_on_meta() -> Told:
    x = torch.randn(2, WIDTH, device=on_second_rank("meta", "cpu"))
    return told(lambda: pyrannc.RaNNCModule(Chain())(x))


def input_without_rows() -> Told:
    return told(lambda: pyrannc.RaNNCModule(Chain())(torch.randn(0, WIDTH)))


def input_without_batch() -> Told:
    return told(lambda: pyrannc.RaNNCModule(Chain())(torch.tensor(1.0)))


@pytest.mark.parametrize(
    ("job", "on_first", "on_second"),
    [
        (
            input_on_meta,
            (
                "MismatchError",
                "rank 1 cannot go on: tensor 0 of the arguments (shape (2, 6)) is on meta, but this rank",
            ),
            ("InputError", 'is on meta, but this rank computes on cpu; move it there: x.to("cpu")'),
        ),
        (input_without_rows, ("InputError", "the global batch has no rows"), ("InputError", "has no rows")),
        (input_without_batch, ("InputError", "batch size cannot be told"), ("InputError", "batch size cannot be told")),
    ],
)
def test_bad_arguments(job: Callable[[], Told], on_first: Told, on_second: Told, ranks: Ranks) -> None:
    for (kind, message), (expected, text) in zip(ranks(2).run(job), [on_first, on_second], strict=True):
        assert kind == expected
        assert text in message


class DependsOnData(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[x > 0]


class ReturnsNumber(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return x, x.shape[0]


class WorksForOneBatchSize(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.reshape(2, 3, 2)


def capture_of(model: nn.Module) -> Told:
    return told(lambda: pyrannc.RaNNCModule(model)(torch.randn(2, WIDTH)))


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (DependsOnData, "depend"),
        (ReturnsNumber, "the model returns a number computed from the batch size"),
        (WorksForOneBatchSize, "batch size"),
    ],
)
def test_models_that_cannot_be_captured(model: type[nn.Module], text: str, ranks: Ranks) -> None:
    for kind, message in ranks(2).run(capture_of, model()):
        assert kind == "CaptureError"
        assert text in message


def deployed_with(file: str | None, variables: dict[str, str]) -> Told:
    with double_precision(), environment(variables):
        model = RECIPES["chain"].make()
        module = pyrannc.RaNNCModule(model, torch.optim.Adam(model.parameters()), load_deployment=file)
        return told(lambda: module(torch.randn(2, WIDTH)))


def plan_text(world_size: int = 2, model: str = "chain") -> str:
    with double_precision():
        recipe = RECIPES[model]
        args, kwargs, _ = make_batch(recipe, 4, 0)
        return searched_plan(graph_of(recipe.make(), args, kwargs, 4), [1] * world_size, 2, 4).to_json()


def graph_text() -> str:
    return capture(nn.Linear(2, 2), (torch.zeros(4, 2),), {}, device=torch.device("cpu"), rows=4).graph_json


def changed(**fields: Any) -> str:
    """A plan file with other fields and the checksum that belongs to them, though the Plan may be none."""
    form = {**json.loads(plan_text()), **fields, "checksum": ""}
    compact = json.dumps(form, separators=(",", ":"), ensure_ascii=False)
    return json.dumps({**form, "checksum": sha256(compact.encode()).hexdigest()})


def test_bad_plan_files(ranks: Ranks, tmp_path: Path) -> None:
    files = {
        "the plan is for 3 ranks, this job has 2": plan_text(world_size=3),
        "make a plan for this model": plan_text(model="skip"),
        "has schema 7, this RaNNC reads schema 3": changed(schema=7),
        "the file was damaged or edited": plan_text().replace('"microbatches": 2', '"microbatches": 3'),
        "the file is cut short": plan_text()[:300],
        "does not have the form of a plan": changed(stages="none"),
        "it has no microbatches": changed(microbatches=0),
        f"{tmp_path}/plan.json is a graph, not a plan": graph_text(),
    }
    for text, content in files.items():
        (tmp_path / "plan.json").write_text(content)
        first, second = ranks(2).run(deployed_with, str(tmp_path / "plan.json"), {})
        assert first[0] == "PlanFileError", first
        assert text in first[1]
        assert f"{tmp_path}/plan.json" in first[1] or "this job has" in first[1] or "for this model" in first[1]
        assert second == ("MismatchError", f"rank 0 cannot go on: {first[1]}")
    first, second = ranks(2).run(deployed_with, str(tmp_path / "missing.json"), {})
    assert first[0] == "PlanFileError"
    assert "cannot read the plan file" in first[1]
    assert "missing.json" in second[1]


@pytest.mark.parametrize(
    ("variables", "text"),
    [
        ({"RANNC_MEM_LIMIT_GB": "0.000001"}, "the model does not fit into memory"),
        ({"RANNC_PARTITION_NUM": "3"}, "3"),
    ],
)
def test_impossible_plans(variables: dict[str, str], text: str, ranks: Ranks) -> None:
    first, second = ranks(2).run(deployed_with, None, variables)
    assert first[0] == ("MemoryShortageError" if "memory" in text else "PlanError")
    assert text in first[1]
    assert second == ("MismatchError", f"rank 0 cannot go on: {first[1]}")


def too_many_stages() -> Told:
    with environment({"RANNC_PARTITION_NUM": "2"}):
        module = pyrannc.RaNNCModule(nn.Linear(WIDTH, WIDTH))
        return told(lambda: module(torch.randn(2, WIDTH)))


def test_too_many_stages(ranks: Ranks) -> None:
    first, second = ranks(2).run(too_many_stages)
    assert first[0] == "PlanError"
    assert first[1].startswith("2 stages were asked for, but what depends on the input can be cut into 1 piece at most")
    assert "op0 aten.linear.default" in first[1]
    assert first[1].endswith("is one operator. Ask for 1 stage at most")
    assert second[0] == "MismatchError"


def test_typo_in_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANNC_PARTITON_NUM", "2")
    with pytest.raises(
        pyrannc.ConfigError, match=r"RANNC_PARTITON_NUM is not a configuration item.*RANNC_PARTITION_NUM"
    ):
        pyrannc.RaNNCModule(Chain())


@pytest.mark.parametrize(
    ("argument", "text"),
    [
        ("enable_apex_amp", "torch.autocast"),
        ("allreduce_amp_master_params", "torch.amp.GradScaler"),
        ("offload_params", "not available yet"),
    ],
)
def test_arguments_that_are_gone(argument: str, text: str) -> None:
    with pytest.raises(pyrannc.RaNNCError, match=text):
        pyrannc.RaNNCModule(Chain(), **{argument: True})


@pytest.mark.parametrize("call", ["undeploy", "allreduce_grads", "clip_grad_norm"])
def test_calls_that_need_a_deployed_model(call: str) -> None:
    arguments = [1.0] if call == "clip_grad_norm" else []
    with pytest.raises(pyrannc.RaNNCError, match=rf"{call}\(\) needs a deployed model"):
        getattr(pyrannc.RaNNCModule(Chain()), call)(*arguments)


class Locked(torch.optim.SGD):
    """An optimizer that takes no hooks on the second rank, at first."""

    locked = False

    def lock(self) -> None:
        self.locked = process.get_rank() == 1

    def unlock(self) -> None:
        self.locked = False

    def register_step_post_hook(self, hook: Any) -> Any:
        if self.locked:
            raise TypeError("it is locked")
        return super().register_step_post_hook(hook)


def failed_deployment() -> tuple[Told, bool, list[Tensor], list[Tensor]]:
    """The error; then, the parameters after two steps with RaNNC and without."""
    with double_precision(), environment({"RANNC_PARTITION_NUM": "2", "RANNC_PIPELINE_NUM": "1"}):
        torch.manual_seed(0)
        model = Chain(4)
        plain = copy.deepcopy(model)
        optimizer, plain_optimizer = (Locked(net.parameters(), lr=0.1, momentum=0.5) for net in (model, plain))
        module = pyrannc.RaNNCModule(model, optimizer)
        batch = torch.randn(4, WIDTH)
        own = batch[process.get_rank() * 2 :][:2]
        optimizer.lock()
        error = told_any(lambda: module(own))
        ready = module.ready
        optimizer.unlock()
        for _ in range(2):
            for net, its, rows in (
                (module, optimizer, batch[process.get_rank() * 2 :][:2]),
                (plain, plain_optimizer, batch),
            ):
                its.zero_grad()
                net(rows).square().mean().backward()
                its.step()
        module.undeploy()
        return error, ready, [*map(torch.detach, model.parameters())], [*map(torch.detach, plain.parameters())]


def told_any(call: Callable[[], Any]) -> Told:
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)
    raise AssertionError("nothing was raised")


def test_after_a_failed_deployment_the_next_call_works(ranks: Ranks) -> None:
    first, second = ranks(2).run(failed_deployment)
    assert (first[0][0], second[0][0]) == ("MismatchError", "TypeError")
    assert "rank 1 cannot go on" in first[0][1]
    for _, ready, found, expected in (first, second):
        assert not ready
        for mine, theirs in zip(found, expected, strict=True):
            assert torch.allclose(mine, theirs, rtol=0, atol=1e-12)


class Adjacent(nn.Module):
    """Mixes features as a sparse matrix says, which is made here."""

    def forward(self, indices: Tensor, values: Tensor, x: Tensor) -> Tensor:
        matrix = torch.sparse_coo_tensor(indices, values, (WIDTH, WIDTH))
        return torch.sparse.mm(matrix, x.t()).t()


class OnGraphs(nn.Module):
    """Takes the matrix as an argument, has it as a buffer, or has its indices and values."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.first, self.mix = nn.Linear(WIDTH, WIDTH), Adjacent()
        matrix = torch.eye(WIDTH).to_sparse()
        if way == "whole":
            self.register_buffer("matrix", matrix)
        self.register_buffer("indices", matrix.indices().clone())
        self.register_buffer("values", matrix.values().clone())

    def forward(self, x: Tensor, matrix: Tensor | None = None) -> Tensor:
        x = self.first(x)
        if matrix is not None:
            return torch.sparse.mm(matrix, x.t()).t().square().sum()
        assert isinstance(self.indices, Tensor)
        assert isinstance(self.values, Tensor)
        loss: Tensor = self.mix(self.indices, self.values, x).square().sum()
        return loss


def sparse_tensors() -> tuple[list[Told], list[float]]:
    device = process.ensure_process_group().device
    x, matrix = torch.ones(4, WIDTH, device=device), torch.eye(WIDTH, device=device).to_sparse()

    def wrapped(way: str) -> pyrannc.RaNNCModule:
        torch.manual_seed(0)
        module = OnGraphs(way).to(device)
        return pyrannc.RaNNCModule(module, torch.optim.SGD(module.parameters(), lr=0.1))

    calls: list[Callable[[], Any]] = [
        lambda: wrapped("parts")(x, matrix),
        lambda: wrapped("parts")(x, matrix.values().view(-1, 1)),
        lambda: wrapped("parts")(torch.nested.nested_tensor([x[0], x[1, :2]])),
        lambda: wrapped("whole")(x),
    ]
    model = wrapped("parts")
    losses = []
    for _ in range(2):
        loss = model(x)
        loss.backward()
        losses.append(float(loss.detach()))
    return [told(call) for call in calls], losses


def test_sparse_tensors_are_refused_with_what_works(ranks: Ranks) -> None:
    torch.manual_seed(0)
    expected = float(OnGraphs("parts")(torch.ones(8, WIDTH)).detach())
    texts = [
        ("InputError", "tensor 1 of the arguments", "sparse (torch.sparse_coo)", "indices().clone()"),
        ("InputError", "tensor 1 of the arguments", "a view of a sparse or nested tensor", "x.clone()"),
        ("InputError", "tensor 0 of the arguments", "nested", "to_padded_tensor"),
        ("CaptureError", 'buffer "matrix" of the model', "sparse (torch.sparse_coo)", "sub-module"),
    ]
    for found, losses in ranks(2).run(sparse_tensors):
        for (kind, text), (expected_kind, *parts) in zip(found, texts, strict=True):
            assert kind == expected_kind
            assert all(part in text for part in parts), text
        assert losses == pytest.approx([expected] * 2)


IN_PARTS = [{"RANNC_PARTITION_NUM": "2"}, {"RANNC_PARTITION_NUM": "1", "RANNC_ENABLE_ZERO": "3"}]
"""Plans under which not every rank has all parameters."""


def trained(model: nn.Module) -> pyrannc.RaNNCModule:
    module = pyrannc.RaNNCModule(model, torch.optim.SGD(model.parameters(), lr=0.1))
    module(torch.randn(4, WIDTH)).sum().backward()
    return module


def wrapped_again() -> tuple[Told, float]:
    model = Chain()
    module = trained(model)
    found = told(lambda: trained(model))
    # The earlier one is as if nothing had been.
    module.undeploy()
    return found, float(trained(model).get_param("layers.0.weight").sum())


def wrapped_with_its_optimizer() -> tuple[Told, float]:
    model = Chain()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)

    def train() -> pyrannc.RaNNCModule:
        module = pyrannc.RaNNCModule(model, optimizer)
        module(torch.randn(4, WIDTH)).sum().backward()
        optimizer.step()
        return module

    module = train()
    found = told(train)
    module.undeploy()
    return found, float(train().get_param("layers.0.weight").sum())


@pytest.mark.parametrize("level", ["1", "2"])
def test_a_model_whose_optimizer_is_divided_is_not_wrapped_again(level: str, ranks: Ranks) -> None:
    first, second = ranks(2).run(
        wrapped_with_its_optimizer, env={"RANNC_PARTITION_NUM": "1", "RANNC_ENABLE_ZERO": level}
    )
    assert first == second
    kind, text = first[0]
    assert kind == "RaNNCError"
    assert "still deployed by an earlier RaNNCModule: call undeploy() of that one" in text


@pytest.mark.parametrize("env", [{"RANNC_PARTITION_NUM": "1"}, *IN_PARTS])
def test_a_deployed_model_is_not_wrapped_again(env: dict[str, str], ranks: Ranks) -> None:
    first, second = ranks(2).run(wrapped_again, env=env)
    assert first == second
    kind, text = first[0]
    assert kind == "RaNNCError"
    assert "still deployed by an earlier RaNNCModule: call undeploy() of that one" in text


def wrapped_after_another(another_optimizer: bool, wrap: Callable[..., Any]) -> list[Tensor]:
    """All parameters after two steps, of which another wrapper takes the second."""
    torch.manual_seed(0)
    model = Chain()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    module = None
    for step in range(2):
        if module is not None and process.get_rank() == 1:
            # This rank keeps it until garbage is collected.
            vars(module)["itself"] = module
        del module
        if step and another_optimizer:
            optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        module = wrap(model, optimizer)
        optimizer.zero_grad()
        module(torch.ones(4, WIDTH)).square().mean().backward()
        optimizer.step()
    return [*(module.state_dict(rank0_only=False) if module is not model else module.state_dict()).values()]


@pytest.mark.parametrize("another_optimizer", [False, True])
@pytest.mark.parametrize("env", [{"RANNC_PARTITION_NUM": "1"}, *IN_PARTS])
def test_a_model_whose_module_is_gone_is_wrapped_again(
    env: dict[str, str], another_optimizer: bool, ranks: Ranks
) -> None:
    expected = wrapped_after_another(another_optimizer, lambda model, optimizer: model)
    for found in ranks(2).run(wrapped_after_another, another_optimizer, pyrannc.RaNNCModule, env=env):
        for tensor, other in zip(found, expected, strict=True):
            torch.testing.assert_close(tensor, other)


def sharing_a_layer() -> Told | None:
    one, other = Chain(), Chain()
    other.layers[0] = one.layers[0]
    optimizer = torch.optim.SGD(nn.ModuleList([one, other]).parameters(), lr=0.1)
    first, second = pyrannc.RaNNCModule(one, optimizer), pyrannc.RaNNCModule(other, optimizer)
    x = torch.randn(4, WIDTH)
    first(x)
    try:
        second(x)
    except pyrannc.RaNNCError as error:
        return type(error).__name__, str(error)
    return None


@pytest.mark.parametrize("env", IN_PARTS)
def test_two_models_do_not_share_what_is_spread(env: dict[str, str], ranks: Ranks) -> None:
    first, second = ranks(2).run(sharing_a_layer, env=env)
    assert first == second
    assert first[0] == "RaNNCError"
    assert 'parameter "layers.0.' in first[1]
    assert "wrap one module that holds both models" in first[1]


def test_two_models_share_what_every_rank_has(ranks: Ranks) -> None:
    assert ranks(2).run(sharing_a_layer, env={"RANNC_PARTITION_NUM": "1", "RANNC_ENABLE_ZERO": "off"}) == [None, None]


def initialised_anew() -> list[Told | None]:
    module = trained(Chain())
    found: list[Told | None] = []
    writes: list[Callable[[Tensor], Any]] = [
        nn.init.orthogonal_,
        nn.init.kaiming_uniform_,
        lambda param: param.data.normal_(),
        lambda param: param.sum(),
    ]
    for write in writes:
        errors = []
        for name, param in module.named_parameters():
            if name.endswith("weight"):
                try:
                    write(param)
                except pyrannc.RaNNCError as error:
                    errors.append((type(error).__name__, str(error)))
        found.append(errors[0] if errors else None)
    return found


@pytest.mark.parametrize("env", IN_PARTS)
def test_what_other_ranks_have_is_written_by_load_state_dict(env: dict[str, str], ranks: Ranks) -> None:
    names = ["nn.init.orthogonal_()", "nn.init.kaiming_uniform_()", "normal_()"]
    for errors in ranks(2).run(initialised_anew, env=env):
        for error, name in zip(errors[:3], names, strict=True):
            assert error is not None
            assert f"{name} cannot write it here. Use model.load_state_dict(state)" in error[1], error[1]
        assert errors[3] is not None
        assert "sum() cannot read it here. Use model.state_dict()" in errors[3][1]


class WithForces(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.energy = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        energy = self.energy(x)
        (forces,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
        return energy + forces


def with_forces() -> Told:
    return told(lambda: trained(WithForces()))


def test_a_forward_that_differentiates_is_refused_with_its_line(ranks: Ranks) -> None:
    line = WithForces.forward.__code__.co_firstlineno + 3
    for kind, text in ranks(2).run(with_forces):
        assert kind == "CaptureError"
        assert f"differentiates inside of the forward (at {__file__}:{line})" in text, text


def stepping_in_backward() -> Told:
    model = Chain()
    module = pyrannc.RaNNCModule(model)
    module(torch.randn(4, WIDTH)).sum().backward()
    optimizer = torch.optim.SGD([model.layers[0].weight], lr=0.1)
    other = torch.ones(1, requires_grad=True)
    other.register_post_accumulate_grad_hook(lambda _: optimizer.step())
    return told(lambda: other.sum().backward())


def test_optimizers_of_one_stage_do_not_step_in_backward(ranks: Ranks) -> None:
    for kind, text in ranks(2).run(stepping_in_backward, env={"RANNC_PARTITION_NUM": "2"}):
        assert kind == "RaNNCError"
        assert 'optimizer.step() was called inside of a backward, as by a hook, for parameter "layers.0.weight"' in text
        assert "RANNC_PARTITION_NUM=1" in text
