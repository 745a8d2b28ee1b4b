"""The watchdog over real processes: whatever happens to one rank, all end within seconds and say why."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pyrannc._native import Watchdog
from pyrannc.errors import PeerError

FORWARD = "forward of microbatch 3, Stage 1 (bert.encoder.layer.4-7)"

# Loads the extension by its path, so that no script waits for torch. All ranks are connected when the body begins.
PRELUDE = """
import importlib.machinery, importlib.util, os, pathlib, signal, sys, time
native_path, folder, rank, world_size, options = sys.argv[1], pathlib.Path(sys.argv[2]), *map(eval, sys.argv[3:6])
loader = importlib.machinery.ExtensionFileLoader("pyrannc._native", native_path)
native = importlib.util.module_from_spec(importlib.util.spec_from_loader(loader.name, loader))
loader.exec_module(native)
def wait_for(name):
    while not (folder / name).exists():
        time.sleep(0.01)
    return (folder / name).read_text()
def publish(name, text=""):
    (folder / (name + ".new")).write_text(text)
    (folder / (name + ".new")).rename(folder / name)
if rank == 0:
    dog = native.Watchdog.listen(world_size, "127.0.0.1", bind="127.0.0.1", heartbeat_s=0.05, **options)
    publish("address", dog.address)
else:
    dog = native.Watchdog.connect(wait_for("address"), rank, world_size, heartbeat_s=0.05, **options)
def hook(kind, value, traceback, print_traceback=sys.excepthook):
    print_traceback(kind, value, traceback)
    dog.fail(f"{kind.__name__}: {value}")
sys.excepthook = hook
publish(f"ready{rank}")
for other in range(world_size):
    wait_for(f"ready{other}")
dog.program(["wait for input", FORWARD])
"""


class Job:
    """Ranks that run a body after the prelude."""

    def __init__(self, folder: Path, body: str, world_size: int = 3, **options: float) -> None:
        import pyrannc._native as native

        assert native.__file__ is not None
        script = folder / "script.py"
        script.write_text(f"FORWARD = {FORWARD!r}\n{PRELUDE}{body}")
        self.folder = folder
        self.ranks = [
            subprocess.Popen(
                [sys.executable, str(script), native.__file__, str(folder), str(rank), str(world_size), repr(options)],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(world_size)
        ]

    def wait_for(self, name: str) -> None:
        deadline = time.monotonic() + 20
        while not (self.folder / name).exists():
            assert time.monotonic() < deadline, f"{name} was not published"
            time.sleep(0.01)

    def ends(self, rank: int, within_s: float = 10) -> tuple[int, str, str]:
        stdout, stderr = self.ranks[rank].communicate(timeout=within_s)
        return self.ranks[rank].returncode, stdout, stderr

    def close(self) -> None:
        for process in self.ranks:
            process.kill()
            process.communicate()


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    jobs: list[Job] = []

    def start(body: str, world_size: int = 3, **options: float) -> Job:
        jobs.append(Job(tmp_path, body, world_size, **options))
        return jobs[-1]

    yield start
    for started in jobs:
        started.close()


STEP = """
dog.enter(1 if rank == 2 else 0)
time.sleep(0.3)
publish(f"step{rank}")
time.sleep(60)
"""


def test_killed_rank(job: Callable[..., Job]) -> None:
    running = job(STEP)
    for rank in range(3):
        running.wait_for(f"step{rank}")
    start = time.monotonic()
    os.kill(running.ranks[2].pid, signal.SIGKILL)
    for rank in (0, 1):
        status, _, stderr = running.ends(rank)
        assert status == Watchdog.EXIT_STATUS
        assert stderr == (
            f'RaNNC: rank 2 died during "{FORWARD}". Rank {rank} was at "wait for input". All ranks stop.\n'
        )
    assert time.monotonic() - start < 3


def test_killed_rank_0(job: Callable[..., Job]) -> None:
    running = job(STEP)
    for rank in range(3):
        running.wait_for(f"step{rank}")
    os.kill(running.ranks[0].pid, signal.SIGKILL)
    for rank, place in ((1, "wait for input"), (2, FORWARD)):
        status, _, stderr = running.ends(rank)
        assert status == Watchdog.EXIT_STATUS
        assert stderr == f'RaNNC: rank 0 died during "wait for input". Rank {rank} was at "{place}". All ranks stop.\n'


def test_frozen_rank(job: Callable[..., Job]) -> None:
    running = job(STEP, world_size=2, silence_s=1)
    running.wait_for("step1")
    os.kill(running.ranks[1].pid, signal.SIGSTOP)
    status, _, stderr = running.ends(0)
    assert status == Watchdog.EXIT_STATUS
    assert 'rank 1 has not been heard of for 1 s, last during "wait for input"' in stderr


@pytest.mark.parametrize("culprit", [0, 1])
def test_exception(job: Callable[..., Job], culprit: int) -> None:
    running = job(
        f"""
dog.enter(1)
time.sleep(0.2)
if rank == {culprit}:
    raise ValueError("expected 3 rows.")
time.sleep(60)
""",
        fail_grace_s=0.3,
    )
    for rank in range(3):
        status, _, stderr = running.ends(rank)
        if rank == culprit:
            assert status == 1
            assert "Traceback" in stderr
            assert "RaNNC" not in stderr
        else:
            assert status == Watchdog.EXIT_STATUS
            cause = f'rank {culprit} failed during "{FORWARD}": ValueError: expected 3 rows'
            assert stderr == f'RaNNC: {cause}. Rank {rank} was at "{FORWARD}". All ranks stop.\n'


def test_exceptions_that_a_death_causes_do_not_hide_it(job: Callable[..., Job]) -> None:
    running = job(
        """
dog.enter(0)
if rank == 2:
    time.sleep(0.3)
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(0.25)
raise ConnectionError("connection closed by peer")
"""
    )
    for rank in (0, 1):
        status, _, stderr = running.ends(rank)
        assert "ConnectionError" in stderr
        assert f'RaNNC: rank 2 died during "wait for input". Rank {rank} was' in stderr
        assert status == Watchdog.EXIT_STATUS


def test_interpreter_that_hangs_after_an_exception(job: Callable[..., Job]) -> None:
    running = job("import atexit; atexit.register(time.sleep, 60); raise ValueError('x')", 1, fail_grace_s=0.2)
    status, _, stderr = running.ends(0)
    assert status == Watchdog.EXIT_STATUS
    assert "ValueError: x" in stderr


def test_clean_end(job: Callable[..., Job]) -> None:
    running = job(
        "dog.enter(0); dog.enter(1); dog.idle(); time.sleep(0.2 * rank); dog.close(); time.sleep(1)", left_timeout_s=0.2
    )
    assert [running.ends(rank) for rank in range(3)] == [(0, "", "")] * 3


@pytest.mark.parametrize("leaver", [0, 1])
def test_left_early(job: Callable[..., Job], leaver: int) -> None:
    running = job(
        f"""
dog.enter(0)
if rank == {leaver}:
    dog.idle()
    dog.close()
    sys.exit()
dog.enter(1)
time.sleep(60)
""",
        world_size=2,
        left_timeout_s=0.5,
    )
    waiter = 1 - leaver
    assert running.ends(leaver) == (0, "", "")
    status, _, stderr = running.ends(waiter)
    assert status == Watchdog.EXIT_STATUS
    assert f'rank {leaver} has left (its script ended) while rank {waiter} waits in "{FORWARD}"' in stderr


def test_a_rank_that_works_on_may_outlive_the_others(job: Callable[..., Job]) -> None:
    running = job(
        """
if rank == 1:
    for _ in range(20):
        dog.enter(0)
        time.sleep(0.05)
    dog.idle()
    time.sleep(0.5)
dog.close()
""",
        world_size=2,
        left_timeout_s=0.3,
    )
    assert [running.ends(rank) for rank in range(2)] == [(0, "", "")] * 2


def test_stall_names_every_rank(job: Callable[..., Job]) -> None:
    running = job("if rank != 1: dog.enter(rank // 2)\ntime.sleep(60)", stall_timeout_s=0.5)
    for rank in range(3):
        status, _, stderr = running.ends(rank)
        assert status == Watchdog.EXIT_STATUS
        assert "has made no progress for 0.5 s: " in stderr
        places = f'rank 0 is at "wait for input", rank 1 is outside a step, rank 2 is at "{FORWARD}"'
        assert places in stderr


def test_long_pauses_between_steps_are_no_stall(job: Callable[..., Job]) -> None:
    running = job("dog.enter(0); dog.idle(); time.sleep(0.8); dog.close()", stall_timeout_s=0.2)
    assert [running.ends(rank)[0] for rank in range(3)] == [0, 0, 0]


def test_buffered_output_is_saved(job: Callable[..., Job]) -> None:
    running = job("print('epoch 1')\ndog.enter(0)\ntime.sleep(60)", 1, stall_timeout_s=0.3)
    assert running.ends(0)[1] == "epoch 1\n"


def test_a_forked_child_does_not_speak_for_its_parent(job: Callable[..., Job]) -> None:
    running = job(
        """
dog.enter(0)
if os.fork() == 0:
    dog.close()
    dog.fail("the child's own affair")
    os._exit(0)
os.wait()
for _ in range(20):
    dog.enter(1)
    time.sleep(0.05)
dog.idle()
publish(f"done{rank}")
for other in range(2):
    wait_for(f"done{other}")
dog.close()
""",
        world_size=2,
        left_timeout_s=0.01,
    )
    assert [running.ends(rank) for rank in range(2)] == [(0, "", "")] * 2


def test_strangers_are_ignored() -> None:
    dog = Watchdog.listen(2, "127.0.0.1", bind="127.0.0.1", heartbeat_s=0.05)
    port = int(dog.address.partition("/")[0].rpartition(":")[2])
    for line in (b"", b"GET / HTTP/1.1\r\n\r\n", b'{"hello":{"token":"","rank":1,"world_size":2}}\n'):
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(line)
    peer = Watchdog.connect(dog.address, 1, 2)
    peer.close()
    dog.close()


def test_errors_of_connect() -> None:
    dog = Watchdog.listen(2, "127.0.0.1", bind="127.0.0.1")
    with pytest.raises(PeerError, match="refused rank 1: it counts 3 ranks, rank 0 counts 2"):
        Watchdog.connect(dog.address, 1, 3)
    Watchdog.connect(dog.address, 1, 2).close()
    with pytest.raises(PeerError, match="there is a rank 1 already"):
        Watchdog.connect(dog.address, 1, 2)
    with pytest.raises(PeerError, match="is not the address of a watchdog"):
        Watchdog.connect("127.0.0.1", 1, 2)
    with pytest.raises(PeerError, match=r"cannot reach rank 0 at 127\.0\.0\.1:9/x: Connection refused"):
        Watchdog.connect("127.0.0.1:9/x", 1, 2, connect_timeout_s=0.1)
    with pytest.raises(ValueError, match="heartbeat_s must be a positive number of seconds, not 0"):
        Watchdog.listen(2, "127.0.0.1", heartbeat_s=0)
    with pytest.raises(ValueError, match=r"rank must be in 1\.\.2, not 2"):
        Watchdog.connect(dog.address, 2, 2)
    dog.close()


def test_enter_is_cheap() -> None:
    dog = Watchdog.listen(1, "127.0.0.1", bind="127.0.0.1")
    dog.program(["a"])
    start = time.perf_counter()
    for _ in range(100_000):
        dog.enter(0)
    assert (time.perf_counter() - start) / 100_000 < 5e-6
    dog.close()
