"""Which words of a command line are the command's, and which its script's.

    shoal run -n 4 -s ddp --workers 4 --seed 7 train.py
              ours                 the script's

As with python, torchrun and accelerate: what stands behind the script goes to it unchanged. A `--`
right behind the script is left out, so that lines which have one mean the same.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from typer.core import TyperCommand

from shoal.commands.launching import EXAMPLES
from shoal.errors import WorkersFailed
from shoal.runtime.wording import say

_BAD_USAGE = 2  # how the argument parsers of scripts end


class ScriptCommand(TyperCommand):
    """A command with a script and its arguments."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        at = self._script_at(args)
        if at is not None and args[at + 1 : at + 2] != ["--"]:
            args = [*args[: at + 1], "--", *args[at + 1 :]]
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except WorkersFailed as error:
            own = [word for word in ctx.params["args"] or () if self._is_own(word)]
            if error.exit_status == _BAD_USAGE and own:
                where = f"options of {ctx.command_path} stand before the script"
                say(f"{', '.join(own)} went to the script, being behind it: {where}")
            raise

    def _script_at(self, words: list[str]) -> int | None:
        """Where the script stands; None: there is none, or a model by its name."""
        arguments = [p.name for p in self.params if p.param_type_name == "argument"]
        behind = arguments.index("args") - 1  # so many others
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
