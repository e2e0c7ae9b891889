"""A command that also has subcommands: `shoal plan gpt-3 …` beside `shoal plan validate …`."""

from __future__ import annotations

from typing import Any

from typer.core import TyperGroup

DEFAULT = "search"  # the name of the command that runs where no other one is named


class DefaultGroup(TyperGroup):
    """Arguments that name no subcommand are those of the default one, `--help` too."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args or args[0] not in self.commands:
            args = [DEFAULT, *args]
        return super().parse_args(ctx, args)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        command = super().get_command(ctx, cmd_name)
        if command is not None and cmd_name == DEFAULT:
            command.context_class = _unnamed(ctx)
        return command


def _unnamed(parent: Any) -> Any:
    """A context whose command has the name of its group: `Usage: shoal plan …`."""
    path = property(lambda self: parent.command_path)
    return type("UnnamedContext", (type(parent),), {"command_path": path})
