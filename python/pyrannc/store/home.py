"""Where the contents of a tensor are that this rank has not, and what a script gets that needs them here."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import FrameType
from typing import NoReturn

import torch
from torch import Tensor, nn

from pyrannc.capture.reads.lacking import Lacking
from pyrannc.capture.torch_internals.tensors import DisableTorchFunctionSubclass
from pyrannc.errors import RaNNCError
from pyrannc.job import process
from pyrannc.store.torch_functions import title


@dataclass(frozen=True)
class Home:
    """What is known here of a tensor that other ranks hold.

    Attributes:
        kind: ``"parameter"``, ``"buffer"``, or what was made of one.
        name: first name in the model.
        ranks: that hold it.
        device: this rank's.
        strides: as on these ranks.
        plain: the class of the tensor there.
        spread: each of these ranks has a part of it.
        param: ``id`` of the parameter or buffer that it is, or was made of.
        covers: "all" or "some": who changes it changes so many elements of a parameter's gradient; "": none.
    """

    kind: str
    name: str
    ranks: tuple[int, ...]
    device: torch.device
    strides: tuple[int, ...]
    plain: type[Tensor] = Tensor
    spread: bool = False
    param: int = 0
    covers: str = ""

    def __str__(self) -> str:
        if self.spread:
            return f'{self.kind} "{self.name}" is divided among ranks {_list(self.ranks)}'
        where = "rank " + " and ".join(map(str, self.ranks)) if len(self.ranks) < 3 else f"ranks {_list(self.ranks)}"
        own = process.get_rank()
        return f'{self.kind} "{self.name}" is on {where}, not on {"others" if own in self.ranks else f"rank {own}"}'

    def refuse(self, asked: str) -> NoReturn:
        """Raises what a script gets that reads contents."""
        raise RaNNCError(self.why_not(asked))

    def why_not(self, asked: str) -> str:
        """Why contents cannot be read, and what to do instead."""
        return f"{self}, so {asked} cannot read it here. {self._instead}"

    def refuse_differentiating(self) -> NoReturn:
        """Raises what a script gets that asks ``torch.autograd.grad`` for the gradient."""
        raise RaNNCError(
            f"{self}, so autograd.grad() cannot give its gradient here. Call loss.backward(), behind which "
            "model.get_param_grad(name), which all ranks call, gives the whole one; with a plan of one Stage "
            "(RANNC_PARTITION_NUM=1) every rank has all parameters"
        )

    def refuse_sending(self, call: str) -> NoReturn:
        """Raises what a script gets that sends contents to other ranks, or takes them from these, by such a call."""
        if self.is_of_gradient:
            why, whole = "backward() has summed gradients over ranks", "model.get_param_grad(name)"
        elif self.is_of_state:
            why, whole = "RaNNC keeps ranks equal", "optimizer.state_dict(from_global=True)"
        else:
            why, whole = "RaNNC keeps ranks equal", "model.state_dict()"
        raise RaNNCError(
            f"{self}, so {call} can neither send nor receive it here. {why}: leave {call} out. {whole}, "
            "which all ranks call, gives what is whole"
        )

    def refuse_call(self, name: str, *, writes: bool) -> NoReturn:
        """Raises what a script gets for a function of torch that would need contents.

        Args:
            name: as :func:`.torch_functions.function_name` tells it.
            writes: to nothing else but this tensor.
        """
        asked = _initialiser() or title(name)
        if self.is_of_state and writes:
            raise RaNNCError(f"{self}, so {asked} cannot write it here. {self._instead}")
        if self.is_of_gradient or not (writes or asked.startswith("nn.init.")):
            self.refuse(asked)
        kept = "; RANNC_ENABLE_ZERO=2 keeps parameters whole" if self.spread else ""
        raise RaNNCError(
            f"{self}, so {asked} cannot write it here. Use model.load_state_dict(state), which all ranks call, with a "
            f"state that has the new contents, or write them before the model is called first{kept}"
        )

    @property
    def is_of_gradient(self) -> bool:
        """True for a gradient, or what was made of one."""
        return "gradient" in self.kind

    @property
    def is_of_state(self) -> bool:
        """True for the optimizer's state of a parameter."""
        return self.kind.startswith("the optimizer's state")

    @property
    def _instead(self) -> str:
        if self.is_of_state:
            return (
                "optimizer.state_dict(from_global=True), which all ranks call, gives rank 0 the whole, and "
                "optimizer.load_state_dict(state, from_global=True) takes it back; RANNC_ENABLE_ZERO=off keeps it whole"
            )
        if self.is_of_gradient:
            calls = "model.get_param_grad(name) or model.clip_grad_norm(max_norm), which all ranks call"
        else:
            calls = (
                "model.state_dict() or model.get_param(name), which all ranks call, or compute in the model's forward"
            )
        if self.spread:
            kept, level = ("gradients", 1) if self.is_of_gradient else ("parameters", 2)
            return f"Use {calls}; RANNC_ENABLE_ZERO={level} keeps {kept} whole"
        what = "buffers" if self.kind.endswith("buffer") else "parameters"
        return f"Use {calls}; model.named_{what}(from_global=False) lists what is on this rank"


class Guarded(Lacking):
    """A base of the classes of such tensors."""

    dtype: torch.dtype
    _home: Home

    @property
    def home(self) -> Home:
        """Where its contents are."""
        return self._home

    def stand_in(self) -> Tensor:
        """A meta tensor of the same form."""
        assert isinstance(self, Tensor)
        with DisableTorchFunctionSubclass():
            made = torch.empty_strided(self.shape, self._home.strides, dtype=self.dtype, device="meta")
            return nn.Parameter(made, self.requires_grad) if isinstance(self, nn.Parameter) else made

    def __repr__(self, *, tensor_contents: object = None) -> str:
        with DisableTorchFunctionSubclass():
            assert isinstance(self, Tensor)
            return f"<{self._home}: {self.dtype} {tuple(self.shape)}>"

    def __format__(self, spec: str) -> str:
        return format(repr(self), spec) if not spec else self._home.refuse("a format")

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        self._home.refuse("pickling, as of torch.save() or copy.deepcopy(),")

    def __deepcopy__(self, memo: object) -> NoReturn:
        self._home.refuse("copy.deepcopy()")


def _initialiser() -> str | None:
    """The function of ``torch.nn.init`` that runs, as a script calls it."""
    frame: FrameType | None = sys._getframe(1)
    found = None
    while frame is not None:
        if frame.f_globals.get("__name__") == nn.init.__name__ and not frame.f_code.co_name.startswith("_"):
            found = f"nn.init.{frame.f_code.co_name}()"
        frame = frame.f_back
    return found


def _list(ranks: tuple[int, ...]) -> str:
    return ", ".join(map(str, ranks))
