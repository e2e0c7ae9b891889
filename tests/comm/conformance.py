"""One suite for every executor: each collective against plain torch arithmetic.

A case runs on every rank. It does all its communication first and then compares what it got with
what it should have got, so that a wrong number on one rank leaves the others in step.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from shoal.comm.group import Group, Op
from shoal.errors import BadInput
from tests.comm import cases
from tests.comm.cases import laid_out

Findings = list[tuple[str, Tensor, Tensor]]  # what, got, wanted
Case = Callable[[Group], Findings]

FLOATS = ("float64", "float32", "float16", "bfloat16")
INTEGERS = ("int64", "int32", "uint8")
NUMERIC = ("sum", "mean", "max", "min", "prod")
SHAPES = ((5,), (2, 3), ())
# kind: number types, operators, shapes of a vector or a piece
TABLE: dict[str, tuple[tuple[str, ...], tuple[str, ...], tuple[tuple[int, ...], ...]]] = {
    "all_reduce": ((*FLOATS, *INTEGERS, "bool"), NUMERIC, SHAPES),
    "broadcast": ((*FLOATS, *INTEGERS), ("sum",), SHAPES),
    "reduce": (("float32",), NUMERIC, ((2, 3),)),
    "gather": (("float32", "int64"), ("sum",), SHAPES),
    "scatter": (("float32", "int64"), ("sum",), SHAPES),
    "all_gather": ((*FLOATS, *INTEGERS), ("sum",), SHAPES),
    "reduce_scatter": (("float32", "float64", "int64"), NUMERIC, ((4,), (2, 3))),
    "all_to_all": (("float32", "int64"), ("sum",), ((2, 3),)),
    "scan": (("float32", "int64"), NUMERIC, SHAPES),
    "exclusive_scan": (("float32",), NUMERIC, SHAPES),
}
ROOTED = ("broadcast", "reduce", "gather", "scatter")


def calls_of(kind: str, size: int) -> list[cases.Case]:
    """Everything of the table from every root; and strided, turned, empty and other tensors."""
    dtypes, ops, shapes = TABLE[kind]
    plain = cases.Case(kind, "", (2, 3), dtypes[0], "sum", 0, 7, "plain", False, 0, False)
    roots = range(size if kind in ROOTED else 1)
    choices = itertools.product(dtypes, ops, shapes, roots)
    found = [replace(plain, dtype=d, op=o, shape=s, root=r) for d, o, s, r in choices]
    found = [case for case in found if (case.dtype, case.op) != ("bool", "mean")]
    for layout, shape in itertools.product(("strided", "turned"), ((2, 3), (0,))):
        for dtype in ("float32", "bfloat16"):
            found.append(replace(plain, dtype=dtype, layout=layout, shape=shape))
    return [*found, replace(plain, out_of_place=True), replace(plain, shape=(0, 2))]


def collective(group: Group, kind: str) -> Findings:
    """What ranks other than the root hold after a reduce is not said."""
    calls = calls_of(kind, group.size)
    got = [cases.call(group, case) for case in calls]
    for case, tensor in zip(calls, got, strict=True):
        if kind != "reduce" or group.rank == case.root:
            cases.check(case, tensor, group.rank, group.size)
    return []


def contribution(rank: int, shape: tuple[int, ...]) -> Tensor:
    """Values 1 to 3, other ones on every rank."""
    numel = int(torch.tensor(shape).prod())
    return ((torch.arange(numel) * (rank + 1) + rank * rank) % 3 + 1).float().view(shape)


def total(ranks: Iterable[int], shape: tuple[int, ...] = (3,)) -> Tensor:
    return torch.stack([contribution(rank, shape) for rank in ranks]).sum(0)


def check(findings: Findings) -> None:
    for what, got, wanted in findings:
        assert torch.equal(got, wanted), f"{what}: {got} instead of {wanted}"


def all_reduce_leaves_the_same_bits_on_every_rank(group: Group) -> Findings:
    found = []
    for numel in (1000, 9_999):
        data = torch.randn(numel, generator=torch.Generator().manual_seed(group.rank))
        group.all_reduce(data).wait()
        of_rank_0 = data.clone()
        group.broadcast(of_rank_0).wait()
        found.append((f"bits of {numel}", data.view(torch.int32), of_rank_0.view(torch.int32)))
    return found


def all_reduce_of_a_slice_leaves_its_neighbours_alone(group: Group) -> Findings:
    buffer = torch.full((9,), -1.0)
    buffer[3:6] = group.rank + 1.0
    group.all_reduce(buffer[3:6]).wait()
    total = group.size * (group.size + 1) / 2
    return [("buffer", buffer, torch.tensor([-1.0] * 3 + [total] * 3 + [-1.0] * 3))]


def long_vectors_go_in_many_passes(group: Group) -> Findings:
    numel, size = 50_001, group.size
    found = []
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.int64):
        data = (torch.arange(numel) % 7 + group.rank).to(dtype)
        group.all_reduce(data).wait()
        whole = torch.empty(size, numel, dtype=dtype)
        group.all_gather(whole, data).wait()
        piece = torch.empty(numel, dtype=dtype)
        group.reduce_scatter(piece, whole, Op.MAX).wait()
        swapped = torch.empty_like(whole)
        group.all_to_all(swapped, whole).wait()
        wanted = (size * (torch.arange(numel) % 7) + size * (size - 1) // 2).to(dtype)
        found += [(f"{dtype}", got, wanted) for got in (data, piece, *swapped)]
    return found


def send_and_recv_go_by_source_and_tag(group: Group) -> Findings:
    """Round the ring, received in another order than sent; tensors need not be contiguous."""
    if group.size == 1:
        return []
    after = (group.rank + 1) % group.size
    before = (group.rank - 1) % group.size
    given = laid_out(contribution(group.rank, (4,)), "strided")
    sent = [group.send(given * tag if tag > 1 else given, after, tag) for tag in (1, 2)]
    got = {tag: laid_out(torch.zeros(4), "strided") for tag in (2, 1)}
    for tag, into in got.items():
        group.recv(into, before, tag).wait()
    for work in sent:
        work.wait()
    return [(f"tag {tag}", into, contribution(before, (4,)) * tag) for tag, into in got.items()]


def works_may_be_waited_for_in_any_order_and_twice(group: Group) -> Findings:
    tensors = [contribution(group.rank, (3,)) * (i + 1) for i in range(4)]
    works = [group.all_reduce(t) for t in tensors]
    works.append(group.scan(running := contribution(group.rank, (3,))))
    for i in (2, 0, 4, 3, 1, 2, 4):
        works[i].wait()
    wanted = total(range(group.size))
    found = [(f"work {i}", t, wanted * (i + 1)) for i, t in enumerate(tensors)]
    return [*found, ("scan", running, total(range(group.rank + 1)))]


def duplicates_have_an_order_of_their_own(group: Group) -> Findings:
    """Odd ranks start on the groups in another order than even ones; nothing is mixed up."""
    return _on_duplicates(group, lambda order: range(4))


def duplicates_are_waited_for_in_contrary_orders(group: Group) -> Findings:
    """For groups whose operations go on without a rank that waits for them."""
    return _on_duplicates(group, lambda order: reversed(order))


def _on_duplicates(group: Group, waits: Callable[[list[int]], Iterable[int]]) -> Findings:
    groups = [group, group.duplicate(), group.duplicate()]
    groups.append(groups[1].duplicate())
    order = [0, 1, 2, 3] if group.rank % 2 == 0 else [3, 1, 2, 0]
    tensors = [contribution(group.rank, (3,)) * (i + 1) for i in range(4)]
    works = {i: groups[i].all_reduce(tensors[i]) for i in order}
    for i in waits(order):
        works[i].wait()
    wanted = total(range(group.size))
    found = [(f"group {i}", t, wanted * (i + 1)) for i, t in enumerate(tensors)]
    places = torch.tensor([[g.rank, g.size] for g in groups])
    return [*found, ("places", places, torch.tensor([[group.rank, group.size]] * 4))]


def subgroups_and_their_duplicates_count_from_zero(group: Group) -> Findings:
    """Even and odd ranks by themselves; all ranks make both groups, and are in one of them."""
    halves = [range(start, group.size, 2) for start in range(min(2, group.size))]
    groups = [group.subgroup(half) for half in halves]
    assert [g is None for g in groups] == [group.rank not in half for half in halves]
    members = halves[group.rank % 2]
    half = next(g for g in groups if g is not None)
    twin = half.duplicate()
    data = [contribution(group.rank, (3,)) for _ in range(3)]
    works = [g.all_reduce(t) for g, t in zip((half, twin, group.duplicate()), data, strict=True)]
    for work in works:
        work.wait()
    place = torch.tensor([half.rank, half.size, twin.rank, twin.size])
    return [
        ("places", place, torch.tensor([members.index(group.rank), len(members)] * 2)),
        *((f"sum of {members}", tensor, total(members)) for tensor in data[:2]),
        ("whole", data[2], total(range(group.size))),
    ]


def barriers_and_collectives_follow_each_other(group: Group) -> Findings:
    data = contribution(group.rank, (3,))
    for _ in range(3):
        group.barrier().wait()
        group.all_reduce(data, Op.MAX).wait()
    parts = torch.stack([contribution(r, (3,)) for r in range(group.size)])
    return [("data", data, parts.amax(0))]


def integers_and_truth_values_have_bitwise_operators(group: Group) -> Findings:
    found = []
    combine = {Op.AND: torch.bitwise_and, Op.OR: torch.bitwise_or, Op.XOR: torch.bitwise_xor}
    for dtype in (torch.int32, torch.uint8, torch.bool):
        for op, function in combine.items():
            parts = [(contribution(r, (5,)) - 1).to(dtype) for r in range(group.size)]
            data = parts[group.rank].clone()
            group.all_reduce(data, op).wait()
            wanted = parts[0]
            for other in parts[1:]:
                wanted = function(wanted, other)
            found.append((f"{op} {dtype}", data, wanted))
    return found


def complex_numbers_are_summed_and_averaged(group: Group) -> Findings:
    parts = [torch.tensor([1j * r, 2.0 + r]) for r in range(group.size)]
    total = torch.stack(parts).sum(0)
    found = []
    for op, wanted in ((Op.SUM, total), (Op.MEAN, total / group.size)):
        data = parts[group.rank].clone()
        group.all_reduce(data, op).wait()
        found.append((f"{op}", torch.view_as_real(data), torch.view_as_real(wanted)))
    return found


def pieces_may_be_lists_of_tensors(group: Group) -> Findings:
    size = group.size
    rows = [contribution(r, (size, 3)) for r in range(size)]
    given = [row.clone() for row in rows[group.rank]]
    columns = torch.stack([row[group.rank] for row in rows])
    gathered = [torch.zeros(3) for _ in range(size)]
    group.all_gather(gathered, given[0]).wait()
    swapped = [laid_out(torch.zeros(3), "strided") for _ in range(size)]
    group.all_to_all(swapped, given).wait()
    total = torch.zeros(3)
    group.reduce_scatter(total, given).wait()
    piece = torch.zeros(3)
    group.scatter(piece, given if group.rank == 0 else None).wait()
    at_root = [torch.zeros(3) for _ in range(size)] if group.rank == 0 else None
    group.gather(at_root, given[0]).wait()
    firsts = torch.stack([row[0] for row in rows])
    found = [
        ("all_gather", torch.stack(gathered), firsts),
        ("all_to_all", torch.stack(swapped), columns),
        ("reduce_scatter", total, columns.sum(0)),
        ("scatter", piece, rows[0][group.rank]),
    ]
    return found if at_root is None else [*found, ("gather", torch.stack(at_root), firsts)]


def all_to_all_takes_pieces_of_different_sizes(group: Group) -> Findings:
    """Rank r sends 700 (r + s) elements to rank s; rank 0 sends itself none."""
    counts = [700 * (group.rank + peer) for peer in range(group.size)]
    data = torch.full((sum(counts),), float(group.rank))
    out = torch.zeros(sum(counts))
    group.all_to_all_uneven(out, data, counts, counts).wait()
    wanted = [torch.full((count,), float(peer)) for peer, count in enumerate(counts)]
    return [("out", out, torch.cat(wanted))]


def ranks_that_disagree_about_a_piece_are_named_on_every_rank(group: Group) -> Findings:
    """The last rank sends 2 elements to rank 0, which expects 1; afterwards the group goes on."""
    last = group.size - 1
    send_counts = [1] * group.size
    if group.rank == last:
        send_counts[0] = 2
    data = torch.zeros(sum(send_counts))
    out = torch.zeros(group.size)
    try:
        group.all_to_all_uneven(out, data, [1] * group.size, send_counts).wait()
    except BadInput as error:
        told = f"rank {last} sends 2 elements of 4 bytes to rank 0, which expects 1 element of 4"
        assert told in str(error), str(error)
    else:
        raise AssertionError("nothing was raised")
    return all_to_all_takes_pieces_of_different_sizes(group)


def means_of_small_integers_do_not_wrap(group: Group) -> Findings:
    """100 + 100 does not fit 8 bits; their mean does."""
    found = []
    for dtype, value in ((torch.int8, 100), (torch.uint8, 200), (torch.int16, -30_000)):
        data = torch.full((group.size, 3), value, dtype=dtype)
        wanted = data.clone()
        piece = torch.zeros(3, dtype=dtype)
        out = torch.zeros_like(data)
        group.reduce_scatter(piece, list(data), Op.MEAN).wait()
        group.all_reduce(data, Op.MEAN, out=out).wait()
        group.all_reduce(data, Op.MEAN).wait()
        group.scan(data, Op.MEAN).wait()
        group.reduce(data, group.size - 1, Op.MEAN).wait()
        found += [("piece", piece, wanted[0]), ("out", out, wanted), ("in place", data, wanted)]
    return found


WrongCall = Callable[[Group], object]
# what is called, and a part of the error
WRONG_CALLS: list[tuple[WrongCall, str]] = [
    (lambda g: g.broadcast(torch.zeros(1), root=g.size), "the root must be one of the ranks 0"),
    (lambda g: g.reduce(torch.zeros(1), root=-1), "the root must be one of the ranks 0"),
    (lambda g: g.all_gather(torch.zeros(2 * g.size + 1), torch.zeros(2)), "in `out`"),
    (lambda g: g.all_gather(torch.zeros(g.size).int(), torch.zeros(1)), "torch.int32"),
    (lambda g: g.all_gather([torch.zeros(1)] * (g.size + 1), torch.zeros(1)), "in `out`"),
    (lambda g: g.all_gather([torch.zeros(2)] * g.size, torch.zeros(1)), "in `out`"),
    (lambda g: g.reduce_scatter(torch.zeros(2), torch.zeros(2 * g.size + 1)), "in `data`"),
    (lambda g: g.all_to_all(torch.zeros(g.size + 1), torch.zeros(g.size)), "in `out`"),
    (lambda g: g.all_to_all(torch.zeros(g.size).int(), torch.zeros(g.size)), "in `out`"),
    (lambda g: g.all_to_all([torch.zeros(1)] * g.size, torch.zeros(g.size)), "or two lists"),
    (lambda g: g.all_to_all_uneven(torch.zeros(3), torch.zeros(3), [1], []), "do not divide"),
    (lambda g: g.gather(None, torch.zeros(1), root=g.rank), "it needs `out`"),
    (lambda g: g.gather(torch.zeros(0), torch.zeros(1), root=g.rank), "in `out`"),
    (lambda g: g.scatter(torch.zeros(1), None, root=g.rank), "it needs `data`"),
    (lambda g: g.all_reduce(torch.ones(1).bool(), Op.MEAN), "truth values have no mean"),
    (lambda g: g.scan(torch.ones(1).bool(), Op.MEAN), "truth values have no mean"),
    (lambda g: g.all_reduce(torch.zeros(1) * 1j, Op.MAX), "complex numbers have no max"),
    (lambda g: g.reduce_scatter(torch.zeros(1), torch.zeros(g.size), Op.AND), "no bitwise and"),
    (lambda g: g.all_reduce(torch.zeros(2), out=torch.zeros(3)), "as many in `out`"),
    (lambda g: g.scan(torch.zeros(2), out=torch.zeros(2).int()), "as many in `out`"),
    (lambda g: g.subgroup([0, g.size]), "different ranks below"),
    (lambda g: g.subgroup([0, 0]), "different ranks below"),
    (lambda g: g.subgroup([]), "different ranks below"),
    (lambda g: g.send(torch.zeros(1), g.size), "send to"),
    (lambda g: g.recv(torch.zeros(1), g.size), "receive from"),
]


def wrong_arguments_are_refused_before_anything_is_sent(group: Group) -> Findings:
    for call, sentence in WRONG_CALLS:
        try:
            call(group)
        except BadInput as error:
            assert sentence in str(error), f"{sentence!r} is not in {str(error)!r}"
        else:
            raise AssertionError(f"nothing was raised where {sentence!r} was expected")
    return barriers_and_collectives_follow_each_other(group)


CASES: dict[str, Case] = {
    **{kind: partial(collective, kind=kind) for kind in TABLE},
    **{
        case.__name__: case
        for case in (
            all_reduce_leaves_the_same_bits_on_every_rank,
            all_reduce_of_a_slice_leaves_its_neighbours_alone,
            long_vectors_go_in_many_passes,
            send_and_recv_go_by_source_and_tag,
            works_may_be_waited_for_in_any_order_and_twice,
            duplicates_have_an_order_of_their_own,
            duplicates_are_waited_for_in_contrary_orders,
            subgroups_and_their_duplicates_count_from_zero,
            barriers_and_collectives_follow_each_other,
            integers_and_truth_values_have_bitwise_operators,
            complex_numbers_are_summed_and_averaged,
            pieces_may_be_lists_of_tensors,
            all_to_all_takes_pieces_of_different_sizes,
            ranks_that_disagree_about_a_piece_are_named_on_every_rank,
            means_of_small_integers_do_not_wrap,
            wrong_arguments_are_refused_before_anything_is_sent,
        )
    },
}
