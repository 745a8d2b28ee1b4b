"""What is relied upon of torch's private names in ``gradients.py``: a test for each, under its own name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.ranks import RankPool
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.graph import get_gradient_edge
from torch.distributed.fsdp import fully_shard

from pyrannc.capture.torch_internals import gradients


def test_tensor_hooks() -> None:
    before, after = (torch.ones(2, requires_grad=True) for _ in range(2))
    assert not any(gradients.tensor_hooks(before))
    handle = before.register_hook(lambda grad: grad)
    after.register_post_accumulate_grad_hook(lambda _: None)  # type: ignore[no-untyped-call]  # torch has no types for it
    assert list(map(bool, gradients.tensor_hooks(before))) == [True, False]
    assert list(map(bool, gradients.tensor_hooks(after))) == [False, True]
    handle.remove()
    assert not any(gradients.tensor_hooks(before))


def test_node_hooks() -> None:
    leaf = torch.ones(2, requires_grad=True)
    node = get_gradient_edge(leaf).node
    known = node.register_hook(lambda *_: None)
    behind, before = gradients.node_hooks(node)
    assert (len(behind), len(before)) == (1, 0)
    known.remove()
    handles = [node.register_hook(lambda *_: None), get_gradient_edge(leaf).node.register_prehook(lambda _: None)]
    assert (len(behind), len(before)) == (1, 1)
    for handle in handles:
        handle.remove()
    assert (len(behind), len(before)) == (0, 0)


def test_call_first_after_steps() -> None:
    param, seen = nn.Parameter(torch.ones(2)), []
    optimizer = torch.optim.SGD([param], lr=0.1)
    for name in ("script", "other"):
        optimizer.register_step_post_hook(lambda *_, name=name: seen.append(name))
    gradients.call_first_after_steps(optimizer, lambda *_: seen.append("first"))
    optimizer.step()
    assert seen == ["first", "script", "other"]


def test_take_hooks() -> None:
    class Around(torch.optim.Optimizer):
        def __init__(self, inner: torch.optim.Optimizer, **hooks: Any) -> None:
            vars(self).update(hooks)
            self.inner, self.param_groups, self.defaults = inner, inner.param_groups, inner.defaults

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            self.inner.step()

    inner = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    for hooks in ({}, {"_optimizer_step_pre_hooks": {}, "_optimizer_step_post_hooks": {}}):
        optimizer, seen = Around(inner, **hooks), []
        with pytest.raises((AttributeError, TypeError)):
            optimizer.register_step_pre_hook(lambda *_: None)
        gradients.take_hooks(optimizer)
        optimizer.register_step_pre_hook(lambda *_, seen=seen: seen.append("before"))
        gradients.call_first_after_steps(optimizer, lambda *_, seen=seen: seen.append("after"))
        optimizer.step()
        assert seen == ["before", "after"]
    Around(inner).step()


def test_kept_uncompiled() -> None:
    seen = []

    @gradients.kept_uncompiled
    def hook(*_: Any) -> None:
        seen.append(torch.compiler.is_compiling())

    def called(x: Tensor) -> Tensor:
        hook()
        return x + 1

    assert torch.compile(called, backend="eager")(torch.ones(2)).tolist() == [2, 2]
    assert seen == [False]


def test_frame_of_step() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=1.0)
    found = []

    @gradients.kept_uncompiled
    def hook(*_: Any) -> None:
        found.append(gradients.frame_of_step().f_code.co_name)

    optimizer.register_step_pre_hook(hook)
    optimizer.step()
    assert found == ["wrapper"]


def test_copy_each() -> None:
    targets = [torch.zeros(2), torch.zeros(3)]
    gradients.copy_each(targets, [torch.ones(2), torch.full((3,), 2.0)])
    assert [target.tolist() for target in targets] == [[1, 1], [2, 2, 2]]


def test_norm_of_each() -> None:
    tensors = [torch.full((300,), 1.001, dtype=torch.bfloat16), torch.tensor([3.0, 4.0]), torch.ones(4).double()]
    found = gradients.norm_of_each([*tensors, torch.tensor([3 + 4j]), torch.empty(0)])
    assert [item.dtype for item in found[:3]] == [torch.float32, torch.float32, torch.float64]
    assert [float(item) for item in found] == [float(tensors[0].float().norm()), 5.0, 2.0, 5.0, 0.0]


def test_add_each() -> None:
    targets = [torch.ones(2), torch.zeros(3)]
    gradients.add_each(targets, [torch.ones(2), torch.full((3,), 2.0)])
    assert [target.tolist() for target in targets] == [[2, 2], [2, 2, 2]]


class _Asks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ask: Callable[[Any], None], x: Tensor, y: Tensor) -> Tensor:
        ctx.ask, ctx.other = ask, y.grad_fn
        return x + y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, Tensor]:
        ctx.ask(ctx.other)
        return None, grad, grad


def _asked(ask: Callable[[Any], Any]) -> list[Any]:
    """The answers in a backward of everything that keeps its graph, and in one of x alone that does not."""
    answers: list[Any] = []
    x, y = torch.ones(1, requires_grad=True), torch.ones(1, requires_grad=True)
    z = _Asks.apply(lambda node: answers.append(ask(node)), x, y * 2)
    z.backward(retain_graph=True)
    torch.autograd.grad(z, x)
    return answers


def test_runs_in_backward() -> None:
    assert _asked(gradients.runs_in_backward) == [True, False]


def test_backward_keeps_graph() -> None:
    assert _asked(lambda _: gradients.backward_keeps_graph()) == [True, False]


def test_graph_task() -> None:
    first, second = _asked(lambda _: gradients.graph_task())
    assert first != second


def test_home_of_state() -> None:
    param, step = nn.Parameter(torch.ones(2, device="meta")), torch.tensor(1.0)
    assert gradients.home_of_state(param, torch.ones(2), "exp_avg", {}).type == "meta"
    assert gradients.home_of_state(param, step, "step", {"fused": False}).type == "cpu"
    assert gradients.home_of_state(param, step, "step", {"fused": True}).type == "meta"
    assert gradients.home_of_state(param, step, "step", {"capturable": True}).type == "meta"


def test_at_end_of_backward() -> None:
    weight = torch.ones(2, requires_grad=True)
    seen = []

    def ask(grad: Tensor) -> None:
        gradients.at_end_of_backward(lambda: seen.append(weight.grad is not None))
        seen.append(weight.grad is not None)

    out = weight * 2
    out.register_hook(ask)
    out.sum().backward()
    assert seen == [False, True]


class _AsksLeaves(Function):
    """In its backward, which leaves get gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, leaves: list[Any], found: list[bool]) -> Tensor:
        ctx.leaves, ctx.found = leaves, found
        return x * 1

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.found += map(gradients.leaf_runs_in_backward, ctx.leaves)
        return grads[0], None, None


def test_leaf_runs_in_backward() -> None:
    first, other = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    leaves, found = [get_gradient_edge(leaf).node for leaf in (first, other)], list[bool]()

    def loss() -> Tensor:
        return _AsksLeaves.apply(first * other, leaves, found).sum()  # type: ignore[no-any-return, no-untyped-call]  # torch has no types for it

    loss().backward()
    torch.autograd.grad(loss(), [first])
    loss().backward(inputs=[other])
    assert found == [True, True, True, False, False, True]


def _sharded() -> list[bool]:
    plain, sharded = nn.Linear(2, 2), nn.Linear(2, 2)
    fully_shard(sharded)
    found = []
    for layer in (plain, sharded):
        out = layer(torch.ones(1, 2))
        leaves = [edge.variable for edge, _ in out.grad_fn.next_functions if hasattr(edge, "variable")]
        found.append(gradients.any_is_fully_sharded({id(leaf): leaf for leaf in leaves}))
    return found


def test_any_is_fully_sharded(ranks: Callable[[int], RankPool]) -> None:
    assert ranks(1).run(_sharded) == [[False, True]]
