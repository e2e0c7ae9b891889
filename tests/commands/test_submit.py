"""Jobs of Slurm and Kubernetes as text: every word arrives as it was given."""

from __future__ import annotations

import doctest
import json
import os
import re
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.commands import submit_request as request_module
from shoal.commands.cli import main
from shoal.commands.submit_kubernetes import manifest
from shoal.commands.submit_request import SubmitRequest, name_of, read_variables
from shoal.commands.submit_slurm import slurm_script
from shoal.errors import BadInput
from shoal.runtime.secret import new_secret

TEXTS = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=30)
HOSTILE = ("a b", "it's", '"$(touch x)"', "`id`", "two\nlines", "-rf", "$HOME", "\\", "é;&|*?[", "")
TWO_NODES = ["--slurm", "-n", "4", "--nodes", "2"]
IMAGE = ["--k8s", "--image", "a"]
IN_VOLUME = [*IMAGE, "--claim", "a:/data", "--checkpoint"]
SHORT = ["--slurm", "--time", "10"]


def pods(*words: str, **options: Any) -> SubmitRequest:
    """A script in an image: it need not be here."""
    script, *args = words or ("train.py",)
    given: dict[str, Any] = {"k8s": True, "image": "shoal:1", "job_name": "train", "workers": 4}
    return SubmitRequest(script, args, **{**given, **options})


class Batch(SubmitRequest):
    """A job of Slurm whose script need not be here."""

    @property
    def command(self) -> list[str]:
        return ["python", self.script, *(self.args or ())]


def slurm(*words: str, **options: Any) -> str:
    script, *args = words or ("train.py",)
    given: dict[str, Any] = {"slurm": True, "job_name": "train", "workers": 4}
    return slurm_script(Batch(script, args, **{**given, **options}))


def write_program(file: Path, body: str) -> None:
    file.parent.mkdir(exist_ok=True)
    file.write_text(f"#!/bin/bash\n{body}\n")
    file.chmod(0o755)


def run_script(text: str, folder: Path, srun: str) -> int:
    """Run a batch script with this program in place of srun; what is requeued is in a file."""
    write_program(folder / "bin" / "srun", srun)
    write_program(folder / "bin" / "scontrol", 'echo "$@" > requeued')
    environ = {"PATH": f"{folder}/bin:{os.environ['PATH']}", "SLURM_JOB_ID": "17"}
    return subprocess.run(["bash", "-c", text], cwd=folder, env=environ, timeout=60).returncode


# -------------------------------------------------------------------------- Slurm


def test_a_script_asks_for_what_the_options_say() -> None:
    asked = {"workers": 32, "nodes": 4, "gpus_per_node": 8, "cpus": 6, "memory": "64G"}
    of_slurm = {
        "partition": "gpu",
        "account": "lab",
        "log": "%j.out",
        "line": ["--constraint=a100"],
    }
    text = slurm(**asked, **of_slurm, time="1-12:00:00", requeue=True)
    assert re.findall("^#SBATCH --(.*)", text, re.MULTILINE) == [
        *("job-name=train", "nodes=4", "ntasks=32", "ntasks-per-node=8", "cpus-per-task=6"),
        *("gpus-per-node=8", "mem=64G", "time=1-12:00:00", "partition=gpu", "account=lab"),
        *("output=%j.out", "requeue", "open-mode=append", "signal=B:USR1@60", "constraint=a100"),
    ]
    assert "srun --kill-on-bad-exit=1 --cpus-per-task=6 python train.py &" in text
    assert "--ntasks-per-node" not in slurm(nodes=3)


def test_hostile_words_arrive_as_they_are(tmp_path: Path) -> None:
    variables = [f"V{i}={word}" for i, word in enumerate(HOSTILE)]
    image = "--container-image=me/train:1 $(id)"
    text = slurm(*HOSTILE, env=variables, srun=[image])
    names = " ".join(f'"$V{i}"' for i in range(len(HOSTILE)))
    srun = f'printf "%s\\0" "$2" "${{@:4}}" {names} > words'
    assert run_script(text, tmp_path, srun) == 0
    words = (image, *HOSTILE, *HOSTILE)
    assert (tmp_path / "words").read_text() == "".join(f"{word}\0" for word in words)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bin", "words"]


FOREVER = "while :; do sleep 0.02; done"


@pytest.mark.parametrize(
    ("srun", "status", "is_requeued"),
    [
        ("exit 0", 0, False),
        ("exit 143", 143, False),  # scancel
        ("exit 2", 2, False),
        (f"trap 'exit 143' USR1; kill -USR1 $PPID; {FOREVER}", 0, True),
        ("trap '' USR1; kill -USR1 $PPID; sleep 0.1; exit 0", 0, False),  # it has finished
        (f"trap 'exit 143' TERM; kill -TERM $PPID; {FOREVER}", 143, False),
    ],
)
def test_a_job_is_requeued_when_it_has_stopped_after_the_signal(
    tmp_path: Path, srun: str, status: int, is_requeued: bool
) -> None:
    assert run_script(slurm(requeue=True), tmp_path, srun) == status
    requeued = tmp_path / "requeued"
    assert requeued.exists() == is_requeued
    assert not is_requeued or requeued.read_text() == "requeue 17\n"


@pytest.mark.parametrize(("status", "is_requeued"), [(1, True), (137, True), (2, False)])
def test_a_crash_is_followed_by_a_start_if_asked_for(
    tmp_path: Path, status: int, is_requeued: bool
) -> None:
    run_script(slurm(max_restarts=1), tmp_path, f"exit {status}")
    assert (tmp_path / "requeued").exists() == is_requeued
    assert run_script(f"SLURM_RESTART_COUNT=1\n{slurm(max_restarts=1)}", tmp_path, "exit 1") == 1


# -------------------------------------------------------------------------- Kubernetes


def pod_of(text: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The pod of a manifest, and its variables."""
    pod = json.loads(text)["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    return pod, {v["name"]: v.get("value") for v in pod["containers"][0]["env"]}


def test_a_pod_of_one_worker_has_the_four_variables() -> None:
    asked = pods(nodes=4, cpus=2, memory="1G", gpus_per_node=1, time="90", requeue=True,
                 namespace="lab", secret="key", claim=["data:/data"])  # fmt: skip
    text = manifest(asked)
    document, (pod, environ) = json.loads(text), pod_of(text)
    job = document["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert (document["kind"], document["metadata"]["namespace"]) == ("JobSet", "lab")
    assert (job["parallelism"], job["completionMode"]) == (4, "Indexed")
    assert job["activeDeadlineSeconds"] == 5400
    assert job["podFailurePolicy"]["rules"][0]["onExitCodes"]["values"] == [143]
    assert (environ["WORLD_SIZE"], environ["MASTER_ADDR"]) == ("4", "train-workers-0-0.train")
    assert "RANK" in environ and "LOCAL_RANK" not in environ
    assert environ["SHOAL_SECRET_FILE"] == "/etc/shoal/secret"
    assert pod["volumes"][1]["secret"] == {"secretName": "key", "defaultMode": 0o400}
    (container,) = pod["containers"]
    assert container["volumeMounts"][0] == {"name": "claim-0", "mountPath": "/data"}
    assert container["command"] == ["python", "train.py"]
    limits = {"cpu": "2", "memory": "1024Mi", "nvidia.com/gpu": "1"}
    assert container["resources"]["limits"] == limits


def test_a_pod_of_several_workers_runs_torchrun() -> None:
    pod, _ = pod_of(manifest(pods(nodes=2)))
    assert pod["containers"][0]["command"] == [
        *("python", "-m", "torch.distributed.run"),
        *("--node-rank=$(NODE_RANK)", "--nnodes=2"),
        *("--master-addr=train-workers-0-0.train", "--master-port=29500"),
        *("--nproc-per-node=2", "train.py"),
    ]


@given(st.lists(TEXTS | st.sampled_from(["$(HOME)", "$$(HOME)", "$", "$$$(HOME)"])))
def test_words_survive_kubernetes(words: list[str]) -> None:
    """It expands as third_party/forked/golang/expansion does."""
    pod, _ = pod_of(manifest(pods("train.py", *words, nodes=4)))
    expanded = [
        re.sub(r"\$\$|\$\(HOME\)", lambda found: "$" if found[0] == "$$" else "/root", word)
        for word in pod["containers"][0]["command"]
    ]
    assert expanded == ["python", "train.py", *words]


# -------------------------------------------------------------------------- options


@pytest.mark.parametrize(
    "make",
    [
        *(lambda options=options: pods(**options) for options in (
            {"nodes": 5}, {"memory": "much"}, {"time": "soon"}, {"time": "0"}, {"job_name": "A b"},
        )),
        *(lambda options=options: slurm(**options) for options in (
            # what becomes a line of sbatch is one word
            {"partition": "a b"}, {"account": "x\n#SBATCH --uid=0"}, {"line": ["--a\nrm -rf /"]},
            {"line": ["rm"]}, {"srun": ["rm"]}, {"log": "/no/such/folder/%j.out"},
            # all tasks of an array would share a checkpoint
            {"line": ["--array=0-3"], "requeue": True},
        )),
        *(lambda claim=claim: pods(claim=[claim]) for claim in (
            "data", "data:/a:b", ":/a", "data:a",
        )),
        lambda: manifest(pods(nodes=3)),
        lambda: manifest(pods(env=["RANK=0"])),
        # a secret does not go into the text
        *(lambda text=text: read_variables([text]) for text in ("SHOAL_SECRET=00", "A", "1=2")),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused(make: Callable[[], object]) -> None:
    with pytest.raises(BadInput):
        make()


def test_what_makes_sense_is_not() -> None:
    assert "--array=0-3" in slurm(line=["--array=0-3"])
    assert read_variables(["A=1", "B=x=y", "A=2"]) == {"A": "2", "B": "x=y"}
    assert doctest.testmod(request_module).failed == 0


@given(TEXTS)
def test_every_script_has_a_name_for_its_job(script: str) -> None:
    pods(job_name=name_of(script))


# -------------------------------------------------------------------------- the command


class Submitted(NamedTuple):
    status: int
    out: str
    err: str


Submit = Callable[..., Submitted]


@pytest.fixture
def submit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Submit:
    """`shoal submit train.py` in a folder of its own, with the programs in its bin alone."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    (tmp_path / "train.py").touch(0o644)

    def submit(*words: str, args: Sequence[str] = ()) -> Submitted:
        with pytest.raises(SystemExit) as end:
            main(["submit", *words, "train.py", *args])
        return Submitted(int(end.value.code or 0), *capsys.readouterr())

    return submit


@pytest.mark.parametrize("kind", [["--slurm"], [*IMAGE, "--secret", "key"]])
def test_the_key_of_who_submits_is_in_no_job(
    kind: list[str], tmp_path: Path, submit: Submit, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = new_secret().hex()
    key = tmp_path / ".config" / "shoal" / "key"
    key.parent.mkdir(parents=True)
    key.write_text(secret)
    key.chmod(0o600)
    monkeypatch.setenv("SHOAL_SECRET", secret)
    status, out, err = submit(*kind, "-n", "4", "--nodes", "2", "--dry-run")
    assert not status and "train.py" in out
    assert secret not in out + err


def test_without_sbatch_the_script_is_written_and_one_sentence_says_where(
    tmp_path: Path, submit: Submit
) -> None:
    done = submit("--slurm", "-n", "2")
    sentence = "there is no sbatch here; the job is in train.sbatch: submit it with sbatch"
    assert done.status == 2 and sentence in done.err
    assert "SHOAL_STRATEGY=ddp" in (tmp_path / "train.sbatch").read_text()
    (tmp_path / "train.sbatch").write_text("my own")
    assert submit("--slurm").status == 2
    assert (tmp_path / "train.sbatch").read_text() == "my own"


def test_a_dry_run_prints_the_job_and_writes_nothing(tmp_path: Path, submit: Submit) -> None:
    words = ["-n", "2", "--checkpoint", "/data/run:every=5", "--dry-run"]
    done = submit(*IMAGE, *words, args=["--lr", "0.1"])
    pod, environ = pod_of(done.out)
    assert environ["SHOAL_CHECKPOINT"] == "/data/run" and environ["SHOAL_CHECKPOINT_EVERY"] == "5"
    assert pod["containers"][0]["command"][-2:] == ["--lr", "0.1"]
    assert done.status == 0 and [path.name for path in tmp_path.iterdir()] == ["train.py"]


def test_what_sbatch_answers_is_in_the_document(tmp_path: Path, submit: Submit) -> None:
    write_program(tmp_path / "bin" / "sbatch", "exit 3")
    done = submit("--slurm", "-o", "job")
    assert done.status == 1
    assert "sbatch has refused the job (exit status 3); it is in job" in done.err
    write_program(tmp_path / "bin" / "sbatch", "echo Submitted batch job 17")
    assert json.loads(submit("--slurm", "--json").out) == {
        "file": "train.sbatch",
        "command": ["sbatch", "train.sbatch"],
        "answer": "Submitted batch job 17",
    }
    assert submit("--slurm") == (0, "Submitted batch job 17\n", "")
    text = json.loads(submit("--slurm", "--dry-run", "--json").out)["text"]
    assert text == (tmp_path / "train.sbatch").read_text()


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (["--slurm", "-n", "4"], ""),
        (TWO_NODES, "workers on 2 nodes take a key"),
        ([*TWO_NODES, "--secret-file", "key"], ""),
        ([*TWO_NODES, "--gpus", "4"], "NCCL between 2 nodes takes --env"),
        ([*TWO_NODES, "--env", "SHOAL_TRUSTED_NETWORK=1"], ""),
        ([*IMAGE, "-n", "4", "--nodes", "2"], "--secret NAME"),
        ([*IMAGE, "--checkpoint", "runs/a"], "runs/a is not in a volume (--claim NAME:/PATH)"),
        ([*IN_VOLUME, "/run"], "/run is not below /data: it is"),
        ([*IN_VOLUME, "/data/../run"], "is not below /data"),
        ([*IN_VOLUME, "/data/run"], ""),
        (["--slurm", "-n", "2", "-s", "ddp(elastic=True)"], "under srun a lost worker ends the"),
    ],
)
def test_what_would_end_a_job_or_its_checkpoint_is_said_before(
    tmp_path: Path, submit: Submit, args: list[str], sentence: str
) -> None:
    (tmp_path / "key").touch(0o600)
    (tmp_path / "key").write_text(new_secret().hex())
    done = submit("--dry-run", *args)
    assert done.status == 0
    assert sentence in done.err and done.err.count("\n") == bool(sentence)


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        ([], "give --slurm or --k8s"),
        (["--slurm", "--k8s"], "give --slurm or --k8s"),
        (["--slurm", "--image", "x"], "--image means nothing to --slurm"),
        (["--k8s", "--partition", "x"], "--partition means nothing to --k8s"),
        (["--k8s"], "give --image"),
        (["--slurm", "--checkpoint", "x:every=0"], "--checkpoint takes DIR"),
        (["--slurm", "-n", "3", "-s", "tp(2)"], "3"),
        ([*TWO_NODES, "-s", "hogwild"], "goes through the memory of one host"),
        ([*IMAGE, *TWO_NODES[1:], "-s", "hogwild"], "goes through the memory of one host"),
        (["--slurm", "--secret-file", "none"], "none, which holds the secret of the run: No such"),
        (["--slurm", "--secret-file", "train.py"], "other users can read it: chmod 600 train.py"),
        ([*SHORT, "--notice", "600", "--checkpoint", "a"], "--notice 600 s before the end of"),
    ],
)
def test_a_mistake_is_one_sentence(submit: Submit, args: list[str], sentence: str) -> None:
    done = submit(*args)
    assert done.status == 2
    assert done.err.count("\n") == 1 and sentence in done.err
