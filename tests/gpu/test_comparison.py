"""Compiled Spans are held against operators where these, as they are, need more memory than there is."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from unittest.mock import patch

import torch
from torch import Tensor, nn

import pyrannc
from pyrannc.blocks import beside_eager, compiler
from pyrannc.blocks.compiled import SpanCode
from tests.ranks import RankPool

ROWS, WIDTH = 16384, 1024


class Sines(nn.Module):
    """Operators that keep an input each, from one of which compiled code computes the others again."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        for _ in range(16):
            y = y.sin()
        return y.square().mean()


def _under_a_limit() -> tuple[list[str | None], bool]:
    """What is found of each Span with half of the memory that it takes otherwise, and whether there is none then if
    all lies on the device."""
    device, codes = torch.device("cuda", torch.cuda.current_device()), list[SpanCode]()

    def note(code: SpanCode, _: torch.device) -> None:
        codes.append(code)

    module = Sines()
    with patch.object(compiler, "difference", note):
        model = pyrannc.RaNNCModule(module, torch.optim.SGD(module.parameters(), lr=0.1))
        model(torch.randn(ROWS, WIDTH, device=device)).backward()
    found, short = [], False
    for code in codes:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with patch.object(beside_eager, "_exact", lambda *_: None):
            assert beside_eager.difference(code, device) is None
        most = before + (torch.cuda.max_memory_allocated() - before) // 2
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(most / torch.cuda.get_device_properties(device).total_memory)
        try:
            found.append(beside_eager.difference(code, device))
            with patch.object(beside_eager, "save_on_cpu", nullcontext):
                beside_eager.difference(code, device)
        except torch.OutOfMemoryError:
            short = True
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
    return found, short


def test_what_backwards_need_lies_on_the_host_where_memory_is_short(ranks: Callable[[int], RankPool]) -> None:
    ((found, short),) = ranks(1).run(_under_a_limit, env={"RANNC_PROFILE": "never", "RANNC_COMPILE_SPANS": "on"})
    assert found == [None]
    assert short
