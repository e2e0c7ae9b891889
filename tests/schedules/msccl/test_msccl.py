"""MSCCL files: what is written is read back as it was, and foreign programs are proven."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.errors import BadInput
from shoal.schedules.collectives.catalog import algorithms, build
from shoal.schedules.collectives.collective import Collective, Transfer
from shoal.schedules.collectives.kinds import kind_named
from shoal.schedules.collectives.proof import ProofFailed, prove
from shoal.schedules.msccl.buffers import NAMES
from shoal.schedules.msccl.parse import parse_program
from shoal.schedules.msccl.read import read_collective, to_collective
from shoal.schedules.msccl.write import to_xml
from tests.commands.terminal import shoal
from tests.products import few_or_all

ALL = [(kind, name) for kind in NAMES for name in algorithms(kind)]
RING = to_xml(build("all_reduce", "ring", 3))


def read(text: str) -> Collective:
    return to_collective(parse_program(text.encode(), "x.xml"), "x.xml")


def rounds(collective: Collective) -> list[frozenset[Transfer]]:
    return [frozenset(transfers) for transfers in collective.rounds if transfers]


@pytest.mark.parametrize("kind_and_name", ALL, ids="-".join)
@pytest.mark.parametrize("ranks", few_or_all([1, 2, 3, 5, 8], [1, 2, 3, 4, 5, 6, 7, 8, 12, 16]))
def test_every_algorithm_is_read_back_as_it_was(kind_and_name: tuple[str, str], ranks: int) -> None:
    kind, name = kind_and_name
    root = ranks - 1 if kind_named(kind).rooted else 0
    before = build(kind, name, ranks, root)
    after = read(to_xml(before))
    prove(after)
    assert rounds(after) == rounds(before)
    assert (after.kind, after.ranks, after.chunks) == (kind, ranks, before.chunks)
    assert (after.root, after.same_bits) == (root, before.same_bits)
    assert after.one_port or not before.one_port
    if rounds(before):
        assert after.scratch == before.scratch


def test_a_schedule_without_the_rounds_of_shoal_is_proven_too() -> None:
    text = RING.replace(' round="', ' unknown="')
    prove(read(text))
    assert rounds(read(text)) == rounds(read(RING))


def step(number: int, kind: str, src: str, dst: str, waits: str = "-1 -1", has: int = 0) -> str:
    block, other = waits.split()
    return (
        f'<step s="{number}" type="{kind}" srcbuf="{src[0]}" srcoff="{src[1:]}" dstbuf="{dst[0]}" '
        f'dstoff="{dst[1:]}" cnt="1" depid="{block}" deps="{other}" hasdep="{has}"/>'
    )


def algo(
    coll: str, inplace: int, chunks: int, blocks: list[list[tuple[int, int, list[str]]]]
) -> str:
    """A document; each GPU is a list of thread blocks (send, receive, steps)."""
    gpus = ""
    for rank, listed in enumerate(blocks):
        inner = "".join(
            f'<tb id="{i}" send="{send}" recv="{receive}" chan="0">{"".join(steps)}</tb>'
            for i, (send, receive, steps) in enumerate(listed)
        )
        gpus += f'<gpu id="{rank}" i_chunks="1" o_chunks="1" s_chunks="2">{inner}</gpu>'
    return (
        f'<algo name="mine" proto="LL" nchannels="1" nchunksperloop="{chunks}" '
        f'ngpus="{len(blocks)}" coll="{coll}" inplace="{inplace}">{gpus}</algo>'
    )


def test_fused_steps_are_two_transfers() -> None:
    """0 -> 1 -> 2 adds; then 2 -> 0 -> 1 passes the sum on."""
    blocks = [
        [(1, 2, [step(0, "s", "i0", "i0"), step(1, "rcs", "i0", "i0")])],
        [(2, 0, [step(0, "rrs", "i0", "i0"), step(1, "r", "i0", "i0")])],
        [(0, 1, [step(0, "rrcs", "i0", "i0")])],
    ]
    found = read(algo("allreduce", 1, 1, blocks))
    prove(found)
    wire = [[(t.src, t.dst, t.reduce) for t in one if t.src != t.dst] for one in found.rounds]
    assert [one for one in wire if one] == [
        [(0, 1, True)],
        [(1, 2, True)],
        [(2, 0, False)],
        [(0, 1, False)],
    ]


def test_out_of_place_an_output_that_is_first_a_copy_needs_no_scratch() -> None:
    def gpu(me: int, peer: int) -> list[tuple[int, int, list[str]]]:
        own = step(0, "cpy", "i0", f"o{me}", has=0)
        return [(peer, peer, [own, step(1, "s", "i0", f"o{me}"), step(2, "r", "i0", f"o{peer}")])]

    found = read(algo("allgather", 0, 2, [gpu(0, 1), gpu(1, 0)]))
    prove(found)
    assert found.scratch == 0
    assert rounds(found) == rounds(build("all_gather", "ring", 2))


def test_out_of_place_sums_into_another_buffer_keep_the_input() -> None:
    def gpu(peer: int) -> list[tuple[int, int, list[str]]]:
        return [(peer, peer, [step(0, "s", "i0", "i0"), step(1, "rrc", "i0", "o0")])]

    found = read(algo("allreduce", 0, 1, [gpu(1), gpu(0)]))
    prove(found)


def test_a_program_that_adds_too_little_is_not_proven(tmp_path: Path) -> None:
    blocks = [
        [(1, -1, [step(0, "s", "i0", "i0")])],
        [(-1, 0, [step(0, "rrc", "i0", "i0")])],
    ]
    file = tmp_path / "half.xml"
    file.write_text(algo("allreduce", 1, 1, blocks))
    with pytest.raises(ProofFailed, match="rank 0 lacks the contribution of rank 1"):
        read_collective(file)
    assert shoal("collectives", "import", str(file)).exit_code == 1


def changed(old: str, new: str) -> str:
    assert old in RING
    return RING.replace(old, new, 1)


LONE = [(1, -1, [step(0, "s", "i0", "i0")])]
HOSTILE = {
    "not xml": ("hello", "line 1: this is no XML"),
    "cut off": (RING[:500], "this is no XML: no element found|unclosed token"),
    "empty": ("", "this is no XML: no element found"),
    "entities": (
        '<!DOCTYPE a [<!ENTITY x "y"><!ENTITY z "&x;&x;">]><algo name="&z;"/>',
        "a document type or entity is not allowed",
    ),
    "another document": ("<svg/>", "<svg> at the top is not MSCCL"),
    "nested": ("<algo><algo/></algo>", "<algo> lacks the attribute ngpus"),
    "no ranks": (changed('ngpus="3"', 'ngpus="0"'), 'ngpus="0", and takes 1 to 4096'),
    "many ranks": (changed('ngpus="3"', 'ngpus="9999999999"'), "takes 1 to 4096"),
    "missing gpu": (changed('ngpus="3"', 'ngpus="4"'), 'there is no <gpu id="3">'),
    "a gpu twice": (changed('<gpu id="1"', '<gpu id="0"'), 'two <gpu id="0">'),
    "a word": (changed('cnt="1"', 'cnt="many"'), '<step> has cnt="many"'),
    "huge count": (changed('cnt="1"', 'cnt="1000000"'), 'cnt="1000000", and buffer i of gpu 0'),
    "outside": (changed('dstoff="1"', 'dstoff="3"'), 'dstoff="3", and takes 0 to 2'),
    "type": (changed('type="rrc"', 'type="xyz"'), 'gpu 0, tb 0, step 0 has type="xyz"'),
    "no peer": (changed('recv="2"', 'recv="-1"'), "receives, and its tb has no peer"),
    "own peer": (changed('recv="2"', 'recv="0"'), "has its own gpu as its peer"),
    "other peer": (changed('recv="2"', 'recv="1"'), "waits for a message of gpu 1|hangs"),
    "custom": (changed('"allreduce"', '"custom"'), 'coll="custom", which Shoal cannot prove'),
    "no hasdep": (changed('hasdep="1"', 'hasdep="0"'), "with hasdep=0"),
    "a race": (changed('depid="1" deps="0"', 'depid="-1" deps="-1"'), "no dependence orders"),
    "unknown step": (changed('depid="1" deps="0"', 'depid="1" deps="77"'), "does not exist"),
    "never received": (algo("broadcast", 1, 1, [LONE, []]), "1 messages to gpu 1 on channel 0"),
    "nothing to send": (
        algo("broadcast", 1, 1, [[], [(0, -1, [step(0, "s", "i0", "i0")])]]),
        r"reads i\[0\], which holds nothing yet",
    ),
    "a cycle": (
        algo(
            "allreduce",
            1,
            1,
            [
                [
                    (-1, -1, [step(0, "cpy", "i0", "s0", "1 0", 1)]),
                    (-1, -1, [step(0, "cpy", "i0", "s1", "0 0", 1)]),
                ]
            ],
        ),
        "it hangs: gpu 0, tb 0, step 0 waits for step 0 of tb 1",
    ),
    "pieces": (
        algo("allgather", 1, 3, [[], []]),
        'nchunksperloop="3", and allgather over 2 GPUs needs a multiple of 2',
    ),
}


@pytest.mark.parametrize("text, sentence", HOSTILE.values(), ids=HOSTILE)
def test_bad_files_get_one_sentence_with_the_element(text: str, sentence: str) -> None:
    with pytest.raises(BadInput, match=sentence) as caught:
        read(text)
    assert "\n" not in str(caught.value) and "x.xml" in str(caught.value)


def test_ranks_that_exchange_chunks_within_themselves_are_refused() -> None:
    swap = [[Transfer(0, 0, 0, False, 2), Transfer(0, 0, 2, False, 0)]]
    with pytest.raises(BadInput, match="round 0 exchanges chunks within rank 0"):
        to_xml(Collective("swap", 1, 2, swap, scratch=2))


def test_the_commands_write_and_read(tmp_path: Path) -> None:
    file = tmp_path / "ring.xml"
    done = shoal("collectives", "export", "all_reduce", "ring", "--ranks", "8", "-o", str(file))
    assert done.exit_code == 0 and "16 thread blocks, 224 steps" in done.stdout
    shown = shoal("collectives", "import", str(file)).stdout
    assert "is proven: 14 rounds, 112 transfers" in shown and "busiest port 175 MB" in shown
    ours = shoal("collectives", "show", "all_reduce", str(file), "--ranks", "8", "--prove")
    assert ours.exit_code == 0
    wrong = shoal("collectives", "show", "all_reduce", str(file), "--ranks", "4")
    assert wrong.exit_code == 2 and "is a schedule for 8 ranks, not for 4" in wrong.stderr
    scan = shoal("collectives", "export", "scan", "chain", "-o", str(file))
    assert scan.exit_code == 2 and "MSCCL has no name for scan" in scan.stderr
