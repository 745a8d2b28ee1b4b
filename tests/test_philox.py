"""Random words, the laws made of them, and the Ops that they stand in for, without a model around."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx
from torch.nn.attention import SDPBackend, sdpa_kernel

from pyrannc.blocks import laws, philox
from pyrannc.blocks.draw import _LAWS, Drawing, DrawnOp, law_of
from pyrannc.blocks.randomness import Randomness
from pyrannc.blocks.stream import Draw
from pyrannc.core.partition import RowDim
from pyrannc.core.program import Rows
from tests.interpreter import interpreted

CPU = torch.device("cpu")
BATCH_FIRST = RowDim(0, 1)
MANY = 200_000
aten = torch.ops.aten


def randomness(key: int = 11, runs: list[Rows] | None = None) -> Randomness:
    made = Randomness(CPU)
    made.begin(key)
    made.at([(0, 8)] if runs is None else runs)
    return made


def stream(op: int = 3, key: int = 11, salt_rows: int = 0, count: int = MANY) -> Draw:
    return randomness(key, [(salt_rows, salt_rows + 1)]).draw(op, (count,), None, by_rows=salt_rows > 0)


# Words


@settings(deadline=None, max_examples=60, derandomize=True)
@given(
    before=st.lists(st.integers(1, 4), max_size=2),
    per_row=st.integers(1, 3),
    after=st.lists(st.integers(1, 5), max_size=2),
    starts=st.lists(st.tuples(st.integers(0, 1 << 33), st.integers(0, 3)), max_size=3),
    key=st.integers(0, (1 << 63) - 1),
    op=st.integers(0, 1 << 20),
)
def test_a_part_of_a_batch_has_the_words_of_its_rows(
    before: list[int], per_row: int, after: list[int], starts: list[tuple[int, int]], key: int, op: int
) -> None:
    source_runs = [(start, start + count) for start, count in starts]
    source = randomness(key, source_runs)
    rows = RowDim(len(before), per_row)
    parts = []
    for runs in [[(start, start + count)] for start, count in starts] + [source_runs]:
        source.at(runs)
        shape = [*before, sum(end - start for start, end in runs) * per_row, *after]
        draw = source.draw(op, shape, rows, by_rows=True)
        words = philox.words(draw, CPU)
        assert torch.equal(words, philox.words_by_torch(draw, CPU))
        assert torch.equal(philox.keep(draw, 1 << 31, CPU), philox.unsigned(words) >= 1 << 31)
        parts.append(words.view(shape))
    whole = parts.pop()
    assert torch.equal(torch.cat(parts, len(before)) if parts else whole, whole)


def test_triton_has_the_words_of_rust() -> None:
    assert interpreted("tests.philox_interpreted") == ["7", "draws"]


# Laws


def distance(found: Tensor, cumulative: Callable[[Tensor], Tensor]) -> float:
    """Kolmogorov and Smirnov's, in units of its usual size."""
    sorted_, _ = found.double().flatten().sort()
    expected = cumulative(sorted_)
    count = sorted_.numel()
    steps = torch.arange(count + 1, dtype=torch.float64) / count
    apart = torch.maximum((expected - steps[:-1]).abs(), (expected - steps[1:]).abs()).max()
    return apart.item() * math.sqrt(count)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_numbers_have_their_laws(dtype: torch.dtype) -> None:
    coarse = 0.0 if dtype in (torch.float64, torch.float32) else math.sqrt(MANY) * 2.0**-8
    shape = torch.Size([MANY])
    even = laws.uniform(stream(), shape, dtype, CPU)
    assert even.dtype == dtype
    assert 0 <= even.min() <= even.max() < 1
    assert distance(even, lambda x: x) < 1.95 + coarse
    normal = laws.standard_normal(stream(4), shape, dtype, CPU)
    assert distance(normal, lambda x: torch.special.ndtr(x)) < 1.95 + coarse
    moments = [(normal.double() ** power).mean().item() for power in (1, 2, 3, 4)]
    assert moments == pytest.approx([0, 1, 0, 3], abs=5 * math.sqrt(96 / MANY))
    waiting = laws.standard_exponential(stream(5), shape, dtype, CPU)
    assert waiting.min() > 0
    assert torch.isfinite(waiting.double().log()).all()
    assert distance(waiting, lambda x: -torch.expm1(-x)) < 1.95 + coarse


@pytest.mark.parametrize("p", [0.0, 1e-3, 0.1, 0.5, 0.9, 1.0])
def test_masks_keep_their_share(p: float) -> None:
    kept = philox.keep(stream(), philox.threshold_of(p), CPU).double().mean().item()
    assert abs(kept - (1 - p)) <= 4 * math.sqrt(p * (1 - p) / MANY)


@pytest.mark.parametrize("count", [1, 3, 1000, (1 << 31) + 1, 1 << 62])
def test_integers_are_even(count: int) -> None:
    found = laws.integers(stream(), torch.Size([MANY]), -5, count - 5, CPU)
    assert -5 <= found.min() <= found.max() < count - 5
    shares = torch.histc((found + 5).double() / count, 3 if count > 2 else 1, 0, 1) / MANY
    assert (shares - 1 / shares.numel()).abs().max() < 5 / math.sqrt(MANY)


def test_streams_have_nothing_in_common() -> None:
    def normal(draw: Draw) -> Tensor:
        return laws.standard_normal(draw, torch.Size([MANY]), torch.float64, CPU)

    others = [stream(4), stream(3, 12), stream(3, 11 + (1 << 40)), stream(3, salt_rows=1), stream(3, salt_rows=2)]
    found = [normal(draw) for draw in (stream(), *others)]
    found += [found[0].roll(shift) for shift in (1, 2, 4, 1000)]
    for place, one in enumerate(found):
        for other in found[:place]:
            assert abs((one * other).mean().item()) < 5 / math.sqrt(MANY)
            assert abs((one.square() * other.square()).mean().item() - 1) < 15 / math.sqrt(MANY)


# Ops

_WIDE = (8, 5000)


def samples() -> dict[Any, tuple[Any, ...]]:
    """Arguments for each Op."""
    x = torch.linspace(0.1, 0.9, 8)[:, None].expand(_WIDE).contiguous()
    images = torch.ones(8, 5000, 2, 1)
    by_name: dict[str, tuple[Any, ...]] = {
        "dropout": (x, 0.3, True),
        "native_dropout": (x, 0.3, True),
        "feature_dropout": (images, 0.3, True),
        "alpha_dropout": (x, 0.3, True),
        "feature_alpha_dropout": (images, 0.3, True),
        "rrelu": (-x, 0.1, 0.4, True),
        "bernoulli.default": (x,),
        "bernoulli.p": (x, 0.3),
        "bernoulli.Tensor": (torch.empty(_WIDE), x),
        "bernoulli.float": (x, 0.3),
        "rand": (_WIDE,),
        "rand_like": (x,),
        "uniform": (x, -1.0, 3.0),
        "randn": (_WIDE,),
        "randn_like": (x,),
        "normal_functional": (x, 2.0, 3.0),
        "normal.default": (x, 2.0, 3.0),
        "normal.float_float": (2.0, 3.0, _WIDE),
        "normal.Tensor_float": (x, 3.0),
        "normal.float_Tensor": (2.0, x),
        "normal.Tensor_Tensor": (x, x + 1),
        "log_normal": (x, 0.1, 0.2),
        "exponential": (x, 2.0),
        "geometric": (x, 0.3),
        "geometric of integers": (x.long(), 0.3),
        "cauchy": (x, 1.0, 2.0),
        "randint.default": (7, _WIDE),
        "randint.low": (2, 9, _WIDE),
        "randint_like.default": (x, 7),
        "randint_like.low_dtype": (x, 2, 9),
        "random.to": (x, 7),
    }

    def of(op: Any) -> tuple[Any, ...]:
        name, overload = op._schema.name.removeprefix("aten::").rstrip("_"), op._overloadname
        arguments = by_name.get(f"{name}.{overload}") or by_name[name]
        return tuple(item.clone() if isinstance(item, Tensor) else item for item in arguments)

    return {op: of(op) for op in _LAWS}


@pytest.mark.parametrize("op", list(_LAWS), ids=str)
def test_an_op_gives_what_torch_gives_but_for_the_numbers(op: Any) -> None:
    torch.manual_seed(0)
    right = op(*samples()[op])
    right = right[0] if isinstance(right, tuple) else right
    node = fx.Graph().call_function(op, samples()[op])
    source = randomness()
    law = law_of(node, right.dtype, source)
    assert law is not None
    drawn = DrawnOp(law, source, right.dtype, RowDim(0, 1), by_rows=True)
    args, kwargs = drawn.arguments(node)
    found = drawn(1, *args, **kwargs)
    found = found[0] if isinstance(found, tuple) else found
    assert (found.shape, found.stride(), found.dtype) == (right.shape, right.stride(), right.dtype)
    if op._schema.is_mutable:
        assert found is args[0]
    # Cauchy's law has no mean, the arc tangent of its numbers has.
    scores = [(item.double() / 2).atan() if "cauchy" in str(op) else item.double() for item in (found, right)]
    mine, theirs = (item.reshape(8, -1) for item in scores)
    spread = theirs.std(1)
    noise = 7 * spread / math.sqrt(5000) + 1e-9
    assert ((mine.mean(1) - theirs.mean(1)).abs() < noise).all()
    assert ((mine.std(1) / spread.clamp(min=1e-9) - 1).abs() < 0.2).all() or spread.max() < 1e-6
    assert not any(torch.equal(one, other) for one, other in pairwise(mine))


def run_op(op: Any, *args: Any, runs: list[Rows] | None = None, rows: RowDim = BATCH_FIRST) -> Any:
    """The Op's result as a Stage computes it."""
    source = randomness(runs=runs)
    node = fx.Graph().call_function(op, args)
    law = law_of(node, torch.float64, source)
    assert law is not None
    drawn = DrawnOp(law, source, torch.float64, rows, by_rows=True)
    places, names = drawn.arguments(node)
    return drawn(1, *places, **names)


def test_gradients_of_dropout() -> None:
    torch.manual_seed(0)
    x = torch.randn(8, 5, dtype=torch.float64, requires_grad=True)
    for op in (aten.dropout.default, aten.alpha_dropout.default, aten.feature_dropout.default):
        assert torch.autograd.gradcheck(lambda y, op=op: run_op(op, y, 0.4, True), (x,))
        assert torch.autograd.gradgradcheck(lambda y, op=op: run_op(op, y.sin(), 0.4, True), (x,))
    assert torch.autograd.gradcheck(lambda y: run_op(aten.dropout_.default, y * 2, 0.4, True), (x,))
    assert torch.equal(run_op(aten.dropout.default, x, 1.0, True), torch.zeros_like(x))
    (grad,) = torch.autograd.grad(run_op(aten.normal_.default, x * 2, 0.0, 1.0).sum(), x)
    assert torch.equal(grad, torch.zeros_like(x))


def test_dropout_keeps_the_layout_and_takes_no_rows() -> None:
    x = torch.randn(6, 8, 4, dtype=torch.float64).transpose(0, 1)
    strided = run_op(aten.dropout.default, x, 0.4, True)
    assert strided.stride() == x.stride()
    assert torch.equal(strided, run_op(aten.dropout.default, x.contiguous(), 0.4, True))
    for kept in (run_op(op, x[:0], 0.4, True, runs=[]) for op in (aten.dropout.default, aten.alpha_dropout.default)):
        assert kept.shape == (0, 6, 4)
    for op in (aten.randn_like.default, aten.bernoulli_.float, aten.exponential_.default):
        assert run_op(op, x[:0].contiguous(), runs=[]).shape == (0, 6, 4)


@pytest.mark.parametrize("masked", ["no", "causal", "hidden", "added"])
def test_attention_by_its_formula(masked: str) -> None:
    torch.manual_seed(0)
    causal = masked == "causal"
    query, key, value = (torch.randn(8, heads, 5, 4, dtype=torch.float64) for heads in (4, 2, 2))
    mask = {"hidden": torch.rand(5, 5) < 0.6, "added": torch.randn(5, 5, dtype=torch.float64)}.get(masked)
    if masked == "hidden":
        mask[2] = False
    for scale in (None, 0.3, -0.2):
        options = {"scale": scale, "enable_gqa": True}
        with sdpa_kernel(SDPBackend.MATH):
            right = F.scaled_dot_product_attention(query, key, value, mask, 0.0, causal, **options)
        node = fx.Graph().call_function(aten.scaled_dot_product_attention.default, (query, key, value))
        law = law_of(node, value.dtype, randomness())
        assert law is not None

        def drawn(op: int, p: float) -> Tensor:
            drawing = Drawing(randomness(), op, value.dtype, RowDim(0, 1), by_rows=True)
            return law(drawing, query, key, value, mask, p, causal, **options)  # noqa: B023  # called at once

        torch.testing.assert_close(drawn(0, 0.0), right, rtol=1e-12, atol=1e-12)
        many = torch.stack([drawn(op, 0.3) for op in range(400)])
        assert ((many.mean(0) - right).abs() / (many.std(0) / 20 + 1e-9)).max() < 6


def test_complex_numbers_and_own_generators_stay_with_torch() -> None:
    node = fx.Graph().call_function(aten.randn.default, ((3,),))
    assert law_of(node, torch.complex64, randomness()) is None
    own = fx.Graph().call_function(aten.uniform_.default, (torch.empty(3),), {"generator": torch.Generator()})
    assert law_of(own, torch.float32, randomness()) is None


def test_probabilities_out_of_range_are_refused() -> None:
    with pytest.raises(RuntimeError, match="between 0 and 1"):
        run_op(aten.bernoulli.default, torch.full((8, 3), 1.5, dtype=torch.float64))
