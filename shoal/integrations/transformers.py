"""Hugging Face's Trainer under a Shoal strategy.

    def train(job):
        trainer = Trainer(model=model, args=args, train_dataset=dataset)
        trainer.add_callback(ShoalCallback(job, trainer))
        trainer.train()

    shoal.run(train)

The Trainer runs as on one device, on every worker; the callback gives each worker its rows of a
batch (so per_device_train_batch_size is the global batch size), and makes backward, clipping and
the update those of the job. Checkpoints are the job's: `job.save`, not the Trainer's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from shoal.errors import BadInput
from shoal.train.job import Job

try:
    from transformers import TrainerCallback  # type: ignore[import-not-found,unused-ignore]
except ImportError as error:  # pragma: no cover
    raise BadInput(
        "shoal.integrations.transformers needs transformers and accelerate: "
        "pip install transformers accelerate"
    ) from error


class ShoalCallback(TrainerCallback):  # type: ignore[misc,unused-ignore]
    """Trains what `trainer` trains with the strategy of `job`."""

    def __init__(self, job: Job, trainer: Any):
        self._job = job
        self._trainer = trainer
        self._count: Any = None  # of tokens under the mean, where the Trainer counts them
        self._loss: Tensor | None = None
        _check(trainer.args)
        self._training_step = trainer.training_step
        trainer.training_step = self._step
        trainer.get_train_dataloader = self._loader(trainer.get_train_dataloader)
        # bars, printed logs and reports to trackers ask for these
        trainer.is_world_process_zero = lambda: job.rank == 0
        trainer.is_local_process_zero = lambda: job.local_rank == 0
        trainer.state.is_world_process_zero = job.rank == 0
        trainer.state.is_local_process_zero = job.local_rank == 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The Trainer has made the optimizer, and has not computed anything yet."""
        trainer = self._trainer
        optimizer = trainer.optimizer
        self._job.setup(trainer.model, getattr(optimizer, "optimizer", optimizer))
        trainer.accelerator.backward = self._backward
        trainer.accelerator.clip_grad_norm_ = self._clip

    def _step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """One micro-batch, as the Trainer computes it; its loss is that of all workers."""
        self._count = num_items_in_batch
        self._training_step(model, inputs, num_items_in_batch)
        assert self._loss is not None
        return self._loss

    def _backward(self, loss: Tensor, **options: Any) -> None:
        if self._trainer.accelerator.sync_gradients:
            self._loss = self._job.backward(loss, count=self._count)
            return
        with self._job.no_sync():  # the gradients of these rows are added up here first
            self._loss = self._job.backward(loss, count=self._count)

    def _clip(self, parameters: Any, max_norm: float, norm_type: float = 2.0) -> Tensor:
        if norm_type != 2:
            raise BadInput(f"the norm of a gradient is the 2-norm under Shoal, not {norm_type}")
        return self._job.clip_grad_norm_(parameters, max_norm)

    def _loader(self, make: Callable[[], Any]) -> Callable[[], Any]:
        def loader() -> Any:
            return _RowsOf(self._job, make())

        return loader


class _RowsOf:
    """A loader of global batches, of which each worker gets its rows."""

    def __init__(self, job: Job, loader: Any):
        self._job = job
        self._loader = loader

    def __iter__(self) -> Iterator[Any]:
        for inputs, _ in self._job.batches(_Pairs(self._loader)):
            yield inputs

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


class _Pairs:
    """Batches as pairs of inputs and row numbers: the Trainer's have their labels inside."""

    def __init__(self, loader: Any):
        self._loader = loader

    def __iter__(self) -> Iterator[Any]:
        for batch in self._loader:
            tensor = next(value for value in batch.values() if isinstance(value, Tensor))
            yield dict(batch), torch.arange(len(tensor))

    def __len__(self) -> int:
        return len(self._loader)


def _check(args: Any) -> None:
    if args.world_size > 1:
        raise BadInput(
            "the Trainer has set up torch.distributed by itself: start the script with `shoal run`"
        )
    if args.save_strategy != "no":
        raise BadInput(
            'ShoalCallback needs TrainingArguments(save_strategy="no"): save with job.save, which '
            "knows which worker has what"
        )
