"""``python -m pyrannc capture``."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pyrannc._native import Graph
from pyrannc.capture import command

SAMPLE = """
import sys
from types import SimpleNamespace

import torch
from torch import nn


def two():
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU()), (torch.randn(4, 8),)


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, scale, x):
        return self.linear(x) * scale


def three():
    return Scaled(), (torch.ones(1),), {"x": torch.randn(6, 8)}


def named():
    return SimpleNamespace(model=nn.Linear(8, 2), args=[torch.randn(5, 8)])


def huge():
    return nn.Linear(1 << 20, 1 << 20), (torch.empty(4, 1 << 20),)


class Branching(nn.Module):
    def forward(self, x):
        return x + 1 if (x > 0).all() else x


def branching():
    return Branching(), (torch.ones(4, 8),)


class Sorting(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(8, 8), Routed(), nn.Linear(8, 8)

    def forward(self, x):
        return self.last(self.inner(self.first(x)))


class Routed(nn.Linear):
    def __init__(self):
        super().__init__(8, 8)

    def forward(self, x):
        order = x[:, 0].argsort()
        return super().forward(x[order])[order.argsort()]


def sorting():
    return Sorting(), (torch.randn(4, 8),)


def data():
    with torch.device("cpu"):
        return Branching(), (torch.ones(4, 8),)


def nothing():
    return None


def model_alone():
    return nn.Linear(2, 2)


def no_tensor():
    return nn.Linear(2, 2), ()


def values():
    return nn.Linear(int(torch.ones(1).item()), 2), (torch.ones(4, 1),)


not_a_function = 3


def of_arguments():
    script, width = sys.argv
    return nn.Linear(int(width), 2), (torch.zeros(4, int(width)),)
"""

Capture = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Capture:
    """Runs the command in a folder with `sample.py`: exit status, output, messages."""
    (tmp_path / "sample.py").write_text(SAMPLE)
    (tmp_path / "broken.py").write_text("import torch\n\nraise ValueError('no luck')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", list(sys.argv))

    def run(function: str, *more: str) -> tuple[int, str, str]:
        for name in ("sample", "broken"):
            monkeypatch.delitem(sys.modules, name, raising=False)
        status = command.main([function, "-o", "graph.json", *more])
        out, err = capsys.readouterr()
        return status, out, err

    return run


def written() -> dict[str, Any]:
    text = Path("graph.json").read_text()
    Graph.from_json(text)  # verifies it
    graph: dict[str, Any] = json.loads(text)
    return graph


@pytest.mark.parametrize(
    ("function", "rows", "params"),
    [("two", 4, ["0.weight", "0.bias"]), ("named", 5, ["weight", "bias"]), ("huge", 4, ["weight", "bias"])],
)
def test_a_graph_is_written(run: Capture, function: str, rows: int, params: list[str]) -> None:
    status, out, err = run(f"sample:{function}")
    assert (status, err) == (0, "")
    assert out.startswith("Captured ")
    assert out.endswith("written to graph.json\n")
    graph = written()
    assert graph["sample_rows"] == rows
    assert [param["name"] for param in graph["params"]] == params  # type: ignore[attr-defined]


@pytest.mark.parametrize("where", ["sample.py", "./sample.py", "folder/sample.py"])
def test_a_file_serves_as_well_as_a_module(run: Capture, where: str) -> None:
    Path("folder").mkdir()
    # A file finds what stands beside it.
    Path("folder/beside.py").write_text("from torch import nn, zeros\n\nmade = nn.Linear(8, 2), (zeros(3, 8),)\n")
    Path("folder/sample.py").write_text("from beside import made\n\n\ndef two():\n    return made\n")
    assert run(f"{where}:two")[::2] == (0, "")
    assert written()["sample_rows"] == (3 if "folder" in where else 4)


def test_the_script_has_the_arguments_behind_two_dashes(run: Capture) -> None:
    status, out, err = run("sample.py:of_arguments", "--device", "cpu", "--", "8")
    assert (status, err) == (0, "")
    assert ", 18 parameters, " in out
    assert sys.argv == ["sample.py", "8"]


def test_the_output_counts(run: Capture) -> None:
    _, out, _ = run("sample:two", "--device", "cpu")
    assert out.startswith("Captured Sequential: 2 ops, 144 parameters, ")


def test_rows_say_which_arguments_are_batched(run: Capture) -> None:
    assert run("sample:three", "--rows", "6")[0] == 0
    graph = written()
    assert graph["sample_rows"] == 6
    shapes = [graph["values"][value]["shape"][0] for value in graph["inputs"]]  # type: ignore[attr-defined,index]
    assert shapes == [{"per_row": 0, "fixed": 1}, {"per_row": 1, "fixed": 0}]


def test_questions_about_data_are_told(run: Capture) -> None:
    status, _, err = run("sample:branching")
    assert status == 0
    assert err.startswith("warning: the model (")
    assert "asks for values of tensors without data" in err
    assert run("sample:data")[2] == ""


def test_what_plans_do_not_count_is_told(run: Capture) -> None:
    status, _, err = run("sample:sorting")
    assert status == 0
    assert err.startswith("warning: sub-module 'inner' (")
    assert "with 67% of the parameters" in err
    assert "plans count neither its time nor its memory" in err
    assert "last" not in {op["module"] for op in written()["ops"]}
    assert run("sample:sorting", "--row-wise", "inner")[::2] == (0, "")
    assert "last" in {op["module"] for op in written()["ops"]}


def test_the_call_may_be_made_under_autocast(run: Capture) -> None:
    assert run("sample:two", "--autocast", "bfloat16")[0] == 0
    assert '"torch.bfloat16"' in json.dumps(written())
    assert not torch.is_autocast_enabled("cuda")
    run("sample:two")
    assert '"torch.bfloat16"' not in json.dumps(written())


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("sample", "'sample' must have the form package.module:function"),
        ("sample.py", "'sample.py' must have the form package.module:function or folder/file.py:function"),
        ("missing.py:two", "there is no file missing.py"),
        ("broken.py:two", "broken.py cannot be imported: ValueError: no luck"),
        ("sample.py:four", "sample.py has no function four"),
        ("missing:two", "module missing cannot be imported: ModuleNotFoundError: No module named 'missing'"),
        ("broken:two", "broken.py:3"),
        ("sample:four", "has no function four"),
        ("sample:not_a_function", "has no function not_a_function"),
        ("sample:nothing", "sample:nothing must return (model, args) or (model, args, kwargs)"),
        ("sample:model_alone", "sample:model_alone must return (model, args)"),
        ("sample:no_tensor", "the batch size cannot be told"),
        ("sample:values", 'use `with torch.device("cpu"):`'),
    ],
)
def test_failures_are_one_line(run: Capture, function: str, message: str) -> None:
    status, out, err = run(function)
    assert (status, out) == (1, "")
    assert err.startswith("error: ")
    assert message in err
    assert err.count("\n") == 1
    assert not Path("graph.json").exists()


def test_rows_that_no_argument_has(run: Capture) -> None:
    assert run("sample:two", "--rows", "3")[2] == "error: no argument has 3 rows: extent 0 of the tensors is 4\n"


def test_a_file_that_cannot_be_written(run: Capture) -> None:
    status, _, err = run("sample:two", "-o", "nowhere/graph.json")
    assert (status, err) == (1, "error: cannot write nowhere/graph.json: No such file or directory\n")


def test_the_module_is_a_command(tmp_path: Path) -> None:
    """The shell's way, from argument to exit status; other words go to the native command."""
    (tmp_path / "sample.py").write_text(SAMPLE)

    def shell(*args: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, "-m", "pyrannc", *args], cwd=tmp_path, capture_output=True, text=True)

    assert shell("capture", "sample:two", "-o", "graph.json").returncode == 0
    assert shell("graph", "graph.json").returncode == 0
    assert shell("capture", "sample:two").returncode == 2
    help_text = shell("capture", "--help").stdout
    assert "Example: python -m pyrannc capture" in help_text
