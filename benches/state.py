"""Host memory that saving and loading the whole state of a deployed model takes, on each rank, beside the model's size.

    torchrun --nproc-per-node 4 benches/state.py --layers 32 --width 1024

Prints a line of JSON for each rank. Linux only: the greatest resident size is read from /proc and reset there.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--width", type=int, default=1024)
    options = parser.parse_args()
    os.environ["RANNC_PARTITION_NUM"] = os.environ.get("WORLD_SIZE", "1")
    import pyrannc

    net = nn.Sequential(*(nn.Linear(options.width, options.width, bias=False) for _ in range(options.layers)))
    whole = sum(param.nbytes for param in net.parameters())
    model = pyrannc.RaNNCModule(net)
    model(torch.ones(2, options.width, device=model.device))
    result = {
        "rank": pyrannc.get_rank(),
        "model": whole,
        "tensor": whole // options.layers,
        "held": sum(param.nbytes for param in model.parameters(from_global=False)),
    }
    state: list[dict[str, torch.Tensor]] = []
    result["save"] = _peak_growth_bytes(lambda: state.append(model.state_dict()))
    result["load"] = _peak_growth_bytes(lambda: model.load_state_dict(state[0]))
    print(json.dumps(result), flush=True)
    pyrannc.barrier()


def _peak_growth_bytes(call: Callable[[], object]) -> int:
    """By how much the resident size was greater, at most, during a call than before."""
    Path("/proc/self/clear_refs").write_text("5")
    before = _resident_bytes()
    call()
    return _status_bytes("VmHWM") - before


def _resident_bytes() -> int:
    return _status_bytes("VmRSS")


def _status_bytes(item: str) -> int:
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[item].split()[0]) * 1024


if __name__ == "__main__":
    main()
