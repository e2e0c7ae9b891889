"""The user's own loop: forward, loss, `job.backward`, `optimizer.step()`.

job.setup      models and optimizers become parts (`setup.py`)
forward        usable weights, and random numbers of the replica's own (`rows.py`)
job.backward   weights the loss by samples, and reduces the parts it reaches (`part.py`)
step           updates (`optimizer.py`); a step of the job ends with the next batch, or
               with the update where there are no batches
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from shoal.comm.group import Group, Op
from shoal.comm.mesh import Mesh
from shoal.errors import BadInput
from shoal.replica.compiled import is_optimized, uncompiled
from shoal.replica.pipeline.split_backward import leaves_of
from shoal.train.data import AnyBatch
from shoal.train.own_loop.rows import LoopForwards, LoopRows
from shoal.train.own_loop.torch_hooks import clip_for
from shoal.train.step.alike import AlikeLosses
from shoal.train.step.options import OnNan, StepOptions
from shoal.train.step.prepare_model import PreparedModel, check_modules
from shoal.train.step.run_services import StepContext
from shoal.train.step.step import Step

if TYPE_CHECKING:
    from shoal.train.checkpoints.averages import Ema
    from shoal.train.own_loop.optimizer import LoopOptimizer
    from shoal.train.own_loop.part import LoopPart


def reached_parts(loss: Tensor, parts: Sequence[LoopPart], group: Group) -> Sequence[LoopPart]:
    """The parts that get gradients from this loss on any worker of `group`, which has all rows."""
    if len(parts) == 1:
        return parts
    leaves = leaves_of([loss]) if loss.requires_grad else {}
    is_reached = [part.trains and any(p in leaves for p in part.params) for part in parts]
    if group.size > 1 and any(part.sync.collects or part.sums_axes for part in parts):
        device = parts[0].flat.device
        flags = torch.tensor(is_reached, dtype=torch.float32, device=device)
        group.all_reduce(flags, Op.MAX).wait()
        is_reached = [flag > 0 for flag in flags.tolist()]
    return [part for part, reached in zip(parts, is_reached, strict=True) if reached]


_SMALLEST_SHARE = 1e-30
_SMALLEST_COUNT = 1e-300  # a divisor where nothing is counted


class OwnLoop:
    """What a job knows of the loop that a script writes itself.

    `on_step(step, loss)` is called at the end of each step of the job.
    """

    def __init__(
        self, seed: int, context: Callable[[], StepContext], on_step: Callable[[Step, Tensor], None]
    ):
        mesh = context().mesh
        self.mesh = mesh
        self._device = context().device
        self.parts: list[LoopPart] = []
        self.optimizers: list[LoopOptimizer] = []
        self.rows = LoopRows(mesh, seed, self._device, self.parts)
        self._forwards = LoopForwards(mesh, seed, self._device, self.parts)
        self._prepared: list[PreparedModel] = []
        self._taken = WeakIdKeyDictionary()  # parameters that job.setup has had, and their names
        self._context = context
        self._on_step = on_step
        self.reduces = True  # but for job.no_sync
        self.stepped: LoopPart | None = None  # by an optimizer since the last batch
        self._leader: LoopPart | None = None  # without batches a step ends when this one steps
        self._losses: list[Tensor] = []  # of the backward passes of this step
        self._alike = AlikeLosses(lambda line: context().say(line), mesh.data.size)
        self._global_loss: Tensor | None = None  # of the latest one
        self._run = context().with_faults(torch.autograd.backward, self._step_number)

    def _step_number(self) -> int:
        """Of the step that is under way; where replicas take batches in turns, of its own batch."""
        done = max((part.step.steps for part in self.parts), default=0)
        return done + 1 + (self.mesh.dp.rank if self.rows.has_whole_batch else 0)

    # ------------------------------------------------------------------ setting up

    def setup(self, objects: Sequence[Any], options: StepOptions) -> tuple[list[Step], Any]:
        """The steps that were made, and what `job.setup` returns."""
        from shoal.train.own_loop.optimizer import LoopOptimizer
        from shoal.train.own_loop.setup import loop_term, set_up

        given = [o for o in objects if isinstance(o, nn.Module)]
        for model in filter(is_optimized, given):  # the script calls it, with what is inside of it
            check_modules(model, loop_term(self._context()), self._context())
        models = [uncompiled(model)[0] for model in given]
        optimizers = [o for o in objects if not isinstance(o, nn.Module)]
        first = len(self.parts)
        made, updates = set_up(models, optimizers, self._context, self._taken, self.parts, options)
        self._prepared += made
        for prepared in made:
            self._forwards.watch(prepared.model, prepared.shard)
        for optimizer, parts in updates:
            self.optimizers.append(
                LoopOptimizer(optimizer, parts, lambda: self._global_loss, self._after_update)
            )
        self._leader = None
        if self.mesh.world.size > 1:
            clip_for(self)
        replaced = iter([optimizer for optimizer, _ in updates])
        returned = [o if isinstance(o, nn.Module) else next(replaced) for o in objects]
        steps = [part.step for part in self.parts[first:]]
        return steps, returned[0] if len(returned) == 1 else tuple(returned)

    @property
    def untrained(self) -> list[PreparedModel]:
        """Models of which no optimizer updates any parameter."""
        trained = {id(part.step.model) for part in self.parts}
        return [prepared for prepared in self._prepared if id(prepared.model) not in trained]

    # ------------------------------------------------------------------ backward

    def backward(self, loss: Tensor, count: Any = None, retain_graph: bool = False) -> Tensor:
        """See `Job.backward`."""
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            what = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise BadInput(
                f"job.backward takes a loss that is one number, the mean over samples, not {what}"
            )
        if not self.parts:
            raise BadInput(
                "job.setup was given no optimizer, so job.backward has nothing to reduce: make it "
                "first, and give both: model, optimizer = job.setup(model, optimizer)"
            )
        fraction = self.rows.fraction if count is None else self._fraction_of(count)
        reached = reached_parts(loss, self.parts, self.mesh.data)
        self._forwards.check(reached)
        for part in reached:
            part.begin_backward(loss, fraction, self.reduces)
        scale = self.parts[0].sync.gradient_scale
        is_plain = fraction == 1.0 and scale == 1.0
        start = None if is_plain else torch.full_like(loss, fraction * scale)
        self._run(loss, start, retain_graph)
        for part in reached:
            part.end_backward(self.reduces)
        return self._loss_of(loss.detach(), fraction, reached)

    def _fraction_of(self, count: Any) -> float:
        """What the loss is a mean over, here and on all replicas."""
        here = 0.0 if self.rows.is_placeholder else float(count)
        total = here * self.mesh.data.size
        if self.mesh.data.size > 1 and self.parts[0].sync.synchronous:
            counts = torch.tensor(here, dtype=torch.float64).to(self._device)
            self.mesh.data.all_reduce(counts).wait()
            total = float(counts)
        return here / self.mesh.cp.size / max(total, _SMALLEST_COUNT)

    def _loss_of(self, loss: Tensor, fraction: float, reached: Sequence[LoopPart]) -> Tensor:
        axes = self.parts[0].step.shard.token_axes
        if axes:  # the loss of this worker's tokens; the replica has those of several workers
            share = axes.sum(torch.full_like(loss, fraction))
            loss = axes.sum(loss * fraction) / share.clamp(min=_SMALLEST_SHARE)
        if self.reduces:
            syncs = [part.sync for part in reached if part.sync.collects]
            own = loss
            loss = syncs[0].loss(loss) if syncs else loss
            if syncs and self.rows.batch is None:
                self._alike.note(own, loss)
            self._losses.append(loss)
        self._global_loss = loss
        return loss.clone()

    # ------------------------------------------------------------------ steps of the job

    def over(self, batches: Iterator[Any]) -> Iterator[Any]:
        """The batches of `job.batches`, as a loop of models of `job.setup` gets them."""
        try:
            for batch in batches:
                yield self.rows.moved(batch)
                self.end_step()
        except GeneratorExit:  # the script breaks out of its loop
            self.rows.end()
            raise
        self.end_batches()

    def deliver(self, batch: AnyBatch, number: int) -> None:
        """A new batch comes; `number` of them were delivered, in resumed runs, too."""
        self.rows.begin(batch, number)
        self._tell_real(sum(batch.microbatch_sizes) > 0)

    def end_batches(self) -> None:
        self.end_step()
        self.rows.end()
        self._tell_real(True)

    def _tell_real(self, is_real: bool) -> None:
        for prepared in self._prepared:
            prepared.forward_state.rows_are_real = is_real

    def end_step(self) -> None:
        """If an optimizer has stepped since this was called last, a step of the job is over."""
        part = self.stepped
        if part is None:
            return
        self.stepped = None
        losses = self._losses
        self._losses = []
        if len(losses) == 1 and not losses[0].dim():
            total = losses[0]
        elif losses:
            total = torch.stack([loss.double() for loss in losses]).sum()
        else:
            total = torch.zeros(())
        self._on_step(part.step, total)

    def _after_update(self, part: LoopPart) -> None:
        if self._global_loss is None and all(p.grad is None for p in part.params):
            self._context().say(
                "optimizer.step() was called before any job.backward(loss), and no parameter has "
                "a gradient: nothing is trained"
            )
        self._leader = self._leader or part
        if self.rows.batch is not None or part is self._leader:
            self.stepped = part
        if self.rows.batch is None:
            self.end_step()

    # ------------------------------------------------------------------ gradients

    def clips(self, params: Sequence[Tensor]) -> bool:
        """See `torch_hooks.py`: not where workers update with their own gradients."""
        parts = self._parts_with(params)
        return bool(parts) and all(p.sync.collects or p.step.mesh.dp.size == 1 for p in parts)

    def reduce_gradients(self, params: Sequence[Tensor]) -> bool:
        parts = self._parts_with(params)
        for part in parts:
            part.before_update()
        return all(part.whole_gradients for part in parts)

    def _parts_with(self, params: Iterable[Tensor]) -> list[LoopPart]:
        ids = {id(p) for p in params}
        return [part for part in self.parts if any(id(p) in ids for p in part.params)]

    @torch.no_grad()
    def clip_grad_norm_(self, params: Any, max_norm: float) -> Tensor:
        """See `Job.clip_grad_norm_`."""
        chosen = _params_in(params)
        ids = {id(p) for p in chosen}
        parts = self._parts_with(chosen)
        for part in parts:
            if not part.sync.updates_here:
                raise BadInput(
                    f"under {part.step.term} servers have the gradients, so they cannot be clipped "
                    "in the loop: take ps, or job.step(…, clip_norm=…)"
                )
            part.before_update()
        total = torch.stack([part.squared_norm(ids) for part in parts]).sum().sqrt()
        norm = total.to(parts[0].flat.dtype)
        nn.utils.clip_grads_with_norm_(chosen, max_norm, norm)
        return norm


def _params_in(given: Any) -> list[nn.Parameter]:
    """Parameters, or those of a model or of an optimizer."""
    if isinstance(given, nn.Module):
        return list(given.parameters())
    if isinstance(given, torch.optim.Optimizer):
        return [p for group in given.param_groups for p in group["params"]]
    if isinstance(given, Tensor):
        return [given]  # type: ignore[list-item]
    return list(given)


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

    def setup(self, *objects: Any, on_nan: OnNan = "stop") -> Any:
        """Prepare models and their optimizers for a loop of your own; returns them.

            model, optimizer = job.setup(model, optimizer)

        Any number of models (nn.Module) and optimizers: torch.optim instances whose parameters
        are in these models, or one function from (name, parameter) pairs to an optimizer. The
        returned optimizer synchronizes in `step`; schedulers work on it. Call it on all ranks,
        before `job.load` and `job.batches`. It may be called again with other models. `on_nan`
        is that of `job.step`.
        """
        steps, returned = self._loop.setup(objects, StepOptions(on_nan=on_nan))
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

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside it, `job.backward` adds up gradients of this worker, which are not reduced.

        The next `job.backward` outside of it reduces their sum, or else `optimizer.step()`.
        """
        before = self._loop.reduces
        self._loop.reduces = False
        try:
            yield
        finally:
            self._loop.reduces = before

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
        return self._summed(value, self._loop.rows.fraction, self.mesh.data, self.mesh.cp)

    def sum(self, value: Any) -> Any:
        """The sum over all workers; one without rows of the batch counts as 0."""
        return self._summed(value, 0.0 if self._loop.rows.is_placeholder else 1.0, self.mesh.data)

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

    def _summed(self, value: Any, fraction: float, *groups: Group) -> Any:
        self._refuse_elastic("job.mean and job.sum")
        given = torch.as_tensor(value, device=self.device).detach()
        if given.dim():
            self._note_exchange()
        exact = given if given.is_floating_point() else given.double()
        total = (exact * fraction if fraction else torch.zeros_like(exact)).contiguous()
        for group in groups:
            group.all_reduce(total).wait()
        return total if isinstance(value, Tensor) else float(total)
