"""Measures which shares of its peaks a GPU reaches, by kind of op and size of work, for a cluster file.

    python benches/calibrate.py --name h200 --tflops 67 67 494 989 --gb-per-s 4800 >> cluster.toml

The peaks are those of ``[device.h200]`` in that file: of float64, float32, TF32 and half precision, and of the memory.
Work is counted as ``crates/cost`` counts it: floating-point operations of one product, or bytes moved.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator
from functools import partial

import torch
from torch import Tensor
from torch.autograd import DeviceType
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile

Point = tuple[float, float]
Case = tuple[float, float, Callable[[], object]]
"""Work at which the share stands, work that a call does in all, and the call."""

_WARM_UP, _TIMED = 3, 5
_CLASSES = ("fp64", "fp32", "tf32", "half")
_DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "tf32": torch.float32, "half": torch.bfloat16}
_HEADS, _SEQUENCE, _HEAD_SIZE = 16, 512, 64
_CHANNELS, _PIXELS = 256, 28
_HIDDEN, _VOCABULARY = 1024, 32768


def main() -> None:
    options = parse()
    print(f"[device.{options.name}.efficiency]")
    for name, tflops in zip(_CLASSES, options.tflops, strict=True):
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = name == "tf32"
        dtype = _DTYPES[name]
        show(f"matrix.{name}", matrix(dtype, tflops), tflops * 1e12)
        show(f"convolution.{name}", convolution(dtype), tflops * 1e12)
        show(f"attention.{name}", attention(dtype), tflops * 1e12)
    bytes_per_s = options.gb_per_s * 1e9
    for key in ("matrix.bytes", "convolution.bytes", "attention.bytes", "pointwise"):
        show(key, pointwise(), bytes_per_s)
    show("normalisation", normalisation(), bytes_per_s)
    show("embedding", embedding(), bytes_per_s)
    show("optimizer", optimizer(), bytes_per_s)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", required=True, help="key of the device in the cluster file")
    parser.add_argument("--tflops", type=float, nargs=len(_CLASSES), required=True, metavar="PEAK")
    parser.add_argument("--gb-per-s", type=float, required=True, metavar="PEAK")
    return parser.parse_args()


def show(key: str, cases: Iterable[Case], peak_per_s: float) -> None:
    points: list[Point] = []
    for size, work, call in cases:
        share = work / seconds(call) / peak_per_s
        # More work is never done sooner.
        if not points or size / share > points[-1][0] / points[-1][1]:
            points.append((size, share))
        torch.cuda.empty_cache()
    print(f"{key} = [{', '.join(f'[{size:.3g}, {share:.3g}]' for size, share in points)}]", flush=True)


def seconds(call: Callable[[], object]) -> float:
    """Time of the kernels of a call, without the gaps in which a GPU waits for the host."""
    for _ in range(_WARM_UP):
        call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as record:
        for _ in range(_TIMED):
            call()
        torch.cuda.synchronize()
    kernels = [event for event in record.key_averages() if event.device_type == DeviceType.CUDA]
    return sum(event.self_device_time_total for event in kernels) / 1e6 / _TIMED


def tensor(*shape: int, dtype: torch.dtype = torch.float32, requires_grad: bool = True) -> Tensor:
    return torch.randn(shape, dtype=dtype, device="cuda").requires_grad_(requires_grad)


def with_backward(forward: Callable[[], Tensor], inputs: list[Tensor]) -> Callable[[], object]:
    grad = torch.randn_like(forward())
    return lambda: torch.autograd.grad(forward(), inputs, grad)


def matrix(dtype: torch.dtype, tflops: float) -> Iterator[Case]:
    for size in (128, 256, 512, 1024, 2048, 4096):
        rows = 8 * size
        flops = 2.0 * rows * size**2
        if flops < tflops * 1e12 / 50:
            factors = [tensor(rows, size, dtype=dtype), tensor(size, size, dtype=dtype)]
            yield flops, 3 * flops, with_backward(partial(torch.matmul, *factors), factors)


def convolution(dtype: torch.dtype) -> Iterator[Case]:
    weight = tensor(_CHANNELS, _CHANNELS, 3, 3, dtype=dtype)
    for rows in (1, 4, 16, 64):
        images = tensor(rows, _CHANNELS, _PIXELS, _PIXELS, dtype=dtype)
        flops = 2.0 * images.numel() * _CHANNELS * 9
        call = with_backward(partial(functional.conv2d, images, weight, padding=1), [images, weight])
        yield flops, 3 * flops, call


def attention(dtype: torch.dtype) -> Iterator[Case]:
    for rows in (1, 4, 16, 64):
        heads = [tensor(rows, _HEADS, _SEQUENCE, _HEAD_SIZE, dtype=dtype) for _ in range(3)]
        flops = 4.0 * rows * _HEADS * _SEQUENCE**2 * _HEAD_SIZE
        call = with_backward(partial(functional.scaled_dot_product_attention, *heads), heads)
        yield 1.75 * flops, 3.5 * flops, call


def pointwise() -> Iterator[Case]:
    for rows in (64, 512, 4096, 32768, 262144):
        x = tensor(rows, _HIDDEN)
        yield 10.0 * x.numel(), 20.0 * x.numel(), with_backward(partial(functional.gelu, x), [x])


def normalisation() -> Iterator[Case]:
    weight, bias = tensor(_HIDDEN), tensor(_HIDDEN)
    for rows in (64, 512, 4096, 32768, 262144):
        x = tensor(rows, _HIDDEN)
        call = with_backward(partial(functional.layer_norm, x, (_HIDDEN,), weight, bias), [x, weight, bias])
        yield 14.0 * x.numel(), 28.0 * x.numel(), call


def embedding() -> Iterator[Case]:
    table = tensor(_VOCABULARY, _HIDDEN)
    for rows in (64, 1024, 16384, 131072):
        tokens = torch.randint(_VOCABULARY, (rows,), device="cuda")
        moved = 4.0 * (4 * rows * _HIDDEN + table.numel())
        yield moved / 2, moved, with_backward(partial(functional.embedding, tokens, table), [table])


def optimizer() -> Iterator[Case]:
    for count in (1, 16, 256):
        params = [torch.nn.Parameter(tensor(_HIDDEN, _HIDDEN)) for _ in range(count)]
        for param in params:
            param.grad = torch.ones_like(param)
        moved = 7.0 * 4 * sum(param.numel() for param in params)
        yield moved, moved, torch.optim.AdamW(params).step


if __name__ == "__main__":
    main()
