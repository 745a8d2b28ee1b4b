"""A forward that counts the ranks or talks with them is refused, under whatever names it has torch's functions."""

from __future__ import annotations

import linecache
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.ranks import RankPool
from torch import Tensor, nn
from torch.distributed import ProcessGroup, all_gather_object, all_reduce, get_world_size, isend
from torch.distributed import _functional_collectives as functional
from torch.distributed.nn.functional import all_gather

import pyrannc
from pyrannc.capture import CaptureOptions, capture
from pyrannc.capture.reads.as_one_process import as_one_process
from pyrannc.capture.torch_internals.patching import GROUP_SIZE, RANK_NOT_IN_GROUP
from pyrannc.capture.user.source import SourceTracker
from pyrannc.errors import CaptureError
from pyrannc.job.process import ensure_process_group

Ranks = Callable[[int], RankPool]


class Calls(nn.Module):
    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x)


def world() -> ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


class SumsOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        total = x.clone()
        all_reduce(total)  # here
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


def counts(x: Tensor) -> Tensor:
    return x * dist.get_world_size()  # here


def counts_by_name(x: Tensor) -> Tensor:
    return x * get_world_size()  # here


def counts_by_rannc(x: Tensor) -> Tensor:
    return x * pyrannc.get_world_size()  # here


def counts_a_group(x: Tensor) -> Tensor:
    return x * world().size()  # here


def counts_by_environment(x: Tensor) -> Tensor:
    return x * int(os.environ["WORLD_SIZE"])  # here


def counts_by_environment_if_set(x: Tensor) -> Tensor:
    return x * int(os.getenv("WORLD_SIZE", "1"))  # here


def counts_by_all_settings(x: Tensor) -> Tensor:
    return x * int(dict(os.environ)["WORLD_SIZE"])  # here


def compares_in_a_copy(x: Tensor) -> Tensor:
    return x if os.environ.copy()["WORLD_SIZE"] == "1" else -x  # here


def sums_by_name(x: Tensor) -> Tensor:
    all_reduce(x)  # here
    return x


def sums_without_gradients(x: Tensor) -> Tensor:
    with torch.no_grad():
        all_reduce(total := x.sum())  # here
    return x - total


def sums_in_a_group(x: Tensor) -> Tensor:
    world().allreduce([x]).wait()  # here
    return x


def sums_by_function(x: Tensor) -> Any:
    return functional.all_reduce(x, "sum", world())  # here


def sums_by_operator(x: Tensor) -> Any:
    operators = torch.ops._c10d_functional
    return operators.wait_tensor(operators.all_reduce(x, "sum", world().group_name))  # here


def sums_by_overload(x: Tensor) -> Any:
    return torch.ops._c10d_functional.all_reduce.default(x, "sum", world().group_name)  # here


def gathers_with_gradients(x: Tensor) -> Tensor:
    return torch.cat(all_gather(x))  # type: ignore[no-untyped-call]  # here


def gathers_objects(x: Tensor) -> Tensor:
    all_gather_object([None] * dist.get_rank(), x.shape[1])  # here
    return x


def sends(x: Tensor) -> Tensor:
    dist.send(x, 1 - dist.get_rank())  # here
    return x


def sends_in_batches(x: Tensor) -> Tensor:
    message = dist.P2POp(isend, x, 1 - dist.get_rank())
    for work in dist.batch_isend_irecv([message]):  # here
        work.wait()
    return x


COUNTING = {
    counts: "",
    counts_by_name: "",
    counts_by_rannc: "",
    counts_a_group: "",
    counts_by_environment: "",
    counts_by_environment_if_set: "",
    counts_by_all_settings: "",
    compares_in_a_copy: "",
}
TALKING = {
    sums_by_name: "torch.distributed.all_reduce",
    sums_without_gradients: "torch.distributed.all_reduce",
    sums_in_a_group: "ProcessGroup.allreduce",
    sums_by_operator: "torch.ops._c10d_functional.all_reduce",
    sums_by_overload: "torch.ops._c10d_functional.all_reduce.default",
    sums_by_function: "torch.distributed._functional_collectives.all_reduce",
    gathers_with_gradients: "torch.distributed.nn.functional.all_gather",
    gathers_objects: "torch.distributed.all_gather_object",
    sends: "torch.distributed.send",
    sends_in_batches: "torch.distributed.batch_isend_irecv",
    SumsOverRanks.apply: "torch.distributed.all_reduce",
}
FUNCTIONS = [*COUNTING, *TALKING]


def refusal(function: Callable[[Tensor], Any], *, whole: bool = False) -> str:
    """The message; empty where the forward is captured."""
    ensure_process_group()
    model, options = nn.Sequential(nn.Linear(3, 3), Calls(function)), CaptureOptions(("1",) if whole else ())
    try:
        capture(model, (torch.randn(4, 3),), {}, device=torch.device("cpu"), rows=4, options=options)
    except CaptureError as error:
        return str(error)
    return ""


def refusal_of(number: int, whole: bool) -> str:
    return refusal(FUNCTIONS[number], whole=whole)


@pytest.mark.parametrize("whole", [False, True], ids=["captured", "whole"])
@pytest.mark.parametrize("number", range(len(FUNCTIONS)), ids=[function.__name__ for function in FUNCTIONS])
def test_what_sees_other_ranks_is_refused(ranks: Ranks, number: int, whole: bool) -> None:
    function = FUNCTIONS[number]
    for message in ranks(2).run(refusal_of, number, whole, timeout_s=30):
        told = "asks for the number of ranks, 2." if function in COUNTING else TALKING[function]
        assert message.startswith("sub-module '1' (")
        assert told in message
        line = int(message.split(f"{__file__}:")[1].split(")")[0])
        assert "# here" in linecache.getline(__file__, line)


class SumsGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        all_reduce(total := gradients[0].clone())  # here
        return total


class SumsGradientsByOverload(SumsGradients):
    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return sums_by_overload(gradients[0])


class SumsGradientsWhereItCan(SumsGradients):
    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        with suppress(Exception):
            all_reduce(gradients[0])  # here
        return gradients[0]


class Norms(list[float]):
    """What a hook notes of gradients."""

    def __call__(self, gradient: Tensor) -> None:
        self.append(1.0)
        float(gradient.norm())


class DividesByNorm(SumsGradients):
    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] / float(gradients[0].norm())


class SumsOfNothing(SumsGradients):
    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        raise ArithmeticError("only the gradients of a step will do")


NORMS = Norms()


def sums_in_a_hook(x: Tensor) -> Tensor:
    y = x * 1
    y.register_hook(lambda gradient: sums_by_name(gradient))
    return y


def notes_in_a_hook(x: Tensor) -> Tensor:
    y = x * 1
    y.register_hook(NORMS)
    return y


BACKWARDS: dict[Callable[[Tensor], Any], str] = {
    SumsGradients.apply: "torch.distributed.all_reduce",
    SumsGradientsByOverload.apply: "torch.ops._c10d_functional.all_reduce.default",
    SumsGradientsWhereItCan.apply: "torch.distributed.all_reduce",
    sums_in_a_hook: "torch.distributed.all_reduce",
}


def refusals_of_backwards() -> list[str]:
    return [*map(refusal, BACKWARDS), refusal(notes_in_a_hook), refusal(DividesByNorm.apply), *map(str, NORMS)]


WHOLE = (SumsGradients.apply, SumsGradientsByOverload.apply)


def refusals_of_whole_parts() -> list[str]:
    return [refusal(function, whole=True) for function in (*WHOLE, DividesByNorm.apply, SumsOfNothing.apply)]


def test_backwards_of_what_stays_whole_are_refused_likewise(ranks: Ranks) -> None:
    for messages in ranks(2).run(refusals_of_whole_parts, timeout_s=30):
        for message, function in zip(messages, WHOLE, strict=False):
            assert BACKWARDS[function] in message
        assert messages[len(WHOLE) :] == ["", ""]


def test_backwards_that_see_other_ranks_are_refused(ranks: Ranks) -> None:
    for messages in ranks(2).run(refusals_of_backwards, timeout_s=30):
        for message, told in zip(messages, BACKWARDS.values(), strict=False):
            assert told in message
            line = int(message.split(f"{__file__}:")[1].split(")")[0])
            assert "# here" in linecache.getline(__file__, line)
        assert messages[len(BACKWARDS) :] == ["", ""], "what needs numbers is let be, and notes are taken back"


def test_one_rank_counts_itself_and_talks_with_nobody_else(ranks: Ranks) -> None:
    assert ranks(1).run(patched) == [False]
    for number in range(len(COUNTING)):
        assert ranks(1).run(refusal_of, number, False) == [""]


def patched() -> bool:
    """Whether a trace of a call replaces anything."""
    ensure_process_group()
    before = GROUP_SIZE.original, RANK_NOT_IN_GROUP.original
    with as_one_process(SourceTracker(nn.Identity())):
        return before != (GROUP_SIZE.original, RANK_NOT_IN_GROUP.original)


def asks_for_nothing_else(x: Tensor) -> Tensor:
    assert dist.get_backend() == dist.get_backend(world())
    assert dist.get_rank(world()) == dist.get_rank() == int(os.environ["RANK"])
    assert dict(os.environ.items()) == os.environ.copy() == dict(os.environ) == {**os.environ}
    assert f"{os.environ | {}}" == f"{dict(os.environ)}"
    SETTINGS.update(os.environ)
    return x + 1


SETTINGS: dict[str, str] = {}


def of_silence() -> list[str]:
    assert patched()
    found = [refusal(asks_for_nothing_else), refusal(torch.nn.functional.relu)]
    assert SETTINGS["WORLD_SIZE"] == "2"
    assert int(SETTINGS["WORLD_SIZE"]) == float(SETTINGS["WORLD_SIZE"]) == 2
    return found


def test_what_asks_for_the_rank_alone_is_captured(ranks: Ranks) -> None:
    assert ranks(2).run(of_silence) == [["", ""]] * 2


def talks_elsewhere() -> list[float]:
    """What another thread sums over ranks, and torch for itself, while a call is traced."""
    ensure_process_group()
    found: list[float] = []

    def talk() -> None:
        all_reduce(total := torch.ones(()))
        found.append(total.item() * get_world_size())

    with as_one_process(SourceTracker(nn.Identity())):
        other = threading.Thread(target=talk)
        other.start()
        other.join()
        found.append(SOURCE_OF_TORCH["count"]())
    return found


SOURCE_OF_TORCH: dict[str, Any] = {"get_world_size": get_world_size}
exec(compile("def count(): return get_world_size()", nn.__file__, "exec"), SOURCE_OF_TORCH)


def test_others_count_and_talk_meanwhile(ranks: Ranks) -> None:
    assert ranks(2).run(talks_elsewhere) == [[4.0, 2]] * 2
