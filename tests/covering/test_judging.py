"""The judge finds what is wrong, also where numbers are rounded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.contract.job import Note

from .array import FACTORS, Row
from .judging import Error, differences, errors, kind_of, together, unlike, worse, worse_kinds
from .precision import PRECISIONS
from .running import run_plain

PRECISION = PRECISIONS["bfloat16 autocast"]
ROW = Row("bfloat16 autocast", "off", FACTORS["layout"][0], "inside", 1, 0.1)
PLAIN = run_plain("chain", ROW, PRECISION)
TRUTH = run_plain("chain", ROW, PRECISION.truth)
GRADIENTS = sorted({name for name, _, _ in PLAIN if kind_of(name) == "gradient"})


def changed(name: str, change: Callable[[Any], Any]) -> list[Note]:
    """The notes of one process with other numbers under a name."""
    return [(note, kind, change(value) if note == name else value) for note, kind, value in PLAIN]


def test_one_process_is_as_near_to_the_truth_as_itself() -> None:
    by_name = errors(PLAIN, PLAIN, TRUTH)
    assert {kind_of(name) for name in by_name} == {"loss", "norm", "gradient", "state"}
    assert worse(by_name, PRECISION.rounding) == []
    assert worse_kinds([by_name]) == []
    assert unlike(PLAIN, TRUTH) != []
    assert unlike(PLAIN, PLAIN) == []


@pytest.mark.parametrize("name", [*GRADIENTS, "loss", "norm"])
def test_a_tenth_too_little_is_found(name: str) -> None:
    by_name = errors(changed(name, lambda value: value * 0.9), PLAIN, TRUTH)
    (text,) = worse(by_name, PRECISION.rounding)
    assert text.startswith(f"{name} is off by")


def test_three_times_the_error_everywhere_is_found() -> None:
    triple = [
        (name, kind, right + 3 * (value.double() - right))
        for (name, kind, value), (_, _, right) in zip(PLAIN, TRUTH, strict=True)
    ]
    by_name = errors(triple, PLAIN, TRUTH)
    assert worse(by_name, PRECISION.rounding) == []
    assert {text.partition(":")[0] for text in worse_kinds([by_name, by_name])} == {"loss", "norm", "gradient", "state"}


def test_norms_that_are_noted_in_float64_may_be_off_by_a_rounding_of_float32() -> None:
    rounding = torch.finfo(torch.float32).eps / 2

    def told(share: float) -> list[str]:
        return worse_kinds(
            [{"norm": Error(share * rounding * 9.0, 0.0, 9.0, torch.finfo(torch.float64).eps / 2, True)}]
        )

    assert told(0.9) == []
    assert len(told(1.1)) == 1


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_not_finite_is_found(value: float) -> None:
    damaged = changed(GRADIENTS[0], lambda tensor: torch.full_like(tensor, value))
    assert unlike(damaged, PLAIN) != []
    assert worse(errors(damaged, PLAIN, TRUTH), PRECISION.rounding) != []


def test_other_types_and_missing_notes_are_found() -> None:
    assert unlike(changed("loss", lambda loss: loss.double()), PLAIN) != []
    assert unlike(PLAIN[:-1], PLAIN) != []
    assert differences(PLAIN, PLAIN) == []
    assert differences(changed("loss", lambda loss: loss * (1 + 1e-6)), PLAIN) != []


def test_ranks_with_other_numbers_are_found() -> None:
    output: list[Note] = [("output", "rows", torch.arange(2.0)), ("loss", "same", torch.ones(()))]
    notes, wrong = together([output, output])
    assert wrong == []
    assert torch.equal(notes[0][2], torch.tensor([0.0, 1.0, 0.0, 1.0]))
    other: list[Note] = [output[0], ("loss", "same", torch.ones(()) + 1e-7)]
    assert together([output, other])[1] == ["loss on rank 1, leaf 0: differs by 1.19e-07"]
    assert together([output, other[:1]])[1] == ["[2, 1] notes"]
