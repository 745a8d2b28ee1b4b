"""The watchdog over real processes: whatever happens to one rank, all end within seconds and say why."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pyrannc._native import Watchdog

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
    dog = native.Watchdog.listen(world_size, "127.0.0.1", heartbeat_s=0.05, **options)
    publish("address", dog.address)
else:
    own = {name: options[name] for name in ("silence_timeout_s", "left_timeout_s", "fail_grace_s") if name in options}
    dog = native.Watchdog.connect(wait_for("address"), rank, world_size, heartbeat_s=0.05, **own)
def hook(kind, value, traceback, print_traceback=sys.excepthook):
    print_traceback(kind, value, traceback)
    dog.fail(f"{kind.__name__}: {value}")
sys.excepthook = hook
def meet():
    publish(f"end{rank}", dog.open_exchange())
    dog.join_exchange([wait_for(f"end{other}") for other in range(world_size)])
def call(name="model(...)"):
    assert dog.begin(name, new_round=name == "model(...)")
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
call()
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
            f'RaNNC: rank 2 died while it was in model(...), at "{FORWARD}". '
            f'Rank {rank} was in model(...), at "wait for input". All ranks stop.\n'
        )
    assert time.monotonic() - start < 3


FOLLOWED = """
def replay(number):
    with open(folder / f"gpu{rank}", "r+b" if (folder / f"gpu{rank}").exists() else "wb") as gpu:
        gpu.write(number.to_bytes(4, sys.byteorder))
replay(0)
dog.follow(str(folder / f"gpu{rank}"))
dog.recorded(7, ["what comes before " + FORWARD, FORWARD])
"""


def test_killed_rank_whose_gpu_replays(job: Callable[..., Job]) -> None:
    running = job(f"{FOLLOWED}replay(7 + rank){STEP}", world_size=2)
    for rank in range(2):
        running.wait_for(f"step{rank}")
    os.kill(running.ranks[1].pid, signal.SIGKILL)
    status, _, stderr = running.ends(0)
    assert status == Watchdog.EXIT_STATUS
    assert stderr == (
        f'RaNNC: rank 1 died while it was in model(...), at "wait for input", its GPU at "{FORWARD}". '
        f'Rank 0 was in model(...), at "wait for input", its GPU at "what comes before {FORWARD}". All ranks stop.\n'
    )


def test_killed_rank_0(job: Callable[..., Job]) -> None:
    running = job(STEP)
    for rank in range(3):
        running.wait_for(f"step{rank}")
    os.kill(running.ranks[0].pid, signal.SIGKILL)
    for rank, place in ((1, "wait for input"), (2, FORWARD)):
        status, _, stderr = running.ends(rank)
        assert status == Watchdog.EXIT_STATUS
        assert stderr == (
            'RaNNC: rank 0 died while it was in model(...), at "wait for input". '
            f'Rank {rank} was in model(...), at "{place}". All ranks stop.\n'
        )


def test_frozen_rank(job: Callable[..., Job]) -> None:
    running = job(STEP, world_size=2, silence_timeout_s=1)
    running.wait_for("step1")
    os.kill(running.ranks[1].pid, signal.SIGSTOP)
    status, _, stderr = running.ends(0)
    assert status == Watchdog.EXIT_STATUS
    assert 'rank 1 has not been heard of for 1 s (silence_timeout_s); it was last in model(...), at "wait' in stderr


@pytest.mark.parametrize("culprit", [0, 1])
def test_exception(job: Callable[..., Job], culprit: int) -> None:
    running = job(
        f"""
call()
dog.enter(1)
time.sleep(0.2)
if rank == {culprit}:
    dog.idle(failed=True)
    dog.end(failed=True)
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
            cause = f'rank {culprit} failed in model(...), at "{FORWARD}": ValueError: expected 3 rows'
            assert stderr == f'RaNNC: {cause}. Rank {rank} was in model(...), at "{FORWARD}". All ranks stop.\n'


def test_exceptions_that_a_death_causes_do_not_hide_it(job: Callable[..., Job]) -> None:
    running = job(
        """
call()
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
        assert f'RaNNC: rank 2 died while it was in model(...), at "wait for input". Rank {rank} was' in stderr
        assert status == Watchdog.EXIT_STATUS


def test_interpreter_that_hangs_after_an_exception(job: Callable[..., Job]) -> None:
    running = job("import atexit; atexit.register(time.sleep, 60); raise ValueError('x')", 1, fail_grace_s=0.2)
    status, _, stderr = running.ends(0)
    assert status == Watchdog.EXIT_STATUS
    assert "ValueError: x" in stderr


def test_clean_end(job: Callable[..., Job]) -> None:
    running = job(
        "call(); dog.enter(1); dog.idle(); dog.end(); time.sleep(0.2 * rank); dog.close(); time.sleep(1)",
        left_timeout_s=0.2,
    )
    assert [running.ends(rank) for rank in range(3)] == [(0, "", "")] * 3


@pytest.mark.parametrize("leaver", [0, 1])
def test_left_early(job: Callable[..., Job], leaver: int) -> None:
    running = job(
        f"""
call()
dog.enter(0)
dog.end()
if rank == {leaver}:
    dog.close()
    sys.exit()
call()
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
    cause = f'rank {leaver} has left (its script ended) while rank {waiter} waits in model(...), at "{FORWARD}"'
    assert stderr.startswith(f"RaNNC: {cause}. ")


def test_a_rank_that_works_on_may_outlive_the_others(job: Callable[..., Job]) -> None:
    running = job(
        """
call()
if rank == 1:
    time.sleep(0.5)
dog.end()
dog.close()
""",
        world_size=2,
        left_timeout_s=0.3,
    )
    assert [running.ends(rank) for rank in range(2)] == [(0, "", "")] * 2


def test_stall_names_every_rank(job: Callable[..., Job]) -> None:
    running = job("if rank != 1:\n    call()\n    dog.enter(rank // 2)\ntime.sleep(60)", stall_timeout_s=0.5)
    for rank in range(3):
        status, _, stderr = running.ends(rank)
        assert status == Watchdog.EXIT_STATUS
        assert "rank 0 has made no progress for 0.5 s (stall_timeout_s): " in stderr
        assert 'rank 0 is in model(...), at "wait for input", rank 1 is outside of any collective call, ' in stderr
        assert f'rank 2 is in model(...), at "{FORWARD}"' in stderr


def test_long_pauses_between_steps_are_no_stall(job: Callable[..., Job]) -> None:
    running = job("call(); dog.enter(0); dog.end(); time.sleep(0.8); dog.close()", stall_timeout_s=0.2)
    assert [running.ends(rank)[0] for rank in range(3)] == [0, 0, 0]


def test_buffered_output_is_saved(job: Callable[..., Job]) -> None:
    running = job("print('epoch 1')\ncall()\ntime.sleep(60)", 1, stall_timeout_s=0.3)
    assert running.ends(0)[1] == "epoch 1\n"


def test_a_forked_child_does_not_speak_for_its_parent(job: Callable[..., Job]) -> None:
    running = job(
        """
call()
if os.fork() == 0:
    dog.close()
    dog.fail("the child's own affair")
    os._exit(0)
os.wait()
for _ in range(20):
    dog.enter(1)
    time.sleep(0.05)
dog.end()
publish(f"done{rank}")
for other in range(2):
    wait_for(f"done{other}")
dog.close()
""",
        world_size=2,
        left_timeout_s=0.01,
    )
    assert [running.ends(rank) for rank in range(2)] == [(0, "", "")] * 2


def test_a_file_that_cannot_be_followed(tmp_path: Path) -> None:
    dog = Watchdog.listen(1, "127.0.0.1")
    with pytest.raises(FileNotFoundError):
        dog.follow(str(tmp_path / "none"))
    dog.close()


def test_announcements_are_cheap() -> None:
    dog = Watchdog.listen(1, "127.0.0.1")
    dog.program(["a"])
    start = time.perf_counter()
    for _ in range(100_000):
        dog.begin("model(...)", new_round=True)
        dog.enter(0)
        dog.idle()
        dog.end()
    assert (time.perf_counter() - start) / 100_000 < 1e-5
    dog.close()


DIFFERENT = {
    "two calls": (
        ["call(); dog.end(); call('state_dict()')", "call(); dog.end(); call()", "call(); dog.end(); call()"],
        "rank 0 waits in state_dict(), ranks 1-2 in model(...): both must be called by all ranks, in the same order",
    ),
    "three calls": (
        ["call('a()')", "call('b()')", "call('c()')"],
        "rank 0 waits in a(), rank 1 in b(), rank 2 in c(): each must be called by all ranks, in the same order",
    ),
    "one call, more often on one rank": (
        ["call(); dog.end(); call(); dog.end(); call()", "call()", "call()"],
        "rank 0 waits in model(...) (round 3), ranks 1-2 in model(...) (round 1): it must be called by all ranks, "
        "as often on each",
    ),
    "another call before": (
        ["call('a()')", "call('b()'); dog.end(); call('a()')", "call('a()')"],
        "ranks 0-2 wait in a(), but have not made the same calls before: all calls must be made by all ranks, in the "
        "same order",
    ),
}


@pytest.mark.parametrize("case", DIFFERENT)
def test_different_calls(job: Callable[..., Job], case: str) -> None:
    bodies, cause = DIFFERENT[case]
    running = job(f"exec({bodies!r}[rank]); time.sleep(60)", different_calls_timeout_s=0.5)
    for rank in range(3):
        status, _, stderr = running.ends(rank)
        assert status == Watchdog.EXIT_STATUS
        assert stderr.startswith(f"RaNNC: {cause}. Rank {rank} was in ")


@pytest.mark.parametrize(
    ("then", "state"), [("call('undeploy()')", "in undeploy()"), ("", "outside of any collective call")]
)
def test_a_call_that_has_failed_on_one_rank(job: Callable[..., Job], then: str, state: str) -> None:
    """Its script has caught the exception, and others wait for it."""
    fails = f"dog.end(failed=True); {then}"
    body = f"call(); dog.program(['', FORWARD]); dog.enter(1)\nif rank == 0:\n    {fails}\ntime.sleep(60)"
    running = job(body, different_calls_timeout_s=0.5)
    for rank in range(3):
        status, _, stderr = running.ends(rank)
        assert status == Watchdog.EXIT_STATUS
        assert stderr.startswith(f"RaNNC: model(...) has failed on rank 0, which is {state} now, while rank ")
        assert "a script may catch an exception that all ranks get, but one of a rank alone has to end it" in stderr


def test_ranks_that_are_apart_but_right_go_on(job: Callable[..., Job]) -> None:
    """One is calls ahead, one still searches, and one has failed in a call that it made alone."""
    running = job(
        """
if rank == 0:
    call("get_param(typo)"); dog.end(failed=True)
call(); dog.end()
if rank == 1:
    call("clip_grad_norm(...)"); dog.end()
    call("state_dict()")
if rank == 2:
    call("clip_grad_norm(...)")
    dog.phase("the search for a Plan", busy=True)
if rank == 0:
    call("clip_grad_norm(...)")
time.sleep(1.5)
dog.end()
dog.close()
""",
        different_calls_timeout_s=0.3,
        stall_timeout_s=0.6,
    )
    assert [running.ends(rank) for rank in range(3)] == [(0, "", "")] * 3


def test_progress_inside_a_phase_is_no_stall(job: Callable[..., Job]) -> None:
    body = "call()\nfor _ in range(15):\n    dog.advance()\n    time.sleep(0.1)\ndog.end()\ndog.close()"
    running = job(body, world_size=2, stall_timeout_s=0.7)
    assert [running.ends(rank) for rank in range(2)] == [(0, "", "")] * 2


def test_a_gpu_that_comes_to_other_places_is_no_stall(job: Callable[..., Job]) -> None:
    body = "call()\nfor place in range(15):\n    replay(7 + place % 2)\n    time.sleep(0.1)\ndog.end()\ndog.close()"
    running = job(f"{FOLLOWED}{body}", world_size=2, stall_timeout_s=0.7)
    assert [running.ends(rank) for rank in range(2)] == [(0, "", "")] * 2


def test_late_ranks_are_named_once(job: Callable[..., Job]) -> None:
    running = job(
        """
for _ in range(2):
    if rank == 2:
        time.sleep(0.8)
    call()
    publish(f"in{_}{rank}")
    for other in range(3):
        wait_for(f"in{_}{other}")
    dog.end()
dog.close()
""",
        late_notice_s=0.3,
    )
    ends = [running.ends(rank) for rank in range(3)]
    line = (
        "RaNNC: rank 2 has not come to model(...) for 0.3 s; ranks 0-1 wait there. It must be called by all ranks; "
        "without progress the job ends after 600 s (stall_timeout_s)\n"
    )
    assert ends == [(0, "", 2 * line), (0, "", ""), (0, "", "")]


HANDS_OUT = """
def fail():
    raise RuntimeError("Connection closed by peer")
def ask(collective=fail):
    try:
        collective()
    except (RuntimeError, ConnectionError) as error:
        start = time.monotonic()
        cause = dog.explain(3)
        dog.end(failed=True)
        if cause is not None:
            raise RuntimeError("explained: " + cause) from error
        print(f"{time.monotonic() - start:.0f} s", flush=True)
"""


def test_a_death_comes_out_of_the_call(job: Callable[..., Job]) -> None:
    running = job(
        f"""{HANDS_OUT}
call()
time.sleep(0.2)
if rank == 2:
    os.kill(os.getpid(), signal.SIGKILL)
ask()
"""
    )
    for rank in (0, 1):
        status, _, stderr = running.ends(rank)
        assert stderr.endswith("RuntimeError: explained: rank 2 died while it was in model(...)\n")
        assert status == Watchdog.EXIT_STATUS


@pytest.mark.parametrize("leaver", [0, 1])
def test_a_leave_comes_out_of_the_call(job: Callable[..., Job], leaver: int) -> None:
    running = job(f"{HANDS_OUT}\nif rank == {leaver}:\n    dog.close()\n    sys.exit()\ncall()\nask()", world_size=2)
    assert running.ends(leaver) == (0, "", "")
    _, _, stderr = running.ends(1 - leaver)
    cause = f"rank {leaver} has left (its script ended) while rank {1 - leaver} waits in model(...)"
    assert stderr.endswith(f"RuntimeError: explained: {cause}\n")


def test_an_error_of_its_own_has_no_explanation(job: Callable[..., Job]) -> None:
    together = """
mark = pathlib.Path(__file__).with_name
mark(f"asked.{rank}").touch()
while not mark(f"asked.{1 - rank}").exists():
    time.sleep(0.05)
dog.close()
"""
    running = job(f"import pathlib\n{HANDS_OUT}\ncall()\nask()\n{together}", world_size=2)
    assert [running.ends(rank) for rank in range(2)] == [(0, "3 s\n", "")] * 2


def test_a_script_that_goes_on_after_the_end_was_decided_is_ended(job: Callable[..., Job]) -> None:
    running = job(
        f"""{HANDS_OUT}
call()
time.sleep(0.2)
if rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    ask()
except RuntimeError:
    time.sleep(60)
""",
        world_size=2,
        fail_grace_s=0.5,
    )
    status, _, stderr = running.ends(0)
    assert status == Watchdog.EXIT_STATUS
    assert stderr.startswith("RaNNC: rank 1 died while it was in model(...). Rank 0 was ")


def test_texts_of_all_ranks(job: Callable[..., Job]) -> None:
    running = job(
        """
meet()
call()
for turn in range(200):
    texts = [str(turn).encode() * other for other in range(world_size)]
    assert dog.gather(turn % 3, texts[rank]) == texts
long = [bytes([other]) * (1 << 22) for other in range(world_size)]
assert dog.gather(0, long[rank]) == long
if os.fork() == 0:
    try:
        dog.gather(0, b"the child's")
    except ConnectionError:
        os._exit(0)
assert os.wait()[1] == 0
assert dog.gather(0, b"") == [b""] * world_size
dog.end()
dog.close()
try:
    dog.gather(0, b"")
except ConnectionError:
    print("closed")
"""
    )
    assert [running.ends(rank) for rank in range(3)] == [(0, "closed\n", "")] * 3


GATHER = "ask(lambda: dog.gather(0, b'text'))"
LOST = {
    "died": (
        f"if rank == 2: os.kill(os.getpid(), signal.SIGKILL)\n{GATHER}",
        {},
        "rank 2 died while it was in model(...)",
    ),
    "frozen": (
        f"if rank == 2: os.kill(os.getpid(), signal.SIGSTOP)\n{GATHER}",
        {"silence_timeout_s": 0.7},
        "rank 2 has not been heard of for 0.7 s (silence_timeout_s); it was last in model(...)",
    ),
    "stalls": (
        f"if rank == 2: dog.end(); time.sleep(60)\n{GATHER}",
        {"stall_timeout_s": 0.7},
        "rank 0 has made no progress for 0.7 s (stall_timeout_s): rank 0 is in model(...), rank 1 is in model(...), "
        "rank 2 is outside of any collective call",
    ),
    "in another call": (
        f"dog.end(); call('state_dict()' if rank == 2 else 'report()')\n{GATHER}",
        {"different_calls_timeout_s": 0.7},
        "ranks 0-1 wait in report(), rank 2 in state_dict(): both must be called by all ranks, in the same order",
    ),
}


@pytest.mark.parametrize("case", LOST)
def test_who_is_lost_in_a_gather_is_named_by_the_call(job: Callable[..., Job], case: str) -> None:
    body, limits, cause = LOST[case]
    running = job(f"{HANDS_OUT}\nmeet()\ncall()\ntime.sleep(0.2)\n{body}", **limits)
    for rank in (0, 1):
        status, _, stderr = running.ends(rank)
        assert stderr.endswith(f"RuntimeError: explained: {cause}\n"), stderr
        assert status == Watchdog.EXIT_STATUS


def test_a_leave_comes_out_of_a_gather(job: Callable[..., Job]) -> None:
    leave = "if rank == 1:\n    dog.close()\n    sys.exit()"
    running = job(f"{HANDS_OUT}\nmeet()\n{leave}\ncall()\n{GATHER}", world_size=2)
    assert running.ends(1) == (0, "", "")
    _, _, stderr = running.ends(0)
    cause = "rank 1 has left (its script ended) while rank 0 waits in model(...)"
    assert stderr.endswith(f"RuntimeError: explained: {cause}\n")
