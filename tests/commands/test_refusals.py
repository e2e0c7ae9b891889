"""What commands refuse before anything starts: one sentence that names the cause."""

from __future__ import annotations

import shlex
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from shoal import __main__
from shoal.commands import plan
from shoal.commands.launching import WorkersOptions
from shoal.errors import BadInput
from shoal.launch.here.running import RunFacts, enter_run, find_run
from shoal.observe.calibration.measure import check_seconds
from shoal.runtime.run_dir import new_run_dir
from tests import scripts
from tests.commands.terminal import shoal


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


SERVER = {
    "ddp": "this strategy starts no servers; ps does",
    'ps(placement="rank0")': 'with placement="rank0" worker 0 hosts the server',
    'ps(placement="workers")': 'with placement="workers" each worker hosts one',
}


def test_other_faults_and_returns_that_cannot_be() -> None:
    """The placement is named where a server is hit, both forms where a fault cannot be read."""
    for strategy, why in SERVER.items():
        assert why in refused(strategy, kill=["server:0@5"])
        assert why in refused(strategy, slow=["server:0:4x"])
    assert "such as 2@50, or server:" in refused("ps", kill=["srv:1@5"])
    assert "such as 1:4x, or server:1:4x" in refused("ps", slow=["srv:1:4x"])
    assert 'use ps(quorum=…) or ps(mode="async")' in refused("ps", workers=1, restart=1)


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
    ("workers", "start", "at_first"), [(None, None, 4), (3, None, 3), (3, 3, 3), (4, 3, 3)]
)
def test_n_or_start_says_how_many_workers_an_elastic_run_has_at_first(
    workers: int | None, start: int | None, at_first: int
) -> None:
    options = WorkersOptions(workers, start=start, elastic="2:4").as_elastic()
    assert (options.workers, options.start) == (4, at_first)
    assert options.to_config().min_workers == 2


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("run -n 2 -s dpp train.py", "did you mean 'ddp'"),
        ("run -n 3 -s 'tp(2) + pp(2)' train.py", "needs at least 4 workers"),
        (
            "run -n 4 -s 'gossip(mode=\"async\") + pp(2)' train.py",
            'gossip(mode="async") + pp(2) is not built yet',
        ),
        (
            "run -n 4 -s 'gossip(graph=\"edges:0-1,2-3\")' train.py",
            "its parts are the workers {0, 1}, {2, 3}",
        ),
        ("run -n 2 -s 'ddp(algorithm=\"tre\")' train.py", "did you mean 'tree'"),
        ("run -n 2 -s 'ddp(algorithm=\"no.py:f\")' train.py", "there is no Python file no.py"),
        ("verify -n 2 -s 'pp(2, schedule=\"train.py:f\")' train.py", "has no function f"),
        ("run --elastic 2:4 -n 1 train.py", "cannot start with 1 worker: give -n from 2 to 4"),
        ("run --elastic 2:4 -n 2 --start 3 train.py", "two numbers of workers at first"),
        ("run --elastic 2:4 -s 'pp(2)' train.py", "the workers of a replica that pp(2) splits"),
        ("run --elastic 2:4 --on lab -s 'ps(mode=\"async\")' train.py", "on this host only"),
        ("train --elastic 2:4 -s 'ps(mode=\"async\")+tp(2)' digits", "that tp(2) splits meet"),
        ("run -n 2 -s single train.py", "single runs on one worker"),
        ("run missing.py", "there is no script 'missing.py'"),
        # what follows the name are the words of the installed typer
        ("run -n 0 train.py", "Invalid value for '--workers' / '-n'"),
        ("graphs -n x", "Invalid value for '--workers' / '-n'"),
        ("run -n two train.py", "Invalid value for '--workers' / '-n'"),
        ("run --wrokers 2 train.py", "No such option: --wrokers"),
        ("run --json train.py", "No such option: --json; --report FILE writes the report"),
        ("run", "Missing argument 'script' (see shoal run --help)"),
        ("rum", "No such command 'rum'"),
        ("run --gpus a,b train.py", "--gpus takes numbers"),
        ("run -n 2 --slow 2:4x train.py", "there is no worker 2"),
        ("run -n 2 --kill 1:4 train.py", "--kill takes a text such as 2@50"),
        ("run --report no/r.json train.py", "cannot write a report to no/r.json"),
        ("train -n 2 --kill 2@1 digits", "there is no worker 2"),
        ("train digit", "there is no example 'digit'"),
        ("eval nowhere", "there is no checkpoint at nowhere"),
        ("verify -n 2 -s hogwild train.py", "hogwild"),
        ("collectives --ranks 0", "--ranks takes numbers from 1 to 4,096"),
        ("graphs -n 4 --graph edges:0-1,2-3", "it is not connected"),
        ("graphs -n 6 --graph hypercube", "a power of two"),
        ("graphs -n 600", "at most 512 replicas"),
        ("graphs -n 65 --svg g.svg", "at most 64 workers"),
        ("collectives --ranks 100000000", "--ranks takes numbers from 1 to 4,096"),
        ("collectives --ranks 100000000 --cluster dgx-a100", "from 1 to 4,096"),
        ("collectives --bytes 3potatoes", "'3potatoes' is not a size"),
        ("collectives --alpha soon", "'soon' is not a time"),
        ("collectives --beta 10GB", "'10GB' is not a cost per byte"),
        ("collectives --beta 1e400", "'1e400' is not a cost per byte"),
        ("collectives --kind allreduce", "did you mean 'all_reduce'?"),
        ("collectives show all_reduce rong", "did you mean 'ring'?"),
        ("collectives show broadcast tree --root 9", "ranks 0 to 3, not 9"),
        ("collectives show all_reduce ring --ranks 99", "is unreadable"),
        ("collectives show all_reduce ring --node 2", "no such option"),
        ("collectives show all_reduce nowhere.py:f", "no Python file nowhere.py"),
        ("collectives show all_reduce ring --svg /nowhere/a.svg", "cannot write /nowhere/a.svg"),
        ("collectives show all_reduce ring --ranks 64 --svg a.svg", "too many to watch"),
        ("pipeline show 1f1c", "did you mean '1f1b'?"),
        ("pipeline show 1f1b --stages 0", "at least one stage, not 0"),
        ("pipeline show 1f1b --microbatches -2", "at least one micro-batch, not -2"),
        ("pipeline show bfs --chunks 0", "at least one chunk, not 0"),
        ("pipeline show gpipe --chunks 2", "interleaved and bfs take chunks"),
        ("pipeline show 1f1b --forward soon", "or one for each stage as 1,2,1, not 'soon'"),
        ("pipeline show 1f1b --weight 1,2", "weight has 2 times"),
        ("pipeline show 1f1b --weight -1", "--weight takes a number, or one for each stage"),
        ("pipeline show 1f1b --transfer 1,2", "--transfer takes one number"),
        ("pipeline show 1f1b --stages 99", "99 stages is unreadable"),
        ("pipeline show 1f1b --microbatches 999999999", "more than 500,000 actions"),
        ("pipeline show 1f1b --svg /nowhere/a.svg", "cannot write /nowhere/a.svg"),
        ("pipeline show nowhere.py:f", "no Python file nowhere.py"),
        ("pipeline list --forward nan", "--forward takes a number, or one"),
        ("pipeline list --chunks 0", "at least one chunk, not 0"),
        ("predict gpt-3 -n 4,x", "such as 2,4,8 or 2,4,…,64, not '4,x'"),
        ("predict gpt-3 -n 4,0", "-n takes numbers from 1 to 10,000,000"),
        ("predict gpt-3 -n 2,4 --lost 1", "--lost needs one number of workers"),
        ("simulate gpt-3 -n 4", "use shoal predict, or shoal rehearse"),
        ("predict gpt-3 -n 2,4 --mtbf 8h", "--mtbf needs one number of workers"),
        ("predict gpt-3 --spare 2", "give --mtbf, of all nodes, or --node-mtbf, of one"),
        ("plan gpt-3 --mtbf 8h --node-mtbf 500h", "give --mtbf, of all nodes, or --node-mtbf"),
        ("plan gpt-3 --mtbf 3s", "a failure every 3 s: the least is 1 minute"),
        ("plan gpt-3 --mtbf soon", "'soon' is not a time"),
        ("plan gpt-3 --mtbf 8h --storage 5GB", "--storage takes a rate such as 100GB/s"),
        ("predict", "name a script or a model such as gpt-3"),
        ("plan gpt-3 --cluster no-such", "no cluster preset or file no-such"),
        ("predict gpt-3 --precision fp7", "--precision is mixed or fp32"),
        ("predict gpt-3 --recompute half", "--recompute is none, selective, full, or some of norm"),
        ("predict gpt-3 --hide tp,xy", "--hide takes tp, ep and pp, such as tp,pp, not 'xy'"),
        ("predict gpt-3 -n 2 -s 'tp(2)' --hide ep", "--hide ep: tp(2) has no ep"),
        ("predict --gpt layer=4", "'layer=4'"),
        ("predict gpt-3 -n 3 -s 'tp(2)'", "needs a multiple of 2 workers"),
        ("predict gpt-3 -n 8 -s 'pp(8, schedule=\"interleaved(2)\")'", "chunks=2"),
        ("cluster show dgx-a10", "did you mean 'dgx-a100'?"),
        ("cluster show none.toml", "cannot read none.toml: No such file or directory"),
        ("cluster show dgx-a100 --nodes 3 --racks 2", "3 nodes do not fill 2 racks evenly"),
        ("cluster show dgx-a100 --nodes 1 --racks 2", "1 nodes do not fill 2 racks evenly"),
        ("cluster show dgx-a100 --oversubscription 4", "give --racks 2"),
        ("cluster show laptop --nodes 2", "a node of laptop has no nic"),
        ("cluster show h200 --svg /none/c.svg", "cannot write /none/c.svg"),
        ("memory --limit 10GB --measure train.py", "--measure is for one strategy"),
        ("predict t5-large -n 8", "'t5-large' is no known transformer"),
        ("predict t5-large -n 8", "llama-2-7b"),
        ("predict gpt-3 -n 4 --slow 9:4x --cluster dgx-a100", "there is no worker 9"),
        ("predict gpt-3 -n 4 --lost node:0 --cluster dgx-a100", "no replica is left"),
        ("collectives --cluster rack-1-4 --beta 10GB/s", "--beta does not go with --cluster"),
        ("collectives --cluster rack-1-5", "rack-1-4"),
        (f"keys tls {'x' * 300} --host a", "cannot make the folder"),
        ("run --on nowhere train.py", "not 'nowhere'"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_2(
    words: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").write_text(scripts.PLAIN)
    monkeypatch.chdir(tmp_path)
    answer = shoal(*shlex.split(words))
    assert answer.exit_code == 2 and answer.stdout == ""
    assert answer.stderr.startswith("shoal: ") and answer.stderr.count("\n") == 1
    assert sentence in answer.stderr


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf"), 1e9])
def test_a_calibration_takes_more_than_no_time_and_at_most_a_day(seconds: float) -> None:
    with pytest.raises(BadInput, match="more than 0 and at most 86400 are expected"):
        check_seconds(seconds)


def test_an_empty_name_is_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with new_run_dir() as run_dir:
        name = enter_run(run_dir, RunFacts("ps", 1, 0, ("python", "train.py"), ("here",)))
        assert find_run(name[:2]).run_dir == run_dir
        with pytest.raises(BadInput, match="there is no run ''"):
            find_run("")


def test_ctrl_c_ends_a_command_with_one_line_and_status_130(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(plan, "search", interrupt)
    answer = shoal("plan", "gpt-3", "--cluster", "dgx-a100")
    assert answer == (130, "", "shoal: interrupted\n")


class InterruptedLoading(ModuleType):
    def __getattr__(self, name: str) -> Any:
        raise KeyboardInterrupt if name in ("main", "app") else AttributeError(name)


@pytest.mark.parametrize("module", ["shoal.commands.cli", "shoal.commands.keys"])
def test_ctrl_c_while_modules_are_loaded_is_one_line_too(
    module: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, module, InterruptedLoading(module))
    monkeypatch.setattr(sys, "argv", ["shoal", "keys"])
    with pytest.raises(SystemExit) as stopped:
        __main__.main()
    out, err = capsys.readouterr()
    assert (stopped.value.code, out, err) == (130, "", "shoal: interrupted\n")
