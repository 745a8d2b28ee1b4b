"""Small memsets of CUDA graphs.

Libraries of products and of attention set a counter to zero before kernels that take their work from it. Between
kernels that follow each other a GPU pauses for less than a microsecond, before and behind a memset for some each.
"""

from __future__ import annotations

from ctypes import c_uint, c_void_p
from functools import cache
from typing import Any

import torch

from pyrannc.capture.torch_internals.devices import compile_cuda

_MOST_BYTES = 1 << 14
"""Larger ones are for more than one thread block."""
_THREADS = 256
_FILL = """
extern "C" __global__ void fill_words(unsigned int* words, unsigned int value, unsigned int count) {
    for (unsigned int word = threadIdx.x; word < count; word += blockDim.x) words[word] = value;
}
"""


def memsets_to_kernels(graph: torch.cuda.CUDAGraph) -> int:
    """Puts kernels in the place of small memsets, where :func:`replaces_memsets`.

    Public: the graph; where a compiled kernel is, is not.

    Args:
        graph: was recorded with ``keep_graph``, and not instantiated yet.

    Returns:
        How many there were.

    Raises:
        RuntimeError: the driver refuses; the graph is then not to be used.
    """
    device = torch.cuda.current_device()
    if not replaces_memsets(device):
        return 0
    from cuda.bindings import driver

    raw = driver.CUgraph(graph.raw_cuda_graph())
    kinds = {node: _done(driver.cuGraphNodeGetType(node))[0] for node in _listed(driver.cuGraphGetNodes, raw)}
    types = driver.CUgraphNodeType
    if {types.CU_GRAPH_NODE_TYPE_MEM_ALLOC, types.CU_GRAPH_NODE_TYPE_MEM_FREE} & set(kinds.values()):
        # Nothing can be taken out of such a graph.
        return 0
    memsets = [node for node, kind in kinds.items() if kind == types.CU_GRAPH_NODE_TYPE_MEMSET]
    return sum(_replace(driver, raw, node, device) for node in memsets)


@cache
def replaces_memsets(device: int) -> bool:
    """True with NVIDIA's bindings for Python, which torch for CUDA 13 brings with it, and a compiler of kernels."""
    try:
        from cuda.bindings import __version__

        _fill_words(device)
        return int(__version__.partition(".")[0]) >= 13
    except Exception:  # whatever a compiler of kernels raises
        return False


def _replace(driver: Any, graph: Any, node: Any, device: int) -> bool:
    (memset,) = _done(driver.cuGraphMemsetNodeGetParams(node))
    size = memset.elementSize * memset.width
    if memset.height != 1 or size > _MOST_BYTES or size % 4 or int(memset.dst) % 4:
        return False
    # It begins when those before it have ended, and those behind it when it has: other edges join kernels alone.
    before = _listed(driver.cuGraphNodeGetDependencies, node)
    behind = _listed(driver.cuGraphNodeGetDependentNodes, node)
    kernel = driver.CUDA_KERNEL_NODE_PARAMS()
    kernel.func = driver.CUfunction(_fill_words(device).func.value)
    kernel.gridDimX = kernel.gridDimY = kernel.gridDimZ = kernel.blockDimY = kernel.blockDimZ = 1
    kernel.blockDimX = _THREADS
    arguments = int(memset.dst), _word(memset.value, memset.elementSize), size // 4
    kernel.kernelParams = arguments, (c_void_p, c_uint, c_uint)
    (made,) = _done(driver.cuGraphAddKernelNode(graph, before, len(before), kernel))
    for other in behind:
        _done(driver.cuGraphAddDependencies(graph, [made], [other], None, 1))
    _done(driver.cuGraphDestroyNode(node))
    return True


def _listed(ask: Any, about: Any) -> list[Any]:
    """The nodes that the driver tells of a graph or a node."""
    *_, count = _done(ask(about))
    return list(_done(ask(about, count))[0]) if count else []


def _word(value: int, element_bytes: int) -> int:
    """Four bytes of what a memset writes."""
    element = (value & (1 << 8 * element_bytes) - 1).to_bytes(element_bytes, "little")
    return int.from_bytes(element * (4 // element_bytes), "little")


@cache
def _fill_words(device: int) -> Any:
    """The kernel, on a device."""
    with torch.cuda.device(device):
        return compile_cuda(_FILL, "fill_words")


def _done(returned: tuple[Any, ...]) -> tuple[Any, ...]:
    """What a function of the driver gives beside its status.

    Raises:
        RuntimeError: it has failed.
    """
    status, *rest = returned
    if int(status):
        raise RuntimeError(f"the driver could not change a CUDA graph: {status.name}")
    return tuple(rest)
