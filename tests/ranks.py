"""Runs functions on several ranks: real processes with a real process group."""

from __future__ import annotations

import multiprocessing
import os
import socket
import subprocess
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_for
from typing import Any

_CONTEXT = multiprocessing.get_context("forkserver")
# The latter are loaded by the first capture of a process.
_AT_CAPTURES = ["sympy.tensor.tensor", "torch._export.non_strict_utils", "torch._inductor.fx_passes.dedupe_symint_uses"]
_CONTEXT.set_forkserver_preload(
    ["torch", "torchvision", "transformers", "pyrannc.module", "torch.distributed", *_AT_CAPTURES]
)

_MOST_JOBS = 40
"""After so many the ranks of a pool are replaced: what jobs leave behind adds up, such as process groups of Gloo, each
with a thread that looks for messages a hundred times a second."""
_MOST_POOLS = 2
"""Ranks that wait for a job take time from those that have one."""

_GRACE_S = 5.0
"""How long the other ranks may go on after one has failed: they may wait for it forever."""

_Outcome = tuple[bool, Any]

_turns = count(os.getpid())
"""By which ports are chosen."""


class RankFailed(AssertionError):
    """A rank raised or died; the text holds every failed rank's traceback."""


class RankPool:
    """Ranks that stay for several jobs, started as torchrun would start them."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._ranks: list[tuple[Any, Connection]] = []
        self._jobs = 0

    def run(
        self, job: Callable[..., Any], *args: Any, env: dict[str, str] | None = None, timeout_s: float = 120
    ) -> list[Any]:
        """Calls ``job(*args)`` on every rank, with ``env`` added to the environment; returns the results by rank.

        Raises:
            RankFailed: a rank raised, died, or did not end in time. The next job gets new ranks.
        """
        if not self._ranks:
            self._start()
        self._jobs += 1
        for _, connection in self._ranks:
            connection.send((job, args, env or {}))
        outcomes = _collect([connection for _, connection in self._ranks], timeout_s)
        failures = [f"rank {rank}: {text}" for rank, (ok, text) in enumerate(outcomes) if not ok]
        if failures:
            self._kill()
            raise RankFailed("\n".join(failures))
        return [value for _, value in outcomes]

    @property
    def is_used_up(self) -> bool:
        """It has had so many jobs that new ranks are faster."""
        return self._jobs >= _MOST_JOBS

    def close(self) -> None:
        """Lets the ranks leave; the next job gets new ones."""
        for _, connection in self._ranks:
            # One of them may have died since its last job.
            with suppress(OSError):
                connection.send(None)
        for process, _ in self._ranks:
            process.join(_GRACE_S)
        self._kill()

    def _start(self) -> None:
        self._jobs = 0
        port = _free_port()
        for rank in range(self._world_size):
            here, there = _CONTEXT.Pipe()
            variables = _launch_variables(rank, self._world_size, port)
            process = _CONTEXT.Process(target=_serve, args=(there, variables), daemon=True)
            process.start()
            there.close()
            self._ranks.append((process, here))

    def _kill(self) -> None:
        for process, connection in self._ranks:
            process.kill()
            connection.close()
        self._ranks.clear()


class RankPools:
    """Pools by number of ranks."""

    def __init__(self) -> None:
        self._pools: dict[int, RankPool] = {}

    def of_size(self, world_size: int) -> RankPool:
        """The pool of so many ranks."""
        # The last used one stands last.
        self._pools[world_size] = self._pools.pop(world_size, None) or RankPool(world_size)
        return self._pools[world_size]

    def tidy(self) -> None:
        """Lets ranks go that have not been used lately, or too often."""
        for place, pool in enumerate(reversed(self._pools.values())):
            if place >= _MOST_POOLS or pool.is_used_up:
                pool.close()

    def close(self) -> None:
        """Lets all ranks leave."""
        for pool in self._pools.values():
            pool.close()


def run_ranks(
    world_size: int,
    job: Callable[..., Any],
    *args: Any,
    env: dict[str, str] | None = None,
    timeout_s: float = 120,
) -> list[Any]:
    """Calls ``job(*args)`` in ``world_size`` new processes; returns their results by rank.

    Raises:
        RankFailed: a rank raised, died, or did not end in time.
    """
    pool = RankPool(world_size)
    try:
        return pool.run(job, *args, env=env, timeout_s=timeout_s)
    finally:
        pool.close()


@dataclass(frozen=True)
class Ended:
    """How a program ended on one rank."""

    status: int
    stdout: str
    stderr: str
    after_s: float


def run_programs(
    world_size: int, *command: str, env: dict[str, str] | None = None, timeout_s: float = 90
) -> list[Ended]:
    """Starts a command on every rank, as torchrun would, and waits for all; a rank may end in any way.

    Raises:
        subprocess.TimeoutExpired: a rank did not end in time.
    """
    port = _free_port()
    start_s = time.monotonic()
    programs = [
        subprocess.Popen(
            command,
            env={**os.environ, **_launch_variables(rank, world_size, port), **(env or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world_size)
    ]

    def wait(program: subprocess.Popen[str]) -> Ended:
        stdout, stderr = program.communicate(timeout=timeout_s)
        return Ended(program.returncode, stdout, stderr, time.monotonic() - start_s)

    try:
        with ThreadPoolExecutor(world_size) as waiting:
            return list(waiting.map(wait, programs))
    finally:
        for program in programs:
            program.kill()


def _collect(connections: list[Connection], timeout_s: float) -> list[_Outcome]:
    outcomes: dict[Connection, _Outcome] = {}
    deadline = time.monotonic() + timeout_s
    while len(outcomes) < len(connections):
        ready = wait_for([c for c in connections if c not in outcomes], max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for connection in ready:
            assert isinstance(connection, Connection)
            outcomes[connection] = _receive(connection)
            if not outcomes[connection][0]:
                deadline = min(deadline, time.monotonic() + _GRACE_S)
    return [outcomes.get(connection, (False, "no result in time")) for connection in connections]


def _receive(connection: Connection) -> _Outcome:
    try:
        outcome: _Outcome = connection.recv()
    except (EOFError, ConnectionResetError):
        return False, "ended without a result"
    return outcome


def _serve(connection: Connection, variables: dict[str, str]) -> None:
    os.environ.update(variables)
    import torch

    import pyrannc

    torch.set_num_threads(1)
    while (message := connection.recv()) is not None:
        job, args, env = message
        with _environment(env):
            connection.send(_attempt(job, args))
    pyrannc.clear()


def _attempt(job: Callable[..., Any], args: tuple[Any, ...]) -> _Outcome:
    try:
        return True, job(*args)
    except BaseException:
        return False, traceback.format_exc()


@contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _launch_variables(rank: int, world_size: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANNC_LOG": "error",
    }


def _free_port() -> int:
    """One below those that the system gives to connections, which might take it before rank 0 listens at it.

    Each worker of pytest has some of its own.
    """
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    for turn in _turns:
        port = 10_000 + 600 * (worker % 36) + turn % 600
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("", port))
            return port
    raise AssertionError
