"""Devices in a torus: rank r has the coordinates of r in row-major order, last axis fastest."""

from __future__ import annotations

import math


def coordinates(sizes: tuple[int, ...], rank: int) -> tuple[int, ...]:
    found = []
    for size in reversed(sizes):
        rank, along = divmod(rank, size)
        found.append(along)
    return tuple(reversed(found))


def rank_at(sizes: tuple[int, ...], place: tuple[int, ...]) -> int:
    rank = 0
    for size, along in zip(sizes, place, strict=True):
        rank = rank * size + along % size
    return rank


def neighbors(sizes: tuple[int, ...], rank: int) -> list[int]:
    """The ranks one step away along each axis; once each where an axis has two places."""
    place = coordinates(sizes, rank)
    found = []
    for axis, size in enumerate(sizes):
        for step in (1, -1):
            moved = (*place[:axis], place[axis] + step, *place[axis + 1 :])
            other = rank_at(sizes, moved)
            if size > 1 and other not in found:
                found.append(other)
    return found


def neighbor_steps(sizes: tuple[int, ...], src: int, dst: int) -> list[int]:
    """The ranks on the way, both ends included: one axis after the other, the shorter way round."""
    place = list(coordinates(sizes, src))
    target = coordinates(sizes, dst)
    stops = [src]
    for axis, size in enumerate(sizes):
        ahead = (target[axis] - place[axis]) % size
        step = 1 if ahead <= size - ahead else -1
        while place[axis] != target[axis]:
            place[axis] = (place[axis] + step) % size
            stops.append(rank_at(sizes, tuple(place)))
    return stops


def bisection_links(sizes: tuple[int, ...]) -> int:
    """Links in one direction between two halves, cut across the longest axis."""
    longest = max(sizes)
    columns = math.prod(sizes) // longest
    return columns * (2 if longest > 2 else 1)
