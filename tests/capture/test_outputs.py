"""What of a model's result a script asks for: the rest is no output of the Graph."""

from __future__ import annotations

import dataclasses
import json
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers.utils import ModelOutput

from pyrannc.capture import Captured, CaptureError, CaptureOptions, capture
from pyrannc.errors import RaNNCError

ROWS, WIDTH = 4, 3


class Pair(NamedTuple):
    loss: Tensor
    logits: Tensor


@dataclasses.dataclass
class Result:
    loss: Tensor
    parts: tuple[Tensor, Tensor]


@dataclasses.dataclass
class Fields(ModelOutput):  # type: ignore[misc]  # a class without types
    """Takes positions too, of those that are there."""

    loss: Tensor | None = None
    past: Tensor | None = None
    logits: Tensor | None = None


class Model(nn.Module):
    def __init__(self, make: Any) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.make = make

    def forward(self, x: Tensor) -> Any:
        y = self.layer(x)
        return self.make(y.square().mean(), y, self.head(y))


def captured(model: nn.Module, *outputs: str | int) -> Captured:
    options = CaptureOptions(outputs=outputs)
    return capture(model, (torch.randn(ROWS, WIDTH),), {}, device=torch.device("cpu"), rows=ROWS, options=options)


def outputs_of(found: Captured) -> int:
    return len(json.loads(found.graph_json)["outputs"])


KINDS = {
    "dict": lambda loss, y, z: {"loss": loss, "logits": y, "other": z},
    "tuple": lambda loss, y, z: (loss, y, z),
    "list": lambda loss, y, z: [loss, [y], z],
    "namedtuple": lambda loss, y, _: Pair(loss, y),
    "dataclass": lambda loss, y, z: Result(loss, (y, z)),
    "fields": lambda loss, y, _: Fields(loss=loss, logits=y),
}


@pytest.mark.parametrize(("kind", "name"), [("dict", "loss"), ("tuple", 0), ("list", 0), ("namedtuple", "loss"),
                                            ("namedtuple", 0), ("dataclass", "loss"), ("fields", "loss"),
                                            ("fields", 0)])  # fmt: skip
def test_the_rest_is_no_output(kind: str, name: str | int) -> None:
    found = captured(Model(KINDS[kind]), name)
    assert outputs_of(found) == 1
    # What only the rest needs is not computed.
    assert not any("head" in json.dumps(op) for op in json.loads(found.graph_json)["ops"])
    loss = torch.ones(())
    made = found.hand_back([loss], ((), {}))
    assert type(made) is type(Model(KINDS[kind])(torch.randn(ROWS, WIDTH)))
    assert (getattr(made, name) if isinstance(name, str) and kind != "dict" else made[name]) is loss


def test_a_position_is_of_the_fields_that_are_there() -> None:
    made = captured(Model(KINDS["fields"]), 1).hand_back([torch.ones(ROWS, WIDTH)], ((), {}))
    assert made.logits is made[1]
    with pytest.raises(RaNNCError, match="output 'loss'"):
        made.loss.backward()


def test_a_part_with_several_tensors() -> None:
    found = captured(Model(KINDS["dataclass"]), "parts")
    assert outputs_of(found) == 2


def test_using_the_rest_raises() -> None:
    made = captured(Model(KINDS["dict"]), "loss").hand_back([torch.ones(())], ((), {}))
    for use in (
        lambda: made["logits"].shape,
        lambda: made["logits"] + 1,
        lambda: 1 * made["logits"],
        lambda: torch.cat([torch.ones(2), made["logits"]]),
        lambda: torch.ones(2) - made["logits"],
        lambda: float(made["logits"]),
        lambda: made["logits"][0],
        lambda: bool(made["logits"]),
        lambda: made["logits"].numpy(),
        lambda: np.asarray(made["logits"]),
        lambda: np.array([made["logits"]], dtype=np.float32),
        lambda: np.ones(2) @ made["logits"],
        lambda: np.argmax(made["logits"], -1),
        lambda: torch.from_dlpack(made["logits"]),
        lambda: made["logits"] % 2,
        lambda: ~made["logits"],
        lambda: made["logits"].__setitem__(0, 1),
        lambda: f"{made['logits']:.2f}",
    ):
        with pytest.raises(RaNNCError, match=r"output 'logits' .* evaluation mode"):
            use()
    assert "logits" in repr(made["logits"])


def test_evaluation_returns_all() -> None:
    model = Model(KINDS["dict"]).eval()
    assert outputs_of(captured(model, "loss")) == 3


@pytest.mark.parametrize(
    ("kind", "name", "told"),
    [("dict", "los", "a dict with 'loss', 'logits', 'other'"), ("tuple", 3, "a tuple with 0, 1, 2"),
     ("dict", 0, "a dict with 'loss', 'logits', 'other'"), ("dataclass", "logits", "a Result with 'loss', 'parts'"),
     ("dataclass", 0, "a Result with 'loss', 'parts'"), ("fields", 2, "a Fields with 0, 1, 'loss', 'logits'"),
     ("fields", "past", "a Fields with 0, 1, 'loss', 'logits'")],
)  # fmt: skip
def test_what_is_not_there_is_told(kind: str, name: str | int, told: str) -> None:
    with pytest.raises(CaptureError, match=told):
        captured(Model(KINDS[kind]), name)


def test_a_lone_tensor_has_no_parts() -> None:
    with pytest.raises(CaptureError, match="the model returns one tensor"):
        captured(nn.Linear(WIDTH, WIDTH), 0)


def test_what_trains_must_be_asked_for() -> None:
    with pytest.raises(CaptureError, match="would not train"):
        captured(Model(lambda loss, y, _: (loss, y.detach())), 1)
