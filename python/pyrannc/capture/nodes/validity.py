"""What ``torch.distributions`` asks of numbers that a model computes, as Ops: they fail where one is not valid.

Asked in Python (``if not valid.all(): raise``), a question of what is computed would keep the code around it whole.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import wraps
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, fx
from torch.distributions import Distribution

from pyrannc.capture.torch_internals.operators import assert_on_device
from pyrannc.capture.torch_internals.patching import (
    ALL_VALID,
    DISTRIBUTION_INIT,
    VALIDATE_SAMPLE,
    ask_in_python,
    asks_of_data,
    methods_of_samples,
    parameter_in_question,
)
from pyrannc.capture.torch_internals.tracing import current_tracer
from pyrannc.capture.user.source import Place, SourceTracker

from .operands import mutated_arguments
from .ops import root_of
from .untraceable import BY_DISTRIBUTIONS, UntraceableError

_is_grad_enabled = torch.is_grad_enabled
"""Asks for this module, not for the model: a trace notes when that does."""
_Method: TypeAlias = Callable[..., Any]


@torch.library.custom_op("pyrannc::as_valid", mutates_args=())
def as_valid(value: Tensor, valid: Tensor, otherwise: str) -> Tensor:
    """``value``, if all of it is valid.

    Args:
        value: any tensor.
        valid: true where it is, of the same shape.
        otherwise: the error's text.

    Raises:
        ValueError: it is not; on GPUs the kernel fails, as no host waits for it.
    """
    if value.is_cuda:
        assert_on_device(valid.all(), otherwise)
    elif not valid.all():
        raise ValueError(otherwise)
    return value.clone()


@as_valid.register_fake
def _like_value(value: Tensor, valid: Tensor, otherwise: str) -> Tensor:
    del valid, otherwise
    return torch.empty_like(value)


def _gradients(_context: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    return grad, None, None


as_valid.register_autograd(_gradients)


class Question(NamedTuple):
    """What an Op asks: the text of its error, and where the forward asks it."""

    text: str
    place: Place


def refuse_unasked(questions: Sequence[Question], raw: fx.Graph, cleaned: fx.Graph) -> None:
    """Raises UntraceableError where Ops cannot ask what the forward does.

    Nothing that the graph gives depends on what is asked about, so that no Op is left; or the forward changes it in
    place, while what an Op gives on is a copy.
    """
    asked, copied = Counter(node.args[2] for node in cleaned.nodes if _asks(node)), _copied_and_changed(raw)
    for text, place in questions:
        if not asked[text] or text in copied:
            cause = f"it decides by what it computes{BY_DISTRIBUTIONS}"
            raise UntraceableError(f"{place}: {cause}", place, cause)
        asked[text] -= 1


def _asks(node: fx.Node) -> bool:
    return node.target is torch.ops.pyrannc.as_valid.default


def _copied_and_changed(raw: fx.Graph) -> set[str]:
    """The texts of Ops of which what they take, or give on, is changed in place later."""
    texts: dict[fx.Node, list[str]] = {}
    changed: set[str] = set()
    for node in raw.nodes:
        if _asks(node):
            for memory in (root_of(node.args[0]), node):
                texts.setdefault(memory, []).append(node.args[2])
        elif node.op == "call_function":
            changed.update(text for operand in mutated_arguments(node) for text in texts.get(root_of(operand), ()))
    return changed


class Validity:
    """What is asked in one trace.

    Args:
        tracker: knows where the forward is.

    Attributes:
        questions: so far.
    """

    def __init__(self, tracker: SourceTracker) -> None:
        self._tracker = tracker
        self.questions: list[Question] = []
        self._samples: list[Tensor] = []

    @contextmanager
    def as_ops(self) -> Iterator[None]:
        """Inside, they become Ops."""
        patches = [(method, self._asking_in_ops(method.original)) for method in methods_of_samples()]
        patches.append((VALIDATE_SAMPLE, self._asking_of_others(VALIDATE_SAMPLE.original)))
        patches.append((DISTRIBUTION_INIT, self._with_valid_params(DISTRIBUTION_INIT.original)))
        patches.append((ALL_VALID, ask_in_python))
        with ExitStack() as stack:
            for point, function in patches:
                stack.enter_context(point.replaced_by(function))
            yield

    def _with_valid_params(self, init: _Method) -> _Method:
        """Afterwards a distribution has parameters that are known to be valid."""

        @wraps(init)
        def asked(distribution: Any, *args: Any, **kwargs: Any) -> None:
            if current_tracer() is None or not self._takes_valid(init, distribution, args, kwargs):
                init(distribution, *args, **kwargs)

        return asked

    def _takes_valid(self, init: _Method, distribution: Any, args: Any, kwargs: Any) -> bool:
        """Makes a distribution whose parameters Ops have looked at; False where they cannot."""
        with _noted() as questions:
            init(distribution, *args, **kwargs)
        for name, valid in questions:
            owner = _owner(distribution, name)
            made = None if owner is None else self._op(getattr(owner, name), valid, f"{name} of {_named(distribution)}")
            if made is None:
                return False
            setattr(owner, name, made)
        return True

    def _asking_in_ops(self, method: _Method) -> _Method:
        """A method that is given a sample which is known to be valid."""
        validate = VALIDATE_SAMPLE.original

        @wraps(method)
        def asked(distribution: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
            if current_tracer() is not None and asks_of_data(distribution) and not self._is_known(value):
                with _noted() as questions:
                    validate(distribution, value)
                made = [self._op(value, valid, f"what is given to {_named(distribution)}") for _, valid in questions]
                if len(made) == 1 and made[0] is not None:
                    self._samples.append(value := made[0])
            return method(distribution, value, *args, **kwargs)

        return asked

    def _asking_of_others(self, validate: _Method) -> _Method:
        """The question itself, where no Op asks it."""

        @wraps(validate)
        def asked(distribution: Any, value: Any) -> None:
            if not self._is_known(value):
                validate(distribution, value)

        return asked

    def _is_known(self, value: Any) -> bool:
        return any(sample is value for sample in self._samples)

    def _op(self, value: Any, valid: Any, what: str) -> Tensor | None:
        """A tensor with the question; None where it has one answer for all of several elements that are no row."""
        if not (isinstance(value, Tensor) and isinstance(valid, Tensor)):
            return None
        events = value.dim() - valid.dim()
        if events < 0 or valid.shape != value.shape[: valid.dim()]:
            return None
        place = self._tracker.here()
        text = f"{what} at {place} is not valid"
        self.questions.append(Question(text, place))
        for _ in range(events):
            valid = valid.unsqueeze(-1)
        # What a distribution has keeps its gradient where that is made without one.
        with nullcontext() if _is_grad_enabled() else torch.enable_grad():
            made: Tensor = as_valid(value, valid.expand_as(value), text)
        return made


@contextmanager
def _noted() -> Iterator[list[tuple[str, Tensor]]]:
    """Inside, all is taken for valid, and noted: the parameter in question, empty for a sample, and where it is."""
    questions: list[tuple[str, Tensor]] = []

    def note(valid: Tensor, *_text: str) -> Any:
        name = parameter_in_question()
        if name is None:
            return ask_in_python(valid)
        questions.append((name, valid))
        return True

    with ALL_VALID.replaced_by(note):
        yield questions


def _owner(distribution: Any, name: str) -> Any:
    """Which distribution holds a parameter; None where it is made of others when somebody reads it."""
    while distribution is not None and name not in vars(distribution):
        distribution = getattr(distribution, "base_dist", None)
    return distribution


def _named(distribution: Distribution) -> str:
    return f"torch.distributions.{type(distribution).__name__}"
