"""Which tensors of the arguments have rows is found out by some ranks while one compares the captured graph."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import pyrannc
from pyrannc.call import alike, batch_arguments
from pyrannc.capture import Sample
from pyrannc.job import process
from tests.ranks import RankPool

Ranks = Callable[[int], RankPool]
ROWS = 4
WIDTH = 3
CUT = {"RANNC_PIPELINE_NUM": "2"}


class Beside(nn.Module):
    """Uses tensors beside the batch, which all ranks bring alike: of each row, or one for all.

    Args:
        by_row: which of them have rows.
    """

    def __init__(self, by_row: tuple[bool, ...]) -> None:
        super().__init__()
        self.by_row = by_row
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.last: Tensor | None = None

    def forward(self, x: Tensor, *beside: Tensor) -> Tensor:
        x = self.linear(x)
        for by_row, tensor in zip(self.by_row, beside, strict=True):
            x = x * tensor.unsqueeze(1) if by_row else x * tensor.sum()
        self.last = x
        return x.sum()


def _called(by_row: tuple[bool, ...]) -> tuple[list[int], str]:
    """Which tensors this rank has looked at, and the error of the call."""
    looked: list[int] = []
    first_that_may_lack_rows = batch_arguments.first_that_may_lack_rows

    def note(sample: Sample, places: list[int], *, is_plain: bool) -> int | None:
        looked.extend(places)
        return first_that_may_lack_rows(sample, places, is_plain=is_plain)

    torch.manual_seed(0)
    module = Beside(by_row)
    model = pyrannc.RaNNCModule(module, torch.optim.SGD(module.parameters(), lr=0.1))
    x = torch.rand(ROWS, WIDTH) + process.get_rank()
    beside = [torch.rand(ROWS, generator=torch.Generator().manual_seed(place)) for place in range(len(by_row))]
    with patch.object(batch_arguments, "first_that_may_lack_rows", note):
        for _ in range(2):
            try:
                loss = model(x, *beside)
            except pyrannc.InputError as error:
                looked.append(-1)
                text = str(error)
            else:
                loss.backward()
                text = ""
    return looked, text


@pytest.mark.parametrize(("world_size", "shares"), [(1, [[0, 1, 2, 3]]), (2, [[], [1, 2, 3]]), (3, [[], [1, 3], [2]])])
def test_each_is_looked_at_once(ranks: Ranks, world_size: int, shares: list[list[int]]) -> None:
    found = ranks(world_size).run(_called, (True, True, True), env=CUT)
    assert found == [(share, "") for share in shares]


@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("world_size", [1, 3])
def test_one_without_rows_is_refused_by_all_at_each_call(ranks: Ranks, world_size: int, which: int) -> None:
    for looked, text in ranks(world_size).run(_called, tuple(place != which for place in range(3)), env=CUT):
        assert looked.count(-1) == 2
        assert "may have the rows of the batch or none" in text
        assert f"argument {which + 1} (" in text


def test_nothing_is_looked_at_where_nothing_is_cut(ranks: Ranks) -> None:
    assert ranks(1).run(_called, (True, False, True)) == [([], "")]


def test_a_plan_for_more_ranks_asks(ranks: Ranks) -> None:
    [(looked, text)] = ranks(1).run(_called, (True, False, True), env={"RANNC_PARTITIONING_DRY_RUN_NP": "4"})
    assert looked == [0, 1, 2, 3, -1] * 2
    assert "may have the rows of the batch or none" in text


def _trained(module: nn.Module, optimizer: torch.optim.Optimizer, model: nn.Module) -> list[float]:
    """Losses of batches with other rows than what stands beside them has elements, and with as many."""
    losses = []
    for rows in (ROWS, ROWS + 2, ROWS, 1):
        by_row, for_all = torch.rand(rows), torch.rand(ROWS)
        optimizer.zero_grad()
        loss = model(torch.rand(rows, WIDTH), by_row, for_all)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return [*losses, *(float(param.sum()) for param in module.parameters())]


def _beside_plain() -> tuple[list[float], list[float]]:
    found = []
    for wraps in (False, True):
        torch.manual_seed(0)
        module = Beside((True, False))
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        found.append(_trained(module, optimizer, pyrannc.RaNNCModule(module, optimizer) if wraps else module))
    return found[0], found[1]


def test_what_has_no_rows_need_not_follow_the_batch_where_nothing_is_cut(ranks: Ranks) -> None:
    [(plain, found)] = ranks(1).run(_beside_plain)
    assert found == pytest.approx(plain, rel=1e-5)


def _alternating() -> tuple[int, bool]:
    """Traces of calls in which now one, now another tensor has as many elements as the batch; all as one process."""
    torch.manual_seed(0)
    module = Beside((False, False))
    model = pyrannc.RaNNCModule(module, torch.optim.SGD(module.parameters(), lr=0.1))
    equal = True
    for rows in (4, 6, 4, 6, 5, 4, 6):
        given = torch.rand(rows, WIDTH), torch.rand(4), torch.rand(6)
        loss = model(*given)
        loss.backward()
        equal &= torch.allclose(loss, module(*given))
    return model._variants.traced, equal


def test_what_has_had_no_rows_is_not_captured_for_ever(ranks: Ranks) -> None:
    [(traced, equal)] = ranks(1).run(_alternating)
    assert traced <= 3
    assert equal


def _cut_from_now_on() -> str:
    """A later call deploys the model anew, with several microbatches."""

    class Grows(Beside):
        def __init__(self) -> None:
            super().__init__((False,))
            self.more = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor, *beside: Tensor) -> Tensor:
            return super().forward(self.more(x) if self.training else x, *beside)

    module = Grows().eval()
    model = pyrannc.RaNNCModule(module, torch.optim.SGD(module.parameters(), lr=0.1))
    given = torch.rand(ROWS, WIDTH), torch.rand(ROWS)
    model(*given)
    model.train()
    model._config = replace(model._config, pipeline_num=2)
    with pytest.raises(pyrannc.InputError) as caught:
        model(*given)
    return str(caught.value)


def test_what_was_taken_for_granted_is_proven_before_a_batch_is_cut(ranks: Ranks) -> None:
    [text] = ranks(1).run(_cut_from_now_on)
    assert "may have the rows of the batch or none" in text


def _too_few() -> str:
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH))
    module.forward = lambda x, labels: nn.functional.cross_entropy(module[0](x), labels)  # type: ignore[method-assign]  # its own
    model = pyrannc.RaNNCModule(module, torch.optim.SGD(module.parameters(), lr=0.1))
    model(torch.rand(ROWS, WIDTH), torch.zeros(ROWS, dtype=torch.long)).backward()
    with pytest.raises(pyrannc.RaNNCError) as caught:
        model(torch.rand(ROWS - 1, WIDTH), torch.zeros(ROWS, dtype=torch.long))
    return str(caught.value)


def test_labels_of_another_batch_are_an_error_that_says_so(ranks: Ranks) -> None:
    [text] = ranks(1).run(_too_few)
    assert "batch_size" in text


def _failed(broken: int) -> tuple[str, float]:
    """What a call raises whose capture fails on one rank with an error that is not ours, and after how long."""
    module = Beside((True,))
    model = pyrannc.RaNNCModule(module, torch.optim.SGD(module.parameters(), lr=0.1))
    x, mask = torch.rand(ROWS, WIDTH) + process.get_rank(), torch.ones(ROWS)
    start = time.monotonic()

    def fail(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("no memory for it")

    try:
        if process.get_rank() == broken:
            with patch.object(alike, "capture_sample", fail):
                model(x, mask)
        else:
            model(x, mask)
    except (RuntimeError, pyrannc.RaNNCError) as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - start
    return "", 0.0


def test_a_failure_of_one_rank_is_that_of_all_while_rows_are_in_doubt(ranks: Ranks) -> None:
    (healthy, waited_s), (failed, _) = ranks(2).run(_failed, 1)
    assert "no memory for it" in failed
    assert "no memory for it" in healthy
    assert waited_s < 10
