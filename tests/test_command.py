"""``python -m pyrannc`` on a terminal. What the commands print is tested in crates/cli."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import pyrannc
from pyrannc._native import Cluster, Graph, Plan
from pyrannc.capture import capture
from pyrannc.core.settings import SearchSettings

AT_ONCE = 3.0
"""Ten times what it takes, for machines that do much else."""


def run_on_terminal(*args: str) -> tuple[int, str]:
    """Exit status and everything that appears on the terminal."""
    process, terminal = pty.fork()
    if process == 0:
        os.execv(sys.executable, [sys.executable, "-m", "pyrannc", *args])
    seen = read_until(terminal, None)
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
    table = seen[seen.index("Devices") :].split("\r\n\r\n")[0]
    assert [line.split()[0] for line in table.splitlines()[2:]] == ["2", "2"], seen


LONG = """
import json, sys, time
from pyrannc._native import Cluster, Graph, Plan

graph = Graph.from_json(open(sys.argv[1]).read())
settings = json.dumps({"world_size": 512, "batch_rows": 8192, "memory_limit_bytes": 1 << 31, "loss_inside": False})
print("searching", flush=True)
try:
    while True:
        Plan.search(graph, Cluster.preset("H200", 64, 8), [], settings)
except KeyboardInterrupt:
    print("told", flush=True)
"""


@pytest.fixture(scope="module")
def long_graph(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A graph whose plan is not found in a second."""
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(150)))
    captured = capture(model, (torch.zeros(4, 16),), {}, device=torch.device("cpu"), rows=4)
    graph = tmp_path_factory.mktemp("long") / "graph.json"
    graph.write_text(captured.graph_json)
    return graph


@pytest.mark.parametrize("command", ["plan", "explain", "whatif"])
def test_an_interrupt_ends_a_command_at_once(command: str, long_graph: Path) -> None:
    batches = ",".join(str(8192 + more) for more in range(200)) if command == "whatif" else "8192"
    arguments = [command, str(long_graph), "--cluster", "H200x8x64", "--loss-outside", "--memory-gb", "2"]
    process, terminal = pty.fork()
    if process == 0:
        os.execv(sys.executable, [sys.executable, "-m", "pyrannc", *arguments, "--batch", batches])
    read_until(terminal, b"searching")
    time.sleep(0.3)
    os.write(terminal, b"\x03")
    interrupted = time.monotonic()
    seen = read_until(terminal, None).decode()
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 130, seen
    assert time.monotonic() - interrupted < AT_ONCE
    # The line of the progress is wiped away before the one line that is left.
    assert re.search(r"\x1b\[[0-9]*K\s*interrupted\r\n$", seen), repr(seen)
    os.close(terminal)


def test_an_interrupt_ends_a_search_inside_python(long_graph: Path) -> None:
    running = subprocess.Popen([sys.executable, "-c", LONG, str(long_graph)], stdout=subprocess.PIPE, text=True)
    assert running.stdout is not None
    assert running.stdout.readline() == "searching\n"
    time.sleep(0.3)
    running.send_signal(signal.SIGINT)
    interrupted = time.monotonic()
    assert running.stdout.readline() == "told\n"
    assert running.wait() == 0
    assert time.monotonic() - interrupted < AT_ONCE
    running.stdout.close()


def read_until(terminal: int, text: bytes | None) -> bytes:
    """What appears until the text does, or until the other end is closed."""
    seen = b""
    while text is None or text not in seen:
        try:
            part = os.read(terminal, 1 << 16)
        except OSError:  # the other end is closed
            part = b""
        if not part:
            return seen
        seen += part
    return seen


def run(*args: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pyrannc", *args]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | variables, timeout=240, check=False)


def test_shells_complete_what_needs_torch() -> None:
    script = run("completion", "fish").stdout
    for command in ("capture", "calibrate"):
        text = run(command, "--help").stdout.split("Examples")[0]
        options = set(re.findall(r"--([a-z]+(?:-[a-z]+)*)", text)) - {"help"}
        assert "output" in options
        for option in options - {"cluster", "batch"}:
            assert re.search(rf"using_subcommand {command}\".* -l {option}\b", script), (command, option)


def test_an_error_of_configuration_is_one_line() -> None:
    ended = run("calibrate", RANNC_LOG="lowd")
    assert ended.returncode == 1
    levels = "debug, info, warning, error, critical, off"
    assert ended.stderr == f"error: RANNC_LOG: unknown level 'lowd'; the levels are {levels}\n"


def test_a_schedule_with_a_name_is_shown_as_what_each_stage_computes(tmp_path: Path) -> None:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))
    captured = capture(model, (torch.zeros(4, 64),), {}, device=torch.device("cpu"), rows=4)
    settings = SearchSettings(3, 768, stages=3, microbatches=3)
    plan = Plan.search(Graph.from_json(captured.graph_json), Cluster.preset("cpu", 1, 3), [], settings.to_json())
    plan.write(tmp_path / "plan.json")
    shown = run("show", str(tmp_path / "plan.json")).stdout
    orders = ["F0 F1 F2 B0 B1 B2", "F0 F1 B0 F2 B1 B2", "F0 B0 F1 B1 F2 B2"]
    assert "1F1B" in shown
    assert re.findall(r"Stage \d: (.*)", shown) == orders, shown


def test_all_public_names_are_listed() -> None:
    # Of another process: one that has used none of them.
    code = "import pyrannc, sys; print(*dir(pyrannc)); assert 'torch' not in sys.modules"
    listed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert {"RaNNCModule", "barrier", "show_deployment", "__version__"} <= set(pyrannc.__all__) <= set(listed)
