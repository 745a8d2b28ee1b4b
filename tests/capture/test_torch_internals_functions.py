"""What is relied upon of torch's private names in ``functions.py``: a test for each, under its own name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tests.capture.tracing import Twice, X
from torch import Tensor
from torch.autograd.function import Function

from pyrannc.capture.torch_internals.functions import functions_applied_by


def test_functions_applied_by() -> None:
    own_name, method, forward = Twice.apply, vars(Function)["apply"], vars(Twice)["forward"]
    seen: list[type[Function]] = []
    bypassed: list[tuple[type[Function], Tensor]] = []

    def apply(original: Callable[..., Tensor], cls: type[Function], /, *args: Any) -> Tensor:
        seen.append(cls)
        return original(cls, *args)

    def note(cls: type[Function], args: Sequence[Any]) -> None:
        bypassed.append((cls, args[1]))

    with functions_applied_by(apply, note):
        assert Twice.apply(X).equal(own_name(X))
    assert own_name(X).equal(X * 2)
    assert vars(Function)["apply"] is method
    assert vars(Twice)["forward"] is forward
    if isinstance(method, classmethod):
        assert (seen, bypassed) == ([Twice, Twice], [])
    else:
        assert seen == [Twice]
        assert [cls for cls, _ in bypassed] == [Twice]
        assert bypassed[0][1] is X
