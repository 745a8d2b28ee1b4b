"""What is relied upon of torch's private names in ``devices.py``: a test for each, under its own name."""

from __future__ import annotations

import inspect
from contextlib import AbstractContextManager, nullcontext
from operator import attrgetter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.ranks import run_ranks
from torch.nn.attention import SDPBackend, sdpa_kernel

from pyrannc.capture.torch_internals import devices
from pyrannc.capture.torch_internals.tensors import TorchDispatchMode


def test_before_groups_end() -> None:
    assert run_ranks(1, _ends) == [["before", "after"]]


def _ends() -> list[str]:
    seen: list[str] = []
    store = dist.HashStore()  # type: ignore[attr-defined]  # public, though torch's types do not say so
    for _ in range(2):
        dist.init_process_group("gloo", store=dist.PrefixStore(str(len(seen)), store), rank=0, world_size=1)
        if not seen:
            devices.before_groups_end(lambda: seen.append("before" if dist.is_initialized() else "too late"))
        dist.destroy_process_group()
    return [*seen, "after"]


def test_all_digits() -> None:
    """Also where an earlier switch has been set, and none is touched that is precise as it is."""
    backends: Any = torch.backends
    kinds = [backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn]
    kinds += [backends.mkldnn.matmul, backends.mkldnn.conv, backends.mkldnn.rnn]

    def found() -> list[str]:
        return [kind.fp32_precision for kind in kinds]

    before = found()
    backends.mkldnn.matmul.fp32_precision = "bf16"
    try:
        kept = found()
        with devices.all_digits():
            assert set(found()) <= {"none", "ieee"}
        assert found() == kept
    finally:
        backends.mkldnn.matmul.fp32_precision = "none"
    with devices.all_digits():
        pass
    assert found() == before


_SWITCHES = (
    "",
    "cudnn.",
    "mkldnn.",
    "cuda.matmul.",
    "cudnn.conv.",
    "cudnn.rnn.",
    "mkldnn.matmul.",
    "mkldnn.conv.",
    "mkldnn.rnn.",
)
"""What a switch is read by, those above others first."""


@pytest.mark.parametrize(
    "first",
    [
        {"": "tf32"},
        {"": "bf16"},
        {"cudnn.": "tf32"},
        {"mkldnn.": "bf16"},
        {"": "tf32", "cudnn.": "ieee"},
        {"": "tf32", "cuda.matmul.": "tf32", "mkldnn.matmul.": "ieee"},
        {"cudnn.": "tf32", "cudnn.conv.": "tf32"},
        {"cudnn.": "ieee", "cudnn.conv.": "tf32"},
        {"": "ieee", "mkldnn.conv.": "bf16"},
    ],
    ids=str,
)
@pytest.mark.parametrize("then", [{"": "ieee"}, {"": "tf32"}, {"cudnn.": "ieee"}, {"cudnn.": "tf32"}], ids=str)
@pytest.mark.parametrize("older", ["", "high", "medium"])
def test_a_switch_follows_the_one_above_it_after_all_digits(
    first: dict[str, str], then: dict[str, str], older: str
) -> None:
    def put(values: dict[str, str]) -> None:
        for name, value in values.items():
            owner = attrgetter(name[:-1])(torch.backends) if name else torch.backends
            owner.fp32_precision = value

    def read() -> dict[str, str]:
        return {name: attrgetter(f"{name}fp32_precision")(torch.backends) for name in _SWITCHES}

    def after(inside: AbstractContextManager[None]) -> list[dict[str, str]]:
        torch.set_float32_matmul_precision(older or "highest")
        put(dict.fromkeys(_SWITCHES, "none") | first)
        with inside:
            within = read()
        found = [read()]
        put(then)
        return [*found, read(), within]

    before = read()
    try:
        plain, beside = after(nullcontext()), after(devices.all_digits())
    finally:
        torch.set_float32_matmul_precision("highest")
        put(dict.fromkeys(_SWITCHES, "none"))
        put({name: value for name, value in before.items() if value != "none"})
    assert read() == before
    assert set(beside.pop().values()) <= {"none", "ieee"}
    assert beside == plain[:2]


class _Generators(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types for it
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # likewise
        self.seen: list[torch.Generator] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(kwargs["generator"])
        return func(*args, **kwargs)


def test_generator_address() -> None:
    own = torch.Generator()
    with _Generators() as modes:
        for generator in (own, own, torch.default_generator):
            torch.rand(2, generator=generator)
    addresses = [devices.generator_address(generator) for generator in (own, own, torch.default_generator)]
    assert list(map(devices.generator_address, modes.seen)) == addresses
    assert len(set(addresses)) == 2


@pytest.mark.parametrize("precision", ["highest", "high"])
def test_older_switches_can_be_read_where_all_digits_count(precision: str) -> None:
    backends: Any = torch.backends

    def older() -> tuple[bool, bool, str]:
        with backends.cudnn.flags(enabled=False):
            pass
        return backends.cuda.matmul.allow_tf32, backends.cudnn.allow_tf32, torch.get_float32_matmul_precision()

    kinds = [backends.cuda.matmul, backends.mkldnn.matmul]
    before = [kind.fp32_precision for kind in kinds]
    torch.set_float32_matmul_precision(precision)
    try:
        kept = older()
        with devices.all_digits():
            assert older() == (False, False, "highest")
        assert older() == kept
    finally:
        torch.set_float32_matmul_precision("highest")
        for kind, found in zip(kinds, before, strict=True):
            kind.fp32_precision = found


_FILL = 'extern "C" __global__ void fill(float* x, int value) { x[threadIdx.x] = value + blockDim.x; }'


def test_compile_cuda() -> None:
    if not torch.cuda.is_available():
        with pytest.raises((RuntimeError, AssertionError, OSError)):
            devices.compile_cuda(_FILL, "fill")
        return
    kernel, x = devices.compile_cuda(_FILL, "fill"), torch.zeros(64, device="cuda")
    shared_bytes = torch.cuda.get_device_properties().shared_memory_per_block_optin  # type: ignore[attr-defined]  # torch has no type for it
    kernel.set_shared_memory_config(shared_bytes)
    stream = torch.cuda.current_stream()
    kernel(grid=(1, 1, 1), block=(64, 1, 1), args=[x, 7], shared_mem=shared_bytes, stream=stream)
    assert x.tolist() == [71.0] * 64


def test_CudaKernel() -> None:
    """Its arguments are those of torch's."""
    mine, torchs = (inspect.signature(kind.__call__) for kind in (devices.CudaKernel, torch.cuda._utils._CudaKernel))
    assert set(mine.parameters) == set(torchs.parameters)


def test_order_of_attention_kernels() -> None:
    before = devices.order_of_attention_kernels()
    with sdpa_kernel([SDPBackend.MATH, SDPBackend.FLASH_ATTENTION], set_priority=True):
        assert devices.order_of_attention_kernels()[:2] == [SDPBackend.MATH.value, SDPBackend.FLASH_ATTENTION.value]
    assert devices.order_of_attention_kernels() == before


def test_sleep_on_gpu() -> None:
    if not torch.cuda.is_available():
        with pytest.raises((RuntimeError, AttributeError, AssertionError)):
            devices.sleep_on_gpu(1)
        return
    event = torch.cuda.Event()
    devices.sleep_on_gpu(1_000_000_000)
    event.record()
    assert not event.query()
    event.synchronize()
