"""Working copies: parameters in the type that a Stage computes with, made once a call.

Where all that a Stage does with a parameter is to convert it, no microbatch converts it again. A backward leaves its
gradient on the copy; it is added up in the type of the sums.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from pyrannc.capture.torch_internals.gradients import copy_each
from pyrannc.capture.torch_internals.tensors import version
from pyrannc.store.gathered import GatheredBucket

Key = tuple[str, torch.dtype]
"""A parameter's first name, and the type of its copy."""


class WorkingCopies:
    """The copies of one rank.

    Args:
        leaves: the parameters' leaves, by first name.
        gathered: by name, parameters of which each rank keeps a part.
    """

    def __init__(self, leaves: Mapping[str, Tensor], gathered: Mapping[str, GatheredBucket]) -> None:
        self._leaves = leaves
        self._gathered = gathered
        self._copies: dict[Key, Tensor] = {}
        self._contents: dict[Key, Tensor] = {}
        self._versions: dict[Key, int] = {}
        self._lent: set[Key] = set()

    def __contains__(self, key: Key) -> bool:
        return key in self._copies

    def of(self, key: Key) -> Tensor:
        """The copy: a leaf, whose contents are anything until they are refreshed."""
        if key not in self._copies and key[0] in self._gathered:
            self._copies[key] = self._gathered[key[0]].copy(*key)
        elif key not in self._copies:
            name, dtype = key
            leaf = self._leaves[name]
            self._copies[key] = torch.empty_like(leaf, dtype=dtype).requires_grad_(leaf.requires_grad)
            # Graphs of earlier calls would take any write to the copy for a change, even of the same contents.
            self._contents[key] = self._copies[key].data
        return self._copies[key]

    @torch.no_grad()
    def refresh(self, keys: Collection[Key]) -> None:
        """Makes copies anew, which are there; those that are gathered are made by that."""
        keys = [key for key in keys if key[0] not in self._gathered]
        if not keys:
            return
        for key in keys:
            seen = version(self._leaves[key[0]])
            if key in self._lent and self._versions[key] != seen:
                self._copies[key].data = self._contents[key] = torch.empty_like(self._contents[key])
                self._lent.discard(key)
            self._versions[key] = seen
        copy_each([self._contents[key] for key in keys], [self._leaves[name].detach() for name, _ in keys])

    def lend(self, key: Key) -> Tensor:
        """A copy whose contents stay as they are, even if its backward comes after the parameter has changed."""
        copy = self._copies[key]
        if key[0] in self._gathered:
            return copy
        self._lent.add(key)
        return copy.view_as(copy)

    def clear(self) -> None:
        """Drops gradients that a failed step has left."""
        for copy in self._copies.values():
            copy.grad = None
