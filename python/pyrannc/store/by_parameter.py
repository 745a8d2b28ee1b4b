"""Whether an optimizer treats each parameter by itself, so that ranks may update theirs alone."""

from __future__ import annotations

import copy
import inspect
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Set
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.optim import Optimizer, SparseAdam

from pyrannc.capture.nodes.chance import is_generator, other_generators_restored, torch_draws
from pyrannc.errors import RaNNCError
from pyrannc.store.shown_state import kept_state

_EXTENT = 3
_OTHER_SCALES = (1.0, 1e3, 1e-3, 50.0)
"""What the other parameters' gradients are multiplied by, step by step: no rate that is the same throughout."""
_DRAWS = "its step() draws random numbers, and each rank would draw them for its own parameters alone"


def refuse_across(optimizer: Optimizer | None, stages: int, device: torch.device, *, divided: bool = False) -> None:
    """Raises RaNNCError when the update of a parameter may depend on others, which may lie on other ranks.

    Args:
        stages: of the Plan; of one, every rank has all parameters.
        divided: Replicas update other parameters, or parts of them.
        device: where this rank computes.
    """
    if optimizer is None or (stages == 1 and not divided):
        return
    reason = why_across(optimizer, device)
    if reason is not None:
        inner = next(iter(inner_optimizers(optimizer)), None)
        instead = "use another optimizer" if inner is None else f'give RaNNCModule the one in its attribute "{inner}"'
        raise _across(optimizer, stages, reason, instead)


def refuse_later_across(optimizer: Optimizer, stages: int, device: torch.device) -> None:
    """The same of an optimizer that RaNNCModule was not given, which Replicas do not divide.

    One that cannot be tried steps as it is.
    """
    reason = why_across(optimizer, device, shown_alone=True) if stages > 1 else None
    if reason is not None:
        raise _across(optimizer, stages, reason, "use another optimizer")


def _across(optimizer: Optimizer, stages: int, reason: str, instead: str) -> RaNNCError:
    over = f"the {stages} Stages of the plan" if stages > 1 else "the Replicas of the plan's Stage"
    one_stage, whole = "one Stage with RANNC_PARTITION_NUM=1", "whole parameters with RANNC_ENABLE_ZERO=off"
    return RaNNCError(
        f"{type(optimizer).__name__} cannot be divided over {over}, where each rank "
        f"updates its own parameters: {reason}. Force {one_stage if stages > 1 else whole}, or {instead}; if it does "
        "treat each parameter by itself, say so by `optimizer.by_parameter = True` where it is made"
    )


def refuse_sparse(optimizer: Optimizer | None, params: Set[int]) -> None:
    """Raises RaNNCError of an optimizer that takes no gradients but sparse ones, where it lists a model's parameters.

    Args:
        params: ``id`` of each parameter of the model.
    """
    if isinstance(optimizer, SparseAdam) and any(
        id(param) in params for group in optimizer.param_groups for param in group["params"]
    ):
        raise RaNNCError(
            "SparseAdam takes sparse gradients only, but RaNNC gives a model's parameters dense ones, also those of "
            "nn.Embedding(sparse=True): use SGD or Adagrad, which do the same with dense gradients as with sparse "
            "ones, or Adam, which also moves rows that the batch does not have"
        )


def inner_optimizers(optimizer: Optimizer) -> dict[str, list[Optimizer]]:
    """What an optimizer steps with, as Lookahead does, by attribute."""
    found = {}
    for name, value in vars(optimizer).items():
        items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else [value]
        inner = [item for item in items if isinstance(item, Optimizer)]
        if inner:
            found[name] = inner
    return found


def with_inner(optimizer: Optimizer) -> list[Optimizer]:
    """An optimizer, behind those that it steps with."""
    found = [optimizer]
    for each in found:
        inner = [item for items in inner_optimizers(each).values() for item in items]
        found += [item for item in inner if all(item is not known for known in found)]
    return found[::-1]


def leaves_all_to_inner(optimizer: Optimizer) -> bool:
    """True where an optimizer has no groups but those of several that it steps with, as if they were one."""
    *inner, _ = with_inner(optimizer)
    groups = {id(group) for each in inner for group in each.param_groups}
    return not _groups_are_shared(optimizer) and all(id(group) in groups for group in optimizer.param_groups)


def _groups_are_shared(optimizer: Optimizer) -> bool:
    """True where an optimizer steps with one other, in an attribute, that has the same groups."""
    inner = [each for found in inner_optimizers(optimizer).values() for each in found]
    is_attribute = len(inner) == 1 and any(value is inner[0] for value in vars(optimizer).values())
    return is_attribute and list(map(id, inner[0].param_groups)) == list(map(id, optimizer.param_groups))


def why_across(optimizer: Optimizer, device: torch.device, *, shown_alone: bool = False) -> str | None:
    """Why an optimizer cannot be divided, or None.

    An attribute ``by_parameter`` of the optimizer or its class decides, if there is one. Otherwise an optimizer of
    its class and settings is tried on small made-up parameters.

    Args:
        shown_alone: what it has besides its groups, and that it cannot be tried, do not count.
    """
    stated = getattr(optimizer, "by_parameter", None)
    if stated is not None:
        return None if stated else "by_parameter is False"
    if _needs_closure(optimizer):
        return "its step() needs a closure, with which it evaluates the loss for all parameters together"
    besides = None if shown_alone else _has_besides(optimizer)
    if besides is not None:
        return besides
    shown, failure = _tried_across(optimizer, device)
    return shown if shown_alone else shown or failure or None


def _has_besides(optimizer: Optimizer) -> str | None:
    """What an optimizer has besides its groups that stands against dividing it."""
    kept = _keeps_params_in(optimizer)
    if kept is not None:
        return f'it keeps parameters in its attribute "{kept}" besides param_groups'
    inner = next(iter(inner_optimizers(optimizer)), None)
    if inner is not None:
        return f'it works with another optimizer, in its attribute "{inner}"'
    if any(isinstance(value, Generator) or is_generator(value) for value in vars(optimizer).values()):
        return _DRAWS
    return None


def _tried_across(optimizer: Optimizer, device: torch.device) -> tuple[str | None, str]:
    """What a try shows against dividing an optimizer, and why there could be none.

    One that steps with another, whose groups it has, is tried with that.
    """
    failure = ""
    # Some make the state of their parameters at once, and need it.
    for with_state in (False, True):
        try:
            alone, beside = (_updated(optimizer, device, other, with_state) for other in (False, True))
            redrawn = _updated(optimizer, device, False, with_state, seed=1)
        except Exception as error:
            failure = failure or f"a try on small made-up parameters failed ({type(error).__name__}: {error})"
            continue
        if not _same(alone, redrawn):
            return _DRAWS, ""
        if _same(alone, beside):
            return None, ""
        shown = "a try on small made-up parameters has shown that the update of one depends on the gradients of others"
        return shown, ""
    return None, failure


def _same(some: list[Tensor], others: list[Tensor]) -> bool:
    pairs = zip(some, others, strict=True)
    return all(torch.equal(mine.detach().nan_to_num(), its.detach().nan_to_num()) for mine, its in pairs)


def _needs_closure(optimizer: Optimizer) -> bool:
    params = list(inspect.signature(type(optimizer).step).parameters.values())[1:]
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return any(param.default is inspect.Parameter.empty and param.kind not in kinds for param in params)


def _keeps_params_in(optimizer: Optimizer) -> str | None:
    """The attribute in which an optimizer has parameters where narrowing its groups does not reach them."""
    params = {id(param) for group in optimizer.param_groups for param in group["params"]}
    groups = {id(group) for group in optimizer.param_groups}
    for name, value in vars(optimizer).items():
        if name not in ("param_groups", "state") and any(id(item) in params for item in _inside(value, groups)):
            return name
    return None


def _inside(item: Any, groups: set[int], depth: int = 4) -> Iterator[Any]:
    """Tensors in containers, except in the given groups."""
    if isinstance(item, Tensor):
        yield item
    elif depth and id(item) not in groups:
        parts = item.values() if isinstance(item, dict) else item if isinstance(item, (list, tuple)) else ()
        for part in parts:
            yield from _inside(part, groups, depth - 1)


def _updated(optimizer: Optimizer, device: torch.device, other: bool, with_state: bool, seed: int = 0) -> list[Tensor]:
    """The first made-up parameter of each group after some steps.

    Args:
        other: the rest has other gradients.
        seed: of what the steps draw.
    """
    generator = Generator().manual_seed(0)
    trial, firsts = _trial(optimizer, device, generator, with_state)
    first_ids = set(map(id, firsts))
    params = [param for group in trial.param_groups for param in group["params"]]
    with torch_draws(seed, device), other_generators_restored():
        for scale in _OTHER_SCALES:
            for param in params:
                grad = torch.randn(param.shape, generator=generator, dtype=torch.float64, device="cpu")
                param.grad = (-grad * scale if other and id(param) not in first_ids else grad).to(param)
            trial.step()
    return firsts


def _trial(
    optimizer: Optimizer, device: torch.device, generator: Generator, with_state: bool
) -> tuple[Optimizer, list[Tensor]]:
    """An optimizer of the same class and settings with two made-up parameters in each group, and the first of these."""
    shared = inner_optimizers(optimizer) if _groups_are_shared(optimizer) else {}
    trial = tried(optimizer, besides=set(shared))
    for name, (inner,) in shared.items():
        setattr(trial, name, tried(inner))
        getattr(trial, name).param_groups = trial.param_groups
    firsts: list[Tensor] = []
    for group, own in zip(optimizer.param_groups, trial.param_groups, strict=True):
        params: list[Tensor] = group["params"]
        likes = [params[0], params[-1]] if params else []
        made = [_made_up(like, device, generator) for like in likes]
        if with_state:
            pairs = zip(made, likes, strict=True)
            trial.state.update({param: state_like(optimizer, like, param) for param, like in pairs})
        own["params"] = made
        firsts += made[:1]
    return trial, firsts


def tried(optimizer: Optimizer, besides: Set[str] = frozenset()) -> Optimizer:
    """An optimizer of the same class and settings without parameters and state, whose steps have an effect.

    Args:
        besides: attributes that it does not get.
    """
    trial: Optimizer = object.__new__(type(optimizer))
    # What a scheduler or RaNNC has put in the place of methods belongs to the given one.
    left_out = {"state", *besides}
    own = {name: value for name, value in vars(optimizer).items() if name not in left_out and not callable(value)}
    hooks: dict[str, Any] = {name: OrderedDict() for name in own if name.endswith("_hooks")}
    vars(trial).update(copy.deepcopy({**own, **hooks, "param_groups": []}))
    trial.state = defaultdict(dict)
    for group in optimizer.param_groups:
        settings = {"lr": 0.01} if isinstance(group.get("lr"), float) and group["lr"] == 0 else {}
        trial.param_groups.append({**copy.deepcopy(_settings(group)), **settings, "params": []})
    return trial


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}


def _made_up(like: Tensor, device: torch.device, generator: Generator) -> Tensor:
    data = torch.randn([_EXTENT] * like.dim(), generator=generator, dtype=torch.float64, device="cpu")
    return nn.Parameter(data.to(device=device, dtype=like.dtype))


def state_like(optimizer: Optimizer, param: Tensor, made: Tensor, dtype: torch.dtype | None = None) -> dict[str, Any]:
    """The state of a parameter for a made-up one; ``dtype``: of what has its shape, where that is to be another."""
    small = {}
    for name, value in kept_state(optimizer.state.get(param, {})).items():
        shaped = isinstance(value, Tensor) and value.shape == param.shape and value.numel()
        small[name] = (
            value.new_full(made.shape, value.double().mean().item(), dtype=dtype or value.dtype)
            if shaped
            else copy.deepcopy(value)
        )
    return small
