"""Which words of a command line are the command's, and which its script's.

    shoal run -n 4 -s ddp --workers 4 --seed 7 train.py
              ours                 the script's

As with python, torchrun and accelerate: what stands behind the script goes to it unchanged. A `--`
right behind the script is left out, so that lines which have one mean the same.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from typer.core import TyperCommand

from shoal.commands.launching import EXAMPLES
from shoal.errors import WorkersFailed
from shoal.runtime.wording import say

_BAD_USAGE = 2  # how the argument parsers of scripts end
# what a script has where it reads its arguments
_READING = re.compile(r"arg[sv]|argp|flags|click|typer|tyro|fire|hydra|getopt|docopt|\bcli", re.I)


class ScriptCommand(TyperCommand):
    """A command with a script and its arguments."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        at = self._script_at(args)
        if at is not None and args[at + 1 : at + 2] != ["--"]:
            args = [*args[: at + 1], "--", *args[at + 1 :]]
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        own = [word for word in ctx.params["args"] or () if self._is_own(word)]
        where = f"options of {ctx.command_path} stand before the script"
        went_astray = f"{', '.join(own)} went to the script, being behind it: {where}"
        is_read = not own or _reads_arguments(ctx.params[self._arguments[-2]])
        if not is_read:  # before a long run of one worker
            say(went_astray)
        try:
            return super().invoke(ctx)
        except WorkersFailed as error:
            is_usage = error.exit_status == _BAD_USAGE or "usage:" in str(error).lower()
            if own and is_read and is_usage:
                say(went_astray)
            raise

    def _script_at(self, words: list[str]) -> int | None:
        """Where the script stands; None: there is none, or a model by its name."""
        behind = len(self._arguments) - 2  # so many others
        at = 0
        while at < len(words) and (behind or words[at].startswith("-")):
            if words[at] == "--":
                return None
            behind -= not words[at].startswith("-")
            at += 2 if self._takes_value.get(words[at]) else 1
        is_script = at < len(words) and (
            words[at].endswith(".py") or words[at] in EXAMPLES or Path(words[at]).is_file()
        )
        return at if is_script else None

    @property
    def _arguments(self) -> list[str]:
        """Names of what stands without a sign: at the end a script and its arguments."""
        return [p.name for p in self.params if p.param_type_name == "argument"]

    @property
    def _takes_value(self) -> dict[str, bool]:
        """Of each option, whether a word of its own follows it."""
        return {
            name: not getattr(option, "is_flag", False)
            for option in self.params
            for name in (*option.opts, *option.secondary_opts)
            if name.startswith("-")
        }

    def _is_own(self, word: str) -> bool:
        """Also --seed=3 and -n2."""
        name = word.partition("=")[0] if word.startswith("--") else word[:2]
        return name in self._takes_value


def _reads_arguments(script: str) -> bool:
    """Whether it may, by its text; examples do."""
    file = Path(script)
    return not file.is_file() or bool(_READING.search(file.read_text("utf-8", "replace")))
