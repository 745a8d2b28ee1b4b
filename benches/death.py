"""Kills one rank in the middle of a step and lets the others say what they saw; for GPUs, where CI cannot test it.

    torchrun --nproc-per-node 2 --max-restarts 0 benches/death.py

Started by a launcher that ends all ranks itself, the message may be cut off; ``--spawn N`` starts the ranks bare.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import threading
import time

import torch


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--spawn", type=int, default=0, help="start this number of ranks")
    parser.add_argument("--stages", type=int, default=2)
    options = parser.parse_args()
    if options.spawn:
        return spawn(options.spawn, options.stages)
    train(options.stages)
    return 0


def spawn(ranks: int, stages: int) -> int:
    """Starts the ranks; returns 0 when all of them ended within a minute of the death."""
    common = os.environ | {
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29555",
    }
    command = [sys.executable, __file__, "--stages", str(stages)]
    started = [
        subprocess.Popen(command, env=common | {"RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(ranks)
    ]
    victim = started[-1].wait()
    death = time.monotonic()
    codes = [process.wait(timeout=60) for process in started]
    print(f"the victim ended with {victim}; all others within {time.monotonic() - death:.1f} s, with {codes}")
    return 0 if victim == -signal.SIGKILL and all(codes) else 1


def train(stages: int) -> None:
    os.environ["RANNC_PARTITION_NUM"] = str(stages)
    os.environ["RANNC_PIPELINE_NUM"] = "4"
    from models import loss_of, make_batch, make_model

    import pyrannc
    from pyrannc.job import process

    joined = process.ensure_process_group()
    module = make_model("chain", [1024, 20], 0)
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
    model = pyrannc.RaNNCModule(module, optimizer)
    # Enough rows for the host to be far ahead: the devices go from replay to replay, and the death falls into one.
    local = make_batch("chain", 16384, [1024, 20], 0, joined.rank)
    batch = {name: tensor.to(joined.device) for name, tensor in local.items()}
    for step in range(10_000_000):
        if step == 5 and joined.rank == joined.world_size - 1:
            threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGKILL)).start()
        optimizer.zero_grad()
        loss_of(model(**batch)).backward()
        optimizer.step()


if __name__ == "__main__":
    sys.exit(main())
