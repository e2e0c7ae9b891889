"""`shoal compare`: several strategies side by side, in processes that are started once."""

from __future__ import annotations

import re
import signal
from pathlib import Path
from typing import Any

import pytest

from benchmarks.predict import groups_of
from shoal.commands.compare import RunFaults, _rates, alternating
from shoal.commands.compared import strategies_of, target_loss_of
from shoal.errors import BadInput
from shoal.observe import comparison
from shoal.observe.comparison import ComparedRun, RunOutcome, speed_ups, steps_per_s
from tests.scripts import json_of, script, shoal

SCRIPT = script("""
def accuracy(outputs, targets):
    return {"accuracy": (outputs.argmax(1) == targets).double().mean()}

def train(job):
    step = job.step(model(), loss, optimizer=sgd)
    for batch in job.batches(data, batch_size=20, epochs=50):
        job.log(loss=step(batch))
    job.evaluate(accuracy, data)
""")
SCRIPT += '    raise ValueError("what follows is not part of the comparison")\n'


def test_runs_of_one_start(tmp_path: Path) -> None:
    """The same model, data and seed: ddp is equal to single, to rounding."""
    (tmp_path / "train.py").write_text(SCRIPT)
    words = ["compare", "-n", "2", "--steps", "18", "--json"]
    document: dict[str, Any] = json_of(
        shoal(*words, "-s", "hogwild", "-s", "ddp", "-s", "mapreduce", "train.py", cwd=tmp_path)
    )
    runs = {run["strategy"]: run for run in document["runs"]}
    assert list(runs) == ["single", "hogwild", "ddp", "mapreduce"]
    assert runs["ddp"]["loss_difference"] < 1e-5
    assert runs["ddp"]["loss"] == pytest.approx(runs["single"]["loss"], abs=1e-4)
    assert runs["ddp"]["evaluated"] == pytest.approx(runs["single"]["evaluated"])
    # 18 batches of 20 from 103 samples, of which 6 make an epoch, which is a step of mapreduce
    assert [run["steps"] for run in document["runs"]] == [18, 18, 18, 3]
    assert runs["hogwild"]["bytes_sent"] == 0
    assert runs["single"]["bytes_sent"] is None
    assert runs["ddp"]["bytes_sent"] > 18 * 4 * (6 * 16 + 16 + 16 * 3 + 3)  # half of it, twice
    for run in document["runs"]:
        assert run["samples_per_s"] > 0
        assert run["computing"] + run["waiting"] + run["idle"] == pytest.approx(1)
    assert runs["hogwild"]["against_single"].startswith("loss ")
    assert " after 3 steps" in runs["mapreduce"]["against_single"]


GLOBAL_MODEL = SCRIPT.replace("def train", "own = model()\ndef train").replace(
    "job.step(model()", "job.step(own"
)


def test_a_model_of_an_earlier_run_is_refused_and_the_rest_goes_on(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(GLOBAL_MODEL)
    done = shoal("compare", "-n", "1", "--steps", "3", "-s", "ddp", "train.py", cwd=tmp_path)
    assert done.returncode == 1
    assert "the script makes its model outside" in done.stdout.replace("\n", " ")


def test_a_script_that_fails_by_itself_is_reported(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("raise ValueError('no luck')")
    done = shoal("compare", "-n", "1", "-s", "ddp", "train.py", cwd=tmp_path)
    assert done.returncode == 1
    assert "no luck" in done.stderr


HIT = """
        if str(job.strategy) == "hogwild" and job.rank == 0 and job.steps in (3, 4):
            os.kill(os.getppid(), int(sys.argv[1]))
            while True: __import__("signal").pause()  # until it is ended
"""


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_leaves_the_rows_that_have_finished(
    tmp_path: Path, number: signal.Signals, status: int
) -> None:
    looped = "        job.log(loss=step(batch))\n"
    (tmp_path / "train.py").write_text(SCRIPT.replace(looped, looped + HIT))
    words = ["compare", "-n", "2", "--steps", "9", "-s", "ddp", "-s", "hogwild", "-s", "ps"]
    done = shoal(*words, "train.py", str(int(number)), cwd=tmp_path)
    assert done.returncode == status, done.stderr
    title, *lines = done.stdout.splitlines()
    assert title.strip() == "train.py on 2 workers, 9 steps (incomplete)"
    rows = {line.split()[0]: line.split() for line in lines}
    assert {"single", "equal"} <= {*rows, *rows["ddp"]}
    assert rows["hogwild"][-1] == rows["ps"][-1] == "interrupted"


IMPATIENT = """
from shoal.observe import comparison
if os.environ["SHOAL_STRATEGY"] != "single": comparison._PATIENCE_S, comparison._SLOW = 10, 0
"""
HANG = """
        if str(job.strategy) == "hogwild" and job.steps >= 3: __import__("time").sleep(10**6)
"""


@pytest.mark.whole
def test_a_row_whose_step_never_ends_is_stopped_and_the_others_are_shown(tmp_path: Path) -> None:
    looped = "        job.log(loss=step(batch))\n"
    text = SCRIPT.replace(looped, looped + HANG).replace("def train", IMPATIENT + "\ndef train")
    (tmp_path / "train.py").write_text(text)
    words = ["compare", "-n", "2", "--steps", "9", "--apart", "--json"]
    document: Any = json_of(shoal(*words, "-s", "hogwild", "-s", "ddp", "train.py", cwd=tmp_path))
    assert document["complete"]
    single, hogwild, ddp = document["runs"]
    assert single["failed"] is ddp["failed"] is None
    assert re.match(r"stopped after \d+ steps: more than 10 s", hogwild["failed"])


def entry(number: int, strategy: str) -> ComparedRun:
    return ComparedRun(number, strategy, 2, "nowhere")


def test_what_needs_servers_gets_processes_of_its_own() -> None:
    entries = [entry(i, name) for i, name in enumerate(["single", "ddp", "ps", "hogwild"])]
    assert groups_of(entries) == [[entries[0], entries[1], entries[3]], [entries[2]]]


def test_each_strategy_has_single_before_and_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A letter a run, capital where it is whole; i is single with the threads of one worker."""
    monkeypatch.setattr("shoal.commands.compare.cores", lambda: 4)
    names = ["ddp", "hogwild", "ps"]

    def letters(apart: bool, faults: RunFaults | None = None) -> list[str]:
        runs = alternating(names, 2, Path("nowhere"), 100, apart, faults)
        return ["".join(map(letter, group)) for group in runs]

    def letter(run: ComparedRun) -> str:
        short = "i" if run.threads == 2 else run.strategy[0]
        return short.upper() if run.is_whole else short

    assert letters(apart=False) == ["sSiDHsidhsidhsi", "siPsi"]
    assert letters(apart=True) == ["S", "D", "H", "P", "s"]
    # twice of each short run, with and without the faults, in turns; a kill ends its processes
    assert letters(False, RunFaults(slows=True)) == ["sSiDHsidhdhsidhdhsi", "siPsi", "p"]
    assert letters(False, RunFaults(kills=True)) == ["S", "D", "H", "P", "s"]


def outcome(strategy: str, rate: float | None) -> RunOutcome:
    return RunOutcome(strategy, 1 if strategy == "single" else 2, steps=30, steps_per_s=rate)


@pytest.mark.parametrize(
    ("rates", "found", "said"),
    [
        ([10, 16, 10], 1.6, None),  # ddp between two singles
        ([(2, 10), 16, (3, 8)], 1.8, None),  # the faster one of single with many and few threads
        ([4, 33, 4], None, "8.2× as fast as single is more than 2 workers can be"),
        ([10, 12, 4], None, "speed-ups from 1.20× to 3.00× in 2 comparisons are no verdict"),
        ([None, 12, 10], 1.2, None),
        ([None, None, None], None, None),
    ],
)
def test_a_speed_up_is_a_verdict_only_where_measurements_agree(
    rates: list[Any], found: float | None, said: str | None
) -> None:
    first, mine, last = rates
    slots = [slot if isinstance(slot, tuple) else (slot,) for slot in (first, last)]
    before, behind = ([outcome("single", rate) for rate in slot] for slot in slots)
    ddp = outcome("ddp", mine)
    shown = ddp.with_speeds([ddp], speed_ups([*before, ddp, *behind]).get("ddp", ()))
    assert shown.speed_up == (None if found is None else pytest.approx(found))
    if mine:
        assert (said in (shown.unmeasured or "")) if said else shown.unmeasured is None


def test_what_takes_whole_datasets_has_no_speed_up() -> None:
    assert speed_ups([outcome("single", 10), outcome("mapreduce", 3), outcome("single", 10)]) == {}


LOADER = SCRIPT.replace("accuracy, data)", "accuracy, iter(data))").replace("epochs=50", "epochs=1")


def test_a_script_that_cannot_end_fails_before_the_comparison(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(LOADER)
    done = shoal("compare", "-n", "1", "-s", "ddp", "train.py", cwd=tmp_path)
    assert done.returncode == 2
    assert "job.evaluate takes a dataset with indices" in done.stderr
    assert "Traceback" not in done.stderr
    assert "running" not in done.stderr


def test_strategies_are_each_compared_once_and_nonsense_is_refused() -> None:
    assert strategies_of(["ddp", "single", "ddp()"], 2) == ["ddp"]
    with pytest.raises(BadInput, match="makes no sense"):
        strategies_of(["hogwild + pp(2)"], 2)
    assert {"ddp", "hogwild", "mapreduce"} <= set(strategies_of(None, 2))


def test_workers_in_turns_that_train_one_after_the_other_are_no_faster_than_one() -> None:
    """Each takes 5 batches in 1 s, which count as 10 steps of the job."""
    reports = [
        {"steps_per_s": 10.0, "seconds": 1.0, "measured_ns": [s * 10**9, (s + 1) * 10**9]}
        for s in (0, 1)
    ]
    assert steps_per_s(reports, in_turns=True) == pytest.approx(5.0)
    assert steps_per_s([reports[0], reports[0]], in_turns=True) == pytest.approx(10.0)
    assert steps_per_s(reports, in_turns=False) == pytest.approx(10.0)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"loss_difference": 2e-7}, "equal (2e-07)"),
        ({"loss_difference": 0.03}, "differs by 3.0%"),
        ({"loss": 0.512, "loss_gap": 0.0123}, "loss 0.512, single 0.500"),
        (
            {"loss": 3.0, "first_loss": 2.0, "training_loss": 3.0, "loss_gap": 2.5},
            "loss 3.000, at the start 2.000, single 0.500",
        ),
        (
            {"loss": 0.7, "steps": 1, "loss_gap": 0.2, "single_steps": 10},
            "loss 0.700 after 1 step, single 0.500 after 10",
        ),
        ({"first_loss": 2.0, "training_loss": None}, "the loss is not a finite number"),
    ],
)
def test_what_is_said_of_the_difference_to_single(fields: dict[str, Any], words: str) -> None:
    assert RunOutcome("any", 2, **fields).against_single == words


@pytest.mark.parametrize(
    ("losses", "found"),
    [
        ([0.5] * 9 + [0.1] * 10, (13.0, 14)),  # a mean of 0.3 over ten steps, five of each
        ([0.5] * 19, (None, None)),
        ([0.1] * 9, (None, None)),  # too few
    ],
)
def test_seconds_and_steps_until_a_loss(losses: list[float], found: Any) -> None:
    numbers = [*range(1, len(losses) + 1)]
    report = {"loss_s": [float(n) for n in numbers], "loss_steps": numbers, "losses": losses}
    assert comparison._reached([report], 0.3) == found
    assert comparison._reached([report, report], 0.3) == found
    assert comparison._reached([report], None) == (None, None)


@pytest.mark.parametrize(
    ("sync", "dropped", "staleness"),
    [
        ({"bytes_sent": 1}, None, None),
        ({"updates_in_between": 0.5}, None, 0.5),  # hogwild
        ({"steps_behind": 1.5}, None, 1.5),  # gossip(mode="async")
        (
            {
                "servers": [
                    {
                        "workers": {"0": {"dropped": 0}, "1": {"dropped": 7}},
                        "missed_updates": {"0": 1, "2": 3},
                    }
                ]
            },
            7,
            1.5,
        ),
    ],
)
def test_pushes_dropped_and_staleness(sync: Any, dropped: Any, staleness: Any) -> None:
    assert comparison._dropped([sync]) == dropped
    assert comparison._staleness(sync) == staleness


def test_faults_and_targets_in_words() -> None:
    assert _rates(["1:8Mb/s"], 2) == {1: 1e-6}
    assert (target_loss_of("loss=0.2"), target_loss_of(None)) == (0.2, None)
    for text in ("1", "2:1Mb/s", "1:fast", "-1:1Mb/s", "1:0Mb/s"):
        with pytest.raises(BadInput, match="--slow-link takes a worker"):
            _rates([text], 2)
    for text in ("0.2", "loss=nan", "accuracy=0.9"):
        with pytest.raises(BadInput, match="--until takes a loss"):
            target_loss_of(text)


@pytest.mark.whole
def test_a_straggler_and_a_kill_cost_what_the_strategy_says(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    words = ["compare", "-n", "2", "--steps", "20", "--json", "-s", "ddp"]
    slowed = ("--slow", "1:8x", "--until", "loss=9")
    document: Any = json_of(shoal(*words, *slowed, "train.py", cwd=tmp_path))
    single, ddp = document["runs"]
    assert ddp["slowed"] > 0
    assert (single["slowed"], single["until_steps"], ddp["until_steps"]) == (None, 10, 10)
    assert ddp["injected"] > 0
    words += ["-s", "ddp(elastic=True)", "--kill", "1@5", "train.py"]
    _, plain, elastic = json_of(shoal(*words, cwd=tmp_path))["runs"]
    assert plain["failed"] == "worker 1 was killed by SIGKILL"
    assert (elastic["failed"], elastic["lost"], elastic["steps"]) == (None, [1], 20)
