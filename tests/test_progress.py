"""What is shown while a model is profiled."""

from __future__ import annotations

import logging
import os
import pty
import subprocess
import sys

import pytest
import torch
from torch import Tensor, nn

from pyrannc.capture import capture
from pyrannc.capture.nodes.progress import progress_told
from pyrannc.job import progress

SCRIPT = """
import time
from pyrannc.job.progress import Bar
with Bar("profiling blocks", 8.0, 4, shown=True) as bar:
    for _ in range(4):
        time.sleep(0.7)
        bar.advance(2.0)
"""


def test_a_bar_on_a_terminal() -> None:
    reader, writer = pty.openpty()
    run = subprocess.Popen([sys.executable, "-c", SCRIPT], stderr=writer, env={**os.environ, "TERM": "xterm"})
    os.close(writer)
    shown = b""
    while chunk := _read(reader):
        shown += chunk
    os.close(reader)
    assert run.wait() == 0
    assert b"profiling blocks" in shown
    assert b"1 of 4" in shown
    assert b"0:00:01" in shown


def _read(reader: int) -> bytes:
    try:
        return os.read(reader, 4096)
    except OSError:
        # The other end is closed.
        return b""


def test_lines_in_a_log(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(progress, "_LINE_EVERY_S", 0.0)
    with caplog.at_level(logging.INFO, logger="pyrannc.DPStaging"):
        for shown in (True, False):
            with progress.Bar("profiling blocks", 4.0, 2, shown=shown) as bar:
                bar.advance(3.0)
    (line,) = caplog.messages
    assert line.startswith("profiling blocks: 1 of 2, about ")
    assert line.endswith(" s left")


def test_lines_of_work_without_a_known_end(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    now = iter((100.0, 104.0, 107.0, 108.0))
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(now))
    with caplog.at_level(logging.INFO, logger="pyrannc.Decomposer"):
        lines = progress.Lines("Decomposer", "capture")
        for what in ("a trace", "a run", "another run"):
            lines.at(what)
    assert caplog.messages == ["capture: 7 s so far, now at a run"]


class Decides(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        made = self.inner(x)
        return made if bool((made > 100).any()) else made * 2


def test_a_capture_tells_what_it_is_at() -> None:
    told: list[str] = []
    net = nn.Sequential(nn.Linear(3, 3), Decides(), nn.Linear(3, 3))
    with progress_told(told.append):
        capture(net, (torch.randn(4, 3),), {}, device=torch.device("cpu"), rows=4)
    part = "sub-module '1'"
    expected = ["a trace of the model", "a trace of the model, in which 1 of its parts stay whole"]
    found = list(dict.fromkeys(told))
    assert found[:2] == expected
    assert found[2] == f"runs of {part}, which stays whole"
    assert found[3].startswith(f"trials of what {part}")
    # It goes on to tell while one thing lasts.
    assert all(told.count(what) > 2 for what in found)
    told.clear()
    capture(net, (torch.randn(4, 3),), {}, device=torch.device("cpu"), rows=4)
    assert not told
