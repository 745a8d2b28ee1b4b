"""Images in compiled Spans: channels last from the first convolution on, as the model has them for the user."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from pyrannc.blocks.channels_last import convolutions_of_images, images
from pyrannc.blocks.compiler import Compiler
from pyrannc.blocks.form import Meta
from pyrannc.blocks.function import StageCode
from pyrannc.blocks.randomness import Randomness
from tests.test_spans import CPU, ROWS, captured_part

CHANNELS, PIXELS = 6, 8


class Residual(nn.Module):
    def __init__(self, channels: int, groups: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1, groups=groups, bias=False)
        self.norm = nn.BatchNorm2d(channels, track_running_stats=False)
        self.last = nn.Conv2d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu_(x + self.last(functional.silu(self.norm(self.first(x)))))


class Net(nn.Module):
    """Convolutions and attention over pixels, whose features go out too, and are viewed as one dimension."""

    def __init__(self, groups: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, CHANNELS, 3, stride=2, padding=1)
        self.layers = nn.ModuleList(Residual(CHANNELS, groups) for _ in range(2))
        self.mix = nn.Linear(CHANNELS, CHANNELS)
        self.up = nn.ConvTranspose2d(CHANNELS, 4, 2, stride=2)
        self.head = nn.Linear(4 * PIXELS * PIXELS // 4, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = functional.max_pool2d(self.stem(x), 2)
        for layer in self.layers:
            x = layer(x)
        tokens = self.mix(x.flatten(2).transpose(1, 2)).softmax(1)
        x = self.up(x * tokens.transpose(1, 2).view(x.shape))
        return x, self.head(x.view(x.shape[0], -1)).tanh()


class Stage:
    """Code with and without channels last."""

    def __init__(self, model: nn.Module, x: Tensor, *, channels_last: bool) -> None:
        self.captured, self.facts, self.part = captured_part(model, x)
        self.code = StageCode(self.captured, self.facts, self.part, CPU, Randomness(CPU), channels_last=channels_last)
        self.leaves = {p.value: model.get_parameter(p.names[0]) for p in self.facts.params}
        self.tensors = {**self.leaves, self.facts.inputs[0]: x}

    def __call__(self) -> tuple[list[Tensor], tuple[Tensor, ...]]:
        results = self.code(ROWS, self.tensors)
        outputs = [results[value] for value in self.facts.outputs]
        roots = [(output * output.detach().cos()).sum() for output in outputs]
        return outputs, torch.autograd.grad(roots, list(self.leaves.values()))

    def compile(self, folder: Path) -> dict[int, Meta]:
        """Compiles all Spans; what they give, by Value."""
        compiler = Compiler(CPU, folder, lambda: ())
        known = {value: Meta.of(tensor) for value, tensor in self.tensors.items()}
        tasks = compiler.tasks(self.code, self.facts, ROWS, known, None, trains=True)
        assert {compiler.compile(task, self.code) for task in tasks} == {None}
        return {value: meta for task in tasks for value, meta in task.given(self.facts).items()}


@pytest.fixture
def x() -> Tensor:
    torch.manual_seed(0)
    return torch.randn(ROWS, 3, PIXELS, PIXELS, dtype=torch.float64)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("groups", [1, CHANNELS], ids=["dense", "depthwise"])
def test_images_have_channels_last(groups: int, x: Tensor, tmp_path: Path) -> None:
    model = Net(groups).double()
    plain, ours = (Stage(model, x, channels_last=chosen) for chosen in (False, True))
    outputs, grads = plain()
    for compiled in (False, True):
        if compiled:
            given = ours.compile(tmp_path)
            lie = {
                value
                for value, meta in given.items()
                if meta.empty(CPU).is_contiguous(memory_format=torch.channels_last)
            }
            expected = images(ours.captured, ours.facts) & given.keys()
            assert len(expected) >= 4
            assert lie == expected - set(ours.facts.outputs)
        found, found_grads = ours()
        assert all(output.is_contiguous() for output in found)
        for mine, right in zip((*found, *found_grads), (*outputs, *grads), strict=True):
            torch.testing.assert_close(mine, right, rtol=1e-10, atol=1e-12)
    assert not any(span.missed for span in ours.code.spans)


def test_groups_of_several_channels_stay_as_they_are(x: Tensor) -> None:
    captured, facts, _ = captured_part(Net(2).double(), x)
    assert convolutions_of_images(captured) == images(captured, facts) == frozenset()
