"""Systems that train a model on several ranks, each tuned as its own users would: what :mod:`compete` times."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from models import Batch, loss_of, make_model
from one_copy import module_of_one_copy
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW, Optimizer

import pyrannc


@dataclass(frozen=True)
class Task:
    """What all systems do.

    Attributes:
        model: a family of :mod:`models`.
        sizes: of the family.
        rows: of the global batch.
        precision: ``"autocast"`` (bfloat16), ``"bfloat16"`` parameters, or ``"float32"``.
        optimizer: ``"adamw"`` or ``"sgd"``.
        limit_gib: memory that torch may reserve on each device; 0 is no limit.
        dropout: probability, wherever a transformer drops.
        one_copy: the ranks of a host have a transformer's weights once, all together.
    """

    model: str
    sizes: tuple[int, ...]
    rows: int
    precision: str = "autocast"
    optimizer: str = "adamw"
    limit_gib: float = 0
    dropout: float = 0.0
    one_copy: bool = False

    def region(self) -> AbstractContextManager[Any]:
        """Where the model is called."""
        return torch.autocast(_kind(), torch.bfloat16) if self.precision == "autocast" else nullcontext()

    def module(self) -> nn.Module:
        """The model, on the host; its weights are drawn on the device, which is much quicker."""
        if self.one_copy:
            dtype = torch.bfloat16 if self.precision == "bfloat16" else torch.float32
            return module_of_one_copy(self.model, list(self.sizes), self.dropout, dtype, torch.device(_kind()))
        with torch.device(_kind()):
            made = make_model(self.model, list(self.sizes), 0, self.dropout)
        made = made.cpu()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        return made.bfloat16() if self.precision == "bfloat16" else made

    def make_optimizer(self, module: nn.Module) -> Optimizer:
        """The optimizer, fused where torch has that."""
        if self.optimizer == "sgd":
            return SGD(module.parameters(), lr=1e-3, momentum=0.9)
        return AdamW(module.parameters(), lr=1e-6, fused=torch.cuda.is_available())


def _kind() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


class System(ABC):
    """A model in training.

    Attributes:
        optimizer: that updates it.
    """

    optimizer: Optimizer

    @abstractmethod
    def loss(self, batch: Batch) -> Tensor:
        """Forward and backward of this rank's rows; the loss of these."""

    @property
    def plan(self) -> str:
        """What it does, in short."""
        return ""

    @property
    def predicted_ms(self) -> float | None:
        """What it has said that a step takes."""
        return None

    @property
    def memory_error(self) -> float | None:
        """By what share of the measured peak of memory its prediction is off, on the rank where it is most."""
        return None

    def step(self, batch: Batch) -> Tensor:
        """One step of training; the loss of this rank's rows."""
        self.optimizer.zero_grad()
        loss = self.loss(batch)
        self.optimizer.step()
        return loss.detach()


class Plain(System):
    """A system that wraps a module."""

    def __init__(self, task: Task, module: nn.Module, optimizer: Optimizer) -> None:
        self._task, self._module, self.optimizer = task, module, optimizer

    def loss(self, batch: Batch) -> Tensor:
        with self._task.region():
            loss = loss_of(self._module(**batch))
        loss.backward()
        return loss


def layers_of(name: str, module: Any) -> list[nn.Module]:
    """The modules that a family repeats."""
    found = {
        "chain": lambda: module.layers,
        "bert": lambda: module.bert.encoder.layer,
        "gpt2": lambda: module.transformer.h,
        "t5": lambda: [*module.encoder.block, *module.decoder.block],
        "resnet152": lambda: module.blocks,
        "unet3d": lambda: [*module.down, *module.up],
    }
    return list(found[name]())


def with_ddp(task: Task, device: torch.device, *, compiled: bool = False) -> System:
    module = task.module().to(device)
    if compiled:
        for layer in layers_of(task.model, module):
            layer.compile()
    ids = [device.index] if device.type == "cuda" else None
    wrapped = DistributedDataParallel(module, device_ids=ids, gradient_as_bucket_view=True)
    return Plain(task, wrapped, task.make_optimizer(wrapped))


def with_fsdp(task: Task, device: torch.device, *, freed: bool, compiled: bool = False) -> System:
    module = task.module().to(device)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if task.precision == "autocast" else None
    options: dict[str, Any] = {"reshard_after_forward": freed} | ({} if policy is None else {"mp_policy": policy})
    for layer in layers_of(task.model, module):
        if compiled:
            layer.compile()
        fully_shard(layer, **options)
    fully_shard(module, **options)
    return Plain(task, module, task.make_optimizer(module))


class WithRaNNC(Plain):
    """RaNNC, by its own plan, or by its own cut into one Stage on each rank."""

    def __init__(self, task: Task, device: torch.device, *, microbatches: int = 0) -> None:
        if microbatches:
            os.environ["RANNC_PARTITION_NUM"] = str(dist.get_world_size())
            os.environ["RANNC_PIPELINE_NUM"] = str(microbatches)
        if task.limit_gib:
            os.environ["RANNC_MEM_LIMIT_GB"] = str(task.limit_gib)
        if task.precision == "bfloat16":
            # As all others do; by default it sums in float32.
            os.environ["RANNC_REDUCE_DTYPE"] = "param"
        os.environ.setdefault("RANNC_ENABLE_ZERO", "auto")
        module = task.module()
        optimizer = task.make_optimizer(module)
        self._wrapped = pyrannc.RaNNCModule(module, optimizer)
        super().__init__(task, self._wrapped, optimizer)

    @property
    def predicted_ms(self) -> float:
        return float(self._wrapped.plan["predicted"]["step_us"]) / 1e3

    @property
    def memory_error(self) -> float | None:
        errors = [rank.peak_bytes.error for rank in self._wrapped.report().ranks]
        return max((error for error in errors if error is not None), key=abs, default=None)

    @property
    def plan(self) -> str:
        plan = self._wrapped.plan
        stages = " + ".join(f"{len(stage['ranks'])}{_LEVELS[stage['sharding']]}" for stage in plan["stages"])
        short = f"{stages}; {plan['microbatches']} mb; predicted {self.predicted_ms:.1f} ms"
        report = self._wrapped.report()
        return "; ".join(text for text in (short, report.compiled, report.recorded) if text)


_LEVELS = {"none": "", "optimizer": "z1", "gradients": "z2", "kept_params": "z3k", "params": "z3"}


class Part(nn.Module):
    """A pipeline stage of BERT or GPT-2: a run of layers, with what stands before the first and behind the last."""

    def __init__(self, task: Task, module: Any, first: int, end: int, count: int) -> None:
        super().__init__()
        self._task = task
        self.layers = nn.ModuleList(layers_of(task.model, module)[first:end])
        bert = task.model == "bert"
        self.before = (module.bert.embeddings if bert else _Gpt2Before(module)) if first == 0 else None
        self.behind = (_BertBehind(module) if bert else _Gpt2Behind(module)) if end == count else None

    def forward(self, x: Tensor) -> Tensor:
        with self._task.region():
            if self.before is not None:
                x = self.before(x)
            for layer in self.layers:
                x = layer(x)
                x = x if isinstance(x, Tensor) else x[0]
            return x if self.behind is None else self.behind(x)


class _Gpt2Before(nn.Module):
    def __init__(self, module: Any) -> None:
        super().__init__()
        self.wte, self.wpe = module.transformer.wte, module.transformer.wpe

    def forward(self, ids: Tensor) -> Tensor:
        return self.wte(ids) + self.wpe(torch.arange(ids.shape[1], device=ids.device))


class _Gpt2Behind(nn.Module):
    def __init__(self, module: Any) -> None:
        super().__init__()
        self.norm, self.head = module.transformer.ln_f, module.lm_head

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x))


class _BertBehind(nn.Module):
    def __init__(self, module: Any) -> None:
        super().__init__()
        self.pooler, self.cls = module.bert.pooler, module.cls

    def forward(self, x: Tensor) -> Tensor:
        tokens, pairs = self.cls(x, self.pooler(x))
        # One tensor is what a stage hands over.
        return torch.cat([tokens.flatten(1).float(), pairs.float()], dim=1)


def _loss_of_part(name: str, vocabulary: int) -> Callable[[Tensor, Tensor], Tensor]:
    def of_bert(output: Tensor, target: Tensor) -> Tensor:
        tokens, pairs = output[:, :-2].reshape(-1, vocabulary), output[:, -2:]
        return F.cross_entropy(tokens, target[:, :-1].flatten()) + F.cross_entropy(pairs, target[:, -1])

    def of_gpt2(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output[:, :-1].flatten(0, 1).float(), target[:, 1:].flatten())

    return of_bert if name == "bert" else of_gpt2


class WithTorchPipeline(System):
    """``torch.distributed.pipelining``, with one stage on each rank or several in turn; every rank has the whole batch.

    Args:
        stages: on each rank: one is run by 1F1B, several by its interleaved form.
    """

    def __init__(
        self, task: Task, device: torch.device, *, microbatches: int, stages: int = 1, compiled: bool = False
    ) -> None:
        if task.model not in ("bert", "gpt2"):
            raise NotImplementedError(f"{task.model} is not written in stages here")
        rank, ranks = dist.get_rank(), dist.get_world_size()
        module = task.module()
        count, total = len(layers_of(task.model, module)), stages * ranks
        ends = [count * place // total for place in range(total + 1)]
        own = range(rank, total, ranks)
        parts = nn.ModuleList(Part(task, module, ends[place], ends[place + 1], count) for place in own).to(device)
        if compiled:
            for layer in (layer for part in parts for layer in part.layers):  # type: ignore[union-attr]  # all are Parts
                layer.compile()
        vocabulary = module.config.vocab_size  # type: ignore[union-attr]  # both have one
        loss = _loss_of_part(task.model, vocabulary)  # type: ignore[arg-type]  # a number
        made = [PipelineStage(part, place, total, device) for part, place in zip(parts, own, strict=True)]
        self._schedule: Any = (
            Schedule1F1B(made[0], microbatches, loss_fn=loss)
            if stages == 1
            else ScheduleInterleaved1F1B(made, microbatches, loss_fn=loss)  # type: ignore[arg-type]  # a list of stages
        )
        self._is_first, self._is_last, self._microbatches = rank == 0, rank == ranks - 1, microbatches
        self._stages = total
        places = {"bert": ("word_embeddings.weight", "cls.predictions.decoder.weight")}
        ends_of_model = places.get(task.model, ("before.wte.weight", "behind.head.weight"))
        params = dict(parts.named_parameters(remove_duplicate=False))
        tied = (param for name, param in params.items() if name.endswith(ends_of_model))
        self._tied = next(tied, None)
        ends_of_chain = dist.new_group([0, ranks - 1])
        self._ends = ends_of_chain if rank in (0, ranks - 1) else None
        self.optimizer = task.make_optimizer(parts)

    def loss(self, batch: Batch) -> Tensor:
        ids, target = batch["input_ids"], batch["labels"]
        if "next_sentence_label" in batch:
            target = torch.cat([target, batch["next_sentence_label"][:, None]], dim=1)
        losses: list[Tensor] = []
        inputs = (ids,) if self._is_first else ()
        self._schedule.step(*inputs, target=target if self._is_last else None, losses=losses)
        if self._tied is not None and self._ends is not None:
            dist.all_reduce(self._tied.grad, group=self._ends)
        return torch.stack(losses).mean() if losses else torch.zeros((), device=ids.device)

    @property
    def plan(self) -> str:
        return f"{self._stages} stages; {self._microbatches} mb"


SYSTEMS: dict[str, Callable[[Task, torch.device], System]] = {
    "rannc": WithRaNNC,
    "rannc-stages": lambda task, device: WithRaNNC(task, device, microbatches=8),
    "ddp": with_ddp,
    "ddp-compiled": lambda task, device: with_ddp(task, device, compiled=True),
    "fsdp2-kept": lambda task, device: with_fsdp(task, device, freed=False),
    "fsdp2-freed": lambda task, device: with_fsdp(task, device, freed=True),
    "fsdp2-freed-compiled": lambda task, device: with_fsdp(task, device, freed=True, compiled=True),
    "fsdp2-compiled": lambda task, device: with_fsdp(task, device, freed=False, compiled=True),
    "torch-1f1b": lambda task, device: WithTorchPipeline(task, device, microbatches=8),
    "torch-1f1b-compiled": lambda task, device: WithTorchPipeline(task, device, microbatches=8, compiled=True),
    "torch-interleaved": lambda task, device: WithTorchPipeline(task, device, microbatches=8, stages=2),
    "torch-interleaved-compiled": lambda task, device: WithTorchPipeline(
        task, device, microbatches=8, stages=2, compiled=True
    ),
    "bound": WithRaNNC,
}
"""By name. ``bound`` is what one rank's share takes alone: nothing travels."""

SHARES_ROWS = {name: not name.startswith("torch-") for name in SYSTEMS}
"""True where each rank brings a part of the global batch."""
