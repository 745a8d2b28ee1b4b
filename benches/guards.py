"""What the guards of a call cost the host, for a transformer with about 400 parameters.

python benches/guards.py
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from torch import nn

import pyrannc

WIDTH = 16
LAYERS = 33
"""With 12 parameters each."""


def best_us(call: Callable[[], object], repeats: int) -> float:
    """The shortest of some runs: what an idle processor takes."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=2000)
    repeats = parser.parse_args().repeats
    torch.set_num_threads(1)
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, batch_first=True)
    model = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
    optimizer = torch.optim.AdamW(model.parameters())
    module = pyrannc.RaNNCModule(model, optimizer)
    x = torch.randn(2, 4, WIDTH)
    module(x)
    agreement, variant = module._agreement, module._variants.first
    assert agreement.params is not None, "the model is deployed"
    params, modules = sum(1 for _ in model.parameters()), sum(1 for _ in model.modules())
    print(f"{params} parameters, {modules} modules")
    parts: dict[str, Callable[[], object]] = {
        "parameters": agreement.params.check,
        "modules": variant.guards.hold,
        "optimizer": agreement._hyper_parameters.fingerprints,
    }
    total = 0.0
    for name, check in parts.items():
        took = best_us(check, repeats)
        total += took
        print(f"{name:12} {took:7.1f} us")
    print(f"{'all':12} {total:7.1f} us")


if __name__ == "__main__":
    main()
