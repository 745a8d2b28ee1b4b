"""What is told of compiled code beside the function that it stands for."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from pyrannc.blocks import beside_eager
from pyrannc.blocks.beside_eager import _Apart as Apart
from pyrannc.blocks.beside_eager import _Exact as Exact
from pyrannc.blocks.beside_eager import _told as told


@torch.library.custom_op("rannc_tests::of_few_digits", mutates_args=())
def of_few_digits(x: Tensor) -> Tensor:
    """As fused attention, which has no kernel for float64."""
    if x.dtype == torch.float64:
        raise RuntimeError("no kernel for float64")
    return x * 2


@of_few_digits.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@pytest.mark.parametrize("piece", [3, 1 << 24])
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64, torch.bfloat16])
def test_pieces_tell_what_the_whole_tells(piece: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beside_eager, "_PIECE", piece)
    generator = torch.Generator().manual_seed(0)
    right = torch.randn(5, 4, generator=generator, dtype=torch.complex64 if dtype.is_complex else torch.float32)
    mine, other = (right + 0.1 * torch.randn(5, 4, generator=generator) for _ in range(2))
    mine, other = mine.to(dtype).t(), other.to(dtype).t()
    apart = Apart.of(mine, other, right.t())
    wide = torch.complex128 if dtype.is_complex else torch.float64
    expected = [
        float(tensor.abs().square().mean().sqrt())
        for tensor in (mine.to(wide) - right.t().to(wide), other.to(wide) - right.t().to(wide), right.to(wide))
    ]
    assert [apart.mine, apart.other, apart.size] == pytest.approx(expected, rel=1e-12)
    assert apart.finite
    assert told(other, other, right.t(), 1.0) == ""
    assert "off by" in told(mine + 1, other, right.t(), 1.0)


def test_only_what_is_finite_counts() -> None:
    right = torch.tensor([1.0, float("inf"), 3.0])
    assert told(right, right, right, 0.0) == ""
    assert told(torch.tensor([1.0, 2.0, float("nan")]), right, right, 0.0) == "is not finite where it should be"
    assert told(torch.tensor([]), torch.tensor([]), torch.tensor([]), 0.0) == ""


def test_one_operator_without_float64_leaves_the_others_exact() -> None:
    """Under TF32 code was held against the function itself, as if that were exact, wherever attention was fused."""
    x, weight = torch.randn(8, 64), torch.randn(64, 8)

    def function(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        product = x @ weight
        return product, of_few_digits(product).exp()

    graph = make_fx(function, tracing_mode="fake")(x, weight)
    product, result = Exact(graph).run(x.double(), weight.double())
    exact = x.double() @ weight.double()
    torch.testing.assert_close(product, exact, rtol=1e-14, atol=1e-14)
    torch.testing.assert_close(result, (exact.float() * 2).double().exp(), rtol=1e-14, atol=1e-14)
