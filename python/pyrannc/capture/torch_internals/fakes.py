"""Tensors without data."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch._subclasses import fake_tensor

FakeTensor = fake_tensor.FakeTensor
"""Tells a tensor of the trace from a real one. Public: none."""

FakeTensorMode = fake_tensor.FakeTensorMode
"""Runs a model on tensors without data, on a device that need not be here. Public: none; torch.export hides its own."""


class TraceMode(FakeTensorMode):  # type: ignore[no-untyped-call]  # torch has no types for it
    """That of a trace, whose tensors are told from those that torch makes for itself, as its compiler does."""


unset_fake_temporarily = fake_tensor.unset_fake_temporarily
"""Real execution inside a trace, to answer questions about data. Public: none."""

DynamicOutputShapeException = fake_tensor.DynamicOutputShapeException
"""Tells an operator whose shapes depend on data from one that fails. Public: none."""

UnsupportedOperatorException = fake_tensor.UnsupportedOperatorException
"""Tells an operator without a rule for fake tensors, which is then run on real samples. Public: none."""


@contextmanager
def fake_tensors_untold() -> Iterator[None]:
    """What fake tensors cannot run raises, without torch writing down the whole traceback as well. Public: none."""
    log = logging.getLogger(fake_tensor.__name__)

    def is_no_traceback(record: logging.LogRecord) -> bool:
        return record.exc_info is None

    log.addFilter(is_no_traceback)
    try:
        yield
    finally:
        log.removeFilter(is_no_traceback)


def runs_without_data() -> bool:
    """True inside of a rule for fake tensors, where no tensor, real or not, can be read. Public: none."""
    return bool(torch._C._meta_in_tls_dispatch_include())


def known_data(tensor: Tensor) -> Tensor | None:
    """The data of a small fake tensor that the trace made itself, such as ``torch.tensor(3)``. Public: none."""
    constant = getattr(tensor, "constant", None)
    return constant if isinstance(constant, Tensor) else None
