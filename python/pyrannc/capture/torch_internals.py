"""Every private or undocumented name of torch that pyrannc uses, each with why, and what public name would replace it;
those of its compiler are in :mod:`pyrannc.capture.torch_compiler`.

It stands with capture, which uses nearly all of them; what else uses some (blocks, profile, module) may import capture.
All other files keep to torch's public names, as ``tests/capture/test_torch_names.py`` proves; name by name, it also
holds what is relied upon. So a new version of torch shows in these two, and only here, what it has changed.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from operator import attrgetter
from types import SimpleNamespace
from typing import Any, NamedTuple, NoReturn

import sympy
import torch
from torch import Tensor, fx, nn
from torch._functorch import pyfunctorch
from torch._guards import SLoc, TracingContext, tracing
from torch._ops import HigherOrderOperator as _HigherOrderOperator
from torch._ops import OpOverload as _OpOverload
from torch._subclasses import fake_tensor
from torch.amp import autocast_mode
from torch.autograd.function import Function
from torch.fx.experimental import proxy_tensor, symbolic_shapes
from torch.multiprocessing import reductions
from torch.nn.utils import stateless
from torch.optim import Optimizer
from torch.utils import _python_dispatch, _pytree

from pyrannc.errors import RaNNCError

# --- Tensors without data -------------------------------------------------------------------------------------------

FakeTensor = fake_tensor.FakeTensor
"""Tells a tensor of the trace from a real one. Public: none."""

FakeTensorMode = fake_tensor.FakeTensorMode
"""Runs a model on tensors without data, on a device that need not be here. Public: none; torch.export hides its own."""

unset_fake_temporarily = fake_tensor.unset_fake_temporarily
"""Real execution inside a trace, to answer questions about data. Public: none."""

DynamicOutputShapeException = fake_tensor.DynamicOutputShapeException
"""Tells an operator whose shapes depend on data from one that fails. Public: none."""

UnsupportedOperatorException = fake_tensor.UnsupportedOperatorException
"""Tells an operator without a rule for fake tensors, which is then run on real samples. Public: none."""


@contextmanager
def fake_tensors_untold() -> Iterator[None]:
    """What fake tensors cannot run raises, without torch writing down the whole traceback as well. Public: none."""
    log = logging.getLogger(fake_tensor.__name__)

    def is_no_traceback(record: logging.LogRecord) -> bool:
        return record.exc_info is None

    log.addFilter(is_no_traceback)
    try:
        yield
    finally:
        log.removeFilter(is_no_traceback)


def runs_without_data() -> bool:
    """True inside of a rule for fake tensors, where no tensor, real or not, can be read. Public: none."""
    return bool(torch._C._meta_in_tls_dispatch_include())


@contextmanager
def told_of_no_trace(is_traced: Callable[[Tensor], bool]) -> Iterator[None]:
    """Who asks is told that nothing is compiled, and which tensors have no data. Public: none.

    Args:
        is_traced: of a tensor without data, whether that is told.
    """

    class Asked(type):
        def __instancecheck__(cls, item: Any) -> bool:
            # Rules for fake tensors ask too.
            return isinstance(item, FakeTensor) and (runs_without_data() or is_traced(item))

    class Told(metaclass=Asked):
        pass

    def is_compiling() -> bool:
        return False

    compiling, fake = PatchPoint(torch.compiler, "is_compiling"), PatchPoint(torch._subclasses, "FakeTensor")
    with compiling.replaced_by(is_compiling), fake.replaced_by(Told):
        yield


def known_data(tensor: Tensor) -> Tensor | None:
    """The data of a small fake tensor that the trace made itself, such as ``torch.tensor(3)``. Public: none."""
    constant = getattr(tensor, "constant", None)
    return constant if isinstance(constant, Tensor) else None


# --- The trace ------------------------------------------------------------------------------------------------------


def trace_before_dispatch(call: Callable[..., Any], *args: Any) -> fx.GraphModule:
    """The Ops of a call as autograd sees them. Public: ``make_fx`` without ``_allow_non_fake_inputs``, or export."""
    trace = proxy_tensor.make_fx(call, pre_dispatch=True, tracing_mode="real", _allow_non_fake_inputs=True)
    return trace(*args)


def current_tracer() -> Any:
    """The fx tracer of the running trace, None outside of one. Public: none."""
    mode: Any = proxy_tensor.get_proxy_mode()
    return None if mode is None else mode.tracer


disable_proxy_modes_tracing = proxy_tensor.disable_proxy_modes_tracing
"""What runs under it leaves no node. Public: none."""


SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
"""Numbers of a trace that extents or data tell. Public: each of them."""


def proxy_of(item: Any, tracer: Any) -> fx.Proxy | None:
    """What stands for a tensor or a symbolic number in the trace, if anything does. Public: none."""
    if not isinstance(item, (Tensor, *SYMBOLIC)):
        return None
    slot: Any = proxy_tensor.get_proxy_slot(item, tracer, None)
    if isinstance(slot, proxy_tensor._ProxyTensor):
        slot = slot.proxy
    if slot is None or isinstance(slot, fx.Proxy):
        return slot
    proxy = slot.force()
    return proxy if isinstance(proxy, fx.Proxy) else None


def track(result: Any, proxy: fx.Proxy, tracer: Any) -> None:
    """``proxy`` stands for ``result`` from now on: for Ops whose inside is not traced. Public: custom operators."""
    proxy_tensor.track_tensor_tree(result, proxy, constant=None, tracer=tracer)


def note_new_nodes(graph: fx.Graph, note: Callable[[fx.Node], None]) -> None:
    """Calls ``note`` on every node made in ``graph``. Public: none; ``create_node`` is, yet not to be shadowed."""
    create = graph.create_node

    def create_noted(*args: Any, **kwargs: Any) -> fx.Node:
        node = create(*args, **kwargs)
        note(node)
        return node

    graph.create_node = create_noted  # type: ignore[method-assign]  # shadows it on this graph only


# What belongs to export or torch.compile is imported when it is used: with it comes all of torch.compile, which takes
# more than a second.


def non_strict_functions() -> AbstractContextManager[None]:
    """Lets Python code of a model work on symbolic sizes (indexing, ``math`` functions). Public: non-strict export."""
    from torch._export.non_strict_utils import _NonStrictTorchFunctionHandler

    handler: AbstractContextManager[None] = _NonStrictTorchFunctionHandler()
    return handler


def override_builtin_ops() -> AbstractContextManager[None]:
    """Likewise for ``max``, ``min`` and ``pow`` of Python. Public: non-strict export."""
    from torch._export.non_strict_utils import _override_builtin_ops

    return _override_builtin_ops()


@contextmanager
def functions_as_operators() -> Iterator[None]:
    """Custom autograd functions that ask export for an operator of their own, with a graph, get none. Public: none."""
    from torch._export import wrappers

    def is_class(item: Any) -> bool:
        return False

    # They ask whether they are called on a class, as they always are.
    with PatchPoint(wrappers, "inspect").replaced_by(SimpleNamespace(isclass=is_class)):
        yield


def compiling_state() -> AbstractContextManager[None]:
    """``torch.compiler.is_compiling()`` is True in it: models leave out what cannot be traced, ``torch.vmap`` leaves
    nodes. Public: none."""
    from torch._export.utils import _compiling_state_context

    return _compiling_state_context()


@contextmanager
def not_compiling() -> Iterator[None]:
    """The opposite: scripted code runs, as it does outside of a trace, instead of its Python original. Public: none."""
    compiler: Any = torch.compiler
    before = compiler._is_compiling_flag, compiler._is_exporting_flag
    compiler._is_compiling_flag = compiler._is_exporting_flag = False
    try:
        yield
    finally:
        compiler._is_compiling_flag, compiler._is_exporting_flag = before


@contextmanager
def tracing_context(mode: fake_tensor.FakeTensorMode) -> Iterator[None]:
    """Parts of torch that are traced find the mode in force here. Public: none."""
    with tracing(TracingContext(mode)):
        yield


# --- Symbolic sizes -------------------------------------------------------------------------------------------------


def fake_of(
    mode: fake_tensor.FakeTensorMode, name: str, tensor: Tensor, per_row: int, free: Collection[int] = ()
) -> Tensor:
    """``tensor`` without data, dimension 0 so many times a symbol. Public: ``torch.export.Dim`` and export.

    Args:
        free: the dimensions whose extents are symbols, too, the same one where they are equal.
    """
    if per_row > 1:
        later = [dim + 1 for dim in free]
        by_row = fake_of(mode, name, tensor.detach().unflatten(0, (-1, per_row)), 1, later)  # type: ignore[no-untyped-call]  # torch has no types for it
        shape = (by_row.shape[0] * per_row, *by_row.shape[2:])
        with mode:
            made = torch.empty_strided(shape, by_row.stride()[1:], dtype=tensor.dtype, device=tensor.device)
            return made.requires_grad_(tensor.requires_grad)
    dynamic, static = symbolic_shapes.DimDynamic.DUCK, symbolic_shapes.DimDynamic.STATIC
    sizes = [dynamic if dim in free or (per_row and dim == 0) else static for dim in range(tensor.dim())]
    context: symbolic_shapes.StatelessSymbolicContext[Any, Any] = symbolic_shapes.StatelessSymbolicContext(
        dynamic_sizes=sizes
    )
    from torch._dynamo.source import ConstantSource

    fake: Tensor = mode.from_tensor(tensor, symbolic_context=context, source=ConstantSource(name))
    return fake


class ShapeQuestions(symbolic_shapes.ShapeEnv):
    """Symbolic sizes whose guards can be answered and watched by those who inherit from it. Public: none."""

    def answer(self, expr: sympy.Basic) -> sympy.Basic | None:
        """The answer to a question about data; None leaves torch's error as it is."""
        return None

    def answered(self, expr: sympy.Basic) -> None:
        """Sees every guard right after its answer."""

    def granted(self, symbol: sympy.Symbol, size: sympy.Expr) -> None:
        """Sees an extent that data tell, and what an operator takes it for: something that no data tell."""

    @property
    def conditions(self) -> list[sympy.Basic]:
        """Of all symbols that have a number in the sample, what the answers so far rest on."""
        return list(dict.fromkeys(guard.expr for guard in self.guards))

    def is_fixed(self, symbol: sympy.Symbol) -> bool:
        """True when the answers so far leave one value, or another symbol, for ``symbol``."""
        return symbol in self.replacements

    def _get_stack_summary(self, is_debug: bool = False, framework_loc: str | None = None) -> tuple[SLoc, str]:
        """Where a guard comes from: for torch's errors, but not for its logs, as it imports export to find it out."""
        if is_debug:
            return super()._get_stack_summary(is_debug, framework_loc)
        return SLoc(framework_loc or "", None), ""

    def evaluate_sym_node(
        self, sym_node: Any, size_oblivious: bool = False, fallback_value: bool | None = None
    ) -> sympy.Basic:
        """Answers a guard; torch calls it."""
        try:
            answer = super().evaluate_sym_node(sym_node, size_oblivious, fallback_value)
        except symbolic_shapes.GuardOnDataDependentSymNode:
            answer = self.answer(self.replace(sym_node.expr))
            if answer is None:
                raise
            self.pending_fresh_unbacked_symbols.clear()
        self.answered(sym_node.expr)
        return answer

    def guard_or_defer_runtime_assert(  # type: ignore[override]  # torch's own keeps its answers
        self, orig_expr: Any, msg: str, fx_node: fx.Node | None = None
    ) -> bool:
        """Takes for granted what an operator needs; torch calls it."""
        of_data = [symbol for symbol in self.replace(orig_expr).free_symbols if self.is_unbacked_symint(symbol)]
        holds: bool = super().guard_or_defer_runtime_assert(orig_expr, msg, fx_node)
        for symbol in of_data:
            size = self.replace(symbol)
            if not any(map(self.is_unbacked_symint, size.free_symbols)):
                self.granted(symbol, size)
        return holds


def forget_new_sizes(mode: fake_tensor.FakeTensorMode) -> None:
    """Sizes that depend on data need not show in a result. Public: none."""
    if mode.shape_env is not None:
        mode.shape_env.pending_fresh_unbacked_symbols.clear()


def expression(number: Any) -> sympy.Expr:
    """What a symbolic number is in terms of its symbols. Public: none."""
    return number.node.expr


def simplified(number: Any) -> sympy.Expr:
    """Likewise, after all that the trace has learned of the symbols. Public: none."""
    return number.node.shape_env.simplify(number.node.expr)


def symbolic_integer(mode: fake_tensor.FakeTensorMode, expr: sympy.Expr, value: int) -> torch.SymInt:
    """The number that is ``expr`` of symbols of ``mode``, and ``value`` in the sample. Public: none."""
    assert mode.shape_env is not None
    made = mode.shape_env.create_symintnode(expr, hint=value)
    assert isinstance(made, torch.SymInt)
    return made


def hint(number: Any) -> Any:
    """The number that a symbolic one had in the sample. Public: none."""
    return number.node.hint


# --- Operators ------------------------------------------------------------------------------------------------------

OpOverload = _OpOverload
"""An operator for given types of its operands, as nodes have it for target. Public: ``torch.ops``, without the type."""

HigherOrderOperator = _HigherOrderOperator
"""``cond``, ``while_loop`` and the like, which are refused. Public: none."""


def schema(op: _OpOverload) -> torch.FunctionSchema:
    """What an operator takes, returns, writes and aliases. Public: none."""
    return op._schema


def overload_name(op: _OpOverload) -> str:
    """``"Tensor"`` of ``add.Tensor``. Public: the end of ``str(op)``."""
    return op._overloadname


def autocast_kernel(op: _OpOverload, kind: str) -> Callable[..., Any] | None:
    """What ``torch.autocast`` runs in an operator's place where it is on: conversions, and the operator again.

    None where there is no such thing, or autocast is off for this type of device. Public: none.

    Args:
        kind: type of device.
    """
    key = _AUTOCAST_KEYS[kind]
    off = torch._C._dispatch_tls_is_dispatch_key_excluded(key)
    if off or not torch._C._dispatch_has_kernel_for_dispatch_key(op._name, key):
        return None
    return partial(op.redispatch, torch._C.DispatchKeySet(key))


_AUTOCAST_KEYS = {"cuda": torch._C.DispatchKey.AutocastCUDA, "cpu": torch._C.DispatchKey.AutocastCPU}


def decomposition(op: _OpOverload) -> Callable[..., Any] | None:
    """What makes an operator of others that autograd knows; None where it is one of these itself. Public: none."""
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    made = key in op.py_kernels or torch._C._dispatch_has_kernel_for_dispatch_key(op._name, key)
    return op.decompose if made else None


def safe_softmax(scores: Tensor) -> Tensor:
    """The softmax of the last dimension, zeros where all is minus infinity. Public: none; attention has it inside."""
    made: Tensor = torch.ops.aten._safe_softmax.default(scores, -1)
    return made


def assert_on_device(truth: Tensor, text: str) -> None:
    """Fails if a tensor is false, without waiting for the device to know. Public: none."""
    torch._assert_async(truth, text)


SET_GRAD_ENABLED: Callable[[bool], None] = torch._C._set_grad_enabled
"""The node that a trace holds for ``torch.no_grad()``; also the quickest switch in generated code. Public: the class
``torch.set_grad_enabled``."""

ENTER_AUTOCAST = autocast_mode._enter_autocast
"""The node that opens an autocast region. Public: ``torch.autocast``, which leaves this node."""

EXIT_AUTOCAST = autocast_mode._exit_autocast
"""The node that closes an autocast region. Public: likewise."""

VMAP_BEGIN, VMAP_END = "_vmap_increment_nesting", "_vmap_decrement_nesting"
"""Names of the nodes round a ``torch.vmap``. Public: ``torch.vmap``, which leaves them."""


def functorch_is_active() -> bool:
    """True inside ``torch.vmap``, ``torch.func.grad`` and the like. Public: none."""
    return bool(torch._C._are_functorch_transforms_active())


def only_vmap_is_active() -> bool:
    """Likewise, but true for ``torch.vmap`` alone, which differentiates nothing. Public: none."""
    levels = pyfunctorch.retrieve_all_functorch_interpreters()
    return bool(levels) and all(level.key() == torch._C._functorch.TransformType.Vmap for level in levels)


@contextmanager
def vmap_levels_ended() -> Iterator[None]:
    """At the end, also by an error, levels of ``torch.vmap`` that captured Ops have begun are over. Public: none."""
    before = len(pyfunctorch.retrieve_all_functorch_interpreters())
    try:
        yield
    finally:
        for _ in range(len(pyfunctorch.retrieve_all_functorch_interpreters()) - before):
            torch._C._functorch._vmap_decrement_nesting()


def without_levels(tensor: Tensor) -> Tensor:
    """What a tensor inside of ``torch.vmap`` and the like is made of, which alone tells of gradients. Public: none."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


DisableTorchFunction = torch._C.DisableTorchFunction
"""Real execution inside a trace does not pass the modes that it is under. Public: none for modes."""

DisableTorchFunctionSubclass = torch._C.DisableTorchFunctionSubclass
"""Runs torch on a tensor of a class that answers for itself, as if it were a plain one. Public: the method
``Tensor.__torch_function__``, for results of the same class only."""

# --- Training ---------------------------------------------------------------------------------------------------------


def home_of_state(param: Tensor, value: Tensor, key: Hashable, settings: Mapping[str, Any]) -> torch.device:
    """Where ``load_state_dict`` of torch's optimizers puts a tensor of a parameter's state. Public: none.

    Args:
        key: of the value in the state.
        settings: of the parameter's group.
    """
    empty = torch.empty(0, dtype=value.dtype, device=value.device)
    groups = [{**settings, "params": [0]}]
    return Optimizer._process_value_according_to_param_policy(param, empty, 0, groups, key).device


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Runs ``callback`` when the backward that is running has come to its end. Public: none."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


# --- Modules --------------------------------------------------------------------------------------------------------

reparametrized = stateless._reparametrize_module
"""A module with other tensors in place of its own. Public: ``torch.func.functional_call``, for one call only."""


EXTRA_STATE = nn.modules.module._EXTRA_STATE_KEY_SUFFIX
"""The key of what ``get_extra_state`` of a module gives, after the module's path. Public: none."""


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


tensor_hooks: Callable[[Tensor], tuple[Any, Any]] = attrgetter("_backward_hooks", "_post_accumulate_grad_hooks")
"""Hooks on a tensor's gradient, before and after it is added; None or empty without. Public: none."""


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


class _Ends:
    """What ``destroy_process_group`` ends before the communicators."""

    def __init__(self, callback: Callable[[], None]) -> None:
        self.finalize = callback


def before_groups_end(callback: Callable[[], None]) -> None:
    """Has a function called once, when the default process group is destroyed, before its communicators are.

    NCCL waits for ever for graphs that use a communicator, when that is destroyed. Public: none.
    """
    torch.distributed.distributed_c10d._world.comms.append(_Ends(callback))


def version(tensor: Tensor) -> int:
    """Grows with every change in place. Public: none."""
    return tensor._version


def is_view(tensor: Tensor) -> bool:
    """True for a view of another tensor, which no custom function may return to be changed in place. Public: none."""
    return tensor._is_view()


def leads_nowhere(tensor: Tensor) -> bool:
    """True for a view made while autograd was off of what requires gradients: torch says that it does, too.

    No gradient goes through it. Public: none.
    """
    base = tensor._base
    return tensor.grad_fn is None and base is not None and base.requires_grad


@contextmanager
def all_digits() -> Iterator[None]:
    """Products and convolutions of float32 have all of its digits inside; afterwards each switch is as it was.

    Public: the switches themselves. The older ones, which torch reads together with these, do not take themselves back:
    they leave some at "ieee" that were at "none". Where the two disagree, the older ones cannot be read, and stay.
    """
    backends: Any = torch.backends
    kinds = [backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn]
    kinds += [backends.mkldnn.matmul, backends.mkldnn.conv, backends.mkldnn.rnn]
    found = [kind.fp32_precision for kind in kinds]
    products = _readable(torch.get_float32_matmul_precision)
    others = _readable(lambda: backends.cudnn.allow_tf32)
    if products not in (None, "highest"):
        torch.set_float32_matmul_precision("highest")
    if others:
        backends.cudnn.allow_tf32 = False
    for kind in kinds:
        if kind.fp32_precision not in ("none", "ieee"):
            kind.fp32_precision = "ieee"
    try:
        yield
    finally:
        if products not in (None, "highest"):
            torch.set_float32_matmul_precision(products)
        if others:
            backends.cudnn.allow_tf32 = True
        for kind, before in zip(kinds, found, strict=True):
            if kind.fp32_precision != before:
                kind.fp32_precision = before


def _readable(read: Callable[[], Any]) -> Any:
    try:
        return read()
    except RuntimeError:
        return None


def parse_to(*args: Any, **kwargs: Any) -> tuple[torch.device | None, torch.dtype | None]:
    """Device and type that the arguments of ``module.to`` ask for. Public: none."""
    device, dtype, _, _ = torch._C._nn._parse_to(*args, **kwargs)
    return device, dtype


def is_compiled(module: nn.Module) -> bool:
    """True for what ``torch.compile`` has made of a module. Public: none."""
    # Before torch.compile is used there is none.
    compiler: Any = sys.modules.get("torch._dynamo")
    return compiler is not None and isinstance(module, compiler.OptimizedModule)


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


# --- Structures, storages, devices ----------------------------------------------------------------------------------

pytree = _pytree
"""How torch itself opens containers: types that libraries have registered are known here. Public:
``torch.utils.pytree``, since torch 2.9, without the table of registered types."""

TorchDispatchMode = _python_dispatch.TorchDispatchMode
"""Sees the storages that operators make, to measure memory on the host. Public: documented, under a private name."""

StorageWeakRef = reductions.StorageWeakRef
"""Tells whether a storage still lives, without keeping it. Public: none."""


def storage_address(storage: torch.UntypedStorage) -> int:
    """Names a storage for as long as there is a reference to it, with or without data. Public: ``data_ptr()``, which
    fake tensors lack."""
    return int(storage._cdata)


def sleep_on_gpu(cycles: int) -> None:
    """Keeps the GPU waiting until the host has queued what is measured. Public: none."""
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]  # torch has no types for it


# --- Functions that are replaced while a model is traced ------------------------------------------------------------


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

FUNCTION_APPLY = PatchPoint(Function, "apply")
"""Custom autograd functions stay whole. Public: ``torch.compiler.allow_in_graph``, for export and compile only."""

SCRIPT_CALL = PatchPoint(torch.jit.ScriptFunction, "__call__")
"""Scripted functions stay whole. Public: none."""

CONTROL_FLOW = tuple(PatchPoint(torch, _name) for _name in ("cond", "while_loop") if hasattr(torch, _name))
"""Branches and loops run without the compiler inside of what stays whole. Public: none."""

COMPILE = PatchPoint(torch, "compile")
"""Operators with functions compile these where they are called. Public: ``torch.compiler.set_stance``, not for them."""

COND = PatchPoint(type(torch.ops.higher_order.cond), "__call__")
"""Branches become Ops. Public: none."""

WHILE_LOOP = PatchPoint(type(torch.ops.higher_order.while_loop), "__call__")
"""Loops become Ops. Public: none."""

flex_attention_operator = torch.ops.higher_order.flex_attention
"""Attention whose scores functions change and mask; it takes what these read. Public: ``flex_attention``."""

FLEX_ATTENTION = PatchPoint(type(flex_attention_operator), "__call__")
"""It becomes an Op. Public: none."""


def flex_attention_results(query: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Tensors like its results: what attention gives, the logarithm of the sum, the largest score. Public: none."""
    from torch._higher_order_ops.flex_attention import _permute_strides

    exact = torch.float64 if query.dtype == torch.float64 else torch.float32
    lines = [query.new_empty(query.shape[:-1], dtype=exact) for _ in range(2)]
    out = _permute_strides(query.new_empty((*query.shape[:-1], value.shape[-1])), query.stride())
    return out, lines[0], lines[1]


def lookup() -> Callable[[Tensor, list[Tensor]], Tensor]:
    """Gives an element of a table, by numbers in tensors; its gradient can be had inside of attention. Public: none."""
    from torch._dynamo._trace_wrapped_higher_order_op import mod_index

    return mod_index  # type: ignore[no-any-return]


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


# Gradients

copy_each = torch._foreach_copy_
"""Copies tensors into others, in one kernel."""

add_each = torch._foreach_add_
"""Adds tensors to others, in one kernel."""


def storage_users(tensor: Tensor) -> int:
    """How many tensors share the memory of this one, and what else keeps it."""
    count: int = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return count


tensor_users: Callable[[Tensor], int] = Tensor._use_count  # type: ignore[attr-defined]  # it has no types
"""How many references torch's own objects have to a tensor, such as a ``.grad``; Python's are one."""


def runs_in_backward(node: Any) -> bool:
    """Inside of a backward: true when it runs this node."""
    runs: bool = torch._C._will_engine_execute_node(node)
    return runs


def backward_keeps_graph() -> bool:
    """Inside of a backward: true when it has been called with ``retain_graph=True``."""
    keeps: bool = torch._C._autograd._get_current_graph_task_keep_graph()
    return keeps


def graph_task() -> int:
    """Inside of a backward: its number."""
    number: int = torch._C._current_graph_task_id()
    return number
