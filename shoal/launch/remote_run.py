"""What the parts of a run on lent hosts have in common: engine, secret, output, names of hosts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from shoal.launch.agent_processes import OutputSink
from shoal.launch.local import LaunchSpec
from shoal.launch.log_files import LogFiles
from shoal.launch.machines import Machine, Machines
from shoal.launch.output import LineForwarder, Write
from shoal.launch.supervisor import Event
from shoal.runtime.config import RunConfig
from shoal.runtime.run_dir import RunDir


@dataclass(frozen=True)
class RemoteRun:
    """One attempt of a run."""

    machines: Machines
    spec: LaunchSpec
    run_dir: RunDir
    secret: bytes = field(repr=False)
    put: Callable[[Event], None]
    write: Write
    logs: LogFiles
    sink: OutputSink

    def say(self, line: str) -> None:
        """A line of the launcher."""
        forwarder = LineForwarder(self.write, "shoal: ", True, self.logs.of("launcher"))
        self.sink.call(lambda: forwarder.feed(f"{line}\n".encode()))

    def host_id(self, machine: Machine) -> str:
        """What tells it from other hosts, on which processes share no memory with it."""
        return f"{self.run_dir.path.name}-{machine.name}"

    def variables(self, machine: Machine, config: RunConfig) -> dict[str, str]:
        """Those of Shoal for processes of this host; what only the launcher has is left out."""
        trusted = config.tls.trusted_network or self.machines.is_private
        return replace(
            config,
            secret=None,
            secret_file=None,
            run_dir=None,
            host_id=self.host_id(machine),
            rack=machine.rack or config.rack,
            tls=replace(config.tls, trusted_network=trusted),
            environ={},
        ).to_environment()
