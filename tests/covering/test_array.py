"""The covering array covers, and has nothing that is not possible."""

from __future__ import annotations

from itertools import combinations, product

from .array import FACTORS, ROWS, Row, covering, possible

_NAMES = list(FACTORS)


def _is_possible(levels: dict[str, object]) -> bool:
    """Some row with these levels is possible."""
    choices = [(levels[name],) if name in levels else FACTORS[name] for name in _NAMES]
    return any(possible(Row(*row)) for row in product(*choices))


def test_any_two_levels_meet_in_a_row_unless_that_is_impossible() -> None:
    for first, second in combinations(_NAMES, 2):
        met = {(getattr(row, first), getattr(row, second)) for row in ROWS}
        for one, other in product(FACTORS[first], FACTORS[second]):
            assert ((one, other) in met) == _is_possible({first: one, second: other}), (one, other)


def test_impossible_are_divisions_of_nothing_alone() -> None:
    assert all(possible(row) for row in ROWS)
    lonely = [layout for layout in FACTORS["layout"] if not layout.has_replicas]
    impossible = [
        (zero, layout)
        for zero, layout in product(FACTORS["zero"], FACTORS["layout"])
        if not _is_possible({"zero": zero, "layout": layout})
    ]
    assert impossible == [(zero, layout) for zero in ("1", "2", "3") for layout in lonely]


def test_rows_are_few_and_the_first_four_have_all_precisions_levels_and_numbers_of_stages() -> None:
    assert len(FACTORS["precision"]) * len(FACTORS["layout"]) <= len(ROWS) <= 27
    assert {row.precision for row in ROWS[:4]} == set(FACTORS["precision"])
    assert {row.zero for row in ROWS[:4]} == set(FACTORS["zero"])
    assert {row.layout.stages for row in ROWS[:4]} == {1, 2, 3}


def test_a_known_array() -> None:
    """Four rows are the fewest for three factors of two levels."""
    rows = covering({"a": (0, 1), "b": (0, 1), "c": (0, 1)}, lambda levels: True)
    assert rows == [(0, 0, 0), (0, 1, 1), (1, 0, 1), (1, 1, 0)]
