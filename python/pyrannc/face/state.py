"""Parameters, gradients and state of a wrapped model as if it were whole, and copies of it."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from pyrannc.call.agreed import Agreement
from pyrannc.capture.torch_internals.modules import LoadsItself
from pyrannc.checkpoint.state import full_state_dict, full_tensors, load_full_state_dict, refuse_late
from pyrannc.errors import RaNNCError
from pyrannc.face.shown import ShownModel
from pyrannc.job.faults import announced, collective
from pyrannc.runtime.deployment import Deployment


class StateOfModel(LoadsItself, ShownModel):
    """A wrapped model whose parameters may lie on several ranks.

    Args:
        model: the wrapped model.
        options: by name, the other arguments that the class was made with.
    """

    name_to_param: dict[str, nn.Parameter]
    _agreement: Agreement

    def __init__(self, model: nn.Module, options: Mapping[str, Any]) -> None:
        super().__init__(model)
        self._options = dict(options)

    @property
    def ready(self) -> bool:
        """True once a Plan is deployed."""
        return self._deployment is not None

    def _deployed(self, call: str) -> Deployment:
        if self._deployment is None:
            raise RaNNCError(f"{call}() needs a deployed model: call the module once first")
        return self._deployment

    @announced('get_param("{}")')
    def get_param(self, name: str, amp_master_param: bool = False) -> Tensor:
        """A parameter's full tensor on the host, on every rank. After deployment all ranks call it.

        Args:
            name: of the parameter.
            amp_master_param: gone; raises.
        """
        refuse_unavailable(amp_master_param, offload=False)
        param = self._find_param(name)
        if self._deployment is None:
            return param.detach()
        return self._deployment.store.full(self._first_name(name, param), param)

    @announced('get_param_grad("{}")')
    def get_param_grad(self, name: str, amp_master_grad: bool = False) -> Tensor | None:
        """A parameter's gradient on the host, on every rank. After deployment all ranks call it.

        Args:
            name: of the parameter.
            amp_master_grad: gone; raises.
        """
        refuse_unavailable(amp_master_grad, offload=False)
        param = self._find_param(name)
        if self._deployment is None:
            return param.grad
        self._deployment.gradients.reduce_pending()
        return self._deployment.store.full_grad(self._first_name(name, param), param)

    def _find_param(self, name: str) -> nn.Parameter:
        named: dict[str, nn.Parameter] = dict(self.model.named_parameters(remove_duplicate=False))
        if name in named:
            return named[name]
        raise RaNNCError(f'the model has no parameter "{name}"')

    def _first_name(self, name: str, param: nn.Parameter) -> str:
        for first, found in self.name_to_param.items():
            if found is param:
                return first
        refuse_late(name)

    @announced("state_dict()")
    def state_dict(  # type: ignore[override]  # the contract adds rank0_only
        self, *args: Any, rank0_only: bool = True, **kwargs: Any
    ) -> dict[str, Any]:
        """The full state of the model: every parameter and persistent buffer, every alias under its own name.

        After deployment all ranks call it; the tensors are on the host, and copies.

        Args:
            rank0_only: other ranks get an empty dict.

        Raises:
            MismatchError: ranks have copies of a parameter that are not the same.
        """
        if self._deployment is None:
            plain: dict[str, Any] = self.model.state_dict(*args, **kwargs)
            return plain
        self._agreement.drift.look_now()
        return full_state_dict(self.model, self._deployment.store, args, kwargs, rank0_only=rank0_only)

    @announced("load_state_dict(...)")
    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Takes back what :meth:`state_dict` gave. After deployment all ranks call it, and rank 0's counts.

        Returns:
            Missing and unexpected keys, as torch returns them.

        Raises:
            RuntimeError: keys or shapes do not fit; on all ranks, and then nothing has changed.
            RaNNCError: ``assign=True`` after deployment.
        """
        if self._deployment is None:
            return self.model.load_state_dict(state_dict, *args, **kwargs)
        return load_full_state_dict(self.model, self._deployment.store, state_dict, *args, **kwargs)

    @announced("clip_grad_norm(...)")
    def clip_grad_norm(self, max_norm: float) -> Tensor:
        """Scales all gradients so that their global L2 norm is at most ``max_norm``. All ranks call it.

        Returns:
            The norm before, a scalar on this rank's device.
        """
        deployment = self._deployed("clip_grad_norm")
        deployment.gradients.reduce_pending()
        return deployment.store.clip_grad_norm(max_norm)

    # Copies

    def __deepcopy__(self, memo: dict[int, Any]) -> StateOfModel:
        """A module of its own, not deployed, with the whole state; after deployment all ranks make it.

        After deployment the copy has no optimizer.
        """
        if self._deployment is None:
            copied = copy.deepcopy((self.model, self.__dict__["optimizer"], self._options), memo)
        else:
            with collective("copy.deepcopy(model)"):
                full = full_tensors(self.model, self._deployment.store, rank0_only=False)
            for tensor in (*self.model.parameters(), *self.model.buffers()):
                whole = full[id(tensor)]
                is_param = isinstance(tensor, nn.Parameter)
                memo[id(tensor)] = nn.Parameter(whole, tensor.requires_grad) if is_param else whole
            copied = (copy.deepcopy(self.model, memo), None, copy.deepcopy(self._options, memo))
        made = rebuilt(type(self), *copied)
        memo[id(self)] = made
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Raises RaNNCError of a deployed module; of others, makes pickling work."""
        if self._deployment is not None:
            raise RaNNCError(
                "a deployed model cannot be pickled, as torch.save(model) does: save model.state_dict(), which all "
                "ranks call, or call undeploy() first"
            )
        return rebuilt, (type(self), self.model, self.__dict__["optimizer"], self._options)


def rebuilt(kind: type[StateOfModel], model: nn.Module, optimizer: Any, options: Mapping[str, Any]) -> StateOfModel:
    """A module with these arguments."""
    made: StateOfModel = kind(model, optimizer, **options)
    return made


def refuse_unavailable(amp: bool, offload: bool) -> None:
    """Raises RaNNCError of arguments that are gone or not available yet."""
    if amp:
        raise RaNNCError(
            "apex is gone: instead of its arguments (enable_apex_amp, amp_master_param and the like), call the model "
            "inside torch.autocast, and in float16 scale the loss with torch.amp.GradScaler"
        )
    if offload:
        raise RaNNCError("offload_params is not available yet; leave it out")
