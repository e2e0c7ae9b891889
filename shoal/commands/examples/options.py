"""The command line that the examples share."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from torch.utils.data import TensorDataset

import shoal
from shoal.runtime.checkpoint_folders import MANIFEST
from shoal.runtime.wording import counted


class Options(argparse.Namespace):
    """How to train. The launcher sets the number of workers, the strategy and the seed."""

    @property
    def of_step(self) -> dict[str, Any]:
        """The options that are passed to `job.step` unchanged."""
        names = ("clip_norm", "accumulate", "precision", "exact", "microbatches")
        return {name: getattr(self, name) for name in names}

    def but(self, **changes: Any) -> Options:
        """The same options except for these."""
        return Options(**{**vars(self), **changes})

    def about(self, example: str) -> dict[str, Any]:
        """What a checkpoint says about itself, for `shoal eval`."""
        return {"example": example, "options": vars(self)}


class OptionParser(argparse.ArgumentParser):
    """The common options, with an example's own defaults."""

    def __init__(
        self,
        name: str,
        description: str,
        *,
        epochs: int,
        batch_size: int,
        lr: float | None = None,
        clip_norm: float | None = None,
    ):
        super().__init__(prog=name, description=description)
        add = self.add_argument
        everywhere = "samples in a step, over all workers (%(default)s)"
        pieces = "number of micro-batches that a batch is computed in (%(default)s)"
        bound = f"bound the norm of the gradient ({clip_norm or 'unbounded'})"
        exact = "micro-batches of a batch, with --exact (%(default)s)"
        products = "of activations and matrix products (%(default)s)"
        add("--epochs", type=count, default=epochs, help="passes over the data (%(default)s)")
        add("--batch-size", type=count, default=batch_size, help=everywhere)
        add("--lr", type=positive, default=lr, help=f"learning rate ({lr or 'by size'})")
        add("--accumulate", type=count, default=1, help=pieces)
        add("--clip-norm", type=positive, default=clip_norm, help=bound)
        add("--exact", action="store_true", help="the same bits at any number of workers")
        add("--microbatches", type=count, default=8, help=exact)
        add("--precision", choices=("fp32", "bf16", "fp16"), default="fp32", help=products)
        add("--steps", type=count, help="stop after this many steps")
        add("--out", metavar="DIR", help="save a checkpoint here; without it nothing is saved")
        add("--save-every", type=count, metavar="STEPS", help="also save every STEPS steps")
        add("--resume", action="store_true", help="continue from the checkpoint in --out")

    def read(self, argv: Sequence[str] | None) -> Options:
        """Of `argv`, or of the command line where it is None."""
        given = self.parse_args(argv, Options())
        if given.out is None and (given.resume or given.save_every):
            self.error("--resume and --save-every need --out")
        return given


def count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is below 1")
    return number


def positive(text: str) -> float:
    number = float(text)
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a number above 0")
    return number


def probability(text: str) -> float:
    number = float(text)
    if not 0 <= number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a number from 0 to below 1")
    return number


def batches(
    job: shoal.Job, data: TensorDataset, options: Options, example: str
) -> Iterator[shoal.Batch]:
    """The batches to train on, after those of a checkpoint; saves every `save_every` steps."""
    if options.out and options.resume:
        resume(job, options.out)
    for batch in job.batches(
        data, batch_size=options.batch_size, epochs=options.epochs, steps=options.steps
    ):
        yield batch
        if options.out and options.save_every and job.steps % options.save_every == 0:
            job.save(options.out, options.about(example))
    if options.out:
        job.save(options.out, options.about(example))


def resume(job: shoal.Job, out: str) -> None:
    """Continue from the checkpoint in `out`, if there is one."""
    if (Path(out) / MANIFEST).is_file():
        job.load(out)
        job.print(f"resuming from {out} after {counted(job.steps, 'step')}")
    else:
        job.print(f"no checkpoint in {out} yet: starting from the beginning")
