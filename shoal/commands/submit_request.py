"""What `shoal submit` was asked for: from options of the command line to a job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from shoal.commands.launching import EXAMPLES, command_for, strategy_for
from shoal.errors import BadInput
from shoal.launch.checkpoint_option import OPTION_NAME, read_folder
from shoal.launch.submit.spec import SubmitSpec, name_of, read_variables
from shoal.runtime.config import CheckpointConfig, RunConfig, TlsConfig, variable_name
from shoal.strategy.strategy import Strategy

TRUSTED = variable_name("trusted_network", TlsConfig)
CHECKPOINT = variable_name("folder", CheckpointConfig)


@dataclass(frozen=True)
class SubmitRequest:
    """The script and the options of all cluster managers."""

    script: str
    args: Sequence[str]
    workers: int
    strategy: str | None
    seed: int | None
    device: str | None
    nodes: int
    gpus_per_node: int
    cpus: int | None
    memory: str | None
    time: str | None
    job_name: str | None
    env: Sequence[str]
    checkpoint: str | None  # DIR or DIR:every=STEPS
    requeue: bool | None  # None: with a checkpoint
    restarts: int
    notice_s: int
    python: str | None

    def spec(self, is_in_image: bool, secret_file: Path | None = None) -> SubmitSpec:
        """The job, checked."""
        variables = self._variables(is_in_image)
        if secret_file is not None:
            variables[variable_name("secret_file")] = str(secret_file.absolute())
        return SubmitSpec(
            command=tuple(self._command(is_in_image)),
            workers=self.workers,
            name=self.job_name or name_of(self.script),
            nodes=self.nodes,
            gpus_per_node=self.gpus_per_node,
            cpus=self.cpus,
            memory=self.memory,
            time=self.time,
            environ={**variables, **read_variables(self.env)},
            requeue=self.checkpoint is not None if self.requeue is None else self.requeue,
            restarts=self.restarts,
            notice_s=self.notice_s,
        )

    def elastic_warning(self, launcher: str) -> str | None:
        """Launchers other than Shoal's end all workers with the first that is lost."""
        strategy = self._strategy
        if not strategy.is_elastic:
            return None
        return f"{strategy}: under {launcher} a lost worker ends the run, elastic or not"

    @property
    def _strategy(self) -> Strategy:
        return strategy_for(self.strategy, self.workers)

    def _command(self, is_in_image: bool) -> list[str]:
        args = list(self.args)
        program = self._in_image() + args if is_in_image else command_for(self.script, args)
        program[0] = self.python or program[0]
        if program[1].startswith("-") and program[1] == self.script:
            program[1] = f"./{self.script}"  # not an option of Python
        return program

    def _in_image(self) -> list[str]:
        """The script is in the image, and not here."""
        if self.script in EXAMPLES:
            return ["python", "-m", f"shoal.examples.{self.script}"]
        return ["python", self.script]

    def _variables(self, is_in_image: bool) -> dict[str, str]:
        """Those of Shoal."""
        strategy = self._strategy
        strategy.check_hosts(self.workers, self.nodes > 1)
        config = RunConfig(strategy=str(strategy), seed=self.seed, device=self.device)
        if self.checkpoint is not None:
            config = replace(config, checkpoint=_checkpoint(self.checkpoint, is_in_image))
        return {name: text for name, text in config.to_environment().items() if text}


def _checkpoint(text: str, is_in_image: bool) -> CheckpointConfig:
    """Folders of this machine are the same in the job, and not in an image."""
    folder, every = read_folder(OPTION_NAME, text)
    if is_in_image:
        folder = Path(text.rpartition(":every=")[0] or text)
    return CheckpointConfig(folder, every or CheckpointConfig().every)


def refuse_others(chosen: str, others: Mapping[str, object]) -> None:
    """BadInput where an option of another cluster manager was given."""
    for option, value in others.items():
        if value:
            raise BadInput(f"{option} means nothing to {chosen}: leave it out")


def network_warning(
    spec: SubmitSpec, has_key: bool, is_trusted: bool, uses_gpus: bool, how: str
) -> str | None:
    """What would end the job when it has waited in the queue: hosts that have no reason to trust.

    `how`: the option that gives workers a key.
    """
    trust = f"--env {TRUSTED}=1"
    if spec.nodes == 1 or is_trusted or spec.environ.get(TRUSTED) == "1":
        return None
    if uses_gpus:
        return f"NCCL between {spec.nodes} nodes takes {trust}: workers will end without it"
    if not has_key:
        return (
            f"workers on {spec.nodes} nodes take a key (`shoal keys new`, {how}) or {trust}: they "
            "will end without either"
        )
    return None
