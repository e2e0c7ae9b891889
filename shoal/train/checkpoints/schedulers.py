"""Schedulers of a loop of the user's own: found by their optimizers, saved and continued.

torch gives an optimizer no list of its schedulers, so they are looked for when a checkpoint is
written or loaded, among the objects that refer to it. One inside of another belongs to that.
A script that runs finished epochs without batches steps them there, too: what was loaded counts
again when it begins to train.
"""

from __future__ import annotations

import base64
import gc
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from shoal.comm.objects import decode, encode
from shoal.errors import BadInput, CheckpointError, ShoalError
from shoal.runtime.decoders import convert


class SavedScheduler(msgspec.Struct, frozen=True):
    """As a manifest has it; `state` is encoded, in base64."""

    optimizer: int  # the number of its optimizer
    kind: str
    state: str


class Schedulers:
    """Those of the optimizers of `job.setup`."""

    def __init__(self, optimizers: Callable[[], Sequence[Optimizer]], say: Callable[[str], None]):
        self._optimizers = optimizers
        self._say = say
        self._loaded: list[tuple[LRScheduler, dict[str, Any], list[float]]] = []

    def document(self) -> list[dict[str, Any]]:
        saved = []
        for (number, kind), scheduler in self._found():
            state = {key: _plain(value) for key, value in scheduler.state_dict().items()}
            try:
                text = base64.b64encode(encode(state)).decode()
            except BadInput:
                self._say(
                    f"checkpoints lack the state of the {kind}, which is no plain data: save what "
                    "it needs in `about` of job.save"
                )
                continue
            saved.append(msgspec.to_builtins(SavedScheduler(number, kind, text)))
        return saved

    def fit(self, document: Any) -> list[tuple[LRScheduler, dict[str, Any]]]:
        """Those that have a state, and it; nothing is changed. What has no place is said."""
        found = dict(self._found())
        fitting = []
        try:
            for saved in convert(document, list[SavedScheduler]):
                state = decode(base64.b64decode(saved.state))
                scheduler = found.get((saved.optimizer, saved.kind))
                if scheduler is None or scheduler.state_dict().keys() != state.keys():
                    self._say(
                        f"the checkpoint has the state of a {saved.kind}, and its optimizer has "
                        "none like it: make it before job.load"
                    )
                else:
                    fitting.append((scheduler, state))
        except (msgspec.ValidationError, ValueError, AttributeError, ShoalError) as error:
            raise CheckpointError(f"its schedulers: {error}") from error
        return fitting

    def load(self, fitting: list[tuple[LRScheduler, dict[str, Any]]]) -> None:
        """After their optimizers."""
        self._loaded = [(s, state, [float(r) for r in _rates(s)]) for s, state in fitting]
        self._put()

    def begin(self) -> None:
        """The script trains now: finished epochs are over."""
        if self._loaded:
            self._put()
            self._loaded.clear()

    def _put(self) -> None:
        for scheduler, state, rates in self._loaded:
            for key, present in scheduler.state_dict().items():
                if isinstance(present, dict):
                    state[key] = type(present)(state[key])  # such as a Counter
            scheduler.load_state_dict(dict(state))
            for group, present, rate in zip(
                scheduler.optimizer.param_groups, _rates(scheduler), rates, strict=True
            ):
                group["lr"] = present.fill_(rate) if isinstance(present, Tensor) else rate

    def _found(self) -> Iterator[tuple[tuple[int, str], LRScheduler]]:
        """By optimizer and kind; of one kind the first."""
        for number, optimizer in enumerate(self._optimizers()):
            referrers = gc.get_referrers(optimizer)
            owners = [o for d in referrers if type(d) is dict for o in gc.get_referrers(d)]
            own = {id(o): o for o in (*referrers, *owners) if isinstance(o, LRScheduler)}
            own = {key: o for key, o in own.items() if o.optimizer is optimizer}
            inner = {id(i) for o in own.values() for i in getattr(o, "_schedulers", ())}
            outer = {type(o).__name__: o for key, o in own.items() if key not in inner}
            if len(outer) + len(inner) < len(own):
                self._say(
                    f"checkpoints have the state of one of several schedulers of a kind that "
                    f"change one {type(optimizer).__name__}: save them in `about` of job.save"
                )
            yield from (((number, kind), scheduler) for kind, scheduler in outer.items())


def _rates(scheduler: LRScheduler) -> list[Any]:
    return [group["lr"] for group in scheduler.optimizer.param_groups]


def _plain(value: Any) -> Any:
    return dict(value) if isinstance(value, dict) else value
