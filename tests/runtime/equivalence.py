"""The proof: RaNNC on several ranks beside one process that runs the plain model on the global batch."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.utils import _pytree as pytree

import pyrannc
from pyrannc.job import process

from .models import RECIPES, Batch, Recipe
from .plans import divided, graph_of, scheduled, searched_plan
from .reference import OPTIMIZERS, Division, Reference, take

STEPS = 5


@dataclass(frozen=True)
class Case:
    """One configuration of the proof.

    Attributes:
        model: name of the recipe.
        rows: rows of each rank's batch; its length is the number of ranks.
        stages: forced number of Stages.
        replicas: forced Replicas of each Stage, instead of ``stages``.
        microbatches: forced number of microbatches.
        inputs: ``"gathered"``, or ``"first"`` for those of rank 0 only.
        input_grads: floating-point inputs require gradients.
        optimizer: name of the optimizer.
        schedule: of the plan with ``replicas``, a name or each Stage's computations; the search's choice when empty.
        sharding: what the Replicas of the plan with ``replicas`` divide.
    """

    model: str
    rows: tuple[int, ...]
    stages: int = 1
    replicas: tuple[int, ...] = ()
    microbatches: int = 1
    inputs: str = "gathered"
    input_grads: bool = False
    optimizer: str = "adam"
    schedule: str | list[str] = ""
    sharding: str = "none"

    @property
    def gather_inputs(self) -> bool:
        return self.inputs == "gathered"

    @property
    def total_rows(self) -> int:
        return sum(self.rows) if self.gather_inputs else self.rows[0]

    def __str__(self) -> str:
        cut = "x".join(map(str, self.replicas)) if self.replicas else f"{self.stages}stages"
        rows = "+".join(map(str, self.rows))
        extra = [] if self.gather_inputs else ["first"]
        extra += ["input_grads"] if self.input_grads else []
        return "-".join([self.model, cut, f"{self.microbatches}mb", f"rows{rows}", self.optimizer, *extra])


@dataclass
class Differences:
    """What is not as it should be, in words.

    Attributes:
        tolerance: by how much numbers may differ, relative to their size if that is above one.
    """

    tolerance: float = 1e-10
    found: list[str] = field(default_factory=list)

    def compare(self, what: str, got: Any, expected: Any) -> None:
        """Notes where two structures of tensors are not equal within the tolerance."""
        got_leaves, got_form = pytree.tree_flatten(got)
        leaves, form = pytree.tree_flatten(expected)
        if got_form != form:
            self.found.append(f"{what}: {got_form} instead of {form}")
            return
        for index, (mine, right) in enumerate(zip(got_leaves, leaves, strict=True)):
            text = _difference(mine, right, self.tolerance)
            if text:
                self.found.append(f"{what}, leaf {index}: {text}")

    def demand(self, truth: bool, text: str) -> None:
        if not truth:
            self.found.append(text)


def _difference(got: Any, expected: Any, tolerance: float) -> str:
    if not isinstance(expected, Tensor) or not isinstance(got, Tensor):
        same = got is None and expected is None if got is None or expected is None else got == expected
        return "" if same else f"{got!r} instead of {expected!r}"
    if got.shape != expected.shape or got.dtype != expected.dtype:
        return f"{got.dtype} {tuple(got.shape)} instead of {expected.dtype} {tuple(expected.shape)}"
    if torch.allclose(got.detach(), expected.detach(), rtol=tolerance, atol=tolerance):
        return ""
    apart = (got.detach().double() - expected.detach().double()).abs().max().item()
    return f"differs by {apart:.3g}"


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Everything made inside has this type by default."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def double_precision() -> AbstractContextManager[None]:
    """Everything made inside is double by default."""
    return default_dtype(torch.float64)


def make_model(recipe: Recipe, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return recipe.make()


def make_batch(recipe: Recipe, rows: int, seed: int) -> Batch:
    return recipe.batch(rows, Generator().manual_seed(seed))


def local_slice(rows: tuple[int, ...]) -> slice:
    """This rank's rows of the global batch."""
    start = sum(rows[: process.get_rank()])
    return slice(start, start + rows[process.get_rank()])


def check(case: Case, folder: str) -> list[str]:
    """Trains both ways and returns what differs on this rank."""
    with double_precision():
        twins = Twins(case, folder)
        for step in range(STEPS):
            twins.step(step)
        twins.compare_state("after the last step")
        twins.module.undeploy()
        twins.differences.compare("undeployed", dict(twins.module.model.state_dict()), twins.expected_state())
        return twins.differences.found


class Twins:
    """A model that RaNNC trains on all ranks and the same model trained plainly, on the same batches.

    Attributes:
        module: RaNNC's.
        optimizer: of ``module``.
        reference: the plain one.
        differences: all that was found to differ.
    """

    def __init__(self, case: Case, folder: str) -> None:
        self.case = case
        self.recipe = RECIPES[case.model]
        self.differences = Differences(self.recipe.tolerance)
        # Rank 0's parameters count.
        model = make_model(self.recipe, process.get_rank())
        self.reference = Reference(make_model(self.recipe), self.recipe, case.optimizer)
        self.optimizer = OPTIMIZERS[case.optimizer](model.parameters())
        self.module = self._wrap(model, folder)

    def _wrap(self, model: nn.Module, folder: str) -> pyrannc.RaNNCModule:
        case = self.case
        file = self._plan_file(model, Path(folder))
        items = {"RANNC_PARTITION_NUM": str(case.stages), "RANNC_PIPELINE_NUM": str(case.microbatches)}
        with environment({} if file else items):
            return pyrannc.RaNNCModule(model, self.optimizer, case.gather_inputs, load_deployment=file)

    def _plan_file(self, model: nn.Module, folder: Path) -> Path | None:
        if not self.case.replicas:
            return None
        file = folder / f"{self.case}.json"
        if process.get_rank() == 0:
            args, kwargs, _ = self.local(make_batch(self.recipe, self.case.total_rows, 0))
            graph = graph_of(model, args, kwargs, self.case.rows[0])
            plan = searched_plan(graph, self.case.replicas, self.case.microbatches, self.case.total_rows)
            plan = scheduled(plan, self.case.schedule) if self.case.schedule else plan
            divided(plan, self.case.sharding).write(file)
        return file

    def rewrap(self, case: Case, folder: str) -> None:
        """Gives the same model and optimizer to a new RaNNCModule."""
        self.case = case
        self.module = self._wrap(self.module.model, folder)

    def local(self, batch: Batch) -> Batch:
        """This rank's part of the global batch, in tensors of its own."""
        case = self.case
        rows = local_slice(case.rows)
        if not case.gather_inputs:
            # Only rank 0's rows count; the others pass something else of the right form.
            if process.get_rank() != 0:
                batch = make_batch(self.recipe, case.rows[process.get_rank()], 999)
            rows = slice(None)
        return _separate(take(batch, rows, case.total_rows, self.recipe.whole), case.input_grads)

    def losses(self, seed: int) -> tuple[Tensor, Tensor]:
        """The loss of a batch on this rank and that of the plain model, not differentiated yet."""
        batch = make_batch(self.recipe, self.case.total_rows, seed)
        args, kwargs, _ = self.local(batch)
        mine = self.recipe.criterion(self.module(*args, **kwargs), self._target(batch))
        args, kwargs, target = _separate(batch, False)
        return mine, self.recipe.criterion(self.reference.model(*args, **kwargs), target)

    def step(self, number: int) -> None:
        """Trains both on a batch and compares everything."""
        case = self.case
        batch = _separate(make_batch(self.recipe, case.total_rows, number), case.input_grads)
        args, kwargs, _ = local = self.local(batch)
        untouched = [tensor.detach().clone() for tensor in _inputs(local)]
        expected = self.reference.step(_in_the_open(batch, case.input_grads), case.total_rows, self._division())
        output = self.module(*args, **kwargs)
        self.compare_outputs(f"step {number}", output, expected)
        for index, (tensor, before) in enumerate(zip(_inputs(local), untouched, strict=True)):
            self.differences.demand(torch.equal(tensor, before), f"step {number}: input {index} was changed")
        self.optimizer.zero_grad()
        self.recipe.criterion(output, self._target(batch)).backward()
        if number in (0, STEPS - 1):
            self.compare_gradients(f"step {number}")
        if case.input_grads:
            self._compare_input_gradients(f"step {number}", local, batch)
        self.optimizer.step()
        self.reference.optimizer.step()
        self.reference.optimizer.zero_grad()

    def _target(self, batch: Batch) -> Tensor:
        """The target for the rows that this rank gets."""
        return batch[2][local_slice(self.case.rows)] if self.case.gather_inputs else batch[2]

    def _division(self) -> Division | None:
        if not self.recipe.batch_norm:
            return None
        replicas = set(self.case.replicas) or {len(self.case.rows) // self.case.stages}
        (each,) = replicas
        rows = self.case.rows if self.case.gather_inputs else (self.case.rows[0],)
        return Division(rows, self.case.microbatches, each)

    def compare_outputs(self, when: str, output: Any, expected: Any) -> None:
        """Compares this rank's outputs with its rows of the plain model's."""
        case, dim = self.case, self.recipe.row_dim
        rows = local_slice(case.rows) if case.gather_inputs else slice(None)

        def own(item: Any) -> Any:
            if not isinstance(item, Tensor) or item.dim() <= dim or item.shape[dim] != case.total_rows:
                return item
            return item[(slice(None),) * dim + (rows,)]

        if not case.gather_inputs and process.get_rank() != 0 and isinstance(output, dict):
            # An input handed through is this rank's own.
            output, expected = ({k: v for k, v in item.items() if k != "input"} for item in (output, expected))
        self.differences.compare(f"outputs, {when}", output, pytree.tree_map(own, expected))
        self.differences.compare(f"requires_grad, {when}", _requires_grad(output), _requires_grad(expected))

    def compare_gradients(self, when: str) -> None:
        """Compares the gradients of all parameters."""
        for name, param in self.reference.model.named_parameters():
            self.differences.compare(f"gradient of {name}, {when}", self.module.get_param_grad(name), param.grad)

    def _compare_input_gradients(self, when: str, local: Batch, batch: Batch) -> None:
        case = self.case
        for index, (mine, whole) in enumerate(zip(_inputs(local), _inputs(batch), strict=True)):
            if not mine.requires_grad:
                continue
            expected = whole.grad
            assert expected is not None
            if whole.dim() == 0 or not case.gather_inputs:
                expected = expected if process.get_rank() == 0 else torch.zeros_like(mine)
            else:
                expected = expected[local_slice(case.rows)]
            self.differences.compare(f"gradient of input {index}, {when}", mine.grad, expected)

    def compare_state(self, when: str) -> None:
        """Compares all parameters and buffers, under all their names."""
        state = self.module.state_dict(rank0_only=False)
        self.differences.compare(f"state {when}", dict(state), self.expected_state())

    def expected_state(self) -> dict[str, Tensor]:
        """The plain model's parameters and buffers."""
        return dict(self.reference.model.state_dict())


@contextmanager
def environment(items: Mapping[str, str]) -> Iterator[None]:
    """Variables that hold inside."""
    before = dict(os.environ)
    os.environ.update(items)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _separate(batch: Batch, input_grads: bool) -> Batch:
    """The same batch in new tensors that are leaves."""

    def fresh(item: Any) -> Any:
        if not isinstance(item, Tensor):
            return item
        copied = item.detach().clone()
        return copied.requires_grad_() if input_grads and copied.is_floating_point() else copied

    args, kwargs, target = batch
    return pytree.tree_map(fresh, args), pytree.tree_map(fresh, kwargs), target


def _in_the_open(batch: Batch, input_grads: bool) -> Batch:
    """A batch that the plain model may change, or whose gradients are wanted."""
    return batch if input_grads else _separate(batch, False)


def _inputs(batch: Batch) -> list[Tensor]:
    args, kwargs, _ = batch
    return [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]


def _requires_grad(output: Any) -> list[bool]:
    return [leaf.requires_grad for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
