"""`python -m benchmarks validate`: predictions against a table of measured steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from benchmarks.status_line import status_line
from benchmarks.validation.compare import RunsAs, Validation
from benchmarks.validation.compare import validate as compare
from benchmarks.validation.fit import BOUNDS, Fitted
from benchmarks.validation.measured import TableDefaults, read_table
from shoal.cluster import Cluster
from shoal.cluster.presets import load_cluster
from shoal.cluster.toml_file import cluster_text
from shoal.cluster.units import show_seconds
from shoal.commands import options
from shoal.commands.output import plain_table, show, write_text
from shoal.errors import BadInput
from shoal.plan.step.collective_time import MEGATRON_ORDER, SHOAL_ORDER

_ORDERS = {"megatron": MEGATRON_ORDER, "shoal": SHOAL_ORDER}
_RECOMPUTE = ("none", "selective", "full")


def validate(
    file: Annotated[Path, typer.Argument(help="A CSV table, one row a run.")],
    cluster: Annotated[
        str, typer.Option(help="A cluster file or preset: where the runs were measured.")
    ] = "dgx-a100",
    fit: Annotated[
        bool, typer.Option("--fit", help="Fit the cluster's constants, by cross-validation.")
    ] = False,
    folds: Annotated[int, typer.Option(help="Of the cross-validation.")] = 5,
    write: Annotated[
        Path | None, typer.Option(help="With --fit: write the fitted cluster file here.")
    ] = None,
    recompute: Annotated[
        str, typer.Option(help="Where the table does not say: none, selective or full.")
    ] = "full",
    sequence: Annotated[int, typer.Option(help="Tokens, where the table does not say.")] = 2048,
    vocab: Annotated[int, typer.Option(help="Where the table does not say.")] = 51200,
    order: Annotated[str, typer.Option(help="Of ranks: megatron or shoal.")] = "megatron",
    overlap: Annotated[bool, typer.Option(help="Gradients were sent while backward ran.")] = False,
    worst: Annotated[int, typer.Option(help="How many of the worst rows to show.")] = 5,
    as_json: options.Json = False,
) -> None:
    """Compare predicted with measured step times of transformers.

    Prints the mean absolute error, the bias, the rank correlation, and the regret: how much longer
    the plan takes that the predictions would have picked, for every model and number of GPUs.

    Columns: gpus, batch, micro_batch, hidden, heads, layers, sequence, tp, dp, pp, interleave, and
    iteration_s, iteration_ms, full_recompute_s, seqpar_selective_s or tflops_per_gpu; also as in
    the tables of vTrain, Megatron-LM and Korthikanti et al.
    """
    if write is not None and not fit:
        raise BadInput("--write needs --fit: it writes the fitted cluster")
    defaults = TableDefaults(_one_of("recompute", recompute, _RECOMPUTE))
    defaults = replace(defaults, sequence=sequence, vocab=vocab)
    runs_as = RunsAs(_ORDERS[_one_of("order", order, tuple(_ORDERS))], overlap)
    rows = read_table(file, defaults)
    there = load_cluster(cluster)
    with status_line() as say:
        found = compare(rows, there, runs_as, folds if fit else 0, partial(_say_fit, say))
    if write is not None:
        write_text(write, _cluster_text(found.cluster, file))
    document = {"file": str(file), "cluster": cluster, **found.as_dict()}
    show(document, _parts(found, f"{file} on {cluster}", worst), as_json)


def _one_of(option: str, value: str, allowed: tuple[str, ...]) -> str:
    if value not in allowed:
        raise BadInput(f"--{option} {value} is not one of {', '.join(allowed)}")
    return value


def _cluster_text(cluster: Cluster, file: Path) -> str:
    return cluster_text(replace(cluster, name=f"{cluster.name}-fit-{file.stem}"))


def _parts(found: Validation, title: str, worst: int) -> Iterator[Table | str]:
    yield f"{len(found.rows)} measured steps: {title}"
    yield f"mean absolute error  {found.mean_absolute_error:7.1%}   {_how(found)}"
    yield f"bias                 {found.bias:+7.1%}"
    if found.rank_correlation is not None:
        yield f"rank correlation     {found.rank_correlation:7.3f}"
    if found.regret is not None:
        yield f"regret               {found.regret:7.1%}   {_choices(found)}"
    if worst > 0:
        yield _worst_table(found, worst)
    if found.fitted is not None:
        yield fitted_table(found.fitted)


def _say_fit(say: Callable[[str], None], fit: int, of: int, error: float) -> None:
    say(f"fit {fit} of {of}: mean error {error:.1%}")


def fitted_table(fitted: Fitted) -> Table:
    heads = ["constant", "fitted", "least", "most", ""]
    rows = []
    for name, value in fitted.values.items():
        shown = [_show(name, one) for one in (value, *BOUNDS[name])]
        end = fitted.at_bound.get(name)
        rows.append([name, *shown, f"at its {end}" if end else ""])
    return plain_table("fitted on all rows, within bounds", heads, rows, left=1)


def _choices(found: Validation) -> str:
    most = max(found.regrets, key=lambda one: one.regret)
    right = sum(one.regret == 0 for one in found.regrets)
    text = f"the best plan was picked in {right} of {len(found.regrets)} choices"
    if not most.regret:
        return text
    return (
        f"{text}\n{'':31}{most.regret:.1%} at most: {most.picked} for {most.best}, "
        f"{most.model} on {most.workers}"
    )


def _how(found: Validation) -> str:
    if not found.folds:
        return "nothing was fitted"
    return (
        f"each row predicted by a fit to the other folds ({found.folds}); "
        f"{found.in_sample_error:.1%} if fitted on all rows"
    )


def _worst_table(found: Validation, worst: int) -> Table:
    heads = ["strategy", "line", "workers", "measured", "predicted", "error"]
    rows = [
        [
            row.strategy,
            str(row.line),
            str(row.workers),
            show_seconds(row.measured_s),
            show_seconds(row.predicted_s),
            f"{row.error:+.1%}",
        ]
        for row in found.worst(worst)
    ]
    return plain_table("worst rows", heads, rows, left=1)


def _show(name: str, value: float) -> str:
    return show_seconds(value) if name.endswith("_s") else f"{value:.4g}"
