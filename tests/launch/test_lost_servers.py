"""The loss of a server that has replicas: the run goes on, and another process takes its place."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import msgspec
import pytest

from shoal.coordinator.alive import Alive, forget
from shoal.coordinator.local import LocalCoordinator
from shoal.errors import BadInput, ServerFailed
from shoal.launch.chain_heads import ChainHeads
from shoal.launch.lost_servers import Replication, ServerPolicy, replication_of
from shoal.launch.processes import ProcessExit
from shoal.runtime.config import RunConfig
from shoal.runtime.faults import check_faults, faults_of
from shoal.runtime.run_dir import RunDir
from shoal.runtime.server_faults import ServerKill, read_server_kills, read_server_slow
from shoal.server.chain.config import ChainConfig
from shoal.strategy.strategy import parse
from tests.launch.test_servers import READY, WAIT_FOR_SERVERS, run_with

THREE = Replication(3, restarts=1)
NO_COORDINATOR = {"SHOAL_COORDINATOR": "unix:/nowhere/coordinator.sock"}  # none is started


def exit_of(server: int, returncode: int = -9) -> ProcessExit:
    return ProcessExit(server, returncode, 0, "server")


def test_a_shard_lives_while_one_of_its_replicas_runs() -> None:
    said: list[str] = []
    policy = ServerPolicy(6, THREE, said.append)
    for server in (3, 4, 3):
        assert policy.survives(exit_of(server))
        policy.replaces(exit_of(server))
    assert "server 3 (shard 1, replica 0) was killed by SIGKILL" in said[0]
    assert "shard 1 goes on with replicas 1 and 2; it is started again (1 of 1)" in said[0]
    assert "shard 1 goes on with replicas 1 and 2; it is not started again" in said[2]
    assert [lost.is_started_again for lost in policy.lost] == [True, True, False]
    assert policy.survives(exit_of(5))
    assert not policy.survives(exit_of(4)), "the last one"
    assert policy.reason(4) == ", the last replica of shard 1"
    assert policy.survives(exit_of(0)), "another shard"


def test_a_mistake_of_a_server_and_the_loss_of_one_without_replicas_end_the_run() -> None:
    assert not ServerPolicy(3, THREE, print).survives(exit_of(0, 2))
    assert not ServerPolicy(3, Replication(), print).survives(exit_of(0))
    assert ServerPolicy(3, Replication(), print).survives(exit_of(0, 0))
    text = 'ps(servers=2, replicas=3, consistency="eventual")'
    assert replication_of(parse(text), 2) == Replication(3, "eventual")
    assert not replication_of(parse("ddp"), 2).is_on


def test_a_lost_server_is_replaced_and_the_run_goes_on() -> None:
    script = (
        "print(os.environ['SHOAL_SERVER_REPLICAS'], flush=True)\n"
        "first = f'{run_dir}/first-{index}'\n"
        "if index == 1 and not os.path.exists(first):\n"
        "    open(first, 'w').close()\n"
        "    os.kill(os.getpid(), 9)\n"
    )
    worker = WAIT_FOR_SERVERS + "print('done')"
    options = {"env": NO_COORDINATOR, "replication": Replication(2)}
    screen = run_with(2, script + READY + "time.sleep(60)", worker, 1, **options)
    assert screen.out.splitlines().count("done") == 1
    assert screen.out.count("[server 1] 2") == 2
    assert "server 1 (shard 0, replica 1) was killed by SIGKILL" in screen.err


def test_the_loss_of_all_replicas_of_a_shard_names_it() -> None:
    script = READY + "os.kill(os.getpid(), 9) if index > 1 else time.sleep(60)"
    replication = Replication(2, restarts=0)
    with pytest.raises(ServerFailed, match="SIGKILL, the last replica of shard 1 while workers"):
        run_with(4, script, "time.sleep(60)", 1, env=NO_COORDINATOR, replication=replication)


# ------------------------------------------------------------------------------- injected


def test_a_worker_that_begins_the_step_kills_the_server_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed: list[int] = []
    monkeypatch.setattr(os, "kill", lambda pid, signal: killed.append(pid))
    run_dir = RunDir(tmp_path)
    run_dir.note_server_pid(1, 4711)
    config = RunConfig(run_dir=run_dir, kill=("server:1@3", "server:0@4"))
    steps = [0]
    for rank in (0, 1):
        faults = faults_of(config, rank, 2)
        assert faults is not None
        faults.at_start()
        compute = faults.around(lambda: None, lambda: steps[-1], lambda: 0.0)
        for step in range(1, 6):
            steps.append(step)
            compute()
            assert killed == ([4711] if rank or step >= 3 else [])


def test_texts_about_servers_are_checked() -> None:
    kills = read_server_kills(["2@5", "server:1@50", "server:1@90"], 2)
    assert kills == (ServerKill(1, 50), ServerKill(1, 90))
    assert read_server_slow(["1:4x", "server:0:2.5x"], 2) == {0: 2.5}
    for kill, servers, says in [
        ("server:2@5", 2, "the last of 2 servers is 1"),
        ("server:0@5", 0, "this strategy starts no servers"),
        ("server:x@5", 2, "a text such as server:1@50"),
    ]:
        with pytest.raises(BadInput, match=says):
            check_faults(RunConfig(kill=(kill,)), 2, servers)
    with pytest.raises(BadInput, match="twice"):
        read_server_kills(["server:1@5", "server:1@5"])
    with pytest.raises(BadInput, match="1 to 1000 times slower"):
        read_server_slow(["server:1:2000x"])


# ------------------------------------------------------------------------------- the new head


def put(coordinator: LocalCoordinator, key: str, value: object) -> None:
    known = coordinator.get(key)
    version = 0 if known is None else known.version
    coordinator.put_if(key, msgspec.msgpack.encode(value), version)


def test_the_launcher_says_which_replica_is_the_head_after_a_loss() -> None:
    said: list[str] = []
    heads = ChainHeads(THREE, said.append)
    coordinator = LocalCoordinator()
    for replica in range(3):
        put(coordinator, f"alive/{3 + replica}", Alive(7, pid=replica + 100))
    first = ChainConfig(1, (0, 1, 2), (7, 7, 7))
    put(coordinator, "chain/1", first)
    heads.say_head(coordinator, 5)
    assert said == [], "it was the head before"
    assert forget(coordinator, 3, 100)
    late = threading.Thread(target=heads.say_head, args=(coordinator, 3))
    late.start()
    put(coordinator, "chain/1", first.without({0}))
    late.join()
    assert said == ["server 4 (shard 1, replica 1) is the head of shard 1 now"]
    put(coordinator, "alive/3", Alive(8, pid=200))
    put(coordinator, "chain/1", first.without({0}).plus(0, 8))
    heads.say_head(coordinator, 3)
    assert len(said) == 1
    coordinator.close()
