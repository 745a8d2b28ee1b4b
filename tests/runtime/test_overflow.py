"""Of several optimizers, or models, under one ``GradScaler`` those step whose own gradients are finite on all ranks."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
from torch import Generator, Tensor, nn
from torch.optim import SGD, Adam, Optimizer

import pyrannc
from pyrannc.store.spread_tensor import SpreadTensor
from pyrannc.store.unsummed import mark_summed, mark_unsummed
from tests.interpreter import interpreted
from tests.ranks import RankPool

from .equivalence import local_slice
from .plans import cut_plan, divided, graph_of, possible_cuts


class Layers(nn.Module):
    """Each of three layers has an input of its own, and so gradients that overflow by themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 9) for _ in range(3)).double()

    def forward(self, x: Tensor) -> Tensor:
        found = x.new_ones(len(x), 9)
        for layer, own_input in zip(self.layers, x.unbind(1), strict=True):
            found = (found + layer(own_input)).tanh()
        return found


class Blocks(Layers):
    """Their loss is computed inside."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).square().mean()


class Gained(nn.Module):
    """Each of three layers has numbers of its own, whose gradients alone overflow where the first input is huge."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(5, 9) for _ in range(3)).double()
        self.gains = nn.ParameterList(torch.zeros(9, dtype=torch.float64) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        found = x.new_ones(len(x), 9)
        for layer, gain, own_input in zip(self.layers, self.gains, x.unbind(1), strict=True):
            huge = (own_input[:, :1] / 1e300).trunc() * 1e300
            found = (found + layer(own_input[:, 1:]) + gain * 1e9 * huge).tanh()
        return found.square().mean()


PlanOf: TypeAlias = Callable[[nn.Module], str]
"""A plan file for a module of :class:`Layers`."""


def write_plan(module: nn.Module, folder: Path, sharding: str | None) -> str:
    """A plan file with a Stage on each of two ranks, or with one whose Replicas divide so much."""
    graph = graph_of(module, (torch.ones(8, 3, 6, dtype=torch.float64),), {}, 8)
    if sharding is None:
        cuts = possible_cuts(graph)
        plan = cut_plan(graph, [cuts[len(cuts) // 2]], [[0], [1]], 2, 8)
    else:
        plan = divided(cut_plan(graph, [], [[0, 1]], 2, 8), sharding)
    plan.write(folder / "plan.json")
    return str(folder / "plan.json")


@pytest.fixture(params=[None, "gradients", "params"])
def plan_of(request: pytest.FixtureRequest, tmp_path: Path) -> PlanOf:
    return partial(write_plan, folder=tmp_path, sharding=request.param)


Wrap: TypeAlias = Callable[[nn.Module, "Optimizer | None"], nn.Module]
Batch: TypeAlias = Callable[..., Tensor]
"""Takes a seed, the layer whose gradients are to overflow, and the number that is to do that."""
Steps: TypeAlias = "Iterator[tuple[Tensor, Sequence[Optimizer]]]"
"""Losses, each with the optimizers that step after its backward; none where further backwards come first."""
Script: TypeAlias = "Callable[[Wrap, Batch], Steps]"


def _of_one_optimizer(wrap: Wrap, batch: Batch) -> Steps:
    """What most scripts are."""
    net = Blocks()
    optimizer = Adam(net.parameters(), lr=0.01)
    wrapped = wrap(net, optimizer)
    for step in range(8):
        yield wrapped(batch(step, step // 2 % 3 if step % 2 else None)), [optimizer]


def _of_one_optimizer_of_three(wrap: Wrap, batch: Batch, given: int | None) -> Steps:
    """Each layer has an optimizer, of which the model is given one or none."""
    net = Blocks()
    optimizers = [Adam(layer.parameters(), lr=0.01) for layer in net.layers]
    wrapped = wrap(net, None if given is None else optimizers[given])
    for step in range(8):
        yield wrapped(batch(step, step // 2 % 3 if step % 2 else None)), optimizers


def _of_one_model_of_two(wrap: Wrap, batch: Batch) -> Steps:
    """The backwards of both models come before the steps of both."""
    nets = [Blocks(), Blocks()]
    optimizers = [Adam(net.parameters(), lr=0.01) for net in nets]
    wrapped = [wrap(net, optimizer) for net, optimizer in zip(nets, optimizers, strict=True)]
    for step in range(6):
        yield wrapped[0](batch(step, 0 if step == 2 else None)), []
        yield wrapped[1](batch(step, 1 if step == 3 else None)), optimizers


def _of_one_model_of_an_optimizer(wrap: Wrap, batch: Batch) -> Steps:
    """The gradients of a model that is not called again have overflown."""
    nets = [Blocks(), Blocks()]
    optimizer = Adam([param for net in nets for param in net.parameters()], lr=0.01)
    wrapped = [wrap(net, optimizer) for net in nets]
    for step in range(5):
        yield wrapped[0](batch(step)), [optimizer] if step > 1 else []
        if step < 2:
            yield wrapped[1](batch(step, 0 if step == 1 else None)), [optimizer]


def _of_a_head_alone(wrap: Wrap, batch: Batch) -> Steps:
    """A head beside the model is trained on alone, after the model's gradients have overflown."""
    net, head = Blocks(), nn.Linear(6, 1).double()
    optimizer = Adam([*net.parameters(), *head.parameters()], lr=0.01)
    wrapped = wrap(net, optimizer)
    for step in range(5):
        x = torch.ones(4, 6, dtype=torch.float64)
        yield head(x).square().mean() if step > 1 else wrapped(batch(step, 0 if step == 1 else None)), [optimizer]


def _large(wrap: Wrap, batch: Batch) -> Steps:
    """Gradients in float64 that are infinite in float32."""
    net = Blocks()
    optimizers = [SGD(layer.parameters(), lr=1e-60) for layer in net.layers]
    wrapped = wrap(net, None)
    for step in range(3):
        yield wrapped(batch(step)) * (1e50 if step == 1 else 1.0), optimizers


def _cleaned(wrap: Wrap, batch: Batch, *, given: bool) -> Steps:
    """The script makes gradients finite before the scaler looks."""
    net = Blocks()
    optimizer = SGD(net.parameters(), lr=0.01)
    wrapped = wrap(net, optimizer if given else None)
    for step in range(4):
        yield wrapped(batch(step, 0 if step == 1 else None)), []
        for param in net.parameters():
            assert param.grad is not None
            param.grad.nan_to_num_(0.0, 0.0, 0.0)
        yield torch.zeros((), requires_grad=True), [optimizer]


Change: TypeAlias = Callable[[Sequence[nn.Parameter]], None]
"""What a script does to gradients of parameters."""


def _changed(wrap: Wrap, batch: Batch, *, change: Change) -> Steps:
    """The script changes the gradients before the scaler looks, also where those of a layer's numbers are infinite."""
    net = Gained()
    optimizers = [SGD([*layer.parameters(), gain], lr=0.01) for layer, gain in zip(net.layers, net.gains, strict=True)]
    wrapped = wrap(net, None)
    for step in range(7):
        yield wrapped(batch(step, step // 2 if step % 2 else None, 1e308)), []
        change(list(net.parameters()))
        yield torch.zeros((), requires_grad=True), optimizers


def _changed_as_one(wrap: Wrap, batch: Batch, *, change: Change) -> Steps:
    """As above, and the model is given one optimizer of all."""
    net = Gained()
    optimizer = SGD(net.parameters(), lr=0.01)
    wrapped = wrap(net, optimizer)
    for step in range(7):
        yield wrapped(batch(step, step // 2 if step % 2 else None, 1e308)), []
        change(list(net.parameters()))
        yield torch.zeros((), requires_grad=True), [optimizer]


def _to_each(change: Callable[[Tensor], object], params: Sequence[nn.Parameter]) -> None:
    for param in params:
        assert param.grad is not None
        change(param.grad)


def _clip(params: Sequence[nn.Parameter]) -> None:
    nn.utils.clip_grad_value_(params, 3.0)


def _clip_data(grad: Tensor) -> None:
    grad.mul_(torch.tensor(0.5, dtype=grad.dtype)).data.clamp_(-1.0, 1.0)


def _fill(grad: Tensor) -> None:
    grad *= 0.5
    grad.fill_(0.0)


def _replace(grad: Tensor) -> None:
    grad.nan_to_num_(0.0, 1.0, 1.0)


def _copy(grad: Tensor) -> None:
    grad.copy_(torch.zeros(grad.shape, dtype=grad.dtype))


def _clip_other_side(grad: Tensor) -> None:
    grad.clamp_(min=-1e3).neg_().clamp_(max=1e3).neg_()


def _scale(grad: Tensor) -> None:
    grad.div_(2.0).add_(torch.zeros(grad.shape, dtype=grad.dtype))


def _change_copy(grad: Tensor) -> None:
    copy = grad.clone() if isinstance(grad, SpreadTensor) else grad * 1
    copy.zero_()


def _spoil(grad: Tensor) -> None:
    """Of what was finite nothing is left."""
    grad.clamp_(-1.0, 1.0).div_(0.0)


MADE_FINITE: list[Change] = [_clip, *(partial(_to_each, each) for each in (_clip_data, _fill, _replace, _copy))]
LEFT: list[Change] = [partial(_to_each, each) for each in (_clip_other_side, _scale, _change_copy)]
"""What leaves something infinite."""
SPOILT: Change = partial(_to_each, _spoil)


def _frozen(wrap: Wrap, batch: Batch) -> Steps:
    """A parameter is frozen between its backward and the step."""
    net = Blocks()
    optimizers = [Adam(layer.parameters(), lr=0.01) for layer in net.layers]
    wrapped = wrap(net, None)
    for step in range(4):
        yield wrapped(batch(step, 0 if step == 1 else None)), []
        if step == 1:
            net.layers[0].weight.requires_grad_(False)
        yield torch.zeros((), requires_grad=True), optimizers


def _clipped_by_norm(wrap: Wrap, batch: Batch) -> Steps:
    """Gradients of one layer are NaN, so the norm of all is, and all become NaN by it."""
    net = Blocks()
    optimizers = [SGD(layer.parameters(), lr=0.01) for layer in net.layers]
    wrapped: Any = wrap(net, None)
    for step in range(5):
        yield wrapped(batch(step, step // 2 if step % 2 else None)), []
        clip = getattr(wrapped, "clip_grad_norm", partial(nn.utils.clip_grad_norm_, net.parameters()))
        clip(1.0)
        yield torch.zeros((), requires_grad=True), optimizers


def _accumulated(wrap: Wrap, batch: Batch) -> Steps:
    """The first of two backwards overflows; an optimizer takes up a layer between backward and step."""
    net = Blocks()
    optimizers: list[Optimizer] = [Adam(layer.parameters(), lr=0.01, fused=True) for layer in net.layers[:2]]
    wrapped = wrap(net, optimizers[0])
    for step in range(6):
        yield wrapped(batch(2 * step, step % 3 if step % 2 else None)), []
        yield wrapped(batch(2 * step + 1)), []
        if step == 3:
            optimizers[0].add_param_group({"params": list(net.layers[2].parameters())})
        yield torch.zeros((), requires_grad=True), optimizers


def _moved(wrap: Wrap, batch: Batch) -> Steps:
    """The script moves layers from the model's optimizer to another one, by hand."""
    net = Blocks()
    optimizer = Adam(net.parameters(), lr=0.01)
    wrapped = wrap(net, optimizer)
    yield wrapped(batch(0)), [optimizer]
    moved = [param for layer in net.layers[1:] for param in layer.parameters()]
    left = list(net.layers[0].parameters())
    optimizer.param_groups[0]["params"] = left
    optimizers = [optimizer, SGD(moved, lr=0.01)]
    for step in range(1, 7):
        yield wrapped(batch(step, step // 2 % 3 if step % 2 else None)), optimizers


def _moved_late(wrap: Wrap, batch: Batch) -> Steps:
    """Layers are moved between a backward and its step, of which those that stay are finite."""
    net = Blocks()
    optimizer = SGD(net.parameters(), lr=0.01)
    wrapped = wrap(net, optimizer)
    yield wrapped(batch(0)), [optimizer]
    yield wrapped(batch(1, 2)), []
    moved = [param for layer in net.layers[1:] for param in layer.parameters()]
    optimizer.param_groups[0]["params"] = list(net.layers[0].parameters())
    yield torch.zeros((), requires_grad=True), [optimizer, SGD(moved, lr=0.01)]


def _partly_frozen(wrap: Wrap, batch: Batch, *, frozen: Sequence[int]) -> Steps:
    """What is frozen is listed too, and one rank may hold all that trains."""
    net = Blocks()
    for number in frozen:
        net.layers[number].requires_grad_(False)
    trained = next(number for number in range(3) if number not in frozen)
    optimizer = SGD(net.parameters(), lr=0.01)
    wrapped = wrap(net, optimizer)
    for step in range(8):
        yield wrapped(batch(step, trained if step % 2 else None)), [optimizer]


def _of_own_lists(wrap: Wrap, batch: Batch) -> Steps:
    """The script leaves each rank's optimizer what that rank holds."""
    net = Blocks()
    optimizer = SGD(net.parameters(), lr=0.01)
    wrapped = wrap(net, optimizer)
    yield wrapped(batch(0)), [optimizer]
    if isinstance(wrapped, pyrannc.RaNNCModule):
        optimizer.param_groups[0]["params"] = [param for _, param in wrapped.named_parameters(from_global=False)]
    for step in range(1, 6):
        yield wrapped(batch(step, step // 2 % 3 if step % 2 else None)), [optimizer]


def _with_a_penalty(wrap: Wrap, batch: Batch) -> Steps:
    """Parameters get gradients outside of the model, too, in the same backward and behind those of the model."""
    net = Blocks()
    optimizer = Adam(net.parameters(), lr=0.01)
    wrapped = wrap(net, optimizer)
    yield wrapped(batch(0)), [optimizer]
    for step in range(1, 8):
        # What was computed last is differentiated first.
        penalty = torch.stack([param.square().sum() for param in net.parameters()]).sum()
        yield wrapped(batch(step, step // 2 % 3 if step % 2 else None)) + 0.01 * penalty, [optimizer]


OVERFLOWING: list[Script] = [
    _of_one_optimizer,
    *(partial(_of_one_optimizer_of_three, given=given) for given in (None, 0, 1, 2)),
    _of_one_model_of_two,
    _of_one_model_of_an_optimizer,
    _of_a_head_alone,
    _frozen,
    _clipped_by_norm,
    _accumulated,
    _moved_late,
    _of_own_lists,
    *(partial(_partly_frozen, frozen=frozen) for frozen in ((0,), (2,), (0, 1), (1, 2))),
]
FINITE: list[Script] = [_large, partial(_cleaned, given=False), partial(_cleaned, given=True)]
"""Those whose gradients are finite when the scaler looks."""


def scaled(
    steps: Script, file: str | None, *, module: bool, init_scale: float = 1024.0, growth_interval: int = 2
) -> tuple[list[float], list[Tensor]]:
    """Scales, and parameters in the end."""
    torch.manual_seed(0)
    nets: list[Any] = []
    scaler, scales = torch.amp.GradScaler("cpu", init_scale=init_scale, growth_interval=growth_interval), []

    def wrap(net: nn.Module, optimizer: Optimizer | None) -> nn.Module:
        nets.append(pyrannc.RaNNCModule(net, optimizer, load_deployment=file) if module else net)
        wrapped: nn.Module = nets[-1]
        return wrapped

    def batch(seed: int, spoilt: int | None = None, by: float = math.inf) -> Tensor:
        x = torch.randn(8, 3, 6, generator=Generator().manual_seed(seed), dtype=torch.float64)
        if spoilt is not None:
            x[5, spoilt, 0] = by
        return x[local_slice((4, 4))] if module else x

    for loss, optimizers in steps(wrap, batch):
        scaler.scale(loss).backward()
        for optimizer in optimizers:
            scaler.step(optimizer)
            optimizer.zero_grad(set_to_none=steps is not _accumulated)
        if optimizers:
            scaler.update()
            scales.append(scaler.get_scale())
    for net in nets if module else []:
        layers = {name.split(".")[1] for name, _ in net.named_parameters(from_global=False)}
        assert 0 < len(layers) < (3 if len(net.plan["stages"]) > 1 else 4), "both Stages have layers"
    return scales, [param for net in nets for param in net.state_dict().values()]


def judged(
    ranks: Callable[[int], RankPool], plan_of: PlanOf, steps: Script, module: nn.Module | None = None, **scaler: Any
) -> list[float]:
    """The scales, where scales and parameters are those of one process."""
    module = Blocks() if module is None else module
    for number in getattr(steps, "keywords", {}).get("frozen", ()):
        module.layers[number].requires_grad_(False)  # type: ignore[index, union-attr]  # it has layers
    scales, right = scaled(steps, None, module=False, **scaler)
    found = ranks(2).run(partial(scaled, module=True, **scaler), steps, plan_of(module))
    assert [scales_of_rank for scales_of_rank, _ in found] == [scales] * 2
    for param, expected in zip(found[0][1], right, strict=True):
        torch.testing.assert_close(param, expected, rtol=1e-9, atol=1e-12)
    return scales


@pytest.mark.parametrize("steps", [*OVERFLOWING, *FINITE])
def test_a_scaler_judges_what_an_optimizer_has_to_step(
    ranks: Callable[[int], RankPool], plan_of: PlanOf, steps: Script
) -> None:
    scales = judged(ranks, plan_of, steps)
    assert any(after < before for before, after in pairwise(scales)) == (steps in OVERFLOWING)


@pytest.mark.parametrize("steps", [*OVERFLOWING[:5], *OVERFLOWING[-4:]])
def test_a_scaler_judges_where_its_scale_is_1(ranks: Callable[[int], RankPool], plan_of: PlanOf, steps: Script) -> None:
    # It doubles at each step, and is halved where gradients overflow.
    assert judged(ranks, plan_of, steps, init_scale=0.5, growth_interval=1) == [1.0, 0.5] * 4


def test_a_scaler_judges_gradients_of_the_model_with_those_beside_it(
    ranks: Callable[[int], RankPool], tmp_path: Path
) -> None:
    scales = judged(ranks, partial(write_plan, folder=tmp_path, sharding="gradients"), _with_a_penalty)
    assert any(after < before for before, after in pairwise(scales))


def test_layers_that_are_moved_by_hand_are_judged_with_their_optimizer(
    ranks: Callable[[int], RankPool], tmp_path: Path
) -> None:
    """Divided parameters cannot be moved: an optimizer that the model was not given is refused there."""
    judged(ranks, partial(write_plan, folder=tmp_path, sharding=None), _moved)


@pytest.mark.parametrize(
    ("steps", "change"),
    [(_changed_as_one, MADE_FINITE[0]), *((_changed, change) for change in (*MADE_FINITE, *LEFT, SPOILT))],
)
def test_a_scaler_judges_gradients_as_the_script_has_changed_them(
    ranks: Callable[[int], RankPool], plan_of: PlanOf, steps: Callable[..., Steps], change: Change
) -> None:
    scales = judged(ranks, plan_of, partial(steps, change=change), Gained())
    falls = sum(after < before for before, after in pairwise(scales))
    assert falls == (0 if change in MADE_FINITE else 3 if change in LEFT else 6)


def _fill_large(param: nn.Parameter) -> None:
    assert param.grad is not None
    param.grad.masked_fill_(param.grad > 1.0, 1.0)


def _assign_clamped(param: nn.Parameter) -> None:
    assert param.grad is not None
    param.grad = param.grad.clamp(-1.0, 1.0)


def doubtful(file: str, change: Callable[[nn.Parameter], None]) -> None:
    """A change by what the gradients are, or of another tensor than theirs: it may make them finite, or not."""
    torch.manual_seed(0)
    net = Gained()
    optimizer = SGD(net.parameters(), lr=0.1)
    wrapped = pyrannc.RaNNCModule(net, optimizer, load_deployment=file)
    scaler = torch.amp.GradScaler("cpu")
    for by in (0.0, 1e308):
        x = torch.ones(4, 3, 6, dtype=torch.float64)
        x[0, :, 0] = by
        scaler.scale(wrapped(x)).backward()
        for param in net.parameters():
            change(param)
        with pytest.raises(pyrannc.RaNNCError, match=r"scaler\.unscale_\(optimizer\)") if by else nullcontext():
            scaler.step(optimizer)
        optimizer.zero_grad()
        scaler.update(1.0)


@pytest.mark.parametrize("change", [_fill_large, _assign_clamped])
def test_a_change_that_may_have_made_gradients_finite_is_refused(
    ranks: Callable[[int], RankPool], tmp_path: Path, change: Callable[[nn.Parameter], None]
) -> None:
    ranks(2).run(doubtful, write_plan(Gained(), tmp_path, None), change)


def joined(file: str) -> None:
    """Gradients of a backward before, halved, are added to those of the last one."""
    net = Gained()
    optimizer = SGD(net.parameters(), lr=0.1)
    wrapped = pyrannc.RaNNCModule(net, optimizer, load_deployment=file)
    scaler = torch.amp.GradScaler("cpu")
    saved: list[Tensor] = []
    for _ in range(2):
        optimizer.zero_grad()
        scaler.scale(wrapped(torch.ones(4, 3, 6, dtype=torch.float64))).backward()
        for param, before in zip(net.parameters(), saved, strict=False):
            assert param.grad is not None
            param.grad.add_(before)
        saved = [param.grad / 2 for param in net.parameters() if param.grad is not None]
    with pytest.raises(pyrannc.RaNNCError, match="another backward"):
        scaler.step(optimizer)


def test_gradients_of_two_backwards_are_not_judged_by_the_last(
    ranks: Callable[[int], RankPool], tmp_path: Path
) -> None:
    ranks(2).run(joined, write_plan(Gained(), tmp_path, None))


def test_a_gradient_that_is_not_summed_is_like_others_but_for_a_scaler() -> None:
    param = nn.Parameter(torch.ones(2, 3))
    plain = param.grad = torch.arange(6.0).reshape(2, 3)
    mark_unsummed([param])
    grad = param.grad
    assert grad.data_ptr() == plain.data_ptr()
    assert repr(grad) == repr(plain)
    copies = [copy.deepcopy(grad), pickle.loads(pickle.dumps(grad))]
    assert all(type(item) is Tensor and torch.equal(item, plain) for item in copies)
    assert type(grad.sum(1)) is type(grad > 1.0) is Tensor
    # What takes the place of a gradient is not summed either.
    assert all(type(item) is type(grad) and torch.equal(item, plain) for item in (grad * 1, grad.clone()))
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    scaler.scale((param * 2).sum()).backward()
    grad.mul_(2.0)
    assert plain[0, 0] == 4.0
    with pytest.raises(pyrannc.RaNNCError, match="allreduce_grads"):
        scaler.unscale_(SGD([param]))
    mark_summed([param])
    assert param.grad is plain


def unscaled(file: str | None, *, module: bool) -> list[Tensor]:
    """Parameters after steps of which one's gradients overflow, in one layer; the loss is computed outside."""
    torch.manual_seed(0)
    net: nn.Module = Layers()
    optimizer = SGD(net.parameters(), lr=0.1)
    wrapped: Any = pyrannc.RaNNCModule(net, optimizer, load_deployment=file) if module else net
    for step in range(3):
        x = torch.randn(8, 3, 6, generator=Generator().manual_seed(step), dtype=torch.float64)
        x[5, 1, 0] = float("inf") if step == 2 else 0.0
        optimizer.zero_grad()
        wrapped(x[local_slice((4, 4))] if module else x).square().mean().backward()
        optimizer.step()
    return list(wrapped.state_dict().values())


def test_without_a_scaler_overflow_stays_where_it_is(ranks: Callable[[int], RankPool], plan_of: PlanOf) -> None:
    right = unscaled(None, module=False)
    assert [bool(param.isfinite().all()) for param in right] == [True, True, False, True, True, True]
    found = ranks(2).run(partial(unscaled, module=True), plan_of(Layers()))[0]
    for param, expected in zip(found, right, strict=True):
        torch.testing.assert_close(param, expected, rtol=1e-9, atol=1e-12, equal_nan=True)


def test_the_kernel_judges_as_torch_does() -> None:
    assert interpreted("tests.overflow_interpreted") == ["216", "gradients"]
