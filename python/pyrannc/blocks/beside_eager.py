"""Compiled code beside the function that it stands for: as near to exact results as that, or it is not used."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.autograd.graph import save_on_cpu
from torch.fx.node import map_aggregate, map_arg

from pyrannc.blocks.compiled import SpanCode
from pyrannc.blocks.form import Meta
from pyrannc.blocks.graphs import NotCompilable
from pyrannc.blocks.joint import results_of
from pyrannc.capture.nodes.bounds import Bounds
from pyrannc.capture.nodes.chance import torch_draws
from pyrannc.capture.nodes.operands import arguments
from pyrannc.capture.nodes.ops import draws_random_numbers
from pyrannc.capture.torch_internals.devices import all_digits

_MOST = 2.0
"""Times the function's own error."""
_ROUNDINGS = {torch.float64: 64.0, torch.float32: 64.0, torch.complex64: 64.0, torch.complex128: 64.0}
_ROUNDINGS_OF_HALF = 4.0
"""Last digits by which results may differ where the function happens to be exact."""
_SMALL = 0.01
"""Of the largest among results: where the exact number is zero, rounding errors of others are what is left."""
_FEW = 1e-3
"""Elements whose truth may hang on a rounding."""
_PIECE = 1 << 24
"""Elements that are compared at a time."""
_FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def difference(code: SpanCode, device: torch.device) -> str | None:
    """Runs both on made-up data, and so that it hardly takes more memory than the function itself.

    Returns:
        What differs by more than rounding, None if nothing does.

    Raises:
        NotCompilable: the function cannot be run on such data.
        Exception: one of them cannot be run.
    """
    with torch_draws(0, device), torch.enable_grad():
        takes, seeds, plain = _tried(code, device)
        ours = _on_host(_outcome(code, takes, seeds, compiled=True))
        exact = _exact(code, takes, seeds)
        if exact is None:
            with all_digits():
                exact = _plain_outcome(code, takes, seeds)
    return _first_difference(_names(code), ours, plain, exact)


def _tried(code: SpanCode, device: torch.device) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Made-up data that the function has an answer for, where some end the process of a GPU.

    Returns:
        What it takes, the gradients that it starts from, and on the host what it makes of both.
    """
    for in_first, as_shares in ((False, False), (True, False), (True, True)):
        takes = [_made_up(meta, device, in_first=in_first, as_shares=as_shares) for meta in code.form.takes]
        seeds = [_made_up(code.ends.made[place], device) for place in code.ends.wanted]
        with suppress(IndexError, ValueError), Bounds():  # type: ignore[no-untyped-call]  # torch has no types for it
            return takes, seeds, _on_host(_plain_outcome(code, takes, seeds))
    raise NotCompilable("it cannot be run on made-up data")


def _made_up(meta: Meta, device: torch.device, *, in_first: bool = False, as_shares: bool = False) -> Tensor:
    """Numbers of about one; positive where they may be variances, and zeros and ones where they may be places.

    Args:
        in_first: all places are the first.
        as_shares: numbers lie between zero and one.
    """
    made = torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device=device)
    shown = made.as_strided([1 if not step else size for size, step in zip(meta.shape, meta.stride, strict=True)],
                            meta.stride)  # fmt: skip
    if not (meta.dtype.is_floating_point or meta.dtype.is_complex):
        most = 0.0 if in_first and meta.dtype != torch.bool else 0.5
        shown.copy_(torch.rand(shown.shape, device=device) < most)
    elif as_shares:
        shown.copy_(torch.rand(shown.shape, device=device) * 0.8 + 0.1)
    elif len(meta.shape) <= 1:
        shown.copy_(torch.rand(shown.shape, device=device) + 0.5)
    else:
        shown.copy_(torch.randn(shown.shape, device=device) * (0.5 if len(meta.shape) > 2 else 0.05))
    return made


def _place(code: SpanCode) -> None:
    """Somewhere in the batch."""
    first = 3
    code.randomness.at([(first, first + code.form.rows)] if code.form.rows else [])


def _numbers(code: SpanCode) -> list[int]:
    """Ops somewhere in the Graph."""
    return [5 + 2 * place for place in range(code.numbers)]


def _outcome(code: SpanCode, takes: Sequence[Tensor], seeds: Sequence[Tensor], *, compiled: bool) -> list[Tensor]:
    """What is given, new contents of what is changed, and gradients."""
    form, ends, randomness = code.form, code.ends, code.randomness
    changed = set(ends.changed)
    leaves = [
        (tensor.clone() if place in changed else tensor.detach()).requires_grad_(meta.requires_grad)
        for place, (tensor, meta) in enumerate(zip(takes, form.takes, strict=True))
    ]
    _place(code)
    with randomness.borrowed(), torch.set_grad_enabled(form.trains):
        found = code(_numbers(code), leaves, set()) if compiled else code.plain(form.rows, *_numbers(code), *leaves)
    results = results_of(found)
    made = [result for result, item in zip(results, ends.given, strict=True) if not item.taken]
    grads: Sequence[Tensor | None] = ()
    if seeds:
        sources = [leaves[place] for place in ends.differentiated]
        grads = torch.autograd.grad([made[place] for place in ends.wanted], sources, seeds, allow_unused=True)
    found_grads = [
        torch.zeros_like(takes[place]) if grad is None else grad
        for place, grad in zip(ends.differentiated, grads, strict=bool(seeds))
    ]
    return [*(tensor.detach() for tensor in made), *(leaves[place] for place in ends.changed), *found_grads]


def _plain_outcome(code: SpanCode, takes: Sequence[Tensor], seeds: Sequence[Tensor]) -> list[Tensor]:
    """What the function itself makes. Compiled, it may keep much less for its backward, so that there is no room for
    what it keeps by itself: that lies on the host then."""
    with suppress(torch.OutOfMemoryError):
        return _outcome(code, takes, seeds, compiled=False)
    with save_on_cpu():
        return _outcome(code, takes, seeds, compiled=False)


def _on_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.cpu() for tensor in tensors]


def _names(code: SpanCode) -> list[str]:
    ends = code.ends
    return [
        *(f"result {place}" for place in range(len(ends.made))),
        *(f"the new contents of argument {place}" for place in ends.changed),
        *(f"the gradient of argument {place}" for place in ends.differentiated),
    ]


class _Exact(fx.Interpreter):
    """Runs a graph in float64 whatever its types, with all digits.

    In their own types run operators that do not know it, and those that draw, which would draw others.
    """

    def run_node(self, n: fx.Node) -> Any:
        if n.op != "call_function":
            return super().run_node(n)
        if draws_random_numbers(n):
            return self._run_in_own_type(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        try:
            return self.call_function(n.target, map_aggregate(args, _widened), map_aggregate(kwargs, _widened))
        except Exception:  # what a kernel raises for a type that it does not know
            return self._run_in_own_type(n)

    def _run_in_own_type(self, n: fx.Node) -> Any:
        own: Any = [map_arg(found, self._in_own_type) for found in (n.args, n.kwargs)]
        return self.call_function(n.target, *own)

    def _in_own_type(self, node: fx.Node) -> Any:
        found = self.env[node]
        is_float = isinstance(found, Tensor) and found.is_floating_point()
        return found.to(node.meta["val"].dtype) if is_float else found


def _draws_by_values(node: fx.Node) -> bool:
    """True for an operator that draws other numbers for other values, as attention with dropout does not."""
    return draws_random_numbers(node) and "dropout_p" not in arguments(node)


def _widened(item: Any) -> Any:
    if isinstance(item, Tensor):
        return item.double() if item.dtype in _FLOATS else item
    return torch.float64 if item in _FLOATS and isinstance(item, torch.dtype) else item


def _exact(code: SpanCode, takes: Sequence[Tensor], seeds: Sequence[Tensor]) -> Sequence[Tensor] | None:
    """What :func:`_outcome` is in float64; None where that cannot be had: memory lacks, or draws hang on roundings.

    What has failed holds its tensors as long as its exception lives, which is no longer than this runs.
    """
    assert code.whole is not None, "it was compiled just now"
    if any(map(_draws_by_values, code.whole.graph.nodes)):
        return None
    _place(code)
    with code.randomness.borrowed(), torch.no_grad(), all_digits():
        drawn = code.lifted.draw(code.randomness, _numbers(code))
        try:
            arguments = [_widened(tensor) for tensor in (*takes, *drawn, *seeds)]
            with code.lifted.placing(code.randomness, _numbers(code)):
                found: Sequence[Tensor] = _Exact(code.whole).run(*arguments)
        except Exception:  # whatever an operator raises that does not know float64
            return None
        return list(found)


def _first_difference(
    names: Sequence[str], ours: Sequence[Tensor], plain: Sequence[Tensor], exact: Sequence[Tensor]
) -> str | None:
    largest = max(
        [_Apart.of(tensor, tensor, tensor).size for tensor in exact if tensor.is_floating_point()], default=0.0
    )
    for name, mine, other, reference in zip(names, ours, plain, exact, strict=True):
        text = _told(mine, other, reference, largest)
        if text:
            return f"{name} {text}"
    return None


def _told(mine: Tensor, other: Tensor, reference: Tensor, largest: float) -> str:
    if (mine.shape, mine.dtype) != (other.shape, other.dtype):
        return f"is {mine.dtype} {tuple(mine.shape)} instead of {other.dtype} {tuple(other.shape)}"
    if not (mine.dtype.is_floating_point or mine.dtype.is_complex):
        share = (mine != other).double().mean().item() if mine.numel() else 0.0
        return f"differs in {share:.1%} of its elements" if share > _FEW else ""
    apart = _Apart.of(mine, other, reference)
    if not apart.finite:
        return "is not finite where it should be"
    digits = _ROUNDINGS.get(mine.dtype, _ROUNDINGS_OF_HALF) * torch.finfo(mine.dtype).eps
    if apart.mine <= _MOST * apart.other + digits * max(apart.size, _SMALL * largest):
        return ""
    return f"is off by {apart.mine:.2g} on average, without compiling by {apart.other:.2g}"


@dataclass(frozen=True)
class _Apart:
    """How far two tensors are from a third, each figure the root of the mean square over what is finite.

    Attributes:
        mine: of the first.
        other: of the second.
        size: of the third itself.
        finite: the first is where the second is.
    """

    mine: float
    other: float
    size: float
    finite: bool

    @staticmethod
    def of(mine: Tensor, other: Tensor, reference: Tensor) -> _Apart:
        """Looks at a piece after another: logits in float64 may not fit beside what trains."""
        sums, count, all_finite = torch.zeros(3, dtype=torch.float64, device="cpu"), 0, True
        for first, second, third in zip(*map(_pieces, (mine, other, reference)), strict=True):
            first, second = first.to(third.device), second.to(third.device)
            finite = second.isfinite()
            all_finite &= bool(first[finite].isfinite().all())
            finite &= first.isfinite() & third.isfinite()
            right = third[finite].to(torch.complex128 if third.is_complex() else torch.float64)
            errors = (first[finite].to(right.dtype) - right, second[finite].to(right.dtype) - right, right)
            sums += torch.stack([error.abs().square().sum() for error in errors]).cpu()
            count += right.numel()
        of_mine, of_other, size = (sums / max(1, count)).sqrt().tolist()
        return _Apart(of_mine, of_other, size, all_finite)


def _pieces(tensor: Tensor) -> Sequence[Tensor]:
    return torch.split(tensor.detach().reshape(-1), _PIECE)
