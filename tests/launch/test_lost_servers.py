"""The loss of a server that has replicas: the run goes on, and another process takes its place."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from shoal.commands.launching import WorkersOptions
from shoal.errors import ShardLost
from shoal.launch.here.process_config import SERVER_RESTARTS, Replication, replication_of
from shoal.launch.here.processes import ProcessExit
from shoal.launch.losses.lost_servers import (
    ServerPolicy,
    follow,
    how_to_continue,
    summarize_server_losses,
)
from shoal.runtime.checkpoint_folders import version_of
from shoal.runtime.config import RunConfig, ServerCheckpointConfig
from shoal.server.chain import ChainConfig
from shoal.server.consistency import Rule
from shoal.server.coordinator import Alive, forget
from shoal.strategy.strategy import parse
from shoal.sync.ps.summary import summarize
from tests.launch.helpers import HOLD, Rope, Screen
from tests.launch.test_servers import READY, WAIT_FOR_SERVERS, run_with
from tests.server.coordinator.helpers import LocalCoordinator

THREE = Replication(3, restarts=1)
NO_COORDINATOR = {"SHOAL_COORDINATOR": "unix:/nowhere/coordinator.sock"}  # none is started


def exit_of(server: int, returncode: int = -9, noticed_ns: int = 0) -> ProcessExit:
    return ProcessExit(server, returncode, noticed_ns, "server")


def lose(policy: ServerPolicy, server: int, pid: int = 0) -> bool:
    """Whether the run goes on; then another process is started, where it is to be."""
    exit = exit_of(server, noticed_ns=time.monotonic_ns())
    assert policy.note(exit), "it is decided a moment later"
    if not policy.survives(exit):
        return False
    if policy.replaces(exit):
        policy.started(server, pid)
    return True


def test_a_server_that_was_started_again_does_not_keep_its_shard_alive() -> None:
    said: list[str] = []
    policy = ServerPolicy(6, THREE, said.append)
    assert lose(policy, 3)
    assert said[0].startswith("server 3 (shard 1, replica 0) was killed by SIGKILL after 0.0 s and")
    assert said[0].endswith("is started again (1 of 1); shard 1 goes on with replicas 1 and 2")
    assert lose(policy, 3)
    assert "SIGKILL 0.0 s after it was started again and is not started again; shard 1" in said[1]
    assert lose(policy, 4)
    assert said[2].endswith("; shard 1 goes on with replica 2 alone")
    assert not lose(policy, 5), "replica 1 runs, and has no state"
    assert [lost.is_started_again for lost in policy.lost] == [True, False, True]
    assert policy.sentence(5).startswith(
        "all 3 replicas of shard 1 are lost, and its weights with them; start again, or from what"
    )
    assert lose(policy, 0), "another shard"


def test_the_loss_of_a_shard_names_the_checkpoint_to_continue_with(tmp_path: Path) -> None:
    checkpoint = ServerCheckpointConfig(tmp_path)
    assert how_to_continue(checkpoint) == f"start again: {tmp_path} has no complete checkpoint"
    for number in (10, 20):
        folder = version_of(tmp_path, number, 7).path
        folder.mkdir()
        for name in ("shard-0-of-1.safetensors", "worker.safetensors"):
            (folder / name).touch()
    version_of(tmp_path, 30, 7).path.mkdir()  # it is not complete
    assert how_to_continue(checkpoint) == f"continue with --resume from {tmp_path} (step 20)"


def test_servers_that_are_lost_together_cost_one_sentence(rope: Rope) -> None:
    """Also where they are killed one after the other; none is started again."""
    script = READY + HOLD + "time.sleep(60)"
    worker = WAIT_FOR_SERVERS + (
        "import signal\n"
        "for index in (2, 0, 1):\n"
        "    os.kill(int(open(f'{run_dir}/server-{index}.pid').read()), signal.SIGKILL)\n"
        "time.sleep(60)"
    )
    screen = Screen()
    with pytest.raises(ShardLost, match=r"^all 3 replicas of shard 0 are lost, and its weights"):
        options = {"env": {**NO_COORDINATOR, "ROPE": str(rope.path)}, "screen": screen}
        run_with(3, script, worker, 1, replication=Replication(3), **options)
    assert "shard" not in screen.err


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


def test_the_counters_at_the_end_are_those_of_shards_where_servers_have_replicas() -> None:
    counts = {"updates": 60, "requests": 7, "received_bytes": 0, "sent_bytes": 0}
    for holder in ("server", "shard"):
        ends = summarize([counts, counts], Rule(2), holder=holder)
        assert [end.partition(",")[0] for end in ends] == [
            f"{holder} 0: 60 updates",
            f"{holder} 1: 60 updates",
        ]
    learned = counts | {"replicas": [counts | {"is_complete": False}]}
    ends = summarize([counts, learned], Rule(2), holder="shard")
    assert ends[0] == "shard 0: 60 updates, 7 requests, 0.0 MB in, 0.0 MB out"
    assert ends[1] == "shard 1: 60 updates, at least 14 requests, 0.0 MB in, 0.0 MB out"
    assert ends[2] == "at least: what a server had counted before it was lost is not included"


def test_staleness_of_ten_updates_and_more_is_one_number_at_the_end() -> None:
    counts = {"updates": 60, "requests": 7, "received_bytes": 0, "sent_bytes": 0, "workers": {}}
    for missed, said in (
        ({"0": 5, "9": 1}, "0: 5, 9: 1"),
        ({"0": 5, "10": 2, "63": 1}, "0: 5, 10 and more: 3"),
    ):
        (first, *_) = summarize([counts | {"missed_updates": missed}], Rule(2, staleness=64))
        assert first == f"updates between a pull and its push, and how often: {said}"


# ------------------------------------------------------------------------------- the new head


class Chain(ServerPolicy):
    """The members of shard 1, as the launcher reads them from a coordinator."""

    def __init__(self) -> None:
        self.said: list[str] = []
        super().__init__(6, THREE, self.said.append)
        self.coordinator = LocalCoordinator()
        self.config = ChainConfig(1, (0, 1, 2), (7, 7, 7))
        for server in range(6):
            self.started(server, 10**8 + server)  # no such process
        for server in (3, 4, 5):
            self.tells(server, 7, 10**8 + server)
        self.becomes(self.config)

    def put(self, key: str, value: object) -> None:
        known = self.coordinator.get(key)
        version = 0 if known is None else known.version
        self.coordinator.put_if(key, msgspec.msgpack.encode(value), version)

    def tells(self, server: int, incarnation: int, pid: int) -> None:
        self.put(f"alive/{server}", Alive(incarnation, pid=pid))

    def becomes(self, config: ChainConfig) -> None:
        self.config = config
        self.put("chain/1", config)

    def read(self) -> None:
        self.see(self.coordinator.list(""))


@pytest.fixture
def chain() -> Iterator[Chain]:
    made = Chain()
    made.read()
    made.look = made.read
    assert made.said == []
    yield made
    made.coordinator.close()


def test_a_replica_is_a_member_again_when_its_chain_has_taken_it_in(chain: Chain) -> None:
    chain.note(exit_of(3))
    assert forget(chain.coordinator, 3, 10**8 + 3)
    chain.becomes(chain.config.without({0}))
    chain.read()
    assert chain.said == ["server 4 (shard 1, replica 1) is the head of shard 1 now"]
    chain.started(3, 10**8 + 9)
    chain.tells(3, 8, 10**8 + 9)
    chain.read()
    assert chain.goes_on(1) == "shard 1 goes on with replicas 1 and 2; replica 0 is catching up"
    chain.note(exit_of(5))
    assert chain.goes_on(1) == "shard 1 goes on with replica 1 alone; replica 0 is catching up"
    chain.becomes(chain.config.plus(0, 8))
    chain.read()
    assert chain.said[1:] == [
        "server 3 (shard 1, replica 0) has caught up; shard 1 has replicas 0 and 1"
    ]
    chain.note(exit_of(4))
    assert not chain.are_lost(1)
    assert chain.removed == 0


def test_one_that_has_caught_up_just_now_keeps_its_shard_alive(chain: Chain) -> None:
    chain.note(exit_of(3))
    chain.started(3, 10**8 + 9)
    chain.tells(3, 8, 10**8 + 9)
    chain.note(exit_of(4))
    chain.becomes(chain.config.without({0, 1}).plus(0, 8))
    chain.note(exit_of(5))
    assert not chain.are_lost(1), "the coordinator is asked before the run ends"


def test_a_shard_that_has_not_begun_has_nothing_to_lose() -> None:
    coordinator = LocalCoordinator()
    members = ServerPolicy(3, THREE, print)
    members.see(coordinator.list(""))
    for server in range(3):
        members.note(exit_of(server))
    assert not members.are_lost(0)
    assert members.goes_on(0) == "shard 0 has not begun"
    coordinator.close()


def test_a_server_that_lives_and_does_not_answer_is_said_to_leave_and_to_come_back(
    chain: Chain,
) -> None:
    assert forget(chain.coordinator, 3, 10**8 + 3)  # its lease has ended
    chain.read()
    assert chain.said == []
    chain.becomes(chain.config.without({0}))
    chain.read()
    who = "server 3 (shard 1, replica 0)"
    assert chain.said == [
        f"{who} does not answer and was removed from its chain; shard 1 goes on with replicas 1 "
        "and 2",
        "server 4 (shard 1, replica 1) is the head of shard 1 now",
    ]
    chain.tells(3, 8, 10**8 + 3)
    chain.becomes(chain.config.plus(0, 8))
    chain.read()
    assert chain.said[2:] == [f"{who} has caught up; shard 1 has replicas 0, 1 and 2"]
    assert chain.removed == 1
    summary = summarize_server_losses([], chain.removed, [])
    assert summary == (
        "servers lost: 0, removed from their chain for a while: 1; 0.0 s without service"
    )


def test_the_launcher_follows_the_chains(chain: Chain) -> None:
    over = threading.Event()
    follower = threading.Thread(target=follow, args=(chain.coordinator, chain.see, over))
    seen = threading.Event()
    chain._say = lambda line: seen.set()
    follower.start()
    chain.becomes(chain.config.without({0}))
    assert seen.wait(60)
    over.set()
    chain.coordinator.close()
    follower.join()


def test_an_explicit_restart_0_starts_no_server_again() -> None:
    strategy = parse("ps(replicas=2)")
    assert replication_of(strategy, 2, None).restarts == SERVER_RESTARTS == 3
    assert replication_of(strategy, 2, 0).restarts == 0
    asked = WorkersOptions(2, "ps(replicas=2)", restart=0).to_config()
    assert asked.restarts == 0 and not asked.takes_back
    assert RunConfig.from_environment(asked.to_environment()).restarts == 0
    said: list[str] = []
    policy = ServerPolicy(2, Replication(2, restarts=0), said.append)
    assert lose(policy, 0)
    assert said[0].endswith("and is not started again; shard 0 goes on with replica 1 alone")
