"""Calls of operators that draw random numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from pyrannc.capture.torch_internals.operators import OpOverload, schema

from .operands import named_arguments

_DROPOUT_PROBABILITY = ("p", "dropout_p", "dropout")
_TRAINING_FLAGS = ("train", "training")


def call_draws(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """True when what an op gives for these arguments depends on the state of a random generator."""
    if torch.Tag.nondeterministic_seeded not in op.tags:
        return False
    named = named_arguments(op, args, kwargs)
    # Backwards of attention are told what their forwards have drawn.
    if "philox_seed" in named or any(named.get(flag) is False for flag in _TRAINING_FLAGS):
        return False
    probabilities = [named[name] for name in _DROPOUT_PROBABILITY if name in named]
    is_dropout = "dropout" in schema(op).name or "dropout_p" in named or "dropout" in named
    return not (is_dropout and probabilities and all(p == 0 for p in probabilities))
