"""Runs programs under torchrun, side by side on disjoint devices, each within a time limit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

_POLL_S = 0.2
_GRACE_S = 20.0
"""How long torchrun may take to end its ranks."""

_TOLD_CHARACTERS = 1500
_HERE = Path(__file__).parent


@dataclass(frozen=True)
class Job:
    """A program for some ranks that prints lines of JSON.

    Attributes:
        name: says what the job is.
        ranks: how many, each on a device of its own.
        script: a script of this folder, and its arguments.
        environment: variables for it, besides those of this process.
    """

    name: str
    ranks: int
    script: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Done:
    """What has become of a job.

    Attributes:
        results: the JSON that it printed, line by line.
        failure: why it ended before its time, in one line; empty if it did not.
        told: the end of what it wrote to stderr.
    """

    job: Job
    seconds: float
    results: list[dict[str, Any]]
    failure: str = ""
    told: str = ""


@dataclass
class _Running:
    job: Job
    devices: list[int]
    process: subprocess.Popen[str]
    stdout: IO[str]
    stderr: IO[str]
    started_s: float


def run_jobs(
    jobs: Sequence[Job], devices: int, timeout_s: float, deadline_s: float, tell: Callable[[Done], None]
) -> list[Done]:
    """Runs the jobs, those of most ranks first, and returns what became of them in the order of their ends.

    Args:
        devices: how many this machine has.
        timeout_s: of one job.
        deadline_s: from now on; what has not ended then is stopped or never started.
        tell: called at once with every job that has ended.
    """
    waiting = sorted(jobs, key=lambda job: -job.ranks)
    deadline = time.monotonic() + deadline_s
    free = list(range(devices))
    running: list[_Running] = []
    done: list[Done] = []

    def note(ended: Done) -> None:
        done.append(ended)
        tell(ended)

    while waiting or running:
        late = time.monotonic() > deadline
        for item in [item for item in running if late or _has_ended(item, timeout_s)]:
            running.remove(item)
            free += item.devices
            note(_end(item))
        for job in [job for job in waiting if late or job.ranks > devices]:
            waiting.remove(job)
            note(Done(job, 0.0, [], "no time was left" if late else f"needs {job.ranks} devices"))
        for job in list(waiting):
            if job.ranks <= len(free):
                waiting.remove(job)
                running.append(_start(job, [free.pop(0) for _ in range(job.ranks)]))
        time.sleep(_POLL_S)
    return done


def _start(job: Job, devices: list[int]) -> _Running:
    script, *arguments = job.script
    stdout = tempfile.TemporaryFile("w+")  # noqa: SIM115  # read and closed when the job has ended
    stderr = tempfile.TemporaryFile("w+")  # noqa: SIM115  # likewise
    visible = {"CUDA_VISIBLE_DEVICES": ",".join(_names(devices))}
    process = subprocess.Popen(
        [*launcher(job.ranks), str(_HERE / script), *arguments],
        env={"OMP_NUM_THREADS": "4", **os.environ, **visible, **job.environment},
        stdout=stdout,
        stderr=stderr,
        text=True,
    )
    return _Running(job, devices, process, stdout, stderr, time.monotonic())


def _names(devices: Sequence[int]) -> list[str]:
    """What they are called by those who start this script, where it is shown some of the machine's alone."""
    shown = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return [shown[device] for device in devices] if shown else list(map(str, devices))


def launcher(ranks: int) -> list[str]:
    """The command that starts a script on so many ranks."""
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]


def _has_ended(item: _Running, timeout_s: float) -> bool:
    return item.process.poll() is not None or time.monotonic() - item.started_s > timeout_s


def _end(item: _Running) -> Done:
    """Stops a job that still runs, and reads what it wrote."""
    seconds = time.monotonic() - item.started_s
    stopped = item.process.poll() is None
    if stopped:
        item.process.terminate()
        try:
            item.process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            item.process.kill()
            item.process.wait()
    lines, told = _read(item.stdout).splitlines(), _read(item.stderr)
    results = [json.loads(line) for line in lines if line.startswith("{")]
    if item.process.returncode == 0:
        return Done(item.job, seconds, results)
    failure = f"stopped after {seconds:.0f} s" if stopped else _cause(told)
    return Done(item.job, seconds, results, failure, told[-_TOLD_CHARACTERS:])


def _read(file: IO[str]) -> str:
    file.seek(0)
    with file:
        return file.read()


def _cause(told: str) -> str:
    """The line that names the first error."""
    errors = [line for line in told.splitlines() if "Error: " in line and "ChildFailedError" not in line]
    return errors[0].partition("Error: ")[2] if errors else "failed without a message"
