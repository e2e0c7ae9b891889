"""One suite for every group: each collective against plain torch arithmetic.

A case runs on every rank. It does all its communication first and then returns what it got
beside what it should have got, so that a wrong number on one rank leaves the others in step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from shoal.comm.group import Group, Op

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
    data = torch.randn(1000, generator=torch.Generator().manual_seed(group.rank))
    group.all_reduce(data).wait()
    of_rank_0 = data.clone()
    group.broadcast(of_rank_0).wait()
    return [("bits", data.view(torch.int32), of_rank_0.view(torch.int32))]


def all_reduce_of_a_slice_leaves_its_neighbours_alone(group: Group) -> Findings:
    buffer = torch.full((9,), -1.0)
    buffer[3:6] = group.rank + 1.0
    group.all_reduce(buffer[3:6]).wait()
    total = group.size * (group.size + 1) / 2
    return [("buffer", buffer, torch.tensor([-1.0] * 3 + [total] * 3 + [-1.0] * 3))]


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
    """For groups whose operations go on while nobody waits for them."""
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


CASES: dict[str, Case] = {
    case.__name__: case
    for case in (
        all_reduce_of_every_dtype_and_op,
        all_reduce_leaves_the_same_bits_on_every_rank,
        all_reduce_of_a_slice_leaves_its_neighbours_alone,
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
    )
}
