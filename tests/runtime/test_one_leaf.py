"""A backward that leads to calls of one model alone reaches one leaf, unless somebody looks at others."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.checkpoint import checkpoint

import pyrannc
from pyrannc.capture.torch_internals.gradients import runs_in_backward
from tests.ranks import RankPool

Ranks = Callable[[int], RankPool]
Note = Callable[[Tensor], Tensor]
"""Makes a backward of a tensor tell whether it reaches parameters."""
Script = Callable[[Any, nn.Sequential, Tensor, Note], None]


def _mean(out: Tensor) -> Tensor:
    return out.square().mean()


def criterion_outside(model: Any, net: nn.Sequential, x: Tensor, note: Note) -> None:
    note(nn.functional.cross_entropy(model(x), torch.ones(len(x), dtype=torch.long)) / 3).backward()


def accumulated(model: Any, net: nn.Sequential, x: Tensor, note: Note) -> None:
    for part in x.chunk(2):
        note(_mean(model(part))).backward()


def twice_from_one_call(model: Any, net: nn.Sequential, x: Tensor, note: Note) -> None:
    loss = note(_mean(model(x)))
    loss.backward(retain_graph=True)
    loss.backward()


def with_its_own_gradient(model: Any, net: nn.Sequential, x: Tensor, note: Note) -> None:
    out = note(model(x))
    torch.autograd.backward(out, torch.full_like(out, 0.5))


def watched_on_its_way(model: Any, net: nn.Sequential, x: Tensor, note: Note) -> None:
    out = model(x)
    out.retain_grad()
    out.register_hook(lambda grad: grad * 2)
    loss = _mean(out)
    loss.retain_grad()
    note(loss).backward()
    next(net.parameters()).grad.add_(out.grad.sum() + loss.grad)  # type: ignore[union-attr]  # it has one now


def two_criteria(model: Any, net: nn.Sequential, x: Tensor, note: Note) -> None:
    out = model(x)
    note(_mean(out) + 0.1 * (out.softmax(-1) * out.log_softmax(-1)).sum()).backward()


def two_calls(model: Any, net: nn.Sequential, x: Tensor, note: Note) -> None:
    note(_mean(model(x)) + _mean(model(-x))).backward()


def two_models(model: Any, net: nn.Sequential, x: Tensor, note: Note) -> None:
    other = copy.deepcopy(net)
    second: Any = other if model is net else pyrannc.RaNNCModule(other, torch.optim.SGD(other.parameters(), lr=0.1))
    note(_mean(model(x)) + _mean(second(x))).backward()
    for param, beside in zip(net.parameters(), other.parameters(), strict=True):
        param.grad.add_(beside.grad, alpha=2)  # type: ignore[union-attr, arg-type]  # they have some now


def parameter_beside(model: Any, net: nn.Sequential, x: Tensor, note: Note) -> None:
    note(_mean(model(x)) + next(net.parameters()).square().sum()).backward()


def input_with_gradient(model: Any, net: nn.Sequential, x: Tensor, note: Note) -> None:
    before = nn.Parameter(x)
    note(_mean(model(before * 2))).backward()
    next(net.parameters()).grad.add_(before.grad.sum())  # type: ignore[union-attr]  # it has one now


def one_parameter_asked_for(model: Any, net: nn.Sequential, x: Tensor, note: Note) -> None:
    note(_mean(model(x))).backward(inputs=[next(net.parameters())])


def gradient_hook(model: Any, net: nn.Sequential, x: Tensor, note: Note) -> None:
    handle = next(net.parameters()).register_hook(lambda grad: grad * 2)
    note(_mean(model(x))).backward()
    handle.remove()


def hook_added_in_the_backward(model: Any, net: nn.Sequential, x: Tensor, note: Note) -> None:
    loss = note(_mean(model(x)))
    loss.register_hook(lambda _: next(net.parameters()).register_hook(lambda grad: grad * 2) and None)
    loss.backward()


def hook_on_a_node(model: Any, net: nn.Sequential, x: Tensor, note: Note) -> None:
    param, runs = next(net.parameters()), []
    node = get_gradient_edge(param).node
    node.register_hook(lambda _, grads: runs.append(grads[0]))
    note(_mean(model(x))).backward()
    param.grad.add_(torch.stack(runs).sum())  # type: ignore[union-attr]  # it has one now


def node_hook_added_in_the_backward(model: Any, net: nn.Sequential, x: Tensor, note: Note) -> None:
    runs: list[Tensor] = []
    node = get_gradient_edge(next(net.parameters())).node
    loss = note(_mean(model(x)))
    loss.register_hook(lambda _: node.register_hook(lambda _, grads: runs.append(grads[0])) and None)
    loss.backward()
    next(net.parameters()).grad.add_(torch.stack(runs).sum())  # type: ignore[union-attr]  # it has one now


def computed_again(model: Any, net: nn.Sequential, x: Tensor, note: Note) -> None:
    head = nn.Linear(4, 2).double()
    note(_mean(checkpoint(head, model(x), use_reentrant=True))).backward()
    assert head.weight.grad is not None


ONE_LEAF = [
    *(criterion_outside, accumulated, twice_from_one_call, with_its_own_gradient),
    *(two_criteria, two_calls, watched_on_its_way, hook_added_in_the_backward),
    node_hook_added_in_the_backward,
]
EACH = [
    *(two_models, parameter_beside, input_with_gradient, one_parameter_asked_for),
    *(gradient_hook, hook_on_a_node, computed_again),
]


def hooked_before() -> list[int]:
    """How often hooks on nodes run that the script has put there before it wraps the model: plain, and RaNNC's."""
    found = []
    for wraps in (False, True):
        net, runs = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)), list[int]()
        nodes = [get_gradient_edge(param).node for param in net.parameters()]
        for node in nodes:
            node.register_hook(lambda *_, runs=runs: runs.append(1))
        model: Any = pyrannc.RaNNCModule(net, torch.optim.SGD(net.parameters(), lr=0.1)) if wraps else net
        for _ in range(2):
            _mean(model(torch.ones(2, 4))).backward()
        found.append(len(runs))
    return found


def test_hooks_on_nodes_from_before_the_model_was_wrapped(ranks: Ranks) -> None:
    [[expected, found]] = ranks(1).run(hooked_before)
    assert found == expected == 8


def gradients_of(script: Script) -> list[tuple[list[Tensor | None], bool]]:
    """Of the plain model and of RaNNC's: gradients, and whether each parameter was reached."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)).double()
    x, found = torch.randn(8, 4, dtype=torch.float64), []
    for wraps in (False, True):
        torch.manual_seed(1)
        net = copy.deepcopy(plain)
        model: Any = pyrannc.RaNNCModule(net, torch.optim.SGD(net.parameters(), lr=0.1)) if wraps else net
        _mean(model(x)).backward()
        net.zero_grad()
        reached: list[bool] = []

        def note(loss: Tensor, net: nn.Sequential = net, reached: list[bool] = reached) -> Tensor:
            nodes = [get_gradient_edge(param).node for param in net.parameters()]
            loss.register_hook(lambda _: reached.append(any(map(runs_in_backward, nodes))))
            return loss

        script(model, net, x, note)
        found.append(([param.grad for param in net.parameters()], any(reached)))
        assert reached
    return found


@pytest.mark.parametrize("script", [*ONE_LEAF, *EACH], ids=lambda script: script.__name__)
def test_gradients_are_those_of_the_plain_model(ranks: Ranks, script: Script) -> None:
    [[(expected, _), (found, reaches_each)]] = ranks(1).run(gradients_of, script)
    assert reaches_each == (script in EACH)
    torch.testing.assert_close(found, expected)
