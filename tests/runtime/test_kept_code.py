"""Compiled code of a former start: found without a trace where all is as it was, and nowhere else."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from pyrannc.blocks import compiler, kept
from tests.runtime.test_compiled import ROWS, WIDTH, Stage, compiled


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("kept"))


@pytest.fixture(scope="module")
def of_a_former_start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("former")
    made(str(path))
    return path


@pytest.fixture
def kept_path(tmp_path: Path, of_a_former_start: Path) -> Path:
    """Where a start finds the layer compiled, and nothing else."""
    shutil.copytree(of_a_former_start, tmp_path, dirs_exist_ok=True)
    return tmp_path


class Layer(nn.Module):
    """What the text of a function has to tell apart."""

    def __init__(self, factor: float = 2.0, p: float = 0.25, negated: bool = False) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.factor, self.drop, self.negated = factor, nn.Dropout(p), negated

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(self.norm(self.first(x) * self.factor))
        return self.second(x.neg() if self.negated else x.exp())


def inputs() -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(ROWS, WIDTH, dtype=torch.float32, generator=generator, requires_grad=True)


def outcome(stage: Stage, x: Tensor) -> list[Tensor]:
    """Results and gradients."""
    leaves = [x, *stage.params.values()]
    assert stage.code.randomness is not None
    stage.code.randomness.at([(0, ROWS)])
    results = stage(x)
    grads = torch.autograd.grad([result.sum() for result in results], leaves, allow_unused=True)
    return [*(result.detach() for result in results), *(grad for grad in grads if grad is not None)]


@contextmanager
def traces(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The forms that are traced inside."""
    seen: list[Any] = []
    original = compiler.trace

    def noted(call: Callable[..., Any], form: Any, *rest: Any) -> Any:
        seen.append(form)
        return original(call, form, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(compiler, "trace", noted)
        yield seen


def made(folder: str, model: nn.Module | None = None, **how: Any) -> Stage:
    torch.manual_seed(0)
    stage, refusals = compiled(model or Layer(), inputs(), folder, **how)
    assert set(refusals) == {None}
    return stage


@pytest.mark.timeout(300)
@pytest.mark.parametrize("in_parts", [False, True])
def test_a_second_start_traces_nothing(in_parts: bool, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    first = made(folder, in_parts=in_parts)
    with traces(monkeypatch) as seen:
        second = made(folder, in_parts=in_parts)
    assert seen == []
    assert all(span.fitted for span in second.code.spans)
    x = inputs()
    for mine, other in zip(outcome(second, x), outcome(first, x), strict=True):
        assert torch.equal(mine, other)


@pytest.mark.timeout(300)
def test_a_copy_of_what_was_kept_is_as_good(kept_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with traces(monkeypatch) as seen:
        made(str(kept_path))
    assert seen == []


def _with_default_of_64_bits(folder: str) -> None:
    torch.set_default_dtype(torch.float64)
    try:
        made(folder, Layer().float())
    finally:
        torch.set_default_dtype(torch.float32)


def _with_another_setting(folder: str) -> None:
    from torch._inductor import config

    with config.patch({"max_fusion_size": 3}):
        made(folder)


def _with_deterministic_kernels(folder: str) -> None:
    torch.set_deterministic_debug_mode("error")
    try:
        made(folder)
    finally:
        torch.set_deterministic_debug_mode("default")


def _with_a_switch_of_attention(folder: str) -> None:
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)
    try:
        made(folder)
    finally:
        torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(False)


def _with_plain_attention(folder: str) -> None:
    with sdpa_kernel(SDPBackend.MATH):
        made(folder)


def _with_another_kernel(folder: str) -> None:
    library = torch.library.Library("aten", "IMPL")
    library.impl("exp", lambda x: x.sqrt(), "CUDA")
    try:
        made(folder)
    finally:
        library._destroy()


def _without_caches(folder: str) -> None:
    from torch._inductor import config

    with config.patch({"force_disable_caches": True}):
        made(folder)


OTHERS: dict[str, Callable[[str], object]] = {
    "a number": lambda folder: made(folder, Layer(factor=2.0000000000000004)),
    "another kind of number": lambda folder: made(folder, Layer(factor=2)),
    "a probability": lambda folder: made(folder, Layer(p=0.5)),
    "an operator": lambda folder: made(folder, Layer(negated=True)),
    "conditions": lambda folder: made(folder, conditions="another processor"),
    "which gradients wait": lambda folder: made(folder, in_parts=True),
    "the default type": _with_default_of_64_bits,
    "a setting of the compiler": _with_another_setting,
    "deterministic kernels": _with_deterministic_kernels,
    "a switch of attention": _with_a_switch_of_attention,
    "plain attention": _with_plain_attention,
    "a kernel of the script": _with_another_kernel,
    "caches that are off": _without_caches,
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", list(OTHERS))
def test_what_differs_is_compiled_for_itself(name: str, kept_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with traces(monkeypatch) as seen:
        OTHERS[name](str(kept_path))
    assert seen


@pytest.mark.timeout(300)
def test_a_file_that_was_cut_off_is_made_anew(kept_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (file,) = (kept_path / "spans").iterdir()
    for text in (file.read_bytes()[:50], b""):
        file.write_bytes(text)
        with traces(monkeypatch) as seen:
            made(str(kept_path))
        assert len(seen) == 1
    with traces(monkeypatch) as seen:
        made(str(kept_path))
    assert seen == []


@pytest.mark.timeout(300)
def test_kernels_that_are_gone_are_made_anew(kept_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.rmtree(kept_path / "fxgraph")
    with traces(monkeypatch) as seen:
        made(str(kept_path))
    assert len(seen) == 1


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["state_of_compiler", "key_of_kernels"])
def test_a_torch_without_these_names_keeps_nothing(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lacking(*_: Any) -> Any:
        raise AttributeError(name)

    monkeypatch.setattr(kept, name, lacking)
    with traces(monkeypatch) as seen:
        made(str(tmp_path))
        made(str(tmp_path))
    assert len(seen) == 2


@pytest.mark.timeout(300)
def test_what_was_refused_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "difference", lambda *_: "it differs")
    _, refusals = compiled(Layer(), inputs(), str(tmp_path))
    assert refusals == ["compiled, it differs"]
    assert not (tmp_path / "spans").exists()
