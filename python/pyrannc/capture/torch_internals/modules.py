"""Modules: what they hold, and what is called in their place."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.utils import stateless

from pyrannc.errors import RaNNCError

from .patching import FLATTEN_WEIGHTS

EXTRA_STATE = nn.modules.module._EXTRA_STATE_KEY_SUFFIX
"""The key of what ``get_extra_state`` of a module gives, after the module's path. Public: none."""


@contextmanager
def reparametrized(module: nn.Module, tensors: dict[str, Tensor], *, stack_weights: bool = False) -> Iterator[None]:
    """A module with other tensors in place of its own. Public: ``torch.func.functional_call``, for one call only.

    They stay in the memory that they are in: recurrent layers on a GPU would take theirs to one piece of it, where
    nobody changes them any more.
    """
    with (
        FLATTEN_WEIGHTS.replaced_by(lambda layer: None),
        stateless._reparametrize_module(module, tensors, stack_weights=stack_weights),
    ):
        yield


def own_buffers(module: nn.Module) -> dict[str, Tensor | None]:
    """What ``register_buffer`` has put into a module. Public: ``named_buffers(recurse=False)``, without aliases."""
    return module._buffers


def has_backward_hooks(module: nn.Module) -> bool:
    """True when gradients of the module's calls pass a hook. Public: none."""
    return bool(module._backward_hooks or module._backward_pre_hooks)


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def hooks_of_calls(module: nn.Module) -> list[dict[int, Callable[..., Any]]]:
    """What runs before and after a module's calls and their backward, as torch keeps it. Public: none."""
    return [vars(module)[name] for name in _HOOKS]


def hooks_of_all_calls() -> list[dict[int, Callable[..., Any]]]:
    """Likewise for the calls of all modules. Public: none."""
    return [getattr(nn.modules.module, f"_global{name}") for name in _HOOKS]


def own_params(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """What has been put into a module as parameters. Public: ``named_parameters(recurse=False)``, without aliases."""
    return module._parameters


def own_modules(module: nn.Module) -> dict[str, nn.Module | None]:
    """Sub-modules by attribute. Public: ``named_children()``, without aliases."""
    return module._modules


@contextmanager
def attribute_access(read: Callable[[nn.Module, str], None], write: Callable[[nn.Module, str], None]) -> Iterator[None]:
    """Tells of every attribute of a module that Python code asks for or sets. Public: none."""
    original = nn.Module.__setattr__

    def getattribute(module: nn.Module, name: str) -> Any:
        read(module, name)
        return object.__getattribute__(module, name)

    def setattribute(module: nn.Module, name: str, value: Any) -> None:
        write(module, name)
        original(module, name, value)

    # Through setattr, as types say that methods are not assigned to.
    setattr(nn.Module, "__getattribute__", getattribute)  # noqa: B010
    setattr(nn.Module, "__setattr__", setattribute)  # noqa: B010
    try:
        yield
    finally:
        del nn.Module.__getattribute__
        setattr(nn.Module, "__setattr__", original)  # noqa: B010


def parse_to(*args: Any, **kwargs: Any) -> tuple[torch.device | None, torch.dtype | None]:
    """Device and type that the arguments of ``module.to`` ask for. Public: none."""
    device, dtype, _, _ = torch._C._nn._parse_to(*args, **kwargs)
    return device, dtype


def is_compiled(module: nn.Module) -> bool:
    """True for what ``torch.compile`` has made of a module. Public: none."""
    # Before torch.compile is used there is none.
    made: Any = getattr(sys.modules.get("torch._dynamo"), "OptimizedModule", None)
    return made is not None and isinstance(module, made)


def compiled_module(compiled: nn.Module) -> nn.Module:
    """What was given to ``torch.compile``. Public: none."""
    module: nn.Module = compiled._orig_mod  # type: ignore[assignment]  # torch has no type for it
    return module


def drop_compiled_call(model: nn.Module) -> bool:
    """Undoes ``module.compile()`` of a model and its sub-modules; True if there was one. Public: none."""
    compiled = [module for module in model.modules() if module._compiled_call_impl is not None]
    for module in compiled:
        module._compiled_call_impl = None
    return bool(compiled)


Dropout = nn.modules.dropout._DropoutNd
"""All kinds of dropout modules. Public: the list of their classes."""


class NotForDDP:
    """A base of modules that DistributedDataParallel is to refuse: it asks for this name first. Public: none."""

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> NoReturn:
        raise RaNNCError(
            f"{type(self).__name__} spreads the model over the processes by itself: leave it out of "
            "DistributedDataParallel and of what wraps models in it, like Accelerator.prepare or transformers.Trainer"
        )


class LoadsItself:
    """A base of modules that load their part of a state dict by their own ``load_state_dict``, also inside of another
    module. Public: none."""

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        own = {key.removeprefix(prefix): value for key, value in state_dict.items() if key.startswith(prefix)}
        try:
            found = self.load_state_dict(own, strict=False)
        except RuntimeError as error:
            error_msgs.append(str(error))
            return
        missing_keys += [f"{prefix}{key}" for key in found.missing_keys]
        unexpected_keys += [f"{prefix}{key}" for key in found.unexpected_keys]

    def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        """As of a module, by itself."""
        raise NotImplementedError


class AppliesItself:
    """A base of modules that ``half()``, ``cuda()``, ``to()`` and the like, also those of a module round them, ask by
    one call. Public: none."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        return self.applied(fn)

    def applied(self, fn: Callable[[Tensor], Tensor]) -> Any:
        """Does to the module's tensors what ``fn`` does to one, and returns the module."""
        raise NotImplementedError
