"""What `shoal run` refuses before anything starts names the option that is the cause."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shoal.cli import main
from shoal.commands.launching import WorkersOptions
from shoal.errors import BadInput


def refused(strategy: str, workers: int = 4, **options: Any) -> str:
    with pytest.raises(BadInput) as caught:
        WorkersOptions(workers, strategy, **options).to_config()
    return str(caught.value)


@pytest.mark.parametrize(
    ("strategy", "names"),
    [
        ("ddp", "take ddp(elastic=True)"),
        ('ps(update="worker")', 'use update="server"'),
        ('ps(placement="workers")', 'use placement="servers"'),
        ('ps(mode="async", placement="workers")', 'use placement="servers"'),
        ("ps + pp(2)", "pp(2) splits"),
        ('ps(mode="async") + tp(2)', "tp(2) splits"),
    ],
)
def test_a_refused_restart_names_the_cause(strategy: str, names: str) -> None:
    sentence = refused(strategy, restart=1)
    assert sentence.startswith(f"--restart: {strategy} cannot take a worker back: ")
    assert names in sentence
    assert refused(strategy, start=1).startswith(
        f"--start: {strategy} cannot take a worker that comes"
    )


def test_one_worker_alone_cannot_return_to_a_synchronous_ps() -> None:
    assert 'use ps(quorum=…) or ps(mode="async")' in refused("ps", workers=1, restart=1)


@pytest.mark.parametrize(
    ("strategy", "why"),
    [
        ("ddp", "this strategy starts no servers; ps does"),
        ('ps(placement="rank0")', 'with placement="rank0" worker 0 hosts the server'),
        ('ps(placement="workers")', 'with placement="workers" each worker hosts one'),
    ],
)
@pytest.mark.parametrize("fault", [{"kill": ["server:0@5"]}, {"slow": ["server:0:4x"]}])
def test_a_fault_of_a_server_names_the_placement(
    strategy: str, why: str, fault: dict[str, list[str]]
) -> None:
    assert why in refused(strategy, **fault)


def test_a_fault_that_is_no_text_shows_both_forms() -> None:
    assert "such as 2@50, or server:" in refused("ps", kill=["srv:1@5"])
    assert "such as 1:4x, or server:1:4x" in refused("ps", slow=["srv:1:4x"])


@pytest.mark.parametrize("checkpoint", ["c:every=0", "/proc/x"])
def test_what_is_refused_is_the_only_line(
    checkpoint: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "--server-checkpoint" in refused("ps", start=1, server_checkpoint=checkpoint)
    assert capfd.readouterr().err == ""
    WorkersOptions(4, "ps", start=1, server_checkpoint="c").to_config()
    assert "ps runs as ps(quorum=4)" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("-n 1", "--elastic 2:4: the run cannot start with 1 worker: give -n from 2 to 4"),
        (
            "-n 2 --start 3",
            "--elastic 2:4: -n 2 and --start 3 are two numbers of workers at first: leave out one "
            "of them",
        ),
        (
            "-s pp(2)",
            "--elastic: the workers of a replica that pp(2) splits stay the same; leave out one of "
            "the two",
        ),
        (
            "--on lab -s ps(mode='async')",
            '--elastic with --on: workers of ps(mode="async") leave and join on this host only; on '
            "other hosts those of ddp, zero, localsgd and gossip do",
        ),
        (
            "-s ps(mode='async')+tp(2)",
            '--elastic: ps(mode="async") + tp(2) cannot take a worker that comes later: the '
            "workers of a replica that tp(2) splits meet at the start; leave it out",
        ),
    ],
)
@pytest.mark.parametrize("command", ["run", "train"])
def test_a_refused_elastic_run_names_what_was_given(
    command: str, words: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if command == "train" and "--on" in words:
        pytest.skip("shoal train has no --on")
    with pytest.raises(SystemExit) as ended:
        main([command, "digits", "--elastic", "2:4", *words.split()])
    assert (ended.value.code, capsys.readouterr().err) == (2, f"shoal: {sentence}\n")


@pytest.mark.parametrize(
    ("workers", "start", "at_first"), [(None, None, 4), (3, None, 3), (3, 3, 3), (4, 3, 3)]
)
def test_n_or_start_says_how_many_workers_an_elastic_run_has_at_first(
    workers: int | None, start: int | None, at_first: int
) -> None:
    options = WorkersOptions(workers, start=start, elastic="2:4").as_elastic()
    assert (options.workers, options.start, options.at_least) == (4, at_first, 2)
