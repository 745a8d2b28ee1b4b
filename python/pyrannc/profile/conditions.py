"""Under which conditions a measurement holds."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import torch

from pyrannc import _native
from pyrannc.capture.torch_internals.compiler import memory_budget_in_force
from pyrannc.capture.torch_internals.devices import order_of_attention_kernels
from pyrannc.capture.torch_internals.memsets import replaces_memsets

_VARIABLES = (
    "ATEN_",
    "CUBLAS",
    "CUDA_",
    "CUDNN_",
    "DNNL_",
    "FI_",
    "GLOO_",
    "GOMP_",
    "KMP_",
    "LD_PRELOAD",
    "MALLOC_",
    "MKL_",
    "NCCL_",
    "NVIDIA_TF32_OVERRIDE",
    "OMP_",
    "ONEDNN_",
    "PYTORCH_",
    "TORCH_ALLOW_TF32",
    "TORCH_BLAS_",
    "TORCH_CUDNN_",
    "TORCH_NCCL_",
    "UCC_",
    "UCX_",
)
"""Beginnings of the names of environment variables by which a user chooses how devices and links work."""
_OF_ONE_START = ("NCCL_COMM_ID", "NCCL_DEBUG")
"""Among those, what tells a start apart or where to write, and changes no time."""
_OF_LINKS = ("FI_", "GLOO_", "NCCL_", "TORCH_NCCL_", "UCC_", "UCX_")
"""Among those, what chooses how links work, and nothing of what a device computes alone."""

_OWN_BUDGET, _BUDGET_OF_USER = "memory budget in percent", "memory budget of the user"

Surroundings: TypeAlias = tuple[tuple[str, str], ...]
"""Names and values."""


@dataclass(frozen=True)
class Conditions:
    """What a Block's cost depends on beside the Block.

    Attributes:
        device: name of the device, as torch has it.
        precision: the switches that choose the precision of products.
        versions: of the software that computes, and which way it computes, by its name.
        switches: the other switches of torch that choose kernels.
    """

    device: str
    precision: str
    versions: tuple[tuple[str, str], ...]
    switches: str

    def of_links(self) -> Conditions:
        """Without what changes computations alone."""
        return replace(
            self, versions=tuple(item for item in self.versions if item[0] not in (_OWN_BUDGET, _BUDGET_OF_USER))
        )


def conditions(
    device: torch.device,
    *,
    fused_dropout: bool,
    compiled: bool = False,
    replayed: bool = False,
    memory_budget_percent: int | None = None,
) -> Conditions:
    """Those in force on ``device`` now.

    Args:
        memory_budget_percent: as :class:`pyrannc.blocks.compiler.Compiler` has it.
    """
    versions = {"pyrannc": _native.version, "torch": torch.__version__}
    versions |= {"working copies": "once a step", "backwards": "whole and in two parts"}
    versions["updates"] = "alone, of random numbers" + (", by the device" if replayed else "")
    versions["links"] = "as Stages send, beside the leading Span"
    if device.type == "cuda":
        versions["cuda"] = str(torch.version.cuda)
        versions["cudnn"] = str(torch.backends.cudnn.version())  # type: ignore[no-untyped-call]  # torch has no types for it
        versions["clock"], versions["messages"] = "as in a training", "beside the leading Span"
        versions["dropout"] = "fused where torch has a kernel, several in a Span" if fused_dropout else "not fused"
    if replayed:
        memsets = "kernels" if device.type == "cuda" and replaces_memsets(torch.cuda.current_device()) else "memsets"
        versions["steps"] = f"replayed, counters set by {memsets}"
    if compiled:
        versions["spans"] = "compiled where that pays, with several draws, gradients that go on first"
        versions["images"] = "channels last"
        if memory_budget_percent is not None:
            versions[_OWN_BUDGET] = str(memory_budget_percent)
        if (of_user := memory_budget_in_force()) != 1:
            versions[_BUDGET_OF_USER] = repr(of_user)
    return Conditions(device_name(device), _precision(device), tuple(versions.items()), _switches(device))


def surroundings() -> Surroundings:
    """What the times of devices and links depend on outside of torch: variables of the environment, and the host.

    Ranks may differ in them and yet measure for each other.
    """
    chosen = {
        name: value
        for name, value in os.environ.items()
        if name.startswith(_VARIABLES) and not name.startswith(_OF_ONE_START)
    }
    return (*sorted(chosen.items()), ("host", f"{_processor()} x {len(os.sched_getaffinity(0))}"))


def of_devices(around: Surroundings) -> Surroundings:
    """Those that change what a device computes alone."""
    return tuple((name, value) for name, value in around if not name.startswith(_OF_LINKS))


def _processor() -> str:
    """The model of the host's processor, as the system names it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return "unknown"
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def device_name(device: torch.device) -> str:
    """The name under which the core knows the device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def uses_tf32(device: torch.device) -> bool:
    """True when float32 matrix products are computed in TF32."""
    return device.type == "cuda" and torch.backends.cuda.matmul.fp32_precision == "tf32"


def _precision(device: torch.device) -> str:
    switches = {}
    if device.type == "cuda":
        cudnn = torch.backends.cudnn
        switches["products"] = torch.backends.cuda.matmul.fp32_precision
        switches["convolutions"] = cudnn.conv.fp32_precision  # type: ignore[attr-defined]  # it is made at import
        switches["by trial"] = str(cudnn.benchmark)
        switches["deterministic"] = str(cudnn.deterministic or torch.are_deterministic_algorithms_enabled())
    else:
        switches["products"] = torch.backends.mkldnn.matmul.fp32_precision  # type: ignore[attr-defined]  # likewise
    return ", ".join(f"{name}: {state}" for name, state in switches.items())


def _switches(device: torch.device) -> str:
    switches: dict[str, Any] = {"anomalies": torch.is_anomaly_enabled()}
    if device.type == "cuda":
        cuda: Any = torch.backends.cuda
        switches |= {
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),  # type: ignore[no-untyped-call]  # torch has no types for it
            "cudnn": torch.backends.cudnn.enabled,
            "blas": cuda.preferred_blas_library(),
            "linear algebra": cuda.preferred_linalg_library(),
            "reduced sums of float16": cuda.matmul.allow_fp16_reduced_precision_reduction,
            "reduced sums of bfloat16": cuda.matmul.allow_bf16_reduced_precision_reduction,
            "flash attention": cuda.flash_sdp_enabled(),
            "lean attention": cuda.mem_efficient_sdp_enabled(),
            "cudnn's attention": cuda.cudnn_sdp_enabled(),
            "plain attention": cuda.math_sdp_enabled(),
            "order of attentions": order_of_attention_kernels(),
            "half sums of plain attention": cuda.fp16_bf16_reduction_math_sdp_allowed(),
        }
    else:
        switches |= {
            "threads": torch.get_num_threads(),
            "instructions": torch.backends.cpu.get_cpu_capability(),
            "mkldnn": torch.backends.mkldnn.enabled,
            "deterministic": torch.are_deterministic_algorithms_enabled(),
        }
    return ", ".join(f"{name}: {state}" for name, state in switches.items())
