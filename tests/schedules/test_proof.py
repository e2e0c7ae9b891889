from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest

from shoal.schedules.collectives.catalog import algorithms, build, kinds
from shoal.schedules.collectives.collective import Collective, Transfer
from shoal.schedules.collectives.kinds import kind_named
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


def refusal(collective: Collective) -> ProofFailed:
    with pytest.raises(ProofFailed) as caught:
        prove(collective)
    return caught.value


def ring_with(change: dict[int, list[Transfer]], **fields: object) -> Collective:
    rounds = [list(transfers) for transfers in build("all_reduce", "ring", 3).rounds]
    for number, transfers in change.items():
        rounds[number] = transfers
    return Collective("mine", 3, 3, rounds, **fields)  # type: ignore[arg-type]


def test_a_missing_contribution_is_named() -> None:
    refused = refusal(Collective("mine", 3, 1, [[Transfer(0, 1, 0, True)]]))
    assert (refused.round, refused.rank) == (None, 0)
    assert "rank 0 lacks the contribution of ranks 1, 2 in chunk 0" in str(refused)


def test_a_doubled_contribution_is_named() -> None:
    twice = [[Transfer(0, 1, 0, True)], [Transfer(0, 1, 0, True)]]
    refused = refusal(Collective("mine", 2, 1, twice))
    assert (refused.round, refused.rank) == (1, 1)
    assert "adds the contribution of rank 0 to chunk 0 twice" in str(refused)


def test_reading_what_one_has_not_got_is_refused() -> None:
    refused = refusal(Collective("mine", 3, 1, [[Transfer(1, 2, 0, False)]], "broadcast"))
    assert (refused.round, refused.rank) == (0, 1)
    assert "sends chunk 0 to rank 2 before it has it" in str(refused)


def test_two_writes_to_one_slot_are_refused() -> None:
    both = [[Transfer(0, 2, 0, False), Transfer(1, 2, 0, True)]]
    assert "while something else is written" in str(refusal(Collective("mine", 3, 1, both)))


def test_a_false_claim_of_one_port_is_refused() -> None:
    star = build("all_reduce", "star", 4)
    refused = refusal(replace(star, one_port=True))
    assert (refused.round, refused.rank) == (0, 0)
    assert "receives from ranks 1 and 2, and claims one port" in str(refused)


def test_a_chunk_in_the_wrong_place_is_refused() -> None:
    wrong = ring_with({0: [Transfer(0, 1, 2, True, into=1)]})
    assert "into slot 1, which does not fit it" in str(refusal(wrong))


def test_a_rank_that_does_not_exist_is_refused() -> None:
    assert "rank 7 takes part" in str(refusal(ring_with({1: [Transfer(0, 7, 0, True)]})))


def drop(rounds: Rounds, dice: random.Random) -> str:
    where = _somewhere(rounds, dice)
    where.pop(dice.randrange(len(where)))
    return "dropped"


def double(rounds: Rounds, dice: random.Random) -> str:
    where = _somewhere(rounds, dice)
    dice.choice(rounds).append(dice.choice(where))
    return "doubled"


def redirect(rounds: Rounds, dice: random.Random) -> str:
    where = _somewhere(rounds, dice)
    index = dice.randrange(len(where))
    ranks = {rank for transfers in rounds for t in transfers for rank in (t.src, t.dst)}
    end = dice.choice(["src", "dst"])
    others = sorted(ranks - {getattr(where[index], end)})
    where[index] = replace(where[index], **{end: dice.choice(others)})
    return "redirected"


def reorder(rounds: Rounds, dice: random.Random) -> str:
    one, other = dice.sample(range(len(rounds)), 2) if len(rounds) > 1 else (0, 0)
    rounds[one], rounds[other] = rounds[other], rounds[one]
    return "reordered"


def _somewhere(rounds: Rounds, dice: random.Random) -> list[Transfer]:
    return dice.choice([transfers for transfers in rounds if transfers])


def gives_right_numbers(collective: Collective) -> bool:
    """Carry the schedule out with numbers, knowing nothing of the proof.

    Rank r contributes 7 ** (r + 1) to every chunk, so that no two sums are alike by chance.
    """
    kind = collective.pattern
    ranks = collective.ranks
    per_unit = collective.chunks_per_unit
    begins = [
        {
            c
            for c in range(collective.chunks)
            if kind.begins(rank, c // per_unit, ranks, collective.root)
        }
        for rank in range(ranks)
    ]
    held = [{c: 7 ** (rank + 1) for c in begins[rank]} for rank in range(ranks)]
    for transfers in collective.rounds:
        try:
            read = [(t, held[t.src][t.chunk]) for t in transfers]
            for t, value in read:
                slot = t.chunk if t.into is None else t.into
                held[t.dst][slot] = value + (held[t.dst][slot] if t.reduce else 0)
        except KeyError:
            return False
    for rank, c in itertools.product(range(ranks), range(collective.chunks)):
        if not kind.ends(rank, c // per_unit, ranks, collective.root):
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
    changes = (drop, double, redirect, reorder)
    wrong = dict.fromkeys(("dropped", "doubled", "redirected", "reordered"), 0)
    refused = 0
    harmless_refused = 0
    for (kind, name), change, ranks in itertools.product(EVERY, changes, (3, 4, 6)):
        if kind == "barrier":
            continue  # its result is not a number; see the test below
        original = build(kind, name, ranks)
        rounds = [list(transfers) for transfers in original.rounds]
        what = change(rounds, dice)
        mutant = replace(original, rounds=rounds)
        right = gives_right_numbers(mutant)
        wrong[what] += not right
        try:
            prove(mutant)
        except ProofFailed:
            refused += not right
            harmless_refused += right
        else:
            assert right, f"{what}: {mutant} is accepted and wrong"
    assert refused == sum(wrong.values()) >= 200
    assert min(wrong.values()) >= 40, wrong


def test_a_barrier_without_one_of_its_messages_is_refused() -> None:
    for name, ranks in itertools.product(algorithms("barrier"), (2, 4, 8)):
        original = build("barrier", name, ranks)
        rounds = [list(transfers) for transfers in original.rounds]
        for number, transfers in enumerate(rounds):
            for index in range(len(transfers)):
                less = [list(t) for t in rounds]
                del less[number][index]
                with pytest.raises(ProofFailed):
                    prove(replace(original, rounds=less))
