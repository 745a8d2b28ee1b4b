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
    ask_in_python,
    asks_of_data,
    methods_of_samples,
    parameter_in_question,
)
from pyrannc.capture.torch_internals.tracing import current_tracer, proxy_of
from pyrannc.capture.user.source import Place, SourceTracker

from .operands import mutated_arguments
from .ops import root_of
from .oracle import Oracle
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
    """The texts of Ops of which what they take is changed in place later, or what they give on while others have it."""
    read: dict[fx.Node, int] = {}
    changed: dict[fx.Node, int] = {}
    ops: list[tuple[int, fx.Node]] = []
    for index, node in enumerate(raw.nodes):
        read.update((root_of(operand), index) for operand in node.all_input_nodes)
        if _asks(node):
            ops.append((index, node))
        elif node.op == "call_function":
            changed.update((root_of(operand), index) for operand in mutated_arguments(node))
    texts = set()
    for index, node in ops:
        taken = root_of(node.all_input_nodes[0])
        is_kept = taken.op != "call_function" or read[taken] > index
        if changed.get(taken, -1) > index or (node in changed and is_kept):
            texts.add(str(node.args[2]))
    return texts


class Validity:
    """What is asked in one trace.

    Args:
        tracker: knows where the forward is.
        oracle: knows what is constant.

    Attributes:
        questions: so far.
    """

    def __init__(self, tracker: SourceTracker, oracle: Oracle) -> None:
        self._tracker = tracker
        self._oracle = oracle
        self.questions: list[Question] = []

    @contextmanager
    def as_ops(self) -> Iterator[None]:
        """Inside, they become Ops."""
        patches = [(method, self._asking_in_ops(method.original)) for method in methods_of_samples()]
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
        with _noted(lambda name, valid: name != "" and not self._is_constant(valid)) as questions:
            init(distribution, *args, **kwargs)
        for name, valid in questions:
            owner = _owner(distribution, name)
            value = None if owner is None else getattr(owner, name)
            made = self._op(value, _of_events(value, valid), f"{name} of {_named(distribution)}")
            if made is None:
                return False
            setattr(owner, name, made)
        return True

    def _asking_in_ops(self, method: _Method) -> _Method:
        """A method whose result Ops give on, if the sample is valid.

        The sample itself is not replaced: a transform may know it as what it has made last.
        """

        @wraps(method)
        def asked(distribution: Any, *args: Any, **kwargs: Any) -> Any:
            if current_tracer() is None or not asks_of_data(distribution):
                return method(distribution, *args, **kwargs)
            with _noted(lambda name, _: name == "") as questions:
                result = method(distribution, *args, **kwargs)
            for _, valid in questions:
                made = self._op(result, _of_each(result, valid), f"what is given to {_named(distribution)}")
                if made is None:
                    return method(distribution, *args, **kwargs)
                result = made
            return result

        return asked

    def _is_constant(self, valid: Tensor) -> bool:
        """True for what is the same in every call, which needs no Op: its answer is known."""
        proxy = proxy_of(valid, current_tracer())
        return proxy is not None and self._oracle.is_constant(proxy.node)

    def _op(self, value: Any, valid: Tensor | None, what: str) -> Tensor | None:
        """A tensor with the question; None where nobody knows which of its elements an answer is of."""
        if valid is None:
            return None
        place = self._tracker.here()
        text = f"{what} at {place} is not valid"
        self.questions.append(Question(text, place))
        # What a distribution has keeps its gradient where that is made without one.
        with nullcontext() if _is_grad_enabled() else torch.enable_grad():
            made: Tensor = as_valid(value, valid, text)
        return made


def _of_events(value: Any, valid: Any) -> Tensor | None:
    """What is valid of a parameter, for each of its elements; None where that has one answer for several rows."""
    if not (isinstance(value, Tensor) and isinstance(valid, Tensor)):
        return None
    events = value.dim() - valid.dim()
    if events < 0 or valid.shape != value.shape[: valid.dim()]:
        return None
    each: Tensor = valid
    for _ in range(events):
        each = each.unsqueeze(-1)
    return each.expand_as(value)


def _of_each(result: Any, valid: Any) -> Tensor | None:
    """What is valid of a sample, for each element of what is made of it; None where their shapes do not tell."""
    if not (isinstance(result, Tensor) and isinstance(valid, Tensor)):
        return None
    sizes = zip(reversed(valid.shape), reversed(result.shape), strict=False)
    if valid.dim() > result.dim() or not all(mine in (size, 1) for mine, size in sizes):
        return None
    return valid.expand_as(result)


@contextmanager
def _noted(asks_in_op: Callable[[str, Tensor], bool]) -> Iterator[list[tuple[str, Tensor]]]:
    """Inside, samples or parameters are taken for valid, and noted: the parameter's name, and where it is.

    Args:
        asks_in_op: told a parameter's name, empty for a sample, and where it is valid; False leaves it to Python.
    """
    questions: list[tuple[str, Tensor]] = []

    def note(valid: Tensor, *_text: str) -> Any:
        name = parameter_in_question()
        if name is None or not asks_in_op(name, valid):
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
