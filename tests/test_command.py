"""``python -m pyrannc`` on a terminal. What the commands print is tested in crates/cli."""

from __future__ import annotations

import os
import pty
import sys
import time
from pathlib import Path

import torch
from torch import nn

from pyrannc.capture import capture

SECONDS = 120.0


def run_on_terminal(*args: str) -> tuple[int, str]:
    """Exit status and everything that appears on the terminal."""
    process, terminal = pty.fork()
    if process == 0:
        os.execv(sys.executable, [sys.executable, "-m", "pyrannc", *args])
    seen = b""
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        try:
            part = os.read(terminal, 1 << 16)
        except OSError:  # the other end is closed
            part = b""
        if not part:
            break
        seen += part
    os.close(terminal)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), seen.decode()


def test_progress_and_result_share_a_terminal(tmp_path: Path) -> None:
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
    captured = capture(model, (torch.zeros(4, 16),), {}, device=torch.device("cpu"), rows=4)
    graph = tmp_path / "graph.json"
    graph.write_text(captured.graph_json)
    status, seen = run_on_terminal("whatif", str(graph), "--cluster", "cpux2", "--batch", "8,16", "--loss-outside")
    assert status == 0, seen
    assert "searching" in seen
    result = seen[seen.rindex("Devices") :]
    assert [line.split()[1] for line in result.splitlines() if line.startswith("│")] == ["2", "2"]
