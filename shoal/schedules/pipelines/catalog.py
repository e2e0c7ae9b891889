"""Pipeline schedules: the actions of a stage, by the name that `pp(n, schedule=…)` knows them by.

1F1B goes backward as early as it can, so that few activations live. Zero-bubble schedules (Qi et
al., "Zero Bubble Pipeline Parallelism") split the backward: I, the gradient of the input, is what
the stage before waits for; W, that of the weights, can run at any later time and fills the bubble.
Breadth-first schedules finish all forwards of a chunk before its backwards.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise

from shoal.errors import BadInput, CheckFailed
from shoal.runtime.wording import nearest
from shoal.schedules.pipelines import Action, ActionKind, Pipeline, accumulate, check_sizes
from shoal.schedules.pipelines.proof import prove
from shoal.schedules.user import is_user_function, load_pipeline

DEFAULT_CHUNKS = 2


def _each(
    kind: ActionKind, microbatches: Iterable[int], chunks: Iterable[int] = (0,)
) -> list[Action]:
    """One action of each micro-batch, chunk by chunk."""
    mine = list(microbatches)
    return [Action(kind, microbatch, chunk) for chunk in chunks for microbatch in mine]


def one_f_one_b(stages: int, stage: int, microbatches: int) -> list[Action]:
    """1F1B: after p-s-1 forwards, one forward and backward in turn.

    The bubble of GPipe, (p-1)/(m+p-1); stage s holds the activations of at most p-s micro-batches.
    """
    forward = _each(ActionKind.FORWARD, range(microbatches))
    backward = _each(ActionKind.BACKWARD, range(microbatches))
    return in_turn(forward, backward, warm_up=stages - stage - 1)


def interleaved(stages: int, stage: int, microbatches: int, chunks: int) -> list[Action]:
    """1F1B over v chunks a stage, p micro-batches through each.

    With m a multiple of p a bubble of (p-1)/(vm+p-1), for v times the messages. Stage s warms up
    with 2(p-s-1) + (v-1)p forwards of a chunk. Where p does not divide m, there are m // p groups
    (at least one), as equal as can be and the larger ones first; the warm-up follows the largest.
    """
    count = max(1, microbatches // stages)
    size, larger = divmod(microbatches, count)
    starts = [size * index + min(index, larger) for index in range(count + 1)]
    forward: list[Action] = []
    backward: list[Action] = []
    for group in (range(*ends) for ends in pairwise(starts)):
        forward += _each(ActionKind.FORWARD, group, range(chunks))
        backward += _each(ActionKind.BACKWARD, group, reversed(range(chunks)))
    warm_up = 2 * (stages - stage - 1) + (chunks - 1) * starts[1]
    return in_turn(forward, backward, warm_up)


def in_turn(forward: list[Action], backward: list[Action], warm_up: int) -> list[Action]:
    """`warm_up` forwards; a forward and a backward in turn; the remaining backwards.

    The first backward comes after one more forward than `warm_up`, if there is one.
    """
    warm_up = min(warm_up, len(forward))
    steady = [action for pair in zip(forward[warm_up:], backward, strict=False) for action in pair]
    return forward[:warm_up] + steady + backward[len(forward) - warm_up :]


def inter_op(stages: int, stage: int, microbatches: int) -> list[Action]:
    """No pipeline: one micro-batch at a time through all p stages.

    Inter-operator parallelism by itself. One stage works while the others wait: a bubble of
    (p-1)/p. One set of activations lives.
    """
    return accumulate(microbatches)


def gpipe(stages: int, stage: int, microbatches: int) -> list[Action]:
    """GPipe: all m forwards, then all m backwards.

    A bubble of (p-1)/(m+p-1); every stage holds the activations of all m micro-batches.
    """
    return bfs(stages, stage, microbatches, 1)


def bfs(stages: int, stage: int, microbatches: int, chunks: int) -> list[Action]:
    """Looped breadth-first: all m micro-batches chunk by chunk.

    Forward through all v chunks, then backward. With m >= p a bubble of (p-1)/(vm+p-1); a
    stage holds the activations of all m micro-batches in all its chunks.
    """
    forward = _each(ActionKind.FORWARD, range(microbatches), range(chunks))
    return forward + _each(ActionKind.BACKWARD, range(microbatches), reversed(range(chunks)))


def zb_h1(stages: int, stage: int, microbatches: int) -> list[Action]:
    """1F1B with a split backward; s weight gradients may wait.

    With m >= p, and F, I and W equally long, a bubble of (p-1)/(3m+p-1), about a third of that of
    1F1B. No stage holds more than p micro-batches, as many as the first stage of 1F1B.
    """
    return _split(stages, stage, microbatches, depth=1)


def zb_h2(stages: int, stage: int, microbatches: int) -> list[Action]:
    """Twice the warm-up of ZB-H1; 2s weight gradients may wait.

    With m >= 2p-1, and F, I and W equally long, no bubble inside a stage, for the activations of up
    to 2p-1 micro-batches. Stages begin and end one after the other, so it pays where the next step
    begins without a barrier.
    """
    return _split(stages, stage, microbatches, depth=2)


def _split(stages: int, stage: int, microbatches: int, depth: int) -> list[Action]:
    """1F1B order of F and I; after an I one W, if more than `depth * stage` wait; then the rest."""
    forward = _each(ActionKind.FORWARD, range(microbatches))
    inputs = _each(ActionKind.INPUT, range(microbatches))
    actions = []
    for action in in_turn(forward, inputs, warm_up=depth * (stages - stage - 1)):
        actions.append(action)
        if action.kind is ActionKind.INPUT and action.microbatch >= depth * stage:
            actions.append(Action(ActionKind.WEIGHT, action.microbatch - depth * stage))
    waiting = range(max(0, microbatches - depth * stage), microbatches)
    return actions + _each(ActionKind.WEIGHT, waiting)


@dataclass(frozen=True)
class PipelineSchedule:
    """A schedule. `looped`: a stage has several chunks, and `make` takes their number."""

    name: str
    make: Callable[..., list[Action]]
    looped: bool = False
    default_chunks: int = 1

    @property
    def description(self) -> str:
        return inspect.getdoc(self.make) or ""

    def num_chunks(self, chunks: int | None) -> int:
        """The chunks of a stage: those given, or the default."""
        if (chunks or 1) > 1 and not self.looped:
            looped = " and ".join(one.name for one in CATALOG.values() if one.looped)
            raise BadInput(f"{self.name} has one chunk a stage, not {chunks}: {looped} take chunks")
        return self.default_chunks if chunks is None else chunks


CATALOG: dict[str, PipelineSchedule] = {
    entry.name: entry
    for entry in (
        PipelineSchedule("inter-op", inter_op),
        PipelineSchedule("gpipe", gpipe),
        PipelineSchedule("1f1b", one_f_one_b),
        PipelineSchedule("interleaved", interleaved, True, DEFAULT_CHUNKS),
        PipelineSchedule("zb-h1", zb_h1),
        PipelineSchedule("zb-h2", zb_h2),
        PipelineSchedule("bfs", bfs, True, DEFAULT_CHUNKS),
    )
}


def schedule(name: str) -> PipelineSchedule:
    """The schedule of this name; FILE.py:FUNCTION loads the user's own."""
    if name in CATALOG:
        return CATALOG[name]
    if is_user_function(name):
        return _of_user(name)
    raise BadInput(f"there is no pipeline schedule {name!r}; {nearest(name, CATALOG)}")


def build(name: str, stages: int, microbatches: int, chunks: int | None = None) -> Pipeline:
    """The schedule of all stages; a user's own is proven. Looped ones have 2 chunks by default."""
    entry = schedule(name)
    chunks = entry.num_chunks(chunks)
    check_sizes(stages, microbatches, chunks)
    more = (chunks,) if entry.looped else ()
    actions = [entry.make(stages, stage, microbatches, *more) for stage in range(stages)]
    pipeline = Pipeline(entry.name, microbatches, chunks, actions)
    if is_user_function(name):
        prove(pipeline)
    return pipeline


def proven_pipeline(
    name: str, stages: int, microbatches: int, chunks: int | None = None
) -> Pipeline:
    """The schedule of FILE.py:FUNCTION; one that the proof rejects is a `BadInput`."""
    try:
        return build(name, stages, microbatches, chunks)
    except CheckFailed as error:
        raise BadInput(f"{name} cannot be used: {error}") from error


def _of_user(name: str) -> PipelineSchedule:
    """A function of four numbers takes chunks; the default of the fourth is their number."""
    make = load_pipeline(name)
    by_position = [
        parameter
        for parameter in inspect.signature(make).parameters.values()
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    looped = len(by_position) > 3
    given = by_position[3].default if looped else 1
    chunks = given if isinstance(given, int) else DEFAULT_CHUNKS
    return PipelineSchedule(name.rpartition(":")[2], make, looped, chunks)
