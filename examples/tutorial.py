"""A chain of linear layers, trained by all processes with plain SGD.

mpirun -np 2 python examples/tutorial.py 64 512 10
torchrun --nproc-per-node 2 examples/tutorial.py 64 512 10
python examples/tutorial.py 64 512 10
"""

import argparse

import torch
from torch import nn

import pyrannc

parser = argparse.ArgumentParser(description="Train a chain of linear layers over all processes.")
parser.add_argument("batch", type=int, help="rows of each process's own batch")
parser.add_argument("hidden", type=int, help="width of every layer")
parser.add_argument("layers", type=int, help="number of layers")
parser.add_argument("--steps", type=int, default=5)
args = parser.parse_args()

torch.manual_seed(0)
net = nn.Sequential(*(nn.Linear(args.hidden, args.hidden) for _ in range(args.layers)))
optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
model = pyrannc.RaNNCModule(net, optimizer)

# Every process has its own rows; together they are the global batch.
torch.manual_seed(pyrannc.get_rank())
x = torch.randn(args.batch, args.hidden, device=model.device)
target = torch.randn(args.batch, args.hidden, device=model.device)

for step in range(args.steps):
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), target)
    loss.backward()
    optimizer.step()
    if pyrannc.get_rank() == 0:
        print(f"step {step}: loss {loss.item():.6f}", flush=True)
