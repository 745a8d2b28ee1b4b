"""The compiler."""

from __future__ import annotations

import importlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, fx
from torch._guards import TracingContext, tracing
from torch.fx.experimental import proxy_tensor, symbolic_shapes

from .devices import order_of_attention_kernels
from .fakes import FakeTensorMode
from .patching import PatchPoint


def mode_of_known_sizes() -> FakeTensorMode:
    """Tensors without data, all of whose sizes are numbers. The compiler keeps what it has made from start to start for
    modes alone that could have others. Public: none."""
    sizes = symbolic_shapes.ShapeEnv(allow_scalar_outputs=False, allow_dynamic_output_shape_ops=False)
    return FakeTensorMode(allow_non_fake_inputs=True, shape_env=sizes, static_shapes=True)


def operators_below_autograd(call: Callable[..., Any], arguments: list[Tensor], mode: FakeTensorMode) -> fx.GraphModule:
    """The ATen operators of a call on tensors without data, backwards inside of it too. Public: ``make_fx`` of
    ``torch.fx.experimental``."""
    with mode, tracing(TracingContext(mode)):
        return proxy_tensor.make_fx(call, _allow_non_fake_inputs=True)(*arguments)


def without_changes(graph: fx.GraphModule, arguments: list[Tensor], mode: FakeTensorMode) -> fx.GraphModule:
    """The same in operators that the compiler knows and that change nothing in place but, at the end, arguments.
    Public: ``torch.func.functionalize``, without the compiler's operators."""
    # Decompositions, such as that of poolings, use it without importing it.
    import torch._inductor.lowering
    from torch._inductor.decomposition import select_decomp_table

    call = torch.func.functionalize(graph, remove="mutations")
    with mode, tracing(TracingContext(mode)), torch.no_grad():
        make = proxy_tensor.make_fx(call, decomposition_table=select_decomp_table(), _allow_non_fake_inputs=True)
        return make(*arguments)


def parted(
    joint: fx.GraphModule,
    results: int,
    mode: FakeTensorMode,
    second: Sequence[fx.Node] = (),
    once: Sequence[fx.Node] = (),
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """A graph in two parts, such as forward and backward, with little to keep between them. Public: none.

    Args:
        joint: its arguments are named tangents if they come to the second part only.
        results: how many of its results are the first part's.
        second: what only the second part computes, where no arguments tell; all arguments then stay for it.
        once: what the second part is not to compute again.
    """
    from torch._inductor.compile_fx import partition_fn
    from torch._inductor.virtualized import V
    from torch.utils.checkpoint import CheckpointPolicy

    arguments = [node.meta["val"] for node in joint.graph.find_nodes(op="placeholder")]
    held = list(range(len(arguments))) if second else []
    for node in second:
        node.meta["partitioner_tag"] = "must_be_in_backward"
    for node in once:
        node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    with V.set_fake_mode(mode), tracing(TracingContext(mode)), torch.no_grad(), _drawn_nowhere():
        return partition_fn(joint, arguments, num_fwd_outputs=results, static_lifetime_input_indices=held)


@contextmanager
def _drawn_nowhere() -> Iterator[None]:
    """torch leaves a drawing of what it cannot part in the working folder: not inside of this."""
    from torch._functorch import partitioners

    with TemporaryDirectory() as folder:
        where = PatchPoint(partitioners, "_get_unique_path")
        with where.replaced_by(lambda name, ending: str(Path(folder, f"{name}{ending}"))):
            yield


_LEAST_BUDGET = 1e-6
"""At exactly 0 torch computes again what is marked to be computed once, too."""


def memory_budget(percent: int | None) -> AbstractContextManager[object]:
    """Inside, :func:`parted` leaves about so much to keep of what it would, and has the second part compute the rest
    again; None leaves that to the user. Public: ``torch._functorch.config.activation_memory_budget``."""
    from torch._functorch import config

    if percent is None:
        return nullcontext()
    patched: AbstractContextManager[object] = config.patch(activation_memory_budget=max(percent / 100, _LEAST_BUDGET))
    return patched


def memory_budget_in_force() -> float:
    """The user's, or that of :func:`memory_budget`: 1 for all. Public: as there."""
    from torch._functorch import config

    budget: float = config.activation_memory_budget
    return budget


def compiled_by_inductor(
    graph: fx.GraphModule, results: int, mode: FakeTensorMode, kind: str, device: torch.device
) -> tuple[Callable[[list[Tensor]], list[Tensor]], list[tuple[int, ...] | None]]:
    """A graph without changes in place as kernels; the list that they are given is emptied. Public: ``torch.compile``.

    Args:
        results: so many of the results come out laid out as the graph has them.
        kind: ``"forward"`` of two parts, ``"backward"``, or ``"whole"``.
        device: where it runs.

    Returns:
        The kernels, and the strides of their results as far as they are known.
    """
    from torch._inductor import config
    from torch._inductor.compile_fx import _recursive_joint_graph_passes, compile_fx_inner
    from torch._inductor.virtualized import V

    arguments = [node.meta["val"] for node in graph.graph.find_nodes(op="placeholder")]
    # A backward begins beside the sum of gradients of the one before. Its first product is then that of the gradient
    # that goes on, which wants few multiprocessors at once, and not that of a weight's, which leaves memory earlier.
    reorders = config.reorder_for_peak_memory and kind != "backward"
    with (
        V.set_fake_mode(mode),
        tracing(TracingContext(mode)),
        torch.no_grad(),
        config.patch({"triton.cudagraphs": False, "reorder_for_peak_memory": reorders}),
    ):
        if kind == "whole":
            graph = _recursive_joint_graph_passes(graph, input_device=device)
        graph.graph.output_node().meta["user_visible_output_idxs"] = list(range(results))
        with TracingContext.report_output_strides() as strides:
            code = compile_fx_inner(graph, arguments, is_backward=kind == "backward", is_inference=kind == "whole")
    return code, strides or []


def key_of_kernels(kernels: Callable[..., Any]) -> str | None:
    """Under what the compiler has kept kernels in its folder; None where it has not. Public: none."""
    return getattr(kernels, "_fx_graph_cache_key", None)


def kept_kernels(key: str, *, backward: bool) -> Callable[[list[Tensor]], list[Tensor]] | None:
    """Kernels that the compiler has kept; None where they are not there any more. Public: none, but for those of whole
    models (``torch.compiler.load_cache_artifacts``)."""
    from torch._inductor.codecache import FxGraphCache
    from torch._inductor.output_code import CompiledFxGraphConstants
    from torch._inductor.utils import BoxedBool
    from torch._inductor.virtualized import V
    from torch.utils._python_dispatch import _disable_current_modes

    mode, constants = mode_of_known_sizes(), CompiledFxGraphConstants()
    with _disable_current_modes(), V.set_fake_mode(mode), tracing(TracingContext(mode)):
        found, _ = FxGraphCache._lookup_graph(key, [], local=True, remote_cache=None, constants=constants)
        if found is not None:
            found._fx_graph_cache_key = key
            found.post_compile([], constants, {"cudagraphs": BoxedBool(False), "is_backward": backward})
    return found


def state_of_compiler() -> tuple[object, ...] | None:
    """What decides what the compiler makes of operators, and torch which operators a call has below autograd: their
    code, settings and switches, and the names of kernels that Python has put in the place of torch's. None where the
    compiler keeps nothing. Public: none."""
    from torch._functorch import config as partitioning
    from torch._inductor import config
    from torch._inductor.codecache import CacheBase, torch_key

    if config.force_disable_caches or not config.fx_graph_cache:
        return None
    settings = [item.get_hash().hex() for item in (config, partitioning)]
    cuda: Any = torch.backends.cuda
    switches = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]  # it is made at import
        cuda.matmul.fp32_precision,
        cuda.matmul.allow_fp16_reduced_precision_reduction,
        cuda.matmul.allow_bf16_reduced_precision_reduction,
        cuda.fp16_bf16_reduction_math_sdp_allowed(),
        cuda.flash_sdp_enabled(),
        cuda.mem_efficient_sdp_enabled(),
        cuda.cudnn_sdp_enabled(),
        cuda.math_sdp_enabled(),
        order_of_attention_kernels(),
    )
    replaced = sorted(name for name in torch.library._impls if name.startswith("aten/") and not name.endswith("/Meta"))
    return torch_key().hex(), CacheBase.get_system()["hash"], settings, switches, replaced


def start_compiling_processes() -> None:
    """Starts the processes that compile kernels, in the background; until they are there, the caller itself compiles.
    Public: ``torch.compile`` starts them with its first call."""
    from torch._inductor.async_compile import maybe_warm_pool

    maybe_warm_pool()


@cache
def begin_loading_compiler() -> threading.Thread:
    """Loads the compiler in the background, which takes seconds; returns the thread that does. Public: none, but
    ``torch.compile`` loads it with its first call."""

    def load() -> None:
        # What fails here fails again where it is needed, and is told there.
        with suppress(Exception):
            importlib.import_module("torch._inductor.compile_fx")

    def await_loading() -> None:
        if threading.current_thread() is not loading:
            loading.join()

    loading = threading.Thread(target=load, name="load the compiler", daemon=True)
    # Locks of modules that another thread imports stay locked in a child.
    os.register_at_fork(before=await_loading)
    loading.start()
    return loading


def has_compiler_of_host() -> bool:
    """True when compiled code can be made for the host's processor. Public: none."""
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        return bool(get_cpp_compiler())
    except RuntimeError:
        return False


def default_compiler_folder() -> str:
    """Where the compiler keeps its code if nobody says where; it says so in the environment itself. Public: none."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    return default_cache_dir()
