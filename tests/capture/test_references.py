"""What a forward reads by way of weak references and proxies is seen to change, and nothing else of those objects."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pyrannc.call.guards import ModuleGuards
from pyrannc.capture import capture
from pyrannc.capture.user.references import referent, referents_in


class Trainer:
    """Holds what a model reads by a reference, and what it does not."""

    def __init__(self) -> None:
        self.scale = 2.0
        self.nested = SimpleNamespace(factor=3.0)
        self.step = 0
        self.loss = torch.zeros(())


TRAINER = Trainer()
REFERENCE = weakref.ref(TRAINER)
PROXY: Any = weakref.proxy(TRAINER)
ENTRIES = [REFERENCE]


class Refers(nn.Module):
    """Goes by an object that it has only references to."""

    def __init__(self, run: Callable[[Any, Tensor], Tensor], trainer: Trainer) -> None:
        super().__init__()
        self.run = run
        self.reference = weakref.ref(trainer)
        self.proxy = weakref.proxy(trainer)
        self.held = SimpleNamespace(by=[weakref.ref(trainer)])

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x + 1)


def by_reference(model: Any, x: Tensor) -> Tensor:
    return x * model.reference().scale  # type: ignore[no-any-return]


def by_proxy(model: Any, x: Tensor) -> Tensor:
    return x * model.proxy.scale  # type: ignore[no-any-return]


def by_one_that_is_held(model: Any, x: Tensor) -> Tensor:
    return x * model.held.by[0]().scale  # type: ignore[no-any-return]


def by_nested(model: Any, x: Tensor) -> Tensor:
    return x * model.proxy.nested.factor  # type: ignore[no-any-return]


def by_global(_: Any, x: Tensor) -> Tensor:
    trainer = REFERENCE()
    return x if trainer is None else x * trainer.scale


def by_global_proxy(_: Any, x: Tensor) -> Tensor:
    return x * PROXY.scale  # type: ignore[no-any-return]


def by_entry(_: Any, x: Tensor) -> Tensor:
    return x if (trainer := ENTRIES[0]()) is None else x * trainer.scale


BY = [by_reference, by_proxy, by_one_that_is_held, by_nested, by_global, by_global_proxy, by_entry]


def guarded(run: Callable[[Any, Tensor], Tensor], trainer: Trainer) -> ModuleGuards:
    model = nn.Sequential(nn.Linear(3, 3), Refers(run, trainer))
    found = capture(model, (torch.randn(4, 3),), {}, device=torch.device("cpu"), rows=4)
    return ModuleGuards(model, found.python_state)


@pytest.mark.parametrize("run", BY)
def test_what_is_read_behind_a_reference_is_seen_to_change(
    run: Callable[[Any, Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    guards = guarded(run, TRAINER)
    monkeypatch.setattr(TRAINER, "step", 1)
    monkeypatch.setattr(TRAINER, "loss", torch.ones(()))
    assert guards.hold(), "the model does not read what a trainer counts"
    monkeypatch.setattr(TRAINER if run is not by_nested else TRAINER.nested, "factor", 4.0, raising=False)
    monkeypatch.setattr(TRAINER, "scale", 4.0)
    assert not guards.hold()
    guards.changed()


@pytest.mark.parametrize("run", [by_reference, by_proxy])
def test_that_the_object_is_no_more_is_seen(run: Callable[[Any, Tensor], Tensor]) -> None:
    trainer = Trainer()
    guards = guarded(run, trainer)
    assert guards.hold()
    del trainer
    assert not guards.hold()


def test_what_references_stand_for() -> None:
    trainer = Trainer()
    references: list[Any] = [
        weakref.ref(trainer),
        weakref.proxy(trainer),
        weakref.proxy(test_what_references_stand_for),
    ]
    assert [referent(item) for item in references] == [trainer, trainer, test_what_references_stand_for]
    assert [*referents_in([1, {"a": (references[:2], SimpleNamespace(b=references[0]))}])] == [trainer] * 3
    del trainer
    assert [referent(item) for item in references[:2]] == [None, None]
