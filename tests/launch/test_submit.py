"""Jobs of Slurm and Kubernetes as text: every word arrives as it was given."""

from __future__ import annotations

import doctest
import json
import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.cli import main
from shoal.errors import BadInput
from shoal.launch.managers import submit_spec as spec_module
from shoal.launch.managers.kubernetes import KubernetesOptions, escaped, manifest
from shoal.launch.managers.slurm_script import SlurmOptions, slurm_script
from shoal.launch.managers.submit_spec import SubmitSpec, name_of, read_variables
from shoal.runtime.secret import new_secret

TEXTS = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=30)
HOSTILE = ("a b", "it's", '"$(touch x)"', "`id`", "two\nlines", "-rf", "$HOME", "\\", "é;&|*?[", "")


IMAGE = ["--k8s", "--image", "a"]
SHORT = ["--slurm", "--time", "10"]


def write_key(file: Path) -> None:
    file.touch(0o600)
    file.write_text(new_secret().hex())


def spec_of(*command: str, **options: Any) -> SubmitSpec:
    given: dict[str, Any] = {"workers": 4, "name": "train", **options}
    return SubmitSpec(command=command or ("python", "train.py"), **given)


def directives(text: str) -> list[str]:
    return [line.removeprefix("#SBATCH ") for line in text.splitlines() if "#SBATCH" in line]


def run_script(text: str, folder: Path, srun: str, scontrol: str = "") -> int:
    """Run a batch script with these programs in place of srun and scontrol."""
    programs = folder / "bin"
    programs.mkdir(exist_ok=True)
    for name, body in (("srun", srun), ("scontrol", scontrol or 'echo "$@" > requeued')):
        (programs / name).write_text(f"#!/bin/bash\n{body}\n")
        (programs / name).chmod(0o755)
    environ = {"PATH": f"{programs}:{os.environ['PATH']}", "SLURM_JOB_ID": "17"}
    return subprocess.run(["bash", "-c", text], cwd=folder, env=environ, timeout=60).returncode


# -------------------------------------------------------------------------- Slurm


def test_a_script_asks_for_what_the_options_say() -> None:
    spec = spec_of(
        workers=32, nodes=4, gpus_per_node=8, cpus=6, memory="64G", time="1-12:00:00", requeue=True
    )
    text = slurm_script(spec, SlurmOptions("gpu", "lab", "%j.out", lines=("--constraint=a100",)))
    assert directives(text) == [
        "--job-name=train",
        "--nodes=4",
        "--ntasks=32",
        "--ntasks-per-node=8",
        "--cpus-per-task=6",
        "--gpus-per-node=8",
        "--mem=64G",
        "--time=1-12:00:00",
        "--partition=gpu",
        "--account=lab",
        "--output=%j.out",
        "--requeue",
        "--open-mode=append",
        "--signal=B:USR1@60",
        "--constraint=a100",
    ]
    assert "srun --kill-on-bad-exit=1 --cpus-per-task=6 python train.py &" in text
    assert "--ntasks-per-node" not in slurm_script(spec_of(nodes=3), SlurmOptions())


@given(st.lists(TEXTS, min_size=1), st.dictionaries(st.from_regex(r"\A[A-Z]{3}\Z"), TEXTS))
def test_words_of_the_command_line_survive_the_shell(
    words: list[str], environ: dict[str, str]
) -> None:
    text = slurm_script(spec_of(*words, environ=environ), SlurmOptions())
    found = re.search(r"^srun --kill-on-bad-exit=1 (.*) &\nstep=", text, re.DOTALL | re.MULTILINE)
    assert found and shlex.split(found[1]) == words
    assert len(directives(text)) <= 5 + sum("#SBATCH" in t for t in [*words, *environ.values()])


def test_hostile_words_arrive_as_they_are(tmp_path: Path) -> None:
    environ = {f"V{i}": word for i, word in enumerate(HOSTILE)}
    image = "--container-image=me/train:1 $(id)"
    spec = spec_of("python", *HOSTILE, environ=environ)
    text = slurm_script(spec, SlurmOptions(srun=(image,)))
    assert subprocess.run(["bash", "-n"], input=text.encode()).returncode == 0
    names = " ".join(f'"$V{i}"' for i in range(len(HOSTILE)))
    status = run_script(text, tmp_path, f'printf "%s\\0" "$2" "${{@:4}}" {names} > words')
    assert status == 0
    assert (tmp_path / "words").read_text() == "".join(
        f"{word}\0" for word in (image, *HOSTILE * 2)
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bin", "words"]


@pytest.mark.parametrize(
    ("srun", "status", "is_requeued"),
    [
        ("exit 0", 0, False),
        ("exit 143", 143, False),  # scancel
        ("exit 2", 2, False),
        ("trap 'exit 143' USR1; kill -USR1 $PPID; while :; do sleep 0.02; done", 0, True),
        ("trap '' USR1; kill -USR1 $PPID; sleep 0.1; exit 0", 0, False),  # it has finished
        ("trap 'exit 143' TERM; kill -TERM $PPID; while :; do sleep 0.02; done", 143, False),
    ],
)
def test_a_job_is_requeued_when_it_has_stopped_after_the_signal(
    tmp_path: Path, srun: str, status: int, is_requeued: bool
) -> None:
    text = slurm_script(spec_of(requeue=True), SlurmOptions())
    assert run_script(text, tmp_path, srun) == status
    assert (tmp_path / "requeued").exists() == is_requeued
    if is_requeued:
        assert (tmp_path / "requeued").read_text() == "requeue 17\n"


@pytest.mark.parametrize(("status", "is_requeued"), [(1, True), (137, True), (2, False)])
def test_a_crash_is_followed_by_a_start_if_asked_for(
    tmp_path: Path, status: int, is_requeued: bool
) -> None:
    text = slurm_script(spec_of(restarts=1), SlurmOptions())
    run_script(text, tmp_path, f"exit {status}")
    assert (tmp_path / "requeued").exists() == is_requeued
    assert run_script(f"SLURM_RESTART_COUNT=1\n{text}", tmp_path, "exit 1") == 1


@pytest.mark.parametrize(
    "options",
    [
        SlurmOptions(partition="a b"),
        SlurmOptions(account="x\n#SBATCH --uid=0"),
        SlurmOptions(lines=("--a\nrm -rf /",)),
        SlurmOptions(lines=("rm",)),
        SlurmOptions(srun=("rm",)),
        SlurmOptions(output="/no/such/folder/%j.out"),
    ],
)
def test_lines_of_sbatch_take_no_more_than_one_word(options: SlurmOptions) -> None:
    with pytest.raises(BadInput):
        slurm_script(spec_of(), options)


def test_tasks_of_an_array_do_not_share_a_checkpoint() -> None:
    array = SlurmOptions(lines=("--array=0-3",))
    assert "--array=0-3" in slurm_script(spec_of(), array)
    with pytest.raises(BadInput, match="all tasks of an array"):
        slurm_script(spec_of(requeue=True), array)


# -------------------------------------------------------------------------- Kubernetes


def pod_of(document: dict[str, Any]) -> dict[str, Any]:
    job = document["spec"]["replicatedJobs"][0]["template"]["spec"]
    pod: dict[str, Any] = job["template"]["spec"]
    return pod


def environ_of(pod: dict[str, Any]) -> dict[str, Any]:
    return {v["name"]: v.get("value") for v in pod["containers"][0]["env"]}


def test_a_pod_of_one_worker_has_the_four_variables() -> None:
    spec = spec_of(nodes=4, cpus=2, memory="1G", gpus_per_node=1, time="90", requeue=True)
    options = KubernetesOptions("shoal:1", "lab", "key", ("data:/data",))
    document = json.loads(manifest(spec, options))
    job = document["spec"]["replicatedJobs"][0]["template"]["spec"]
    pod = pod_of(document)
    environ = environ_of(pod)
    assert (document["kind"], document["metadata"]["namespace"]) == ("JobSet", "lab")
    assert (job["parallelism"], job["completionMode"]) == (4, "Indexed")
    assert job["activeDeadlineSeconds"] == 5400
    assert environ["WORLD_SIZE"] == "4"
    assert environ["MASTER_ADDR"] == "train-workers-0-0.train"
    assert "RANK" in environ and "LOCAL_RANK" not in environ
    assert environ["SHOAL_SECRET_FILE"] == "/etc/shoal/secret"
    assert pod["volumes"][1]["secret"] == {"secretName": "key", "defaultMode": 0o400}
    mount = pod["containers"][0]["volumeMounts"][0]
    assert mount == {"name": "claim-0", "mountPath": "/data"}
    assert pod["containers"][0]["command"] == ["python", "train.py"]
    limits = {"cpu": "2", "memory": "1024Mi", "nvidia.com/gpu": "1"}
    assert pod["containers"][0]["resources"]["limits"] == limits
    assert job["podFailurePolicy"]["rules"][0]["onExitCodes"]["values"] == [143]
    # nothing else: the API server refuses a field that it does not know
    assert {*document, *document["spec"]} == {
        *("apiVersion", "kind", "metadata", "spec"),
        *("network", "failurePolicy", "replicatedJobs"),
    }
    assert set(job) == {
        *("parallelism", "completions", "completionMode", "backoffLimit"),
        *("template", "activeDeadlineSeconds", "podFailurePolicy"),
    }
    assert {*pod, *pod["containers"][0]} == {
        *("restartPolicy", "terminationGracePeriodSeconds", "containers", "volumes"),
        *("name", "image", "command", "env", "resources", "volumeMounts"),
    }


def test_a_pod_of_several_workers_runs_torchrun() -> None:
    document = json.loads(manifest(spec_of(nodes=2), KubernetesOptions("shoal:1")))
    container = pod_of(document)["containers"][0]
    assert container["command"] == [
        *("python", "-m", "torch.distributed.run"),
        *("--node-rank=$(NODE_RANK)", "--nnodes=2"),
        *("--master-addr=train-workers-0-0.train", "--master-port=29500"),
        *("--nproc-per-node=2", "train.py"),
    ]
    with pytest.raises(BadInput, match="do not divide"):
        manifest(spec_of(nodes=3), KubernetesOptions("shoal:1"))


def expand(text: str, environ: dict[str, str]) -> str:
    """As Kubernetes does (third_party/forked/golang/expansion)."""

    def replaced(found: re.Match[str]) -> str:
        return "$" if found[0] == "$$" else environ.get(found[1], found[0])

    return re.sub(r"\$\$|\$\(([^)]*)\)", replaced, text)


@given(st.lists(TEXTS | st.sampled_from(["$(HOME)", "$$(HOME)", "$", "$$$(HOME)"])))
def test_words_survive_kubernetes(words: list[str]) -> None:
    text = manifest(spec_of("python", *words, nodes=4), KubernetesOptions("shoal:1"))
    command = pod_of(json.loads(text))["containers"][0]["command"]
    assert [expand(word, {"HOME": "/root"}) for word in command] == ["python", *words]
    assert escaped("$(HOME)") == "$$(HOME)"


def test_variables_that_the_job_sets_are_refused() -> None:
    with pytest.raises(BadInput, match="--env RANK: the job gives each pod its own"):
        manifest(spec_of(environ={"RANK": "0"}), KubernetesOptions("shoal:1"))


@pytest.mark.parametrize("claim", ["data", "data:/a:b", ":/a", "data:a"])
def test_a_claim_is_a_name_and_a_path(claim: str) -> None:
    with pytest.raises(BadInput, match="--claim takes NAME:/PATH"):
        KubernetesOptions("shoal:1", claims=(claim,))


# -------------------------------------------------------------------------- options


@pytest.mark.parametrize(
    "options",
    [
        {"nodes": 5},
        {"memory": "much"},
        {"time": "soon"},
        {"time": "0"},
        {"name": "A b"},
    ],
)
def test_what_makes_no_sense_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(BadInput):
        spec_of(**options)


def test_a_secret_does_not_go_into_the_text() -> None:
    assert read_variables(["A=1", "B=x=y", "A=2"]) == {"A": "2", "B": "x=y"}
    for text in ("SHOAL_SECRET=00", "A", "1=2", "=3"):
        with pytest.raises(BadInput):
            read_variables([text])


@pytest.mark.parametrize("kind", [["--slurm"], ["--k8s", "--image", "a", "--secret", "key"]])
def test_the_key_of_who_submits_is_in_no_job(
    kind: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    secret = new_secret().hex()
    (tmp_path / "shoal").mkdir()
    (tmp_path / "shoal" / "key").write_text(secret)
    (tmp_path / "shoal" / "key").chmod(0o600)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("SHOAL_SECRET", secret)
    args = [*kind, "-n", "4", "--nodes", "2", "--dry-run"]
    assert not submitted(tmp_path, *args, monkeypatch=monkeypatch)
    said = capsys.readouterr()
    assert "train.py" in said.out
    assert secret not in said.out + said.err


@given(TEXTS)
def test_every_script_has_a_name_for_its_job(script: str) -> None:
    spec_of(name=name_of(script))


def test_the_examples_of_the_notation_are_right() -> None:
    assert doctest.testmod(spec_module).failed == 0


def submitted(folder: Path, *args: str, monkeypatch: pytest.MonkeyPatch) -> int | str | None:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PATH", str(folder / "bin"))
    (folder / "train.py").touch()
    (folder / "train.py").chmod(0o644)
    with pytest.raises(SystemExit) as end:
        main(["submit", "train.py", *args])
    return end.value.code


def test_without_sbatch_the_script_is_written_and_one_sentence_says_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert submitted(tmp_path, "--slurm", "-n", "2", monkeypatch=monkeypatch) == 2
    sentence = "there is no sbatch here; the job is in train.sbatch: submit it with sbatch"
    assert sentence in capsys.readouterr().err
    assert "SHOAL_STRATEGY=ddp" in (tmp_path / "train.sbatch").read_text()
    (tmp_path / "train.sbatch").write_text("my own")
    assert submitted(tmp_path, "--slurm", monkeypatch=monkeypatch) == 2
    assert (tmp_path / "train.sbatch").read_text() == "my own"


def test_a_dry_run_prints_the_job_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    args = ["--k8s", "--image", "shoal:1", "-n", "2", "--checkpoint", "/data/run:every=5"]
    args += ["--dry-run", "--", "--lr", "0.1"]
    assert not submitted(tmp_path, *args, monkeypatch=monkeypatch)
    pod = pod_of(json.loads(capsys.readouterr().out))
    assert environ_of(pod)["SHOAL_CHECKPOINT"] == "/data/run"
    assert environ_of(pod)["SHOAL_CHECKPOINT_EVERY"] == "5"
    assert pod["containers"][0]["command"][-2:] == ["--lr", "0.1"]
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


def make_sbatch(folder: Path, line: str) -> None:
    """An sbatch that does what this line of shell says."""
    program = folder / "bin" / "sbatch"
    program.parent.mkdir(exist_ok=True)
    program.write_text(f"#!/bin/bash\n{line}\n")
    program.chmod(0o755)


def test_what_sbatch_answers_is_in_the_document(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_sbatch(tmp_path, "exit 3")
    assert submitted(tmp_path, "--slurm", "-o", "job", monkeypatch=monkeypatch) == 1
    assert "sbatch has refused the job (exit status 3); it is in job" in capsys.readouterr().err
    make_sbatch(tmp_path, "echo Submitted batch job 17")
    assert not submitted(tmp_path, "--slurm", "--json", monkeypatch=monkeypatch)
    assert json.loads(capsys.readouterr().out) == {
        "file": "train.sbatch",
        "command": ["sbatch", "train.sbatch"],
        "answer": "Submitted batch job 17",
    }
    assert not submitted(tmp_path, "--slurm", monkeypatch=monkeypatch)
    assert capsys.readouterr().out == "Submitted batch job 17\n"
    assert not submitted(tmp_path, "--slurm", "--dry-run", "--json", monkeypatch=monkeypatch)
    text = json.loads(capsys.readouterr().out)["text"]
    assert text == (tmp_path / "train.sbatch").read_text()


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (["--slurm", "-n", "4"], ""),
        (["--slurm", "-n", "4", "--nodes", "2"], "workers on 2 nodes take a key"),
        (["--slurm", "-n", "4", "--nodes", "2", "--secret-file", "key"], ""),
        (["--slurm", "-n", "4", "--nodes", "2", "--gpus", "4"], "NCCL between 2 nodes takes --env"),
        (["--slurm", "-n", "4", "--nodes", "2", "--env", "SHOAL_TRUSTED_NETWORK=1"], ""),
        (["--k8s", "-n", "4", "--nodes", "2", "--image", "a"], "--secret NAME"),
        ([*IMAGE, "--checkpoint", "runs/a"], "runs/a is not in a volume (--claim NAME:/PATH)"),
        ([*IMAGE, "--checkpoint", "/run", "--claim", "a:/data"], "/run is not below /data: it is"),
        ([*IMAGE, "--checkpoint", "/data/../run", "--claim", "a:/data"], "is not below /data"),
        ([*IMAGE, "--checkpoint", "/data/run", "--claim", "a:/data"], ""),
        (["--slurm", "-n", "2", "-s", "ddp(elastic=True)"], "under srun a lost worker ends the"),
    ],
)
def test_what_would_end_a_job_or_its_checkpoint_is_said_before(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    args: list[str],
    sentence: str,
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    write_key(tmp_path / "key")
    assert not submitted(tmp_path, "--dry-run", *args, monkeypatch=monkeypatch)
    error = capsys.readouterr().err
    assert sentence in error and error.count("\n") == bool(sentence)


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
        (
            ["--slurm", "-n", "4", "--nodes", "2", "-s", "hogwild"],
            "goes through the memory of one host",
        ),
        (
            [*IMAGE, "-n", "4", "--nodes", "2", "-s", "hogwild"],
            "goes through the memory of one host",
        ),
        (["--slurm", "--secret-file", "none"], "none, which holds the secret of the run: No such"),
        (["--slurm", "--secret-file", "train.py"], "other users can read it: chmod 600 train.py"),
        ([*SHORT, "--notice", "600", "--checkpoint", "a"], "--notice 600 s before the end of"),
    ],
)
def test_a_mistake_is_one_sentence(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    args: list[str],
    sentence: str,
) -> None:
    assert submitted(tmp_path, *args, monkeypatch=monkeypatch) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and sentence in error
