"""Compares Triton's kernels with Rust, in Triton's interpreter: a program of its own, see ``test_philox.py``."""

from __future__ import annotations

import torch

from pyrannc.blocks import philox, philox_triton
from pyrannc.blocks.randomness import Randomness
from pyrannc.core.partition import RowDim

CPU = torch.device("cpu")
PARTS = [(2, 3), (5, 9), ((1 << 34) + 1, (1 << 34) + 2)]
CASES = [
    ((6, 8), RowDim(0, 1), [(0, 6)]),
    ((6, 3, 7), RowDim(0, 1), PARTS),
    ((2, 6, 5), RowDim(1, 1), PARTS),
    ((2, 6, 2), RowDim(1, 2), [(7, 10)]),
    ((2, 2100), RowDim(0, 1), [(1, 3)]),
    ((2, 2049), RowDim(0, 1), [(1, 3)]),
    ((5, 9), None, [(3, 9)]),
]


def main() -> None:
    source = Randomness(CPU)
    source.begin(0x7FEDCBA987654321)
    for shape, rows, runs in CASES:
        source.at(runs)
        draw = source.draw(77, shape, rows, by_rows=True)
        assert torch.equal(philox_triton.words(draw, CPU), philox.words(draw, CPU)), (shape, runs)
        for threshold in (1 << 30, 3 << 30):
            kept = philox_triton.keep(draw, threshold, CPU)
            assert torch.equal(kept, philox.keep(draw, threshold, CPU)), (shape, runs)
            for dtype in (torch.float32, torch.float64):
                x = torch.randn(shape, dtype=dtype)
                found = philox_triton.dropped(x, draw, threshold, 1.25)
                assert torch.equal(found, philox.dropped(x, draw, threshold, 1.25)), (shape, runs, dtype)
    print(len(CASES), "draws")


if __name__ == "__main__":
    main()
