"""The way from a call of the model to its parameters, in the user's autograd graph.

One node has the parameters' own leaves behind it, and is behind every call. torch decides by itself what a backward
runs: hooks of the parameters, ``autograd.grad``, ``backward(inputs=...)`` and what stands in ``.grad`` already mean
what they always mean.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.autograd.graph import get_gradient_edge

from pyrannc.capture.torch_internals.gradients import (
    add_each,
    at_end_of_backward,
    graph_task,
    node_hooks,
    runs_in_backward,
    tensor_hooks,
)
from pyrannc.capture.torch_internals.tensors import DisableTorchFunctionSubclass
from pyrannc.errors import RaNNCError
from pyrannc.job.device_order import follow_the_last
from pyrannc.store.buckets import SharedParam
from pyrannc.store.gradient_set import GradientSet
from pyrannc.store.one_leaf import watch_backwards
from pyrannc.store.spread_tensor import is_spread, own_piece

_requires_grad = attrgetter("requires_grad")


class _Given(NamedTuple):
    """Gradients for a backward to hand over.

    Attributes:
        task: the backward's number.
        active: the parameters that get theirs.
    """

    task: int
    gradients: GradientSet
    active: Set[str]


class Delivery:
    """The node before the parameters of one rank.

    Args:
        params: that get gradients.
        spread: names of those of which each rank keeps a part.
        nothing: a parameter without elements, behind every call too; gets a gradient where there is no other.
    """

    def __init__(self, params: Sequence[SharedParam], spread: Set[str], nothing: nn.Parameter) -> None:
        self._params = {shared.name: shared.param for shared in params}
        self._every = frozenset(self._params)
        self._spread = spread
        self._nothing = nothing
        self._of_nothing = get_gradient_edge(nothing).node
        self._set_aside: dict[str, Tensor] = {}
        self._aside_of = -1
        with DisableTorchFunctionSubclass():
            self._nodes = {name: get_gradient_edge(param).node for name, param in self._params.items()}
        self._on_nodes = {name: node_hooks(node) for name, node in self._nodes.items()}
        self._on_any_node = [hooks for both in self._on_nodes.values() for hooks in both]
        # Nobody can compute with what is not whole.
        for name in self._params:
            if name in spread and not is_spread(self._params[name]):
                self._nodes[name].register_prehook(_Door(self, name))
        self._doors = sum(type(hook) is _Door for hooks in self._on_any_node for hook in hooks.values())
        watch_backwards()
        self._tokens: dict[frozenset[str], Tensor] = {}
        self._given: list[_Given] = []
        self._made_on: list[torch.cuda.Stream] = []
        self._gpu = next((shared.param.device for shared in params if shared.param.is_cuda), None)
        self._spare: GradientSet | None = None

    # A script may compute with a parameter outside of the model too: torch adds up whole gradients only.

    def make_room(self, name: str) -> None:
        """Puts a piece aside, until the backward has ended."""
        param = self._params[name]
        if param.grad is not None and is_spread(param.grad):
            if not self._set_aside or self._aside_of != graph_task():
                # What is left of a backward that failed is of no use.
                self._set_aside, self._aside_of = {}, graph_task()
                at_end_of_backward(self.settle)
            self._set_aside[name], param.grad = param.grad, None

    def settle(self) -> None:
        """At the end of a backward: what it has handed over is whole, and there for what the script does next."""
        made_on, self._made_on = self._made_on, []
        for stream in made_on:
            # torch makes the script's stream wait for those of leaves that it visits.
            if stream != (own := torch.cuda.current_stream(self._gpu)):
                own.wait_stream(stream)
        if self._aside_of == graph_task():
            self._put_back()

    def _put_back(self) -> None:
        """Adds to the pieces what has come to whole gradients."""
        aside, self._set_aside = self._set_aside, {}
        for name, grad in aside.items():
            _add_whole(self._params[name], grad)

    def token(self, active: frozenset[str] | None) -> Tensor:
        """What a call's node takes so that the parameters are behind it.

        Args:
            active: those that get a gradient on some rank; ``None`` where the backward has yet to show that.
        """
        if active is None:
            # Hooks must not run where no gradient comes: these parameters get theirs by themselves.
            hooked = self._hooked()
            active = self._every.difference(hooked) if hooked else self._every
        if active not in self._tokens:
            self._tokens[active] = self._make_token([name for name in self._params if name in active])
        return self._tokens[active]

    def one_leaf(self) -> Tensor | None:
        """The leaf that a backward has to reach for all to get their gradients, unless somebody looks at others."""
        return None if self._hooked() else self._nothing

    def _hooked(self) -> list[str]:
        """Names of the parameters that have hooks now, on the tensor or on its node in autograd graphs."""
        on_nodes = sum(map(len, self._on_any_node)) > self._doors
        # What classes of tensors would say takes time for each.
        with DisableTorchFunctionSubclass():
            if not on_nodes and not any(map(any, map(tensor_hooks, self._params.values()))):
                return []
            return [name for name, param in self._params.items() if any(tensor_hooks(param)) or self._is_hooked(name)]

    def _is_hooked(self, name: str) -> bool:
        """True for a parameter whose node has hooks of others."""
        return any(type(hook) is not _Door for hooks in self._on_nodes[name] for hook in hooks.values())

    def _make_token(self, names: list[str]) -> Tensor:
        owner = weakref.ref(self)

        def give() -> Sequence[Tensor | None]:
            delivery = owner()
            return [None] * len(names) if delivery is None else delivery._deliver(names)

        return self._before(names, give)

    def _before(self, names: list[str], give: Callable[[], Sequence[Tensor | None]]) -> Tensor:
        """A tensor behind which are the named parameters, with the gradients that ``give`` has for them then."""
        params = [self._nothing, *(self._params[name] for name in names)]
        of_nothing = None if self._params else torch.zeros(0, device="cpu")
        with torch.enable_grad():
            token: Tensor = _BeforeParams.apply(give, of_nothing, *params)  # type: ignore[no-untyped-call]  # torch has no types for it
        return token

    def take_spare(self) -> GradientSet | None:
        """The gradients that were handed over last, to be written to anew unless somebody holds some of them."""
        spare, self._spare = self._spare, None
        return spare

    def is_about_to_give(self, gradients: GradientSet) -> bool:
        """True where the backward that is running has yet to hand them over: another call's comes before."""
        return any(given.gradients is gradients for given in self._given)

    def give(self, gradients: GradientSet, active: Set[str]) -> None:
        """Sends gradients on to the parameters, in the backward that is running.

        Args:
            gradients: not to be written to while they are held.
            active: the parameters that get theirs.
        """
        task = graph_task()
        self._given = [given for given in self._given if given.task == task]
        self._given.append(_Given(task, gradients, active))

    def _deliver(self, names: list[str]) -> list[Tensor | None]:
        """Hands over what all calls have given in the backward that is running; returns what torch has to."""
        given, self._given = [item for item in self._given if item.task == graph_task()], []
        self._take_over()
        if given and not given[0].gradients.is_kept:
            self._spare = given[0].gradients
        with DisableTorchFunctionSubclass():
            # torch gives none to what was frozen after the call.
            all_train = all(map(_requires_grad, self._params.values()))
            frozen = [] if all_train else [name for name, param in self._params.items() if not param.requires_grad]
        found = _sum([_of(item.gradients, item.active, frozen) for item in given])
        everything = runs_in_backward(self._of_nothing)
        # Hooks run in one order on all ranks: they may sum over these.
        hooked = [name for name in self._hooked() if name in found]
        self._refuse_parts(found, hooked, everything)
        # torch would do the same for each parameter, at a price: where nobody looks, it is done for all at once.
        if everything:
            rest = {name: found[name] for name in hooked}
            self._set({name: grad for name, grad in found.items() if name not in hooked} if hooked else found)
            found = rest
        gradients = [found.get(name) for name in names]
        late = {}
        if everything:
            # Also those that have got a hook since the backward began, if it reaches one leaf alone.
            late = {name: grad for name, grad in found.items() if name not in names or not _may_run(self._params[name])}
        if late:
            self._give_at_once(late)
        return gradients

    def _take_over(self) -> None:
        """Makes this stream wait for those on which the gradients are made, and the script's for it, in the end."""
        if self._gpu is not None:
            follow_the_last(self._gpu)
            self._made_on.append(torch.cuda.current_stream(self._gpu))
            at_end_of_backward(self.settle)

    def _refuse_parts(self, found: Collection[str], hooked: Collection[str], everything: bool) -> None:
        """Raises where torch, or a hook, would take a part of a gradient for the whole."""
        for name in sorted(self._spread & set(hooked if everything else found)):
            if name in hooked or _may_run(self._params[name]):
                what = "a hook on it, registered after the model was called," if everything else "this backward"
                raise RaNNCError(
                    f'the gradient of parameter "{name}" is divided among ranks, so {what} cannot have it whole: '
                    "register hooks before the model is called, use loss.backward() instead of autograd.grad() or "
                    "backward(inputs=...), or keep gradients whole with RANNC_ENABLE_ZERO=1"
                )

    def _set(self, gradients: Mapping[str, Tensor]) -> None:
        beside = []
        with DisableTorchFunctionSubclass():
            for name, new in gradients.items():
                param = self._params[name]
                grad = param.grad
                if grad is None:
                    param.grad = new
                else:
                    beside.append((param, grad, new))
        known = [(grad, new) for _, grad, new in beside if is_spread(grad) == is_spread(new)]
        for param, grad, new in beside:
            if is_spread(new) and not is_spread(grad):
                _add_whole(param, new)
        if known:
            add_each([own_piece(grad) for grad, _ in known], [own_piece(new) for _, new in known])

    def _give_at_once(self, gradients: Mapping[str, Tensor]) -> None:
        """For parameters that are not behind the token: a backward of their own."""
        token = self._before(list(gradients), lambda: list(gradients.values()))
        torch.autograd.backward([token], [torch.zeros_like(token)])


class _Door:
    """Before torch gives a parameter, of whose gradient this rank has a piece, a whole gradient."""

    def __init__(self, delivery: Delivery, name: str) -> None:
        self._delivery, self._name = weakref.ref(delivery), name

    def __call__(self, grads: tuple[Tensor | None, ...]) -> None:
        delivery = self._delivery()
        if delivery is not None and grads[0] is not None:
            delivery.make_room(self._name)


@torch.no_grad()
def _add_whole(param: Tensor, piece: Tensor) -> None:
    """Adds to a piece what stands whole in ``.grad``, alike on all ranks, and puts it there instead."""
    if param.grad is not None:
        piece.add_(param.grad)
    param.grad = piece


def _may_run(param: Tensor) -> bool:
    """False if the backward that is running gives the parameter no gradient for sure."""
    try:
        with DisableTorchFunctionSubclass():
            return runs_in_backward(get_gradient_edge(param).node)
    except RuntimeError:
        # torch does not tell while it runs ``autograd.grad``.
        return True


def _of(gradients: GradientSet, active: Set[str], frozen: Sequence[str]) -> Mapping[str, Tensor]:
    """Those of the parameters that get one, by name."""
    if not frozen and gradients.views.keys() <= active:
        return gradients.views
    left_out = {*(gradients.views.keys() - active), *frozen}
    return {name: view for name, view in gradients.views.items() if name not in left_out}


def _sum(parts: Sequence[Mapping[str, Tensor]]) -> Mapping[str, Tensor]:
    """Gradients by name, of which the first ones take up the others."""
    if len(parts) == 1:
        return parts[0]
    found: dict[str, Tensor] = {}
    for part in parts:
        again = [name for name in part if name in found]
        if again:
            add_each([own_piece(found[name]) for name in again], [own_piece(part[name]) for name in again])
        found = {**part, **found}
    return found


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
