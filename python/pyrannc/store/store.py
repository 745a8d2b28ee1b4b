"""``ParamStore``: which ranks hold a parameter or buffer, and how its owner's tensor gets to the others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from typing import TypeVar

import torch
from torch import Tensor, nn

from pyrannc.capture.torch_internals.tensors import DisableTorchFunctionSubclass
from pyrannc.job import agree, phases, process
from pyrannc.job.exchange import Group, from_first, from_owner, give_to_others, sum_over_ranks, to_first
from pyrannc.store.buckets import SharedParam, elements
from pyrannc.store.divided import DividedParams
from pyrannc.store.elsewhere import bring_here, keep_with, send_away
from pyrannc.store.overflow import Overflow
from pyrannc.store.spread_tensor import is_spread, own_gradient, own_piece
from pyrannc.store.unscale import changes_of

Held = TypeVar("Held", bound=Tensor)


class ParamStore:
    """The parameters and buffers of a model, each on the ranks that hold it; the first of them owns it.

    All ranks make it and call its methods that move tensors together.

    Args:
        model: the user's model; the tensors that this rank holds go to ``device`` with :meth:`move`, those of other
            ranks are freed and guarded, those that no rank holds stay on the host.
        holders: by first name, the ranks that hold a parameter or buffer, increasing; none for those without a use.
        device: this rank's.
        sync_params: give every rank the parameters and buffers of rank 0 first.

    Attributes:
        params: all parameters by first name, in the model's order.
        used: those of them that some rank holds.
        used_here: the same; ``None`` in place of those that this rank does not hold.
        overflow: what finds out whose gradients are not finite.
        buffers: all buffers, as parameters.
        holders: as given.
        divided: those that Replicas update in parts; ``None`` if there are none.
    """

    def __init__(
        self, model: nn.Module, holders: Mapping[str, tuple[int, ...]], device: torch.device, *, sync_params: bool
    ) -> None:
        self.params = dict(model.named_parameters())
        self.used = {name: param for name, param in self.params.items() if name in holders}
        self.buffers = dict(model.named_buffers())
        self.holders = holders
        self.used_here = [param if self.is_local(name) else None for name, param in self.used.items()]
        self.overflow = Overflow()
        self.divided: DividedParams | None = None
        self._device = device
        self._own_buffers: Set[str] = frozenset()
        if process.get_world_size() > 1:
            if sync_params:
                self._broadcast_from_first()
            else:
                # All ranks must take part in the first use of a group; later ones are between two of them.
                sum_over_ranks(torch.zeros(1, device=device))
        for name, tensor in self.tensors():
            if not self.is_local(name) and name in holders:
                send_away(tensor, "parameter" if name in self.params else "buffer", name, holders[name], device)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """All parameters and buffers by first name."""
        yield from self.params.items()
        yield from self.buffers.items()

    @torch.no_grad()
    def _broadcast_from_first(self) -> None:
        gives = process.get_rank() == 0
        for _, tensor in self.tensors():
            if gives:
                give_to_others(tensor.to(self._device).contiguous(), 0)
            else:
                received = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device)
                give_to_others(received, 0)
                tensor.copy_(received)

    def move(self, divide: Callable[[], DividedParams] | None) -> None:
        """This rank's tensors go to its device, divided ones in parts: it may have no memory for the whole of them.

        All ranks call it, before anything else but :meth:`shared`.

        Args:
            divide: moves those that Replicas divide, and gives what :attr:`divided` becomes.
        """
        # A device may be full on one rank alone.
        agree.together(lambda: self._move(divide))

    def _move(self, divide: Callable[[], DividedParams] | None) -> None:
        self.divided = divide() if divide is not None else None
        gathered = {} if self.divided is None else self.divided.gathered
        moved_bytes = 0
        for name, tensor in self.tensors():
            if name in gathered:
                moved_bytes += own_piece(tensor).nbytes
            elif self.is_local(name):
                grad, tensor.grad = tensor.grad, None
                tensor.data = tensor.data.to(self._device)
                tensor.grad = grad.to(self._device) if grad is not None else None
                moved_bytes += tensor.nbytes
        for _, tensor in self.tensors():
            keep_with(tensor, self)
        phases.note(f"this rank holds {moved_bytes / 2**20:.1f} MiB")

    # Who holds what

    def is_local(self, name: str) -> bool:
        """True when this rank holds the parameter or buffer."""
        return process.get_rank() in self.holders.get(name, ())

    def local_params(self) -> dict[str, nn.Parameter]:
        """Parameters that this rank holds, by first name, in the model's order."""
        return self._local(self.params)

    def local_buffers(self) -> dict[str, Tensor]:
        """Buffers that this rank holds, by first name, in the model's order."""
        return self._local(self.buffers)

    def buffer_to_compute_with(self, name: str) -> Tensor:
        """A buffer on this rank's device; one that the first call did not use has stayed where the model was."""
        buffer = self.buffers[name]
        if buffer.device != self._device:
            buffer.data = buffer.data.to(self._device)
        return buffer

    def _local(self, tensors: dict[str, Held]) -> dict[str, Held]:
        rank = process.get_rank()
        return {name: tensor for name, tensor in tensors.items() if rank in self.holders.get(name, ())}

    def local_ids(self) -> set[int]:
        """``id`` of each parameter and buffer that this rank holds."""
        return {id(tensor) for tensor in (*self.local_params().values(), *self.local_buffers().values())}

    def owned(self) -> Mapping[str, nn.Parameter]:
        """Parameters that this rank holds first: over all ranks, each parameter that is held once."""
        rank = process.get_rank()
        return {name: param for name, param in self.params.items() if self._owner(name) == rank}

    def shared(self, names: Iterable[str]) -> list[SharedParam]:
        """Those of the named parameters that this rank holds, in the order of the names."""
        return [SharedParam(name, self.params[name], self.holders[name]) for name in names if self.is_local(name)]

    # From owners to others

    def _owner(self, name: str) -> int:
        """The rank that gives a tensor to the others: of one without a use, rank 0."""
        return self.holders.get(name, (0,))[0]

    @torch.no_grad()
    def full(self, name: str, tensor: Tensor) -> Tensor:
        """A tensor of the parameter's or buffer's shape, from the ranks that have it, on the host of every rank.

        Args:
            name: first name of the parameter or buffer.
            tensor: on the owner, what to give; elsewhere, its shape and type.
        """
        if self.is_in_parts(name):
            whole = self._joined(name, tensor, self._own_elements, from_owner)
            assert whole is not None, "every rank gets it"
            return whole
        return from_owner(tensor, self._owner(name), self._device)

    def is_in_parts(self, name: str) -> bool:
        """True for a parameter of which each Replica keeps a part."""
        return self.divided is not None and name in self.divided.in_parts

    def _own_elements(self, param: Tensor) -> Tensor:
        assert self.divided is not None, "it is divided"
        return self.divided.own_elements(param)

    def _joined(
        self,
        name: str,
        param: Tensor,
        own: Callable[[Tensor], Tensor | None],
        carry: Callable[[Tensor, int, torch.device], Tensor | None],
    ) -> Tensor | None:
        """What ranks have parts of, one after another.

        Args:
            own: this rank's part of it, in one dimension.
            carry: takes a part from its rank to where the whole is wanted, or to nowhere.
        """
        assert self.divided is not None, "it is divided"
        whole = torch.empty_strided(param.size(), param.stride(), dtype=param.dtype, device="cpu")
        arrived = None
        for part in self.divided.parts[name]:
            given = own(param) if process.get_rank() == part.rank else None
            size = part.end - part.start
            given = torch.empty(size, dtype=param.dtype, device="cpu") if given is None else elements(given, 0, size)
            arrived = carry(given, part.rank, self._device)
            if arrived is not None:
                elements(whole, part.start, part.end).copy_(arrived)
        return whole if arrived is not None else None

    def full_grad(self, name: str, param: nn.Parameter) -> Tensor | None:
        """A parameter's gradient, like :meth:`full`; ``None`` where its owners have none."""
        if self.divided is not None and name in self.divided.spread:
            grad = param.grad if self.is_local(name) else None
            flags = agree.gather_numbers((int(grad is not None), int(grad is not None and not is_spread(grad))))
            has, has_whole = (any(column) for column in zip(*flags, strict=True))
            if has and not has_whole:
                return self._joined(name, param, own_gradient, from_owner)
            return self._full_plain_grad(name, param) if has else None
        return self._full_plain_grad(name, param)

    def take_spread_grads(self) -> dict[str, Tensor]:
        """Before parameters are divided otherwise: whole gradients of which ranks keep parts. All ranks call it."""
        names = [] if self.divided is None else list(self.divided.spread)
        found = {name: self.full_grad(name, self.params[name]) for name in names}
        for name in names:
            self.params[name].grad = None
        return {name: grad for name, grad in found.items() if grad is not None}

    def put_grads(self, grads: Mapping[str, Tensor]) -> None:
        """Gives ranks their parts of whole gradients."""
        for name, grad in grads.items():
            # Those that are frozen by now keep theirs, as torch has it: optimizers go on with them.
            if self.is_local(name):
                whole = grad.to(self._device)
                if self.divided is not None and name in self.divided.spread:
                    whole = self.divided.own_gradient(name, self.params[name], whole)
                self.params[name].grad = whole

    def _full_plain_grad(self, name: str, param: nn.Parameter) -> Tensor | None:
        """That of a gradient which its owner has whole."""
        owner = self._owner(name)
        grad = param.grad if process.get_rank() == owner else None
        if agree.gather_numbers((int(grad is None),))[owner][0]:
            return None
        return from_owner(param if grad is None else grad, owner, self._device)

    @torch.no_grad()
    def on_first(self, name: str, tensor: Tensor) -> Tensor | None:
        """Like :meth:`full`, but on rank 0 alone; ``None`` elsewhere."""
        if self.is_in_parts(name):
            return self._joined(name, tensor, self._own_elements, to_first)
        return to_first(tensor, self._owner(name), self._device)

    @torch.no_grad()
    def take_from_first(self, name: str, tensor: Tensor, contents: Tensor | None) -> None:
        """Copies what rank 0 has into a parameter or buffer, on the ranks that hold it. All ranks call it.

        Args:
            tensor: the parameter or buffer.
            contents: on rank 0, of its shape and type.
        """
        everyone = process.all_ranks()
        given = tensor if contents is None else contents
        arrived = from_first(given, self.holders.get(name, everyone), self._device)
        if arrived is not None:
            tensor.copy_(arrived)

    @torch.no_grad()
    def sync_buffers(self, own: Set[str], missed: Set[str], ranks: Sequence[int], group: Group | None) -> None:
        """Gives the first Replica's buffers to the others of the Stage, where they may differ and should not.

        While calls change a buffer by the rows of each Replica, every Replica has its own.

        Args:
            own: buffers of this rank's Stage that the call changes by rows.
            missed: those that some Replica, without rows, will not change as the first one does.
            ranks: of the Stage's Replicas.
            group: of these ranks.
        """
        if len(ranks) > 1:
            for name in sorted(self._own_buffers - own):
                give_to_others(self.buffers[name], ranks[0], group)
        self._own_buffers = own | missed

    @torch.no_grad()
    def hold_everywhere(self, name: str) -> None:
        """Gives a buffer to all ranks, which hold it from now on. All ranks call it."""
        buffer = self.buffers[name]
        contents = self.full(name, buffer).to(self._device)
        if not self.is_local(name):
            bring_here(buffer, contents)
        self.holders = {**self.holders, name: process.all_ranks()}

    @torch.no_grad()
    def share_buffer(self, name: str, owner: int, group: Group | None) -> None:
        """Gives a buffer of one rank to the others of a group, which all hold it."""
        buffer = self.buffer_to_compute_with(name)
        contents = buffer.contiguous()
        give_to_others(contents, owner, group)
        if process.get_rank() != owner and contents is not buffer:
            buffer.copy_(contents)

    @torch.no_grad()
    def make_whole(self) -> None:
        """Gives every Replica the parameters of its Stage whole, without gradients. All ranks call it."""
        for name, param in self.params.items():
            if self.is_in_parts(name):
                whole = self.full(name, param)
                if self.is_local(name):
                    bring_here(param, whole.to(self._device))

    @torch.no_grad()
    def bring_back(self) -> None:
        """Gives every rank the whole model, on the host, without gradients."""
        for name, tensor in self.tensors():
            tensor.grad = None
            if name in self.holders:
                bring_here(tensor, self.full(name, tensor))
            else:
                tensor.data = tensor.data.cpu()

    def clip_grad_norm(self, max_norm: float) -> Tensor:
        """Scales all gradients so that their global L2 norm is at most ``max_norm``.

        Returns:
            The norm before, a scalar on this rank's device.
        """
        spread = {} if self.divided is None else self.divided.spread
        counted = [param for name, param in self.owned().items() if name not in spread]
        counted += [param for name, param in self.local_params().items() if name in spread]
        norm = nn.utils.get_total_norm([grad for grad in map(own_gradient, counted) if grad is not None])
        norm = norm.to(device=self._device, dtype=torch.float64)
        total = norm**2
        sum_over_ranks(total)
        total = total.sqrt()
        # The script may compute with those that no Stage uses.
        here = [param for name, param in self.params.items() if self.is_local(name) or name not in self.holders]
        nn.utils.clip_grads_with_norm_([_with_own_gradient(param) for param in here], max_norm, total)
        # It multiplies with this, also what this rank does not have: where the norm is NaN, all becomes NaN.
        factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
        with DisableTorchFunctionSubclass():
            for param in self.used.values():
                for changes in changes_of(id(param), param.dtype):
                    changes.add(Tensor.mul_, "mul_", (factor,), {})
        return total


def _with_own_gradient(param: nn.Parameter) -> Tensor:
    """Something whose ``.grad`` is what this rank has of a parameter's gradient."""
    grad = own_gradient(param)
    if grad is param.grad:
        return param
    assert grad is not None, "it is another than the parameter's"
    stand_in = torch.empty_like(grad)
    stand_in.grad = grad
    return stand_in
