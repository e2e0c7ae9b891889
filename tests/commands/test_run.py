"""`shoal run` on scripts as users write them."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import scripts
from tests.products import few_or_all
from tests.scripts import shoal


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
    outputs = [shoal("run", "-n", "2", "train.py", cwd=tmp_path).stdout]
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
    done = shoal("run", "-n", "3", "train.py", cwd=tmp_path)
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
    done = shoal("run", "-n", "2", "train.py", cwd=tmp_path)
    assert done.returncode == 1
    assert "worker 0 was still running when worker 1 had finished" in done.stderr


@pytest.mark.parametrize("launcher", few_or_all([[]], [["-m", "shoal", "run"], []]))
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
    done = shoal("run", "-n", "2", "plain.py", cwd=tmp_path)
    assert done.returncode == 0
    assert done.stderr.startswith("shoal: the script never called shoal.run(train)")


@pytest.mark.whole
def test_a_script_that_trains_without_shoal_run_ends_before_its_first_update(
    tmp_path: Path,
) -> None:
    text = """
import torch
net = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
net(torch.ones(4, 2)).sum().backward()
optimizer.step()
torch.save(net.state_dict(), "model.pt")
"""
    (tmp_path / "plain.py").write_text(text)
    for run in (shoal, scripts.started):
        done = run("run", "-n", "2", "plain.py", cwd=tmp_path)
        assert done.returncode == 2, done.stderr
        assert "trains without shoal.run(train): each of 2 workers" in done.stderr
    assert not (tmp_path / "model.pt").exists()


@pytest.mark.parametrize("words", ["verify -s bogus train.py", "eval nowhere"])
def test_what_cannot_run_is_refused_without_loading_torch_or_what_planners_need(
    tmp_path: Path, words: str
) -> None:
    (tmp_path / "train.py").write_text(scripts.PLAIN)
    code = "import sys; sys.modules.update(dict.fromkeys(['torch', 'numpy', 'networkx']))"
    code += "; from shoal.commands.cli import main; main()"
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


def test_killed_and_resumed_ends_as_if_uninterrupted_also_on_another_number_of_workers(
    tmp_path: Path,
) -> None:
    (tmp_path / "train.py").write_text(scripts.SAVES)
    whole = shoal("run", "-n", "2", "train.py", cwd=tmp_path).stdout
    shutil.rmtree(tmp_path / "checkpoint")
    killed = shoal("run", "-n", "2", "train.py", "--die", cwd=tmp_path)
    assert killed.returncode != 0 and "SIGKILL" in killed.stderr
    resumed = shoal("run", "-n", "3", "train.py", "--resume", cwd=tmp_path).stdout
    assert float(resumed.split()[3]) == pytest.approx(float(whole.split()[3]), abs=1e-6)
    assert resumed.split()[-2:] == ["18", "steps"]


def test_a_trace_tells_where_the_time_went(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(scripts.PLAIN)
    done = shoal("run", "-n", "2", "--trace", "trace.json", "train.py", cwd=tmp_path)
    assert done.returncode == 0 and "computing" in done.stdout
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert {event["pid"] for event in spans} == {0, 1}
    assert {"forward", "backward", "reduce", "wait", "update"} <= {e["name"] for e in spans}


def test_a_record_has_the_trace_and_a_report_with_every_loss(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(scripts.PLAIN)
    words = ["run", "-n", "2", "--record", "new/run", "--report", "report.json", "train.py"]
    done = shoal(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "new/run/report.json").read_text())
    assert report == json.loads((tmp_path / "report.json").read_text())
    assert (report["script"], report["servers"]) == (["train.py"], 0)
    for rank in report["ranks"]:
        shown = [float(f"{loss:.6g}") for loss in rank["losses"]]
        assert shown == [loss for _, loss in losses(done.stdout)]
        assert rank["loss_steps"] == list(range(1, 13))
        assert rank["loss_s"] == sorted(rank["loss_s"])
    events = json.loads((tmp_path / "new/run/trace.json").read_text())["traceEvents"]
    steps = [event for event in events if event["name"] == "step" and event["pid"] == 0]
    ends = [(event["ts"] + event["dur"]) / 1e6 for event in steps]
    assert ends == pytest.approx(report["ranks"][0]["loss_s"], abs=0.2)  # on one clock
    refused = shoal("run", "--record", "train.py", "train.py", cwd=tmp_path)
    assert refused.returncode == 2
    assert refused.stderr == "shoal: cannot record in train.py: File exists\n"


def test_a_report_tells_what_happened_on_every_rank(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(scripts.PLAIN)
    words = ["run", "-n", "2", "--slow", "1:2x", "--report", "report.json", "train.py"]
    done = shoal(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["strategy"], report["workers"], report["steps"]) == ("ddp", 2, 12)
    assert report["lost"] == []
    assert [(rank["rank"], rank["steps"]) for rank in report["ranks"]] == [(0, 12), (1, 12)]
    assert sum(rank["samples"] for rank in report["ranks"]) == 2 * 103


COUNTED = """    mean = job.evaluate(lambda outputs, targets: targets.double().mean(), data)
    is_right = abs(mean - float(data.tensors[1].double().mean())) < 1e-9
    print("all are counted", is_right, flush=True)

if __name__ == "__main__":"""


@pytest.mark.parametrize("kill", [False, True])
def test_hogwild_goes_on_without_a_killed_worker_and_leaves_no_shared_memory(
    tmp_path: Path, kill: bool
) -> None:
    script = scripts.PLAIN.replace("epochs=2", "epochs=6")
    (tmp_path / "train.py").write_text(script.replace('if __name__ == "__main__":', COUNTED))
    words = ["run", "-n", "3", "-s", "hogwild", "--report", "report.json"]
    done = shoal(*words, *(["--kill", "1@9"] if kill else []), "train.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    ranks = [0, 2] if kill else [0, 1, 2]
    counted = sorted(line for line in done.stdout.splitlines() if "counted" in line)
    assert counted == [f"[{rank}] all are counted True" for rank in ranks]
    assert "hogwild sets momentum=0.9 to 0" in done.stderr
    if kill:
        told = [line for line in done.stderr.splitlines() if "worker 1" in line]
        assert told[0].startswith("shoal: worker 1 was killed by SIGKILL after ")
        assert told[0].endswith("the others go on, as hogwild allows")
        assert told[-1] == "shoal: finished by workers 0 and 2, without worker 1"
    report = json.loads((tmp_path / "report.json").read_text())
    assert [loss["rank"] for loss in report["lost"]] == [1] * kill
    assert [rank and rank["rank"] for rank in report["ranks"]] == [0, None if kill else 1, 2]
