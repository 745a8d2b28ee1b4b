"""The packages as a user gets them: a wheel from the source distribution, in an environment that has nothing else."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from email.parser import Parser
from pathlib import Path
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).parents[1]
UV = os.environ.get("UV") or shutil.which("uv") or str(ROOT / "target/tools/bin/uv")
MATURIN = Path(sys.executable).with_name("maturin")
INHERITED = ("PYTHONPATH", "VIRTUAL_ENV", "UV_PROJECT_ENVIRONMENT", "RANNC_")


def run(*command: object, cwd: Path, status: int = 0, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs a command away from the sources' settings."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(INHERITED)}
    arguments = [str(part) for part in command]
    done = subprocess.run(
        arguments, cwd=cwd, env=environment | variables, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done


@pytest.fixture
def folder() -> Iterator[Path]:
    """Beside uv's environments, so that it links packages."""
    path = ROOT / "target" / "wheel-test"
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    yield path
    shutil.rmtree(path)


def built(folder: Path) -> Path:
    """The wheel that is asked for, or one built from the source distribution, or by default from these sources.

    What these were compiled to serves; ``make test-wheel`` compiles those of the distribution, which takes minutes.
    """
    given = os.environ.get("WHEEL")
    if given:
        return ROOT / given
    source = distributed(folder)
    build = [MATURIN, "build", "--release", "--locked", "--interpreter", sys.executable, "--out", folder]
    if given is None:
        run(*build, cwd=ROOT)
    else:
        # What the packages of others were compiled to serves; ours would be taken for what these sources give.
        target = folder / "target"
        if (ROOT / "target" / "release").exists():
            shutil.copytree(ROOT / "target" / "release", target / "release")
        run(*build, cwd=source, CARGO_TARGET_DIR=str(target))
    (wheel,) = folder.glob("*.whl")
    return wheel


def distributed(folder: Path) -> Path:
    """The source distribution, unpacked; all that a build reads is in it."""
    run(MATURIN, "sdist", "--out", folder, cwd=ROOT)
    (sdist,) = folder.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    for path in folder.rglob("*.rs"):
        # All files in it are equally old, whatever has changed since cargo built them.
        path.touch()
    source = folder / sdist.name.removesuffix(".tar.gz")
    assert {"ARCHITECTURE.md", "CHANGELOG.md", "LICENSE", "README.md"} <= set(os.listdir(source))
    assert (source / "docs" / "json.md").exists()
    assert not list(source.rglob("*.so"))
    read = ("python", "crates/*/src", "crates/*/Cargo.toml", "Cargo.toml", "Cargo.lock", "pyproject.toml")
    listed = run("git", "ls-files", *read, cwd=ROOT).stdout
    assert [name for name in listed.splitlines() if not (source / name).exists()] == []
    return source


def check_metadata(wheel: Path) -> None:
    with ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        metadata = Parser().parsestr(archive.read(name).decode())
        assert "pyrannc/py.typed" in archive.namelist()
    assert "-cp310-abi3-" in wheel.name
    assert metadata["Requires-Python"] == ">=3.10"
    assert "Development Status :: 3 - Alpha" in metadata.get_all("Classifier", [])
    assert {"torch", "rich"} <= {re.split(r"\W", need)[0] for need in metadata.get_all("Requires-Dist", [])}
    # A package index shows the README alone: a link to a file beside it would lead nowhere.
    assert re.findall(r"\]\((?!https://|#)[^)]*\)", metadata.get_payload()) == []


@pytest.mark.timeout(900)
def test_a_wheel_in_an_empty_environment(folder: Path) -> None:
    wheel = built(folder)
    check_metadata(wheel)
    run(UV, "venv", "--python", sys.executable, folder / "empty", cwd=folder)
    python = folder / "empty" / "bin" / "python"
    rannc = python.with_name("rannc")
    install = [UV, "pip", "install", "--link-mode", "hardlink", "--python", python]

    run(*install, "--no-deps", wheel, cwd=folder)
    run(python, "-c", "import pyrannc; assert pyrannc.__file__.count('wheel-test'), pyrannc.__file__", cwd=folder)
    for use in ("import pyrannc; pyrannc.RaNNCModule", "from pyrannc import RaNNCModule"):
        told = run(python, "-c", use, cwd=folder, status=1).stderr
        assert told.endswith("\nImportError: pyrannc.RaNNCModule needs PyTorch: pip install torch\n")
        assert "During handling" not in told
    told = run(rannc, "capture", "train:example", "-o", "graph.json", cwd=folder, status=1).stderr
    assert told == "error: capture needs PyTorch: pip install torch\n"
    assert "H200" in run(rannc, "cluster", "--preset", "H200", cwd=folder).stdout

    # Of all versions that the wheel allows, those that the other tests run with: nothing is fetched.
    locked = folder / "locked.txt"
    export = [UV, "export", "--frozen", "--no-dev", "--no-emit-project", "--no-hashes", "--output-file", locked]
    run(*export, cwd=ROOT)
    run(*install, "--constraint", locked, wheel, cwd=folder)
    (quick_start,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    (folder / "train.py").write_text(quick_start)
    trained = run(python, "train.py", cwd=folder, OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
    assert trained.stdout.splitlines()[-1].startswith("rank 0, step 9: loss ")
