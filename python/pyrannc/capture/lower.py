"""From the cleaned fx graph to the Graph's JSON form (the types of ``crates/ir``)."""

from __future__ import annotations

import base64
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from pyrannc.errors import CaptureError

from .nodes.dims import AffineReader, Dim
from .nodes.facts import FACTS, TensorFacts
from .nodes.leaf import Apart, GradientHook, OpaqueCall
from .nodes.operands import mutated_arguments
from .nodes.ops import (
    aliased_arguments,
    closes_region,
    draws_random_numbers,
    is_higher_order,
    is_tuple_access,
    may_return_view,
    opens_region,
    target_name,
)
from .nodes.progress import is_at
from .nodes.untraceable import UntraceableError
from .passes.clean import CleanGraph, grad_enabled, place_of
from .reads.assumptions import Assumption, PartOfBatchError
from .rows.fixed import FixedTensors
from .rows.gradient_hooks import takes_parts
from .rows.groups import GroupTrials, RowGroup, row_groups
from .rows.sizes import known_sizes
from .rows.trial import INTEGERS, as_drawn, rows_shown
from .torch_internals.fakes import FakeTensor, known_data
from .torch_internals.operators import OpOverload
from .trace.tracer import NamedTensors, Trace
from .user.contents import contents
from .user.source import Part
from .whole.inner_backward import backward_called_at, differentiates_inside

_SCHEMA = 1
_DTYPES = (
    "float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "complex128", "complex64",
    "int64", "int32", "int16", "int8", "uint8", "bool",
)  # fmt: skip
_INT64_MAX = 2**63 - 1
_MOST_SIZES = 16
"""Integers for each row that may be sizes of something; rows of more, as of tokens, are others in each batch."""
_KNOWN = ("aten", "pyrannc")
"""Namespaces of operators whose treatment of rows is known."""
ValueKey = tuple[fx.Node, int | None]


@dataclass
class Lowered:
    """The Graph as JSON data, and what its ids stand for."""

    graph: dict[str, Any]
    values: list[ValueKey]
    constants: list[Tensor]
    row_wise: list[bool]
    """Of each row group, then of each call that was tried, in order, whether it treats each row by itself."""
    grouped: tuple[str, ...]
    """Of each row group, the path of the sub-module."""
    assumptions: list[Assumption]
    """What trials with integers of this batch rest on."""
    shown_rows: int
    """As many rows trials had memory for, of row groups that they show; all where there are none."""
    covered_rows: int | None
    """For batches of how many rows trials stand, as far as any has shown something."""


def lower(
    trace: Trace,
    cleaned: CleanGraph,
    name: str,
    training: bool,
    rows: int,
    row_wise: Sequence[bool] | None = None,
    row_wise_modules: Sequence[str] = (),
    together: Sequence[str] = (),
    *,
    all_rows: int,
    part_of_batch: bool = False,
) -> Lowered:
    """Lowers a cleaned trace.

    Args:
        trace: of a call.
        cleaned: the same.
        name: of the model.
        training: its mode.
        rows: of the sample.
        row_wise: as an earlier call has found; otherwise calls of the user are tried.
        row_wise_modules: what treats each row by itself, as the user says, whole or Op by Op.
        together: sub-modules whose Ops may do so together, as the user says or as is tried.
        all_rows: of the whole batch.
        part_of_batch: there are more rows than those of the trace.

    Raises:
        PartOfBatchError: what is tried takes integers of the batch as they are.
        CaptureError: an op, a shape or an argument has no form in the Graph.
    """
    told = frozenset(f"pyrannc.opaque.{Part.of(text).title}" for text in row_wise_modules)
    known = None if row_wise is None else list(row_wise)
    groups = row_groups(cleaned, together, partial(_extents, trace.reader))
    own = trace, cleaned, told, known, groups, frozenset(row_wise_modules), rows, all_rows, part_of_batch
    return _Lowering(*own).run(name, training)


def can_be_groups(cleaned: CleanGraph, reader: AffineReader, paths: Sequence[str]) -> bool:
    """Whether calls of sub-modules can be tried as groups that treat each row by itself."""
    return bool(row_groups(cleaned, paths, partial(_extents, reader)))


@dataclass
class _Lowering:
    trace: Trace
    cleaned: CleanGraph
    told_row_wise: frozenset[str] = frozenset()
    known_row_wise: list[bool] | None = None
    groups: Sequence[RowGroup] = ()
    told_paths: frozenset[str] = frozenset()
    rows: int = 1
    all_rows: int = 1
    part_of_batch: bool = False
    shown_rows: int = 1
    covered_rows: int | None = None
    assumptions: list[Assumption] = field(default_factory=list)
    group_of: dict[fx.Node, int] = field(default_factory=dict)
    fixed: FixedTensors = field(init=False)
    row_wise: list[bool] = field(default_factory=list)
    tried: dict[Hashable, int] = field(default_factory=dict)
    keys: list[ValueKey] = field(default_factory=list)
    values: list[dict[str, Any]] = field(default_factory=list)
    ids: dict[ValueKey, int] = field(default_factory=dict)
    roots: list[int] = field(default_factory=list)
    """For each Value, the first Value in the same storage."""
    root_of_storage: dict[int, int] = field(default_factory=dict)

    def run(self, name: str, training: bool) -> Lowered:
        reader, cleaned = self.trace.reader, self.cleaned
        params = self._named(self.trace.params, cleaned.params, "param")
        buffers = self._named(self.trace.buffers, cleaned.buffers, "buffer")
        inputs = [self._add(node, None, {"input": place}) for place, node in enumerate(cleaned.inputs)]
        assert reader.symbol is None or any(map(self._has_rows, inputs)), "no question has fixed the rows"
        tensors = [_tensor_of(node, cleaned.gm) for node in cleaned.constants]
        constants = [
            {"name": node.name, "value": self._add_constant(node, index, tensor), "data": _base64(tensor)}
            for index, (node, tensor) in enumerate(zip(cleaned.constants, tensors, strict=True))
        ]
        self.fixed = FixedTensors(cleaned, dict(zip(cleaned.constants, tensors, strict=True)))
        self._find_groups(tensors)
        ops = self._ops(reader)
        self._finish_aliases()
        self._spread_gradients(ops)
        for index, node in cleaned.updates.items():
            buffers[index]["update"] = self._id(node)
        graph = {
            "schema": _SCHEMA,
            "name": name,
            "training": training,
            "sample_rows": self.rows,
            "values": self.values,
            "ops": ops,
            "params": params,
            "buffers": buffers,
            "constants": constants,
            "inputs": inputs,
            "outputs": [self._id(node) for node in cleaned.outputs],
        }
        grouped = tuple(group.path for group in self.groups)
        found = self.assumptions, self.shown_rows, self.covered_rows
        return Lowered(graph, self.keys, tensors, self.row_wise, grouped, *found)

    def _has_rows(self, value: int) -> bool:
        return any(extent["per_row"] for extent in self.values[value]["shape"])

    def _named(self, named: NamedTensors, nodes: Sequence[fx.Node], kind: str) -> list[dict[str, Any]]:
        records = []
        for index, (name, aliases, node) in enumerate(zip(named.names, named.aliases, nodes, strict=True)):
            record: dict[str, Any] = {"name": name, "value": self._add(node, None, {kind: index})}
            if aliases:
                record["aliases"] = aliases
            records.append(record)
        return records

    def _add_constant(self, node: fx.Node, index: int, tensor: Tensor) -> int:
        if tensor.requires_grad:
            raise CaptureError(
                f"{place_of(node)} uses a tensor that requires gradients but is neither a parameter nor an input; "
                "make it a torch.nn.Parameter that the model lists: parameters and sub-modules in plain lists or dicts "
                "are its own in nn.ParameterList, nn.ParameterDict, nn.ModuleList or nn.ModuleDict"
            )
        node.meta["val"] = tensor
        node.meta[FACTS] = {None: TensorFacts(False, None)}
        return self._add(node, None, {"constant": index})

    def _add(self, node: fx.Node, place: int | None, definition: dict[str, Any]) -> int:
        tensor = node.meta["val"] if place is None else node.meta["val"][place]
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype not in _DTYPES:
            raise CaptureError(f"{place_of(node)} makes a tensor of type {tensor.dtype}, which is not supported")
        facts: TensorFacts | None = node.meta.get(FACTS, {}).get(place)
        differentiable = tensor.dtype.is_floating_point or tensor.dtype.is_complex
        value_id = len(self.values)
        value = {
            "name": node.name if place is None else f"{node.name}.{place}",
            "dtype": dtype,
            "shape": [self._extent(node, size) for size in tensor.shape],
            "def": definition,
            "requires_grad": differentiable and (facts is None or facts.requires_grad),
        }
        root = self._root(node, facts, value_id)
        if root != value_id:
            value["alias_of"] = root
        self.roots.append(root)
        self.values.append(value)
        self.keys.append((node, place))
        self.ids[node, place] = value_id
        return value_id

    def _root(self, node: fx.Node, facts: TensorFacts | None, value_id: int) -> int:
        if facts is not None and facts.storage is not None and facts.storage in self.root_of_storage:
            return self.root_of_storage[facts.storage]
        root = value_id
        for operand in aliased_arguments(node) if node.op == "call_function" else []:
            operand_id = self._lookup(operand)
            if operand_id is not None:
                root = self.roots[operand_id]
                break
        if facts is not None and facts.storage is not None:
            self.root_of_storage[facts.storage] = root
        return root

    def _extent(self, node: fx.Node, size: Any) -> dict[str, int]:
        dim = self.trace.reader.read(size)
        if dim is None:
            raise CaptureError(
                f"{place_of(node)} calls {target_name(node.target)}, whose result has an extent that depends on the "
                f"data or is not of the form a*rows + b ({size}); use a mask instead of selecting "
                "elements, or keep the sub-module whole: RaNNCModule(..., leaf_modules=[...])"
            )
        return {"per_row": dim.per_row, "fixed": dim.fixed}

    def _find_groups(self, constants: Sequence[Tensor]) -> None:
        """Tells which groups of Ops treat each row by itself."""
        state = dict(zip(self.cleaned.params, ((tensor, True) for tensor in self.trace.params.tensors), strict=True))
        others = zip(
            (*self.cleaned.buffers, *self.cleaned.constants), (*self.trace.buffers.tensors, *constants), strict=True
        )
        state |= {node: (tensor, False) for node, tensor in others}
        trials = GroupTrials(
            self.cleaned,
            state.get,
            partial(_extents, self.trace.reader),
            self.all_rows,
            self.trace.attributes_restored,
        )
        self.shown_rows = self.all_rows
        for number, group in enumerate(self.groups):
            self.row_wise.append(
                self.known_row_wise[number]
                if self.known_row_wise is not None and number < len(self.known_row_wise)
                else group.path in self.told_paths or self._shows(trials, group)
            )
            if self.row_wise[-1]:
                self.group_of.update(dict.fromkeys(group.nodes, number))

    def _shows(self, trials: GroupTrials, group: RowGroup) -> bool:
        is_at(f"trials of what sub-module '{group.path}' does to rows")
        rows = trials.rows_shown(group, self.trace.device)
        self.shown_rows = min(self.shown_rows, rows or self.shown_rows)
        return self._covers(rows)

    def _covers(self, shown: int) -> bool:
        """Notes for how many rows a trial stands; false where it has shown nothing."""
        if shown:
            # Where there was no memory for all of the batch's, it stands for these all the same, which is told.
            covered = max(shown, self.all_rows)
            self.covered_rows = covered if self.covered_rows is None else min(self.covered_rows, covered)
        return shown > 0

    def _ops(self, reader: AffineReader) -> list[dict[str, Any]]:
        ops: list[dict[str, Any]] = []
        depth, region = 0, -1
        for node in self.cleaned.ops:
            if is_higher_order(node):
                cause = f"{target_name(node.target)} is an operator with a graph of its own"
                raise UntraceableError(f"{place_of(node)}: {cause}", place_of(node), cause)
            if opens_region(node):
                region += depth == 0
                depth += 1
            ops.append(self._op(node, len(ops), region if depth else None))
            depth -= closes_region(node)
        return ops

    def _op(self, node: fx.Node, op: int, region: int | None) -> dict[str, Any]:
        place = place_of(node)
        record: dict[str, Any] = {
            "target": _target(node),
            "args": [self._argument(node, argument) for argument in node.args],
            "results": [
                self._add(node, result, {"op": {"op": op, "result": result or 0}}) for result in _results(node)
            ],
            "grad_enabled": grad_enabled(node),
            "module": place.module,
        }
        if node.kwargs:
            record["kwargs"] = {name: self._argument(node, argument) for name, argument in node.kwargs.items()}
        mutates = list(dict.fromkeys(self._id(operand) for operand in mutated_arguments(node)))
        if mutates:
            record["mutates"] = mutates
        if draws_random_numbers(node):
            record["random"] = True
        if isinstance(node.target, OpaqueCall) and not node.target.is_known:
            record["opaque"] = True
        if isinstance(node.target, GradientHook):
            self._try_hook(node, node.target)
        if isinstance(node.target, Apart) or (not mutates and self._is_row_wise(node)):
            record["row_wise"] = True
        if region is not None:
            record["region"] = region
        if node in self.group_of:
            record["row_group"] = self.group_of[node]
        if place.file is not None:
            record["source"] = {"file": place.file, "line": place.line}
        return record

    def _try_hook(self, node: fx.Node, call: GradientHook) -> None:
        if node.args[0] in self.cleaned.params:
            raise CaptureError(
                f"{place_of(node)} gives a parameter one more hook at each call; give it one before the first call, "
                "outside of the forward"
            )
        gradient, extents, _ = self._operands(node)[0]
        with self.trace.attributes_restored():
            call.takes_parts = takes_parts(call.hook, gradient, extents, _device_of(node))

    def _is_row_wise(self, node: fx.Node) -> bool:
        call = _call_of_the_user(node)
        if call is None:
            return False
        call = self._from_one_state(call)
        if node in self.group_of or target_name(node.target) in self.told_row_wise:
            self.row_wise.append(node not in self.group_of)
        elif self.known_row_wise is None or len(self.row_wise) >= len(self.known_row_wise):
            shown: bool | None = getattr(node.target, "row_wise", None)
            self.row_wise.append(self._shown_by_trial(node, call) if shown is None else shown)
        else:
            self.row_wise.append(self.known_row_wise[len(self.row_wise)])
        return self.row_wise[-1]

    def _from_one_state(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """The call, which finds no Python attribute as an earlier one has left it: rows may meet in these, too."""

        def run(*operands: Any) -> Any:
            with self.trace.attributes_restored():
                return call(*operands)

        return run

    def _shown_by_trial(self, node: fx.Node, call: Callable[..., Any]) -> bool:
        """Tries a call, but of equal ones the first alone."""
        is_at(f"trials of what {place_of(node)} does to rows")
        operands, device = self._operands(node), _device_of(node)
        does, drawn = _does(node), as_drawn(operands)
        if does is None or drawn is None:
            shown = rows_shown(call, operands, device, self.all_rows)
            return self._covers(shown) or self._with_sizes(node, call)
        if (does, drawn) not in self.tried:
            self.tried[does, drawn] = rows_shown(call, operands, device, self.all_rows)
        return self._covers(self.tried[does, drawn]) or self._with_sizes(node, call)

    def _with_sizes(self, node: fx.Node, call: Callable[..., Any]) -> bool:
        """Tries a call with sizes of the batch, where it takes some, as made-up ones may be no sizes."""
        sizes = {place: count for place, count in self._sizes().items() if self.cleaned.inputs[place] in node.args}
        if not sizes:
            return False
        if not self._covers(rows_shown(call, self._operands(node, sizes), _device_of(node), self.all_rows)):
            return False
        if self.part_of_batch:
            raise PartOfBatchError(f"{place_of(node)} was tried with sizes of this rank's rows")
        if not any(known.question is not None and known.question.takes == sizes.keys() for known in self.assumptions):
            self.assumptions.append(known_sizes(self.trace.inputs, sizes, place_of(node)))
        return True

    def _sizes(self) -> dict[int, int]:
        """By place, inputs of integers, few for each row, and how many elements of dimension 0 a row has."""
        found = {}
        for place, (node, given) in enumerate(zip(self.cleaned.inputs, self.trace.inputs, strict=True)):
            extents = _extents(self.trace.reader, node.meta["val"])
            count = extents[0].per_row if extents and extents[0] is not None else 0
            if count and given.dtype in INTEGERS and not given.is_meta and 0 < given[:count].numel() <= _MOST_SIZES:
                found[place] = count
        return found

    def _operands(self, node: fx.Node, sizes: Collection[int] = ()) -> list[Any]:
        """What a call can be tried with; ``sizes``: places of inputs of which it gets rows."""
        known = dict(zip(self.cleaned.params, self.trace.params.tensors, strict=True))
        known |= dict(zip(self.cleaned.buffers, self.trace.buffers.tensors, strict=True))
        known |= {self.cleaned.inputs[place]: self.trace.inputs[place] for place in sizes}

        def operand(item: Any) -> Any:
            if not isinstance(item, fx.Node):
                return item
            if item in self.cleaned.dims:
                return self.cleaned.dims[item]
            made = item.meta["val"]
            tensor = known[item] if item in known else self.fixed.get(item)
            return made if tensor is None else tensor, _extents(self.trace.reader, made), tensor is not None

        return [operand(item) for item in node.args]

    def _argument(self, node: fx.Node, argument: Any) -> Any:
        if isinstance(argument, fx.Node):
            return self._node_argument(argument)
        if isinstance(argument, (list, tuple)):
            return {"list": [self._argument(node, item) for item in argument]}
        if argument is None:
            return "none"
        if isinstance(argument, bool):
            return {"bool": argument}
        if isinstance(argument, int):
            if abs(argument) > _INT64_MAX:
                raise CaptureError(f"{place_of(node)} uses the integer {argument}, which does not fit in 64 bits")
            return {"int": argument}
        if isinstance(argument, float):
            return {"float": repr(argument)}
        if isinstance(argument, (str, complex)):
            return {"str": str(argument)}
        if isinstance(argument, torch.device):
            # Without the index, which differs from rank to rank.
            return {"torch": argument.type}
        if isinstance(argument, (torch.dtype, torch.layout, torch.memory_format)):
            return {"torch": str(argument)}
        cause = f"{target_name(node.target)} is called with a {type(argument).__qualname__}, which a Graph cannot keep"
        raise UntraceableError(f"{place_of(node)}: {cause}", place_of(node), cause)

    def _node_argument(self, argument: fx.Node) -> Any:
        if argument in self.cleaned.dims:
            dim = self.cleaned.dims[argument]
            return {"dim": {"per_row": dim.per_row, "fixed": dim.fixed}}
        value = self._lookup(argument)
        if value is not None:
            return {"value": value}
        produced = [self.ids[key] for key in self.ids if key[0] is argument]
        if produced:  # a list of tensors handed on as a whole
            return {"list": [{"value": item} for item in produced]}
        return {"str": argument.name}  # the handle of an autocast block or a vmap level

    def _lookup(self, node: fx.Node) -> int | None:
        if is_tuple_access(node):
            producer, place = node.args
            return self.ids.get((producer, place))  # type: ignore[arg-type]  # both are what getitem takes
        return self.ids.get((node, None))

    def _id(self, node: fx.Node) -> int:
        value = self._lookup(node)
        assert value is not None, node.format_node()
        return value

    def _finish_aliases(self) -> None:
        """Where storages are written, copies that are views for some batch sizes count as views."""
        written = {self.roots[self._id(operand)] for node in self.cleaned.ops for operand in mutated_arguments(node)}
        if not written:
            return
        for node in self.cleaned.ops:
            value, operand = self.ids.get((node, None)), next(iter(node.all_input_nodes), None)
            operand_id = self._lookup(operand) if operand is not None else None
            if value is None or operand_id is None or not may_return_view(node):
                continue
            first, second = sorted((self.roots[operand_id], self.roots[value]))
            if first != second and not written.isdisjoint((first, second)):
                written.add(first)
                self._merge(second, first)

    def _merge(self, later: int, root: int) -> None:
        for value, current in enumerate(self.roots):
            if current == later:
                self.roots[value] = root
                self.values[value]["alias_of"] = root

    def _spread_gradients(self, ops: Sequence[Mapping[str, Any]]) -> None:
        """An in-place write of something with a gradient reaches all Values in the storage."""
        reached: set[int] = set()
        for op in ops:
            if op["grad_enabled"] and any(self.values[result]["requires_grad"] for result in op["results"]):
                reached.update(self.roots[value] for value in op.get("mutates", ()))
        for value, root in zip(self.values, self.roots, strict=True):
            if root in reached and "op" in value["def"] and getattr(torch, value["dtype"]).is_floating_point:
                value["requires_grad"] = True


def _extents(reader: AffineReader, tensor: Tensor) -> list[Dim | None]:
    return [reader.read(size) for size in tensor.shape]


def _target(node: fx.Node) -> str:
    """The Op's name; of an opaque one with what it runs under, since that shows nowhere else."""
    name, autocast = target_name(node.target), getattr(node.target, "autocast", None)
    return f"{name} under autocast ({autocast})" if autocast is not None and autocast.dtypes else name


def _device_of(node: fx.Node) -> torch.device:
    """Where what a node is given will be."""
    made = (operand.meta.get("val") for operand in node.all_input_nodes)
    return next((value.device for value in made if isinstance(value, Tensor)), torch.device("cpu"))


def is_tried(node: fx.Node) -> bool:
    """True for a call whose treatment of rows can only be tried."""
    return _call_of_the_user(node) is not None


def _call_of_the_user(node: fx.Node) -> Callable[..., Any] | None:
    """What the user's own code does here, whose treatment of rows can only be tried; it takes arguments by position."""
    target = node.target
    own = isinstance(target, OpaqueCall) and not isinstance(target, (Apart, GradientHook))
    if own or (isinstance(target, OpOverload) and target.namespace not in _KNOWN):
        assert callable(target), "a call"
        return partial(getattr(target, "tried", None) or target, **node.kwargs)
    return None


def _does(node: fx.Node) -> Hashable | None:
    """What is equal for calls that do the same with the same operands; None where nobody knows."""
    if isinstance(node.target, OpOverload):
        constants = tuple(node.kwargs.items())
        return (node.target, constants) if all(isinstance(item, Hashable) for item in node.kwargs.values()) else None
    return getattr(node.target, "does", None)


def _results(node: fx.Node) -> list[int | None]:
    value = node.meta.get("val")
    if isinstance(value, Tensor):
        return [None]
    if isinstance(value, (list, tuple)):
        return [place for place, item in enumerate(value) if isinstance(item, Tensor)]
    return []


def _tensor_of(node: fx.Node, owner: fx.GraphModule) -> Tensor:
    tensor = getattr(owner, str(node.target))
    data = known_data(tensor)
    if data is not None:  # a small tensor that the trace made itself
        tensor = data
    if not isinstance(tensor, Tensor) or tensor.is_meta or isinstance(tensor, FakeTensor):
        called_at = backward_called_at(node)
        if called_at is not None:
            raise differentiates_inside(place_of(node), called_at)
        raise CaptureError(
            f"{place_of(node)} uses a tensor attribute that has no data; make it a buffer or a parameter"
        )
    return tensor


def _base64(tensor: Tensor) -> str:
    return base64.b64encode(contents(tensor)).decode("ascii")
