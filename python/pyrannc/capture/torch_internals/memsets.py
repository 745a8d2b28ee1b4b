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
    """Puts kernels in the place of small memsets.

    Where NVIDIA's bindings for Python, which torch brings with it on Linux, are not there, all stays as it is. Public:
    the graph; where a compiled kernel is, is not.

    Args:
        graph: was recorded with ``keep_graph``, and not instantiated yet.

    Returns:
        How many there were.

    Raises:
        RuntimeError: the driver refuses; the graph is then not to be used.
    """
    try:
        from cuda.bindings import driver
    except ImportError:
        return 0
    raw = driver.CUgraph(graph.raw_cuda_graph())
    _, count = _done(driver.cuGraphGetNodes(raw))
    nodes, _ = _done(driver.cuGraphGetNodes(raw, count)) if count else ((), 0)
    kind = driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_MEMSET
    found = [node for node in nodes if _done(driver.cuGraphNodeGetType(node)) == (kind,)]
    return sum(_replace(driver, raw, node) for node in found)


def _replace(driver: Any, graph: Any, node: Any) -> bool:
    (memset,) = _done(driver.cuGraphMemsetNodeGetParams(node))
    size = memset.elementSize * memset.width
    if memset.height != 1 or size > _MOST_BYTES or size % 4 or int(memset.dst) % 4:
        return False
    before = _neighbours(driver.cuGraphNodeGetDependencies, node)
    behind = _neighbours(driver.cuGraphNodeGetDependentNodes, node)
    if any(special for _, special in before + behind):
        return False
    kernel = driver.CUDA_KERNEL_NODE_PARAMS()
    kernel.func = driver.CUfunction(_fill_words(torch.cuda.current_device()).func.value)
    kernel.gridDimX = kernel.gridDimY = kernel.gridDimZ = kernel.blockDimY = kernel.blockDimZ = 1
    kernel.blockDimX = _THREADS
    arguments = int(memset.dst), _word(memset.value, memset.elementSize), size // 4
    kernel.kernelParams = arguments, (c_void_p, c_uint, c_uint)
    (made,) = _done(driver.cuGraphAddKernelNode(graph, [other for other, _ in before], len(before), kernel))
    for other, _ in behind:
        _done(driver.cuGraphAddDependencies(graph, [made], [other], None, 1))
    _done(driver.cuGraphDestroyNode(node))
    return True


def _neighbours(ask: Any, node: Any) -> list[tuple[Any, bool]]:
    """With whether something else joins them than that one ends before the other starts."""
    *_, count = _done(ask(node))
    nodes, edges, _ = _done(ask(node, count)) if count else ((), (), 0)
    special = [bool(edge.from_port or edge.to_port or edge.type) for edge in edges]
    return list(zip(nodes, special, strict=True))


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
