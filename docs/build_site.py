"""What mkdocs adds to docs/ when it builds the site: pictures, references, pages of the root.

Pictures are what the commands draw; nothing that is made here is committed. A hook of mkdocs.yml.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer.main
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

import shoal
from shoal.commands.cli import COMMANDS, build_app, main

ROOT = Path(__file__).parents[1]
PICTURES = {
    "star": "collectives show all_reduce star --ranks 4",
    "ring": "collectives show all_reduce ring --ranks 4",
    "reduce_scatter": "collectives show reduce_scatter ring --ranks 4",
    "all_gather": "collectives show all_gather ring --ranks 4",
    "reduce_star": "collectives show reduce star --ranks 4",
    "broadcast_star": "collectives show broadcast star --ranks 4",
    "pair": "collectives show all_reduce ring --ranks 2",
    "hierarchical": "collectives show all_reduce hierarchical --ranks 8 --node 4",
    "inter-op": "pipeline show inter-op --stages 4 --microbatches 4",
    "gpipe": "pipeline show gpipe --stages 4 --microbatches 8",
    "1f1b": "pipeline show 1f1b --stages 4 --microbatches 8",
    "zb-h1": "pipeline show zb-h1 --stages 4 --microbatches 8",
    "graphs": "graphs -n 16",
    "cluster": "cluster show dgx-a100 --nodes 4 --racks 2",
}
FROM_ROOT = ("ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md", "README.zh-CN.md")
COMMANDS_ARE = "Made from the commands themselves. By subject: [command line](../command-line.md)."
NAMES_ARE = "Public names of `shoal`. What strategies do: [strategies](../strategies.md)."


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for path, text in made():
        files.append(File.generated(config, path, content=text))
    return files


def made() -> Iterator[tuple[str, str]]:
    """(path in the site, text) of every page and picture."""
    for name, words in PICTURES.items():
        yield f"pictures/{name}.svg", drawn(words.split())
    for name in FROM_ROOT:
        if (ROOT / name).exists():
            yield name, in_site((ROOT / name).read_text("utf-8"))
    yield "index.md", in_site((ROOT / "README.md").read_text("utf-8"))
    yield "reference/commands.md", command_reference()
    yield "reference/api.md", api_reference()


def drawn(words: list[str]) -> str:
    """What a command writes with --svg."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "picture.svg"
        with contextlib.redirect_stdout(io.StringIO()):
            try:
                main([*words, "--svg", str(file)])
            except SystemExit as end:
                assert not end.code, f"shoal {' '.join(words)} failed"
        return file.read_text("utf-8")


def in_site(text: str) -> str:
    """A page of the root, with links as they are inside of docs/."""
    text = text.replace("](docs/", "](").replace('src="docs/', 'src="')
    text = text.replace("](README.md", "](index.md")
    return re.sub(r"\[([^]]+)\]\(examples/[^)]*\)", r"`\1`", text)


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Sources that a page links to are not in the site: their names stay."""
    return re.sub(
        r"\[([^]]+)\]\(\.\./(?:shoal|tests|benchmarks|examples)/[^)]*\)", r"`\1`", markdown
    )


def command_reference() -> str:
    """Every command with its options, as `--help` has them."""
    app = typer.main.get_command(build_app(COMMANDS))
    lines = ["# Reference: command line", "", COMMANDS_ARE, ""]
    for name, command in app.commands.items():  # type: ignore[attr-defined]
        for words, found in _with_subcommands(f"shoal {name}", command):
            lines += _described(words, found)
    return "\n".join(lines)


def _with_subcommands(words: str, command: Any) -> Iterator[tuple[str, Any]]:
    yield words, command
    for name, sub in getattr(command, "commands", {}).items():
        yield from _with_subcommands(f"{words} {name}", sub)


def _described(words: str, command: Any) -> list[str]:
    context = command.context_class(command, info_name=words)
    usage = " ".join([words, *command.collect_usage_pieces(context)])
    about = re.sub(r"\s*\n\s*(?=\S)", " ", (command.help or "").split("\f")[0]).strip()
    lines = [f"## {words}", "", f"`{usage}`", "", about, ""]
    records = [parameter.get_help_record(context) for parameter in command.params]
    rows = [[_cell(part) for part in record] for record in records if record]
    if rows:
        lines += ["| option | |", "|---|---|", *(f"| `{o}` | {about} |" for o, about in rows), ""]
    return lines


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def api_reference() -> str:
    """Every public name, by mkdocstrings."""
    homes = {name: f"shoal.{shoal._HOME[name]}.{name}" for name in shoal._HOME}
    order = ["run", "Job", "Step", "Batch", "Embedding", "map_reduce"]
    order += ["parse", "Strategy", "predict", "rank_strategies", "Op", "ShoalError", "BadInput"]
    lines = ["# Reference: Python", "", NAMES_ARE, ""]
    for name in [*order, *(name for name in homes if name not in order)]:
        lines += [f"## shoal.{name}", "", f"::: {homes[name]}", ""]
    lines += ["## Terms of strategies", ""]
    for name in shoal._terms():
        lines += [f"### shoal.{name}", "", *_term(getattr(shoal, name)), ""]
    return "\n".join(lines)


def _term(term: Any) -> list[str]:
    parameters = inspect.signature(term).parameters.values()
    options = (p.name if p.default is p.empty else f"{p.name}={p.default!r}" for p in parameters)
    return [f"`{term.__name__}({', '.join(options)})`", "", inspect.getdoc(term) or ""]
