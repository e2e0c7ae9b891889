from __future__ import annotations

import pytest

from shoal.comm.executors.solo import SoloGroup
from shoal.comm.words import all_say, tell, tell_all
from shoal.errors import BadInput
from tests.conftest import World

WORDS = [b"12 7 99", b"", b"a word that fills the room: 0123"]


def test_every_rank_hears_what_each_has_said(world: World) -> None:
    assert world(3, lambda g: tell_all(g, WORDS[g.rank], 32)) == [WORDS] * 3


@pytest.mark.parametrize("root", [0, 1, 2])
def test_every_rank_hears_the_root(world: World, root: int) -> None:
    assert world(3, lambda g: tell(g, WORDS[g.rank], root, 32)) == [WORDS[root]] * 3


def test_what_is_too_long_is_refused() -> None:
    with pytest.raises(BadInput, match="longer than the 32 bytes"):
        tell_all(SoloGroup(), WORDS[2] + b"4", 32)


def test_ranks_find_out_whether_all_say_the_same(world: World) -> None:
    assert world(3, lambda g: all_say(g, b"the same" * 99)) == [True] * 3
    other = world(3, lambda g: all_say(g, b"mine" if g.rank == 1 else b"the same"))
    assert other == [False] * 3
