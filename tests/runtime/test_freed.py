"""A model that nobody uses any more is freed."""

import subprocess
import sys

PROGRAM = """
import gc, weakref
import torch
import pyrannc

model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
wrapped = pyrannc.RaNNCModule(model, optimizer)
for _ in range(2):
    optimizer.zero_grad()
    wrapped(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
watched = [weakref.ref(model), weakref.ref(model[0].weight), weakref.ref(wrapped)]
del model, optimizer, wrapped
gc.collect()
assert all(watch() is None for watch in watched), watched
pyrannc.clear()
"""


def test_a_deployed_model_is_freed_with_its_parameters() -> None:
    ended = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
