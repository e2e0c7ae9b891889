"""`shoal collectives --cluster`: every algorithm with contention on the links of a cluster."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import typer
from rich.table import Table as Grid

from shoal.cluster.cluster import Cluster
from shoal.cluster.units import show_bytes, show_rate, show_seconds
from shoal.commands.output import plain_table, wide_console
from shoal.errors import BadInput
from shoal.plan.simulator.contention import AT_RANDOM, ClusterNetwork, ContendedPrice, explain_racks
from shoal.schedules.collectives.catalog import algorithms


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
    left_out = _left_out(network, priced)
    if not prices_by_kind:
        raise BadInput(f"--ranks {network.ranks} with --cluster: {left_out}")
    if as_json:
        typer.echo(json.dumps(_document(network, prices_by_kind, num_bytes, seed)))
        return
    console = wide_console()
    for kind, prices in prices_by_kind.items():
        console.print(_grid(kind, prices, network))
    if left_out:
        console.print(f"\n{left_out}", soft_wrap=True)
    sentences = explain_racks(network, prices_by_kind.get("all_reduce", []))
    if sentences:
        console.print(f"\n{sentences}", soft_wrap=True)


def _grid(kind: str, prices: Sequence[ContendedPrice], network: ClusterNetwork) -> Grid:
    alpha_s, rate = network.slowest_pair
    one = prices[0]
    title = f"{kind} of {show_bytes(one.num_bytes)} over {one.ranks} ranks of {_words(network)}"
    if one.ranks > 1:
        title += f"\nslowest pair: {show_seconds(alpha_s)} a message, {show_rate(rate)}"
    heads = ["algorithm", "order", "alone", "closed\nform", "simulated", "busiest link"]
    grid = plain_table(title, heads, left=2)
    grid.columns[-1].justify = "left"
    grid.add_column("")
    for row, price in enumerate(prices):
        simulated = "-" if price.simulated_s is None else show_seconds(price.simulated_s)
        grid.add_row(
            price.algorithm,
            price.order,
            show_seconds(price.alpha_beta_s),
            show_seconds(price.closed_form_s),
            simulated,
            f"{price.bound}, {show_rate(price.bound_bytes_per_s)}" if price.bound else "",
            "<- fastest" if row == 0 else "",
            style="bold green" if row == 0 else "",
        )
    return grid


def _left_out(network: ClusterNetwork, priced: dict[str, list[ContendedPrice]]) -> str:
    """Which algorithms have more paths than are worth finding; "" where none has."""
    missing = []
    for kind, prices in priced.items():
        names = {one.algorithm for one in prices}
        missing += [f"{kind} {name}" for name in algorithms(kind) if name not in names]
    if not missing:
        return ""
    pairs = f"{network.ranks:,} ranks have too many pairs that send to each other"
    return f"left out: {', '.join(missing)}; {pairs}"


def _words(network: ClusterNetwork) -> str:
    cluster = network.cluster
    words = cluster.name
    if network.has_levels:
        words += f", {cluster.node.devices} in a node" if cluster.node.devices > 1 else ""
    if network.crossings(AT_RANDOM):
        nodes = cluster.nodes_per_rack
        words += f", {nodes} nodes in a rack, uplinks 1:{cluster.oversubscription:g}"
    return words


def _document(
    network: ClusterNetwork,
    prices_by_kind: dict[str, list[ContendedPrice]],
    num_bytes: int,
    seed: int,
) -> dict[str, Any]:
    alpha_s, rate = network.slowest_pair
    return {
        "cluster": network.cluster.name,
        "ranks": network.ranks,
        "bytes": num_bytes,
        "seed": seed,
        "slowest_pair": {
            "alpha_s": alpha_s,
            "bytes_per_s": rate if network.ranks > 1 else None,
        },
        "explanation": explain_racks(network, prices_by_kind.get("all_reduce", [])),
        "collectives": [
            {
                "kind": kind,
                "fastest": prices[0].algorithm,
                "algorithms": [one.as_dict() for one in prices],
            }
            for kind, prices in prices_by_kind.items()
        ],
    }
