"""Lists with an item for each row of the batch, such as images of different sizes, as tensors that have rows.

Graphs, routes and exchanges know tensors with rows alone: a list travels as two of them for each tensor of an item, and
is a list again where code of the user stays whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from pyrannc.capture.torch_internals.tensors import pytree

from .flatten import Structure


class RowList(list[Any]):
    """A list whose length is the number of rows. It has no items: what reads them has to stay whole.

    Args:
        tensors: for each tensor of an item, the extents of all rows' (rows x dimensions), and their elements one after
            another, filled up (rows x elements).
        item: the structure of each item.
        kind: list or tuple.
    """

    def __init__(self, tensors: Sequence[Any], item: Structure, kind: type) -> None:
        super().__init__()
        self.tensors = list(tensors)
        self.item = item
        self.kind = kind

    @staticmethod
    def packed(
        items: Sequence[Sequence[Tensor]], like: Sequence[Tensor], lengths: Sequence[int], item: Structure, kind: type
    ) -> RowList:
        """From the tensors of each item.

        Args:
            items: may be none.
            like: tensors of the same types and numbers of dimensions.
            lengths: at least the numbers of elements.
        """
        tensors: list[Tensor] = []
        for place, (first, length) in enumerate(zip(like, lengths, strict=True)):
            own = [item[place] for item in items]
            # An extent of 1 comes first: a tensor without dimensions has rows as well.
            extents = torch.tensor([[1, *tensor.shape] for tensor in own], dtype=torch.long, device=first.device)
            filled = torch.zeros(len(own), length, dtype=first.dtype, device=first.device)
            for row, tensor in zip(filled, own, strict=True):
                row[: tensor.numel()] = tensor.detach().reshape(-1)
            tensors += [extents.view(len(own), 1 + first.dim()), filled]
        return RowList(tensors, item, kind)

    def unpacked(self) -> Any:
        """The list itself."""
        columns = []
        for extents, filled in zip(self.tensors[::2], self.tensors[1::2], strict=True):
            shapes = [shape[1:] for shape in extents.tolist()]
            columns.append(
                [row[: torch.Size(shape).numel()].view(shape) for row, shape in zip(filled, shapes, strict=True)]
            )
        return self.kind(self.item.rebuild(own) for own in zip(*columns, strict=True))

    def _refuse(self) -> NoReturn:
        raise TypeError("a list with an item for each row of the batch has no items yet while the model is captured")

    def __iter__(self) -> Iterator[Any]:
        self._refuse()

    def __getitem__(self, _: Any) -> Any:
        self._refuse()

    def __len__(self) -> int:
        self._refuse()

    def __bool__(self) -> bool:
        return True


def has_row_lists(item: Any) -> bool:
    """True when there are some in arguments."""
    if isinstance(item, RowList):
        return True
    children = item.values() if type(item) is dict else item if type(item) in (list, tuple) else ()
    return any(map(has_row_lists, children))


def unpacked(item: Any) -> Any:
    """Arguments with real lists."""
    if isinstance(item, RowList):
        return item.unpacked()
    if type(item) in (list, tuple):
        return type(item)(unpacked(child) for child in item)
    if type(item) is dict:
        return {key: unpacked(child) for key, child in item.items()}
    return item


pytree.register_pytree_node(
    RowList,
    lambda rows: (rows.tensors, (rows.item, rows.kind)),
    lambda tensors, context: RowList([*tensors], *context),
)
