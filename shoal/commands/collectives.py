"""`shoal collectives`: what every algorithm costs; `show` draws one, `run` carries one out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

import typer
from rich.table import Table as Grid

from shoal.cluster import Cluster
from shoal.cluster.presets import load_cluster
from shoal.cluster.units import (
    parse_bytes,
    parse_s_per_byte,
    parse_seconds,
    show_bytes,
    show_rate,
    show_seconds,
)
from shoal.commands import collective_runs, options
from shoal.commands.options import argument, option
from shoal.commands.output import Part, plain_table, wide_console, write_text
from shoal.commands.output import show as show_parts
from shoal.errors import BadInput
from shoal.plan.contention.collectives import (
    AT_RANDOM,
    ClusterNetwork,
    ContendedPrice,
    explain_racks,
)
from shoal.schedules.collectives.catalog import algorithms, build, kinds
from shoal.schedules.collectives.cost import Link, Price, price_all
from shoal.schedules.collectives.draw import animated_svg, draw
from shoal.schedules.collectives.kinds import kind_named
from shoal.schedules.collectives.proof import prove


def show_on_cluster(
    cluster: Cluster,
    ranks: int | None,
    kinds: Sequence[str],
    num_bytes: int,
    seed: int,
    as_json: bool,
) -> None:
    """The first `ranks` devices of the cluster, which grows where it has fewer."""
    network = ClusterNetwork(cluster, cluster.devices if ranks is None else ranks, seed)
    priced = {kind: network.price_all(kind, num_bytes) for kind in kinds}
    prices_by_kind = {kind: prices for kind, prices in priced.items() if prices}
    missing = [
        f"{kind} {name}"
        for kind, prices in priced.items()
        for name in algorithms(kind)
        if name not in {one.algorithm for one in prices}
    ]
    pairs = f"{network.ranks:,} ranks have too many pairs that send to each other"
    left_out = f"left out: {', '.join(missing)}; {pairs}" if missing else ""
    if not prices_by_kind:
        raise BadInput(f"--ranks {network.ranks} with --cluster: {left_out}")
    sentences = explain_racks(network, prices_by_kind.get("all_reduce", []))
    grids = [_cluster_grid(kind, prices, network) for kind, prices in prices_by_kind.items()]
    alpha_s, rate = network.slowest_pair
    document = {
        "cluster": cluster.name,
        "ranks": network.ranks,
        "bytes": num_bytes,
        "seed": seed,
        "slowest_pair": {"alpha_s": alpha_s, "bytes_per_s": rate if network.ranks > 1 else None},
        "explanation": sentences,
        "collectives": _collectives(prices_by_kind),
    }
    lines = [f"\n{line}" for line in (left_out, sentences) if line]
    show_parts(document, [*grids, *lines], as_json, wraps=True)


def _cluster_grid(kind: str, prices: Sequence[ContendedPrice], network: ClusterNetwork) -> Grid:
    alpha_s, rate = network.slowest_pair
    cluster = network.cluster
    one = prices[0]
    title = f"{kind} of {show_bytes(one.num_bytes)} over {one.ranks} ranks of {cluster.name}"
    if network.has_levels and cluster.node.devices > 1:
        title += f", {cluster.node.devices} in a node"
    if network.crossings(AT_RANDOM):
        title += f", {cluster.nodes_per_rack} nodes in a rack"
        title += f", uplinks 1:{cluster.oversubscription:g}"
    if one.ranks > 1:
        title += f"\nslowest pair: {show_seconds(alpha_s)} a message, {show_rate(rate)}"
    heads = ["algorithm", "order", "alone", "closed\nform", "simulated", "busiest link"]
    rows = [
        [
            price.algorithm,
            price.order,
            show_seconds(price.alpha_beta_s),
            show_seconds(price.closed_form_s),
            "-" if price.simulated_s is None else show_seconds(price.simulated_s),
            f"{price.bound}, {show_rate(price.bound_bytes_per_s)}" if price.bound else "",
        ]
        for price in prices
    ]
    grid = _fastest_first(title, heads, rows, left=2)
    grid.columns[5].justify = "left"
    return grid


def _fastest_first(
    title: str, heads: Sequence[str], rows: Sequence[Sequence[str]], left: int
) -> Grid:
    grid = plain_table(title, heads, left=left)
    grid.add_column("")
    for number, row in enumerate(rows):
        mark, style = ("", "") if number else ("<- fastest", "bold green")
        grid.add_row(*row, mark, style=style)
    return grid


app = typer.Typer(
    help="Every collective algorithm: priced, proven, drawn, carried out.", no_args_is_help=False
)
app.command("run")(collective_runs.run)


MOST_RANKS = 4096  # of a table of all algorithms: their transfers grow with the square


@app.callback(invoke_without_command=True)
def table(
    context: typer.Context,
    ranks: str | None = option(
        "Number of ranks; several, as 2,4,8,…,1024, are compared.",
        show_default="8, or all devices of --cluster",
    ),
    size: str = option("Size of the vector: 100MB, 64KiB.", "100MB", "--bytes"),
    cluster: str | None = option("With contention on this cluster: a file or a preset."),
    alpha: str = option("Time of a message: 10us.", "10us"),
    beta: str = option("Cost of a byte: 10GB/s, 80Gb/s, or seconds.", "10GB/s"),
    gamma: str = option("Cost of reducing a byte: 20GB/s, or seconds.", "0"),
    kind: str = option("Which collective, or `all`.", "all_reduce"),
    prove_all: bool = option("Also prove each one.", False, "--prove"),
    seed: int = option("Of a ring's random order, on a cluster.", 0),
    svg: Path | None = option("Draw times over several numbers of ranks here."),
    as_json: options.Json = False,
) -> None:
    """A table of all algorithms, the fastest first."""
    if context.invoked_subcommand is not None:
        return
    counts = [] if ranks is None else sorted(options.parse_counts("--ranks", ranks, MOST_RANKS))
    if svg is not None and len(counts) < 2:
        raise BadInput("--svg draws times over several --ranks; `show` draws one algorithm")
    names = kinds() if kind == "all" else [kind_named(kind).name]
    num_bytes = parse_bytes(size)
    if cluster is not None:
        _check_no_costs(context)
        if len(counts) > 1:
            raise BadInput("--cluster takes one number of --ranks")
        count = counts[0] if counts else None
        show_on_cluster(load_cluster(cluster), count, names, num_bytes, seed, as_json)
        return
    cost = Link(parse_seconds(alpha), parse_s_per_byte(beta), parse_s_per_byte(gamma))
    if prove_all:
        for count, name in product(counts or [8], names):
            for algorithm in algorithms(name):
                prove(build(name, algorithm, count))
    if len(counts) > 1:
        found, parts, lines = collective_runs.sweep(names, counts, num_bytes, cost)
        if svg is not None:
            title = f"{', '.join(names)} of {show_bytes(num_bytes)}"
            collective_runs.write_chart(svg, title, lines)
        document = {"bytes": num_bytes, **asdict(cost), "proven": prove_all, "collectives": found}
        show_parts(document, parts, as_json)
        return
    _show_one(counts[0] if counts else 8, names, num_bytes, cost, prove_all, as_json)


def _show_one(
    ranks: int, names: Sequence[str], num_bytes: int, cost: Link, proven: bool, as_json: bool
) -> None:
    """A table for one number of ranks."""
    prices_by_kind = {name: price_all(name, ranks, num_bytes, cost) for name in names}
    parts: list[Part] = []
    for name, prices in prices_by_kind.items():
        parts.append(_grid(name, prices, num_bytes, cost))
        if prices[0].redundant_bytes:
            parts.append(
                f"\nRedundant memory: when the {name} is done, in place, all ranks together hold "
                f"{show_bytes(prices[0].redundant_bytes)} beyond one copy of the result."
            )
    if proven:
        parts.append(f"All of them are proven for {ranks} ranks.")
    if "all_reduce" in prices_by_kind and ranks > 1:
        parts.append(_ring_against_star(prices_by_kind["all_reduce"], cost))
    costs = asdict(cost)
    document = {"ranks": ranks, "bytes": num_bytes, **costs, "proven": proven}
    document |= {"collectives": _collectives(prices_by_kind)}
    show_parts(document, parts, as_json, wraps=True)


def _check_no_costs(context: typer.Context) -> None:
    for name in ("alpha", "beta", "gamma", "prove_all"):
        source = context.get_parameter_source(name)
        if source is not None and source.name != "DEFAULT":
            option = name.removesuffix("_all")
            raise BadInput(f"--{option} does not go with --cluster: its links have their costs")


@app.command()
def show(
    kind: str = argument("all_reduce, broadcast, scan, …", ...),
    name: str = argument("ring, tree, …; or FILE.py:FUNCTION of your own", ...),
    ranks: int = option("Number of ranks.", 4),
    root: int = option("The root of a broadcast, reduce, scatter or gather.", 0),
    node: int | None = option("For hierarchical: ranks in a node."),
    rack: int | None = option("For hierarchical: nodes in a rack."),
    inner: str | None = option("For hierarchical: the algorithm inside a node."),
    outer: str | None = option("For hierarchical: the one between nodes."),
    svg: Path | None = option("Write an animated picture here."),
    prove_it: bool = option("Prove it, do not draw it.", False, "--prove"),
    as_json: options.Json = False,
) -> None:
    """Draw one algorithm round by round.

    Which chunk goes where, and what each rank holds then.
    """
    asked = {"node": node, "rack": rack, "inner": inner, "outer": outer}
    given = {key: value for key, value in asked.items() if value is not None}
    collective = build(kind, name, ranks, root, **given)
    is_shown = not (prove_it or svg is not None or as_json)
    if not is_shown:
        prove(collective)
    if svg is not None:
        write_text(svg, animated_svg(collective))
    if is_shown:
        draw(collective, wide_console())
        return
    said = (
        f"{collective} is proven: {len(collective.table)} rounds, "
        f"{collective.table.num_transfers} transfers, and every rank ends with exactly what it "
        "should have."
    )
    said = said if svg is None else f"{collective}: {svg}"
    fields = ("kind", "ranks", "chunks", "scratch", "root", "one_port")
    document = {
        "algorithm": collective.name,
        **{field: getattr(collective, field) for field in fields},
        "proven": True,
        "rounds": [
            [{**asdict(t), "into": t.chunk if t.into is None else t.into} for t in transfers]
            for transfers in collective.rounds
        ],
    }
    show_parts(document, [said], as_json)


def _grid(kind: str, prices: list[Price], num_bytes: int, cost: Link) -> Grid:
    title = f"{kind} of {show_bytes(num_bytes)} over {prices[0].ranks} ranks"
    title += f", {show_seconds(cost.alpha_s)} a message"
    title += f", {show_rate(1 / cost.beta_s_per_byte)}" if cost.beta_s_per_byte else ""
    title += f", adding at {show_rate(1 / cost.gamma_s_per_byte)}" if cost.gamma_s_per_byte else ""
    heads = ["algorithm", "rounds", "time", "busiest\nport", "times\nbound", "sent/\nrank"]
    rows = [
        [
            price.algorithm,
            str(price.rounds),
            show_seconds(price.time_s),
            show_bytes(price.busiest_bytes),
            "-" if price.ratio is None else f"{price.ratio:.2f}",
            show_bytes(price.sent_largest_bytes),
            show_bytes(price.sent_total_bytes),
            show_bytes(price.extra_memory_bytes),
        ]
        for price in prices
    ]
    return _fastest_first(title, [*heads, "sent\ntotal", "extra\nmemory"], rows, left=1)


def _ring_against_star(prices: list[Price], cost: Link) -> str:
    """And why textbooks have other numbers: they count 2NZ, (N-1)Z, or one way round a ring."""
    by_name = {one.algorithm: one for one in prices}
    ring, star, slow = (by_name[name] for name in ("ring", "star", "slow_ring"))
    ranks = ring.ranks
    num_bytes = ring.num_bytes
    if not ring.busiest_bytes:
        return ""
    times = star.busiest_bytes / ring.busiest_bytes
    least, twice = (show_bytes(times * num_bytes) for times in (ranks - 1, 2 * ranks))
    one_way = show_seconds(ranks * num_bytes * cost.beta_s_per_byte)
    return (
        f"\nRing against star: both send {show_bytes(star.sent_total_bytes)} in all, but the root "
        f"of the star carries {show_bytes(star.busiest_bytes)} through its port, {times:.3g} times "
        f"the {show_bytes(ring.busiest_bytes)} of every rank of the ring.\nSent in all: 2(N-1)Z; "
        f"2NZ, {twice}, would have the root send to itself. At least (N-1)Z, {least}, have to move "
        "to be added up; as much again spreads the sum, and stays as redundant memory.\nslow_ring: "
        f"{slow.rounds} rounds, {show_seconds(slow.time_s)}, there and back; m·d/b, {one_way}, is "
        f"{ranks} rounds, once around."
    )


def _collectives(prices_by_kind: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    return [
        {
            "kind": kind,
            "fastest": prices[0].algorithm,
            "algorithms": [asdict(one) for one in prices],
        }
        for kind, prices in prices_by_kind.items()
    ]
