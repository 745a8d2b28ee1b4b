"""Capture of one call of a model."""

from __future__ import annotations

import json
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, fx, nn

from pyrannc.errors import CaptureError, InputError, RaNNCError

from .clean import clean
from .dims import Dim
from .flatten import Structure, batch_rows, flatten
from .lower import lower
from .oracle import Assumption
from .tracer import trace


@dataclass(frozen=True)
class Captured:
    """A captured call: the Graph for planning, and the torch graph that runs.

    ``gm`` takes parameters, buffers and input tensors, each in id order, and returns a flat tuple: the output
    tensors, then the new tensors of reassigned buffers. Gradient modes are not in ``gm`` but in the Graph's ops.
    """

    graph_json: str
    gm: fx.GraphModule
    op_nodes: list[fx.Node]
    values: list[tuple[fx.Node, int | None]]
    params: list[str]
    buffers: list[str]
    constants: list[Tensor]
    assumptions: list[Assumption]
    dims: dict[fx.Node, Dim]
    input_structure: Structure
    output_structure: Structure

    def input_tensors(self, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Tensor]:
        """The tensors of a call, in the order of the Graph's inputs.

        Raises:
            InputError: the arguments are not structured like those of the captured call.
        """
        tensors, structure = flatten((tuple(args), kwargs))
        if structure != self.input_structure:
            raise InputError("the arguments have another structure than those of the captured call")
        return tensors

    def value(self, value: int) -> Tensor:
        """A Value as the captured call made it: a tensor without data."""
        node, place = self.values[value]
        made = node.meta["val"]
        tensor: Tensor = made if place is None else made[place]
        return tensor

    def rebuild_outputs(self, leaves: Sequence[Tensor]) -> Any:
        """The model's result with ``leaves``, in the order of the Graph's outputs, as its tensors."""
        return self.output_structure.rebuild(leaves)


_MODULES: WeakKeyDictionary[nn.Module, tuple[nn.Module, ...]] = WeakKeyDictionary()
_training = attrgetter("training")


def signature(model: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> Hashable:
    """What two calls must share to share a capture.

    These are the structure of the arguments, the types of their tensors, all extents but the batch, the training
    flags of all sub-modules, and the ambient autocast state. Sub-modules are looked up once per model.

    Raises:
        ValueError: the batch size cannot be told.
    """
    tensors, structure = flatten((tuple(args), kwargs))
    rows = batch_rows(tensors)
    modules = _MODULES.get(model)
    if modules is None:
        # Without the model itself, which must not be kept alive by what is known of it.
        modules = _MODULES[model] = tuple(model.modules())[1:]
    described = tuple(_describe(tensor, rows) for tensor in tensors)
    flags = model.training, bytes(map(_training, modules))
    return structure, described, flags, _autocast_state()


def _describe(tensor: Tensor, rows: int) -> Hashable:
    shape = tuple(tensor.shape)
    batched = bool(shape) and shape[0] == rows
    return batched, shape[1:] if batched else shape, tensor.dtype, tensor.requires_grad


def _autocast_state() -> Hashable:
    return tuple((kind, torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind))


def capture(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    *,
    device: torch.device,
    rows: int,
    leaf_modules: Sequence[str] = (),
) -> Captured:
    """Captures ``model(*args, **kwargs)`` as it would run on ``device``, for any number of rows.

    The model may have meta parameters, and the device need not exist here. The model is left as it was.

    Args:
        model: the module to capture, in training or evaluation mode.
        args: sample positional arguments.
        kwargs: sample keyword arguments.
        device: where the model will run.
        rows: batch size of the sample; every tensor argument whose dimension 0 has this extent is batched.
        leaf_modules: paths of sub-modules that stay whole, as one opaque op per call.

    Raises:
        CaptureError: the call cannot be captured; the message names the place in the model and what to do.
    """
    traced = None
    try:
        # Without rows there is nothing to capture for: this raises.
        batch_rows(flatten((tuple(args), kwargs))[0])
        traced = trace(model, tuple(args), kwargs, device, rows, leaf_modules)
        cleaned = clean(traced)
        lowered = lower(traced, cleaned, _qualified_name(model), model.training, max(1, rows))
    except RaNNCError:
        raise
    except Exception as error:
        raise CaptureError(f"the model cannot be captured: {error}") from error
    return Captured(
        graph_json=json.dumps(lowered.graph, separators=(",", ":")),
        gm=cleaned.gm,
        op_nodes=cleaned.ops,
        values=lowered.values,
        params=traced.params.names,
        buffers=traced.buffers.names,
        constants=lowered.constants,
        assumptions=traced.assumptions,
        dims=cleaned.dims,
        input_structure=flatten((tuple(args), kwargs))[1],
        output_structure=traced.output,
    )


def _qualified_name(model: nn.Module) -> str:
    return f"{type(model).__module__}.{type(model).__qualname__}"
