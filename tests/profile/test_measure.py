"""What is measured of one Block."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import pytest
import torch

from pyrannc.capture.torch_internals.levels import functorch_is_active
from pyrannc.core.profile import BlockPoint
from pyrannc.profile.block import BlockCode
from pyrannc.profile.measure import BlockMeter, slowed_down
from pyrannc.profile.profiler import Subject, row_counts, share_out

from .models import CPU, WIDTH, Cholesky, Layers, Mapped, Masked, Positions, Residual, block, subject

MORE_THAN_ANY_MEMORY = 1 << 46


@pytest.fixture(scope="module")
def meter() -> BlockMeter:
    return BlockMeter(CPU)


def test_the_first_call_may_be_an_evaluation() -> None:
    with torch.no_grad():
        BlockMeter(CPU)


def points(meter: BlockMeter, subject: Subject, place: int) -> list[BlockPoint] | None:
    return meter.points(f"block {place}", lambda: block(subject, place), subject.row_counts)


@pytest.fixture(scope="module")
def layers() -> Subject:
    return subject(Layers(), [torch.randn(4, WIDTH)], (1, 64, 8192))


def holds(claim: Callable[[], bool]) -> bool:
    """True when a claim about times holds in one of several measurements: other programs may disturb some."""
    return any(claim() for _ in range(5))


def test_costs_rise_with_the_rows(meter: BlockMeter, layers: Subject) -> None:
    def times_rise(place: int) -> bool:
        first, _, last = points(meter, layers, place) or []
        return first.forward_us < last.forward_us and first.backward_us < last.backward_us

    hashes = layers.blocks.hashes
    for place in sorted({hashes.index(each) for each in hashes}):
        found = points(meter, layers, place)
        assert found is not None
        assert [point.rows for point in found] == [1, 64, 8192]
        assert all(point.fits and point.forward_us > 0 and point.backward_us > 0 for point in found)
        first, middle, last = found
        assert first.saved_bytes < middle.saved_bytes < last.saved_bytes
        assert first.workspace_bytes <= middle.workspace_bytes <= last.workspace_bytes
        assert holds(partial(times_rise, place))


def test_memory_is_exact(meter: BlockMeter, layers: Subject) -> None:
    linear, tanh = (points(meter, layers, place) for place in (2, 3))
    assert linear is not None
    assert tanh is not None
    for point in [*linear, *tanh]:
        assert point.saved_bytes == point.rows * WIDTH * 4
    # The gradient of what came in; of a linear layer also that of the weight, before it is added up.
    assert tanh[-1].workspace_bytes == tanh[-1].rows * WIDTH * 4
    assert linear[-1].workspace_bytes == linear[-1].rows * WIDTH * 4 + WIDTH * WIDTH * 4


def test_working_copies_are_no_part_of_a_block(meter: BlockMeter) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        converted = subject(Layers(), [torch.randn(4, WIDTH)], (64,))
    assert len(converted.blocks.source.conversions) == len(list(Layers().parameters()))
    (linear,) = points(meter, converted, 3) or []
    assert linear.saved_bytes == linear.rows * WIDTH * 2
    assert linear.workspace_bytes == linear.rows * WIDTH * 2 + WIDTH * WIDTH * 2


def test_backwards_by_input_and_by_weight(meter: BlockMeter, layers: Subject) -> None:
    def parts_are_less() -> bool:
        (*_, linear) = points(meter, layers, 2) or []
        parts = (linear.backward_input_us, linear.backward_weight_us)
        return min(parts) > 0 and max(parts) < linear.backward_us < 2 * sum(parts)

    assert holds(parts_are_less)
    (*_, tanh) = points(meter, layers, 3) or []
    assert tanh.backward_weight_us == 0
    assert tanh.backward_input_us > 0
    # Nobody asks for the gradient of the model's input.
    (*_, first) = points(meter, layers, 0) or []
    assert first.backward_input_us == 0
    assert first.backward_weight_us > 0


def test_no_backward_without_gradients(meter: BlockMeter) -> None:
    frozen = subject(Layers(1).requires_grad_(False), [torch.randn(4, WIDTH)], (4,))
    for place in range(len(frozen.blocks.hashes)):
        (point,) = points(meter, frozen, place) or []
        assert point.forward_us > 0
        assert (point.backward_us, point.backward_input_us, point.backward_weight_us) == (0, 0, 0)


def test_lookups_masks_and_losses_can_be_measured(meter: BlockMeter) -> None:
    positions = subject(Positions(), [torch.randint(0, 50, (4, 8))], (1, 8))
    assert len(positions.blocks.hashes) > 4
    for place in range(len(positions.blocks.hashes)):
        assert [point.fits for point in points(meter, positions, place) or []] == [True, True]


def test_out_of_memory_is_an_answer(meter: BlockMeter) -> None:
    huge = subject(Layers(1), [torch.randn(4, WIDTH)], (2, MORE_THAN_ANY_MEMORY))
    for place in range(len(huge.blocks.hashes)):
        fits, too_large = points(meter, huge, place) or []
        assert fits.fits
        assert too_large == BlockPoint(MORE_THAN_ANY_MEMORY, fits=False)


def test_larger_counts_than_one_that_does_not_fit_are_not_tried(meter: BlockMeter) -> None:
    huge = subject(Layers(1), [torch.randn(4, WIDTH)], (MORE_THAN_ANY_MEMORY, 2 * MORE_THAN_ANY_MEMORY))
    assert points(meter, huge, 0) == [BlockPoint(MORE_THAN_ANY_MEMORY, fits=False)]


def test_a_block_that_fails_on_made_up_data_is_left_out(meter: BlockMeter, caplog: pytest.LogCaptureFixture) -> None:
    cholesky = subject(Cholesky(), [torch.randn(4, 5, 5)], (2,))
    with caplog.at_level(logging.INFO, logger="pyrannc"):
        found = [points(meter, cholesky, place) for place in range(len(cholesky.blocks.hashes))]
    assert found.count(None) == 1
    (line,) = [record.message for record in caplog.records if record.name.startswith("pyrannc")]
    assert "cannot be measured" in line
    assert "positive-definite" in line


def test_shares_are_even_and_complete() -> None:
    times_us = {f"block {number}": float(number) for number in range(1, 12)}
    shares = share_out(times_us, 3)
    assert sorted(block for share in shares for block in share) == sorted(times_us)
    sums = [sum(times_us[block] for block in share) for share in shares]
    assert max(sums) - min(sums) <= 2
    assert share_out(times_us, 20)[11:] == [[]] * 9


@pytest.mark.parametrize(("batch", "ranks"), [(1, 8), (7, 2), (64, 8), (100, 3), (4096, 4)])
def test_row_counts_span_what_a_rank_can_have(batch: int, ranks: int) -> None:
    counts = row_counts(batch, ranks)
    assert counts[0] == 1
    assert counts[-1] == -(-batch // ranks)
    assert len(counts) <= 4
    assert list(counts) == sorted(set(counts))


def test_gradients_that_later_blocks_have_begun_are_added_to() -> None:
    """The first layer's result goes into both branches, the second one's only on."""
    both = subject(Residual(), [torch.randn(4, WIDTH)], (4,))
    added, fresh = 0, 0
    for place in range(len(both.blocks.hashes)):
        code = block(both, place)
        feeds = code.feeds(4)
        run = code.prepare_backward(feeds, code.forward(4, feeds))
        added += len(run.inputs) - len(run.fresh)
        fresh += len(run.fresh)
    assert added == 1
    assert fresh > 1


def test_batch_free_ops_with_rows_are_made_for_the_rows() -> None:
    """A mask that every layer uses comes in, one that only one layer uses is part of it."""
    masked = subject(Masked(), [torch.randn(4, 8, WIDTH)], (3,))
    for place, part in enumerate(masked.blocks.parts.stages):
        code = block(masked, place)
        feeds = code.feeds(3)
        results = code.forward(3, feeds)
        crossing = [value for value in part.sends if value in results]
        assert all(results[value].shape[0] == 3 for value in crossing)
    (fill,) = {op for op, node in enumerate(masked.blocks.source.captured.op_nodes) if "masked_fill" in node.name}
    assert [fill in masked.blocks.blocks.ops(place) for place in range(len(masked.blocks.parts.stages))].count(
        True
    ) == 1


def test_times_are_those_of_a_device_that_is_always_busy(layers: Subject) -> None:
    meter = BlockMeter(CPU)
    found = meter.points("block", lambda: block(layers, 2), layers.row_counts, leads=True)
    assert found is not None
    assert (meter.slowdown, meter.message_slowdown) == (1.0, None), "a host is not measured for it"
    for before in found:
        after = slowed_down(before, 1.25)
        for name in ("forward_us", "backward_us", "backward_input_us", "backward_weight_us"):
            assert getattr(after, name) == pytest.approx(1.25 * getattr(before, name))
        assert (after.saved_bytes, after.backward_host_us) == (before.saved_bytes, before.backward_host_us)
    assert slowed_down(BlockPoint(1, fits=False), 1.25) == BlockPoint(1, fits=False)


def measuring(monkeypatch: pytest.MonkeyPatch, code: BlockCode, plain: BlockPoint, compiled: BlockPoint) -> BlockMeter:
    """A meter that finds such costs of operators, and of code that compiles."""
    monkeypatch.setattr(code, "compile", lambda rows, feeds: True)
    monkeypatch.setattr(code, "leave_as_it_is", lambda: None)
    points, meter = iter([plain, compiled]), BlockMeter(CPU)
    monkeypatch.setattr(meter, "_point", lambda *_, **__: next(points))
    return meter


@pytest.mark.parametrize("replayed", [False, True])
def test_a_slow_host_does_not_count_where_steps_are_replayed(
    layers: Subject, monkeypatch: pytest.MonkeyPatch, replayed: bool
) -> None:
    """Compiled code that takes the device half as long, and the host ten times as long."""
    code = block(layers, 2)
    points = BlockPoint(1, True, 20.0, 20.0, 10.0, 10.0), BlockPoint(1, True, 10.0, 10.0, 100.0, 100.0)
    meter = measuring(monkeypatch, code, *points)
    monkeypatch.setattr(meter._meter, "where_replays_are_made", nullcontext)
    monkeypatch.setattr(meter._meter, "replays", replayed)
    found = meter.points("block", lambda: code, (1,))
    assert found is not None
    assert [point.forward_us for point in found] == [10.0 if replayed else 20.0]
    assert meter.eager_spans == (set() if replayed else {code.span_hash})


@pytest.mark.parametrize(
    ("kept_bytes", "takes_us", "is_taken"), [(50, 25.0, True), (95, 25.0, False), (95, 20.0, True), (50, 40.0, False)]
)
def test_code_under_a_memory_budget_may_take_longer_if_it_keeps_less(
    layers: Subject, monkeypatch: pytest.MonkeyPatch, kept_bytes: int, takes_us: float, is_taken: bool
) -> None:
    code = block(layers, 2)
    monkeypatch.setattr(type(code), "keeps_less", True)
    plain, compiled = ((20.0, 100), (takes_us, kept_bytes))
    points = (BlockPoint(1, True, us, us, us, us, saved_bytes=saved) for us, saved in (plain, compiled))
    meter = measuring(monkeypatch, code, *points)
    meter.points("block", lambda: code, (1,))
    assert meter.eager_spans == (set() if is_taken else {code.span_hash})


def test_what_all_layers_take_leads(layers: Subject) -> None:
    hashes = layers.spans.hashes
    assert layers.leading in hashes
    assert hashes.count(layers.leading) == max(hashes.count(each) for each in hashes)


def test_memory_that_runs_out_in_a_vmap_ends_its_level(meter: BlockMeter) -> None:
    mapped = subject(Mapped(), [torch.randn(4, WIDTH)], (4, 8))

    class Fails(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            if func is torch.ops.aten.tanh.default and len(args[0]) == 8:
                raise torch.OutOfMemoryError("simulated")
            return func(*args, **(kwargs or {}))

    with Fails():
        found = [points(meter, mapped, place) or [] for place in range(len(mapped.blocks.hashes))]
    assert [False] in [[point.fits for point in each if not point.fits] for each in found]
    assert not functorch_is_active()
    assert torch.vmap(torch.sin)(torch.ones(2)).shape == (2,)
