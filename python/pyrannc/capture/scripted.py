"""Functions and sub-modules made by ``torch.jit.script``: they stay whole, and decide at each call what to do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from pyrannc.errors import CaptureError

from .fallback import BatchSizes, insert_node
from .flatten import flatten
from .leaf import OpaqueCall, unchanged
from .oracle import Oracle, real_execution
from .torch_internals import SCRIPT_CALL, FakeTensorMode, current_tracer, functorch_is_active, proxy_of


def scripted_modules(model: nn.Module) -> list[str]:
    """Paths of the scripted sub-modules that are not parts of another one."""
    found: list[str] = []
    for path, module in model.named_modules():
        inside = any(path.startswith(f"{outer}.") or not outer for outer in found)
        if isinstance(module, torch.jit.ScriptModule) and not inside:
            found.append(path)
    return found


@contextmanager
def opaque_script_functions(oracle: Oracle, mode: FakeTensorMode, sizes: BatchSizes) -> Iterator[None]:
    """Keeps calls of scripted functions whole while active."""
    original = SCRIPT_CALL.original

    def call(function: Any, *args: Any, **kwargs: Any) -> Any:
        tracer = current_tracer()
        if tracer is None or functorch_is_active():
            return original(function, *args, **kwargs)
        operands, structure = flatten((args, kwargs))
        proxies = [proxy_of(operand, tracer) for operand in operands]
        name = str(getattr(function, "name", "function"))

        def run(*tensors: Tensor) -> Any:
            own_args, own_kwargs = structure.rebuild(tensors)
            return original(function, *own_args, **own_kwargs)

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
            made = sizes.at_two_sizes(tried, reals, operands)
        fakes = sizes.fakes(made, operands[0].device, wants, mode)
        arguments = tuple(p if p is not None else o for p, o in zip(proxies, operands, strict=True))
        whole = isinstance(made.first, Tensor)
        return insert_node(
            tracer, OpaqueCall(f"script_{name}", run, f"script.{name}"), arguments, {}, fakes[0] if whole else fakes
        )

    with SCRIPT_CALL.replaced_by(call):
        yield


def _results(made: Any, name: str) -> Any:
    if isinstance(made, Tensor) or (isinstance(made, tuple) and all(isinstance(item, Tensor) for item in made)):
        return made
    raise CaptureError(f"the scripted function {name} returns something else than a tensor or a tuple of tensors")
