"""Several elements for each row in one dimension, as the patches of all images, and how many each has."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from tests.contract.habit import equal, refused
from tests.contract.job import Job
from tests.contract.settings import COVERING, EMPTY, PIPELINE, REPLICAS, STAGES, Setting
from tests.contract.training import WIDTH, Chain

_PATCHES = 3
"""Of each image."""


class _OfPatches(nn.Module):
    """Takes the patches of all images in one tensor, and a size of each image."""

    def __init__(self) -> None:
        super().__init__()
        self.chain = Chain()

    def forward(self, patches: Tensor, sizes: Tensor) -> Tensor:
        images = self.chain(patches).view(sizes.shape[0], -1, WIDTH)
        return images.cumsum(1).sum(1) * sizes.sum(1, keepdim=True)


def _images(rows: int, generator: Generator) -> tuple[Tensor, Tensor]:
    return torch.randn(rows * _PATCHES, WIDTH, generator=generator), torch.rand(rows, 2, generator=generator)


def _with_patches(job: Job, data: Any = _images, patches: int = _PATCHES, **options: Any) -> None:
    model = job.wrap(_OfPatches(), **options)
    for step in range(2):
        images, sizes = map(job.own, data(8, Generator().manual_seed(step)))
        images = images[: patches * len(sizes)].requires_grad_()
        out = model(images, sizes)
        job.rows("output", out)
        (out.square().sum() / max(1, len(sizes))).backward()
        job.rows("gradient of the images", images.grad)
        job.gradients(model)


@equal((*COVERING, EMPTY), note="as many for each row; otherwise an error")
def packed_rows(job: Job) -> None:
    """An argument has several elements of dimension 0 for each row, such as the patches of all images."""
    _with_patches(job)


@equal((REPLICAS, STAGES, Setting((2, 2, 4), 2, 2), Setting((4, 4), 2, 4)))
def packed_rows_of_equal_sizes(job: Job) -> None:
    """Images have one size, so that the tensor of sizes is the same on all ranks that have as many of them."""
    _with_patches(job, lambda rows, generator: (_images(rows, generator)[0], torch.ones(rows, 2)))


@equal((*COVERING, EMPTY))
def packed_rows_named(job: Job) -> None:
    """The same, with `RaNNCModule(..., batch_arguments=["patches", "sizes"])`."""
    _with_patches(job, batch_arguments=["patches", "sizes"])


@equal((REPLICAS, PIPELINE))
def number_of_packed_elements_changes(job: Job) -> None:
    """Images of later batches have another size."""
    model = job.wrap(_OfPatches())
    for step, patches in enumerate((3, 5, 1, 3)):
        generator = Generator().manual_seed(step)
        images, sizes = torch.randn(8 * patches, WIDTH, generator=generator), torch.rand(8, 2, generator=generator)
        out = model(job.own(images), job.own(sizes))
        job.rows("output", out)
        (out.square().sum() / max(1, out.shape[0])).backward()
        job.gradients(model)


class _Within(nn.Module):
    """Lets the patches of each image meet, as attention does that is told where images begin."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, begins: Tensor) -> Tensor:
        lengths = begins[1:] - begins[:-1]
        images = torch.split(self.inner(x), lengths.tolist())
        return x + torch.cat([image.softmax(0) @ image.T @ image for image in images])


class _Tower(nn.Module):
    """Blocks of a vision tower, between which all patches stand in one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Within() for _ in range(4))

    def forward(self, patches: Tensor, grid: Tensor) -> Tensor:
        sizes = torch.repeat_interleave(grid[:, 1] * grid[:, 2], grid[:, 0])
        begins = F.pad(sizes.cumsum(0, dtype=torch.int32), (1, 0))
        for block in self.blocks:
            patches = block(patches, begins)
        return patches


def _with_tower(job: Job, steps: tuple[tuple[int, list[list[int]]], ...]) -> None:
    """Of each step, how many patches an image has on average, and the sizes of images, which come in turn."""
    model = job.wrap(_Tower())
    for step, (patches, sizes) in enumerate(steps):
        grid = torch.tensor(sizes).repeat(8 // len(sizes), 1)
        images = torch.randn(8 * patches, WIDTH, generator=Generator().manual_seed(step))
        out = model(job.own(images), job.own(grid))
        job.rows("output", out)
        (out.square().sum() / max(1, len(out))).backward()
        job.gradients(model)


@equal((*COVERING, Setting((3, 3, 2), 3, 2)), note="each block stays whole; the model is cut between them")
def attention_within_each_image(job: Job) -> None:
    """Blocks are told where images begin in a packed tensor (`cu_seqlens`)."""
    _with_tower(job, ((6, [[1, 2, 3]]), (6, [[1, 2, 3]])))


@equal((REPLICAS, STAGES, PIPELINE))
def images_of_other_sizes(job: Job) -> None:
    """The same, where images of a later batch have another size."""
    _with_tower(job, ((6, [[1, 2, 3]]), (4, [[2, 2, 1]])))


@equal((REPLICAS, STAGES, PIPELINE))
def images_of_two_shapes(job: Job) -> None:
    """The same, where images have as many patches, but not the same height."""
    _with_tower(job, ((6, [[1, 2, 3], [1, 6, 1]]), (6, [[1, 6, 1]])))


@equal((Setting((4, 4), 1, 2),), note="computed on all rows by every rank")
def images_of_unlike_sizes(job: Job) -> None:
    """The same, where images have as many patches only on average."""
    _with_tower(job, ((6, [[1, 1, 4], [1, 2, 4]]),))


@refused(
    "InputError",
    "sizes",
    settings=(Setting((4, 4), 1, 2), STAGES),
    instead="bring images of the sizes of the first batch",
)
def other_sizes_in_a_later_batch(job: Job) -> None:
    """Images of a later batch have as many patches only on average, unlike those of the first."""
    _with_tower(job, ((6, [[1, 2, 3]]), (6, [[1, 1, 4], [1, 2, 4]])))


@refused("MismatchError", "packed", "images of one size", settings=(STAGES,), instead="images of one size in a batch")
def packed_rows_unlike_on_ranks(job: Job) -> None:
    """The rows of one rank have more packed elements than those of another."""
    _with_patches(job, patches=_PATCHES - job.rank % 2)


@refused("InputError", "packed", "images of one size", settings=(STAGES,), instead="images of one size in a batch")
def packed_rows_that_do_not_divide(job: Job) -> None:
    """There are packed elements left over, in a later batch."""
    model = job.wrap(_OfPatches())
    for step, left in enumerate((0, 1)):
        images, sizes = map(job.own, _images(8, Generator().manual_seed(step)))
        model(images[: len(images) - left], sizes)
