from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest

from shoal.schedules.collectives import Collective, Transfer
from shoal.schedules.collectives.catalog import algorithms, build, kinds
from shoal.schedules.collectives.kinds import Where, kind_named
from shoal.schedules.collectives.proof import ProofFailed, prove

EVERY = [(kind, name) for kind in kinds() for name in algorithms(kind)]
# small numbers, and both sides of powers of two, of squares and of products of two primes
CHOSEN_RANKS = (*range(1, 10), 12, 15, 16, 17, 31, 32, 33, 35, 64)
Rounds = list[list[Transfer]]


@pytest.mark.parametrize(("kind", "name"), EVERY)
def test_every_schedule_up_to_64_ranks_is_proven(kind: str, name: str, whole_suite: bool) -> None:
    for ranks in range(1, 65) if whole_suite else CHOSEN_RANKS:
        prove(build(kind, name, ranks))


@pytest.mark.parametrize("kind", [kind for kind in kinds() if kind_named(kind).rooted])
def test_every_root_is_proven(kind: str) -> None:
    for name, ranks in itertools.product(algorithms(kind), (2, 5, 8)):
        for root in range(ranks):
            prove(build(kind, name, ranks, root=root))


T = Transfer


def mine(ranks: int, rounds: Rounds, chunks: int = 1) -> Collective:
    return Collective("mine", ranks, chunks, rounds)


TWICE = [[T(0, 1, 0, True)], [T(0, 1, 0, True)]]
BOTH = [[T(0, 2, 0, False), T(1, 2, 0, True)]]
RING = [list(transfers) for transfers in build("all_reduce", "ring", 3).rounds]
WRONG = {  # with the round and the rank that are named
    "lacks the contribution of ranks 1, 2 in chunk 0": (None, 0, mine(3, [[T(0, 1, 0, True)]])),
    "adds the contribution of rank 0 to chunk 0 twice": (1, 1, mine(2, TWICE)),
    "sends chunk 0 to rank 2 before it has it": (
        *(0, 1, replace(mine(3, [[T(1, 2, 0, False)]]), kind="broadcast")),
    ),
    "while something else is written": (0, 2, mine(3, BOTH)),
    "receives from ranks 1 and 2, and claims one port": (
        *(0, 0, replace(build("all_reduce", "star", 4), one_port=True)),
    ),
    "into slot 1, which does not fit it": (
        0,
        0,
        mine(3, [[T(0, 1, 2, True, into=1)], *RING[1:]], 3),
    ),
    "takes part": (1, 7, mine(3, [RING[0], [T(0, 7, 0, True)], *RING[2:]], 3)),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_is_named_with_its_round_and_rank(what: str) -> None:
    round_, rank, collective = WRONG[what]
    with pytest.raises(ProofFailed) as caught:
        prove(collective)
    assert (caught.value.round, caught.value.rank) == (round_, rank)
    assert what in str(caught.value)


def mutate(rounds: Rounds, change: str, dice: random.Random) -> None:
    where = dice.choice([transfers for transfers in rounds if transfers])
    index = dice.randrange(len(where))
    if change == "drop":
        where.pop(index)
    elif change == "double":
        dice.choice(rounds).append(where[index])
    elif change == "redirect":
        ranks = {rank for transfers in rounds for t in transfers for rank in (t.src, t.dst)}
        end = dice.choice(["src", "dst"])
        others = sorted(ranks - {getattr(where[index], end)})
        where[index] = replace(where[index], **{end: dice.choice(others)})
    else:
        one, other = dice.sample(range(len(rounds)), 2) if len(rounds) > 1 else (0, 0)
        rounds[one], rounds[other] = rounds[other], rounds[one]


def gives_right_numbers(collective: Collective) -> bool:
    """Carry the schedule out with numbers, knowing nothing of the proof.

    Rank r contributes 7 ** (r + 1) to every chunk, so that no two sums are alike by chance.
    """
    kind, ranks, chunks = collective.pattern, collective.ranks, range(collective.chunks)
    where = (collective.chunks_per_unit, ranks, collective.root)

    def has(test: Where, rank: int, chunk: int) -> bool:
        return bool(test(rank, chunk // where[0], *where[1:]))

    begins = [{c for c in chunks if has(kind.begins, rank, c)} for rank in range(ranks)]
    held = [{c: 7 ** (rank + 1) for c in begins[rank]} for rank in range(ranks)]
    for transfers in collective.rounds:
        try:
            read = [(t, held[t.src][t.chunk]) for t in transfers]
            for t, value in read:
                slot = t.chunk if t.into is None else t.into
                held[t.dst][slot] = value + (held[t.dst][slot] if t.reduce else 0)
        except KeyError:
            return False
    for rank, c in itertools.product(range(ranks), chunks):
        if not has(kind.ends, rank, c):
            continue
        last = ranks if kind.prefix is None else rank + kind.prefix
        want = sum(7 ** (r + 1) for r in range(last) if c in begins[r])
        if kind.overlap:
            found = held[rank].get(c, 0)
            if not all(found // 7 ** (r + 1) for r in range(ranks)) or found < want:
                return False
        elif held[rank].get(c) != want:
            return False
    return True


def test_no_mutant_with_a_wrong_result_is_accepted() -> None:
    dice = random.Random(3)
    wrong = dict.fromkeys(("drop", "double", "redirect", "reorder"), 0)
    for (kind, name), change, ranks in itertools.product(EVERY, wrong, (3, 4, 6)):
        if kind == "barrier":
            continue  # its result is not a number; see the test below
        original = build(kind, name, ranks)
        rounds = [list(transfers) for transfers in original.rounds]
        mutate(rounds, change, dice)
        mutant = replace(original, rounds=rounds)
        if not gives_right_numbers(mutant):
            wrong[change] += 1
            with pytest.raises(ProofFailed):
                prove(mutant)
    assert sum(wrong.values()) >= 200 and min(wrong.values()) >= 40, wrong


def test_a_barrier_without_one_of_its_messages_is_refused() -> None:
    for name, ranks in itertools.product(algorithms("barrier"), (2, 4, 8)):
        original = build("barrier", name, ranks)
        for number, transfers in enumerate(original.rounds):
            for index in range(len(transfers)):
                less = [list(t) for t in original.rounds]
                del less[number][index]
                with pytest.raises(ProofFailed):
                    prove(replace(original, rounds=less))
