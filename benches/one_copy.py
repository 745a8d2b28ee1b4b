"""A model whose weights the ranks of a host have once, all together: for what each could not hold alone.

Every parameter is a file in shared memory that all ranks map, each for itself: what one of them writes is its own. The
files have no names any more when the model is there, so that nothing is left when the ranks end.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import torch
import torch.distributed as dist
from models import make_model
from torch import Tensor, nn

_STD = 0.02
_SHARED_MEMORY = Path("/dev/shm")


def module_of_one_copy(
    name: str, sizes: list[int], dropout: float, dtype: torch.dtype, device: torch.device
) -> nn.Module:
    """A transformer of :mod:`models` with parameters of a type on the host. All ranks of one host call it.

    Args:
        sizes: of the family; the first is the number of layers.
        dropout: probability, wherever it drops.
        device: where this rank draws its share of the weights.
    """
    with torch.device("meta"):
        model = make_model(name, sizes, 0, dropout)
    _fill_buffers(model, make_model(name, [1, *sizes[1:]], 0))
    folder = _SHARED_MEMORY / f"one-copy-{os.environ.get('MASTER_PORT', os.getpid())}"
    folder.mkdir(exist_ok=True)
    params = dict(enumerate(model.named_parameters()))
    for number, (path, param) in params.items():
        if number % dist.get_world_size() == dist.get_rank():
            _draw(_mapped(folder / str(number), param, dtype, shared=True), path, device)
    dist.barrier()
    made = {id(p): nn.Parameter(_mapped(folder / str(n), p, dtype, shared=False)) for n, (_, p) in params.items()}
    for module in model.modules():
        for key, param in module._parameters.items():
            module._parameters[key] = None if param is None else made[id(param)]
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder)
    return model


def _mapped(file: Path, like: Tensor, dtype: torch.dtype, *, shared: bool) -> Tensor:
    flat: Tensor = torch.from_file(str(file), shared=shared, size=like.numel(), dtype=dtype)
    return flat.view(like.shape)


def _draw(param: Tensor, path: str, device: torch.device) -> None:
    """Matrices are drawn, scales are one, the rest is zero."""
    if param.dim() > 1:
        param.copy_(torch.empty_like(param, device=device).normal_(std=_STD))
    else:
        param.fill_(float(path.endswith("weight")))


def _fill_buffers(model: nn.Module, shallow: nn.Module) -> None:
    """Those of all layers are those of one."""
    known = dict(shallow.named_buffers())
    for path, module in model.named_modules():
        for key in module._buffers:
            module._buffers[key] = known[f"{path}.{key}" if path else key]
