"""Optimizers: what they list, what state they keep, and what goes round them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn
from torch.optim import LBFGS, SGD, Adadelta, Adafactor, Adam, AdamW, Optimizer, RMSprop, SparseAdam

import pyrannc
from tests.contract.habit import equal, refused
from tests.contract.job import Job
from tests.contract.settings import REPLICAS, STAGES, Setting
from tests.contract.training import (
    TOKENS,
    VOCABULARY,
    WIDTH,
    Chain,
    Returns,
    adam,
    chain_with_loss,
    clipped,
    learn,
    learned,
    padded,
    pairs,
)

SEVERAL_STAGES = (STAGES, Setting((3, 0, 5), 3, 1))
WHOLE = "`optimizer.state_dict(from_global=True)` on all ranks"


def _whole(model: nn.Module) -> dict[str, bool]:
    """What RaNNC wants to be told, to mean the state of all ranks."""
    return {"from_global": True} if isinstance(model, pyrannc.RaNNCModule) else {}


def _on_first(job: Job, state: dict[str, Any]) -> Any:
    """The state of rank 0 on all ranks, for notes."""
    if job.ranks == 1:
        return state
    box = [state]
    torch.distributed.broadcast_object_list(box, 0)
    return box[0]


# What is listed


@equal()
def parameter_outside_of_the_model(job: Job) -> None:
    """The optimizer has a parameter that is not the model's, such as a learned weight of the loss."""
    net = chain_with_loss()
    weight = nn.Parameter(torch.ones(()) * (1 + job.rank))
    weight.data.fill_(1.0) if job.rank == 0 else None
    optimizer = SGD([*net.parameters(), weight], lr=0.1)
    model = job.wrap(net, optimizer)
    for batch in job.batches(pairs):
        optimizer.zero_grad()
        (model(*batch) * weight).backward()
        job.same("gradient of the weight", weight.grad)
        optimizer.step()
    job.same("weight", weight)
    job.state(model)


@equal()
def parameters_of_the_criterion(job: Job) -> None:
    """The criterion outside of the model has parameters, and the optimizer those of both; gradients add up."""
    net, head = Chain(), nn.Linear(WIDTH, 3)
    optimizer = Adam([{"params": net.parameters()}, {"params": head.parameters(), "lr": 0.1}], lr=0.01)
    model = job.wrap(net, optimizer)
    for step, (x, target) in enumerate(job.batches(pairs, 4)):
        (F.mse_loss(head(model(x)), target[:, :3], reduction="sum") / max(1, len(x))).backward()
        job.same("gradients", [param.grad for param in head.parameters()])
        job.gradients(model)
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()
    job.same("head", list(head.parameters()))
    job.same("state", _on_first(job, optimizer.state_dict(**_whole(model)))["state"])
    job.state(model)


@equal()
def parameter_that_the_criterion_uses(job: Job) -> None:
    """The model has a parameter that its forward does not use, but the criterion: weights of several losses."""

    class Net(Chain):
        def __init__(self) -> None:
            super().__init__()
            self.weights = nn.Parameter(torch.zeros(2))

    net = Net()
    optimizer = SGD(net.parameters(), lr=0.1)
    model = job.wrap(net, optimizer, check_unused_values=False)
    for x, target in job.batches(pairs):
        optimizer.zero_grad()
        apart = (model(x) - target).reshape(len(x), 2, 3).square().sum((0, 2)) / max(1, len(x))
        ((-net.weights).exp() * apart + net.weights).sum().backward()
        job.same("norm", clipped(model, 0.5))
        job.gradients(model)
        optimizer.step()
    job.state(model)


@equal()
def layers_thawed_and_added(job: Job) -> None:
    """Frozen layers are thawed after some steps, and go to the optimizer by `optimizer.add_param_group`."""
    net = chain_with_loss()
    first = net.net.layers[0].requires_grad_(False)
    optimizer = Adam([param for param in net.parameters() if param.requires_grad], lr=0.01)
    model = job.wrap(net, optimizer)
    learn(job, model, optimizer)
    first.requires_grad_(True)
    optimizer.add_param_group({"params": first.parameters(), "lr": 0.05})
    for step in (1, 2):
        learn(job, model, optimizer, step=step)
    job.same("state", _on_first(job, optimizer.state_dict(**_whole(model))))
    job.state(model)


@equal()
def own_parameters_added(job: Job) -> None:
    """`optimizer.add_param_group` gets what `model.named_parameters()` has after the first call: this rank's part."""
    net = chain_with_loss()
    optimizer = Adam(net.net.head.parameters(), lr=0.01)
    model = job.wrap(net, optimizer)
    learn(job, model, optimizer)
    optimizer.add_param_group({"params": [p for name, p in model.named_parameters() if "head" not in name]})
    learn(job, model, optimizer, step=1)
    job.same("state", _on_first(job, optimizer.state_dict(**_whole(model))))
    job.state(model)


@equal()
def lists_changed_by_hand(job: Job) -> None:
    """The script puts other lists and a new group into `optimizer.param_groups` after the first call."""
    net = chain_with_loss()
    optimizer = SGD(net.parameters(), lr=0.1, momentum=0.9)
    model = job.wrap(net, optimizer)
    learn(job, model, optimizer)
    head = list(net.net.head.parameters())
    optimizer.param_groups[0]["params"] = list(net.net.layers.parameters())
    optimizer.param_groups.append({**optimizer.param_groups[0], "params": head, "lr": 0.01})
    learn(job, model, optimizer, step=1)
    job.same("state", _on_first(job, optimizer.state_dict(**_whole(model))))
    learn(job, model, optimizer, step=2)
    job.state(model)


@equal()
def second_optimizer(job: Job) -> None:
    """Two optimizers share the model's parameters, and RaNNC is given one of them."""
    net = chain_with_loss()
    optimizers = [Adam(net.net.layers.parameters(), lr=0.01), SGD(net.net.head.parameters(), lr=0.1, momentum=0.9)]
    model = job.wrap(net, optimizers[0])
    for batch in job.batches(pairs):
        for optimizer in optimizers:
            optimizer.zero_grad()
        model(*batch).backward()
        for optimizer in optimizers:
            optimizer.step()
    job.state(model)


@equal()
def optimizer_of_two_models(job: Job) -> None:
    """One optimizer has the parameters of two wrapped models, and is given to both."""
    nets = [Chain(), Chain(3)]
    optimizer = Adam([param for net in nets for param in net.parameters()], lr=0.01)
    first, second = (job.wrap(net, optimizer) for net in nets)
    for x, target in job.batches(pairs):
        optimizer.zero_grad()
        ((second(first(x)) - target).square().sum() / max(1, len(x))).backward()
        optimizer.step()
    job.same("state", _on_first(job, optimizer.state_dict(**_whole(first))))
    job.state(first)
    job.state(second)


@refused("RaNNCError", "give it to both", settings=(STAGES,), instead="give it to both: `RaNNCModule(net, optimizer)`")
def optimizer_of_two_models_given_to_one(job: Job) -> None:
    """One optimizer has the parameters of two wrapped models, and is given to one of them."""
    nets = [Chain(), Chain(3)]
    optimizer = Adam([param for net in nets for param in net.parameters()], lr=0.01)
    first, second = job.wrap(nets[0], optimizer), job.wrap(nets[1])
    x, target = job.batch(pairs)
    F.mse_loss(second(first(x)), target).backward()
    optimizer.step()


@refused("MismatchError", "lists other parameters on rank 1", settings=(STAGES,), instead="the same on all ranks")
def different_lists(job: Job) -> None:
    """The optimizer is made of different parameters on different ranks."""
    net = chain_with_loss()
    optimizer = SGD(list(net.parameters())[job.rank :], lr=0.1)
    learn(job, job.wrap(net, optimizer), optimizer)


# Its state


@equal()
def optimizer_state_of_all_ranks(job: Job) -> None:
    """`optimizer.state_dict(from_global=True)` on all ranks, and `load_state_dict(..., from_global=True)`."""
    net = chain_with_loss()
    optimizer = adam(net)
    model = job.wrap(net, optimizer)
    _go_back(job, model, optimizer)
    job.state(model)


def _go_back(job: Job, model: nn.Module, optimizer: Optimizer) -> None:
    """Steps, between which the state is saved, and loaded again."""
    learn(job, model, optimizer)
    state = copy.deepcopy(optimizer.state_dict(**_whole(model)))
    job.same("state", _on_first(job, state))
    learn(job, model, optimizer, step=1)
    optimizer.load_state_dict(state, **_whole(model))
    learn(job, model, optimizer, step=2)


def _saved(make: Callable[[nn.Module], Optimizer]) -> dict[str, Any]:
    """A state with moments, of a plain model."""
    net = chain_with_loss()
    optimizer = make(net)
    for _ in range(2):
        optimizer.zero_grad()
        net(*pairs(4, Generator().manual_seed(5))).backward()
        optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.05
    return copy.deepcopy(optimizer.state_dict())


@equal()
def optimizer_state_before_the_first_call(job: Job) -> None:
    """`optimizer.load_state_dict(state, from_global=True)` before the first call, with a state on rank 0 alone."""
    saved = _saved(adam)
    net = chain_with_loss()
    optimizer = adam(net)
    model = job.wrap(net, optimizer)
    optimizer.load_state_dict(saved if job.rank == 0 else {}, **_whole(model))
    job.same("state", _on_first(job, optimizer.state_dict(**_whole(model))))
    for step in range(2):
        learn(job, model, optimizer, step=step)
    job.same("state", _on_first(job, optimizer.state_dict(**_whole(model))))
    job.state(model)


@equal(note="`from_global=True` is known from the optimizer's first step on")
def state_of_an_optimizer_made_later(job: Job) -> None:
    """All ranks load the whole state into an optimizer that `RaNNCModule` was not given, before its first step."""
    saved = _saved(adam)
    for called in (False, True):
        net = chain_with_loss()
        model = job.wrap(net)
        if called:
            model(*job.batch(pairs))
        optimizer = adam(model)
        optimizer.load_state_dict(copy.deepcopy(saved))
        for step in range(2):
            learn(job, model, optimizer, step=step)
        job.same("state", _on_first(job, optimizer.state_dict(**_whole(model))))
        job.state(model)


@equal()
def states_of_all_kinds(job: Job) -> None:
    """States with factors, buffers, maxima and counters are saved, loaded, and taken back by `undeploy()`."""
    makes: list[Callable[[nn.Module], Optimizer]] = [
        lambda net: AdamW(net.parameters(), lr=0.01, amsgrad=True, fused=True),
        lambda net: AdamW(net.parameters(), lr=torch.tensor(0.01)),
        lambda net: Adam(net.parameters(), lr=0.01, foreach=True),
        lambda net: Adafactor(net.parameters(), lr=0.01),
        lambda net: SGD(net.parameters(), lr=0.1, momentum=0.9, nesterov=True),
        lambda net: RMSprop(net.parameters(), lr=0.01, centered=True, momentum=0.5),
        lambda net: Adadelta(net.named_parameters(), lr=0.5),
    ]
    for make in makes:
        saved = _saved(make)
        net = chain_with_loss()
        optimizer = make(net)
        model = job.wrap(net, optimizer)
        optimizer.load_state_dict(saved)
        _go_back(job, model, optimizer)
        if isinstance(model, pyrannc.RaNNCModule):
            model.undeploy()
        job.same("taken back", optimizer.state_dict())


@refused("RaNNCError", "from_global=True", "rank [012] alone", settings=SEVERAL_STAGES, instead=WHOLE)
def state_of_a_part(job: Job) -> None:
    """`optimizer.state_dict()` where other ranks have a part of the state."""
    net = chain_with_loss()
    optimizer = adam(net)
    learn(job, job.wrap(net, optimizer), optimizer)
    job.same("state", optimizer.state_dict())


@refused("RaNNCError", "from_global=True", settings=SEVERAL_STAGES, instead="`load_state_dict(..., from_global=True)`")
def state_of_a_part_loaded(job: Job) -> None:
    """`optimizer.load_state_dict(state)` after the first call, where other ranks have a part of the state."""
    net = chain_with_loss()
    optimizer = adam(net)
    learn(job, job.wrap(net, optimizer), optimizer)
    optimizer.load_state_dict(_saved(adam))


@equal(settings=(REPLICAS, Setting((3, 3, 2), 1, 1)))
def plain_state_of_one_stage(job: Job) -> None:
    """`optimizer.state_dict()` and `load_state_dict(state)` where every rank has all parameters."""
    net = chain_with_loss()
    optimizer = adam(net)
    model = job.wrap(net, optimizer)
    learn(job, model, optimizer)
    state = copy.deepcopy(optimizer.state_dict())
    job.same("state", state)
    learn(job, model, optimizer, step=1)
    optimizer.load_state_dict(state)
    learn(job, model, optimizer, step=2)
    job.state(model)


@refused("InputError|MismatchError", "groups of", instead="make the optimizer as it was when the state was saved")
def state_of_another_optimizer(job: Job) -> None:
    """The state to load, with `from_global=True`, has other groups or numbers of parameters."""
    net = chain_with_loss()
    optimizer = adam(net)
    model = job.wrap(net, optimizer)
    learn(job, model, optimizer)
    optimizer.load_state_dict(_saved(lambda net: Adam([*net.parameters()][:3])), **_whole(model))


@refused("InputError|MismatchError", "has shape", "the parameter has", instead="load the state of this model")
def state_of_another_model(job: Job) -> None:
    """The state to load, with `from_global=True`, has other shapes."""
    net = chain_with_loss()
    optimizer = adam(net)
    model = job.wrap(net, optimizer)
    learn(job, model, optimizer)
    saved = _saved(adam)
    saved["state"][3]["exp_avg"] = torch.zeros(5)
    optimizer.load_state_dict(saved, **_whole(model))


_DIVIDED_STATE = tuple(Setting((5, 3), 1, 2, level) for level in "123")


@refused(
    "RaNNCError|NoStateError",
    "__setitem__.. cannot write|has no",
    r"state_dict\(from_global=True\)",
    settings=_DIVIDED_STATE,
    instead=f"{WHOLE}, changed on rank 0 and loaded with `from_global=True`",
)
def state_of_rows_where_it_is_divided(job: Job) -> None:
    """`optimizer.state[p]["exp_avg"][rows] = 0`, as for tokens that are renewed, where Replicas divide the state."""
    net, _, optimizer = learned(job)
    for param in net.parameters():
        optimizer.state[param]["exp_avg"][1:3] = 0


@refused("RaNNCError|NoStateError", "norm.* cannot read|has no", settings=_DIVIDED_STATE, instead=WHOLE)
def state_read_where_it_is_divided(job: Job) -> None:
    """`optimizer.state[p]["exp_avg"].norm()` where Replicas divide the state."""
    net, _, optimizer = learned(job)
    job.same("norms", [optimizer.state[param]["exp_avg"].norm() for param in net.parameters()])


@refused("NoStateError", 'has no "exp_avg"', settings=(STAGES,), instead=f"`if param in optimizer.state`, or {WHOLE}")
def state_of_other_ranks_read(job: Job) -> None:
    """`optimizer.state[p]["exp_avg"]` of every parameter, where other ranks keep the state of some."""
    net, _, optimizer = learned(job)
    for param in net.parameters():
        optimizer.state[param]["exp_avg"].zero_()


@equal((*SEVERAL_STAGES, REPLICAS, *_DIVIDED_STATE, Setting((3, 3, 2), 2, 2, "3")))
def state_changed_in_place(job: Job) -> None:
    """All that `optimizer.state` has is scaled, copied and put back (`for state in optimizer.state.values(): ...`)."""
    net, model, optimizer = learned(job)
    saved = {param: copy.deepcopy(state) for param, state in optimizer.state.items()}
    for state in optimizer.state.values():
        state["exp_avg"].mul_(0.5)
        state["exp_avg_sq"].zero_()
        state["step"] = torch.tensor(7.0)
    learn(job, model, optimizer, step=1)
    for param in net.parameters():
        if param in optimizer.state:
            optimizer.state[param] = saved[param]
            assert optimizer.state[param]["exp_avg"].shape == param.shape
        assert not len(optimizer.state[param]) or "exp_avg_sq" in optimizer.state[param]
    learn(job, model, optimizer, step=2)
    for param, state in optimizer.state.items():
        state.update(exp_avg=torch.ones(param.shape), exp_avg_sq=saved[param]["exp_avg_sq"].clone())
    learn(job, model, optimizer, step=3)
    for param, state in list(optimizer.state.items()):
        moved = {key: value.cpu().to(device=param.device) for key, value in state.items()}
        optimizer.state[param] = type(state)({**moved, "step": torch.tensor(3.0)})
    job.same("state", _on_first(job, optimizer.state_dict(**_whole(model))))
    learn(job, model, optimizer, step=4)
    job.same("state", _on_first(job, optimizer.state_dict(**_whole(model))))
    job.state(model)


@equal((REPLICAS, *_DIVIDED_STATE))
def state_cleared_by_kind(job: Job) -> None:
    """Momentum is cleared where the state is a dict, and has tensors (`isinstance(state, dict)`, `torch.is_tensor`)."""
    _, model, optimizer = learned(job)
    for state in [state for state in optimizer.state.values() if isinstance(state, dict)]:
        for value in filter(torch.is_tensor, copy.copy(state).values()):
            value.zero_()
    learn(job, model, optimizer, step=1)
    job.state(model)


@equal((REPLICAS, _DIVIDED_STATE[0]))
def slow_weights_in_the_state(job: Job) -> None:
    """The script keeps slow weights in `optimizer.state[p]["slow"]`, as Lookahead does, where parameters are whole."""
    net = chain_with_loss()
    optimizer = adam(net)
    model = job.wrap(net, optimizer)
    for step in range(4):
        learn(job, model, optimizer, step=step)
        for param in net.parameters():
            state = optimizer.state[param]
            if "slow" not in state:
                state["slow"] = param.detach().clone()
            elif step % 2:
                state["slow"].add_(param.detach() - state["slow"], alpha=0.5)
                param.data.copy_(state["slow"])
    job.same("state", _on_first(job, optimizer.state_dict(**_whole(model))))
    job.state(model)


# Optimizers that take sparse gradients

_DENSE = "SGD or Adagrad, which do the same with dense gradients, or Adam"


def _sparse() -> Returns:
    table = nn.Embedding(VOCABULARY, WIDTH, sparse=True)
    return Returns(
        nn.Sequential(table, nn.Flatten(), nn.Linear(TOKENS * WIDTH, WIDTH)), lambda y, target: y.square().mean()
    )


@refused("RaNNCError", "SparseAdam takes sparse gradients", "use SGD or Adagrad", instead=_DENSE)
def adam_of_sparse_gradients(job: Job) -> None:
    """`SparseAdam` for an `nn.Embedding(sparse=True)` of the model."""
    net = _sparse()
    learn(job, job.wrap(net, SparseAdam(net.net[0].parameters())), SGD(net.net[2].parameters()), padded)


@refused("RaNNCError", "SparseAdam takes sparse gradients", "use SGD or Adagrad", instead=_DENSE)
def adam_of_sparse_gradients_not_given(job: Job) -> None:
    """The same as a further optimizer, that `RaNNCModule` was not given."""
    net = _sparse()
    further = SparseAdam(net.net[0].parameters())
    job.wrap(net, SGD(net.net[2].parameters(), lr=0.1))(*job.batch(padded)).backward()
    further.step()


# Optimizers that look at all parameters


class ByGlobalNorm(Optimizer):
    """Divides gradients by the norm of all of them."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        params = [param for group in self.param_groups for param in group["params"] if param.grad is not None]
        norm = nn.utils.get_total_norm([param.grad for param in params]).clamp(min=1.0)
        for param in params:
            param -= self.param_groups[0]["lr"] * param.grad / norm


def _by_global_norm(job: Job) -> None:
    net = chain_with_loss()
    optimizer = ByGlobalNorm(net.parameters(), lr=0.1)
    model = job.wrap(net, optimizer)
    for step in range(2):
        learn(job, model, optimizer, step=step)
    job.state(model)


@refused(
    "RaNNCError",
    "depends on the gradients of others",
    "by_parameter = True",
    settings=(STAGES,),
    instead="force one Stage: `RANNC_PARTITION_NUM=1`; of one that does no such thing, set `optimizer.by_parameter`",
)
def optimizer_by_global_norm(job: Job) -> None:
    """An optimizer whose updates depend on the norm of all gradients, over several Stages."""
    _by_global_norm(job)


@equal(settings=(REPLICAS,))
def optimizer_by_global_norm_in_one_stage(job: Job) -> None:
    """The same optimizer, in a Plan of one Stage."""
    _by_global_norm(job)


@refused(
    "RaNNCError",
    "depends on the gradients of others",
    "RANNC_PARTITION_NUM=1",
    settings=SEVERAL_STAGES,
    instead="force one Stage: `RANNC_PARTITION_NUM=1`",
)
def optimizer_by_global_norm_not_given(job: Job) -> None:
    """The same optimizer over several Stages, and `RaNNCModule` was not given it."""
    net = chain_with_loss()
    model = job.wrap(net)
    learn(job, model, ByGlobalNorm(net.parameters(), lr=0.1))


def _lbfgs(job: Job) -> None:
    net = chain_with_loss()
    optimizer = LBFGS(net.parameters(), lr=0.1, max_iter=4)
    model = job.wrap(net, optimizer)
    for batch in job.batches(pairs):

        def closure(batch: Any = batch) -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = model(*batch)
            loss.backward()
            return loss

        job.same("loss", optimizer.step(closure))
    job.state(model)


@refused("RaNNCError", "LBFGS", "closure", settings=(STAGES,), instead="force one Stage: `RANNC_PARTITION_NUM=1`")
def lbfgs(job: Job) -> None:
    """`torch.optim.LBFGS` over several Stages."""
    _lbfgs(job)


@equal(settings=(REPLICAS,))
def lbfgs_in_one_stage(job: Job) -> None:
    """`torch.optim.LBFGS` in a Plan of one Stage."""
    _lbfgs(job)


@equal(settings=(STAGES,))
def optimizer_said_to_be_by_parameter(job: Job) -> None:
    """An optimizer that cannot be tried, of which the script says that it treats each parameter by itself."""

    class Picky(SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            assert self.param_groups[0]["params"][0].shape[-1] == WIDTH
            super().step()

    net = chain_with_loss()
    optimizer = Picky(net.parameters(), lr=0.1)
    optimizer.by_parameter = True  # type: ignore[attr-defined]
    model = job.wrap(net, optimizer)
    learn(job, model, optimizer)
    job.state(model)


class _CountsInGroups(Optimizer):
    """Adam that counts its steps in each group that has parameters, as fused ones do."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            if group["params"]:
                group["step"] = group.get("step", 0) + 1
            for param in group["params"]:
                if param.grad is not None:
                    mean = self.state[param].setdefault("mean", torch.zeros_like(param))
                    mean.lerp_(param.grad, 0.1)
                    param.sub_(mean, alpha=group["lr"] / (1 - 0.9 ** group["step"]))


def _counting(net: Returns) -> Optimizer:
    first = list(net.net.layers[0].parameters())
    ids = set(map(id, first))
    rest = [param for param in net.parameters() if id(param) not in ids]
    return _CountsInGroups([{"params": first}, {"params": rest[:-2]}, {"params": rest[-2:]}])


@equal(settings=(*SEVERAL_STAGES, REPLICAS))
def steps_counted_in_groups(job: Job) -> None:
    """The optimizer counts its steps in `group["step"]`, not where a group is empty; it is saved and loaded."""
    net = chain_with_loss()
    optimizer = _counting(net)
    model = job.wrap(net, optimizer)
    for step in range(3):
        learn(job, model, optimizer, step=step)
    saved = _on_first(job, copy.deepcopy(optimizer.state_dict(**_whole(model))))
    job.same("steps", [group["step"] for group in saved["param_groups"]])
    for group in optimizer.param_groups:
        group["step"] = 0
    optimizer.load_state_dict(saved, **_whole(model))
    for step in range(3, 5):
        learn(job, model, optimizer, step=step)
    job.state(model)
