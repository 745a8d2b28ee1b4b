"""Arguments that are lists with an item for each row of the batch, as of images or of targets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from pyrannc.errors import InputError

ADVICE = (
    "A list with an item for each row of the batch cannot be divided: make one tensor of it with the batch as "
    "dimension 0 (torch.stack, or nn.utils.rnn.pad_sequence with a tensor of lengths) and take it apart in the model"
)


def refuse_lists_of_rows(args: Sequence[Any], kwargs: dict[str, Any], tensors: Sequence[Tensor], rows: int) -> None:
    """Raises InputError where the number of rows is told by the items of a list alone.

    An extent that they share may as well be that of something else, with an item for each row.

    Args:
        args: positional arguments.
        kwargs: named arguments.
        tensors: of both, in order.
        rows: dimension 0 of the first tensor with dimensions.
    """
    named = [
        *((str(place), item) for place, item in enumerate(args)),
        *((repr(key), item) for key, item in kwargs.items()),
    ]
    found = [item for name, argument in named for item in _tensors(argument, f"argument {name}", inside=False)]
    if list(map(id, tensors)) != [id(tensor) for tensor, *_ in found]:
        # There are containers of other kinds.
        return
    with_rows = [(name, inside) for tensor, name, inside in found if tensor.dim() and tensor.shape[0] == rows]
    if with_rows and all(inside for _, inside in with_rows):
        raise InputError(
            f"the batch size cannot be told: {with_rows[0][0]} stands in a list, and no tensor outside of one has "
            f"{rows} rows. {ADVICE}. If each tensor of the list has the batch as dimension 0, say so by naming the "
            "argument: RaNNCModule(..., batch_arguments=[...])"
        )


def _tensors(item: Any, name: str, *, inside: bool) -> Iterator[tuple[Tensor, str, bool]]:
    """Tensors with their place, and whether they stand in a list of several alike."""
    if isinstance(item, Tensor):
        yield item, name, inside
    elif type(item) is dict:
        for key, value in item.items():
            yield from _tensors(value, f"{name}[{key!r}]", inside=inside)
    elif type(item) in (list, tuple):
        alike = len(item) > 1 and len({_kind(value) for value in item}) == 1
        for index, value in enumerate(item):
            yield from _tensors(value, f"{name}[{index}]", inside=inside or alike)


def _kind(item: Any) -> Any:
    if isinstance(item, Tensor):
        return item.dtype, item.dim()
    return frozenset(item) if isinstance(item, dict) else object()
