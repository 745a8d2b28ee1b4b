"""Ranks that hold one model after another against one process; new ones after a model that has ended or hung them."""

from __future__ import annotations

import logging
import multiprocessing
import os
import time
import traceback
import warnings
from dataclasses import asdict
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_for
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch does not say that it is public, its pages do

from .trial import LIBRARIES, Outcome

_GRACE_S = 5.0


class Workers:
    """Processes that are the ranks of a job.

    Args:
        rows: of each rank's batch.
        stages: that Plans have.
        as_they_are: models keep their dropout and batch statistics.
        gpus: each rank computes on a GPU of its own.
    """

    def __init__(self, rows: tuple[int, ...], stages: int, *, as_they_are: bool = False, gpus: bool = False) -> None:
        self._rows = rows
        self._stages = stages
        self._as_they_are = as_they_are
        # Kernels that round to TF32 differ by more than is allowed.
        self._devices = {"NVIDIA_TF32_OVERRIDE": "0"} if gpus else {"CUDA_VISIBLE_DEVICES": ""}
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["torch", *LIBRARIES, "pyrannc.module"])
        self._ranks: list[tuple[Any, Connection]] = []
        self._store: TCPStore | None = None

    def hold(self, library: str, name: str, timeout_s: float, *, is_moved: bool = False) -> Outcome:
        """What came of a model, the worst of all ranks; ``is_moved``: with its parameters moved a little."""
        if not self._ranks:
            self._start()
        for _, connection in self._ranks:
            connection.send((library, name, is_moved))
        found = self._collect(timeout_s)
        worst = sorted(found, key=lambda outcome: _BADNESS.index(outcome.column))[-1]
        if worst.column in ("wrong", "failed", "refused", "hung"):
            # Nobody knows what state such ranks are in.
            self.close()
        return worst

    def _collect(self, timeout_s: float) -> list[Outcome]:
        outcomes: list[Outcome] = []
        waiting = [connection for _, connection in self._ranks]
        end_s = time.monotonic() + timeout_s
        while waiting and (ready := wait_for(waiting, max(0.0, end_s - time.monotonic()))):
            for connection in ready:
                assert isinstance(connection, Connection)
                waiting.remove(connection)
                try:
                    outcomes.append(Outcome(**connection.recv()))
                except (EOFError, ConnectionResetError):
                    outcomes.append(Outcome("failed", "the process has ended"))
                if outcomes[-1].column == "failed":
                    end_s = min(end_s, time.monotonic() + _GRACE_S)
        if waiting and not any(outcome.column == "failed" for outcome in outcomes):
            outcomes.append(Outcome("hung", f"no result after {timeout_s:.0f} s"))
        return outcomes

    def _start(self) -> None:
        self._store = store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for rank in range(len(self._rows)):
            here, there = self._context.Pipe()
            variables = {
                "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(len(self._rows)),
                "LOCAL_WORLD_SIZE": str(len(self._rows)), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port),
                "TORCHELASTIC_USE_AGENT_STORE": "True",  # the ranks meet at this process, as at torchrun
                "RANNC_PARTITION_NUM": str(self._stages), "RANNC_PROFILE": "never", "RANNC_LOG": "error",
                "RANNC_PIPELINE_NUM": "1" if self._stages == 1 or self._as_they_are else "2",
                **self._devices,
            }  # fmt: skip
            process = self._context.Process(
                target=_serve, args=(there, variables, self._rows, self._stages, self._as_they_are), daemon=True
            )
            process.start()
            there.close()
            self._ranks.append((process, here))

    def close(self) -> None:
        """Ends the processes."""
        # All before one is waited for: those left would tell of the death of the others.
        for process, _ in self._ranks:
            process.kill()
        for process, connection in self._ranks:
            process.join()
            connection.close()
        self._ranks.clear()
        self._store = None


_BADNESS = ("cut", "in leaves", "in tail", "uncut", "chance", "no case", "refused", "failed", "hung", "wrong")


def _serve(
    connection: Connection, variables: dict[str, str], rows: tuple[int, ...], stages: int, as_they_are: bool
) -> None:
    os.environ.update(variables)
    import torch

    from .case import moved
    from .trial import cases, run

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    known = {}
    while True:
        try:
            library, name, is_moved = connection.recv()
        except EOFError:
            return
        if library not in known:
            known[library] = {case.name: case for case in cases([library])}
        try:
            case = known[library][name]
            outcome = run(moved(case) if is_moved else case, rows, stages, as_they_are=as_they_are)
        except BaseException as error:
            traceback.print_exc()
            outcome = Outcome("failed", f"{type(error).__name__}: {error}")
        connection.send(asdict(outcome))
