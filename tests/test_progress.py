"""What is shown while a model is profiled."""

from __future__ import annotations

import logging
import os
import pty
import subprocess
import sys

import pytest

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
