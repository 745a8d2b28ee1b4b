"""Under which conditions a measurement holds."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pyrannc import _native


@dataclass(frozen=True)
class Conditions:
    """What a Block's cost depends on beside the Block.

    Attributes:
        device: name of the device, as torch has it.
        precision: the switches that choose the precision of products.
        versions: of the software that computes, and which way it computes, by its name.
    """

    device: str
    precision: str
    versions: tuple[tuple[str, str], ...]


def conditions(device: torch.device, *, fused_dropout: bool) -> Conditions:
    """Those in force on ``device`` now."""
    versions = {"pyrannc": _native.version, "torch": torch.__version__}
    if device.type == "cuda":
        versions["cuda"] = str(torch.version.cuda)
        versions["cudnn"] = str(torch.backends.cudnn.version())  # type: ignore[no-untyped-call]  # torch has no types for it
        versions["dropout"] = "fused" if fused_dropout else "not fused"
    return Conditions(device_name(device), _precision(device), tuple(versions.items()))


def device_name(device: torch.device) -> str:
    """The name under which the core knows the device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def uses_tf32(device: torch.device) -> bool:
    """True when float32 matrix products are computed in TF32."""
    return device.type == "cuda" and torch.backends.cuda.matmul.fp32_precision == "tf32"


def _precision(device: torch.device) -> str:
    autocast = "off"
    if torch.is_autocast_enabled(device.type):
        autocast = str(torch.get_autocast_dtype(device.type)).removeprefix("torch.")
    switches = {"autocast": autocast}
    if device.type == "cuda":
        cudnn = torch.backends.cudnn
        switches["products"] = torch.backends.cuda.matmul.fp32_precision
        switches["convolutions"] = cudnn.conv.fp32_precision  # type: ignore[attr-defined]  # it is made at import
        switches["by trial"] = _yes(cudnn.benchmark)
        switches["deterministic"] = _yes(cudnn.deterministic or torch.are_deterministic_algorithms_enabled())
    else:
        switches["products"] = torch.backends.mkldnn.matmul.fp32_precision  # type: ignore[attr-defined]  # likewise
    return ", ".join(f"{name}: {state}" for name, state in switches.items())


def _yes(switch: bool) -> str:
    return "yes" if switch else "no"
