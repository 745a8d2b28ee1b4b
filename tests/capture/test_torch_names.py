"""No file outside of one package names what is private to torch, and each such name has a test."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pyrannc
from pyrannc.capture import torch_internals

PACKAGE = Path(pyrannc.__file__).parent
INTERNALS = sorted(Path(torch_internals.__file__).parent.glob("*.py"))
OTHERS_PRIVATE = {"_getframe", "_replace"}
"""Of the standard library: of ``sys``, and of named tuples."""
UNDOCUMENTED = ("torch.fx.experimental", "torch.nn.utils.stateless", "torch.multiprocessing.reductions")


def test_every_name_is_tested() -> None:
    trees = [ast.parse(path.read_text()) for path in INTERNALS]
    defined = {name for tree in trees for name in _defined(tree) if not name.startswith("_")}
    assert len(defined) > 40
    tests = [ast.parse(path.read_text()) for path in Path(__file__).parent.glob("test_torch_internals*.py")]
    assert {f"test_{name}" for name in defined} <= {name for tree in tests for name in _defined(tree)}


def _defined(tree: ast.Module) -> Iterator[str]:
    """The names that a file defines."""
    for statement in tree.body:
        for node in ast.walk(statement) if isinstance(statement, ast.Assign | ast.AnnAssign) else [statement]:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                yield node.name
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                yield node.id


def test_no_other_file_names_private_torch() -> None:
    trees = {path: ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}
    assert len(trees) > 200
    own = {name for tree in trees.values() for name in _own_names(tree)}
    found = {path: sorted(_private(tree, own)) for path, tree in trees.items()}
    assert len({name for path in INTERNALS for name in found.pop(path)}) > 20, "private names are no longer seen"
    assert not {str(path): names for path, names in found.items() if names}


def _own_names(tree: ast.Module) -> Iterator[str]:
    """Names that the file gives to something of its own."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _root(node) in ("self", "cls"):
            yield node.attr


def _private(tree: ast.Module, own: set[str]) -> Iterator[str]:
    """What a file takes of torch that is not public, or writes into torch."""
    imported = dict(_imports_of_torch(tree))
    for full in imported.values():
        if full.startswith(UNDOCUMENTED) or "._" in full:
            yield full
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute):
            continue
        of_torch = _root(node) in imported
        private = node.attr.startswith("_") and not node.attr.endswith("__")
        written = of_torch and isinstance(node.ctx, ast.Store)
        if written or (private and (of_torch or node.attr not in own | OTHERS_PRIVATE)):
            yield f"{ast.unparse(node)} in line {node.lineno}"


def _imports_of_torch(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """What a file imports of torch: the name here, and the full name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [(alias.asname or alias.name.split(".")[0], alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [(alias.asname or alias.name, f"{node.module}.{alias.name}") for alias in node.names]
        else:
            continue
        yield from ((name, full) for name, full in names if full.split(".")[0] == "torch")


def _root(node: ast.Attribute) -> str:
    return ast.unparse(node).split(".")[0]
