"""What becomes of the steps of each rank: replayed or not and why, what they launch, and what the host needs for them.

    RANNC_CUDA_GRAPHS=auto torchrun --nproc-per-node 2 benches/replays.py rannc-stages \
        '{"model": "bert", "sizes": [12, 1600, 512], "rows": 32}'

Every rank prints a line for each of the first steps, what an attempt to record has raised, which Spans were compiled
anew and what for, and then what some later steps come to: time alone, and what a profiler sees of two.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from compete_cell import limit, own_batch, task_of
from competitors import SHARES_ROWS, SYSTEMS
from traces import kernels_us, pauses_us, traced

from pyrannc.blocks.compiler import Compiler
from pyrannc.blocks.form import Form
from pyrannc.job import process
from pyrannc.runtime.recording import Recordings

FIRST, TIMED = 8, 10


def say(*words: object) -> None:
    """A line of this rank."""
    print(f"rank {dist.get_rank()}:", *words, file=sys.stderr, flush=True)


def telling_run(run: Callable[..., Any], last: list[str]) -> Callable[..., Any]:
    """``Recordings.run``, that notes what carries a call out."""

    def told(self: Recordings, *args: Any) -> Any:
        found = run(self, *args)
        last[:] = [type(found).__name__, str(self), *(_of_known(known) for known in self._known.values())]
        last.append(f"free rooms {[room.is_free for room in self._rooms]}, {self._bytes / 2**30:.1f} GiB in pool")
        return found

    return told


def _of_known(known: Any) -> str:
    return (
        f"watched {known.watched}, waited {known.waited}, recorded {known.recorded}, failures {known.failures}, "
        f"rooms {sorted(known.recordings)}"
    )


def telling_record(record: Callable[..., None]) -> Callable[..., None]:
    """``Recordings._record``, that tells what it raises."""

    def told(*args: Any) -> None:
        start = time.perf_counter()
        try:
            record(*args)
        except Exception:
            say("recording failed\n", traceback.format_exc())
            raise
        say(f"recorded in {time.perf_counter() - start:.1f} s")

    return told


def telling_better(better: Callable[..., Any]) -> Callable[..., Any]:
    """``Compiler.better``, that tells what Spans are compiled anew for."""

    def told(self: Compiler, code: Any) -> Any:
        for span in code.spans:
            for key, fitted in span.fitted.items():
                form = span.better_form(key)
                if form is not None:
                    say(f"Ops {span.part.ops[0]} to {span.part.ops[-1]}", _of_forms(fitted.code.form, form))
        found = better(self, code)
        say(f"{len(found)} of {len(code.spans)} Spans are compiled anew")
        return found

    return told


def _of_forms(before: Form, form: Form) -> str:
    pairs = zip(before.takes, form.takes, strict=True)
    differ = [(place, *pair) for place, pair in enumerate(pairs) if pair[0] != pair[1]]
    return f"are compiled anew: takes {differ[:2]} wanted {before.wanted} {form.wanted}"


def main(last: list[str]) -> None:
    system, text = sys.argv[1:]
    task = task_of(json.loads(text))
    torch.set_float32_matmul_precision("high")
    device = process.ensure_process_group().device
    limit(task, device)
    made, batch = SYSTEMS[system](task, device), own_batch(task, device, 0, SHARES_ROWS[system])
    for number in range(1, FIRST + 1):
        start = time.perf_counter()
        made.step(batch)
        host_s = time.perf_counter() - start
        say(f"step {number}: {host_s * 1e3:.0f} ms on the host;", "; ".join(last))
    say(f"stream {torch.cuda.current_stream(device) if device.type == 'cuda' else None}; {made.plan}")
    tell_times(lambda: made.step(batch), device)
    tell_launches(lambda: made.step(batch), device)
    dist.barrier()


def tell_times(step: Callable[[], object], device: torch.device) -> None:
    """A step's time, and how much of it the host is busy: as much as the whole where it holds the device up."""
    on_device = device.type == "cuda"
    if on_device:
        torch.cuda.synchronize(device)
    dist.barrier()
    start, host_s = time.perf_counter(), time.thread_time()
    for _ in range(TIMED):
        step()
    host_s, enqueued_s = time.thread_time() - host_s, time.perf_counter() - start
    if on_device:
        torch.cuda.synchronize(device)
    whole = (time.perf_counter() - start) / TIMED
    say(
        f"a step takes {whole * 1e3:.1f} ms; its calls return after {enqueued_s / TIMED * 1e3:.1f} ms, and the thread "
        f"computes for {host_s / TIMED * 1e3:.1f} ms"
    )


def tell_launches(step: Callable[[], object], device: torch.device) -> None:
    """What two steps launch, how long kernels compute, and how long those of NCCL are there."""
    events = traced(step, 2, device)
    calls = Counter(event["name"] for event in events if event.get("cat") in ("cuda_runtime", "cuda_driver"))
    say("calls of CUDA in two steps:", dict(calls.most_common(8)))
    span_us, pauses = pauses_us(events, but="nccl")
    kernels = [event for event in events if event.get("cat") == "kernel"]
    own_us = kernels_us(events)
    nccls_us = sum(event["dur"] for event in kernels) - own_us
    say(
        f"two steps, {span_us / 1e3:.1f} ms: {len(kernels)} kernels, which compute for {own_us / 1e3:.1f} ms, "
        f"NCCL's are there for {nccls_us / 1e3:.1f} ms, pauses {sum(pauses) / 1e3:.1f} ms"
    )


def tell() -> None:
    """All of it. What is noted is no global of this script: a capture would be taken to rest on that."""
    last: list[str] = []
    with (
        patch.object(Recordings, "run", telling_run(Recordings.run, last)),
        patch.object(Recordings, "_record", telling_record(Recordings._record)),
        patch.object(Compiler, "better", telling_better(Compiler.better)),
    ):
        main(last)


if __name__ == "__main__":
    tell()
