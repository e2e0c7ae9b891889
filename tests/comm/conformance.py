"""One suite for every executor: each collective against plain torch arithmetic.

A case runs on every rank. It does all its communication first and then returns what it got
beside what it should have got, so that a wrong number on one rank leaves the others in step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from shoal.comm.group import Group, Op
from shoal.errors import BadInput

Findings = list[tuple[str, Tensor, Tensor]]  # what, got, wanted
Case = Callable[[Group], Findings]

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
NUMERIC = [op for op in Op if not op.is_bitwise]
INTEGERS = [torch.int64, torch.int32, torch.uint8]
SHAPES = [(5,), (2, 3), ()]


def contribution(rank: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    """Values 1 to 3, other ones on every rank: sums and products of five are exact in bfloat16."""
    numel = int(torch.tensor(shape).prod()) if shape else 1
    return ((torch.arange(numel) * (rank + 1) + rank * rank) % 3 + 1).to(dtype).view(shape)


def expected(parts: list[Tensor], op: Op) -> Tensor:
    """What the ranks' contributions come to, computed in float64."""
    whole = torch.stack(parts).double()
    results = {
        Op.SUM: whole.sum(0),
        Op.MEAN: whole.mean(0),
        Op.MAX: whole.amax(0),
        Op.MIN: whole.amin(0),
        Op.PROD: whole.prod(0),
    }
    return results[op].to(parts[0].dtype)


def ops_for(dtype: torch.dtype) -> list[Op]:
    """A mean of integers is no integer."""
    return [op for op in NUMERIC if dtype.is_floating_point or op is not Op.MEAN]


def check(findings: Findings) -> None:
    for what, got, wanted in findings:
        rtol = 0.0 if not wanted.is_floating_point() else torch.finfo(wanted.dtype).eps
        torch.testing.assert_close(
            got, wanted, rtol=rtol, atol=0.0, msg=lambda m, w=what: f"{w}: {m}"
        )


def all_reduce_of_every_dtype_and_op(group: Group) -> Findings:
    found = []
    for dtype in [*FLOATS, *INTEGERS]:
        for op in ops_for(dtype):
            for shape in SHAPES:
                data = contribution(group.rank, shape, dtype)
                group.all_reduce(data, op).wait()
                parts = [contribution(r, shape, dtype) for r in range(group.size)]
                found.append((f"{op} {dtype} {shape}", data, expected(parts, op)))
    return found


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


def broadcast_from_every_root(group: Group) -> Findings:
    found = []
    for root in range(group.size):
        for dtype in [*FLOATS, *INTEGERS]:
            for shape in SHAPES:
                data = contribution(group.rank, shape, dtype)
                group.broadcast(data, root).wait()
                wanted = contribution(root, shape, dtype)
                found.append((f"root {root} {dtype} {shape}", data, wanted))
    return found


def reduce_to_every_root(group: Group) -> Findings:
    """What the other ranks hold afterwards is not said."""
    found = []
    for root in range(group.size):
        for op in NUMERIC:
            data = contribution(group.rank, (2, 3))
            group.reduce(data, root, op).wait()
            parts = [contribution(r, (2, 3)) for r in range(group.size)]
            if group.rank == root:
                found.append((f"root {root} {op}", data, expected(parts, op)))
    return found


def gather_to_every_root(group: Group) -> Findings:
    found = []
    for root in range(group.size):
        for dtype in (torch.float32, torch.int64):
            for shape in SHAPES:
                data = contribution(group.rank, shape, dtype)
                out = torch.zeros(group.size, *shape, dtype=dtype)
                group.gather(out if group.rank == root else None, data, root).wait()
                parts = [contribution(r, shape, dtype) for r in range(group.size)]
                if group.rank == root:
                    found.append((f"root {root} {dtype} {shape}", out, torch.stack(parts)))
                found.append(("data", data, contribution(group.rank, shape, dtype)))
    return found


def scatter_from_every_root(group: Group) -> Findings:
    found = []
    for root in range(group.size):
        for dtype in (torch.float32, torch.int64):
            data = contribution(root, (group.size * 4,), dtype)
            out = torch.zeros(4, dtype=dtype)
            group.scatter(out, data.clone() if group.rank == root else None, root).wait()
            found.append((f"root {root} {dtype}", out, data.view(group.size, 4)[group.rank]))
    return found


def scatter_of_pieces_with_two_dimensions(group: Group) -> Findings:
    data = contribution(0, (group.size, 2, 3))
    out = torch.zeros(2, 3)
    group.scatter(out, data if group.rank == 0 else None).wait()
    return [("out", out, data[group.rank])]


def all_gather_of_every_shape(group: Group) -> Findings:
    found = []
    for dtype in [*FLOATS, *INTEGERS]:
        for shape in SHAPES:
            data = contribution(group.rank, shape, dtype)
            stacked = torch.zeros(group.size, *shape, dtype=dtype)
            flat = torch.zeros(group.size * data.numel(), dtype=dtype)
            group.all_gather(stacked, data).wait()
            group.all_gather(flat, data).wait()
            wanted = torch.stack([contribution(r, shape, dtype) for r in range(group.size)])
            found += [
                (f"stacked {dtype} {shape}", stacked, wanted),
                (f"flat {dtype} {shape}", flat, wanted.flatten()),
                ("data", data, contribution(group.rank, shape, dtype)),
            ]
    return found


def reduce_scatter_of_every_op(group: Group) -> Findings:
    found = []
    for dtype in (torch.float32, torch.float64, torch.int64):
        for op in ops_for(dtype):
            data = contribution(group.rank, (group.size * 4,), dtype)
            out = torch.zeros(4, dtype=dtype)
            group.reduce_scatter(out, data, op).wait()
            parts = [contribution(r, (group.size * 4,), dtype) for r in range(group.size)]
            wanted = expected(parts, op).view(group.size, 4)[group.rank]
            found.append((f"{op} {dtype}", out, wanted))
            found.append(("data", data, parts[group.rank]))
    return found


def reduce_scatter_of_pieces_with_two_dimensions(group: Group) -> Findings:
    data = contribution(group.rank, (group.size, 2, 3))
    out = torch.zeros(2, 3)
    group.reduce_scatter(out, data).wait()
    parts = [contribution(r, (group.size, 2, 3)) for r in range(group.size)]
    return [("out", out, expected(parts, Op.SUM)[group.rank])]


def all_to_all_is_a_transposition(group: Group) -> Findings:
    found = []
    for dtype in (torch.float32, torch.int64):
        shape = (group.size, 2, 3)
        data = contribution(group.rank, shape, dtype)
        out = torch.zeros(shape, dtype=dtype)
        group.all_to_all(out, data).wait()
        wanted = torch.stack([contribution(r, shape, dtype)[group.rank] for r in range(group.size)])
        found.append((f"out {dtype}", out, wanted))
        found.append(("data", data, contribution(group.rank, shape, dtype)))
    return found


def scan_combines_the_ranks_up_to_this_one(group: Group) -> Findings:
    found = []
    for dtype in (torch.float32, torch.int64):
        for op in ops_for(dtype):
            for shape in SHAPES:
                data = contribution(group.rank, shape, dtype)
                group.scan(data, op).wait()
                parts = [contribution(r, shape, dtype) for r in range(group.rank + 1)]
                found.append((f"{op} {dtype} {shape}", data, expected(parts, op)))
    return found


def send_and_recv_go_by_source_and_tag(group: Group) -> Findings:
    """Round the ring, received in another order than sent."""
    if group.size == 1:
        return []
    after = (group.rank + 1) % group.size
    before = (group.rank - 1) % group.size
    sent = [group.send(contribution(group.rank, (4,)) * tag, after, tag) for tag in (1, 2)]
    got = {tag: torch.zeros(4) for tag in (2, 1)}
    for tag, into in got.items():
        group.recv(into, before, tag).wait()
    for work in sent:
        work.wait()
    return [(f"tag {tag}", into, contribution(before, (4,)) * tag) for tag, into in got.items()]


def works_may_be_waited_for_in_any_order(group: Group) -> Findings:
    tensors = [contribution(group.rank, (3,)) * (i + 1) for i in range(4)]
    works = [group.all_reduce(t) for t in tensors]
    for i in (2, 0, 3, 1):
        works[i].wait()
    wanted = expected([contribution(r, (3,)) for r in range(group.size)], Op.SUM)
    return [(f"work {i}", t, wanted * (i + 1)) for i, t in enumerate(tensors)]


def waiting_twice_changes_nothing(group: Group) -> Findings:
    found = []
    for op in (Op.SUM, Op.MEAN):
        data = contribution(group.rank, (3,))
        running = contribution(group.rank, (3,))
        for work in (group.all_reduce(data, op), group.scan(running, op)):
            work.wait()
            work.wait()
        parts = [contribution(r, (3,)) for r in range(group.size)]
        found.append((f"all_reduce {op}", data, expected(parts, op)))
        found.append((f"scan {op}", running, expected(parts[: group.rank + 1], op)))
    return found


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
    wanted = expected([contribution(r, (3,)) for r in range(group.size)], Op.SUM)
    found = [(f"group {i}", t, wanted * (i + 1)) for i, t in enumerate(tensors)]
    places = torch.tensor([[g.rank, g.size] for g in groups])
    return [*found, ("places", places, torch.tensor([[group.rank, group.size]] * 4))]


def subgroups_count_from_zero(group: Group) -> Findings:
    """Even and odd ranks by themselves; all ranks make both groups, and are in one of them."""
    found = []
    for start in (0, 1):
        members = list(range(start, group.size, 2))
        if not members:
            continue
        half = group.subgroup(members)
        assert (half is None) == (group.rank not in members)
        if half is None:
            continue
        place = torch.tensor([half.rank, half.size])
        found.append(("place", place, torch.tensor([members.index(group.rank), len(members)])))
        data = contribution(group.rank, (3,))
        half.all_reduce(data).wait()
        parts = [contribution(r, (3,)) for r in members]
        found.append((f"sum of {members}", data, expected(parts, Op.SUM)))
    return found


def duplicates_of_subgroups(group: Group) -> Findings:
    """Halves make duplicates side by side, then all ranks make one more."""
    halves = [range(start, group.size, 2) for start in range(min(2, group.size))]
    groups = [group.subgroup(half) for half in halves]
    half = next(g for g in groups if g is not None)
    twin = half.duplicate()
    whole = group.duplicate()
    data = [contribution(group.rank, (2,)) for _ in range(2)]
    works = [twin.all_reduce(data[0]), whole.all_reduce(data[1])]
    for work in works:
        work.wait()
    wanted = [
        expected([contribution(r, (2,)) for r in ranks], Op.SUM)
        for ranks in (halves[group.rank % 2], range(group.size))
    ]
    return [("twin", data[0], wanted[0]), ("whole", data[1], wanted[1])]


def barriers_and_collectives_follow_each_other(group: Group) -> Findings:
    data = contribution(group.rank, (3,))
    for _ in range(3):
        group.barrier().wait()
        group.all_reduce(data, Op.MAX).wait()
    parts = [contribution(r, (3,)) for r in range(group.size)]
    return [("data", data, expected(parts, Op.MAX))]


def all_reduce_into_another_tensor(group: Group) -> Findings:
    data = contribution(group.rank, (2, 3))
    out = torch.zeros(3, 2).t()
    group.all_reduce(data, Op.MEAN, out=out).wait()
    parts = [contribution(r, (2, 3)) for r in range(group.size)]
    return [
        ("out", out, expected(parts, Op.MEAN)),
        ("data", data, contribution(group.rank, (2, 3))),
    ]


def exclusive_scan_combines_the_ranks_before_this_one(group: Group) -> Findings:
    found = []
    empty = {Op.SUM: 0.0, Op.MEAN: 0.0, Op.PROD: 1.0, Op.MAX: -torch.inf, Op.MIN: torch.inf}
    for op in NUMERIC:
        data = contribution(group.rank, (2, 3))
        out = torch.zeros(2, 3)
        group.scan(data, op, exclusive=True, out=out).wait()
        parts = [contribution(r, (2, 3)) for r in range(group.rank)]
        wanted = expected(parts, op) if parts else torch.full((2, 3), empty[op])
        found.append((f"{op}", out, wanted))
        found.append(("data", data, contribution(group.rank, (2, 3))))
    return found


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


def truth_values_are_combined_as_any_and_all(group: Group) -> Findings:
    found = []
    parts = [(torch.arange(4) + r) % 3 > 0 for r in range(group.size)]
    stacked = torch.stack(parts)
    wanted = {Op.SUM: stacked.any(0), Op.MAX: stacked.any(0)}
    wanted |= {Op.PROD: stacked.all(0), Op.MIN: stacked.all(0)}
    for op, result in wanted.items():
        data = parts[group.rank].clone()
        group.all_reduce(data, op).wait()
        found.append((f"{op}", data, result))
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


def means_of_integers_are_rounded_towards_zero(group: Group) -> Findings:
    parts = [torch.tensor([-7 - r, 7 + r]) for r in range(group.size)]
    data = parts[group.rank].clone()
    group.all_reduce(data, Op.MEAN).wait()
    mean = torch.stack(parts).sum(0).div(group.size, rounding_mode="trunc")
    return [("mean", data, mean)]


def tensors_need_not_be_contiguous(group: Group) -> Findings:
    """Every second element, and dimensions in another order."""
    size = group.size
    given = contribution(group.rank, (2, size)).t()  # a row for each rank, not contiguous
    everyone = [contribution(r, (2, size)).t() for r in range(size)]
    data = strided(given)
    group.all_reduce(data).wait()
    found = [("all_reduce", data, expected(everyone, Op.SUM))]
    data = strided(given)
    group.broadcast(data).wait()
    found.append(("broadcast", data, everyone[0]))
    out = strided(torch.zeros(size, size, 2))
    group.all_gather(out, given).wait()
    found.append(("all_gather", out, torch.stack(everyone)))
    row = strided(torch.zeros(2))
    group.reduce_scatter(row, given).wait()
    found.append(("reduce_scatter", row, expected(everyone, Op.SUM)[group.rank]))
    swapped = strided(torch.zeros(size, 2))
    group.all_to_all(swapped, given).wait()
    found.append(("all_to_all", swapped, torch.stack([rows[group.rank] for rows in everyone])))
    group.gather(out if group.rank == 0 else None, given).wait()
    row = strided(torch.zeros(2))
    group.scatter(row, given if group.rank == 0 else None).wait()
    found.append(("scatter", row, everyone[0][group.rank]))
    data = strided(given)
    group.scan(data).wait()
    found.append(("scan", data, expected(everyone[: group.rank + 1], Op.SUM)))
    if size > 1:
        sent = group.send(given, (group.rank + 1) % size)
        data = strided(torch.zeros(size, 2))
        group.recv(data, (group.rank - 1) % size).wait()
        sent.wait()
        found.append(("recv", data, everyone[group.rank - 1]))
    return found


def strided(tensor: Tensor) -> Tensor:
    """The same numbers in every second place."""
    wide = tensor.new_zeros((*tensor.shape, 2))
    wide[..., 0] = tensor
    return wide[..., 0]


def tensors_may_be_empty(group: Group) -> Findings:
    empty = torch.zeros(0)
    out = torch.zeros(group.size, 0)
    group.all_reduce(empty).wait()
    group.all_reduce(empty, Op.MEAN).wait()
    group.broadcast(empty).wait()
    group.reduce(empty).wait()
    group.all_gather(out, empty).wait()
    group.reduce_scatter(empty, out).wait()
    group.all_to_all(out, out.clone()).wait()
    group.gather(out if group.rank == 0 else None, empty).wait()
    group.scatter(empty, out if group.rank == 0 else None).wait()
    group.scan(empty).wait()
    after = contribution(group.rank, (3,))
    group.all_reduce(after).wait()
    parts = [contribution(r, (3,)) for r in range(group.size)]
    return [("after", after, expected(parts, Op.SUM))]


def pieces_may_be_lists_of_tensors(group: Group) -> Findings:
    size = group.size
    rows = [contribution(r, (size, 3)) for r in range(size)]
    given = [row.clone() for row in rows[group.rank]]
    columns = torch.stack([row[group.rank] for row in rows])
    gathered = [torch.zeros(3) for _ in range(size)]
    group.all_gather(gathered, given[0]).wait()
    swapped = [strided(torch.zeros(3)) for _ in range(size)]
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
        ("reduce_scatter", total, expected(list(columns), Op.SUM)),
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
    (lambda g: g.all_gather(torch.zeros(2 * g.size + 1), torch.zeros(2)), "elements in `out`"),
    (lambda g: g.all_gather(torch.zeros(g.size).int(), torch.zeros(1)), "torch.int32"),
    (lambda g: g.all_gather([torch.zeros(1)] * (g.size + 1), torch.zeros(1)), "tensors in `out`"),
    (lambda g: g.all_gather([torch.zeros(2)] * g.size, torch.zeros(1)), "one size and type"),
    (lambda g: g.reduce_scatter(torch.zeros(2), torch.zeros(2 * g.size + 1)), "elements in `data`"),
    (lambda g: g.all_to_all(torch.zeros(g.size + 1), torch.zeros(g.size)), "of one size that"),
    (lambda g: g.all_to_all(torch.zeros(g.size).int(), torch.zeros(g.size)), "one type of number"),
    (lambda g: g.all_to_all([torch.zeros(1)] * g.size, torch.zeros(g.size)), "or two lists"),
    (lambda g: g.all_to_all_uneven(torch.zeros(3), torch.zeros(3), [1], []), "do not divide"),
    (lambda g: g.gather(None, torch.zeros(1), root=g.rank), "it needs `out`"),
    (lambda g: g.gather(torch.zeros(0), torch.zeros(1), root=g.rank), "elements in `out`"),
    (lambda g: g.scatter(torch.zeros(1), None, root=g.rank), "it needs `data`"),
    (lambda g: g.all_reduce(torch.ones(1).bool(), Op.MEAN), "truth values have no mean"),
    (lambda g: g.scan(torch.ones(1).bool(), Op.MEAN), "truth values have no mean"),
    (lambda g: g.all_reduce(torch.zeros(1) * 1j, Op.MAX), "complex numbers have no max"),
    (lambda g: g.reduce_scatter(torch.zeros(1), torch.zeros(g.size), Op.AND), "no bitwise and"),
    (lambda g: g.all_reduce(torch.zeros(2), out=torch.zeros(3)), "as many in `out`"),
    (lambda g: g.scan(torch.zeros(2), out=torch.zeros(2).int()), "one type of number"),
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
    case.__name__: case
    for case in (
        all_reduce_of_every_dtype_and_op,
        all_reduce_leaves_the_same_bits_on_every_rank,
        all_reduce_of_a_slice_leaves_its_neighbours_alone,
        long_vectors_go_in_many_passes,
        broadcast_from_every_root,
        reduce_to_every_root,
        gather_to_every_root,
        scatter_from_every_root,
        scatter_of_pieces_with_two_dimensions,
        all_gather_of_every_shape,
        reduce_scatter_of_every_op,
        reduce_scatter_of_pieces_with_two_dimensions,
        all_to_all_is_a_transposition,
        scan_combines_the_ranks_up_to_this_one,
        send_and_recv_go_by_source_and_tag,
        works_may_be_waited_for_in_any_order,
        waiting_twice_changes_nothing,
        duplicates_have_an_order_of_their_own,
        duplicates_are_waited_for_in_contrary_orders,
        subgroups_count_from_zero,
        duplicates_of_subgroups,
        barriers_and_collectives_follow_each_other,
        all_reduce_into_another_tensor,
        exclusive_scan_combines_the_ranks_before_this_one,
        integers_and_truth_values_have_bitwise_operators,
        truth_values_are_combined_as_any_and_all,
        complex_numbers_are_summed_and_averaged,
        means_of_integers_are_rounded_towards_zero,
        tensors_need_not_be_contiguous,
        tensors_may_be_empty,
        pieces_may_be_lists_of_tensors,
        all_to_all_takes_pieces_of_different_sizes,
        ranks_that_disagree_about_a_piece_are_named_on_every_rank,
        means_of_small_integers_do_not_wrap,
        wrong_arguments_are_refused_before_anything_is_sent,
    )
}
