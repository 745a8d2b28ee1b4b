"""The Ops that draw random numbers, and the law of each.

An Op that is not in :data:`_LAWS` draws inside of a kernel of torch, or of the user.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx
from torch.autograd import Function

from pyrannc.blocks import laws, philox
from pyrannc.blocks.randomness import Randomness
from pyrannc.blocks.stream import Draw
from pyrannc.capture.nodes.operands import arguments
from pyrannc.capture.torch_internals.operators import OpOverload, safe_softmax, schema
from pyrannc.core.partition import RowDim

_aten = torch.ops.aten
_masked = _aten.native_dropout_backward.default
_SELU_FLOOR = 1.7580993408473766  # of the scaled exponential linear unit, with its sign changed


@dataclass(frozen=True, eq=False)
class Drawing:
    """One drawing Op.

    Attributes:
        dtype: of its result.
        row_dim: the dimension of its result that is proven to run over the batch.
        by_rows: its result depends on the batch.
    """

    randomness: Randomness
    op: int
    dtype: torch.dtype
    row_dim: RowDim | None
    by_rows: bool

    @property
    def device(self) -> torch.device:
        """Where the Stage runs."""
        return self.randomness.device

    def of(self, shape: Sequence[int]) -> Draw:
        """What is drawn now for a tensor whose rows lie as in the result."""
        return self.randomness.draw(self.op, shape, self.row_dim, by_rows=self.by_rows)

    def mask(self, shape: Sequence[int], p: float) -> Tensor:
        """False with probability ``p``, for each element of a tensor whose rows lie as in the result."""
        return self.randomness.keep(self.of(shape), philox.threshold_of(p)).view(shape)


_Law: TypeAlias = Callable[..., Any]


@dataclass(eq=False)
class DrawnOp:
    """What generated code calls instead of drawing Ops that are alike, with the Op's number and its own arguments.

    Attributes:
        dtype: of the Op's result.
        row_dim: the dimension of its result that is proven to run over the batch.
        by_rows: its result depends on the batch.
    """

    law: _Law
    randomness: Randomness
    dtype: torch.dtype
    row_dim: RowDim | None
    by_rows: bool
    _drawings: dict[int, Drawing] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.__name__ = self.__qualname__ = f"draw{self.law.__name__}"
        self.__module__ = __name__

    def __call__(self, op: int, *args: Any, **kwargs: Any) -> Any:
        """The Op's results."""
        drawing = self._drawings.get(op)
        if drawing is None:
            drawing = Drawing(self.randomness, op, self.dtype, self.row_dim, self.by_rows)
            self._drawings[op] = drawing
        return self.law(drawing, *args, **kwargs)

    @staticmethod
    def arguments(node: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """All arguments of the Op, however the model gave them: by place where they have one, else by name."""
        named = arguments(node)
        by_name = {argument.name for argument in schema(node.target).arguments if argument.kwarg_only}  # type: ignore[arg-type]  # it is an operator
        places = tuple(item for name, item in named.items() if name not in by_name)
        return places, {name: item for name, item in named.items() if name in by_name}


def law_of(node: fx.Node, dtype: torch.dtype, randomness: Randomness) -> _Law | None:
    """How to compute a drawing Op from its place in the batch; None when torch's generator has to serve."""
    if dtype.is_complex or not isinstance(node.target, OpOverload) or arguments(node).get("generator") is not None:
        return None
    if node.target is _aten.scaled_dot_product_attention.default:
        return None if randomness.fused_dropout and _may_be_fused(node, dtype, randomness.device) else _attention
    return _LAWS.get(node.target)


def _may_be_fused(node: fx.Node, dtype: torch.dtype, device: torch.device) -> bool:
    """False for attention with dropout that torch has no kernel for, and computes by its formula.

    The host has none at all. Others know no float64, and no mask with gaps between what one query sees, such as T5's,
    which comes from a table with a column for each head.
    """
    mask = arguments(node)["attn_mask"]
    step = 1 if mask is None else mask.meta["val"].stride(-1)
    has_gaps = isinstance(step, int) and step != 1
    return device.type != "cpu" and dtype != torch.float64 and not has_gaps


def name_of_law(law: _Law) -> str:
    """Tells a law from all others."""
    return "attention" if law is _attention else next(str(op) for op, known in _LAWS.items() if known is law)


# Dropout


class _Kept(Function):
    """What a mask keeps, times a number, in one kernel; torch's own operator for it would keep its operand as well."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mask: Tensor, scale: float) -> Tensor:
        ctx.how = mask, scale
        kept: Tensor = _masked(x, mask, scale)
        return kept

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        keep: Callable[..., Tensor] = _Kept.apply if grad.requires_grad else _masked
        return keep(grad, *ctx.how), None, None


def _dropout(drawing: Drawing, x: Tensor, p: float, train: bool | None = True) -> Tensor:
    return _native_dropout(drawing, x, p, train)[0]


def _native_dropout(drawing: Drawing, x: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
    mask = drawing.mask(x.shape, p)
    kept: Tensor = _Kept.apply(x, mask, 1 / (1 - p) if p < 1 else 0.0)  # type: ignore[no-untyped-call]  # torch has no types for it
    return kept, mask


def _feature_mask(drawing: Drawing, x: Tensor, p: float) -> Tensor:
    """True for the features that are kept; a feature is what the first two dimensions choose."""
    shape = torch.Size([*x.shape[:2], *[1] * (x.dim() - 2)])
    if drawing.row_dim is not None and drawing.row_dim.dim >= 2:
        drawing = replace(drawing, row_dim=None, by_rows=False)
    return drawing.mask(shape, p)


def _feature_dropout(drawing: Drawing, x: Tensor, p: float, train: bool) -> Tensor:
    return x * (_feature_mask(drawing, x, p).to(x.dtype) * (1 / (1 - p) if p < 1 else 0.0))


def _alpha_dropout(drawing: Drawing, x: Tensor, p: float, train: bool) -> Tensor:
    return _with_floor(x, drawing.mask(x.shape, p), p)


def _feature_alpha_dropout(drawing: Drawing, x: Tensor, p: float, train: bool) -> Tensor:
    return _with_floor(x, _feature_mask(drawing, x, p), p)


def _with_floor(x: Tensor, mask: Tensor, p: float) -> Tensor:
    """What is dropped becomes the floor of SELU; mean and variance stay (Klambauer et al., NIPS 2017)."""
    if p == 1:
        return x * 0
    scale = 1 / math.sqrt((_SELU_FLOOR**2 * p + 1) * (1 - p))
    floor = (mask.to(x.dtype) - 1) * (_SELU_FLOOR * scale) + _SELU_FLOOR * scale * p
    return x * (mask.to(x.dtype) * scale) + floor


def _attention(
    drawing: Drawing,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    *,
    scale: float | None,
    enable_gqa: bool,
) -> Tensor:
    """By its formula, in the precision in which torch computes it where there is no fused kernel."""
    dtype = query.dtype
    if enable_gqa:
        key, value = (item.repeat_interleave(query.shape[-3] // item.shape[-3], -3) for item in (key, value))
    if dtype in (torch.float16, torch.bfloat16):
        query, key, value = query.float(), key.float(), value.float()
    if is_causal:
        attn_mask = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
    if scale is None:
        scale = 1 / math.sqrt(query.shape[-1])
    # Half of the scale on either side keeps products small.
    root = math.sqrt(abs(scale))
    scores = (query * math.copysign(root, scale)) @ (key * root).transpose(-2, -1)
    if attn_mask is None:
        weights = scores.softmax(-1)
    else:
        hidden = attn_mask.dtype == torch.bool
        scores = scores.masked_fill(attn_mask.logical_not(), -math.inf) if hidden else scores + attn_mask
        # A query that may look at nothing gets zeros.
        weights = safe_softmax(scores)
    return (_dropout(drawing, weights, dropout_p) @ value).to(dtype)


# Laws with parameters. Gradients do not flow through a draw, as with torch's own.


def _uniform(drawing: Drawing, shape: torch.Size, low: float = 0.0, high: float = 1.0) -> Tensor:
    made = laws.uniform(drawing.of(shape), shape, drawing.dtype, drawing.device)
    return made if (low, high) == (0.0, 1.0) else made.mul_(high - low).add_(low)


def _normal(drawing: Drawing, shape: torch.Size, mean: Any = 0.0, std: Any = 1.0) -> Tensor:
    made = laws.standard_normal(drawing.of(shape), shape, drawing.dtype, drawing.device)
    with torch.no_grad():
        moved: Tensor = (made * std + mean).to(drawing.dtype)
        return moved


def _log_normal(drawing: Drawing, shape: torch.Size, mean: float = 1.0, std: float = 2.0) -> Tensor:
    return _normal(drawing, shape, mean, std).exp_()


def _exponential(drawing: Drawing, shape: torch.Size, lambd: float = 1.0) -> Tensor:
    return laws.standard_exponential(drawing.of(shape), shape, drawing.dtype, drawing.device).div_(lambd)


def _cauchy(drawing: Drawing, shape: torch.Size, median: float = 0.0, sigma: float = 1.0) -> Tensor:
    made = laws.uniform(drawing.of(shape), shape, drawing.dtype, drawing.device)
    return made.sub_(0.5).mul_(math.pi).tan_().mul_(sigma).add_(median)


def _geometric(drawing: Drawing, shape: torch.Size, p: float) -> Tensor:
    # Tensors of integers have numbers of this law, too.
    work = drawing.dtype if drawing.dtype.is_floating_point else torch.float64
    made = laws.standard_exponential(drawing.of(shape), shape, work, drawing.device)
    made = made.div_(-math.log1p(-p)).ceil_().clamp_(min=1) if p < 1 else torch.ones_like(made)
    return made.to(drawing.dtype)


def _bernoulli(drawing: Drawing, shape: torch.Size, p: float | Tensor = 0.5) -> Tensor:
    if isinstance(p, Tensor):
        return laws.bernoulli(drawing.of(shape), p.detach().expand(shape)).to(drawing.dtype)
    return drawing.mask(shape, p).logical_not().to(drawing.dtype)


def _integers(drawing: Drawing, shape: torch.Size, low: int, high: int) -> Tensor:
    return laws.integers(drawing.of(shape), shape, low, high, drawing.device).to(drawing.dtype)


def _integers_below(drawing: Drawing, shape: torch.Size, high: int) -> Tensor:
    return _integers(drawing, shape, 0, high)


# How an Op says where its numbers go


def _made(law: _Law, parameters: int = 0) -> _Law:
    """A new tensor: ``op(*parameters, size)``."""

    def draw(drawing: Drawing, *args: Any, **_: Any) -> Any:
        return law(drawing, torch.Size(args[parameters]), *args[:parameters])

    return draw


def _like(law: _Law) -> _Law:
    """A new tensor like one that is there: ``op(tensor, *parameters)``."""

    def draw(drawing: Drawing, like: Tensor, *args: Any, memory_format: Any = None, **_: Any) -> Any:
        made = law(drawing, like.shape, *args)
        if like.is_contiguous() and memory_format in (None, torch.preserve_format, torch.contiguous_format):
            return made
        options = {} if memory_format is None else {"memory_format": memory_format}
        return torch.empty_like(like, dtype=drawing.dtype, requires_grad=False, **options).copy_(made)

    return draw


def _valued(law: _Law) -> _Law:
    """A new tensor of the law's parameters, of which the first may be left out: ``op(tensor, *parameters)``."""

    def draw(drawing: Drawing, like: Tensor, *args: Any, **_: Any) -> Any:
        return law(drawing, like.shape, *args)

    return draw


def _in_place(law: _Law) -> _Law:
    """Into the tensor: no gradient passes to what it was before."""

    def draw(drawing: Drawing, tensor: Tensor, *args: Any, **_: Any) -> Any:
        return tensor.copy_(law(drawing, tensor.shape, *args))

    return draw


def _back(law: _Law) -> _Law:
    """Dropout of a tensor, into it."""

    def draw(drawing: Drawing, x: Tensor, p: float, train: bool = True) -> Any:
        return x.copy_(law(drawing, x, p, train))

    return draw


def _normal_of(drawing: Drawing, mean: Any, std: Any = 1.0, **_: Any) -> Tensor:
    shapes = [item.shape for item in (mean, std) if isinstance(item, Tensor)]
    return _normal(drawing, torch.broadcast_shapes(*shapes), mean, std)  # type: ignore[no-untyped-call]  # torch has no types for it


def _bernoulli_of(drawing: Drawing, p: Tensor, **_: Any) -> Tensor:
    return _bernoulli(drawing, p.shape, p)


def _rrelu(drawing: Drawing, x: Tensor, lower: float = 1 / 8, upper: float = 1 / 3, *_: Any, **__: Any) -> Tensor:
    return torch.where(x < 0, x * _uniform(drawing, x.shape, lower, upper), x)


_LAWS: dict[Any, _Law] = {
    _aten.dropout.default: _dropout,
    _aten.dropout_.default: _back(_dropout),
    _aten.native_dropout.default: _native_dropout,
    _aten.feature_dropout.default: _feature_dropout,
    _aten.feature_dropout_.default: _back(_feature_dropout),
    _aten.alpha_dropout.default: _alpha_dropout,
    _aten.alpha_dropout_.default: _back(_alpha_dropout),
    _aten.feature_alpha_dropout.default: _feature_alpha_dropout,
    _aten.feature_alpha_dropout_.default: _back(_feature_alpha_dropout),
    _aten.rrelu.default: _rrelu,
    _aten.bernoulli.default: _bernoulli_of,
    _aten.bernoulli.p: _valued(_bernoulli),
    _aten.bernoulli.Tensor: _valued(_bernoulli),
    _aten.bernoulli_.float: _in_place(_bernoulli),
    _aten.bernoulli_.Tensor: _in_place(_bernoulli),
    _aten.rand.default: _made(_uniform),
    _aten.rand_like.default: _like(_uniform),
    _aten.uniform.default: _valued(_uniform),
    _aten.uniform_.default: _in_place(_uniform),
    _aten.randn.default: _made(_normal),
    _aten.randn_like.default: _like(_normal),
    _aten.normal_functional.default: _valued(_normal),
    _aten.normal_.default: _in_place(_normal),
    _aten.normal.float_float: _made(_normal, 2),
    _aten.normal.Tensor_float: _normal_of,
    _aten.normal.float_Tensor: _normal_of,
    _aten.normal.Tensor_Tensor: _normal_of,
    _aten.log_normal.default: _valued(_log_normal),
    _aten.log_normal_.default: _in_place(_log_normal),
    _aten.exponential.default: _valued(_exponential),
    _aten.exponential_.default: _in_place(_exponential),
    _aten.cauchy.default: _valued(_cauchy),
    _aten.cauchy_.default: _in_place(_cauchy),
    _aten.geometric.default: _valued(_geometric),
    _aten.geometric_.default: _in_place(_geometric),
    _aten.randint.default: _made(_integers_below, 1),
    _aten.randint.low: _made(_integers, 2),
    _aten.randint_like.default: _like(_integers_below),
    _aten.randint_like.low_dtype: _like(_integers),
    _aten.random.to: _valued(_integers_below),
    _aten.random_.to: _in_place(_integers_below),
}
