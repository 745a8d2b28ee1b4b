"""CUDA graphs as the runtime records them: the driver's part has a test where there is a GPU."""

from __future__ import annotations

import pytest
import torch

from pyrannc.capture.torch_internals import graphs, memsets


def test_Graph() -> None:
    """A recording that fails leaves no memory behind, and the next one begins as if there had been none."""
    if not torch.cuda.is_available():
        assert {"_cuda_endAllocateToPool", "_cuda_releasePool"} <= set(dir(torch._C))
        return
    x = torch.ones(1 << 20, device="cuda")
    for _ in range(2):
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        with pytest.raises(RuntimeError), torch.cuda.graph(graphs.Graph(), capture_error_mode="thread_local"):
            (x * 2).sum().item()
        # Nor does the generator take what follows for a recording.
        drawn = torch.nn.functional.dropout(x, 0.5)
        assert 0 < int((drawn == 0).sum()) < x.numel()
        del drawn
        torch.cuda.empty_cache()
        assert torch.cuda.memory_reserved() == before
    graph = graphs.Graph()
    with torch.cuda.graph(graph):
        doubled = x * 2
    graph.replay()
    assert float(doubled.sum()) == 2 * x.numel()


def test_memsets_to_kernels() -> None:
    """Kernels write what the memsets would have, in their order."""
    if not torch.cuda.is_available():
        assert hasattr(torch.cuda.CUDAGraph, "raw_cuda_graph")
        return
    sizes = [(torch.uint8, 64, 7), (torch.int16, 30, -2), (torch.float32, 4096, 0), (torch.float32, 5000, 0)]
    tensors = [torch.ones(count, dtype=dtype, device="cuda") for dtype, count, _ in sizes]
    sums = torch.zeros(len(sizes), dtype=torch.float64, device="cuda")
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        for index, (tensor, (_, _, value)) in enumerate(zip(tensors, sizes, strict=True)):
            _set(tensor, value)
            sums[index].copy_(tensor.sum())
            tensor.fill_(5)
    # The last is larger than one thread block is for.
    assert memsets.memsets_to_kernels(graph) == len(sizes) - 1
    graph.instantiate()
    for _ in range(2):
        graph.replay()
        assert sums.tolist() == [count * value for _, count, value in sizes]


def test_replaces_memsets() -> None:
    """Without a GPU there is no compiler of kernels for it; that is told, not raised."""
    assert memsets.replaces_memsets(0) == torch.cuda.is_available()


def _set(tensor: torch.Tensor, value: int) -> None:
    """A memset, as libraries make them."""
    from cuda.bindings import driver

    kinds = {1: driver.cuMemsetD8Async, 2: driver.cuMemsetD16Async, 4: driver.cuMemsetD32Async}
    raw = value & (1 << 8 * tensor.element_size()) - 1
    stream = driver.CUstream(torch.cuda.current_stream().cuda_stream)
    (status,) = kinds[tensor.element_size()](tensor.data_ptr(), raw, tensor.numel(), stream)
    assert int(status) == 0, status.name
