"""Run many schedules, and show the one that fails."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

from tests.server.chain.world import Broken, World


def run_all(seeds: Iterable[int], **options: Any) -> int:
    """How many left a chain alive; a failure comes with its schedule."""
    return sum(run_one(seed, **options) for seed in seeds)


def run_one(seed: int, **options: Any) -> bool:
    try:
        return World(seed, **options).run()
    except (Broken, AssertionError) as error:
        raise Broken(f"seed {seed}, {options}: {error}\n{schedule(seed, **options)}") from None


def schedule(seed: int, **options: Any) -> str:
    """What happens in the world of this seed, up to its end."""
    world = World(seed, **options)
    world.loop.trace = []
    world.trace_messages()
    with contextlib.suppress(AssertionError):
        world.run()
    return "\n".join(world.loop.trace[-400:])


def first_broken(seeds: Iterable[int], **options: Any) -> str | None:
    """Why the first schedule that fails fails; None if none does."""
    for seed in seeds:
        try:
            World(seed, **options).run()
        except (Broken, AssertionError) as error:
            return f"seed {seed}: {error}"
    return None
