"""What the model and its captured Graph make of a few rows, from the same state and the same random numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from pyrannc.blocks.function import StageCode
from pyrannc.call.variant import Variant
from pyrannc.capture import flatten
from pyrannc.capture.nodes.autocast import no_autocast
from pyrannc.capture.nodes.chance import other_generators_restored, other_states, torch_draws
from pyrannc.capture.reads.as_one_process import as_one_process
from pyrannc.capture.reads.handed_back import as_given
from pyrannc.capture.torch_internals.levels import regions_ended
from pyrannc.capture.torch_internals.modules import reparametrized
from pyrannc.capture.torch_internals.tensors import version
from pyrannc.capture.trace.attributes import AttributeLog
from pyrannc.capture.user.row_lists import unpacked
from pyrannc.capture.user.source import SourceTracker
from pyrannc.core.partition import StagePart
from pyrannc.proof.outcome import seeds

_PIECES = 4096
"""Parts of a gradient whose norms and sums stand for it."""


@dataclass
class Made:
    """Of a few rows.

    Attributes:
        outputs: by Value of the whole.
        buffers: their contents afterwards, by name.
        gradients: by first name of the parameter, norms and sums of parts of it.
        chance: the states of all generators after the forward.
        drew: they were others before.
        values: more Values of the whole, if asked for.
    """

    outputs: dict[int, Tensor]
    buffers: dict[str, Tensor]
    gradients: dict[str, Tensor] = field(default_factory=dict)
    chance: tuple[bytes, ...] = ()
    drew: bool = False
    values: dict[int, Tensor] = field(default_factory=dict)


class FewRows:
    """A part of the batch, and what can be computed of it here.

    Args:
        model: the user's, which has all of its parameters here.
        variant: its captured form.
        tensors: of the arguments, on ``device``.
        rows: that they have.
        device: where to compute.
        backward: with gradients of the parameters.
    """

    def __init__(
        self, model: nn.Module, variant: Variant, tensors: Sequence[Tensor], rows: int, device: torch.device, *,
        backward: bool,
    ) -> None:  # fmt: skip
        self._model = model
        self._variant = variant
        self._tensors = tensors
        self._rows = rows
        self._device = device
        self._backward = backward
        self._on_device: dict[str, tuple[Tensor, int]] = {}

    def by_second_call(self) -> Made:
        """By the user's code, in a call that finds in Python what another one has left there."""
        with AttributeLog(self._model, SourceTracker(self._model)).restoring():
            self.by_model(restores=False)
            return self.by_model()

    def by_model(
        self,
        *,
        nudged: float | None = None,
        heard: Callable[[str, list[Tensor]], None] | None = None,
        restores: bool = True,
    ) -> Made:
        """By the user's code.

        Args:
            nudged: parameters are other ones by that share of them, or by a rounding if that is more.
            heard: takes the path of each sub-module that has run, and its results.
            restores: leaves in Python what was there before.
        """
        captured, facts = self._variant.whole.captured, self._variant.whole.facts
        state = self._state(nudged=nudged)
        names = {id(tensor): name for name, tensor in self._model.named_parameters()}
        names |= {id(tensor): name for name, tensor in self._model.named_buffers()}
        every = {
            name: state[names[id(tensor)]]
            for found in (self._model.named_parameters, self._model.named_buffers)
            for name, tensor in found(remove_duplicate=False)
        }

        def call() -> dict[int, Tensor]:
            args, kwargs = unpacked(captured.input_structure.rebuild(self._inputs()))
            with _listening(self._model, heard), as_given((args, kwargs)) as given:
                result = self._model(*args, **kwargs)
                return dict(zip(facts.outputs, captured.tensors_of(result, given), strict=True))

        # A checkpoint runs it again in the backward.
        return self._made(call, state, lambda: every, reparametrized(self._model, every), restores=restores)

    def by_graph(self, *, values: Sequence[int] = ()) -> Made:
        """By the captured Graph, uncut, which draws as torch does.

        Args:
            values: Values of the whole to keep.
        """
        captured, facts = self._variant.whole.captured, self._variant.whole.facts
        state = self._state()
        outputs = tuple(value for value in dict.fromkeys([*facts.outputs, *values]) if value not in facts.inputs)
        part = StagePart(
            ops=tuple(range(len(facts.ops))),
            inputs=(),
            receives=facts.inputs,
            sends=(),
            outputs=outputs,
            params=tuple(range(len(facts.params))),
            buffers=tuple(range(len(facts.buffers))),
            constants=tuple(range(len(facts.constants))),
            mutated_buffers=(),
        )
        code = StageCode(captured, facts, part, self._device, None)
        feeds = {param.value: state[param.names[0]] for param in facts.params}
        feeds |= {buffer.value: state[buffer.name] for buffer in facts.buffers}
        feeds |= {value: captured.constants[i].to(self._device) for i, value in enumerate(facts.constants)}
        found: dict[int, Tensor] = {}

        def call() -> dict[int, Tensor]:
            own = dict(zip(facts.inputs, self._inputs(), strict=True))
            found.update(code(self._rows, feeds | own))
            return {value: own[value] if value in own else found[value] for value in facts.outputs}

        def after() -> Mapping[str, Tensor]:
            updates = {buffer.name: found[code.updates[buffer.value]] for buffer in facts.buffers
                       if buffer.value in code.updates}  # fmt: skip
            return state | updates

        with no_autocast():
            made = self._made(call, state, after, nullcontext())
        made.values = {value: found[value].detach() for value in values}
        return made

    def _state(self, *, nudged: float | None = None) -> dict[str, Tensor]:
        """Parameters as leaves of their own, copies of buffers."""
        found = {name: self._leaf(name, param, nudged) for name, param in self._model.named_parameters()}
        buffers = self._model.named_buffers()
        return found | {name: buffer.detach().to(self._device, copy=True) for name, buffer in buffers}

    def _leaf(self, name: str, param: Tensor, nudged: float | None) -> Tensor:
        """It shares the memory of the parameter, or of its copy on the device, and has a gradient of its own."""
        own, seen = self._on_device.pop(name, (None, 0))
        if own is None or version(own) != seen:
            own = param.detach().to(self._device)
        if nudged is None:
            # For the next run; beside a nudged one there may be no memory for it.
            self._on_device[name] = own, version(own)
        elif own.is_floating_point():
            signs = 1 - 2 * (torch.arange(own.numel(), device=own.device) % 2).view(own.shape)
            own = own + signs * max(nudged, torch.finfo(own.dtype).eps) * own
        return own.detach().requires_grad_(param.requires_grad)

    def _inputs(self) -> list[Tensor]:
        return [tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in self._tensors]

    def _made(
        self,
        call: Callable[[], dict[int, Tensor]],
        state: Mapping[str, Tensor],
        after: Callable[[], Mapping[str, Tensor]],
        within: AbstractContextManager[None],
        *,
        restores: bool = True,
    ) -> Made:
        facts, gradients = self._variant.whole.facts, dict[str, Tensor]()
        names = [buffer.name for buffer in facts.buffers]
        # Parts that stay whole in the Graph are the user's code, too.
        tracker = SourceTracker(self._model)
        attributes = AttributeLog(self._model, tracker)
        with (
            attributes.restoring() if restores else nullcontext(),
            as_one_process(tracker),
            same_chance(self._device),
            _same_kernels(),
            torch.set_grad_enabled(self._backward),
            regions_ended(),
            within,
        ):
            before = _states(self._device)
            outputs = call()
            chance = _states(self._device)
            if self._backward:
                self._differentiate(outputs, state, gradients)
        buffers = after()
        return Made(
            {value: tensor.detach() for value, tensor in outputs.items()},
            {name: buffers[name].detach() for name in names},
            gradients,
            chance,
            before != chance,
        )

    def _differentiate(
        self, outputs: Mapping[int, Tensor], state: Mapping[str, Tensor], found: dict[str, Tensor]
    ) -> None:
        facts = self._variant.whole.facts

        def keeper(name: str) -> Callable[[Tensor], None]:
            def keep(leaf: Tensor) -> None:
                # One gradient at a time is what this costs.
                assert leaf.grad is not None, "it has just come"
                found[name] = _digest(leaf.grad)
                leaf.grad = None

            return keep

        for param in facts.params:
            leaf = state[param.names[0]]
            if leaf.requires_grad:
                leaf.register_post_accumulate_grad_hook(keeper(param.names[0]))  # type: ignore[no-untyped-call]  # torch has no types for it
        roots = [
            (outputs[value], seed.to(self._device))
            for value, seed in seeds(self._variant, self._rows).items()
            if outputs[value].requires_grad
        ]
        if roots:
            torch.autograd.backward([root for root, _ in roots], [seed for _, seed in roots])


@contextmanager
def same_chance(device: torch.device) -> Iterator[None]:
    """Whatever is drawn inside is drawn again afterwards: by torch, Python and NumPy."""
    with other_generators_restored(), torch_draws(device=device):
        yield


@contextmanager
def _same_kernels() -> Iterator[None]:
    """Convolutions on GPUs are computed in the same way each time: neither chosen by a trial, nor added up as it comes.

    Under batch statistics of a few rows, or TF32, the other kernel's roundings are as large as an error.
    """
    cudnn = torch.backends.cudnn
    found = cudnn.deterministic, cudnn.benchmark
    cudnn.deterministic, cudnn.benchmark = True, False
    try:
        yield
    finally:
        cudnn.deterministic, cudnn.benchmark = found


def _states(device: torch.device) -> tuple[bytes, ...]:
    own = [torch.cuda.get_rng_state(device)] if device.type == "cuda" else []
    others = [state for _, state in other_states()]
    return *(bytes(state.tolist()) for state in (torch.get_rng_state(), *own)), *others


def _digest(gradient: Tensor) -> Tensor:
    """Norms and sums of parts of a gradient."""
    flat = (gradient.to_dense() if gradient.is_sparse else gradient).detach().reshape(-1)
    flat = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
    size = max(1, -(-flat.numel() // _PIECES))
    parts = nn.functional.pad(flat.double(), (0, -flat.numel() % size)).view(-1, size)
    return torch.cat([parts.norm(dim=1), parts.sum(1) / size**0.5])


@contextmanager
def _listening(model: nn.Module, heard: Callable[[str, list[Tensor]], None] | None) -> Iterator[None]:
    handles = []
    if heard is not None:
        for path, module in model.named_modules():

            def hook(_module: nn.Module, _args: Any, result: Any, path: str = path) -> None:
                heard(path, [tensor.detach().clone() for tensor in flatten(result)[0]])

            handles.append(module.register_forward_hook(hook))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
