"""The list of Programs on which the machine's users agree, through the runtime: what it computes, holds, sends and sums
is what the machine says. Where there are GPUs it runs on NCCL, as far as there are enough of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import pyrannc
from pyrannc.core.program import AllGather, AllReduce, Exchange, RankProgram, ReduceScatter, Send
from pyrannc.job import process
from pyrannc.runtime.batch import Batch
from pyrannc.runtime.channels import Channels
from pyrannc.runtime.exchanges import Exchanges
from pyrannc.runtime.seat import Seat
from pyrannc.store import gathered, gradients
from pyrannc.store.spread_sums import SpreadSums
from tests.conformance.programs import Case, Model, cases, planned
from tests.ranks import RankPool
from tests.runtime.plans import graph_of

Ranks = Callable[[int], RankPool]
WIDTH, FLOAT_BYTES = 6, 4
ROW_BYTES = WIDTH * FLOAT_BYTES


@dataclass
class Seen:
    """What a rank does in one step."""

    program: RankProgram | None = None
    order: list[str] = field(default_factory=list)
    held: int = 0
    sent: list[tuple[int, str, int, int]] = field(default_factory=list)
    exchanged: list[tuple[int, str, list[tuple[int, int]]]] = field(default_factory=list)
    summed: list[int] = field(default_factory=list)
    scattered: list[tuple[int, int]] = field(default_factory=list)
    gathered: list[int] = field(default_factory=list)
    under_way: int = 0
    kept: int = 0


@contextmanager
def watched(seen: Seen) -> Iterator[None]:
    """Notes what the runtime does inside."""
    forward, backward, seat_send = Seat.forward, Seat.backward, Seat.send
    exchange, start = Batch.exchange, Exchanges.start
    backward_input, backward_weight = Seat.backward_input, Seat.backward_weight
    send, start_sum = Channels.send, gradients.start_sum
    scatter, gather_parts = SpreadSums.start, gathered.gather_parts

    def note_held(seat: Any) -> None:
        seen.program = seat._program
        # Of a call without backwards, what is sent at once is held no longer than it is computed.
        seen.held = max(seen.held, 1, len(seat._live))

    def watch_forward(seat: Any, microbatch: int) -> None:
        seen.order.append(f"F{microbatch}")
        forward(seat, microbatch)
        note_held(seat)

    def watch_backward(seat: Any, microbatch: int, *args: Any, **kwargs: Any) -> None:
        seen.order.append(f"B{microbatch}")
        backward(seat, microbatch, *args, **kwargs)

    def watch_input(seat: Any, microbatch: int, *args: Any, **kwargs: Any) -> None:
        seen.order.append(f"I{microbatch}")
        backward_input(seat, microbatch, *args, **kwargs)

    def watch_weight(seat: Any, microbatch: int, **kwargs: Any) -> None:
        seen.order.append(f"W{microbatch}")
        backward_weight(seat, microbatch, **kwargs)

    def watch_message(seat: Any, message: Send) -> None:
        seen.sent.append((message.microbatch, message.kind, message.peer, 0))
        seat_send(seat, message)

    def watch_exchange(batch: Any, action: Exchange, *made: Any) -> None:
        seen.exchanged.append((action.microbatch, action.kind, []))
        exchange(batch, action, *made)

    def watch_start(exchanges: Any, sends: Any, receives: Any) -> Any:
        seen.exchanged[-1][-1].extend((peer, tensor.nbytes) for peer, tensor in sends)
        return start(exchanges, sends, receives)

    def watch_send(channels: Any, peer: int, tensors: Any, *, microbatch: int, window: int | None) -> None:
        send(channels, peer, tensors, microbatch=microbatch, window=window)
        seen.sent[-1] = (*seen.sent[-1][:3], sum(tensor.nbytes for tensor in tensors))
        if window is None:
            seen.kept = max(seen.kept, len(channels._sends[peer]))
        else:
            seen.under_way = max(seen.under_way, len(channels._sends[peer]))

    def watch_sum(tensor: Tensor, group: Any) -> Any:
        seen.summed.append(tensor.nbytes)
        return start_sum(tensor, group)

    def watch_scatter(sums: Any, group: Any) -> None:
        seen.scattered.append((sums._bucket.number, sums._bucket.numel * FLOAT_BYTES))
        scatter(sums, group)

    def watch_gather(whole: Tensor, *rest: Any) -> Any:
        seen.gathered.append(whole.nbytes)
        return gather_parts(whole, *rest)

    patch = pytest.MonkeyPatch()
    with patch.context() as inside:
        inside.setattr(Seat, "forward", watch_forward)
        inside.setattr(Seat, "backward", watch_backward)
        inside.setattr(Seat, "backward_input", watch_input)
        inside.setattr(Seat, "backward_weight", watch_weight)
        inside.setattr(Seat, "send", watch_message)
        inside.setattr(Batch, "exchange", watch_exchange)
        inside.setattr(Exchanges, "start", watch_start)
        inside.setattr(Channels, "send", watch_send)
        inside.setattr(gradients, "start_sum", watch_sum)
        inside.setattr(SpreadSums, "start", watch_scatter)
        inside.setattr(gathered, "gather_parts", watch_gather)
        yield


def run(case: Case, folder: str) -> list[str]:
    """What differs on this rank from what the machine tells."""
    inside = case.call == "whole"
    device = process.ensure_process_group().device
    model = Model(case.model, len(case.replicas), inside=inside, width=WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(case.rows[pyrannc.get_rank()], WIDTH, device=device)
    file = Path(folder) / f"plan{pyrannc.get_rank()}"
    graph = graph_of(model, (torch.randn(sum(case.rows), WIDTH),), {}, sum(case.rows))
    planned(case, graph).write(file)
    wrapped = pyrannc.RaNNCModule(model, optimizer, load_deployment=file)

    def step() -> None:
        if case.call == "forward":
            with torch.no_grad():
                wrapped(x)
        else:
            made = wrapped(x)
            (made[0] if inside else made.square().mean()).backward()

    if device.type == "cuda":
        # The first step is rehearsed.
        step()
    seen = Seen()
    with watched(seen):
        step()
    wrapped.undeploy()
    return differences(case, seen)


def differences(case: Case, seen: Seen) -> list[str]:
    drawn, counts = case.told[pyrannc.get_rank()].split(": ", 1)[1].split(" | ")
    numbers = {count.split()[1]: int(count.split()[0]) for count in counts.split(", ")}
    program = seen.program
    if program is None:
        return [] if numbers["held"] == 0 else [f"{case}: nothing was computed"]
    actions = [*program.forward, *program.backward]
    sends = [
        (
            action.microbatch,
            action.kind,
            action.peer,
            sum(piece.rows[1] - piece.rows[0] for piece in action.pieces) * ROW_BYTES,
        )
        for action in actions
        if isinstance(action, Send)
    ]
    exchanges = [
        (
            action.microbatch,
            action.kind,
            [
                (parcel.peer, (piece.rows[1] - piece.rows[0]) * ROW_BYTES)
                for parcel in action.sends
                for piece in parcel.pieces
            ],
        )
        for action in actions
        if isinstance(action, Exchange)
    ]
    sums = [action.bytes for action in actions if isinstance(action, AllReduce)]
    scattered = [(action.bucket, action.bytes) for action in actions if isinstance(action, ReduceScatter)]
    gathers = [action.bytes for action in actions if isinstance(action, AllGather)]
    compared: dict[str, tuple[Any, Any]] = {
        "order": (seen.order, [cell for cell in drawn.split() if cell != "."]),
        "held": (seen.held, numbers["held"]),
        "sent": (seen.sent, sends),
        "number sent": (len(seen.sent), numbers["sent"]),
        "exchanged": (seen.exchanged, exchanges),
        "number exchanged": (len(seen.exchanged), numbers["exchanged"]),
        "summed": (seen.summed, sums),
        "number summed": (len(seen.summed), numbers["summed"]),
        "scattered": (seen.scattered, scattered),
        "number scattered": (len(seen.scattered), numbers.get("scattered", 0)),
        "gathered": (seen.gathered, gathers),
        "number gathered": (len(seen.gathered), numbers.get("gathered", 0)),
        "within the window": (seen.under_way <= 2, True),
        "kept until its answer comes": (seen.kept <= seen.held, True),
    }
    rank = pyrannc.get_rank()
    return [f"{case}, rank {rank}, {what}: {own} != {told}" for what, (own, told) in compared.items() if own != told]


def run_all(chosen: list[Case], folder: str) -> list[str]:
    return [line for case in chosen for line in run(case, folder)]


def test_the_runtime_does_what_the_machine_says(ranks: Ranks, tmp_path: Path) -> None:
    by_size: dict[int, list[Case]] = defaultdict(list)
    for case in cases():
        by_size[case.world_size].append(case)
    assert len(by_size) > 2, "the list was read"
    most = torch.cuda.device_count() or max(by_size)
    assert most >= 2, "a single GPU has nobody to send to"
    for world_size, chosen in sorted(by_size.items()):
        if world_size <= most:
            told = ranks(world_size).run(run_all, chosen, str(tmp_path), env={"RANNC_CUDA_GRAPHS": "off"})
            assert told == [[]] * world_size
