"""Layouts of tensors."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pyrannc.profile.layout import Layout

from .models import CPU, Transposed, subject


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """Permuted and expanded tensors."""
    shape = draw(st.lists(st.integers(2, 4), max_size=4))
    order = draw(st.permutations(range(len(shape))))
    repeated = [draw(st.booleans()) for _ in shape]
    stored = torch.rand([1 if again else extent for extent, again in zip(shape, repeated, strict=True)])
    return stored.expand(tuple(shape)).permute(tuple(order))


@given(tensors())
def test_a_tensor_of_the_same_layout_has_the_same_strides(tensor: Tensor) -> None:
    made = Layout.of(tensor).make(tensor.shape, torch.zeros)
    if any(stride == 0 for stride in tensor.stride()):
        assert [stride == 0 for stride in made.stride()] == [stride == 0 for stride in tensor.stride()]
        assert made.untyped_storage().nbytes() == tensor.untyped_storage().nbytes()
    else:
        assert made.stride() == tensor.stride()


def test_values_lie_as_in_the_captured_call() -> None:
    source = subject(Transposed(), [torch.randn(4, 8, 16)], (3,)).blocks.source
    (value,) = (number for number, (node, _) in enumerate(source.captured.values) if "transpose" in node.name)
    made = Layout.of(source.captured.value(value)).make([5, 16, 8], lambda shape: torch.zeros(shape, device=CPU))
    assert made.stride() == (128, 1, 16)
