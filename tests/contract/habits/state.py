"""Ways round the wrapper: to the model's own parameters, state and methods."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import SGD, Adam
from torch.optim.swa_utils import AveragedModel

import pyrannc
from tests.contract.habit import equal, refused
from tests.contract.job import Job
from tests.contract.settings import REPLICAS, STAGES, Setting
from tests.contract.training import Chain, Returns, learn, learned, pairs, single

ON_OTHER_RANKS = "use `model.state_dict()`, `model.get_param(name)`"


@refused("RaNNCError", "state_dict", settings=(STAGES,), instead=ON_OTHER_RANKS)
def state_of_the_plain_model(job: Job) -> None:
    """`net.state_dict()` of the wrapped model, where other ranks hold a part of the parameters."""
    net, _, _ = learned(job)
    job.same("state", dict(net.state_dict()))


@refused("RaNNCError", "state_dict", settings=(STAGES,), instead="`net.save_pretrained(path, state_dict=...)`")
def saved_by_a_method_of_the_model(job: Job) -> None:
    """The model saves its own `state_dict()`, as `save_pretrained` of transformers does."""

    class Net(Returns):
        def save_pretrained(self, file: io.BytesIO) -> None:
            torch.save(self.state_dict(), file)

    model = job.wrap(Net(Chain(), F.mse_loss))
    model(*job.batch(pairs))
    model.save_pretrained(io.BytesIO())


@refused("RaNNCError", "pickling|torch.save", "state_dict", settings=(STAGES,), instead="`model.state_dict()`")
def plain_model_saved(job: Job) -> None:
    """`torch.save(net, file)` of the wrapped model, where other ranks hold a part of the parameters."""
    net, _, _ = learned(job)
    torch.save(net.net, io.BytesIO())


@refused("RaNNCError", "deepcopy", settings=(STAGES,), instead="`copy.deepcopy(model)`, on all ranks")
def plain_model_copied(job: Job) -> None:
    """`copy.deepcopy(net)` of the wrapped model, where other ranks hold a part of the parameters."""
    net, _, _ = learned(job)
    copy.deepcopy(net)


@refused("RaNNCError", "get_param", settings=(STAGES,), instead="average what `model.get_param(name)` gives")
def averaged_by_hand(job: Job) -> None:
    """A moving average reads `net.parameters()`, where other ranks hold a part of them."""
    net = Returns(Chain(), F.mse_loss)
    averages = [param.detach().clone() for param in net.parameters()]
    model = job.wrap(net)
    model(*job.batch(pairs))
    for average, param in zip(averages, net.parameters(), strict=True):
        average.lerp_(param.detach(), 0.1)


@refused("RaNNCError", "state_dict", settings=(STAGES,), instead="average what `model.get_param(name)` gives")
def averaged_model(job: Job) -> None:
    """`AveragedModel(model)` of `torch.optim.swa_utils`, where other ranks hold a part of the parameters."""
    _, model, _ = learned(job)
    AveragedModel(model).update_parameters(model)


@refused(
    "RaNNCError",
    r"dist\.broadcast\(\) can neither send nor receive",
    "leave",
    settings=(STAGES, Setting((5, 3), 1, 2, zero="3")),
    instead="leave it out: RaNNC keeps ranks equal",
)
def parameters_broadcast_by_the_script(job: Job) -> None:
    """`dist.broadcast(param.data, 0)` after a step, where other ranks hold a part of the parameters."""
    net, _, _ = learned(job)
    for param in net.parameters() if job.ranks > 1 else ():
        torch.distributed.broadcast(param.data, 0)


@refused(
    "RaNNCError",
    r"dist\.all_reduce\(\) can neither send nor receive",
    "backward.. has summed",
    settings=(STAGES,),
    instead="leave it out: gradients are those of the global batch",
)
def gradients_averaged_by_the_script(job: Job) -> None:
    """`dist.all_reduce(param.grad)` after a backward, where other ranks hold a part of the parameters."""
    net, _, _ = learned(job)
    for param in net.parameters() if job.ranks > 1 else ():
        torch.distributed.all_reduce(param.grad)


@refused(
    "RaNNCError",
    r"group\.broadcast\(\) can neither send nor receive",
    "leave",
    settings=(STAGES, Setting((5, 3), 1, 2, zero="3")),
    instead="leave it out: RaNNC keeps ranks equal",
)
def parameters_broadcast_by_a_group(job: Job) -> None:
    """`dist.group.WORLD.broadcast(param.data, 0)`, where other ranks hold a part of the parameters."""
    net, _, _ = learned(job)
    for param in net.parameters() if job.ranks > 1 else ():
        torch.distributed.group.WORLD.broadcast(param.data, 0).wait()


@equal(settings=(REPLICAS,))
def whole_on_every_rank(job: Job) -> None:
    """All of these where every rank holds the whole model."""
    net, model, _ = learned(job)
    job.same("state", dict(net.state_dict()))
    job.same("copied", dict(copy.deepcopy(net).state_dict()))
    job.same("norm", nn.utils.get_total_norm([param.grad for param in model.parameters() if param.grad is not None]))
    job.same("clipped", nn.utils.clip_grad_norm_(model.parameters(), 0.1))
    job.gradients(model)
    averaged = AveragedModel(net)
    averaged.update_parameters(net)
    job.same("average", [param.detach() for param in averaged.parameters()])
    torch.save(net.net, io.BytesIO())


@refused("RaNNCError", "forward", settings=(STAGES,), instead="call `model(...)` on all ranks")
def plain_model_called(job: Job) -> None:
    """The wrapped model itself is called, as `net.generate()` does, where other ranks hold a part of it."""
    net, _, _ = learned(job)
    net.net(*job.batch(single))


@refused("RaNNCError", "clip_grad_norm", settings=(STAGES,), instead="`model.clip_grad_norm(max_norm)`")
def clipped_by_torch(job: Job) -> None:
    """`nn.utils.clip_grad_norm_(model.parameters(), 1.0)` where other ranks hold a part of the parameters."""
    _, model, _ = learned(job)
    job.same("norm", nn.utils.clip_grad_norm_(model.parameters(), 0.1))
    job.gradients(model)


@refused("RaNNCError", "clip_grad_norm", settings=(STAGES,), instead="`model.clip_grad_norm(max_norm)`")
def clipped_by_what_the_optimizer_lists(job: Job) -> None:
    """`clip_grad_norm_(group["params"], 1.0)` for each of `optimizer.param_groups`, as Lightning's trainer does."""
    _, _, optimizer = learned(job)
    for group in optimizer.param_groups:
        job.same("norm", nn.utils.clip_grad_norm_(group["params"], 0.1))


@refused("RaNNCError", "clip_grad_norm", settings=(STAGES,), instead="`model.clip_grad_norm(max_norm)`")
def clipped_by_a_hook_of_the_optimizer(job: Job) -> None:
    """`optimizer.register_step_pre_hook(...)` with `clip_grad_norm_` of what the optimizer lists."""
    net = Chain()
    optimizer = SGD(net.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(
        lambda self, *_: nn.utils.clip_grad_norm_(self.param_groups[0]["params"], 0.1) and None
    )
    model = job.wrap(Returns(net, F.mse_loss), optimizer)
    for batch in job.batches(pairs):
        model(*batch).backward()
        optimizer.step()
    job.state(model)


@equal()
def lists_of_the_optimizer(job: Job) -> None:
    """`optimizer.param_groups` is read: number of groups, of parameters, of their elements."""
    _, model, optimizer = learned(job)
    for _ in range(2):
        job.same("listed", [[param.numel() for param in group["params"]] for group in optimizer.param_groups])
        optimizer.zero_grad()
        model(*job.batch(pairs, 2)).backward()
        optimizer.step()
    job.state(model)


@refused("RaNNCError", "clip_grad_norm", settings=(STAGES,), instead="`model.clip_grad_norm(float('inf'))`")
def norm_of_gradients(job: Job) -> None:
    """`nn.utils.get_total_norm(...)` of the gradients, where other ranks hold a part of the parameters."""
    _, model, _ = learned(job)
    nn.utils.get_total_norm([param.grad for param in model.parameters() if param.grad is not None])


@refused("RaNNCError", "get_param_grad", settings=(STAGES,), instead="`model.get_param_grad(name)`")
def gradients_logged(job: Job) -> None:
    """The script logs `param.grad.norm()` of each parameter, where other ranks hold a part of them."""
    _, model, _ = learned(job)
    for param in model.parameters():
        if param.grad is not None:
            param.grad.norm().item()


@refused("RaNNCError", "get_param", settings=(STAGES,), instead="`model.get_param(name)`")
def contents_as_an_array(job: Job) -> None:
    """`param.detach().cpu().numpy()` of each parameter, where other ranks hold a part of them."""
    _, model, _ = learned(job)
    for param in model.parameters():
        param.detach().cpu().numpy()


@refused("RaNNCError", "get_param", settings=(STAGES,), instead="`model.get_param(name)`")
def data_read(job: Job) -> None:
    """`param.data.abs().max()` of each parameter, where other ranks hold a part of them."""
    _, model, _ = learned(job)
    for param in model.parameters():
        float(param.data.abs().max())


@equal()
def clipped_by_value(job: Job) -> None:
    """`nn.utils.clip_grad_value_(model.parameters(), most)` before a step."""
    _, model, optimizer = learned(job)
    optimizer.zero_grad()
    model(*job.batch(pairs, 1)).backward()
    nn.utils.clip_grad_value_(model.parameters(), 0.01)
    job.gradients(model)
    optimizer.step()
    job.state(model)


@equal()
def adam_by_hand(job: Job) -> None:
    """An optimizer of the script's own, with a state for each of `model.parameters()`."""
    model = job.wrap(Returns(Chain(), F.mse_loss))
    moments: dict[nn.Parameter, torch.Tensor] = {}
    for batch in job.batches(pairs):
        model.zero_grad()
        model(*batch).backward()
        with torch.no_grad():
            for param in model.parameters():
                moment = moments.setdefault(param, torch.zeros_like(param))
                moment.mul_(0.9).addcmul_(param.grad, param.grad, value=0.1)
                param.addcdiv_(param.grad, moment.sqrt().add_(1e-3), value=-0.01)
    job.state(model)


@equal()
def modules_listed(job: Job) -> None:
    """`model.modules()`, `model.children()` and `model.apply()` visit the model's modules."""
    _, model, _ = learned(job)
    visited: list[str] = []
    model.apply(lambda module: visited.append(type(module).__name__))
    inner = [type(module).__name__ for module in model.modules() if not isinstance(module, pyrannc.RaNNCModule)]
    job.same("modules", inner)
    job.same("visited", [name for name in visited if name != "RaNNCModule"])
    job.same("layers", sum(isinstance(module, nn.Linear) for module in model.modules()))
    job.same("names", [name for name, _ in model.named_modules()])
    job.same("children", [name for name, _ in model.named_children()])
    job.same("one", str(model.get_submodule("net.layers.1")))


@equal()
def signature_and_text(job: Job) -> None:
    """`inspect.signature(model.forward)`, as of transformers' Trainer, and `print(model)`."""
    net, model, _ = learned(job)
    job.same("arguments", str(inspect.signature(model.forward)))
    job.same("layers", str(model).count("Linear"))
    job.same("text", str(net))


@equal()
def parameters_counted(job: Job) -> None:
    """`sum(p.numel() for p in model.parameters())` after the first call."""
    _, model, _ = learned(job)
    job.same("count", sum(param.numel() for param in model.parameters()))
    job.same("shapes", [(name, tuple(param.shape), str(param.dtype)) for name, param in model.named_parameters()])
    job.same("device", str(next(model.parameters()).device))


@equal()
def attribute_set_on_the_wrapper(job: Job) -> None:
    """`model.alpha = 0.5` sets the attribute of the wrapped model."""

    class Net(Chain):
        alpha = 1.0

        def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            return F.mse_loss(super().forward(x) * self.alpha, target)

    net = Net()
    optimizer = SGD(net.parameters(), lr=0.1)
    model = job.wrap(net, optimizer)
    model.alpha = 0.5
    learn(job, model, optimizer)
    model.alpha = 0.25
    learn(job, model, optimizer, step=1)
    job.same("alpha", net.alpha)


@equal()
def copied(job: Job) -> None:
    """`copy.deepcopy(model)` before the first call, as of an average of weights."""
    net = Returns(Chain(), F.mse_loss)
    optimizer = SGD(net.parameters(), lr=0.1)
    model = job.wrap(net, optimizer)
    copied = copy.deepcopy(model)
    learn(job, model, optimizer)
    job.same("state", dict(copied.state_dict()))


@equal(note="by all ranks; the copy has no optimizer")
def copied_later(job: Job) -> None:
    """`copy.deepcopy(model)` after the first call."""
    _, model, optimizer = learned(job)
    copied = copy.deepcopy(model)
    learn(job, model, optimizer, step=1)
    job.state(copied)
    job.same("loss of the copy", copied(*job.batch(pairs, 2)))
    if isinstance(copied, pyrannc.RaNNCModule):
        copied.undeploy()


@equal()
def pickled(job: Job) -> None:
    """`pickle` of the wrapped model before the first call."""
    torch.manual_seed(3)
    model = job.wrap(Chain())
    again = pickle.loads(pickle.dumps(model))
    job.same("state", dict(again.state_dict()))
    job.rows("output", again(*job.batch(single)))
    if isinstance(again, pyrannc.RaNNCModule):
        again.undeploy()


@refused("RaNNCError", "cannot be pickled", r"model\.state_dict\(\)", instead="`torch.save(model.state_dict(), file)`")
def pickled_later(job: Job) -> None:
    """`torch.save(model, file)` after the first call."""
    _, model, _ = learned(job)
    torch.save(model, io.BytesIO())


@equal()
def type_changed_before_the_first_call(job: Job) -> None:
    """`model.double()` or `model.to(dtype)` after wrapping, before the first call."""
    net = Returns(Chain(), F.mse_loss).to(torch.float32)
    optimizer = SGD(net.parameters(), lr=0.1)
    model = job.wrap(net, optimizer)
    model.double()
    learn(job, model, optimizer)
    job.state(model)


@refused("RaNNCError", "half|bfloat16|dtype", instead="change the type before the first call")
def type_changed_after_wrapping(job: Job) -> None:
    """`model.bfloat16()` or `model.half()` after the first call."""
    _, model, _ = learned(job)
    model.bfloat16()


@equal()
def inside_of_another_module(job: Job) -> None:
    """The wrapped model is a part of another module, which lists, saves and loads all, as a `LightningModule`."""

    class Outer(nn.Module):
        def __init__(self, net: nn.Module) -> None:
            super().__init__()
            self.net, self.scale = net, nn.Linear(1, 1)

    _, model, optimizer = learned(job)
    outer = Outer(model)
    job.same("modules", [name for name, _ in outer.named_modules()])
    job.same("parameters", [(name, param.numel()) for name, param in outer.named_parameters()])
    state = copy.deepcopy(outer.state_dict())
    learn(job, model, optimizer, step=1)
    outer.load_state_dict(state)
    job.state(model)
    outer.eval()
    job.same("mode", [module.training for module in model.modules()])


@equal()
def optimizer_not_given(job: Job) -> None:
    """The optimizer is made before wrapping, and not given to `RaNNCModule`."""
    net = Returns(Chain(), F.mse_loss)
    optimizer = Adam(net.parameters(), lr=0.01)
    model = job.wrap(net)
    for step in range(2):
        learn(job, model, optimizer, step=step)
    job.state(model)


@refused("RaNNCError", "assign=True", instead="leave out `assign=True`")
def state_assigned(job: Job) -> None:
    """`model.load_state_dict(state, assign=True)` after the first call."""
    _, model, _ = learned(job)
    model.load_state_dict(model.state_dict(), assign=True)


@equal()
def part_of_the_state_loaded(job: Job) -> None:
    """`model.load_state_dict(state, strict=False)` with a part of the keys, and others."""
    _, model, optimizer = learned(job)
    part = {"net.head.bias": torch.ones(6), "net.layers.0.bias": torch.full((6,), 0.5), "other": torch.ones(1)}
    found = model.load_state_dict(part, strict=False)
    job.same("keys", (found.missing_keys, found.unexpected_keys))
    job.state(model)
    learn(job, model, optimizer, step=1)
    job.state(model)


@equal()
def plain_model_loaded(job: Job) -> None:
    """`net.load_state_dict(state)` of the wrapped model, on all ranks, as from a file that all read."""
    net, model, optimizer = learned(job)
    every = {"rank0_only": False} if isinstance(model, pyrannc.RaNNCModule) else {}
    state = copy.deepcopy(model.state_dict(**every))
    learn(job, model, optimizer, step=1)
    net.load_state_dict(state)
    job.state(model)
    learn(job, model, optimizer, step=2)


@equal()
def state_of_another_model_loaded(job: Job) -> None:
    """A state dict lacks a key, or has another shape: torch's own error, on all ranks, and training goes on."""
    _, model, optimizer = learned(job)
    for wrong in ({"net.head.bias": torch.ones(5)}, {"net.head.beas": torch.ones(6)}, 3):
        try:
            model.load_state_dict(wrong)
        except (RuntimeError, TypeError) as error:
            job.same("error", str(error).removeprefix("TypeError: "))
    learn(job, model, optimizer, step=1)
    job.state(model)


@equal((REPLICAS,))
def gradients_kept_by_the_script(job: Job) -> None:
    """The script keeps `param.grad` of a loss, and computes those of another one."""
    _, model, _ = learned(job)
    kept = []
    for step in (1, 2):
        model.zero_grad()
        model(*job.batch(pairs, step)).backward()
        kept.append([param.grad for param in model.parameters()])
    job.same("differ", all(not torch.equal(first, second) for first, second in zip(*kept, strict=True)))


@equal()
def gradient_of_an_input_alone(job: Job) -> None:
    """`torch.autograd.grad(loss, x)` leaves the gradients of parameters alone."""
    model = job.wrap(Returns(Chain(), F.mse_loss))
    x, target = job.batch(pairs)
    x.requires_grad_()
    (gradient,) = torch.autograd.grad(model(x, target), x)
    job.rows("gradient of x", gradient)
    job.gradients(model)


def _of_some_parameters(job: Job) -> None:
    net = Returns(Chain(), F.mse_loss)
    model = job.wrap(net)
    ends = [net.net.layers[0].weight, net.net.head.weight]
    model(*job.batch(pairs)).backward(inputs=ends)
    job.same("gradients", [param.grad for param in net.parameters()])
    job.same("of a loss", torch.autograd.grad(3 * model(*job.batch(pairs, 1)), ends))
    job.same("gradients afterwards", [param.grad for param in net.parameters()])


@equal((REPLICAS,))
def gradients_of_some_parameters(job: Job) -> None:
    """`loss.backward(inputs=[...])` and `torch.autograd.grad(loss, [...])` for some of the parameters."""
    _of_some_parameters(job)


@refused(
    "RaNNCError", "is on rank [01], not on rank", settings=(STAGES,), instead="`loss.backward()`, and read `.grad`"
)
def gradients_of_parameters_elsewhere(job: Job) -> None:
    """The same, where other ranks hold some of them."""
    _of_some_parameters(job)


@equal()
def head_without_gradient(job: Job) -> None:
    """The model returns outputs of two heads; the script uses one, and the other's gradients stay None."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.chain, self.first, self.second = Chain(3), nn.Linear(6, 2), nn.Linear(6, 2)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            hidden = self.chain(x)
            return self.first(hidden), self.second(hidden)

    model = job.wrap(Net())
    for x, _ in job.batches(pairs):
        first, _ = model(x)
        (first.square().sum() / max(1, len(x))).backward()
    job.gradients(model)


@equal((REPLICAS, Setting((3, 0, 5), 1, 4), Setting((5, 3), 1, 1)), note="where every rank holds the whole model")
def average_put_in_place(job: Job) -> None:
    """`param.data = average[name]` for an evaluation, and the former `.data` back after it."""
    net, model, optimizer = learned(job)
    average = {name: param.data * 0.5 for name, param in net.named_parameters()}
    for step in (1, 2):
        former = {name: param.data for name, param in net.named_parameters()}
        for name, param in net.named_parameters():
            param.data = average[name]
        with torch.no_grad():
            job.same("evaluated", model(*job.batch(pairs, step)))
        for name, param in net.named_parameters():
            param.data = former[name]
        learn(job, model, optimizer, step=step)
    job.state(model)


@equal()
def state_with_a_buffer_of_the_script(job: Job) -> None:
    """The script assigns a buffer that the forward does not read, between calls, and saves and copies the model."""
    net = Returns(Chain(), F.mse_loss)
    net.register_buffer("epoch", torch.tensor(0))
    optimizer = Adam(net.parameters(), lr=0.01)
    model = job.wrap(net, optimizer)
    for step in range(2):
        learn(job, model, optimizer, step=step)
        net.epoch = torch.tensor(step + 1)
        job.state(model)
    job.state(copy.deepcopy(model))
    kept = {"rank0_only": False} if job.ranks > 1 else {}
    state = {name: tensor.clone() for name, tensor in model.state_dict(**kept).items()}
    net.epoch.fill_(9)
    model.load_state_dict(state)
    job.same("epoch", net.epoch)


@refused("RaNNCError", "after its last call", "call the model", instead="call the model first")
def state_with_layers_that_no_call_has_seen(job: Job) -> None:
    """The model gets another layer, and its state is saved before its next call."""
    net, model, _ = learned(job)
    net.adapter = nn.Linear(2, 2)
    if job.ranks > 1:
        job.state(model)


class _Told(Returns):
    """Takes a factor from what it loads, in a hook and in code of its own."""

    def __init__(self) -> None:
        super().__init__(Chain(), F.mse_loss)
        self.factor, self.loaded = 1.0, {"times": 0}
        self.register_load_state_dict_pre_hook(_tell)

    def forward(self, x: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = super().forward(x, *rest) * (self.factor + self.loaded["times"])
        return loss

    def _load_from_state_dict(self, *args: Any) -> None:
        self.loaded["times"] += 1
        super()._load_from_state_dict(*args)


def _tell(module: nn.Module, state: dict[str, torch.Tensor], *_: Any) -> None:
    module.factor = float(state["net.head.bias"].sum())


class _Configured(Returns):
    """Multiplies by a setting, which it loads with its state."""

    def __init__(self, settings: dict[str, float]) -> None:
        super().__init__(Chain(), F.mse_loss)
        self.settings = settings

    def forward(self, x: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = super().forward(x, *rest) * self.settings["factor"]
        return loss

    def get_extra_state(self) -> dict[str, float]:
        return dict(self.settings)

    def set_extra_state(self, state: dict[str, float]) -> None:
        self.settings.update(state)


@equal()
def extra_state_in_settings_of_the_script(job: Job) -> None:
    """`set_extra_state` fills a dict of settings that the script has too, and reads and changes afterwards."""
    settings = {"factor": 1.0}
    net = _Configured(settings)
    optimizer = SGD(net.parameters(), lr=0.1)
    model = job.wrap(net, optimizer)
    learn(job, model, optimizer)
    model.load_state_dict({**model.state_dict(), "_extra_state": {"factor": 2.0}})
    job.same("settings", settings)
    learn(job, model, optimizer, step=1)
    settings["factor"] = 3.0
    learn(job, model, optimizer, step=2)
    job.state(model)


@equal()
def loaded_by_hooks(job: Job) -> None:
    """`load_state_dict` runs hooks of the model, or its own `_load_from_state_dict`, that set Python attributes."""
    net = _Told()
    optimizer = SGD(net.parameters(), lr=0.1)
    model = job.wrap(net, optimizer)
    learn(job, model, optimizer)
    model.load_state_dict(model.state_dict())
    learn(job, model, optimizer, step=1)
    job.same("attributes", (net.factor, net.loaded["times"]))
    job.state(model)
