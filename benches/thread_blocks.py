"""What products lose to sums and gathers of gradients and parameters beside them, by the thread blocks these may take.

torchrun --nproc-per-node 2 benches/thread_blocks.py
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor

TOKENS, WIDTH, WIDE = 8192, 1600, 6400
"""Of a layer of BERT 48 x 1,600 with 16 x 512 tokens."""
LAYERS, PARAMS = 10, 31_000_000


def main() -> int:
    options = parse()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    layer = Layer(device)
    rows = []
    for blocks in options.blocks:
        messages = Messages(device, blocks)
        rows.append(
            (blocks, timed(messages.run), timed(lambda messages=messages: beside(messages, layer)), timed(layer.run))
        )
    if dist.get_rank() == 0:
        show(rows)
    dist.destroy_process_group()
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    choice = "thread blocks of NCCL's kernels at most; 0 leaves it to NCCL"
    parser.add_argument("--blocks", type=int, nargs="+", default=[0, 2, 4, 8, 16, 24, 32], help=choice)
    return parser.parse_args()


class Layer:
    """The products of some layers, forward and backward, in bfloat16."""

    def __init__(self, device: torch.device) -> None:
        def drawn(rows: int, columns: int) -> Tensor:
            return torch.randn(rows, columns, device=device, dtype=torch.bfloat16) / columns**0.5

        self.narrow, self.wide = drawn(TOKENS, WIDTH), drawn(TOKENS, WIDE)
        self.up, self.down, self.square = drawn(WIDTH, WIDE), drawn(WIDE, WIDTH), drawn(WIDTH, WIDTH)

    def run(self) -> None:
        for _ in range(LAYERS):
            for left, right in ((self.narrow, self.up), (self.wide, self.down)):
                left @ right
            for left, right in ((self.wide, self.up.T), (self.narrow, self.down.T)):
                left @ right
            for left, right in ((self.narrow.T, self.wide), (self.wide.T, self.narrow)):
                left @ right
            for _ in range(4):
                self.narrow @ self.square
                self.narrow @ self.square.T


class Messages:
    """Of as many layers the sums of gradients in parts, and the gathers of parameters.

    Args:
        blocks: thread blocks that they may take; 0 leaves it to NCCL.
    """

    def __init__(self, device: torch.device, blocks: int) -> None:
        options = dist.ProcessGroupNCCL.Options()
        if blocks:
            options.config.min_ctas, options.config.max_ctas = 1, blocks
        self.group = dist.new_group(pg_options=options)
        self.whole = torch.zeros(PARAMS, device=device, dtype=torch.bfloat16)
        self.part = torch.zeros(PARAMS // dist.get_world_size(), device=device, dtype=torch.bfloat16)

    def start(self) -> list[dist.Work]:
        works = []
        for _ in range(LAYERS):
            works.append(dist.reduce_scatter_tensor(self.part, self.whole, group=self.group, async_op=True))
            works.append(dist.all_gather_into_tensor(self.whole, self.part, group=self.group, async_op=True))
        return works

    def run(self) -> None:
        for work in self.start():
            work.wait()


def beside(messages: Messages, layer: Layer) -> None:
    works = messages.start()
    layer.run()
    for work in works:
        work.wait()


def timed(call: Callable[[], None], calls: int = 8) -> float:
    """Milliseconds of one of some calls."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.synchronize()
    start_s = time.perf_counter()
    for _ in range(calls):
        call()
    torch.cuda.synchronize()
    return (time.perf_counter() - start_s) / calls * 1e3


def show(rows: list[tuple[int, float, float, float]]) -> None:
    table = Table(title=f"{LAYERS} layers; ms")
    for name in ("thread blocks", "messages alone", "products alone", "products beside messages", "lost"):
        table.add_column(name, justify="right")
    for blocks, messages, both, products in rows:
        figures = (f"{value:.2f}" for value in (messages, products, both, both - products))
        table.add_row(str(blocks or "as NCCL has it"), *figures)
    Console().print(table)


if __name__ == "__main__":
    raise SystemExit(main())
