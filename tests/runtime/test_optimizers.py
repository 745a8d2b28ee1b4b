"""What becomes of an optimizer beside the table of the contract: state in flight, refusals, overflow."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import ASGD, SGD, Adadelta, Adafactor, Adagrad, Adam, AdamW, NAdam, Optimizer, RAdam, RMSprop, Rprop

import pyrannc
from pyrannc.core.buckets import BucketFacts, BucketsFacts
from pyrannc.errors import InputError, MismatchError, RaNNCError
from pyrannc.job import process
from pyrannc.store.buckets import SharedParam, SumTypes, own_buckets
from pyrannc.store.by_parameter import refuse_across
from pyrannc.store.carry import Route, carry
from pyrannc.store.gradient_set import GradientSet
from pyrannc.store.overflow import Overflow
from tests.ranks import RankPool

from .equivalence import Differences, double_precision

Ranks = Callable[[int], RankPool]
HOST = torch.device("cpu")


# State in flight


def structures() -> dict[int, Any]:
    weights = torch.arange(12.0).view(3, 4)
    return {
        0: {"step": torch.tensor(3.0), "exp_avg": weights, "none": None, "steps": 7},
        1: {"nested": [torch.ones(2, dtype=torch.bool), {"x": torch.zeros(0)}], "transposed": weights.t()},
        3: {"bytes": torch.tensor([1, 2, 3], dtype=torch.uint8), "complex": torch.ones(2, dtype=torch.complex128)},
        4: "no tensor at all",
        5: {"gaps": weights[:, ::2], "half": torch.ones(3, dtype=torch.bfloat16)},
    }


ROUTES = [
    Route(0, 0, (1, 2)),
    Route(1, 2, (0,)),
    Route(2, 1, (0, 1, 2)),
    Route(3, 1, (0, 1, 2)),
    Route(4, 2, (1,)),
    Route(5, 1, (1,)),
]


def carried() -> list[str]:
    process.ensure_process_group()
    rank, differences = process.get_rank(), Differences()
    own = structures()
    found = carry(own, ROUTES, HOST)
    expected = {route.key: own[route.key] for route in ROUTES if rank in route.receivers and route.key in own}
    differences.compare("what came", found, expected)
    if rank in (0, 2):
        got = found[1 if rank == 0 else 0]["transposed" if rank == 0 else "exp_avg"]
        right = own[1 if rank == 0 else 0]["transposed" if rank == 0 else "exp_avg"]
        differences.compare("strides", got.stride(), right.stride())
    if rank == 1:
        found[5]["half"].zero_()
        differences.demand(bool(own[5]["half"].all()), "what came has memory of its own")
    try:
        carry({0: torch.eye(2).to_sparse()} if rank == 0 else {}, ROUTES, HOST)
        differences.demand(False, "sparse tensors are refused")
    except (InputError, MismatchError) as error:
        differences.demand("RANNC_PARTITION_NUM=1" in str(error), str(error))
    return differences.found


def test_structures_go_to_those_who_need_them(ranks: Ranks) -> None:
    assert ranks(3).run(carried) == [[], [], []]


# Overflow


def _with_gradient(grad: Tensor) -> nn.Parameter:
    param = nn.Parameter(torch.zeros_like(grad))
    param.grad = grad
    return param


def overflowed() -> list[list[bool]]:
    """What is told of three gradients that only two ranks have."""
    process.ensure_process_group()
    rank = process.get_rank()

    def told(*bad: int) -> list[bool]:
        grads = [torch.ones(2), torch.ones(2, 1), torch.ones(3)]
        for number in bad:
            if rank == 1:
                grads[number].view(-1)[1] = float("nan")
        with double_precision():
            params = [None if rank == 2 else _with_gradient(grad) for grad in grads]
            flags: list[bool] = (
                Overflow().share([None, *params], torch.zeros(4, dtype=torch.float32))[0].any(0).tolist()
            )
        return flags

    return [told(), told(0), told(1), told(0, 1), told(0, 2)]


def test_overflow_of_one_rank_is_that_of_all(ranks: Ranks) -> None:
    told = [[flag == "1" for flag in flags] for flags in ("0000", "0100", "0010", "0110", "0101")]
    assert ranks(3).run(overflowed) == [told] * 3


def test_what_lies_between_buckets_is_finite() -> None:
    params = [SharedParam(f"p{numel}", nn.Parameter(torch.ones(numel)), (0,)) for numel in (3, 64, 5)]
    facts = BucketsFacts(
        groups=((0,),), buckets=tuple(BucketFacts(0, (place,), "none", (), None) for place in range(3))
    )
    torch.use_deterministic_algorithms(True)
    try:
        # What is allocated and not written is NaN then.
        made = GradientSet(
            own_buckets(facts, [shared.name for shared in params], params, SumTypes("float32", False), HOST)
        )
    finally:
        torch.use_deterministic_algorithms(False)
    made.begin()
    for index in range(3):
        assert made.bucket(index).isfinite().all()
    (flat,) = made.flats.values()
    assert flat.numel() > 3 + 64 + 5
    assert flat.isfinite().all()


def half_gradients(numel: int) -> GradientSet:
    """Those of a parameter in bfloat16 on two ranks, of several microbatches, summed over ranks in its type."""
    param = nn.Parameter(torch.ones(numel, dtype=torch.bfloat16))
    facts = BucketsFacts(groups=((0, 1),), buckets=(BucketFacts(0, (0,), "none", (), None),))
    shared = [SharedParam("p", param, (0, 1))]
    made = GradientSet(own_buckets(facts, ["p"], shared, SumTypes("param", True), HOST))
    made.begin()
    return made


def test_a_sum_over_ranks_in_the_parameters_type_takes_no_memory_of_its_own() -> None:
    made = half_gradients(64)
    made.put(0, [0], [torch.full((64,), 1 + 2**-10)])
    message = made.message(0)
    assert (made.bucket(0).dtype, message.dtype) == (torch.float32, torch.bfloat16)
    assert message.data_ptr() == made.views["p"].data_ptr()
    # What is added up keeps its digits.
    assert made.bucket(0).eq(1 + 2**-10).all()
    assert message.eq(1).all()


def test_what_a_set_takes_back_is_what_it_has_shown() -> None:
    made = half_gradients(4)
    made.put(0, [0], [torch.ones(4)])
    made.settle()
    # As a script may, which holds it.
    made.views["p"].mul_(2)
    held = made.copy()
    made.begin()
    made.put(0, [0], [torch.full((4,), 5.0)])
    made.message(0)
    made.take(held)
    assert made.views["p"].tolist() == [2.0] * 4
    assert made.bucket(0).tolist() == [1.0] * 4


# Whether an optimizer treats each parameter by itself

BY_PARAMETER: list[Callable[[list[nn.Parameter]], Optimizer]] = [
    lambda params: SGD(params, lr=0.1, momentum=0.9),
    lambda params: SGD(params, lr=0.1, momentum=0.9, foreach=True),
    lambda params: Adam(params, fused=True),
    lambda params: Adam(params, amsgrad=True),
    lambda params: AdamW([{"params": params[:1]}, {"params": params[1:], "lr": 0.0}]),
    lambda params: Adafactor(params),
    lambda params: RMSprop(params, centered=True),
    lambda params: Adagrad(params),
    lambda params: Adadelta(params),
    lambda params: NAdam(params),
    lambda params: RAdam(params),
    lambda params: ASGD(params),
    lambda params: Rprop(params),
    lambda params: torch.optim.Muon(params[:1] * 1),
]


def params() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(4, 5)), nn.Parameter(torch.ones(5))]


@pytest.mark.parametrize("make", BY_PARAMETER)
def test_optimizers_of_torch_are_divided(make: Callable[[list[nn.Parameter]], Optimizer]) -> None:
    optimizer = make(params())
    before = copy.deepcopy(optimizer.state_dict())
    drawn = torch.get_rng_state()
    refuse_across(optimizer, 2, HOST)
    assert repr(optimizer.state_dict()) == repr(before), "the given one is left alone"
    assert torch.equal(torch.get_rng_state(), drawn)


class Global(SGD):
    """Its rate is that of the mean gradient of all parameters so far."""

    seen = 0.0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        every = [param for group in self.param_groups for param in group["params"]]
        self.seen += sum(float(param.grad.abs().mean()) for param in every) / len(every)
        for param in every:
            param.data -= param.grad / (1 + self.seen)


class Noisy(SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for group in self.param_groups:
            for param in group["params"]:
                param.data += 0.01 * torch.randn_like(param)


class Seeded(SGD):
    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)
        self.generator = torch.Generator()


class Holder(SGD):
    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)
        self.kept = {"of": [self.param_groups[0]["params"][0]]}


class Around(Optimizer):
    def __init__(self, inner: Optimizer) -> None:
        super().__init__([nn.Parameter(torch.ones(1))], {})
        self.inner = inner
        self.param_groups = inner.param_groups

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step()


class Needs(SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is not None, "a closure"


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: torch.optim.LBFGS(params()), "its step.. needs a closure"),
        (lambda: Global(params(), lr=0.1), "depends on the gradients of others"),
        (lambda: Noisy(params(), lr=0.1), "draws random numbers"),
        (lambda: Seeded(params()), "draws random numbers"),
        (lambda: Holder(params()), 'keeps parameters in its attribute "kept"'),
        (lambda: Around(SGD(params(), lr=0.1)), 'another optimizer, in its attribute "inner"'),
        (lambda: Needs(params(), lr=0.1), "failed .AssertionError: a closure"),
    ],
)
def test_optimizers_that_ranks_would_step_otherwise_are_refused(make: Callable[[], Optimizer], text: str) -> None:
    optimizer = make()
    with pytest.raises(RaNNCError, match=text):
        refuse_across(optimizer, 2, HOST)
    refuse_across(optimizer, 1, HOST)
    optimizer.by_parameter = True  # type: ignore[attr-defined]
    refuse_across(optimizer, 2, HOST)


def test_an_optimizer_may_say_that_it_looks_at_all_parameters() -> None:
    optimizer = SGD(params(), lr=0.1)
    optimizer.by_parameter = False  # type: ignore[attr-defined]
    with pytest.raises(RaNNCError, match="by_parameter is False"):
        refuse_across(optimizer, 2, HOST)


def test_what_is_no_optimizer_is_refused() -> None:
    with pytest.raises(RaNNCError, match="the optimizer is a list, but"):
        pyrannc.RaNNCModule(nn.Linear(2, 2), [SGD(params(), lr=0.1)])  # type: ignore[arg-type]


ONE_STAGE = {"RANNC_PARTITION_NUM": "1"}


class TwoLosses(nn.Module):
    """Which of them gradients come back for is known in the backward only."""

    def __init__(self, named: str) -> None:
        super().__init__()
        self.add_module(named, nn.ModuleList(nn.Linear(4, 4) for _ in range(6)))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        (layers,) = self.children()
        assert isinstance(layers, nn.ModuleList)
        for layer in layers:
            x = layer(x).tanh()
        return x.square().mean(), x.exp().mean()


def order_of_hooks(named: str) -> list[int]:
    """Places of the parameters in the order in which their hooks have run."""
    torch.manual_seed(0)
    model, seen = TwoLosses(named), list[int]()
    for place, param in enumerate(model.parameters()):
        param.register_hook(lambda _, place=place: seen.append(place))
    wrapped = pyrannc.RaNNCModule(model, SGD(model.parameters(), lr=0.1))
    sum(wrapped(torch.ones(2, 4))).backward()
    return seen


def test_hooks_run_in_an_order_that_all_ranks_have(ranks: Ranks) -> None:
    """They may sum over ranks. What Python makes of names, as in a set, may differ from rank to rank."""
    found = [
        order for name in ("layers", "blocks", "parts") for order in ranks(2).run(order_of_hooks, name, env=ONE_STAGE)
    ]
    assert found == [found[0]] * 6
    assert sorted(found[0]) == list(range(12))
