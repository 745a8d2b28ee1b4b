"""What the ranks tell each other, over real processes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import pyrannc
from pyrannc.errors import MismatchError
from pyrannc.job import agree, process
from tests.ranks import run_ranks


def _tell_each_other() -> None:
    rank, world_size = process.get_rank(), process.get_world_size()
    for _ in range(3):
        numbers = agree.gather_numbers((rank, -(2**63), 2**63 - 1))
        assert numbers == [(other, -(2**63), 2**63 - 1) for other in range(world_size)]
        objects = agree.gather_objects({"rank": rank, "tensor": torch.arange(rank)})
        assert [(item["rank"], len(item["tensor"])) for item in objects] == [(n, n) for n in range(world_size)]
        assert agree.broadcast_object([rank]) == [0]
        assert agree.together(lambda: rank) == rank
    with pytest.raises(ValueError if rank == 1 else MismatchError, match="not on rank 1"):
        agree.together(_fails_on_one)


def _fails_on_one() -> None:
    if process.get_rank() == 1:
        raise ValueError("not on rank 1")


def _join_again_and_again(folder: str) -> None:
    _tell_each_other()
    pyrannc.recreate_all_communicators()
    _tell_each_other()
    pyrannc.clear()
    rank = process.get_rank()
    # As a program may do it: nothing tells RaNNC, and in the end the ranks have other numbers.
    for turn, number in enumerate((rank, 2 - rank)):
        store = dist.FileStore(f"{folder}/{turn}", 3)
        dist.init_process_group("gloo", store=store, rank=number, world_size=3)
        assert process.get_rank() == number
        _tell_each_other()
        dist.destroy_process_group()


def test_ranks_hear_one_another_however_often_they_join(tmp_path: Path) -> None:
    run_ranks(3, _join_again_and_again, str(tmp_path))
