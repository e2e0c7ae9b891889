"""Write the file of a job, and give it to the cluster manager where its command is installed."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from shoal.errors import BadInput, ShoalError
from shoal.launch.submit.spec import MARK
from shoal.runtime.files import write_atomically


def write_job(text: str, file: Path | None, default: str) -> Path:
    """Where the text was written; a file of another origin is not replaced unless it is named."""
    path = file or Path(default)
    if file is None and path.exists() and MARK not in path.read_text(errors="replace"):
        raise BadInput(f"{path} was not written by shoal submit: name another file with -o FILE")
    try:
        write_atomically(path, text)
    except OSError as error:
        raise BadInput(f"cannot write the job to {path}: {error.strerror}") from error
    return path


def submit_file(command: Sequence[str], path: Path) -> str:
    """Run `command` with the file, and return what it has printed; its errors go to stderr."""
    program = command[0]
    words = shlex.join([*command, str(path)])
    if shutil.which(program) is None:
        raise BadInput(f"there is no {program} here; the job is in {path}: submit it with {words}")
    asked = [*command, str(path.absolute())]
    done = subprocess.run(asked, check=False, stdout=subprocess.PIPE, text=True, errors="replace")
    if done.returncode:
        status = f"exit status {done.returncode}"
        raise ShoalError(f"{program} has refused the job ({status}); it is in {path}")
    return done.stdout
