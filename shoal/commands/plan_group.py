"""`shoal plan`, and `shoal plan validate`."""

from __future__ import annotations

import typer

from shoal.commands.default_group import DEFAULT, DefaultGroup
from shoal.commands.plan import plan
from shoal.commands.plan_validate import validate

app = typer.Typer(cls=DefaultGroup, help="Find the fastest strategies for a model on a cluster.")
app.command(DEFAULT)(plan)
app.command("validate")(validate)
