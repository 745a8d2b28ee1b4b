"""The wrapped model, shown as if nothing were round it: modules, parameters, attributes, signature."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from pyrannc.capture.torch_internals.modules import AppliesItself, Dropout, NotForDDP, parse_to
from pyrannc.errors import RaNNCError
from pyrannc.log import get_logger
from pyrannc.runtime.deployment import Deployment

_log = get_logger("RaNNCModule")


class _Call:
    """A module's ``forward``, with the signature of the wrapped model's."""

    __name__ = "forward"

    def __init__(self, module: ShownModel) -> None:
        self._module = module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._module._forward(*args, **kwargs)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self._module.model.forward)


class _Forward:
    """The attribute ``forward`` of :class:`ShownModel`."""

    def __get__(self, module: ShownModel | None, kind: type[ShownModel]) -> Callable[..., Any]:
        return kind._forward if module is None else _Call(module)


class _Walk(Protocol):
    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...


def _of_model(name: str) -> _Walk:
    """A method that the wrapped model answers."""

    def method(self: ShownModel, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.model, name)(*args, **kwargs)

    method.__name__ = name
    method.__doc__ = f"The wrapped model's ``{name}``."
    return method


class ShownModel(NotForDDP, AppliesItself, nn.Module):
    """A module that shows another one in its own place.

    Args:
        model: the wrapped model.

    Attributes:
        model: the wrapped model.
        training: of the wrapped model.
    """

    model: nn.Module
    _deployment: Deployment | None = None
    _made = False

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        # Not registered as a sub-module: names of parameters stay the model's own.
        self.__dict__["model"] = model

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    forward = _Forward()

    children = _of_model("children")
    named_children = _of_model("named_children")
    modules = _of_model("modules")
    named_modules = _of_model("named_modules")
    get_submodule = _of_model("get_submodule")
    set_submodule = _of_model("set_submodule")
    get_parameter = _of_model("get_parameter")
    get_buffer = _of_model("get_buffer")
    add_module = _of_model("add_module")
    register_module = _of_model("register_module")
    register_parameter = _of_model("register_parameter")
    register_buffer = _of_model("register_buffer")

    # Parameters and buffers

    def named_parameters(
        self, *args: Any, from_global: bool = True, **kwargs: Any
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """The model's parameters; without ``from_global``, after deployment, those that this rank holds.

        Of one that only other ranks hold, form and type can be read, contents cannot.
        """
        return self._held(self.model.named_parameters(*args, **kwargs), from_global)

    def parameters(self, *args: Any, from_global: bool = True, **kwargs: Any) -> Iterator[nn.Parameter]:
        """Like :meth:`named_parameters`, without names; on a rank that holds none, one without elements."""
        none = True
        for _, param in self.named_parameters(*args, from_global=from_global, **kwargs):
            none = False
            yield param
        if none and not from_global and self._deployment is not None:
            # Optimizers refuse an empty list, which one rank's may be.
            yield self._deployment.gradients.nothing

    def named_buffers(self, *args: Any, from_global: bool = True, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """The model's buffers; without ``from_global``, after deployment, those that this rank holds."""
        return self._held(self.model.named_buffers(*args, **kwargs), from_global)

    def buffers(self, *args: Any, from_global: bool = True, **kwargs: Any) -> Iterator[Tensor]:
        """Like :meth:`named_buffers`, without names."""
        for _, buffer in self.named_buffers(*args, from_global=from_global, **kwargs):
            yield buffer

    def _held(self, named: Iterator[tuple[str, Any]], everything: bool) -> Iterator[tuple[str, Any]]:
        if everything or self._deployment is None:
            yield from named
            return
        local = self._deployment.store.local_ids()
        yield from ((name, tensor) for name, tensor in named if id(tensor) in local)

    # Modes

    @property
    def training(self) -> bool:
        """True in training mode."""
        model = self.__dict__.get("model")
        return model is None or model.training

    @training.setter
    def training(self, mode: bool) -> None:
        if "model" in self.__dict__:
            self.model.training = mode

    def train(self, mode: bool = True) -> Any:
        """Switches the model to training or evaluation mode; the Plan stays."""
        self.model.train(mode)
        return self

    def requires_grad_(self, requires_grad: bool = True) -> Any:
        """Says whether the model's parameters get gradients."""
        self.model.requires_grad_(requires_grad)
        return self

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the gradients."""
        self.model.zero_grad(set_to_none)
        if self._deployment is not None:
            self._deployment.gradients.nothing.grad = None

    def enable_dropout(self, enable: bool) -> None:
        """Switches all dropout on or off, whatever the mode."""
        for module in self.model.modules():
            if isinstance(module, Dropout):
                module.training = enable

    def apply(self, fn: Callable[[nn.Module], None]) -> Any:
        """Calls ``fn`` with each of the model's modules."""
        self.model.apply(fn)
        return self

    # Devices and types

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Changes the type of the model, if one is given; does not move it: the Plan says where parameters are.

        Raises:
            RaNNCError: the type changes, and the model is deployed.
        """
        device, dtype = parse_to(*args, **kwargs)
        if dtype is not None:
            self.applied(lambda tensor: tensor.to(dtype if tensor.is_floating_point() else tensor.dtype))
        if device is not None:
            _log.warning("to() and cuda() do nothing: the plan places the parameters")
        return self

    def cuda(self, device: Any = None) -> Any:
        """Does nothing, like :meth:`to`."""
        return self.to("cuda" if device is None else device)

    def applied(self, fn: Callable[[Tensor], Tensor]) -> Any:
        """What ``half()``, ``double()`` and a module round this one ask for: changes types, and moves nothing."""
        tensors = [*self.model.parameters(), *self.model.buffers()]
        changed = {
            old: fn(torch.empty(0, dtype=old, device="cpu")).dtype for old in {tensor.dtype for tensor in tensors}
        }
        if all(old == new for old, new in changed.items()):
            return self
        if self._deployment is not None:
            raise RaNNCError(
                "half(), bfloat16(), to(dtype) and the like cannot change the types of a deployed model: change them "
                "before the first call, as in net.bfloat16() before wrapping, or call undeploy() first"
            )
        for tensor in tensors:
            grad, tensor.grad = tensor.grad, None
            tensor.data = tensor.data.to(changed[tensor.dtype])
            tensor.grad = grad.to(tensor.dtype) if grad is not None else None
        return self

    # Attributes

    def __getattr__(self, name: str) -> Any:
        model = self.__dict__.get("model")
        if model is None or (name.startswith("_") and name not in model.__dict__):
            return super().__getattr__(name)
        return getattr(model, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if self._is_own(name):
            super().__setattr__(name, value)
        else:
            setattr(self.model, name, value)

    def __delattr__(self, name: str) -> None:
        if self._is_own(name):
            super().__delattr__(name)
        else:
            delattr(self.model, name)

    def _is_own(self, name: str) -> bool:
        """True for an attribute of the wrapper; what a script sets besides is the model's."""
        return not self._made or name in self.__dict__ or hasattr(type(self), name)

    def __dir__(self) -> list[str]:
        return sorted({*object.__dir__(self), *dir(self.model)})

    def __getitem__(self, key: Any) -> Any:
        return self.model[key]  # type: ignore[index]  # as the model says

    def __len__(self) -> int:
        return len(self.model)  # type: ignore[arg-type]  # likewise

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        inner = repr(self.model).replace("\n", "\n  ")
        return f"{type(self).__name__}(\n  (model): {inner}\n)"
