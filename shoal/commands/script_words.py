"""Which words of a command line are the command's, and which its script's.

    shoal run -n 2 train.py --epochs 1 -s ddp -- --seed 3
              ours          script's   ours      script's

Options before the script are the command's, as those of torchrun and python are. Behind it, options
that the command knows stay its own, and all other words go to the script, as all words behind `--`
do.
"""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

from typer.core import TyperCommand

from shoal.commands.launching import EXAMPLES
from shoal.errors import BadInput
from shoal.runtime.wording import say

_CLOSE = 0.8  # as alike as --wrokers and --workers: a typing error rather than the script's


class ScriptCommand(TyperCommand):
    """A command with a script and its arguments."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, self._split(args, ctx.command_path))

    def _split(self, words: list[str], command: str) -> list[str]:
        """The words with `--` before those of the script; BadInput for what is likely a typo."""
        takes_value = {"--help": False, "-h": False}  # whether one follows the option
        for option in self.params:
            names = [name for name in (*option.opts, *option.secondary_opts) if name[0] == "-"]
            takes_value |= dict.fromkeys(names, not getattr(option, "is_flag", False))
        arguments = [p.name for p in self.params if p.param_type_name == "argument"]
        at = _script_at(words, takes_value, arguments.index("args") - 1)
        if at is None:
            return words
        script = _Script(words[at])
        ours, theirs = list(words[: at + 1]), list[str]()
        rest = iter(words[at + 1 :])
        for word in rest:
            name = _known(word, takes_value)
            if word == "--":
                theirs += rest
            elif name is not None and not (name != word.partition("=")[0] and script.names(word)):
                ours.append(word)
                if takes_value[name] and name == word:
                    ours += [value for value in [next(rest, None)] if value is not None]
                if (theirs and name.startswith("--")) or script.names(name):
                    say(
                        f"{name} is taken as the option of {command}, not of {words[at]}: put what "
                        "is the script's behind --, and what is not before the script"
                    )
            elif word == "--json" and not script.names(word):
                ours.append(word)  # to be refused by its name: other commands have it
            else:
                script.check(word, command, list(takes_value))
                theirs.append(word)
        return [*ours, "--", *theirs]


class _Script:
    """A script, and which options its text names."""

    def __init__(self, name: str):
        self.name = name
        path = Path(name)
        self._text = path.read_text("utf-8", errors="replace") if path.is_file() else ""

    def names(self, option: str) -> bool:
        return any(f"{quote}{option.partition('=')[0]}{quote}" in self._text for quote in "\"'")

    def check(self, word: str, command: str, known: list[str]) -> None:
        name = word.partition("=")[0]
        close = difflib.get_close_matches(name, known, n=1, cutoff=_CLOSE)
        if name.startswith("--") and close and not self.names(name):
            raise BadInput(
                f"No such option: {name} of {command}; did you mean {close[0]}? If {self.name} "
                "takes it, put it behind --"
            )


def _script_at(words: list[str], takes_value: dict[str, bool], behind: int) -> int | None:
    """Where the script stands, behind so many others; None: there is none, or a model by name."""
    at = 0
    while at < len(words) and (behind or words[at].startswith("-")):
        if words[at] == "--":
            return None
        behind -= not words[at].startswith("-")
        at += 2 if takes_value.get(words[at]) else 1
    is_script = at < len(words) and (
        words[at].endswith(".py") or words[at] in EXAMPLES or Path(words[at]).is_file()
    )
    return at if is_script else None


def _known(word: str, options: dict[str, bool]) -> str | None:
    """The option that a word is or begins with: --seed, --seed=3, -n2."""
    name = word.partition("=")[0]
    if name in options and (name == word or options[name]):
        return name
    short = word[:2]
    return short if short != "--" and options.get(short) else None
