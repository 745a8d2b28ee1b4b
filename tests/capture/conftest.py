"""A reference run of captured graphs, op by op, that also checks every claim the Graph makes."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from pyrannc._native import Graph
from pyrannc.capture import Captured, capture, flatten

TOLERANCE = 1e-10
Call = tuple[tuple[Any, ...], dict[str, Any]]


class ReferenceRun:
    """Runs ``captured`` for some number of rows. Parameters and buffers are copies, in ``params`` and ``buffers``."""

    def __init__(self, captured: Captured, model: nn.Module, rows: int) -> None:
        self.captured, self.rows = captured, rows
        self.graph = json.loads(captured.graph_json)
        named_params, named_buffers = dict(model.named_parameters()), dict(model.named_buffers())
        originals = [named_params[name] for name in captured.params]
        self.params = [param.detach().clone().requires_grad_(param.requires_grad) for param in originals]
        self.buffers = [named_buffers[name].detach().clone() for name in captured.buffers]
        self.env: dict[tuple[fx.Node, int | None], Any] = {}
        self.ids = {key: index for index, key in enumerate(captured.values)}

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        inputs = self.captured.input_tensors(args, kwargs)
        constants = [constant.clone() for constant in self.captured.constants]
        sources = {"param": self.params, "buffer": self.buffers, "input": inputs, "constant": constants}
        for key, value in zip(self.captured.values, self.graph["values"], strict=True):
            ((kind, index),) = value["def"].items()
            if kind in sources:
                self._store(key, sources[kind][index])
        for node, op in zip(self.captured.op_nodes, self.graph["ops"], strict=True):
            self._run(node, op)
        outputs = [self.env[self.captured.values[value]] for value in self.graph["outputs"]]
        with torch.no_grad():
            for record, buffer in zip(self.graph["buffers"], self.buffers, strict=True):
                if "update" in record:
                    buffer.copy_(self.env[self.captured.values[record["update"]]])
        return self.captured.hand_back(outputs, (args, kwargs))

    def _run(self, node: fx.Node, op: dict[str, Any]) -> None:
        operands = {self.ids[key]: self.env[key] for key in map(self._key, node.all_input_nodes) if key in self.ids}
        before = {value: tensor._version for value, tensor in operands.items()}
        random_state = torch.get_rng_state()
        args, kwargs = fx.map_arg((node.args, node.kwargs), self._argument)
        with nullcontext() if op["grad_enabled"] else torch.no_grad():
            result = node.target(*args, **kwargs)
        self.env[node, None] = result
        for value in op["results"]:
            _, place = self.captured.values[value]
            self._store((node, place), result if place is None else result[place])
        written = {value for value, tensor in operands.items() if tensor._version != before[value]}
        roots = {self._root(value) for value in op.get("mutates", ())}
        assert {self._root(value) for value in written} <= roots, f"{op['target']} writes {written}"
        if not torch.equal(random_state, torch.get_rng_state()):
            assert op.get("random"), op["target"]

    def _store(self, key: tuple[fx.Node, int | None], tensor: Tensor) -> None:
        self.env[key] = tensor
        value = self.graph["values"][self.ids[key]]
        shape = [dim["per_row"] * self.rows + dim["fixed"] for dim in value["shape"]]
        if type(tensor) is Tensor and not torch._C._functorch.is_batchedtensor(tensor):
            assert list(tensor.shape) == shape, value
        assert str(tensor.dtype) == f"torch.{value['dtype']}", value
        if tensor.requires_grad:
            assert value["requires_grad"], value
        self._check_alias(self.ids[key], tensor)

    def _check_alias(self, value: int, tensor: Tensor) -> None:
        if not tensor.numel() or torch._C._functorch.is_batchedtensor(tensor):
            return
        storage = tensor.untyped_storage().data_ptr()
        for key, other in self.env.items():
            if isinstance(other, Tensor) and key in self.ids and not torch._C._functorch.is_batchedtensor(other):
                shares = other.numel() and other.untyped_storage().data_ptr() == storage
                assert not shares or self._root(self.ids[key]) == self._root(value), (value, key)

    def _root(self, value: int) -> int:
        record = self.graph["values"][value]
        return self._root(record["alias_of"]) if "alias_of" in record else value

    def _argument(self, node: fx.Node) -> Any:
        if node in self.captured.dims:
            return self.captured.dims[node].at(self.rows)
        return self.env[self._key(node)]

    def _key(self, node: fx.Node) -> tuple[fx.Node, int | None]:
        if node.op == "call_function" and getattr(node.target, "__name__", "") == "getitem":
            return node.args[0], node.args[1]  # type: ignore[return-value]
        return node, None


def backward(result: Any) -> None:
    """Backward from every output: a `loss` alone if there is one."""
    loss = result.get("loss") if isinstance(result, dict) else None
    leaves = [loss] if loss is not None else flatten(result)[0]
    total = sum(
        (leaf * torch.linspace(0.5, 1.5, leaf.numel(), dtype=leaf.dtype).view(leaf.shape)).sum()
        for leaf in leaves
        if leaf.requires_grad
    )
    if isinstance(total, Tensor):
        total.backward()


def assert_same(expected: Any, actual: Any, what: str) -> None:
    if expected is None or actual is None:
        zero = expected if actual is None else actual
        assert zero is None or not zero.abs().max(), what
        return
    assert (expected.shape, expected.dtype) == (actual.shape, actual.dtype), what
    if expected.numel():
        torch.testing.assert_close(actual, expected, rtol=TOLERANCE, atol=TOLERANCE, msg=lambda m: f"{what}: {m}")


@pytest.fixture
def assert_equals_model() -> Callable[..., Captured]:
    """Captures a model with one batch size; the captured graph must equal the model with another one."""

    def check(
        model: nn.Module, make_call: Callable[[int], Call], rows: tuple[int, int] = (4, 3), **options: Any
    ) -> Captured:
        torch.manual_seed(1)
        args, kwargs = make_call(rows[0])
        before = [dict(vars(module)) for module in model.modules()]
        captured = capture(model, args, kwargs, device=torch.device("cpu"), rows=rows[0], **options)
        assert before == [dict(vars(module)) for module in model.modules()], "the model was changed"
        Graph.from_json(captured.graph_json)  # verifies it
        torch.manual_seed(2)
        call = make_call(rows[1])
        call_copy = pytree.tree_map_only(Tensor, lambda t: t.detach().clone().requires_grad_(t.requires_grad), call)
        run = ReferenceRun(captured, model, rows[1])
        plain = copy.deepcopy(model)
        torch.manual_seed(3)
        expected = plain(*call[0], **call[1])
        torch.manual_seed(3)
        actual = run(*call_copy)
        expected_leaves, expected_structure = flatten(expected)
        actual_leaves, actual_structure = flatten(actual)
        assert expected_structure == actual_structure
        for index, (want, have) in enumerate(zip(expected_leaves, actual_leaves, strict=True)):
            assert_same(want, have, f"output {index}")
        backward(expected)
        backward(actual)
        plain_params, plain_buffers = dict(plain.named_parameters()), dict(plain.named_buffers())
        for name, param in zip(captured.params, run.params, strict=True):
            assert_same(plain_params[name].grad, param.grad, f"gradient of {name}")
        for name, buffer in zip(captured.buffers, run.buffers, strict=True):
            assert_same(plain_buffers[name], buffer, f"buffer {name}")
        for index, (want, have) in enumerate(zip(flatten(call)[0], flatten(call_copy)[0], strict=True)):
            if want.is_leaf:
                assert_same(want.grad, have.grad, f"gradient of input {index}")
        return captured

    return check
