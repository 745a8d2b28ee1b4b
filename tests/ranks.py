"""Runs a function on several ranks: real processes with a real process group."""

from __future__ import annotations

import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_for
from typing import Any

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torch", "torchvision", "transformers", "pyrannc", "torch.distributed"])


class RankFailed(AssertionError):
    """A rank raised or died; the text holds every rank's traceback."""


def run_ranks(
    world_size: int,
    job: Callable[..., Any],
    *args: Any,
    env: dict[str, str] | None = None,
    timeout_s: float = 120,
) -> list[Any]:
    """Calls ``job(*args)`` in ``world_size`` processes, as torchrun would start them; returns their results by rank.

    Raises:
        RankFailed: a rank raised, died, or did not end in time.
    """
    port = _free_port()
    started = []
    for rank in range(world_size):
        receiver, sender = _CONTEXT.Pipe(duplex=False)
        variables = _launch_variables(rank, world_size, port) | (env or {})
        process = _CONTEXT.Process(target=_run, args=(sender, variables, job, args), daemon=True)
        process.start()
        sender.close()
        started.append((process, receiver))
    try:
        outcomes = _collect([receiver for _, receiver in started], timeout_s)
    finally:
        for process, _ in started:
            process.join(5)
            if process.is_alive():
                process.kill()
    failures = [f"rank {rank}: {text}" for rank, (ok, text) in enumerate(outcomes) if not ok]
    if failures:
        raise RankFailed("\n".join(failures))
    return [value for _, value in outcomes]


def _collect(receivers: list[Connection], timeout_s: float) -> list[tuple[bool, Any]]:
    outcomes: dict[Connection, tuple[bool, Any]] = {}
    while len(outcomes) < len(receivers):
        ready = wait_for([r for r in receivers if r not in outcomes], timeout_s)
        if not ready:
            break
        for receiver in ready:
            assert isinstance(receiver, Connection)
            try:
                outcomes[receiver] = receiver.recv()
            except EOFError:
                outcomes[receiver] = (False, "ended without a result")
    return [outcomes.get(receiver, (False, f"no result within {timeout_s} s")) for receiver in receivers]


def _run(sender: Connection, variables: dict[str, str], job: Callable[..., Any], args: tuple[Any, ...]) -> None:
    os.environ.update(variables)
    import torch

    torch.set_num_threads(1)
    try:
        result = (True, job(*args))
    except BaseException:
        result = (False, traceback.format_exc())
    sender.send(result)
    sender.close()
    if result[0]:
        import pyrannc

        pyrannc.clear()


def _launch_variables(rank: int, world_size: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
