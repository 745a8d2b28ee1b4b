"""Traces of small calls, for tests of what they rely on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from pyrannc.capture.torch_internals import fakes, symbols, tracing


def fake_mode() -> Any:
    return fakes.FakeTensorMode(shape_env=symbols.ShapeQuestions(), allow_non_fake_inputs=True)


def traced(call: Callable[..., Any], *samples: Tensor, mode: Any = None) -> fx.GraphModule:
    """The trace of a call on fake tensors, dimension 0 of each a symbol."""
    mode = mode or fake_mode()
    given = [symbols.fake_of(mode, f"x{index}", sample, 1) for index, sample in enumerate(samples)]
    with mode:
        return tracing.trace_before_dispatch(call, *given)


def targets(gm: fx.GraphModule) -> list[Any]:
    return [node.target for node in gm.graph.nodes if node.op == "call_function"]


X = torch.tensor([[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]])


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * 2
