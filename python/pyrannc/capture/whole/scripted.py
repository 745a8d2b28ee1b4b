"""Functions and sub-modules made by ``torch.jit.script``: they stay whole, and decide at each call what to do."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pyrannc.capture.nodes.fallback import BatchSizes, argument_of, insert_node
from pyrannc.capture.nodes.leaf import OpaqueCall, unchanged
from pyrannc.capture.nodes.oracle import Oracle, real_execution
from pyrannc.capture.nodes.untraceable import UntraceableError
from pyrannc.capture.torch_internals.fakes import FakeTensorMode
from pyrannc.capture.torch_internals.levels import functorch_is_active
from pyrannc.capture.torch_internals.patching import SCRIPT_CALL
from pyrannc.capture.torch_internals.tracing import current_tracer, proxy_of
from pyrannc.capture.user.flatten import flatten
from pyrannc.capture.user.source import SourceTracker
from pyrannc.errors import CaptureError

_WITH_EFFECTS = ("aten::manual_seed", "aten::seed", "aten::set_grad_enabled", "prim::Print", "prim::PythonOp")


def scripted_modules(model: nn.Module) -> list[str]:
    """Paths of the scripted sub-modules that are not parts of another one."""
    found: list[str] = []
    for path, module in model.named_modules():
        inside = any(path.startswith(f"{outer}.") or not outer for outer in found)
        if isinstance(module, torch.jit.ScriptModule) and not inside:
            found.append(path)
    return found


@contextmanager
def opaque_script_functions(
    oracle: Oracle, mode: FakeTensorMode, sizes: BatchSizes, tracker: SourceTracker
) -> Iterator[None]:
    """Keeps calls of scripted functions whole while active."""
    original = SCRIPT_CALL.original
    # Code alone does not tell what a call does: constants and autocast do as well.
    known: dict[Hashable, int] = {}

    def call(function: Any, *args: Any, **kwargs: Any) -> Any:
        tracer = current_tracer()
        if tracer is None or functorch_is_active():
            return original(function, *args, **kwargs)
        operands, structure = flatten((args, kwargs))
        proxies = [proxy_of(operand, tracer) for operand in operands]
        name = str(getattr(function, "name", "function"))

        def run(*tensors: Tensor) -> Any:
            own_args, own_kwargs = structure.rebuild(tensors)
            return function(*own_args, **own_kwargs)

        reals = [
            oracle.sample_of(proxy.node) if proxy is not None else operand
            for proxy, operand in zip(proxies, operands, strict=True)
        ]

        wants: list[bool] = []

        def tried(tensors: Sequence[Any]) -> Any:
            given = [
                item.detach().requires_grad_(like.requires_grad) for item, like in zip(tensors, operands, strict=True)
            ]
            found = _results(run(*given), name)
            wants[:] = [item.requires_grad for item in ([found] if isinstance(found, Tensor) else found)]
            return found.detach() if isinstance(found, Tensor) else tuple(item.detach() for item in found)

        enabled = torch.is_grad_enabled()
        with real_execution(), unchanged(reals, f"the scripted function {name}"), torch.set_grad_enabled(enabled):
            longer = partial(oracle.longer_values_of, proxies, operands)
            made = sizes.at_two_sizes(tried, reals, operands, longer)
        if made.second is None:
            here, cause = tracker.here(), f"what other rows would give the scripted function {name} is not known"
            raise UntraceableError(f"{here}: {cause}", here, cause)
        fakes = sizes.fakes(made, operands[0].device, wants, mode)
        arguments = tuple(argument_of(operand, tracer) for operand in operands)
        whole = isinstance(made.first, Tensor)
        target = OpaqueCall(f"script_{name}", run, f"script.{name}")
        target.does = does = function, structure, target.autocast
        if not any(map(_may_differ, operands)) and _is_deterministic(function):
            target.is_known, target.draws = True, False
            target.title += f".{_digest(function)}.{known.setdefault(does, len(known))}"
        return insert_node(tracer, target, arguments, {}, fakes[0] if whole else fakes)

    with SCRIPT_CALL.replaced_by(call):
        yield


def _may_differ(operand: Tensor) -> bool:
    """True where parts of a batch are given other operands, or gradients come back."""
    return operand.requires_grad or not all(isinstance(size, int) for size in operand.shape)


def _is_deterministic(function: Any) -> bool:
    """True for a scripted function of operators of torch that draw nothing and have no effects."""
    return all(_is_plain(kind) for kind in _kinds(function.inlined_graph))


def _digest(function: Any) -> str:
    """Of its code, with that of the functions that it calls, wherever it stands."""
    lines = (line.partition(" # ")[0] for line in str(function.inlined_graph).splitlines())
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def _kinds(block: Any) -> Iterator[str]:
    for node in block.nodes():
        yield node.kind()
        for inner in node.blocks():
            yield from _kinds(inner)


def _is_plain(kind: str) -> bool:
    library, _, name = kind.partition("::")
    if kind in _WITH_EFFECTS:
        return False
    if library == "prim":
        return True
    packet = getattr(torch.ops.aten, name, None) if library == "aten" else None
    if packet is None:
        # Work on numbers and lists.
        return library == "aten" and hasattr(operator, name.strip("_"))
    overloads = [getattr(packet, overload) for overload in packet.overloads()]
    return not any(torch.Tag.nondeterministic_seeded in overload.tags for overload in overloads)


def _results(made: Any, name: str) -> Any:
    if isinstance(made, Tensor) or (isinstance(made, tuple) and all(isinstance(item, Tensor) for item in made)):
        return made
    raise CaptureError(f"the scripted function {name} returns something else than a tensor or a tuple of tensors")
