"""A server process: `python -m shoal.server.main`.

It listens at a socket in the run directory, or at the address of `ServerConfig.listen`; a second
address (`ServerConfig.beyond`) serves other hosts. The port that it gets there is written to
server-<index>.address in the run directory.

It runs until it gets SIGTERM or SIGINT, or until its launcher or parent ends. Nothing but the
configuration is loaded before that is arranged: torch takes seconds. A signal that comes while it
loads ends it at once.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import socket
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.errors import BadInput
from shoal.runtime.config import RunConfig
from shoal.runtime.faults import read_slow
from shoal.runtime.memory_limit import keep_freed_memory
from shoal.runtime.parent_death import die_with_launcher, die_with_parent
from shoal.runtime.run_dir import RunDir
from shoal.runtime.trace import Recorder, server_name
from shoal.runtime.waits import Watcher

if TYPE_CHECKING:
    from shoal.server.chain.node import ChainConsistency
    from shoal.server.member.start import ChainSettings
    from shoal.server.process.server import Server

_STOP = {signal.SIGTERM, signal.SIGINT}


def main() -> int:
    try:
        config = RunConfig.from_environment()
        die_with_launcher(config.launcher_pid)
        die_with_parent(config.server.parent_pid)
        _load()
        is_asked = _catch_stop()
        server = _open_server(config)
    except BadInput as error:
        print(f"shoal: {error}", file=sys.stderr)
        return 2
    with server, Watcher(config.wait):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOP)
        os.read(is_asked, 1)
    if isinstance(server.host.tracer, Recorder) and config.trace_dir is not None:
        server.host.tracer.write(config.trace_dir)
    return 0


def _load() -> None:
    """For seconds, in which there is nothing to close: a signal ends the process at once."""
    for number in _STOP:
        signal.signal(number, signal.SIG_DFL)
    import torch  # noqa: F401

    import shoal.server.process.server  # noqa: F401


def _catch_stop() -> int:
    """From now on a signal to stop becomes readable here, whichever thread it comes to."""
    is_asked, wakeup = os.pipe()
    os.set_blocking(wakeup, False)
    signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
    for number in _STOP:
        signal.signal(number, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_BLOCK, _STOP)
    return is_asked


def _open_server(config: RunConfig) -> Server:
    import torch

    from shoal.comm.executors.hierarchical.topology import host_id
    from shoal.server.process.server import Server
    from shoal.server.process.shard_file import ShardSaver

    most_threads = config.num_threads or 1
    torch.set_num_threads(most_threads)
    keep_freed_memory()
    secret = config.read_secret()
    if secret is None:
        raise BadInput("a server needs the secret of its run: set SHOAL_SECRET")
    index = config.server.index or 0
    run_dir = config.run_dir or RunDir(Path())
    address = config.server.listen or run_dir.socket(index)
    beyond = config.server.beyond or ""
    has_exited = None if config.run_dir is None else config.run_dir.has_exited
    chain = chain_settings(config)
    server = Server(address, secret, has_exited, beyond, config.tls, chain)
    server.host.most_threads = most_threads
    server.host.takes_back = config.takes_back
    if config.server_checkpoint.folder is not None:
        server.host.saver = ShardSaver(config.server_checkpoint.folder, f"server {index}")
    if config.trace_dir is not None:
        host = host_id(config.host_id).decode()
        place = (index,) if chain is None else (chain.place.shard, chain.place.copy)
        server.host.tracer = Recorder(server_name(*place), 0, host)
    server.host.slowness.factor = read_slow(config.slow, None, "server").get(index, 1.0)
    if beyond:
        run_dir.note(run_dir.server_address(index), server.remote_address)
    return server


def chain_settings(config: RunConfig) -> ChainSettings | None:
    """The place of this server in the chain of its shard; None if it has no copies."""
    from shoal.comm.executors.hierarchical.topology import host_id
    from shoal.server.coordinator.client import lease_ttl_s, open_coordinator
    from shoal.server.member.place import ChainPlace
    from shoal.server.member.start import ChainSettings

    of_server = config.server
    if of_server.replicas == 1:
        return None
    consistency: ChainConsistency = "eventual" if of_server.consistency == "eventual" else "strong"
    place = ChainPlace(of_server.shard, of_server.replica, of_server.replicas, consistency)
    coordinator, leases = (open_coordinator(config, place.in_words()) for _ in range(2))
    return ChainSettings(
        place,
        coordinator,
        lease_ttl_s(config),
        leases,
        host_id(config.host_id).decode(),
        config.hostname or socket.gethostname(),
    )


if __name__ == "__main__":
    faulthandler.enable()  # a crash of native code prints its traceback
    code = 1
    try:
        code = main()
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # threads may still be inside torch, which an ordinary exit would unload
