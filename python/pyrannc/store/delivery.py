"""The way from a call of the model to its parameters, in the user's autograd graph.

One node has the parameters' own leaves behind it, and is behind every call. torch decides by itself what a backward
runs: hooks of the parameters, ``autograd.grad``, ``backward(inputs=...)`` and what stands in ``.grad`` already mean
what they always mean.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from pyrannc.capture.torch_internals import add_each, graph_task, tensor_hooks
from pyrannc.store.buckets import Bucket, strides_of


@dataclass(frozen=True)
class _Place:
    """Where a parameter's gradient lies in the flat tensor of its type."""

    param: nn.Parameter
    start: int
    strides: tuple[int, ...]


@dataclass(frozen=True)
class _Given:
    """Gradients on their way."""

    task: int
    flats: Mapping[torch.dtype, Tensor]
    active: Set[str]
    taken: Callable[[], None] | None


class Delivery:
    """The node before the parameters of one rank.

    Args:
        buckets: where gradients lie.
        nothing: a parameter without elements, behind every call too; gets a gradient where there is no other.
    """

    def __init__(self, buckets: Sequence[Bucket], nothing: nn.Parameter) -> None:
        self._nothing = nothing
        self._places = {
            shared.name: _Place(shared.param, bucket.start + start, strides_of(shared.param))
            for bucket in buckets
            for shared, start in bucket.placed()
        }
        self._tokens: dict[frozenset[str] | None, Tensor] = {}
        self._given: list[_Given] = []

    def token(self, active: Set[str] | None) -> Tensor:
        """What a call's node takes so that the parameters are behind it.

        Args:
            active: those that get a gradient on some rank; ``None`` before the first backward of such a call.
        """
        key = None if active is None else frozenset(active)
        if key not in self._tokens:
            # Their hooks must not run where no gradient comes, which the first backward shows.
            names = [name for name, place in self._places.items() if _is_wanted(name, place.param, key)]
            self._tokens[key] = self._make_token(names)
        return self._tokens[key]

    def _make_token(self, names: list[str]) -> Tensor:
        owner = weakref.ref(self)

        def give() -> Sequence[Tensor | None]:
            delivery = owner()
            return [None] * len(names) if delivery is None else delivery._gradients_for(names)

        return self._before(names, give)

    def _before(self, names: list[str], give: Callable[[], Sequence[Tensor | None]]) -> Tensor:
        """A tensor behind which are the named parameters, with the gradients that ``give`` has for them then."""
        params = [self._nothing, *(self._places[name].param for name in names)]
        of_nothing = None if self._places else torch.zeros(0)
        with torch.enable_grad():
            token: Tensor = _BeforeParams.apply(give, of_nothing, *params)  # type: ignore[no-untyped-call]  # torch has no types for it
        return token

    def give(self, flats: Mapping[torch.dtype, Tensor], active: Set[str], taken: Callable[[], None] | None) -> None:
        """Sends gradients on to the parameters, in the backward that is running.

        Args:
            flats: the gradients, by type.
            active: the parameters that get theirs.
            taken: called when nothing but what the parameters got shares memory with ``flats``.
        """
        task = graph_task()
        self._given = [given for given in self._given if given.task == task]
        self._given.append(_Given(task, flats, active, taken))

    def _gradients_for(self, names: list[str]) -> list[Tensor | None]:
        """What all calls behind which this rank's parameters are have given in the backward that is running."""
        given, self._given = [given for given in self._given if given.task == graph_task()], []
        found: dict[str, Tensor] = {}
        for item in given:
            views = self._views(item)
            again = [name for name in views if name in found]
            if again:
                add_each([found[name] for name in again], [views.pop(name) for name in again])
            found.update(views)
            if item.taken is not None:
                item.taken()
        gradients = [found.pop(name, None) for name in names]
        if found:
            self._give_at_once(found)
        return gradients

    def _views(self, given: _Given) -> dict[str, Tensor]:
        places = [(name, place) for name, place in self._places.items() if name in given.active]
        return {
            name: given.flats[place.param.dtype].as_strided(place.param.shape, place.strides, place.start)
            for name, place in places
        }

    def _give_at_once(self, gradients: Mapping[str, Tensor]) -> None:
        """For parameters that are not behind the token: a backward of their own."""
        token = self._before(list(gradients), lambda: list(gradients.values()))
        torch.autograd.backward([token], [torch.zeros_like(token)])


def _is_wanted(name: str, param: nn.Parameter, active: Set[str] | None) -> bool:
    return not any(tensor_hooks(param)) if active is None else name in active


class _BeforeParams(Function):
    @staticmethod
    def forward(
        ctx: Any, give: Callable[[], Sequence[Tensor | None]], of_nothing: Tensor | None, *params: nn.Parameter
    ) -> Tensor:
        ctx.give, ctx.of_nothing = give, of_nothing
        ctx.set_materialize_grads(False)
        return torch.empty(0, device=params[-1].device)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        of_nothing = None if ctx.of_nothing is None else ctx.of_nothing.clone()
        return (None, None, of_nothing, *ctx.give())
