from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.errors import BadInput, CheckFailed
from shoal.schedules.pipelines import Action, ActionKind, Pipeline
from shoal.schedules.pipelines.catalog import CATALOG, build
from shoal.schedules.pipelines.proof import (
    Deadlock,
    ScheduleWrong,
    capacity_needed,
    prove,
    run_blocking,
)
from shoal.strategy.split_terms import Pp

LOOPED = [name for name in CATALOG if CATALOG[name].looped]
_KINDS = {kind.value: kind for kind in ActionKind}


def written(*stages: str, microbatches: int, chunks: int = 1) -> Pipeline:
    """A pipeline from words: `F0 F0.1 B0.1 B0`."""
    actions = []
    for stage in stages:
        parts = re.findall(r"(\w)(\d+)\.?(\d*)", stage)
        actions.append([Action(_KINDS[kind], int(m), int(c or 0)) for kind, m, c in parts])
    return Pipeline("mine", microbatches, chunks, actions)


@pytest.mark.parametrize("name", list(CATALOG))
def test_every_small_schedule_is_proven(name: str) -> None:
    """Without chunks, room for one message is enough; where all forwards come first, none."""
    for stages, microbatches in product(range(1, 7), range(1, 10)):
        for chunks in range(1, 4 if name in LOOPED else 2):
            proof = prove(build(name, stages, microbatches, chunks))
            if name not in LOOPED:
                assert proof.capacity <= (0 if name in ("inter-op", "gpipe") else 1)


def test_stage_s_of_zb_h1_lets_s_weight_gradients_wait_and_one_be_done() -> None:
    assert prove(build("zb-h1", 4, 8)).peak_waiting == (1, 2, 3, 4)
    assert prove(build("zb-h2", 4, 8)).peak_waiting == (1, 3, 5, 7)
    assert prove(build("1f1b", 4, 8)).peak_waiting == (0, 0, 0, 0)


def test_1f1b_hangs_where_a_send_waits_for_its_receiver() -> None:
    with pytest.raises(Deadlock) as caught:
        run_blocking(build("1f1b", 2, 2), 0)
    assert str(caught.value) == (
        "1f1b of 2 stages and 2 micro-batches hangs with room for 0 messages in a channel: "
        "stage 0 after F1 waits for stage 1 to take it, stage 1 after B0 waits for stage 0 to "
        "take it"
    )


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(list(CATALOG)), st.integers(1, 8), st.integers(1, 12), st.integers(1, 3))
def test_less_room_than_is_needed_hangs_in_a_circle(name: str, p: int, m: int, v: int) -> None:
    pipeline = build(name, p, m, v if name in LOOPED else 1)
    capacity = capacity_needed(pipeline)
    run_blocking(pipeline, capacity + 1)
    if capacity:
        with pytest.raises(Deadlock) as caught:
            run_blocking(pipeline, capacity - 1)
        cycle = caught.value.cycle
        assert [wait.peer for wait in cycle] == [w.stage for w in (*cycle[1:], cycle[0])]


def test_a_chunk_before_the_one_it_needs_on_the_same_stage_hangs() -> None:
    pipeline = written("F0.1 F0 B0.1 B0", microbatches=1, chunks=2)
    with pytest.raises(Deadlock, match=r"stage 0 before F0\.1 waits for stage 0$"):
        prove(pipeline)


def test_whole_and_split_backwards_may_stand_side_by_side() -> None:
    proof = prove(written("F0 F1 I0 B1 W0", "F0 B0 F1 I1 W1", microbatches=2))
    assert proof.peak_live == (2, 1) and proof.actions == 10


@pytest.mark.parametrize(
    ("actions", "sentence"),
    [
        ("F0 B0 F1", "stage 0 never does B1"),
        ("F0 B0", "stage 0 never does F1"),
        ("F0 I0 F1 B1", "stage 0 never does W0"),
        ("F0 B0 F1 B1 B0", "stage 0 does B0 twice"),
        ("F0 F0 B0 F1 B1", "stage 0 does F0 twice"),
        ("B0 F0 F1 B1", "stage 0 does B0 before F0"),
        ("F0 W0 I0 F1 B1", "stage 0 does W0 before I0"),
        ("F0 B0 I0 W0 F1 B1", "does B0 and I0: whole or split, not both"),
        ("F0 B0 F1 B1 F2 B2", "does F2, and there are 2 micro-batches and 1 chunks"),
        ("F0 B0 F1 B1 F0.1", r"does F0\.1, and there are"),
    ],
)
def test_a_wrong_stage_is_named(actions: str, sentence: str) -> None:
    with pytest.raises(ScheduleWrong, match=sentence):
        prove(written(actions, microbatches=2))


def is_right(pipeline: Pipeline) -> bool:
    """By another way: all actions there, and the order of the stages and of the data has no cycle.

    Knows nothing of channels and of `producer`; only for schedules that do not mix split and whole.
    """
    split = any(action.kind is ActionKind.WEIGHT for one in pipeline.actions for action in one)
    kinds = "FIW" if split else "FB"
    every = Counter(
        Action(_KINDS[kind], microbatch, chunk)
        for kind in kinds
        for microbatch in range(pipeline.microbatches)
        for chunk in range(pipeline.chunks)
    )
    graph: TopologicalSorter[object] = TopologicalSorter()
    pieces = [[(v, kind) for v in range(pipeline.stages * pipeline.chunks)] for kind in kinds]
    for microbatch in range(pipeline.microbatches):
        way = pieces[0] + pieces[1][::-1]  # forward through all, backward through all
        for before, after in pairwise(way):
            graph.add((microbatch, *after), (microbatch, *before))
        for piece in pieces[-1] if split else ():
            graph.add((microbatch, *piece), (microbatch, piece[0], "I"))
    for stage, actions in enumerate(pipeline.actions):
        if Counter(actions) != every:
            return False
        nodes = [(a.microbatch, a.chunk * pipeline.stages + stage, a.kind.value) for a in actions]
        for earlier, later in pairwise(nodes):
            graph.add(later, earlier)
    try:
        graph.prepare()
    except CycleError:
        return False
    return True


def mutants(pipeline: Pipeline, dice: random.Random) -> Iterator[tuple[str, Pipeline]]:
    """One stage's list with an action dropped, doubled, moved or two of them swapped."""
    for change in ("drop", "double", "swap", "move"):
        stages = [list(one) for one in pipeline.actions]
        actions = stages[dice.randrange(len(stages))]
        at, to = dice.sample(range(len(actions)), 2)
        if change == "swap":
            actions[at], actions[to] = actions[to], actions[at]
        else:
            action = actions[at] if change == "double" else actions.pop(at)
            actions[to:to] = [] if change == "drop" else [action]
        yield change, Pipeline("mutant", pipeline.microbatches, pipeline.chunks, stages)


def test_mutants_are_refused_exactly_where_they_are_wrong() -> None:
    dice = random.Random(5)
    wrong = Counter[str]()
    for name, stages, microbatches in product(CATALOG, (1, 2, 4), (2, 3, 6)):
        pipeline = build(name, stages, microbatches)
        assert is_right(pipeline)
        for change, mutant in (one for _ in range(6) for one in mutants(pipeline, dice)):
            wrong[change] += not is_right(mutant)
            with nullcontext() if is_right(mutant) else pytest.raises(CheckFailed):
                prove(mutant)
    assert wrong["drop"] == wrong["double"] == 7 * 9 * 6
    assert wrong["swap"] > 200 and wrong["move"] > 200


def words(name: str, stages: int, microbatches: int, chunks: int | None = None) -> list[str]:
    return [" ".join(map(str, one)) for one in build(name, stages, microbatches, chunks).actions]


def test_the_catalog_has_the_names_of_the_strategy_notation() -> None:
    assert [Pp(2, schedule=name).schedule for name in CATALOG] == list(CATALOG)


def test_two_stages_and_three_microbatches_are_this() -> None:
    assert words("inter-op", 2, 3) == ["F0 B0 F1 B1 F2 B2", "F0 B0 F1 B1 F2 B2"]
    assert words("gpipe", 2, 3) == ["F0 F1 F2 B0 B1 B2", "F0 F1 F2 B0 B1 B2"]
    assert words("1f1b", 2, 3) == ["F0 F1 B0 F2 B1 B2", "F0 B0 F1 B1 F2 B2"]
    assert words("zb-h1", 2, 3) == ["F0 F1 I0 W0 F2 I1 W1 I2 W2", "F0 I0 F1 I1 W0 F2 I2 W1 W2"]
    assert words("zb-h2", 2, 3) == ["F0 F1 F2 I0 W0 I1 W1 I2 W2", "F0 I0 F1 I1 F2 I2 W0 W1 W2"]


def test_two_stages_of_two_chunks_are_this() -> None:
    assert words("bfs", 2, 2, 2) == 2 * ["F0 F1 F0.1 F1.1 B0.1 B1.1 B0 B1"]
    assert words("interleaved", 2, 4, 2) == [
        "F0 F1 F0.1 F1.1 F2 B0.1 F3 B1.1 F2.1 B0 F3.1 B1 B2.1 B3.1 B2 B3",
        "F0 F1 F0.1 B0.1 F1.1 B1.1 F2 B0 F3 B1 F2.1 B2.1 F3.1 B3.1 B2 B3",
    ]


def test_interleaved_makes_larger_groups_where_stages_do_not_divide_microbatches() -> None:
    assert words("interleaved", 2, 5, 2)[1].split()[:7] == [
        "F0", "F1", "F2", "F0.1", "B0.1", "F1.1", "B1.1",
    ]  # fmt: skip
    assert words("interleaved", 4, 2, 2) == 2 * ["F0 F1 F0.1 F1.1 B0.1 B1.1 B0 B1"] + [
        "F0 F1 F0.1 F1.1 B0.1 B1.1 B0 B1",
        "F0 F1 F0.1 B0.1 F1.1 B1.1 B0 B1",
    ]


@pytest.mark.parametrize(
    ("sizes", "sentence"),
    [
        (("1f1b", 0, 4), "at least one stage, not 0"),
        (("1f1b", 4, 0), "at least one micro-batch, not 0"),
        (("1f1b", 4, 4, 2), "1f1b has one chunk a stage, not 2: interleaved and bfs"),
        (("gpip", 4, 4), "did you mean 'gpipe'"),
    ],
)
def test_what_is_no_pipeline_is_refused(sizes: tuple[str, int, int], sentence: str) -> None:
    with pytest.raises(BadInput, match=sentence):
        build(*sizes)
