"""Algorithms, written out for a few ranks."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from shoal.errors import BadInput, CheckFailed
from shoal.schedules.collectives import Collective, Transfer, rooted_at
from shoal.schedules.collectives.catalog import algorithms, build, kinds
from shoal.schedules.collectives.cost import Link
from shoal.schedules.collectives.draw import animated_svg
from shoal.schedules.collectives.kinds import Where, kind_named
from shoal.schedules.collectives.proof import ProofFailed, prove
from shoal.schedules.collectives.transfer_table import Transfer as T
from shoal.schedules.collectives.transfer_table import from_rounds
from shoal.schedules.ring_attention import ChunkPair, RingAttention
from tests import ring_schedule

ADD, PUT = True, False


def test_naive_has_one_message_a_round() -> None:
    messages = [[t for t in r if t.src != t.dst] for r in build("all_reduce", "naive", 3).rounds]
    pairs = [(t.src, t.dst) for transfers in messages for t in transfers]
    assert max(map(len, messages)) == 1
    assert pairs == [(0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1)]


def test_bruck_moves_a_piece_by_the_bits_of_its_distance() -> None:
    rounds = build("all_to_all", "bruck", 4).rounds
    piece = 0 * 4 + 3  # from rank 0 to rank 3: first by 1, then by 2
    ways = [[(t.src, t.dst) for t in transfers if t.chunk == piece] for transfers in rounds]
    assert ways == [[(0, 1)], [(1, 3)]]


def test_double_tree_swaps_leaves_and_inner_nodes() -> None:
    transfers = [t for r in build("all_reduce", "double_tree", 8, segments=1).rounds for t in r]
    first, second = ([t for t in transfers if t.chunk == tree and t.reduce] for tree in (0, 1))
    assert {t.src for t in first} == set(range(1, 8))
    assert {t.dst for t in first} == {0, 2, 4, 6} and {t.dst for t in second} == {1, 3, 5, 7}


def test_torus_of_6_talks_to_right_hand_neighbours_only() -> None:
    ways = {(t.src, t.dst) for r in build("all_reduce", "torus", 6).rounds for t in r}
    rows = {(0, 1), (1, 2), (2, 0), (3, 4), (4, 5), (5, 3)}
    columns = {(0, 3), (3, 0), (1, 4), (4, 1), (2, 5), (5, 2)}
    assert ways == rows | columns


INNER = ("ring", "halving", "direct", "star", "tree")


@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("outer", algorithms("all_reduce"))
def test_hierarchical_takes_any_inner_and_outer_algorithm(inner: str, outer: str) -> None:
    for ranks, node in ((8, 4), (9, 4), (12, 3), (7, 5), (5, 1), (4, 8)):
        prove(build("all_reduce", "hierarchical", ranks, node=node, inner=inner, outer=outer))


@pytest.mark.parametrize("inner", INNER)
def test_hierarchical_has_a_rack_level(inner: str) -> None:
    for ranks in (16, 24, 27, 31):
        prove(build("all_reduce", "hierarchical", ranks, node=4, rack=2, inner=inner, outer="tree"))


def test_between_nodes_only_the_shards_of_hierarchical_travel() -> None:
    schedule = build("all_reduce", "hierarchical", 16, node=4, outer="ring")
    between = [t for r in schedule.rounds for t in r if t.src // 4 != t.dst // 4]
    per_rank = len([t for t in between if t.src == 5]) / schedule.chunks
    assert per_rank == 2 * (4 - 1) / 16  # 2(n-1)V/p for n nodes


def test_one_rank_has_nothing_to_send() -> None:
    for kind in kinds():
        for name in algorithms(kind):
            table = build(kind, name, 1).table
            assert not (table.src != table.dst).any(), (kind, name)


def test_bad_options_are_refused() -> None:
    with pytest.raises(BadInput, match="cannot have 4 columns"):
        build("all_reduce", "torus", 6, columns=4)
    with pytest.raises(BadInput, match="multiple of 4 chunks"):
        Collective("mine", 4, 3, (), "all_gather")


def test_ring_over_4_ranks_is_this() -> None:
    assert build("all_reduce", "ring", 4).rounds == (
        # reduce-scatter: chunk r grows on its way to rank r
        (T(0, 1, 3, ADD), T(1, 2, 0, ADD), T(2, 3, 1, ADD), T(3, 0, 2, ADD)),
        (T(0, 1, 2, ADD), T(1, 2, 3, ADD), T(2, 3, 0, ADD), T(3, 0, 1, ADD)),
        (T(0, 1, 1, ADD), T(1, 2, 2, ADD), T(2, 3, 3, ADD), T(3, 0, 0, ADD)),
        # all-gather: chunk r is handed on from rank r
        (T(0, 1, 0, PUT), T(1, 2, 1, PUT), T(2, 3, 2, PUT), T(3, 0, 3, PUT)),
        (T(0, 1, 3, PUT), T(1, 2, 0, PUT), T(2, 3, 1, PUT), T(3, 0, 2, PUT)),
        (T(0, 1, 2, PUT), T(1, 2, 3, PUT), T(2, 3, 0, PUT), T(3, 0, 1, PUT)),
    )


def test_slow_ring_over_4_ranks_uses_one_link_at_a_time() -> None:
    assert build("all_reduce", "slow_ring", 4).rounds == (
        (T(0, 1, 0, ADD),), (T(1, 2, 0, ADD),), (T(2, 3, 0, ADD),),
        (T(3, 0, 0, PUT),), (T(0, 1, 0, PUT),), (T(1, 2, 0, PUT),),
    )  # fmt: skip


def test_a_table_reads_like_the_rounds_it_was_made_of() -> None:
    rounds = ((T(0, 1, 0, PUT),), (T(1, 2, 0, ADD), T(0, 2, 1, PUT, into=3)))
    table = from_rounds(rounds)
    assert table == rounds and len(table) == 2 and table.num_transfers == 3
    assert table[-1] == rounds[1] and table[:1] == rounds[:1]


def test_a_gather_with_another_root_turns_ranks_and_pieces() -> None:
    star = Collective("star", 3, 3, [[T(1, 0, 1, PUT), T(2, 0, 2, PUT)]], "gather")
    assert rooted_at(star, 1).rounds == ((T(2, 1, 2, PUT), T(0, 1, 0, PUT)),)


SVG = "{http://www.w3.org/2000/svg}"


def ring() -> ElementTree.Element:
    return ElementTree.fromstring(animated_svg(build("all_reduce", "ring", 4)))


def test_the_picture_needs_nothing_from_elsewhere() -> None:
    text = animated_svg(build("all_reduce", "ring", 4))
    assert "href" not in text and "@import" not in text and "<script" not in text
    assert text.count("http") == 1  # the name of the SVG namespace


def test_every_transfer_travels_once_and_every_round_has_a_caption() -> None:
    assert len(list(ring().iter(f"{SVG}animateTransform"))) == 24
    words = "".join(ring().itertext())
    assert all(f"Round {number} of 6" in words for number in range(1, 7))
    assert "Every rank sends 1 chunk; who receives it adds it to its own data." in words


def test_it_starts_with_every_ranks_own_lamps_lit_and_ends_with_all() -> None:
    lamps = [c for c in ring().iter(f"{SVG}circle") if c.get("opacity") is not None]
    at_start = [lamp for lamp in lamps if lamp.get("opacity") == "1" and lamp.get("cx")]
    moved = [lamp for lamp in lamps if lamp.find(f"{SVG}animate") is not None]
    assert len(moved) == 4 * 4 * 3  # in each of 16 chunks the lamps of 3 other ranks go on
    ends = {lamp.find(f"{SVG}animate").get("values").split(";")[-1] for lamp in moved}  # type: ignore[union-attr]
    assert ends == {"1"} and len(at_start) >= 16


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7, 16])
def test_every_query_meets_every_key_it_sees_once(ranks: int) -> None:
    ring_schedule.prove(RingAttention(ranks, causal=True))
    ring_schedule.prove(RingAttention(ranks, causal=False))


def test_zigzag_gives_every_rank_the_same_causal_work() -> None:
    schedule = RingAttention(4)
    assert [sum(ring_schedule.work(schedule, rank)) for rank in range(4)] == [8.0] * 4
    assert {tuple(ring_schedule.work(schedule, rank)[1:]) for rank in range(4)} == {(2.0, 2.0, 2.0)}


def test_a_schedule_that_leaves_out_a_pair_is_refused() -> None:
    class Lazy(RingAttention):
        def pairs(self, rank: int, owner: int) -> list[ChunkPair]:
            return super().pairs(rank, owner)[:1]

    with pytest.raises(CheckFailed, match="queries of chunk"):
        ring_schedule.prove(Lazy(2))


def test_transfers_are_hidden_behind_enough_work() -> None:
    schedule = RingAttention(2)
    slow = Link(alpha_s=0.0, beta_s_per_byte=1.0)
    assert ring_schedule.time_s(schedule, block_bytes=10.0, pair_s=100.0, link=slow) == 400.0
    assert ring_schedule.time_s(schedule, block_bytes=10.0, pair_s=1.0, link=slow) > 10.0


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
