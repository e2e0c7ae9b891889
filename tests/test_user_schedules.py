"""Training with a user's own schedules gives the result of one worker; wrong ones are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.thread_transport import ThreadTransport
from shoal.comm.executors.scheduled import Scheduled
from shoal.comm.group import Group
from shoal.errors import BadInput
from shoal.schedules.collectives.catalog import proven_collective
from shoal.schedules.collectives.cost import Link
from shoal.schedules.pipelines.catalog import build
from shoal.schedules.user import digest, is_user_function
from shoal.strategy.strategy import parse
from shoal.train.step.prepare_model import check_same
from tests.comm.threads import on_threads
from tests.conftest import World
from tests.models import samples
from tests.splitting import assert_equal, gpt, mlp, next_token_loss, texts
from tests.user_schedules import broken, collectives, pipelines

__all__ = ["broken", "collectives", "pipelines"]  # fixtures


@pytest.mark.parametrize("microbatches", ["", ", microbatches=1", ", microbatches=5"])
def test_a_zigzag_pipeline_trains_as_one_worker(
    world: World, pipelines: Path, microbatches: str
) -> None:
    strategy = f'pp(2, schedule="{pipelines}:zigzag"{microbatches})'
    options: Any = {"clip_norm": 0.1} if microbatches else {"exactly": True, "exact": True}
    assert_equal(world, 2, strategy, mlp, samples(24), **options)


def test_a_looped_schedule_trains_with_replicas_and_tied_weights(
    world: World, pipelines: Path
) -> None:
    strategy = f'ddp + pp(2, schedule="{pipelines}:looped", chunks=2)'
    assert_equal(world, 4, strategy, gpt, texts(16), loss=next_token_loss)


@pytest.mark.parametrize("function", ["two_hops", "for_two"])
def test_ddp_over_a_collective_of_the_user_trains_as_one_worker(
    collectives: Path, function: str
) -> None:
    size = 2 if function == "for_two" else 3
    algorithm = f"{collectives}:{function}"
    strategy = f'ddp(algorithm="{algorithm}")'

    def world(size: int, body: Callable[[Group], Any]) -> list[Any]:
        def rank(transport: ThreadTransport) -> Any:
            return body(Group(Scheduled(transport, {"all_reduce": algorithm}, link=Link())))

        return on_threads(size, rank)

    assert_equal(world, size, strategy, mlp, samples(24), clip_norm=0.1)


def test_a_schedule_that_differs_between_ranks_names_the_ranks(world: World) -> None:
    def body(group: Group) -> None:
        mine = b"zigzag" if group.rank in (0, 2) else b"zagzig"
        check_same(group, "mine.py:zigzag", mine)

    with pytest.raises(BadInput, match="not the same schedule on all ranks"):
        world(4, body)


def test_a_file_and_a_function_are_no_name_of_a_catalog() -> None:
    assert is_user_function("mine.py:zigzag") and is_user_function("/a b/my:own.py:f_2")
    for name in ("ring", "1f1b", "mine.py", "mine:zigzag", "mine.py:", "mine.py:a.b", ":f", ".py"):
        assert not is_user_function(name)


def test_equal_schedules_have_equal_digests(pipelines: Path, collectives: Path) -> None:
    zigzag = digest(build(f"{pipelines}:zigzag", 2, 4))
    assert zigzag == digest(build(f"{pipelines}:zigzag", 2, 4))
    assert zigzag != digest(build(f"{pipelines}:zigzag", 2, 5))
    name = f"{collectives}:two_hops"
    hops = [digest(proven_collective(name, "all_reduce", ranks)) for ranks in (3, 3, 4)]
    assert hops[0] == hops[1] != hops[2]


def test_a_relative_path_stays_that_of_the_first_use(
    pipelines: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipelines.rename(tmp_path / "relative_to_launch.py")
    monkeypatch.chdir(tmp_path)
    first = build("relative_to_launch.py:zigzag", 2, 4)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert build("relative_to_launch.py:zigzag", 2, 4) == first


def test_parsing_does_not_execute_the_file(broken: Path) -> None:
    strategy = parse(f'ddp(algorithm="{broken}:f") + pp(2, schedule="{broken}:f")')
    with pytest.raises(BadInput, match="cannot be loaded: ModuleNotFoundError"):
        strategy.layout(4)


def test_a_strategy_checks_its_schedules_when_the_workers_are_known(
    pipelines: Path, collectives: Path
) -> None:
    parse(f'pp(2, schedule="{pipelines}:zigzag", microbatches=4)').layout(2)
    with pytest.raises(BadInput, match="never does B0"):
        parse(f'pp(2, schedule="{pipelines}:forgetful", microbatches=4)').layout(2)
    with pytest.raises(BadInput, match="hangs: stage 0 before B0 waits for stage 1"):
        parse(f'pp(2, schedule="{pipelines}:stuck", microbatches=4)').layout(2)
    parse(f'ddp(algorithm="{collectives}:two_hops")').layout(3)
    with pytest.raises(BadInput, match="lacks the contribution of ranks 1, 2"):
        parse(f'ddp(algorithm="{collectives}:half")').layout(3)
    parse(f'ddp(algorithm="{collectives}:half")').layout(1)  # nothing to reduce
