"""`shoal run` on scripts as users write them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from tests import forked, scripts
from tests.launch.helpers import HOLD, Rope
from tests.scripts import shoal, shoal_elastic


def losses(text: str) -> list[tuple[str, float]]:
    """(step, loss) of every progress line."""
    found = []
    for line in text.splitlines():
        words = line.removeprefix("[0] ").split()
        if words[:1] == ["step"] and "loss" in words:
            found.append((words[1], float(words[words.index("loss") + 1])))
    return found


def run(*command: str, cwd: Path) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_python_shoal_torchrun_and_mpirun_print_the_same_losses(
    tmp_path: Path, whole_suite: bool
) -> None:
    script = tmp_path / "train.py"
    script.write_text(scripts.PLAIN)
    alone = losses(shoal("run", "train.py", cwd=tmp_path).stdout)
    assert len(alone) == 12
    outputs = [shoal("run", "train.py", "-n", "2", cwd=tmp_path).stdout]
    if whole_suite:  # new interpreters; ranks that get the same variables: test_spawned.py
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        outputs.append(run(sys.executable, *torchrun, "train.py", cwd=tmp_path))
    if whole_suite and shutil.which("mpirun"):
        mpirun = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2"]
        outputs.append(run(*mpirun, sys.executable, "train.py", cwd=tmp_path))
    for output in outputs:
        found = losses(output)
        assert [step for step, _ in found] == [step for step, _ in alone]
        assert [x for _, x in found] == pytest.approx([x for _, x in alone], abs=1e-5)


def test_the_first_failure_comes_last_and_in_full_with_its_rank(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(scripts.FAILS_ON_RANK_1)
    done = shoal("run", "train.py", "-n", "3", cwd=tmp_path)
    assert done.returncode == 1
    assert "worker 1 failed" in done.stderr
    report = done.stderr[done.stderr.index("worker 1 failed") :]
    assert "in helper_that_fails" in report
    assert report.rstrip().endswith("ValueError: the seventh seal is broken")


def test_a_worker_that_stops_before_the_others_is_named(tmp_path: Path) -> None:
    stops = "            sys.exit(0) if job.rank == 1 and job.steps == 3 else None\n"
    script = scripts.PLAIN.replace("epochs=2", "epochs=50")
    script = script.replace(
        "job.log(loss=step(batch))\n", "job.log(loss=step(batch))\n" + stops[4:]
    )
    (tmp_path / "train.py").write_text(script)
    done = shoal("run", "train.py", "-n", "2", cwd=tmp_path)
    assert done.returncode == 1
    assert "worker 0 was still running when worker 1 had finished" in done.stderr


@pytest.mark.parametrize("launcher", [["-m", "shoal", "run"], []])
def test_a_mistake_is_one_sentence_with_the_line_of_the_script(
    tmp_path: Path, launcher: list[str]
) -> None:
    text = scripts.PLAIN.replace("optimizer=sgd", "optimizer=sgd, lr=0.1")
    (tmp_path / "train.py").write_text(text)
    line = scripts.PLAIN.splitlines().index("    step = job.step(model(), loss, optimizer=sgd)") + 1
    command = [sys.executable, *launcher, "train.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 2
    assert done.stderr.startswith("shoal: lr has to be a function, not 0.1;")
    assert done.stderr.endswith(f"(train.py, line {line})\n") and done.stderr.count("\n") == 1


def test_a_script_that_never_calls_shoal_run_is_reported(tmp_path: Path) -> None:
    (tmp_path / "plain.py").write_text("print('done')")
    done = shoal("run", "plain.py", "-n", "2", cwd=tmp_path)
    assert done.returncode == 0
    assert done.stderr.startswith("shoal: the script never called shoal.run(train)")


@pytest.mark.parametrize("words", ["verify train.py -s bogus", "eval nowhere"])
def test_what_cannot_run_is_refused_without_loading_torch_or_what_planners_need(
    tmp_path: Path, words: str
) -> None:
    (tmp_path / "train.py").write_text(scripts.PLAIN)
    code = "import sys; sys.modules.update(dict.fromkeys(['torch', 'numpy', 'networkx']))"
    code += "; from shoal.cli import main; main()"
    command = [sys.executable, "-c", code, *words.split()]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("shoal: ")


@pytest.mark.whole
def test_workers_started_by_the_script_itself(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        scripts.PLAIN.replace("shoal.run(train)", 'shoal.run(train, workers=2); print("after")')
    )
    output = run(sys.executable, "train.py", cwd=tmp_path)
    assert "[0] step 12/12" in output and output.rstrip().endswith("after")
    assert "[1]" not in output  # progress comes from rank 0 alone, and the rest runs once


def test_exact_gives_one_digest_at_1_and_4_workers(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(scripts.EXACT)
    digests = set()
    for workers in (1, 4):
        done = shoal("run", "train.py", "-n", str(workers), cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        digests.add(done.stdout.removeprefix("[0] ").strip())
    assert len(digests) == 1 and len(digests.pop()) == 64


def test_killed_and_resumed_ends_as_if_uninterrupted_also_on_another_number_of_workers(
    tmp_path: Path,
) -> None:
    (tmp_path / "train.py").write_text(scripts.SAVES)
    whole = shoal("run", "train.py", "-n", "2", cwd=tmp_path).stdout
    shutil.rmtree(tmp_path / "checkpoint")
    killed = shoal("run", "train.py", "-n", "2", "--", "--die", cwd=tmp_path)
    assert killed.returncode != 0 and "SIGKILL" in killed.stderr
    resumed = shoal("run", "train.py", "-n", "3", "--", "--resume", cwd=tmp_path).stdout
    assert float(resumed.split()[3]) == pytest.approx(float(whole.split()[3]), abs=1e-6)
    assert resumed.split()[-2:] == ["18", "steps"]


def test_interrupt_leaves_no_process_behind(tmp_path: Path) -> None:
    endless = scripts.PLAIN.replace("epochs=2", "epochs=1000000")
    (tmp_path / "train.py").write_text("import os\n" + HOLD + endless)
    with closing(Rope(tmp_path)) as rope:
        job = forked.Popen(
            [sys.executable, "-m", "shoal.cli", "run", "train.py", "-n", "2"],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "ROPE": str(rope.path)},
        )
        assert job.stdout is not None
        rope.wait_held(2)
        job.stdout.readline()
        job.send_signal(signal.SIGINT)
        assert job.wait(60) != 0
        rope.wait_released()
        job.stdout.close()


def test_a_trace_tells_where_the_time_went(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(scripts.PLAIN)
    done = shoal("run", "train.py", "-n", "2", "--trace", "trace.json", cwd=tmp_path)
    assert done.returncode == 0 and "computing" in done.stdout
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert {event["pid"] for event in spans} == {0, 1}
    assert {"forward", "backward", "reduce", "wait", "update"} <= {e["name"] for e in spans}


def test_a_report_tells_what_happened_on_every_rank(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(scripts.PLAIN)
    words = ["run", "train.py", "-n", "2", "--slow", "1:2x", "--report", "report.json"]
    done = shoal(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["strategy"], report["workers"], report["steps"]) == ("ddp", 2, 12)
    assert report["lost"] == []
    assert [(rank["rank"], rank["steps"]) for rank in report["ranks"]] == [(0, 12), (1, 12)]
    assert sum(rank["samples"] for rank in report["ranks"]) == 2 * 103


def test_an_elastic_run_goes_on_without_a_killed_worker_and_evaluates_everything(
    tmp_path: Path,
) -> None:
    (tmp_path / "train.py").write_text(scripts.ELASTIC)
    words = ["run", "train.py", "-n", "3", "--kill", "1@3", "--report", "report.json"]
    done = shoal_elastic(*words, "-s", "hogwild", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    told = [line for line in done.stderr.splitlines() if line.startswith("shoal: ")]
    assert told[0].startswith("shoal: worker 1 was killed by SIGKILL after ")
    assert told[0].endswith("the others go on, as hogwild allows")
    assert told[-1] == "shoal: finished by workers 0 and 2, without worker 1"
    expected = f"mean {sum(range(103)) / 103}"
    assert sorted(done.stdout.splitlines())[-2:] == [f"[0] {expected}", f"[2] {expected}"]
    report = json.loads((tmp_path / "report.json").read_text())
    assert [loss["rank"] for loss in report["lost"]] == [1]
    assert [rank and rank["steps"] for rank in report["ranks"]] == [12, None, 12]


HOGWILD = scripts.PLAIN.replace(
    "def train(job):",
    """def train(job):
    before = torch.nn.functional.cross_entropy(model()(data.tensors[0]), data.tensors[1])""",
).replace(
    'if __name__ == "__main__":',
    """    after = job.evaluate(loss, data)
    job.print("better", bool(after < before))

if __name__ == "__main__":""",
)


@pytest.mark.parametrize("kill", [False, True])
def test_hogwild_leaves_no_shared_memory_behind(tmp_path: Path, kill: bool) -> None:
    (tmp_path / "train.py").write_text(HOGWILD.replace("epochs=2", "epochs=6"))
    words = ["run", "train.py", "-n", "2", "-s", "hogwild", "--device", "cpu"]
    done = shoal(*words, *(["--kill", "1@9"] if kill else []), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "better True" in done.stdout
    assert "hogwild sets momentum=0.9 to 0" in done.stderr
    assert ("without worker 1" in done.stderr) is kill


def test_a_command_without_words_shows_its_help(tmp_path: Path) -> None:
    for words, usage in (([], "Usage: shoal [OPTIONS]"), (["keys"], "Usage: shoal keys ")):
        done = shoal(*words, cwd=tmp_path)
        assert done.returncode == 2 and done.stderr.startswith(usage)
