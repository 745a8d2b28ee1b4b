"""Functions that are replaced while a model is traced."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed, nn
from torch._functorch import eager_transforms
from torch._ops import OpOverload, OpOverloadPacket
from torch.distributed import distributed_c10d
from torch.distributions import Distribution, distribution
from torch.fx.experimental import proxy_tensor

from .fakes import FakeTensor
from .operators import flex_attention_operator
from .symbols import SYMBOLIC


class PatchPoint(NamedTuple):
    """A function that torch, or a model, looks up by name at each call."""

    owner: Any
    name: str

    @property
    def original(self) -> Any:
        """What the owner holds now: of a class method, the descriptor."""
        return vars(self.owner)[self.name]

    @contextmanager
    def replaced_by(self, function: Any) -> Iterator[None]:
        """``function`` stands there while active."""
        original = self.original
        setattr(self.owner, self.name, function)
        try:
            yield
        finally:
            setattr(self.owner, self.name, original)


MODULE_CALL = PatchPoint(nn.Module, "__call__")
"""Tells which sub-module runs, and where it fails. Public: global forward hooks, which see no failure."""

MODULE_TO = PatchPoint(nn.Module, "to")
"""A move that changes nothing must not replace parameters. Public: none."""

FLATTEN_WEIGHTS = PatchPoint(nn.RNNBase, "flatten_parameters")
"""Recurrent layers on a GPU move the tensors that stand in the place of their own. Public: the method itself."""

SCRIPT_CALL = PatchPoint(torch.jit.ScriptFunction, "__call__")
"""Scripted functions stay whole. Public: none."""
SCRIPT_METHOD_CALL = PatchPoint(torch._C.ScriptMethod, "__call__")
"""Nor do scripted modules run on tensors without data, which their kernels on a GPU would read. Public: none."""

CONTROL_FLOW = tuple(PatchPoint(torch, _name) for _name in ("cond", "while_loop") if hasattr(torch, _name))
"""Branches and loops run without the compiler inside of what stays whole. Public: none."""

COMPILE = PatchPoint(torch, "compile")
"""Operators with functions compile these where they are called. Public: ``torch.compiler.set_stance``, not for them."""

COND = PatchPoint(type(torch.ops.higher_order.cond), "__call__")
"""Branches become Ops. Public: none."""

WHILE_LOOP = PatchPoint(type(torch.ops.higher_order.while_loop), "__call__")
"""Loops become Ops. Public: none."""

FLEX_ATTENTION = PatchPoint(type(flex_attention_operator), "__call__")
"""It becomes an Op. Public: none."""

REGISTER_HOOK = PatchPoint(Tensor, "register_hook")
"""Gradient hooks become nodes. Public: a mode of torch functions, which some calls pass by."""

NUMBER_REPRS = tuple(PatchPoint(_kind, "__repr__") for _kind in SYMBOLIC)
"""The text of a symbolic number names its symbols. Public: none."""

TENSOR_REPR = PatchPoint(Tensor, "__repr__")
"""An error inside of a rule for fake tensors shows its operands. Public: a subclass of Tensor."""

TRACK_TENSOR_TREE = PatchPoint(proxy_tensor, "track_tensor_tree")
"""Gradient and storage of each result are noted as it is made. Public: none."""

PROXY_CALL = PatchPoint(proxy_tensor, "proxy_call")
"""Operators that fake tensors run wrongly are taken over. Public: custom rules for fake tensors, for own operators."""

RUN_BACKWARD = PatchPoint(torch.autograd, "_engine_run_backward")
"""A forward that differentiates inside is told so. Public: ``torch.autograd.grad``, which is not all that does."""

DERIVATIVES = tuple(PatchPoint(eager_transforms, f"{_kind}_increment_nesting") for _kind in ("grad", "jvp"))
"""Entered by ``torch.func.grad``, ``vjp``, ``jvp``, ``hessian`` and the like. Public: none."""

DISTRIBUTION_INIT = PatchPoint(Distribution, "__init__")
"""What it asks of data becomes Ops. Public: ``validate_args=False``, with which nobody asks."""
_is_all_true = torch._is_all_true
ALL_VALID = next(
    PatchPoint(_owner, _name)
    for _owner, _name in ((distribution, "_all_true_or_runtime_assert"), (torch, "_is_all_true"))
    if hasattr(_owner, _name)
)
"""So distributions ask. Public: none."""


def ask_in_python(valid: Tensor, *_text: str) -> Any:
    """How distributions ask outside of an export. Public: ``Tensor.all``."""
    return _is_all_true(valid)


def asks_of_data(asked: Any) -> bool:
    """Whether a distribution looks if what it is given is valid. Public: only what it was told."""
    return bool(asked._validate_args)


_CODE_OF_INIT, _CODE_OF_VALIDATE = Distribution.__init__.__code__, Distribution._validate_sample.__code__


def parameter_in_question() -> str | None:
    """What the caller of its caller asks about: the name of a distribution's parameter, empty for a sample; None where
    it is no distribution. Public: none."""
    frame = sys._getframe(2)
    if frame.f_code is _CODE_OF_INIT:
        return str(frame.f_locals["param"])
    return "" if frame.f_code is _CODE_OF_VALIDATE else None


def methods_of_samples() -> list[PatchPoint]:
    """The methods of distributions that look whether a sample is valid. Public: their names."""
    classes = [Distribution]
    for each in classes:
        classes += each.__subclasses__()
    points = [PatchPoint(each, name) for each in dict.fromkeys(classes) for name in _OF_SAMPLES if name in vars(each)]
    return [point for point in points if "_validate_sample" in _names_in(point.original)]


def _names_in(method: Any) -> Collection[str]:
    """What a method reads by name: nothing where it is no function, as the None of a class that has none."""
    code = getattr(method, "__code__", None)
    return () if code is None else code.co_names


_OF_SAMPLES = ("cdf", "icdf", "log_prob")

IS_GRAD_ENABLED = PatchPoint(torch, "is_grad_enabled")
"""A trace records gradients also for calls that do not. Public: none."""


def several_ranks() -> bool:
    """Whether this process has joined others, so that a forward may see them. Public: ``torch.distributed``."""
    return distributed.is_initialized() and distributed.get_world_size() > 1


GROUP_SIZE = PatchPoint(distributed.ProcessGroup, "size")
"""A forward that counts the ranks of its process is told. Public: ``get_world_size``, which modules import by name."""

RANK_NOT_IN_GROUP = PatchPoint(distributed_c10d, "_rank_not_in_group")
"""What sends to other ranks asks it first. Public: each function that does, which modules import by name."""

_SENDING = (
    "allgather allgather_coalesced allgather_into_tensor_coalesced allreduce allreduce_coalesced alltoall "
    "alltoall_base barrier broadcast gather monitored_barrier recv recv_anysource reduce reduce_scatter "
    "reduce_scatter_tensor_coalesced scatter send _allgather_base _reduce_scatter_base"
)
GROUP_METHODS = tuple(PatchPoint(distributed.ProcessGroup, _name) for _name in _SENDING.split())
"""What sends to the other ranks of a group. Public: some of them have no underscore, but no documentation."""

OPERATOR_CALLS = PatchPoint(OpOverloadPacket, "__call__"), PatchPoint(OpOverload, "__call__")
"""``torch.ops._c10d_functional`` sends to other ranks. Public: modes of dispatch, which see all that a trace does."""

CHECKS_OF_SENT = tuple(PatchPoint(distributed_c10d, _name) for _name in ("_check_single_tensor", "_check_tensor_list"))
"""What sends tensors to other ranks, or gets them, looks at them so first. Public: subclasses of Tensor, which only
some of these functions ask."""


def other_sends() -> tuple[PatchPoint, ...]:
    """What functional collectives and batches of messages ask first instead. Public: as above."""
    from torch.distributed import _functional_collectives

    # torch 2.11 has the second alone, which asks the first later on.
    names = "_resolve_group", "_resolve_group_name"
    resolve = next(name for name in names if hasattr(_functional_collectives, name))
    return (
        PatchPoint(_functional_collectives, resolve),
        PatchPoint(distributed_c10d, "_check_p2p_op_list"),
    )


GRAD_SWITCHES = (
    (PatchPoint(torch.no_grad, "__enter__"), PatchPoint(torch.no_grad, "__exit__"), False),
    (PatchPoint(torch.enable_grad, "__enter__"), PatchPoint(torch.enable_grad, "__exit__"), True),
    (PatchPoint(torch.set_grad_enabled, "__init__"), PatchPoint(torch.set_grad_enabled, "__exit__"), None),
)
"""What switches the recording of gradients, what switches it back, and to what the first does; ``None``: to what it is
given. Public: none."""


@contextmanager
def fake_told_of_gradients(answers: Mapping[str, Callable[[Tensor, Any], Any]]) -> Iterator[None]:
    """Python is told ``answers[name](tensor, real)`` for attributes of a fake tensor, such as ``requires_grad``.

    Public: none.
    """
    fake: Any = FakeTensor

    def told(name: str, answer: Callable[[Tensor, Any], Any]) -> property:
        real: Any = getattr(Tensor, name)
        return property(lambda tensor: answer(tensor, real.__get__(tensor)), getattr(real, "__set__", None))

    for name, answer in answers.items():
        setattr(fake, name, told(name, answer))
    try:
        yield
    finally:
        for name in answers:
            delattr(fake, name)


TENSOR_META = PatchPoint(proxy_tensor, "_extract_tensor_metadata")
"""Nothing is asked of the strides of each result that is only noted beside its node. Public: none."""
