"""The checkpoints of a job: those that the script asks for, and those that it makes by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.errors import BadInput, CheckpointError
from shoal.launch.here.supervisor import replicas_differ
from shoal.runtime.background_writer import BackgroundWriter
from shoal.runtime.checkpoint_folders import (
    complete_versions,
    damaged,
    read_manifest_bytes,
    require_unused,
    versions_in,
)
from shoal.runtime.preemption import EXIT_STATUS
from shoal.runtime.trace import CHECKPOINT
from shoal.runtime.wording import counted
from shoal.train.agreement import Agreement, JobMeetings
from shoal.train.checkpoints import files
from shoal.train.checkpoints.optimizer_state import Schedulers
from shoal.train.data.position import positions_of
from shoal.train.job_state import JobState
from shoal.train.own_loop.loop import OwnLoop
from shoal.train.step.step import Step

if TYPE_CHECKING:
    from shoal.train.checkpoints.state import FittingState

FindCheckpoint = Callable[[Path], files.Checkpoint | None]


class JobCheckpoints:
    """All ranks call its methods in the same order, but for `save_part` and `check`."""

    def __init__(
        self,
        state: JobState,
        loop: OwnLoop,
        meetings: JobMeetings,
        agreement: Agreement,
        is_first: Callable[[], bool],
    ):
        """`is_first` is true on the rank that writes."""
        self.dry = False  # a trial run: nothing is saved
        self.is_preempted = False  # the run was asked to stop, and batches end for that reason
        self._state = state
        self._loop = loop
        self._meetings = meetings
        self._agreement = agreement
        self._is_first = is_first
        self._mesh = state.context.mesh
        self._say = state.context.say
        self._config = state.context.services.config
        self.before_save: Callable[[], object] = lambda: None  # raises if the losses are bad
        self.weights: Callable[[], str] = str  # a digest of those that replicas have in common
        self.after_save: Callable[[int, str], object] = lambda steps, path: None
        self.schedulers = Schedulers(lambda: [o.optimizer for o in loop.optimizers], self._say)
        self._saved_itself = 0  # after so many steps
        self._loaded = 0  # checkpoints
        self._has_continued = False
        self._saved: tuple[Path, dict[str, Any]] | None = None  # where the script saved last
        self._writer = BackgroundWriter()
        self._unfinished: tuple[int, str] | None = None  # the steps and the path it writes

    # ------------------------------------------------------------------ asked for by the script

    def save(
        self, path: Path, about: dict[str, Any], call: str | None = None, wait: bool = True
    ) -> None:
        """See `Job.save`, which is the call."""
        if self.dry:
            return
        self.before_save()

        def write() -> None:
            # all have come, before some wait for a part
            self.check_replicas("job.save", self.finish)
            self._agreement.run(lambda: (None, self._write(path, about, wait)))

        with self._state.context.services.tracer.span(CHECKPOINT, track="steps"):
            self._meetings.hold(write, call)
        self._saved = (path, about)
        self._unfinished = self._state.steps, str(path)
        if wait:
            self.finish()

    def check_replicas(self, call: str, before: Callable[[], object] = lambda: None) -> None:
        """All ranks do what comes before; refused where replicas' weights should be the same."""
        _, texts = self._agreement.run(lambda: (before(), self.weights()))
        if replicas_differ(texts.values()):
            raise BadInput(
                f"ranks have different weights before {call}, after step {self._state.steps}: "
                "each has updated by a rule of its own, such as a learning rate or frozen "
                "parameters that follow its rank or its own loss"
            )

    def finish(self) -> tuple[None, str]:
        """Return when what was saved last is complete, on the rank that writes it; for `run`."""
        saved = self._unfinished
        self._unfinished = None
        self._writer.wait()
        if saved is not None:
            self.after_save(*saved)
        return None, ""

    @contextmanager
    def finishing(self) -> Iterator[None]:
        """After the block, however it ends, nothing is being written; Ctrl-C does not wait."""
        try:
            yield
        except Exception:
            try:
                self.finish()
            except CheckpointError as error:
                self._say(str(error))  # the first error is the one that ends the run
            raise
        except SystemExit:
            self.finish()
            raise
        self.finish()

    def load(self, path: Path) -> dict[str, Any]:
        """See `Job.load`."""
        if not self._state.models:
            raise BadInput("job.load comes after job.step: there is no model yet to load into")

        def read() -> dict[str, Any]:
            self._agreement.run(self.finish)  # of the same checkpoint, it may be
            return self._install(*self._agreement.load(path, lambda: self._read(path)), path)

        document = self._hold(read, "job.load")
        self._state.stream.positions.is_asked = True
        about = document["about"]
        return about if isinstance(about, dict) else {}

    def _hold(self, load: Callable[[], dict[str, Any]], call: str | None = None) -> dict[str, Any]:
        before = self._loaded
        found = self._meetings.hold(load, call)
        if found and self._loaded == before:  # others have loaded it, before this worker came back
            self._state.stream.resume(found["batches"], found["position"], found["steps"])
        return found

    def _install(
        self, saved: files.Checkpoint, states: list[FittingState], path: Path
    ) -> dict[str, Any]:
        from shoal.train.checkpoints.optimizer_state import copy_into
        from shoal.train.checkpoints.state import fit_others

        averages = self._state.fit_averages(saved, path)
        others = [(prepared.model, prepared.shard) for prepared in self._loop.untrained]
        untrained = fit_others(others, "untrained", saved, path)
        try:
            positions = positions_of(saved.document.get("position"))
            schedulers = self.schedulers.fit(saved.document.get("schedulers", []))
        except CheckpointError as error:
            raise damaged(path, error) from error
        for state in states:
            state.load()
        for ema, tensors in zip(self._state.emas, averages, strict=False):
            ema.load(tensors)
        for prepared, tensors in zip(self._loop.untrained, untrained, strict=False):
            copy_into(prepared.model, tensors)
        if names := [name for state in states for name in state.bare]:
            self._say(
                f"the checkpoint has no optimizer state of {len(names)} parameters, such as "
                f"{names[0]}: the optimizer starts there as in step 0"
            )
        for optimizer in self._loop.optimizers:
            optimizer.take_settings()
        self.schedulers.load(schedulers)
        document = saved.document
        self._state.go_on_after(document["steps"], document["batches"], positions)
        if self._meetings.takes_returns:  # other than in an elastic run
            self._agreement.run(lambda: (None, ""))  # none trains before the last one has loaded
        self._loaded += 1
        keys = ("about", "position", "batches", "steps")
        return {key: document.get(key, {}) for key in keys}

    def _read(self, path: Path) -> tuple[tuple[files.Checkpoint, list[FittingState]], str]:
        """A checkpoint that fits, and its digest; nothing is changed."""
        from shoal.train.checkpoints.state import fit

        saved = None
        if versions_in(path):  # of servers
            saved = self._read_servers(path)
        if saved is None:
            saved = files.read(path)
        return (saved, fit(self._state.models, saved, path)), saved.digest

    def _write(self, path: Path, about: dict[str, Any], wait: bool) -> str:
        """Write a checkpoint, or begin to; nothing that the others would have to know."""
        from shoal.train.checkpoints.optimizer_state import model_tensors
        from shoal.train.checkpoints.state import snapshot

        for optimizer in self._loop.optimizers:
            optimizer.give_settings()
        averages = [ema.gather(self._is_of_lowest) for ema in self._state.emas]
        with ExitStack() as stack:
            for step in self._state.models:
                stack.enter_context(step.sync.full_weights(optimizer=True))
            states = [step.sync.state() for step in self._state.models]
            if not self._is_of_lowest:  # asked again: another replica may be lost by now
                return ""
            # models that no optimizer updates, such as target networks
            untrained = [(model_tensors(m.model), m.shard) for m in self._loop.untrained]
            whole = [(shard.gather_full(tensors), tied) for (tensors, tied), shard in untrained]
            others = {"ema": averages, "untrained": whole}
            document = self._description(about)
            saved = snapshot(self._state.models, states, document, others, copy=not wait)
            if self._is_first():
                saved.document = files.as_json(saved.document)
                refuses_nan = any(step.options.stops_at_nan for step in self._state.models)
                write = partial(files.write, path, saved, refuses_nan)
                write() if wait else self._writer.start(write)
        return ""

    def _description(self, about: dict[str, Any]) -> dict[str, Any]:
        return {**self._state.description(about), "schedulers": self.schedulers.document()}

    @property
    def _is_of_lowest(self) -> bool:
        """Whether this rank belongs to the lowest surviving replica."""
        return self._mesh.dp.rank == self._state.lowest_replica

    # ------------------------------------------------------------------ by itself

    @property
    def _own_folder(self) -> Path | None:
        """SHOAL_CHECKPOINT: a script that is started again continues without a line for it.

        None where nothing is saved: it was not asked for, or this is a trial run.
        """
        return self._config.checkpoint.folder if self._state.models and not self.dry else None

    @property
    def saves_itself(self) -> bool:
        return self._own_folder is not None

    def continue_latest(self) -> None:
        """Before the first batch: go on from the latest checkpoint, if asked to."""
        if self._has_continued or not self._state.models:
            return
        self._has_continued = True
        if (own := self._own_folder) is not None:
            self._hold(lambda: self._load_latest(own, _read_if_any))
        self._saved_itself = self._state.steps
        asked = self._config.server_checkpoint
        saves = self._state.models[-1].sync.saves
        if (folder := asked.folder) is None:
            return
        if asked.resume:
            self._hold(lambda: self._load_latest(folder, self._read_servers))
        elif saves is not None:
            versions = complete_versions(folder)
            require_unused([v for v in versions if v.model != saves.model], folder)

    def _load_latest(self, folder: Path, find: FindCheckpoint) -> dict[str, Any]:
        def read() -> tuple[files.Checkpoint | None, str]:
            saved = find(folder)
            return saved, "none" if saved is None else saved.digest

        saved = self._agreement.load(folder, read)
        if saved is None or saved.document["steps"] <= self._state.steps:
            there = "no" if saved is None else "no later"
            begin = f"training begins with step {self._state.steps + 1}"
            self._say(f"{there} checkpoint is in {folder}: {begin}")
            return {}
        from shoal.train.checkpoints.state import fit

        document = self._install(saved, fit(self._state.models, saved, folder), folder)
        self._say(f"resuming from {folder} after {counted(self._state.steps, 'step')}")
        return document

    def must_stop(self, steps: int) -> bool:
        """After SIGTERM: save where the script has saved before, or let it go on to its end."""
        every = self._config.checkpoint.every
        if steps // every > self._saved_itself // every:
            self._save_itself()
        preemption = self._state.context.services.preemption
        if preemption is None:
            return False
        term = self._state.context.strategy.sync_for(self._mesh.dp.size)
        period = 1 if term.lockstep else term.meets_every
        if not preemption.stops_after(steps, self._is_first(), period):
            return False
        self.is_preempted = True
        if self._own_folder is not None:
            self._save_itself()
            self._say(f"preempted: stopped after step {steps}; saved in {self._own_folder}")
            raise SystemExit(EXIT_STATUS)
        if self._saved is None:
            self._say(f"SIGTERM: stopped after step {self._state.steps}; nothing was saved before")
            return True
        path, about = self._saved
        self.save(path, about)
        self._say(f"SIGTERM: stopped after step {self._state.steps}; saved in {path}")
        raise SystemExit(EXIT_STATUS)

    def _save_itself(self) -> None:
        folder = self._own_folder
        if folder is not None and self._saved_itself != self._state.steps:
            last = self._saved
            self.save(folder, {}, wait=self.is_preempted)
            self._saved = last
            self._saved_itself = self._state.steps

    def check(self, step: Step) -> None:
        """Periodic checkpoints of servers hold one model, which the servers train."""
        folder = self._config.server_checkpoint.folder
        if folder is None or self.dry:
            return
        if step.sync.saves is None:
            raise BadInput(f"--server-checkpoint is for ps, and this run trains by {step.term}")
        if self._state.models or self._state.emas:
            raise BadInput(
                "--server-checkpoint is for scripts that train one model with one optimizer and "
                "no averages: use job.save"
            )

    def save_part(self, step: Step) -> None:
        """Add the part of the workers to a checkpoint that the servers write by themselves."""
        saves = step.sync.saves
        number = None if saves is None else saves.take_accepted()
        if saves is not None and number is not None:
            document = {**self._description({}), "averages": []}
            from shoal.train.checkpoints.servers import worker_part  # servers: only where there are

            saves.write(number, lambda: worker_part(step, document))

    def _read_servers(self, folder: Path) -> files.Checkpoint | None:
        from shoal.train.checkpoints.servers import read_servers  # only where there is one

        return read_servers(folder, self._say)


def _read_if_any(folder: Path) -> files.Checkpoint | None:
    return None if read_manifest_bytes(folder) is None else files.read(folder)
