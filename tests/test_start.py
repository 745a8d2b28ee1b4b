"""What the start of a training takes and brings with it."""

from __future__ import annotations

import subprocess
import sys

START = """
import sys, time
import torch
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8))

def brought(*names):
    return [name for name in names if name in sys.modules]

before = brought("torch._dynamo", "sympy")
import pyrannc
module = pyrannc.RaNNCModule(model)
print("import", *(set(brought("torch._dynamo", "rich.console", "networkx", "pandas")) - set(before)))

# All of torch.compile comes with any optimizer of torch.
optimizer = torch.optim.SGD(model.parameters())
module = pyrannc.RaNNCModule(model, optimizer)
start_s = time.process_time()
module(torch.ones(4, 8))
took_s = time.process_time() - start_s
print("call", *brought("rich.console", "networkx", "torch.export._trace", "torch._inductor.codecache"))
assert took_s < 3, took_s
"""

IMPORT = """
import time
import torch
torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
start_s = time.process_time()
import pyrannc
pyrannc.RaNNCModule
took_s = time.process_time() - start_s
assert took_s < 2, took_s
"""


def run(script: str) -> list[str]:
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_nothing_heavy_is_imported_that_is_not_used() -> None:
    assert run(START) == ["import", "call"]


def test_the_import_takes_little_beyond_what_torch_imports_itself() -> None:
    assert run(IMPORT) == []
