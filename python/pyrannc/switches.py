"""Switches that hold for the whole process."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Switches:
    """The switches.

    Attributes:
        delay_grad_allreduce: a step does not sum gradients over ranks.
        keep_graph: backward may be called again for the same call of the model.
        sync_params_on_init: parameters are those of rank 0 at deployment.
    """

    delay_grad_allreduce: bool = False
    keep_graph: bool = False
    sync_params_on_init: bool = True


_SWITCHES = Switches()


def switches() -> Switches:
    """The switches of this process."""
    return _SWITCHES


def delay_grad_allreduce(enable: bool) -> None:
    """Leaves gradients of the following calls of models unsummed over ranks, or no longer.

    A later call without delay, or ``module.allreduce_grads()``, sums what has accumulated. Set it before the
    call of the model: with a loss inside, the backward runs there.
    """
    _SWITCHES.delay_grad_allreduce = enable


def keep_graph(enable: bool) -> None:
    """Lets ``backward()`` be called again for the following calls of models (``retain_graph``)."""
    _SWITCHES.keep_graph = enable


def sync_params_on_init(enable: bool) -> None:
    """Says whether deployment gives every rank the parameters of rank 0; it does by default."""
    _SWITCHES.sync_params_on_init = enable
