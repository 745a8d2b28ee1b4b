"""Sizes that parts of the model were tried with, such as those of images: other batches must have no others."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from pyrannc.capture.reads.assumptions import Assumption, Question
from pyrannc.capture.user.source import Place

_SHOWN = 4
_ADVICE = (
    "few integers of each row are taken for sizes, as of images, which were tried as the first batch had them: bring "
    "rows of those sizes alone; and what is as long as the longest of the rows at hand needs a length of its own "
    "(pad_packed_sequence: total_length)"
)


def known_sizes(inputs: Sequence[Tensor], per_row: Mapping[int, int], where: Place) -> Assumption:
    """That each row of some inputs is one of those that stand there now.

    Args:
        inputs: of a call.
        per_row: by place of an input, the elements of dimension 0 of each row.
        where: they are used.
    """
    kinds = torch.unique(_by_row(inputs, per_row), dim=0)

    def ask(tensors: Sequence[Tensor]) -> list[Tensor]:
        rows = _by_row(tensors, per_row)
        return [(rows.unsqueeze(1) == kinds.to(rows.device)).all(-1).any(1).all()]

    question = Question(ask, lambda numbers: bool(numbers[0]), frozenset(per_row))
    told = ", ".join([*map(str, kinds[:_SHOWN].tolist()), *["..."] * (len(kinds) > _SHOWN)])
    return Assumption("sizes for each row", f"some of {told}", where, question=question, answer=True, advice=_ADVICE)


def _by_row(tensors: Sequence[Tensor], per_row: Mapping[int, int]) -> Tensor:
    """The integers of each row, one row after another."""
    own = [(tensors[place], count) for place, count in sorted(per_row.items())]
    return torch.cat([t.reshape(t.shape[0] // count, count * math.prod(t.shape[1:])).long() for t, count in own], 1)
