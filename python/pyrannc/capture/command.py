"""``python -m pyrannc capture``: a model, built without memory for its parameters, to a graph file."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from pyrannc._native import Graph
from pyrannc.core.graph import GraphFacts
from pyrannc.core.tail import DividedFacts, TailPart
from pyrannc.errors import CaptureError, InputError, RaNNCError

from .captured import Captured, capture
from .options import NO_OPTIONS, CaptureOptions
from .user.flatten import batch_rows, flatten
from .user.source import belongs_to_user

_EXAMPLE = """\
Example: python -m pyrannc capture train.py:example -o bert.json

where train.py has a function without arguments that returns the model and the arguments of one call (of a module,
train:example does as well):

  def example():
      model = BertForPreTraining(BertConfig())
      tokens = torch.zeros(4, 512, dtype=torch.long)
      return model, (), {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}

It runs with torch's default device set to "meta", so neither parameters nor arguments take memory or time. Where
values are needed to build the model, put those lines under `with torch.device("cpu"):`. What stands behind `--` are the
arguments of the script, in sys.argv. Then plan, without a device:

  rannc plan bert.json --cluster H200x8 --batch 256
"""


@dataclass(frozen=True)
class Call:
    """A model and the arguments of one call of it."""

    model: nn.Module
    args: Sequence[Any]
    kwargs: dict[str, Any]


def main(argv: Sequence[str]) -> int:
    """Runs ``capture`` with the arguments after that word and returns the exit status."""
    end = argv.index("--") if "--" in argv else len(argv)
    arguments = _parser().parse_args(argv[:end])
    sys.argv = [arguments.function.rpartition(":")[0], *argv[end + 1 :]]
    started = time.perf_counter()
    try:
        call = build(load(arguments.function), arguments.function)
        device, dtype = torch.device(arguments.device), arguments.autocast and getattr(torch, arguments.autocast)
        with _autocast(device, dtype):
            options = CaptureOptions(
                row_wise_modules=tuple(arguments.row_wise), outputs=tuple(arguments.returns) or None
            )
            captured = capture_call(call, device, arguments.rows, options)
        # Plans divide what parts of the batch go through.
        graph = Graph.from_json(captured.graph_json)
        divided = graph.divide_tail("batch")
        _write(arguments.output, divided.body.to_json())
    except RaNNCError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    for assumption in captured.assumptions:
        if assumption.assumed:
            answer = f"{assumption.expr} is taken as {assumption.value}"
            print(f"warning: {assumption.where} asks for values of tensors without data; {answer}", file=sys.stderr)
    tail = DividedFacts.from_json(divided.to_json()).tail
    if tail.mixing:
        print(f"warning: {_of_tail(captured, graph, tail)}", file=sys.stderr)
    print(_summary(call, captured, arguments.output, time.perf_counter() - started))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m pyrannc capture",
        usage="%(prog)s [-h] -o FILE [--rows N] [--device {cuda,cpu}] [--autocast TYPE] [--row-wise PATH] "
        "[--returns NAME] WHERE:FUNCTION [-- ARGUMENT ...]",
        description="Captures one call of a model as a graph file. Takes no GPU, and no memory for parameters.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "function",
        metavar="WHERE:FUNCTION",
        help="a Python file or a module, and a function in it without arguments that returns (model, args) or (model, "
        "args, kwargs), or an object with these attributes",
    )
    parser.add_argument("-o", "--output", metavar="FILE", type=Path, required=True, help="the graph file to write")
    parser.add_argument(
        "--rows", metavar="N", type=_positive, help="batch size of the arguments [default: the first tensor's extent 0]"
    )
    parser.add_argument(
        "--device", choices=["cuda", "cpu"], default="cuda", help="where the model will run [default: %(default)s]"
    )
    parser.add_argument(
        "--autocast", choices=["float16", "bfloat16"], help="the call is made under torch.autocast with this type"
    )
    parser.add_argument(
        "--row-wise",
        metavar="PATH",
        action="append",
        default=[],
        help="a sub-module that stays whole and treats each row by itself, as you know; may be repeated, like the "
        "entries of RaNNCModule's row_wise_modules",
    )
    parser.add_argument(
        "--returns",
        metavar="NAME",
        action="append",
        type=_name_or_position,
        default=[],
        help="a key, an attribute or a position of what the call returns, instead of all of it; may be repeated, like "
        "the entries of RaNNCModule's outputs",
    )
    return parser


def _name_or_position(text: str) -> str | int:
    return int(text) if text.isdigit() else text


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {number}")
    return number


def load(name: str) -> Callable[[], Any]:
    """The function ``package.module:function``, looked for from the current folder on, or ``folder/file.py:function``.

    Raises:
        InputError: there is no such function.
    """
    where, colon, function_name = name.rpartition(":")
    if not (where and colon and function_name):
        raise InputError(f"'{name}' must have the form package.module:function or folder/file.py:function")
    path = Path(where) if where.endswith(".py") or os.sep in where else None
    if path is not None and not path.is_file():
        raise InputError(f"there is no file {path}")
    what = f"module {where}" if path is None else str(path)
    try:
        module = _module(where) if path is None else _module_of(path)
    except Exception as error:
        raise InputError(f"{what} cannot be imported: {_cause(error)}") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        place = f" ({module.__file__})" if path is None else ""
        raise InputError(f"{what}{place} has no function {function_name}")
    return function  # type: ignore[no-any-return]  # callable, as checked above


def _module(name: str) -> ModuleType:
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    return importlib.import_module(name)


def _module_of(path: Path) -> ModuleType:
    """The file as a module, with its folder to import from, as ``python path`` has it."""
    sys.path.insert(0, str(path.resolve().parent))
    spec = importlib.util.spec_from_file_location(path.stem, path.resolve())
    if spec is None or spec.loader is None:
        raise ImportError("it is no Python file: its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def build(function: Callable[[], Any], name: str) -> Call:
    """Calls ``function`` on the meta device.

    Raises:
        InputError: it fails, or returns something else than a model and its arguments.
    """
    try:
        with torch.device("meta"):
            made = function()
    except Exception as error:
        raise InputError(
            f"{name} fails: {_cause(error)}. The tensors that it makes have no data (device meta); where it needs "
            'values, use `with torch.device("cpu"):`'
        ) from error
    if not isinstance(made, tuple):
        made = tuple(getattr(made, part) for part in ("model", "args", "kwargs") if hasattr(made, part))
    if len(made) == 2:
        made = (*made, {})
    if len(made) == 3 and _is_call(*made):
        return Call(made[0], made[1], dict(made[2]))
    raise InputError(
        f"{name} must return (model, args) or (model, args, kwargs), or an object with these attributes: a torch "
        "module, a tuple of arguments, and a dictionary of named ones"
    )


def _is_call(model: Any, args: Any, kwargs: Any) -> bool:
    return isinstance(model, nn.Module) and isinstance(args, (tuple, list)) and isinstance(kwargs, Mapping)


@contextmanager
def _autocast(device: torch.device, dtype: torch.dtype | None) -> Iterator[None]:
    """``torch.autocast``, which by itself does nothing for a device that is not here."""
    if dtype is None:
        yield
        return
    before = torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type)
    torch.set_autocast_enabled(device.type, True)
    torch.set_autocast_dtype(device.type, dtype)
    try:
        yield
    finally:
        torch.set_autocast_enabled(device.type, before[0])
        torch.set_autocast_dtype(device.type, before[1])


def capture_call(call: Call, device: torch.device, rows: int | None, options: CaptureOptions = NO_OPTIONS) -> Captured:
    """Captures ``call`` for ``device``.

    Args:
        rows: its batch size, where the first tensor does not tell it.
        options: what would be said to RaNNCModule.

    Raises:
        InputError: no argument has ``rows`` rows.
        CaptureError: the call cannot be captured.
    """
    tensors, _ = flatten((tuple(call.args), call.kwargs))
    if rows is None:
        try:
            rows = batch_rows(tensors)
        except ValueError as error:
            raise CaptureError(str(error)) from error
    elif not any(tensor.dim() and tensor.shape[0] == rows for tensor in tensors):
        raise InputError(f"no argument has {rows} rows: extent 0 of the tensors is {_extents(tensors)}")
    return capture(call.model, call.args, call.kwargs, device=device, rows=rows, options=options)


def _extents(tensors: Sequence[Tensor]) -> str:
    return ", ".join(str(tensor.shape[0]) for tensor in tensors if tensor.dim()) or "missing"


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}") from error


def _cause(error: Exception) -> str:
    """The error in words, with the user's line that raised it."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if belongs_to_user(frame.filename)]
    place = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{place}"


def _of_tail(captured: Captured, graph: Graph, tail: TailPart) -> str:
    """What is not in the file."""
    op, how = tail.mixing[0]
    facts = GraphFacts.from_json(captured.graph_json, graph.row_dims())
    sizes = [prod(facts.values[param.value].shape_at(0)) for param in facts.params]
    share = sum(sizes[param] for param in tail.params) / max(1, sum(sizes))
    return (
        f"{captured.place(op)} ({how}): rows of the batch meet there. It and what follows, with {share:.0%} of the "
        "parameters, runs once a step on all rows of the batch, on every process, and is not in the file: plans count "
        "neither its time nor its memory. Name a sub-module round it in which rows do not meet with --row-wise"
    )


def _summary(call: Call, captured: Captured, path: Path, seconds: float) -> str:
    elements = sum(parameter.numel() for parameter in call.model.parameters())
    return (
        f"Captured {type(call.model).__name__}: {len(captured.op_nodes)} ops, {elements:,} parameters, "
        f"{seconds:.1f} s; written to {path}"
    )
