"""What pyrannc relies on of torch's compiler: a test for each name, under its own name."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.capture.tracing import fake_mode, targets
from torch import Tensor, fx
from torch._dynamo.utils import counters

from pyrannc.blocks.graphs import named
from pyrannc.capture.torch_internals import compiler, fakes

CPU = torch.device("cpu")


def changed(x: Tensor, weight: Tensor, calls: Tensor) -> list[Tensor]:
    calls.add_(1)
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    with torch.enable_grad():
        made = (x @ weight).relu_()
    return [made.detach(), *torch.autograd.grad(made.sum(), [x, weight])]


def example() -> tuple[list[Tensor], fakes.FakeTensorMode]:
    mode = fake_mode()
    with mode:
        return [torch.empty(3, 4), torch.empty(4, 4), torch.empty(())], mode


def functional(call: Callable[..., list[Tensor]] = changed) -> tuple[fx.GraphModule, fakes.FakeTensorMode]:
    arguments, mode = example()
    graph = compiler.operators_below_autograd(call, arguments, mode)
    return compiler.without_changes(graph, arguments, mode), mode


def test_operators_below_autograd() -> None:
    arguments, mode = example()
    found = set(map(str, targets(compiler.operators_below_autograd(changed, arguments, mode))))
    assert {"aten.mm.default", "aten.add_.Tensor", "aten.threshold_backward.default"} <= found


def test_without_changes() -> None:
    graph, _ = functional()
    found = set(map(str, targets(graph)))
    assert {"aten.mm.default", "aten.relu.default", "aten.copy_.default"} <= found
    assert not {"aten.add_.Tensor", "aten.relu_.default"} & found


def pooled(x: Tensor) -> list[Tensor]:
    x = x.detach().requires_grad_()
    with torch.enable_grad():
        made = torch.nn.functional.max_pool2d(x, 2)
    return [made.detach(), *torch.autograd.grad(made.sum(), [x])]


def test_without_changes_where_nothing_was_compiled() -> None:
    """A start whose code is all known imports less of the compiler."""
    script = (
        "import torch\n"
        "from pyrannc.capture.torch_internals import compiler\n"
        "from tests.capture.test_torch_internals_compiler import pooled\n"
        "with (mode := compiler.mode_of_known_sizes()):\n"
        "    arguments = [torch.empty(2, 3, 8, 8)]\n"
        "graph = compiler.operators_below_autograd(pooled, arguments, mode)\n"
        "print(len(compiler.without_changes(graph, arguments, mode)(torch.ones(2, 3, 8, 8))))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "2"


def joint(x: Tensor, weight: Tensor, tangent: Tensor) -> list[Tensor]:
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    with torch.enable_grad():
        made = (x @ weight).tanh()
    return [made.detach(), *torch.autograd.grad(made, [x, weight], tangent)]


def joint_graph(mode: fakes.FakeTensorMode | None = None) -> tuple[fx.GraphModule, fakes.FakeTensorMode]:
    mode = mode or fake_mode()
    with mode:
        arguments = [torch.empty(3, 4), torch.empty(4, 4), torch.empty(3, 4)]
    graph = compiler.without_changes(compiler.operators_below_autograd(joint, arguments, mode), arguments, mode)
    return named(graph, ["primals_0", "primals_1", "tangents_0"]), mode


def test_parted() -> None:
    graph, mode = joint_graph()
    forward, backward = compiler.parted(graph, 1, mode)
    x, weight, tangent = torch.randn(3, 4), torch.randn(4, 4), torch.randn(3, 4)
    made, *kept = forward(x, weight)
    assert [node.name for node in backward.graph.find_nodes(op="placeholder")][-1] == "tangents_0"
    for mine, right in zip([made, *backward(*kept, tangent)], joint(x, weight, tangent), strict=True):
        torch.testing.assert_close(mine, right)


def test_parted_leaves_no_drawing_of_what_cannot_be_parted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def differentiated(x: Tensor, weight: Tensor, grad: Tensor) -> list[Tensor]:
        form = [1], [0], [1], False, [0], 1, [True, True, False]
        return list(torch.ops.aten.convolution_backward(grad, x, weight, None, *form)[:2])

    mode = fake_mode()
    with mode:
        arguments = [torch.empty(2, 3, 8), torch.empty(4, 3, 1), torch.empty(2, 4, 8)]
    graph = compiler.operators_below_autograd(differentiated, arguments, mode)
    graph = named(graph, ["kept_0", "kept_1", "kept_2"])
    # Of an operator with two results the second part is to compute one.
    places = graph.graph.output_node().args[0][1]
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RuntimeError, match="failed to partition"):
        compiler.parted(graph, 1, mode, [places])
    assert list(tmp_path.iterdir()) == []


def test_memory_budget() -> None:
    def wide(x: Tensor, weight: Tensor, tangent: Tensor) -> list[Tensor]:
        x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
        with torch.enable_grad():
            made = torch.nn.functional.gelu(x @ weight) @ weight.T
        return [made.detach(), *torch.autograd.grad(made, [x, weight], tangent)]

    def kept(percent: int | None, once: str = "") -> int:
        mode = fake_mode()
        with mode:
            arguments = [torch.empty(64, 4), torch.empty(4, 64), torch.empty(64, 4)]
        graph = compiler.without_changes(compiler.operators_below_autograd(wide, arguments, mode), arguments, mode)
        graph = named(graph, ["primals_0", "primals_1", "tangents_0"])
        with compiler.memory_budget(percent):
            forward, _ = compiler.parted(graph, 1, mode, once=[node for node in graph.graph.nodes if node.name == once])
        return sum(int(node.meta["val"].numel()) for node in forward.graph.output_node().args[0][1:])

    # Both the product and what gelu makes of it, or the product alone.
    assert kept(None) - kept(80) == 64 * 64
    assert kept(None) == kept(100)
    # What comes in alone, and what is not to be computed again.
    assert kept(0, once="mm") - kept(0) == 64 * 64


def test_memory_budget_in_force() -> None:
    assert compiler.memory_budget_in_force() == 1
    with compiler.memory_budget(80):
        assert compiler.memory_budget_in_force() == 0.8
        with compiler.memory_budget(None):
            assert compiler.memory_budget_in_force() == 0.8
    assert compiler.memory_budget_in_force() == 1


def test_compiled_by_inductor() -> None:
    graph, mode = joint_graph()
    code, strides = compiler.compiled_by_inductor(graph, 3, mode, "whole", CPU)
    assert strides == [(4, 1), (4, 1), (4, 1)]
    arguments = [torch.randn(3, 4), torch.randn(4, 4), torch.randn(3, 4)]
    given = list(arguments)
    for mine, right in zip(code(given), joint(*arguments), strict=True):
        torch.testing.assert_close(mine, right)
    assert given == []


def test_mode_of_known_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    counters.clear()
    for start in range(2):
        graph, mode = joint_graph(compiler.mode_of_known_sizes())
        compiler.compiled_by_inductor(graph, 3, mode, "whole", CPU)
        assert counters["inductor"]["fxgraph_cache_miss"] == 1
        assert counters["inductor"]["fxgraph_cache_hit"] == start
    with compiler.mode_of_known_sizes(), pytest.raises(RuntimeError):
        torch.ones(3).nonzero()


def compiled_and_kept() -> str:
    graph, mode = joint_graph(compiler.mode_of_known_sizes())
    code, _ = compiler.compiled_by_inductor(graph, 3, mode, "whole", CPU)
    key = compiler.key_of_kernels(code)
    assert key is not None
    return key


def test_key_of_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    assert compiled_and_kept() == compiled_and_kept()
    assert compiler.key_of_kernels(joint) is None


def test_kept_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    key = compiled_and_kept()
    for backward in (False, True):
        code = compiler.kept_kernels(key, backward=backward)
        assert code is not None
        arguments = [torch.randn(3, 4), torch.randn(4, 4), torch.randn(3, 4)]
        given = list(arguments)
        for mine, right in zip(code(given), joint(*arguments), strict=True):
            torch.testing.assert_close(mine, right)
        assert given == []
        assert compiler.key_of_kernels(code) == key
    shutil.rmtree(tmp_path / "fxgraph")
    assert compiler.kept_kernels(key, backward=False) is None


def test_state_of_compiler() -> None:
    from torch._functorch import config as partitioning
    from torch._inductor import config

    state = compiler.state_of_compiler()
    assert compiler.state_of_compiler() == state
    for changed_config, name in ((config, "max_fusion_size"), (partitioning, "activation_memory_budget")):
        with changed_config.patch({name: 0.5 if name.endswith("budget") else 3}):
            assert compiler.state_of_compiler() != state
    assert compiler.state_of_compiler() == state


def test_start_compiling_processes() -> None:
    script = (
        "from pyrannc.capture.torch_internals.compiler import start_compiling_processes\n"
        "start_compiling_processes()\n"
        "from torch._inductor.async_compile import AsyncCompile\n"
        "assert AsyncCompile.process_pool.cache_info().currsize == 1\n"
        "AsyncCompile.wait_pool_ready()\n"
        "print(AsyncCompile.use_process_pool())\n"
    )
    environ = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "2"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environ, check=True)
    assert done.stdout.strip() == "True"


def test_begin_loading_compiler() -> None:
    script = (
        "import sys\n"
        "from pyrannc.capture.torch_internals.compiler import begin_loading_compiler\n"
        "assert 'torch._inductor.compile_fx' not in sys.modules\n"
        "begin_loading_compiler()\n"
        "import os\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    import torch._inductor.compile_fx\n"
        "    os._exit(0)\n"
        "assert os.waitpid(child, 0)[1] == 0\n"
        "assert 'torch._inductor.compile_fx' in sys.modules\n"
        "assert begin_loading_compiler() is begin_loading_compiler()\n"
        "from torch._inductor.compile_fx import compile_fx_inner\n"
        "print(compile_fx_inner.__name__)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.strip() == "compile_fx_inner"


def test_has_compiler_of_host() -> None:
    assert compiler.has_compiler_of_host()


def test_default_compiler_folder() -> None:
    script = "from torch._inductor.runtime.cache_dir_utils import cache_dir; print(cache_dir())"
    environ = {name: value for name, value in os.environ.items() if name != "TORCHINDUCTOR_CACHE_DIR"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environ, check=True)
    assert done.stdout.strip() == compiler.default_compiler_folder()
