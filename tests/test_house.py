"""The arrows of the architecture: what may know what, as tables, held against the imports of both languages."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
Arrows = Mapping[str, Sequence[str]]
Edges = dict[str, set[str]]

# What each part imports: what is named here, and what that imports.
BASE = ("counting", "files", "frozen", "log", "switches")
PYTHON: Arrows = {
    "counting": (),
    "errors": (),
    "files": (),
    "frozen": (),
    "suggest": (),
    "switches": (),
    "log": ("errors", "suggest"),
    "old_config": (),
    "config": ("errors", "suggest", "old_config"),
    "core": BASE,
    "capture": ("core",),
    "blocks": ("capture",),
    "job": (*BASE, "config"),
    "profile": ("blocks", "job"),
    "call": ("blocks", "job"),
    "store": ("blocks", "job"),
    "planning": ("config", "profile", "call"),
    "runtime": ("call", "store"),
    "checkpoint": ("store",),
    "ledger": ("runtime",),
    "face": ("planning", "ledger", "checkpoint"),
    "proof": ("runtime",),
    "module": ("face", "proof"),
    "calibrate": ("planning", "runtime"),
    "distributed": ("job",),
    "proof_command": ("proof", "distributed"),
    "zoo": ("module", "distributed"),
    "command": ("capture", "calibrate", "proof_command", "zoo"),
    "__main__": ("command",),
    "__init__": ("distributed", "module"),
}
CAPTURE: Arrows = {
    "torch_internals": (),
    "user": ("torch_internals",),
    "reads": ("user",),
    "nodes": ("reads",),
    "whole": ("nodes",),
    "trace": ("whole",),
    "passes": ("trace",),
    "rows": ("passes",),
    "lower": ("rows",),
    "captured": ("lower",),
}
SPEAK_WITH_OTHER_RANKS = (
    "job/", "distributed.py", "runtime/channels.py", "runtime/collectives.py", "profile/links.py",
    "capture/torch_internals/patching.py", "zoo/workers.py",
)  # fmt: skip
"""The last one starts ranks, which meet at it; the one before keeps a forward from it."""
CRATES: Arrows = {
    "ir": (),
    "cost": ("ir",),
    "plan": ("ir",),
    "sim": ("cost", "plan"),
    "search": ("sim",),
    "random": (),
    "job": (),
    "report": ("search",),
    "cli": ("report",),
    "py": ("cli", "random", "job"),
}
FOLDERS: Mapping[str, Arrows] = {
    "cost": {"cluster": (), "op": ("cluster",), "block": ("op",), "profile": ("block",)},
    "plan": {
        "schedule": (),
        "partition": (),
        "program": ("schedule", "partition"),
        "machine": ("program",),
        "check": ("machine",),
    },
    "search": {"chain": (), "price": ("chain",), "solve": ("price",), "answer": ("solve",)},
}


def hold(arrows: Arrows, edges: Edges) -> None:
    """Raises unless all parts of ``arrows`` are there, and no edge between them runs against an arrow."""
    assert set(arrows) <= set(edges), "a part of the table is gone"
    assert not [
        f"{part} -> {used}"
        for part in arrows
        for used in sorted(edges[part] & set(arrows) - {part} - _below(part, arrows))
    ]


def _below(part: str, arrows: Arrows) -> set[str]:
    return {below for used in arrows[part] for below in {used, *_below(used, arrows)}}


def circle(edges: Edges) -> list[str]:
    try:
        TopologicalSorter(edges).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def joined(edges: Edges, part: Mapping[str, str]) -> Edges:
    """Edges between the parts that hold the ends."""
    found: Edges = {name: set() for name in part.values()}
    for source, targets in edges.items():
        found[part[source]] |= {part[target] for target in targets}
    return found


# --- Python ---


def python_imports() -> tuple[Edges, set[str]]:
    """Which file imports which, by dotted name from the package on; and the files that import torch.distributed."""
    package = ROOT / "python" / "pyrannc"
    files = {".".join(path.relative_to(package.parent).with_suffix("").parts): path for path in package.rglob("*.py")}
    edges: Edges = {name: set() for name in files}
    speaking = set()
    for name, path in files.items():
        for imported in _imported(name, ast.parse(path.read_text())):
            candidates = (imported, f"{imported}.__init__", imported.rpartition(".")[0])
            edges[name] |= {next((known for known in candidates if known in files), name)} - {name}
            if imported.startswith("torch.distributed"):
                speaking.add(str(path.relative_to(package)))
    return edges, speaking


def _imported(name: str, tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = name.split(".")[: -node.level] if node.level else []
            base = ".".join([*above, *filter(None, [node.module])])
            yield from (f"{base}.{alias.name}" for alias in node.names)


def test_python_packages_keep_the_arrows() -> None:
    edges, _ = python_imports()
    packages = joined(edges, {name: name.split(".")[1] for name in edges})
    assert set(packages) == set(PYTHON)
    hold(PYTHON, packages)


def test_folders_of_the_capture_keep_the_arrows() -> None:
    edges, _ = python_imports()
    inside = {name for name in edges if name.startswith("pyrannc.capture.")}
    own = {name: edges[name] & inside for name in inside}
    hold(CAPTURE, joined(own, {name: name.split(".")[2] for name in inside}))


def test_no_python_file_imports_itself_through_others() -> None:
    edges, _ = python_imports()
    assert sum(map(len, edges.values())) > 100
    assert not circle(edges)


_FACTORIES = {"arange", "empty", "empty_strided", "full", "ones", "rand", "randint", "randn", "tensor", "zeros"}


def test_tensors_are_made_where_it_is_said() -> None:
    # Scripts have a default device, by torch.set_default_device() or as a context.
    package, made, lacking = ROOT / "python" / "pyrannc", 0, []
    for path in package.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())) if "zoo" not in path.parts else ():
            if isinstance(node, ast.Call) and ast.unparse(node.func).removeprefix("torch.") in _FACTORIES:
                made += 1
                if "device" not in {keyword.arg for keyword in node.keywords}:
                    lacking.append(f"{path.relative_to(package)}:{node.lineno}: {ast.unparse(node)}")
    assert made > 50
    assert not lacking


def test_few_python_files_speak_with_other_ranks() -> None:
    _, speaking = python_imports()
    assert all(any(file.startswith(allowed) for file in speaking) for allowed in SPEAK_WITH_OTHER_RANKS)
    assert not {file for file in speaking if not file.startswith(SPEAK_WITH_OTHER_RANKS)}


# --- Rust ---


def rust_uses(crate: str) -> Edges:
    """Which file of a crate names what of which, by path in the crate; tests are left out."""
    source = ROOT / "crates" / crate / "src"
    texts = {}
    for path in sorted(source.rglob("*.rs")):
        name = "::".join(path.relative_to(source).with_suffix("").parts).removesuffix("::mod")
        plain = re.sub(r"//.*", "", path.read_text())
        texts["" if name == "lib" else name] = re.split(r"#\[cfg\(test\)\]\s*mod \w+ \{", plain)[0]
    for parent, text in list(texts.items()):
        for tests in re.findall(r"#\[cfg\(test\)\]\s*mod (\w+);", text):
            texts.pop(f"{parent}::{tests}".removeprefix("::"))
    shown = {name: dict(_shown(text)) for name, text in texts.items()}
    return {name: {_home(name, path, texts, shown) for path in _paths(text)} - {name} for name, text in texts.items()}


_USE = r"^\s*(?:pub(?:\([^)]*\))? )?use ([^;]+);"


def _shown(text: str) -> Iterator[tuple[str, list[str]]]:
    """What a file gives out of its crate: the name, and the path from the file on."""
    for tree in re.findall(r"^\s*pub(?:\([^)]*\))? use ([^;]+);", text, re.M):
        yield from ((path[-1], path) for path in _expanded(tree) if not path[0].startswith("rannc_"))


def _paths(text: str) -> Iterator[list[str]]:
    """Paths inside the crate that a file names."""
    for tree in re.findall(_USE, text, re.M):
        yield from (path for path in _expanded(tree) if path[0] in ("crate", "super"))
    rest = re.sub(_USE, "", text, flags=re.M)
    yield from (path.split("::") for path in re.findall(r"\b(?:crate|super)(?:::\w+)+", rest))


def _expanded(tree: str) -> Iterator[list[str]]:
    """``a::{b, c::d}`` as the paths ``a::b`` and ``a::c::d``."""
    head, brace, inner = tree.strip().partition("{")
    start = [part for part in head.split(" as ")[0].split("::") if part.strip()]
    if not brace:
        yield start
        return
    for part in re.findall(r"(?:[^,{}]|\{(?:[^{}]|\{[^{}]*\})*\})+", inner.rpartition("}")[0]):
        yield from (start + rest for rest in _expanded(part) if rest)


def _home(name: str, path: Sequence[str], texts: Mapping[str, str], shown: Mapping[str, dict[str, list[str]]]) -> str:
    """The file that a path leads to."""
    at = name.split("::") if name and path[0] != "crate" else []
    for part in path:
        here = "::".join(at)
        if part == "super":
            at = at[:-1]
        elif "::".join([*at, part]) in texts:
            at = [*at, part]
        elif len(shown[here].get(part, ())) > 1:
            return _home(here, shown[here][part], texts, shown)
    return "::".join(at)


def test_crates_keep_the_arrows() -> None:
    edges = {}
    for manifest in (ROOT / "crates").glob("*/Cargo.toml"):
        content = tomllib.loads(manifest.read_text())
        names = [*content["dependencies"], *content.get("build-dependencies", ())]
        edges[manifest.parent.name] = {name.removeprefix("rannc-") for name in names if name.startswith("rannc-")}
    assert set(edges) == set(CRATES)
    hold(CRATES, edges)


@pytest.mark.parametrize("crate", CRATES)
def test_no_rust_file_uses_itself_through_others(crate: str) -> None:
    edges = rust_uses(crate)
    assert sum(map(len, edges.values())) >= len(edges) / 2
    assert not circle(edges)


@pytest.mark.parametrize("crate", FOLDERS)
def test_folders_of_a_crate_keep_the_arrows(crate: str) -> None:
    edges = rust_uses(crate)
    hold(FOLDERS[crate], joined(edges, {name: name.split("::")[0] for name in edges}))
