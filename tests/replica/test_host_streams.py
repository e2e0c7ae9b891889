"""Python's and numpy's generators around a forward, which draws from them or does not."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from shoal.replica.host_streams import HostStreams


def draw(source: str) -> list[float]:
    return [random.random() if source == "python" else float(np.random.rand())]


def states() -> Any:
    kind, words, position, *gauss = np.random.get_state()
    return random.getstate(), kind, list(words), position, gauss


def step(streams: HostStreams, source: str | None, seed: int = 7) -> list[float]:
    """One step; what its forward has drawn. The script's own streams are as before."""
    before = states()
    saved = streams.save()
    streams.seed(seed)
    drawn = draw(source) if source else []
    streams.restore(saved)
    assert states() == before
    return drawn


@pytest.mark.parametrize("source", ["python", "numpy"])
def test_a_forward_that_draws_gets_the_stream_of_its_seed(source: str) -> None:
    streams = HostStreams()
    first = step(streams, source)
    random.random(), np.random.rand()
    assert step(streams, source) == first != step(streams, source, seed=8)


@pytest.mark.parametrize("source", ["python", "numpy"])
def test_one_that_begins_to_draw_is_seeded_from_the_next_step_on(source: str) -> None:
    streams = HostStreams()
    seeded = step(HostStreams(), source)
    assert step(streams, None) == step(streams, None) == []
    script = states()
    late = step(streams, source)  # from the script's stream, which is alike on all ranks
    assert draw(source) == late
    random.setstate(script[0])
    assert [step(streams, source), step(streams, None), step(streams, source)] == [
        seeded,
        [],
        seeded,
    ]


def test_states_are_compared_in_memory() -> None:
    """Else each step would read and write them, which takes half a millisecond."""
    streams = HostStreams()
    step(streams, None)
    assert [before.state for _, before in streams.save()] == [None, None]


def test_a_stream_that_is_known_to_be_drawn_from_is_not_read_when_it_is_seeded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A dataset that draws noise seeds before every sample."""
    streams = HostStreams()
    step(streams, "python")
    (drawn,) = (stream for stream in streams._streams() if stream.is_drawn_from)
    monkeypatch.setattr(drawn, "words_now", None)
    streams.seed(7)
    assert draw("python") == [random.Random(7).random()]


@pytest.mark.parametrize(
    "draw",
    [
        lambda: torch.rand(()),
        lambda: torch.randn(()),
        lambda: torch.rand(624),
        lambda: torch.randperm(5),
        lambda: torch.manual_seed(8),
    ],
)
def test_torch_draws_change_words_in_memory_and_can_be_undone(draw: Any) -> None:
    torch.manual_seed(7)
    torch.randn(())  # its second half comes next
    (stream,) = HostStreams(with_torch=True, is_drawn_from=False)._streams()[1:2]
    state = torch.get_rng_state()
    before = stream.save()
    draw()
    assert before.state is None and stream.restore(before)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.initial_seed() == 7
