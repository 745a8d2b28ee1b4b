"""One model on several ranks beside the same model in one process with the global batch."""

from __future__ import annotations

import re
import traceback
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from pyrannc.call.telling import ops_of, share_of
from pyrannc.capture import flatten
from pyrannc.core.plan import PlanFacts
from pyrannc.distributed import get_rank
from pyrannc.errors import RaNNCError
from pyrannc.job.process import own_device
from pyrannc.module import RaNNCModule

from .case import ROWS, Case, NotByRuleError, loss_of, quiet

LIBRARIES = ("transformers", "timm", "torchvision", "torchaudio", "diffusers")
STEPS = 2
_EXACT, _SINGLE = 1e-10, 1e-4
"""By how much numbers may differ; the second where the model itself computes in less than double precision."""
_WITH_SIXTHS = ("aten.hardsigmoid", "aten.hardswish")
"""Operators whose kernels for GPUs have a sixth in single precision, whatever the type, unlike compiled ones."""
_NUDGED = 1e-6
"""By how much a rounding of parameters has to change what a model computes that leaves a choice to it."""
_NOISE = 8.0
"""A gradient that is nothing but terms that cancel each other has so many roundings of the largest one."""
_FLOAT = Tensor.float
_PRECISIONS = ((torch.float64, _FLOAT), (torch.float64, Tensor.double), (torch.float32, _FLOAT))
"""The type that a model is run in, and what ``float()`` gives: some do not run in double precision otherwise."""
BY_ROUNDING = "parameters that are other ones by a rounding make it choose otherwise in one process too"
"""Why a model cannot be held, unless its parameters are moved."""
_RATE = 0.01
_LITTLE = 0.1
"""Share of the parameters below which a part that is not cut needs no word."""


def cases(libraries: Sequence[str] = LIBRARIES) -> list[Case]:
    """The models of the libraries that are installed, in a fixed order."""
    found: list[Case] = []
    for library in libraries:
        try:
            found += import_module(f".{library}_models", __package__).cases()
        except ModuleNotFoundError as error:
            if error.name != library:
                raise
    return found


@dataclass
class Outcome:
    """What came of a model under one Plan.

    Attributes:
        column: ``"cut"``, ``"in leaves"`` (10% of the parameters or more), ``"in tail"`` (half of them or more run on
            all rows on every rank), ``"uncut"``, ``"chance"`` (it draws random numbers, or a rounding decides what it
            computes), ``"refused"``, ``"wrong"``, ``"failed"`` (another error than RaNNC's), or ``"no case"`` (it does
            not run in one process as made).
        why: the cause, where it is not cut; of one that is, what stays whole.
        stages: of the Plan.
        in_leaves: share of the parameters in sub-modules that stay whole.
        in_tail: share of the parameters in what runs on all rows.
    """

    column: str
    why: str = ""
    stages: int = 0
    in_leaves: float = 0.0
    in_tail: float = 0.0


@dataclass
class _Run:
    """What the steps of a training came to."""

    outputs: list[list[Tensor]] = field(default_factory=list)
    gradients: dict[str, Tensor | None] = field(default_factory=dict)
    state: dict[str, Tensor] = field(default_factory=dict)


def run(case: Case, rows: Sequence[int], stages: int, *, as_they_are: bool = False) -> Outcome:
    """Holds one model against one process. All ranks call it; each gets the same outcome, but for differences.

    Args:
        case: the model.
        rows: of each rank's batch.
        stages: that the configuration asks for; with 1, an uncut model is allowed.
        as_they_are: the model keeps its dropout and batch statistics.
    """
    cause = ""
    try:
        for dtype, as_float in _PRECISIONS:
            torch.set_default_dtype(dtype)
            with patch.object(Tensor, "float", as_float):
                try:
                    expected = _train_plain(case, as_they_are)
                except NotByRuleError as error:
                    return Outcome("no case", str(error).splitlines()[0])
                except Exception as error:
                    cause = cause or _short(error)
                else:
                    if not _converts_itself(expected):
                        return _beside(case, rows, stages, expected, as_they_are)
                    cause = cause or "its forward converts its own parameters"
        return Outcome("no case", cause)
    finally:
        torch.set_default_dtype(torch.float32)


def _converts_itself(expected: _Run) -> bool:
    """True for a model that does not stay in the type that it is run in."""
    types = {tensor.dtype for tensor in expected.gradients.values() if tensor is not None}
    return any(kind.is_floating_point and kind != torch.get_default_dtype() for kind in types)


def _made(case: Case, as_they_are: bool) -> tuple[nn.Module, dict[str, Any]]:
    model, arguments = case.make(ROWS, as_they_are)
    dtype = torch.get_default_dtype()
    tensors, structure = flatten(arguments)
    device = own_device()
    converted = [tensor.to(device, dtype if tensor.is_floating_point() else tensor.dtype) for tensor in tensors]
    return (model.train() if as_they_are else quiet(model)).to(device, dtype), structure.rebuild(converted)


def _train_plain(case: Case, as_they_are: bool, seed: int = 0, *, nudged: bool = False) -> _Run:
    """The steps in one process.

    Args:
        case: the model.
        as_they_are: with its dropout and batch statistics.
        seed: of the first step.
        nudged: its parameters are others by a rounding.
    """
    model, arguments = _made(case, as_they_are)
    if nudged:
        _nudge(model)
    found = _Run()
    optimizer = torch.optim.SGD(model.parameters(), lr=_RATE)
    for step in range(STEPS):
        torch.manual_seed(seed + step)
        optimizer.zero_grad()
        _step(model, arguments, found)
        if step == STEPS - 1:
            found.gradients = {name: _kept(param.grad) for name, param in model.named_parameters()}
        optimizer.step()
    found.state = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    return found


@torch.no_grad()
def _nudge(model: nn.Module) -> None:
    for param in model.parameters():
        signs = 1 - 2 * (torch.arange(param.numel(), device=param.device) % 2).view(param.shape)
        param.mul_(1 + signs * torch.finfo(param.dtype).eps)


def _step(model: nn.Module, arguments: dict[str, Any], found: _Run) -> None:
    result = model(**arguments)
    # A loss inside of the model is among the outputs.
    found.outputs.append([tensor.detach().clone() for tensor in flatten(result)[0]])
    loss_of(result).backward()


def _kept(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().clone()


def _beside(case: Case, rows: Sequence[int], stages: int, expected: _Run, as_they_are: bool) -> Outcome:
    model, arguments = _made(case, as_they_are)
    rank = get_rank()
    lo = sum(rows[:rank])
    own = _rows_of(arguments, lo, lo + rows[rank])
    optimizer = torch.optim.SGD(model.parameters(), lr=_RATE)
    wrapped = RaNNCModule(model, optimizer, allow_uncut=stages == 1)
    found = _Run()
    try:
        for step in range(STEPS):
            torch.manual_seed(step)
            optimizer.zero_grad()
            _step(wrapped, own, found)
            if step == STEPS - 1:
                found.gradients = {name: wrapped.get_param_grad(name) for name in wrapped.name_to_param}
            optimizer.step()
        found.state = wrapped.state_dict(rank0_only=False)
        outcome, tolerance = _described(wrapped), _tolerance(wrapped)
        wrong = _differences(found, expected, (lo, lo + rows[rank]), tolerance)
        if wrong:
            chance = _decided_by(case, expected, as_they_are, tolerance)
            drawn = _drawn(wrapped) or "inside of what stays whole"
            outcome = (
                Outcome("chance", f"{chance} ({drawn}). {wrapped._compared}")
                if chance
                else Outcome("wrong", "; ".join(wrong[:3]))
            )
        return outcome
    except RaNNCError as error:
        return Outcome("refused", _short(error))
    except Exception as error:
        return Outcome("failed", _short(error))
    finally:
        if wrapped.ready:
            wrapped.undeploy()


def _rows_of(item: Any, lo: int, hi: int, *, packed: bool = False) -> Any:
    """The part of arguments that has these rows of the batch; ``packed``: some have several elements of each."""
    if isinstance(item, Tensor):
        count, rest = divmod(item.shape[0] if item.dim() else 0, ROWS)
        return item[count * lo : count * hi] if not rest and (count == 1 or packed) else item
    if isinstance(item, dict):
        packed = packed or any(name.endswith("grid_thw") for name in item)
        return {name: _rows_of(value, lo, hi, packed=packed) for name, value in item.items()}
    if isinstance(item, (list, tuple)) and len(item) == ROWS and any(isinstance(i, (dict, Tensor)) for i in item):
        return item[lo:hi]
    return item


def _described(wrapped: RaNNCModule) -> Outcome:
    variant = wrapped._variants.first
    captured, params = variant.whole.captured, dict(wrapped.model.named_parameters())
    total = max(1, sum(param.numel() for param in params.values()))
    ops = [op for kept in captured.kept_whole for op in ops_of(variant, kept)]
    names = (
        [] if variant.tail is None else [variant.whole.facts.params[param].names[0] for param in variant.tail.params]
    )
    in_leaves, in_tail = share_of(variant, ops), sum(params[name].numel() for name in names) / total
    stages = len(PlanFacts.of(wrapped._deployed("plan").plan).stages)
    causes = [f"{kept.paths[0]}: {kept.cause.splitlines()[0]}" for kept in captured.kept_whole]
    if in_tail >= _LITTLE:
        causes.append(f"tail: {variant.first_mixing()}")
    why = "; ".join(causes)[:300]
    column = "uncut" if stages == 1 else "in tail" if in_tail >= 0.5 else "cut" if in_leaves < _LITTLE else "in leaves"
    return Outcome(column, why, stages, round(in_leaves, 3), round(in_tail, 3))


def _drawn(wrapped: RaNNCModule) -> str:
    """The operators that draw random numbers, other than those that stay whole."""
    whole = wrapped._variants.first.whole
    drawn = [
        str(node.target)
        for op, node in zip(whole.facts.ops, whole.captured.op_nodes, strict=True)
        if op.random and not str(getattr(node.target, "title", "")).startswith("pyrannc.opaque.module")
    ]  # fmt: skip
    return ", ".join(f"{name} ({count})" for name, count in Counter(drawn).items())


def _decided_by(case: Case, expected: _Run, as_they_are: bool, tolerance: float) -> str:
    """What makes a model compute something else in one process too, if another seed or a rounding does."""
    if _differences(_train_plain(case, as_they_are, seed=1000), expected, (0, ROWS), tolerance):
        return "it draws random numbers"
    nudged = _train_plain(case, as_they_are, nudged=True)
    if _differences(nudged, expected, (0, ROWS), max(tolerance, _NUDGED)):
        return BY_ROUNDING
    return ""


def _tolerance(wrapped: RaNNCModule) -> float:
    whole = wrapped._variants.first.whole
    is_single = bool(whole.types & {torch.float32, torch.bfloat16, torch.float16, torch.complex64})
    has_sixths = any(str(node.target).startswith(_WITH_SIXTHS) for node in whole.captured.op_nodes)
    return _SINGLE if is_single or (has_sixths and own_device().type == "cuda") else _EXACT


def _differences(found: _Run, expected: _Run, rows: tuple[int, int], tolerance: float) -> list[str]:
    wrong = []
    for step, (mine, right) in enumerate(zip(found.outputs, expected.outputs, strict=True)):
        if len(mine) != len(right):
            wrong.append(f"step {step}: {len(mine)} outputs instead of {len(right)}")
            continue
        for place, (tensor, whole) in enumerate(zip(mine, right, strict=True)):
            wrong += _apart(f"step {step}, output {place}", tensor, _own(whole, tensor, rows), tolerance)
    largest = max((_largest(grad) for grad in expected.gradients.values() if grad is not None), default=0.0)
    noise = _NOISE * torch.finfo(torch.float32 if tolerance >= _SINGLE else torch.float64).eps * largest
    for name, grad in expected.gradients.items():
        got = found.gradients.get(name)
        if grad is None or got is None:
            # One of zeros and none are the same to what follows here, plain descent.
            if any(item is not None and bool(item.any()) for item in (grad, got)):
                wrong.append(f"gradient of {name}: {'none' if got is None else 'one'} unlike one process")
            continue
        wrong += _apart(f"gradient of {name}", got, grad, tolerance, noise)
    for name, tensor in expected.state.items():
        wrong += _apart(name, found.state[name], tensor, tolerance, STEPS * _RATE * noise)
    return wrong


def _own(whole: Tensor, like: Tensor, rows: tuple[int, int]) -> Tensor:
    """This rank's rows of a tensor that has some."""
    if whole.shape == like.shape:
        return whole
    for dim, size in enumerate(whole.shape):
        if size != like.shape[dim] and size % ROWS == 0:
            per_row = size // ROWS
            return whole.narrow(dim, rows[0] * per_row, (rows[1] - rows[0]) * per_row)
    return whole


def _apart(what: str, got: Tensor, right: Tensor, tolerance: float, noise: float = 0.0) -> list[str]:
    if got.shape != right.shape:
        return [f"{what} has shape {tuple(got.shape)} instead of {tuple(right.shape)}"]
    got = got.to(right.device)
    if not right.is_floating_point():
        return [] if torch.equal(got, right) else [f"{what} differs"]
    got, right = got.detach().double(), right.detach().double()
    most = max(tolerance * max(1.0, _largest(right)), noise)
    if torch.allclose(got, right, rtol=tolerance, atol=most, equal_nan=True):
        return []
    return [f"{what} differs by {float((got - right).abs().max()):.2g}"]


def _largest(tensor: Tensor) -> float:
    return float(tensor.detach().abs().nan_to_num(0, 0, 0).max()) if tensor.numel() else 0.0


def _short(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    user = [frame for frame in frames if "site-packages" in frame.filename or "pyrannc" not in frame.filename]
    text = re.sub(r"/\S*site-packages/", "", str(error)).strip()
    where = (
        ""
        if isinstance(error, RaNNCError) or not user
        else f" at {user[-1].filename.split('site-packages/')[-1]}:{user[-1].lineno}"
    )
    return f"{type(error).__name__}: {' '.join(text.split())[:400]}{where}"
