from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from shoal.errors import BadInput
from shoal.runtime.config import RunConfig
from shoal.runtime.run_dir import RunDir
from shoal.worker import environment
from shoal.worker.environment import Placement, first_host, refuse_ranks, tasks_on_node

TORCHRUN = {
    "RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500", "TORCHELASTIC_USE_AGENT_STORE": "True",
}  # fmt: skip
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "PMIX_NAMESPACE": "1633353729", "PMIX_SERVER_URI41": "1633353728.0;tcp4://127.0.0.1:53675",
    "OMPI_MCA_orte_precondition_transports": "7e334dbd2e17eea4-6118fef576d20e75",
}  # fmt: skip
TWO_HOSTS = {**OPENMPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
SLURM = {
    "SLURM_PROCID": "9", "SLURM_NTASKS": "11", "SLURM_STEP_NUM_TASKS": "11", "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2", "SLURM_STEP_TASKS_PER_NODE": "4(x2),3", "SLURM_JOB_ID": "901593",
    "SLURM_STEP_NODELIST": "node[01-03,07],gpu5", "SLURM_STEP_ID": "0",
}  # fmt: skip
SHOAL = {
    "SHOAL_RANK": "0", "SHOAL_SIZE": "2", "SHOAL_LOCAL_RANK": "0", "SHOAL_LOCAL_SIZE": "2",
    "SHOAL_RENDEZVOUS": "file:///tmp/run/store",
}  # fmt: skip


def detect(environ: dict[str, str]) -> Placement | None:
    return environment.detect(RunConfig.from_environment(environ))


def detect_with(environ: dict[str, str], **change: str | None) -> Placement | None:
    """A variable that becomes None is not set."""
    changed = {**environ, **change}
    return detect({name: text for name, text in changed.items() if text is not None})


def test_the_launcher_is_known_by_its_variables() -> None:
    assert detect({}) is None
    assert detect({"RANK": "0", "HOME": "/root"}) is None  # RANK alone says nothing
    place = {"rank": 1, "size": 4, "local_rank": 1, "local_size": 4}
    config = RunConfig(**place, rendezvous="file:///tmp/run/store")
    written = Placement("shoal", 1, 4, 1, 4, "file:///tmp/run/store")
    assert detect(config.to_environment()) == written
    assert detect(TORCHRUN) == Placement("torchrun", 3, 8, 1, 2, "env://")
    for address, there in (("node1", "tcp://node1:4000"), ("fd00::2", "tcp://[fd00::2]:4000")):
        found = detect_with(TWO_HOSTS, MASTER_ADDR=address, MASTER_PORT="4000")
        assert found == Placement("openmpi", 1, 4, 1, 2, there)


FOUR = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_PORT": "29500"}


@pytest.mark.parametrize("address", ["localhost", "127.0.0.1", "127.0.1.1", "::1"])
def test_four_variables_are_enough_on_one_host(address: str) -> None:
    there = f"tcp://[{address}]:29500" if ":" in address else f"tcp://{address}:29500"
    for local in ({}, {"LOCAL_RANK": "", "LOCAL_WORLD_SIZE": ""}, {"LOCAL_RANK": "1"}):
        found = detect_with(FOUR, MASTER_ADDR=address, **local)
        assert found == Placement("torchrun", 1, 4, 1, 4, there)


@pytest.mark.parametrize("address", ["node1", "10.0.0.1"])
def test_four_variables_do_not_say_which_ranks_share_a_host(address: str) -> None:
    found = detect_with(FOUR, MASTER_ADDR=address)
    there = f"tcp://{address}:29500"
    assert found == Placement("torchrun", 1, 4, 0, 1, there, knows_hosts=False)


@pytest.mark.parametrize(
    "change",
    [
        {"SLURM_STEP_ID": None},  # the script of sbatch: SLURM_PROCID=0 and no step
        {"SLURM_STEP_ID": "4294967291", "SLURM_PROCID": "0"},  # the same, as a batch step
        {"SLURM_STEP_ID": "4294967290", "SLURM_PROCID": "0"},  # the shell of salloc
        {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},  # srun --pty bash
        {"SLURM_PROCID": None},  # ssh into a node of the job
    ],
)
def test_slurm_without_srun_runs_alone(change: dict[str, str | None]) -> None:
    assert detect_with(SLURM, **change) is None


@pytest.mark.parametrize("address", ["localhost", "127.0.0.1", "::1", "10.0.0.1", "node1"])
def test_torchrun_may_be_started_twice_on_one_host(address: str) -> None:
    for environ in (TORCHRUN, {**TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": ""}):
        config = RunConfig.from_environment({**environ, "MASTER_ADDR": address})
        placement = environment.detect(config)
        assert placement is not None and placement.local_size < placement.size
        is_here = address not in ("10.0.0.1", "node1")
        assert environment.is_one_host(placement, config) == is_here
        is_asked = placement.has_several_agents or not placement.knows_hosts
        assert is_asked or placement.has_gpu_each is False
        lent = replace(config, host_dir=RunDir(Path("/tmp/run")))  # hosts of an engine
        assert not environment.is_one_host(placement, lent)


def test_openmpi_on_one_host_meets_at_a_file_that_is_the_jobs_own() -> None:
    def file(**change: str) -> str:
        placement = detect({**OPENMPI, **change})
        assert placement is not None and placement.launcher == "openmpi"
        return placement.rendezvous

    assert file().startswith("file:///") and "/mpi-" in file()
    assert file() == file(OMPI_COMM_WORLD_RANK="2", OMPI_COMM_WORLD_LOCAL_RANK="2")
    assert file() != file(PMIX_NAMESPACE="1633353730")
    assert file() != file(PMIX_SERVER_URI41="1633353728.0;tcp4://127.0.0.1:53676")
    assert file() != file(OMPI_MCA_orte_precondition_transports="0-0")


def test_openmpi_5_namespace_is_enough() -> None:
    five = {k: v for k, v in OPENMPI.items() if k.startswith("OMPI_COMM")}
    assert detect({**five, "PMIX_NAMESPACE": "prterun-vm-3493@1"}) is not None
    with pytest.raises(BadInput, match="PMIX_NAMESPACE"):
        detect(five)


def test_slurm() -> None:
    placement = detect(SLURM)
    assert placement is not None
    assert placement == Placement("slurm", 9, 11, 1, 3, placement.rendezvous)
    assert placement.has_gpu_each is None
    own = detect({**SLURM, "SLURM_GPUS_PER_TASK": "1"})
    assert own is not None and own.has_gpu_each
    host, port = placement.rendezvous.removeprefix("tcp://").split(":")
    assert host == "node01" and 20000 <= int(port) <= 59999


def test_slurm_ranks_agree_and_steps_do_not() -> None:
    def where(**change: str) -> str:
        placement = detect({**SLURM, **change})
        assert placement is not None
        return placement.rendezvous

    assert where() == where(SLURM_PROCID="0", SLURM_LOCALID="0", SLURM_NODEID="0")
    assert where() != where(SLURM_STEP_ID="1") != where(SLURM_JOB_ID="901594")
    assert where(MASTER_PORT="4000") == "tcp://node01:4000"
    assert where(MASTER_ADDR="10.0.0.9", MASTER_PORT="4000") == "tcp://10.0.0.9:4000"


def test_who_was_started_last_wins() -> None:
    environ: dict[str, str] = {}
    starts = {"slurm": SLURM, "openmpi": OPENMPI, "torchrun": TORCHRUN, "shoal": SHOAL}
    for launcher, variables in starts.items():
        environ |= variables
        placement = detect(environ)
        assert placement is not None and placement.launcher == launcher


@pytest.mark.parametrize(
    ("environ", "change", "named"),
    [
        (TORCHRUN, {"RANK": "abc"}, "RANK is 'abc'"),
        (TORCHRUN, {"RANK": "-1"}, "RANK is '-1'"),
        (TORCHRUN, {"RANK": "8"}, "RANK is 8, .* WORLD_SIZE=8"),
        (TORCHRUN, {"RANK": ""}, "RANK is not set"),
        (TORCHRUN, {"RANK": "²"}, "RANK is '²'"),
        (TORCHRUN, {"WORLD_SIZE": "0"}, "WORLD_SIZE is '0'"),
        (TORCHRUN, {"LOCAL_RANK": "2"}, "LOCAL_RANK is 2, .* LOCAL_WORLD_SIZE=2"),
        (TORCHRUN, {"LOCAL_WORLD_SIZE": "9"}, "LOCAL_WORLD_SIZE is 9"),
        (TORCHRUN, {"LOCAL_WORLD_SIZE": None}, "LOCAL_WORLD_SIZE is not set"),
        (TORCHRUN, {"MASTER_ADDR": None}, "MASTER_ADDR is not set"),
        (TORCHRUN, {"MASTER_PORT": "70000"}, "MASTER_PORT is 70000"),
        (OPENMPI, {"OMPI_COMM_WORLD_SIZE": "four"}, "OMPI_COMM_WORLD_SIZE is 'four'"),
        (OPENMPI, {"MASTER_ADDR": "node1"}, "MASTER_PORT is not set"),
        (TWO_HOSTS, {}, r"mpirun -x MASTER_ADDR=.* -x MASTER_PORT="),
        (SHOAL, {"SHOAL_RANK": "2"}, "SHOAL_RANK is 2"),
        (SHOAL, {"SHOAL_RANK": "one"}, "SHOAL_RANK is 'one'"),
        (SHOAL, {"SHOAL_SIZE": None}, "SHOAL_SIZE is not set"),
        (SHOAL, {"SHOAL_RENDEZVOUS": "/tmp/x"}, "SHOAL_RENDEZVOUS is '/tmp/x'"),
        (SLURM, {"SLURM_STEP_TASKS_PER_NODE": "4x2"}, "SLURM_STEP_TASKS_PER_NODE is '4x2'"),
        (SLURM, {"SLURM_NODEID": "3"}, "SLURM_NODEID=3"),
        (SLURM, {"SLURM_STEP_NODELIST": "a b"}, "SLURM_STEP_NODELIST is 'a b'"),
        (SLURM, {"SLURM_LOCALID": "3"}, "SLURM_LOCALID is 3"),
    ],
)
def test_a_bad_variable_is_named(
    environ: dict[str, str], change: dict[str, str | None], named: str
) -> None:
    with pytest.raises(BadInput, match=named):
        detect_with(environ, **change)


def test_slurm_lists() -> None:
    assert [tasks_on_node("", "4(x2),3", node) for node in range(3)] == [4, 4, 3]
    hosts = ["node[01-03,07],gpu5", "gpu5,node[1-2]", "tux[3,5]-ib", "rack[2-3]n[07-09]", "a.b.c"]
    first = ["node01", "gpu5", "tux3-ib", "rack2n07", "a.b.c"]
    assert [first_host("", host) for host in hosts] == first


@pytest.mark.parametrize(("environ", "starter"), [(OPENMPI, "mpirun"), (TORCHRUN, "torchrun")])
def test_what_starts_workers_is_not_started_once_a_rank(
    environ: dict[str, str], starter: str
) -> None:
    with pytest.raises(BadInput, match=rf"{starter} has started \d processes of shoal run, and"):
        refuse_ranks(RunConfig.from_environment(environ), "shoal run")
    refuse_ranks(RunConfig.from_environment({"WORLD_SIZE": "1", "RANK": "0"}), "shoal run")
    with pytest.raises(BadInput, match="mpirun of MPICH has started 2 processes"):
        detect({"PMI_RANK": "0", "PMI_SIZE": "2"})
