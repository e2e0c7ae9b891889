"""The methods of a job for a loop of the user's own."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from shoal.comm.group import Op
from shoal.comm.mesh import Mesh
from shoal.train.own_loop.loop import OwnLoop
from shoal.train.step.step import Step

if TYPE_CHECKING:
    from shoal.train.checkpoints.averages import Ema


class LoopMethods:
    """What `Job` has beside `job.step`, for scripts that write the loop themselves."""

    _loop: OwnLoop
    mesh: Mesh
    device: torch.device
    _steps: list[Step]
    _emas: list[Ema]
    _add_step: Callable[[Step], None]
    _note_exchange: Callable[[], None]
    _refuse_elastic: Callable[[str], None]

    def setup(self, *objects: Any) -> Any:
        """Prepare models and their optimizers for a loop of your own; returns them.

            model, optimizer = job.setup(model, optimizer)

        Any number of models (nn.Module) and optimizers: torch.optim instances whose parameters
        are in these models, or one function from (name, parameter) pairs to an optimizer. The
        returned optimizer synchronizes in `step`; schedulers work on it. Call it on all ranks,
        before `job.load` and `job.batches`. It may be called again with other models.
        """
        steps, returned = self._loop.setup(objects)
        for step in steps:
            self._add_step(step)
        return returned

    def backward(self, loss: Tensor, *, count: Any = None, retain_graph: bool = False) -> Tensor:
        """Backward of `loss`, a mean over this worker's rows; returns that of the global batch.

        The loss is weighted by this worker's fraction of the global batch of `job.batches`, or
        of `count`, which says how many things it is a mean over here. Without either, all workers
        count equally. Gradients are reduced over the workers while it runs; those of several
        calls add up until `optimizer.zero_grad()`.
        """
        return self._loop.backward(loss, count, retain_graph)

    def no_sync(self) -> AbstractContextManager[None]:
        """Inside it, `job.backward` adds up gradients of this worker, which are not reduced.

        The next `job.backward` outside of it reduces their sum, or else `optimizer.step()`.
        """
        return self._loop.no_sync()

    def clip_grad_norm_(self, params: Any, max_norm: float) -> Tensor:
        """As torch.nn.utils.clip_grad_norm_, with the norm over all workers (zero, tp).

        `params` are parameters, a model or an optimizer. Returns the norm before clipping.
        """
        return self._loop.clip_grad_norm_(params, max_norm)

    def gather(self, x: Tensor) -> Tensor:
        """The rows of all workers in the order of the global batch, with gradient.

        `x` has this worker's rows. Its gradient is that of its rows, summed over what all workers
        computed from them; with `job.backward` it comes out as on one device. All ranks call it.
        """
        self._refuse_elastic("job.gather")
        return self._loop.rows.gather(x)

    def rows(self, make: Callable[[int], Tensor] | Tensor) -> Tensor:
        """This worker's rows of what `make(n)` returns for the `n` samples of the global batch.

        Random numbers in it follow from seed and batch, so all workers draw alike:
        `job.rows(lambda n: torch.randn(n, 64))`. Or rows of a tensor that all workers have.
        """
        return self._loop.rows.take(make)

    def ema(self, model: nn.Module, decay: float = 0.999) -> Ema:
        """An exponential moving average of the weights of a model, which `job.save` saves, too."""
        from shoal.train.checkpoints.averages import Ema

        ema = Ema(model, decay, self._steps)
        self._emas.append(ema)
        return ema

    def mean(self, value: Any) -> Any:
        """The mean over the samples of the global batch, of a mean over this worker's rows.

        A number or a tensor, without gradient. All ranks call it.
        """
        fraction = self._loop.rows.fraction
        return self._reduced(value, lambda x: x * fraction, Op.SUM)

    def sum(self, value: Any) -> Any:
        """The sum over all workers; one without rows of the batch counts as 0."""
        is_left_out = self._loop.rows.is_placeholder
        return self._reduced(value, lambda x: torch.zeros_like(x) if is_left_out else x, Op.SUM)

    def any(self, value: Any) -> bool:
        """Whether `value` is true on any rank: a decision that all agree on."""
        self._refuse_elastic("job.any")
        flag = torch.tensor(float(bool(value)), device=self.device)
        self.mesh.world.all_reduce(flag, Op.MAX).wait()
        return bool(flag > 0)

    def barrier(self) -> None:
        """Return when all ranks have called it."""
        self._refuse_elastic("job.barrier")
        self.mesh.world.barrier().wait()

    def _reduced(self, value: Any, change: Callable[[Tensor], Tensor], op: Op) -> Any:
        self._refuse_elastic("job.mean and job.sum")
        given = torch.as_tensor(value, device=self.device).detach()
        if given.dim():
            self._note_exchange()
        exact = given if given.is_floating_point() else given.double()
        total = change(exact).clone().contiguous()
        self.mesh.dp.all_reduce(total, op).wait()
        return total if isinstance(value, Tensor) else float(total)
