"""What is relied upon of torch's private names in ``patching.py``: a test for each, under its own name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest
import torch
from tests.capture.tracing import X, fake_mode, traced
from torch import Tensor, distributed, fx, nn
from torch.distributions import Distribution, Normal
from torch.nn.attention.flex_attention import flex_attention

from pyrannc.capture.torch_internals import patching, symbols, tracing


def test_NUMBER_REPRS() -> None:
    rows = symbols.fake_of(fake_mode(), "x", X, 1).shape[0]
    for point, number in zip(patching.NUMBER_REPRS, (rows, rows / 2, rows > 7), strict=True):
        assert isinstance(number, point.owner)
        with point.replaced_by(lambda number: "seen"):
            assert (f"{number}", repr(number)) == ("seen", "seen")


def test_TENSOR_REPR() -> None:
    with patching.TENSOR_REPR.replaced_by(lambda self, **kwargs: "shown"):
        assert repr(X) == "shown"
    assert repr(X).startswith("tensor(")


def calls_seen(point: patching.PatchPoint, call: Callable[[], Any]) -> int:
    """How often a call comes by a function that stands in for the original."""
    original, seen = point.original, []

    def stand_in(*args: Any, **kwargs: Any) -> Any:
        seen.append(args)
        return original(*args, **kwargs)

    with point.replaced_by(stand_in):
        call()
    assert point.original is original
    return len(seen)


def test_PatchPoint() -> None:
    original = patching.MODULE_TO.original
    with pytest.raises(KeyError), patching.MODULE_TO.replaced_by(None):
        raise KeyError
    assert vars(nn.Module)["to"] is original


def test_MODULE_CALL() -> None:
    assert calls_seen(patching.MODULE_CALL, lambda: nn.Sequential(nn.Identity(), nn.Identity())(X)) == 3


def test_MODULE_TO() -> None:
    assert calls_seen(patching.MODULE_TO, lambda: nn.Linear(1, 1).to(torch.float64)) == 1


def normal() -> Normal:
    """One that looks whether what it is given is valid, as by default where nobody has used torch.compile."""
    return Normal(X, 1.0, validate_args=True)


def test_DISTRIBUTION_INIT() -> None:
    assert calls_seen(patching.DISTRIBUTION_INIT, normal) == 1


def test_ALL_VALID() -> None:
    # Of both parameters, and of the sample.
    assert calls_seen(patching.ALL_VALID, lambda: normal().log_prob(X)) == 3


def test_ask_in_python() -> None:
    with tracing.compiling_state():
        asked = [bool(patching.ask_in_python(X.clone() == X, "not equal")), bool(patching.ask_in_python(X > 1, ""))]
    assert asked == [True, False]


def test_asks_of_data() -> None:
    assert [patching.asks_of_data(Normal(X, 1.0, validate_args=told)) for told in (True, False)] == [True, False]


def test_methods_of_samples() -> None:
    class Own(Normal):
        def cdf(self, value: Tensor) -> Tensor:
            return value

        def log_prob(self, value: Tensor) -> Tensor:
            self._validate_sample(value)
            return value

        icdf = None

    found = [(point.owner, point.name) for point in patching.methods_of_samples()]
    assert {(Normal, "cdf"), (Normal, "log_prob"), (Own, "log_prob")} < set(found)
    assert (Own, "cdf") not in found
    assert (Distribution, "log_prob") not in found


def test_parameter_in_question() -> None:
    found = []

    def note(valid: Tensor, *_text: str) -> bool:
        found.append(patching.parameter_in_question())
        return bool(valid.all())

    with patching.ALL_VALID.replaced_by(note):
        normal().log_prob(X)
        vars(patching.ALL_VALID.owner)[patching.ALL_VALID.name](X > 0, "")
    assert sorted(found[:2]) == ["loc", "scale"]
    assert found[2:] == ["", None]


def test_IS_GRAD_ENABLED() -> None:
    with patching.IS_GRAD_ENABLED.replaced_by(lambda: "seen"):
        assert torch.is_grad_enabled() == "seen"  # type: ignore[comparison-overlap]
    assert torch.is_grad_enabled() is True


def test_GRAD_SWITCHES() -> None:
    for (enter, leave, mode), switch in zip(
        patching.GRAD_SWITCHES,
        (torch.no_grad, torch.enable_grad, partial(torch.set_grad_enabled, False)),
        strict=True,
    ):

        def run(switch: Any = switch, mode: bool | None = mode) -> None:
            with switch():
                assert torch.is_grad_enabled() is bool(mode)

        assert calls_seen(enter, run) == 1
        assert calls_seen(leave, run) == 1


def test_fake_told_of_gradients() -> None:
    fake = symbols.fake_of(fake_mode(), "x", X, 1)
    told = {
        "requires_grad": lambda tensor, required: not required,
        "grad_fn": lambda tensor, node: "no node" if node is None else "a node",
    }
    with patching.fake_told_of_gradients(told):
        assert fake.requires_grad
        assert not X.requires_grad
        fake.requires_grad = True
        assert not fake.requires_grad
        assert (fake.grad_fn, X.grad_fn, (fake + 1).grad_fn) == ("no node", None, "a node")
    assert fake.requires_grad
    assert fake.grad_fn is None


@torch.jit.script
def scripted(x: Tensor) -> Tensor:
    return x + 1


def test_SCRIPT_CALL() -> None:
    assert calls_seen(patching.SCRIPT_CALL, lambda: scripted(X)) == 1


def test_FLATTEN_WEIGHTS() -> None:
    recurrent = nn.GRU(2, 1)

    def run() -> None:
        recurrent.weight_ih_l0 = nn.Parameter(torch.ones(3, 2))
        recurrent(torch.ones(1, 2))

    assert calls_seen(patching.FLATTEN_WEIGHTS, run) >= 1


def test_SCRIPT_METHOD_CALL() -> None:
    module = torch.jit.script(nn.Linear(3, 3))
    assert calls_seen(patching.SCRIPT_METHOD_CALL, lambda: module(torch.ones(2, 3))) == 1


def test_CONTROL_FLOW() -> None:
    branch, loop = patching.CONTROL_FLOW
    assert calls_seen(branch, lambda: torch.cond(torch.tensor(True), torch.sin, torch.cos, (X,))) == 1
    counted = (torch.tensor(0), X)
    assert calls_seen(loop, lambda: torch.while_loop(lambda i, _: i < 2, lambda i, x: (i + 1, x + 1), counted)) == 1


def test_COMPILE() -> None:
    assert calls_seen(patching.COMPILE, lambda: torch.cond(torch.tensor(True), torch.sin, torch.cos, (X,))) == 1


def test_COND() -> None:
    with patching.COMPILE.replaced_by(lambda function, **_: function):
        assert calls_seen(patching.COND, lambda: torch.cond(torch.tensor(True), torch.sin, torch.cos, (X,)))


def test_WHILE_LOOP() -> None:
    counted = (torch.tensor(0), X)
    with patching.COMPILE.replaced_by(lambda function, **_: function):
        loop = lambda: torch.while_loop(lambda i, _: i < 2, lambda i, x: (i + 1, x + 1), counted)  # noqa: E731
        assert calls_seen(patching.WHILE_LOOP, loop)


def test_FLEX_ATTENTION() -> None:
    heads = torch.randn(2, 1, 3, 4)
    with patching.COMPILE.replaced_by(lambda function, **_: function):
        assert calls_seen(patching.FLEX_ATTENTION, lambda: flex_attention(heads, heads, heads))


def test_REGISTER_HOOK() -> None:
    leaf = torch.ones(1, requires_grad=True)
    assert calls_seen(patching.REGISTER_HOOK, lambda: leaf.register_hook(lambda gradient: gradient)) == 1


def test_TRACK_TENSOR_TREE() -> None:
    original, seen = patching.TRACK_TENSOR_TREE.original, {}

    def track(inner: Any, proxy: Any, *, constant: Any, tracer: Any) -> Any:
        result = original(inner, proxy, constant=constant, tracer=tracer)
        if isinstance(proxy, fx.Proxy):  # Autograd is done with the result by then.
            seen[proxy.node.target] = inner.requires_grad
        return result

    with patching.TRACK_TENSOR_TREE.replaced_by(track):
        traced(lambda x: x.detach().sin() + x, X.clone().requires_grad_())
    assert seen[torch.ops.aten.sin.default] is False
    assert seen[torch.ops.aten.add.Tensor] is True


def test_PROXY_CALL() -> None:
    original, seen = patching.PROXY_CALL.original, []

    def proxy_call(mode: Any, func: Any, pre_dispatch: bool, args: Any, kwargs: Any) -> Any:
        seen.append((func, pre_dispatch, mode.tracer is tracing.current_tracer()))
        return original(mode, func, pre_dispatch, args, kwargs)

    with patching.PROXY_CALL.replaced_by(proxy_call):
        traced(lambda x: x.sin(), X)
    assert torch.ops.aten.sin.default in [func for func, _, _ in seen]
    assert all(pre_dispatch for _, pre_dispatch, _ in seen)


def test_RUN_BACKWARD() -> None:
    original, seen = patching.RUN_BACKWARD.original, []

    def run(outputs: Any, *rest: Any, **options: Any) -> Any:
        seen.append(len(outputs))
        return original(outputs, *rest, **options)

    x = X.clone().requires_grad_()
    with patching.RUN_BACKWARD.replaced_by(run):
        (grad,) = torch.autograd.grad(x.square().sum(), [x])
        x.sum().backward()  # type: ignore[no-untyped-call]  # torch has no types for it
    assert torch.equal(grad, 2 * x.detach())
    assert seen == [1, 1]


def test_DERIVATIVES() -> None:
    seen: list[str] = []
    with ExitStack() as stack:
        for point in patching.DERIVATIVES:
            enter = point.original
            noted = partial(lambda name, enter: seen.append(name) or enter(), point.name, enter)
            stack.enter_context(point.replaced_by(noted))
        torch.func.grad(lambda x: x.sum())(X)
        torch.func.vjp(torch.sin, X)
        torch.func.jacrev(torch.sin)(X)
        assert set(seen) == {"grad_increment_nesting"}
        seen.clear()
        torch.func.jvp(torch.sin, (X,), (X,))
        torch.func.jacfwd(torch.sin)(X)
        assert set(seen) == {"jvp_increment_nesting"}
        seen.clear()
        torch.vmap(torch.sin)(X)
        assert not seen


def test_TENSOR_META() -> None:
    with patching.TENSOR_META.replaced_by(lambda _tensor: None):
        gm = traced(lambda x: x.sin(), X)
    (node,) = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.sin.default)
    assert node.meta["val"].shape[1] == 2
    assert node.meta["tensor_meta"] is None


@pytest.fixture
def alone() -> Iterator[Any]:
    """A group of one rank."""
    distributed.init_process_group("gloo", rank=0, world_size=1, store=distributed.HashStore())  # type: ignore[attr-defined]
    yield distributed.group.WORLD
    distributed.destroy_process_group()


def test_several_ranks(alone: Any) -> None:
    assert not patching.several_ranks()
    with patching.GROUP_SIZE.replaced_by(lambda _: 2):
        assert patching.several_ranks()


def test_GROUP_SIZE(alone: Any) -> None:
    assert calls_seen(patching.GROUP_SIZE, distributed.get_world_size) == 1
    assert calls_seen(patching.GROUP_SIZE, lambda: distributed.get_world_size(alone)) == 1
    assert calls_seen(patching.GROUP_SIZE, lambda: alone.size()) == 1


def refused(point: patching.PatchPoint, call: Callable[[], Any]) -> bool:
    """Whether a call ends where a function stands that raises."""

    def refuse(*_: Any, **__: Any) -> None:
        raise KeyError(point.name)

    with point.replaced_by(refuse):
        try:
            call()
        except KeyError as error:
            return error.args == (point.name,)
    return False


def test_RANK_NOT_IN_GROUP(alone: Any) -> None:
    one, many = torch.ones(1), [torch.ones(1)]
    calls = [
        lambda: distributed.all_gather(many, one),
        lambda: distributed.all_gather_coalesced([many], many),
        lambda: distributed.all_gather_into_tensor(one, one),
        lambda: distributed.all_gather_object([None], 1),
        lambda: distributed.all_reduce(one),
        lambda: distributed.all_reduce_coalesced(many),
        lambda: distributed.all_to_all(many, many),
        lambda: distributed.all_to_all_single(one, one),
        lambda: distributed.barrier(),
        lambda: distributed.broadcast(one, 0),
        lambda: distributed.broadcast_object_list([1], 0),
        lambda: distributed.gather(one, many, 0),
        lambda: distributed.gather_object(1, [None], 0),
        lambda: distributed.irecv(one, 0),
        lambda: distributed.isend(one, 0),
        lambda: distributed.monitored_barrier(),
        lambda: distributed.recv(one, 0),
        lambda: distributed.recv_object_list([None], 0),
        lambda: distributed.reduce(one, 0),
        lambda: distributed.reduce_scatter(one, many),
        lambda: distributed.reduce_scatter_tensor(one, one),
        lambda: distributed.scatter(one, many, 0),
        lambda: distributed.scatter_object_list([None], [1], 0),
        lambda: distributed.send_object_list([1], 0),
    ]
    for call in calls:
        assert refused(patching.RANK_NOT_IN_GROUP, call), inspect.getsource(call)
    assert refused(patching.RANK_NOT_IN_GROUP, lambda: distributed.get_rank(alone))


def test_CHECKS_OF_SENT(alone: Any) -> None:
    single, several = patching.CHECKS_OF_SENT
    one, many = torch.ones(1), [torch.ones(1)]
    of_single = [
        lambda: distributed.P2POp(distributed.isend, one, 0),
        lambda: distributed.all_gather_into_tensor(one, one),
        lambda: distributed.all_reduce(one),
        lambda: distributed.all_to_all_single(one, one),
        lambda: distributed.broadcast(one, 0),
        lambda: distributed.gather(one, many, 0),
        lambda: distributed.irecv(one, 0),
        lambda: distributed.isend(one, 0),
        lambda: distributed.recv(one, 0),
        lambda: distributed.reduce(one, 0),
        lambda: distributed.reduce_scatter(one, many),
        lambda: distributed.reduce_scatter_tensor(one, one),
        lambda: distributed.scatter(one, many, 0),
        lambda: distributed.send(one, 1),
    ]
    of_several = [
        lambda: distributed.all_gather(many, one),
        lambda: distributed.all_gather_coalesced([many], many),
        lambda: distributed.all_reduce_coalesced(many),
        lambda: distributed.all_to_all(many, many),
        lambda: distributed.gather(one, many, 0),
        lambda: distributed.reduce_scatter(one, many),
        lambda: distributed.scatter(one, many, 0),
    ]
    for point, calls in ((single, of_single), (several, of_several)):
        for call in calls:
            assert refused(point, call), inspect.getsource(call)


def test_GROUP_METHODS(alone: Any) -> None:
    methods = {point.name: point for point in patching.GROUP_METHODS}
    assert refused(methods["allreduce"], lambda: alone.allreduce([torch.ones(1)]))
    assert refused(methods["_allgather_base"], lambda: alone._allgather_base(torch.ones(1), torch.ones(1)))
    assert all(callable(point.original) for point in patching.GROUP_METHODS)


def test_OPERATOR_CALLS() -> None:
    wait = torch.ops._c10d_functional.wait_tensor
    for point, operator in zip(patching.OPERATOR_CALLS, (wait, wait.default), strict=True):
        assert refused(point, partial(operator, torch.ones(1)))
        assert operator.__module__ == "torch._ops._c10d_functional"
        assert str(operator).startswith("_c10d_functional.wait_tensor")


def test_other_sends(alone: Any) -> None:
    functional, batches = patching.other_sends()
    assert refused(functional, lambda: functional.owner.all_reduce(torch.ones(1), "sum", alone))
    assert refused(functional, lambda: functional.owner.all_gather_tensor(torch.ones(1), 0, alone))
    assert refused(batches, lambda: distributed.batch_isend_irecv([]))
