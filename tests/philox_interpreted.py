"""Compares Triton's kernels with Rust, in Triton's interpreter: a program of its own, see ``test_philox.py``."""

from __future__ import annotations

import torch

from pyrannc.blocks import philox, philox_triton
from pyrannc.blocks.ahead import Ahead
from pyrannc.blocks.randomness import Randomness
from pyrannc.blocks.stream import CallKey, Draw, RowsInHand
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
    compare_together(source)
    compare_ahead()
    print(len(CASES), "draws")


def compare_together(source: Randomness) -> None:
    """Masks drawn in one launch are those drawn one by one, under another key too."""
    asked = []
    for op, (shape, rows, runs) in enumerate(CASES):
        source.at(runs)
        asked += [(source.draw(op, shape, rows, by_rows=True), threshold) for threshold in (1 << 30, 3 << 30)]
    aligned = [item for item in asked if item[0].inner % 4 == 0]
    assert aligned
    for some in (asked, aligned):
        masks = philox_triton.Masks(some, CPU)
        for key in (5, 0x7FEDCBA987654321):
            source.begin(key)
            fresh = source.draw(0, (1,), None, by_rows=False).key
            for made, (draw, threshold) in zip(masks.draw(fresh), some, strict=True):
                assert torch.equal(made, philox.keep(draw._replace(key=fresh), threshold, CPU)), (draw, threshold)


class Stage:
    """Somebody who asks."""


def compare_ahead() -> None:
    """What is drawn ahead is what is asked for, whoever asks for whatever rows."""
    rows = {count: RowsInHand([(3, 3 + count)], CPU) for count in (2, 4)}
    ahead, first, second = Ahead(CPU), Stage(), Stage()
    for number, (who, count, ops) in enumerate(
        [(first, 2, "abc"), (first, 2, "abc"), (second, 2, "ab"), (first, 4, "a"), (first, 2, "ac"), (first, 2, "acd")]
    ):
        key = CallKey(number, CPU)
        with ahead.drawn(who, key, rows[count]):
            for op in ops:
                draw = Draw(key, ord(op), 0, rows[count], 1, 1, 8)
                right = philox.keep(draw, 1 << 30, CPU)
                assert torch.equal(ahead.keep(draw, 1 << 30), right), (number, op)
                # The same once more, which is drawn by itself.
                assert torch.equal(ahead.keep(draw, 1 << 30), right), (number, op)
            empty = Draw(key, 1, 0, RowsInHand([], CPU), 1, 1, 8)
            assert ahead.keep(empty, 1 << 30).numel() == 0
            assert not ahead.keep(Draw(key, 2, 0, rows[count], 1, 1, 8), philox.ALWAYS).any()


if __name__ == "__main__":
    main()
