"""The strategies of docs/own-strategies.md train, and every command works with them."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from torch.nn import functional as F

from shoal.comm.group import Group
from shoal.errors import BadInput
from shoal.strategy.strategy import parse, recorded
from shoal.sync import plan_for
from shoal.train.job import Job
from tests import scripts
from tests.conftest import World
from tests.docs.pages import blocks
from tests.jobs import CPU
from tests.models import samples
from tests.observe.test_memory_estimate import SGD, compare
from tests.scripts import shoal
from tests.splitting import assert_equal, mlp

FILES = {b.title: b.text for b in blocks("python") if b.page.name == "own-strategies.md"}
NAMED = ["lazy.py:lazy_ddp(every=2)", "normed.py:normed_ps"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in {**FILES, "train.py": scripts.PLAIN}.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_each_is_a_file_of_at_most_60_lines_of_code() -> None:
    assert set(FILES) == {"lazy.py", "normed.py"}
    for text in FILES.values():
        assert len([line for line in text.splitlines() if line.strip()]) <= 60


@pytest.mark.parametrize("named", ["lazy.py:lazy_ddp(every=1)", "normed.py:normed_ps(most=1000)"])
def test_what_leaves_out_nothing_equals_one_device(world: World, folder: Path, named: str) -> None:
    assert_equal(world, 3, f"{folder}/{named}", mlp, samples(24))


@pytest.mark.parametrize("named", NAMED)
def test_what_is_held_and_sent_is_what_its_step_says(
    world: World, folder: Path, named: str
) -> None:
    compare(world, 2, f"{folder}/{named}", optimizer=SGD)


@pytest.mark.parametrize("named", NAMED)
@pytest.mark.parametrize(
    "words",
    [
        ("run", "-n", "2", "--trace", "trace.json", "-s"),
        *(
            pytest.param(words, marks=pytest.mark.whole)
            for words in (
                ("memory", "-n", "2", "-s"),
                ("rehearse", "-n", "4", "-s"),
                ("compare", "-n", "2", "-s"),
                ("run", "-n", "2", "--record", "record", "-s"),
            )
        ),
        ("predict", "-n", "2", "-s"),
        ("plan", "-n", "2", "--why"),
        ("explain", "-n", "2"),
    ],
    ids=lambda words: words[0],
)
def test_a_command(folder: Path, named: str, words: tuple[str, ...]) -> None:
    done = shoal(*words, named, "train.py", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert words[0] == "run" or named.partition("(")[0] in done.stdout


@pytest.mark.parametrize("text", ["lazy.py:lazy_ddp", "lazy.py:lazy_ddp(every=3) + tp(2)"])
def test_its_text_is_read_back(folder: Path, text: str) -> None:
    assert str(parse(str(parse(text)))) == str(parse(text))
    assert parse("lazy.py:lazy_ddp(every=2)") == parse("lazy.py:lazy_ddp")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("lazy.py:lazy_ddp(every=0)", "every must be a whole number"),
        ("lazy.py:lazy_ddp(evry=3)", "did you mean 'every'"),
        ("lazy.py:LazySync", "must be a class"),
        ("lazy.py:nothing", "has no function nothing"),
        ("nowhere.py:lazy_ddp", "there is no Python file nowhere.py"),
    ],
)
def test_what_is_wrong_is_said_in_a_sentence(folder: Path, text: str, why: str) -> None:
    with pytest.raises(BadInput, match=why):
        parse(text)


def test_a_term_without_a_plan_is_refused(folder: Path) -> None:
    text = FILES["lazy.py"].replace("@runs(lazy_ddp)\n", "")
    (folder / "unplanned.py").write_text(text)
    with pytest.raises(BadInput, match="register its SyncPlan"):
        plan_for(parse("unplanned.py:lazy_ddp").sync_for(2), 2)


def test_what_is_read_as_data_loads_no_file(folder: Path) -> None:
    (folder / "attack.py").write_text("raise SystemExit")
    assert str(recorded("attack.py:mine(every=2) + pp(2)")) == "attack.py:mine + pp(2)"


def test_a_checkpoint_has_what_is_not_sent_yet(world: World, folder: Path) -> None:
    def body(group: Group) -> tuple[list[float], list[float]]:
        def job_of(name: str) -> Job:
            return Job(parse(f"{folder}/lazy.py:lazy_ddp"), group, device=CPU, seed=1)

        found = []
        job = job_of("first")
        step = job.step(mlp(), F.cross_entropy, optimizer=SGD)
        for batch in itertools.islice(job.batches(samples(24), 8), 3):
            step(batch)
        job.save(str(folder / "saved"))
        found.append(step.sync.state()["unsent"][step.flat.offset :].tolist())
        job.close()
        job = job_of("second")
        step = job.step(mlp(), F.cross_entropy, optimizer=SGD)
        job.load(str(folder / "saved"))
        found.append(step.sync.state()["unsent"][step.flat.offset :].tolist())
        job.close()
        return found[0], found[1]

    for before, after in world(2, body):
        assert any(before) and after == pytest.approx(before, abs=1e-6)
