"""Lists with an image, or with the targets, of each row, as models for detection take them.

What is made of each image alone may come before a sub-module that is captured and cut; the rest stays whole round it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.contract.habit import refused, warned
from tests.contract.job import Job
from tests.contract.settings import ONCE, STAGES, TOGETHER, UNCUT
from tests.contract.training import WIDTH, Chain


def _boxes(rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs, and for each row some boxes, of which the first ones count."""
    x = torch.randn(rows, WIDTH, generator=generator)
    boxes, counts = torch.rand(rows, 3, 4, generator=generator), torch.randint(1, 4, (rows,), generator=generator)
    return x, boxes, counts


def _targets(boxes: Tensor, counts: Tensor) -> list[dict[str, Tensor]]:
    """A dict for each row."""
    pairs = zip(boxes, counts.tolist(), strict=True)
    return [{"boxes": own[:count], "labels": torch.arange(count), "area": own.sum()} for own, count in pairs]


class _Detector(nn.Module):
    """Predicts three boxes of a row; its loss is over those that the row has."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Chain(4, 12)

    def loss(self, made: Tensor, targets: list[dict[str, Tensor]]) -> Tensor:
        boxes = [target["boxes"] for target in targets]
        own = [F.l1_loss(y[target["labels"]], target["boxes"]) for y, target in zip(made, targets, strict=True)]
        return torch.stack(own).sum() / sum(map(len, boxes))

    def forward(self, x: Tensor, targets: list[dict[str, Tensor]]) -> Tensor:
        return self.loss(self.net(x).view(-1, 3, 4), targets)


@warned("method loss", instead="lists of dicts of tensors beside a batch are taken for one dict a row")
def targets_in_a_list_of_dicts(job: Job) -> None:
    """`targets` is a list with a dict of tensors for each row, of different extents, as for detection."""
    net = _Detector()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model = job.wrap(net, optimizer)
    for x, boxes, counts in job.batches(_boxes):
        optimizer.zero_grad()
        loss = model(x, targets=_targets(boxes, counts))
        job.same("loss", loss)
        loss.backward()
        job.gradients(model)
        optimizer.step()
    job.state(model)


class _OfSizes(nn.Module):
    """Takes images of different sizes apart."""

    def __init__(self) -> None:
        super().__init__()
        self.detector = _Detector()

    def forward(self, images: list[Tensor], targets: list[dict[str, Tensor]]) -> Tensor:
        rows = [F.adaptive_avg_pool2d(image, (1, WIDTH)).flatten() for image in images]
        return self.detector(torch.stack(rows), targets)  # type: ignore[no-any-return]


@warned("The whole model", settings=UNCUT, instead="`allow_uncut=True`: all ranks compute the global batch")
def images_of_different_sizes(job: Job) -> None:
    """`images` is a list with a tensor for each row, of different sizes, beside a list of dicts."""
    _detect(job, _OfSizes(), allow_uncut=True)


@warned(
    "but for its sub-module 'detector.net'", instead="what comes before and after a sub-module stays whole round it"
)
def images_in_a_list_before_a_backbone(job: Job) -> None:
    """As above; what is made of each image alone goes to a sub-module, as to the backbone of a detection model."""
    _detect(job, _OfSizes())


class _Normalised(_OfSizes):
    def __init__(self) -> None:
        super().__init__()
        self.detector.net = nn.Sequential(nn.BatchNorm1d(WIDTH), self.detector.net)  # type: ignore[assignment]


@warned("but for its sub-module 'detector.net'", settings=TOGETHER, instead="its statistics are those of the batch")
def images_in_a_list_before_batch_norm(job: Job) -> None:
    """As above, where the sub-module has running statistics, which what is tried of it must leave as they are."""
    _detect(job, _Normalised())


class _Noisy(_OfSizes):
    def forward(self, images: list[Tensor], targets: list[dict[str, Tensor]]) -> Tensor:
        return super().forward([image + torch.rand(1) for image in images], targets)


@refused("CaptureError", "allow_uncut", settings=ONCE, instead="draw before the model is called")
def images_changed_by_chance_before_a_backbone(job: Job) -> None:
    """As above, and the model adds noise to the images first."""
    _detect(job, _Noisy())


class _Stacked(nn.Module):
    """Images of one size, through a convolution; the loss is over what each row has."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Tanh(), nn.Conv2d(4, 4, 3))

    def forward(self, images: list[Tensor], targets: list[dict[str, Tensor]]) -> Tensor:
        made = self.backbone(torch.stack([image * 2 for image in images]))
        return torch.stack([y.mean() - own["area"] for y, own in zip(made, targets, strict=True)]).square().mean()


@refused(
    "CaptureError",
    "allow_uncut=True",
    settings=(STAGES,),
    instead="`allow_uncut=True`, or images of one size",
    apart=True,
)
def images_of_another_size_later(job: Job) -> None:
    """As above, all images of a batch are of one size, and those of a later batch of another."""
    net = _Stacked()
    model = job.wrap(net, torch.optim.SGD(net.parameters(), lr=0.1))
    for side, (x, boxes, counts) in zip((8, 7), job.batches(_boxes), strict=False):
        images = [row.mean() * torch.ones(1, side, side) for row in x]
        model(images, _targets(boxes, counts)).backward()


class _Together(_OfSizes):
    def forward(self, images: list[Tensor], targets: list[dict[str, Tensor]]) -> Tensor:
        most = max(float(image.abs().max()) for image in images)
        return super().forward([image / most for image in images], targets)


@refused("CaptureError", "allow_uncut", settings=ONCE, instead="normalise before the model is called")
def images_normalised_together_before_a_backbone(job: Job) -> None:
    """As above, and the model divides all images by the largest number in any of them."""
    _detect(job, _Together())


def _detect(job: Job, net: nn.Module, **options: Any) -> None:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model = job.wrap(net, optimizer, **options)
    for x, boxes, counts in job.batches(_boxes):
        images = [row.view(1, 1, -1).repeat(1, count, count) for row, count in zip(x, counts.tolist(), strict=True)]
        optimizer.zero_grad()
        loss = model(images, _targets(boxes, counts))
        job.same("loss", loss)
        loss.backward()
        job.gradients(model)
        optimizer.step()
    job.state(model)
