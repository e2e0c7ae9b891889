"""How the pulls of rows were spread over rows and servers, for the end of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from shoal.sync.ps.shard_counts import is_complete

_HOTTEST = 10


def table_loads(stats: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The load of each table over all servers.

    `by_owner` and `as_served` compare the same pulls, from the first copies on: what the largest
    load of a server would be to the mean if every row was asked of its owner, and what it was.
    Without copies both are equal. Each replica of a server counts what it has served; counts of
    replicas that were lost are left out, and the load is not complete.
    """
    names = stats[0].get("tables", {}) if stats else {}
    replicas = [other for server in stats for other in server.get("replicas", [])]
    return {
        name: _load(
            [server["tables"][name] for server in (*stats, *replicas) if name in server["tables"]],
            sum(server["tables"][name]["held"] for server in stats),
        )
        | {"is_complete": all(map(is_complete, stats))}
        for name in names
    }


def _load(servers: Sequence[dict[str, Any]], held_rows: int) -> dict[str, Any]:
    pulls = sum(server["pulls"] for server in servers)
    hottest = _hottest(servers)
    number = max(1, servers[0]["rows"] // 100)
    served = [server["served"] for server in servers]
    owned = [sum(column) for column in zip(*(s["by_owner"] for s in servers), strict=True)]
    if not sum(served):
        served = owned = [server["before"] for server in servers]
    return {
        "pulls": pulls,
        "held_rows": held_rows,
        "hottest": [
            {"row": row, "pulls": count, "at_most_too_large_by": error}
            for row, count, error in hottest[:_HOTTEST]
        ],
        "hottest_percent": {
            "rows": number,
            "share": _share(sum(count for _, count, _ in hottest[:number]), pulls),
            "at_least": _share(sum(c - error for _, c, error in hottest[:number]), pulls),
        },
        "copied_rows": max(server["copies"] for server in servers),
        "by_owner": owned,
        "as_served": served,
        "max_over_mean_by_owner": max_over_mean(owned),
        "max_over_mean_as_served": max_over_mean(served),
    }


def _hottest(servers: Sequence[dict[str, Any]]) -> list[tuple[int, int, int]]:
    """(row, pulls, error) over all servers, the hottest first."""
    counts: dict[int, tuple[int, int]] = {}
    for server in servers:
        for row, count, error in zip(
            server["ids"], server["counts"], server["errors"], strict=True
        ):
            before = counts.get(row, (0, 0))
            counts[row] = (before[0] + count, before[1] + error)
    ordered = sorted(counts.items(), key=lambda item: (-item[1][0], item[0]))
    return [(row, count, error) for row, (count, error) in ordered]


def max_over_mean(loads: Sequence[int]) -> float:
    total = sum(loads)
    return max(loads) * len(loads) / total if total else 1.0


def _share(count: int, total: int) -> float:
    return min(1.0, count / total) if total else 0.0


def load_sentences(
    loads: Mapping[str, dict[str, Any]], hit_rates: Mapping[str, float]
) -> list[str]:
    sentences = []
    for name, load in loads.items():
        if not load["pulls"]:
            continue
        rows = ", ".join(f"{each['row']} ({each['pulls']:,})" for each in load["hottest"])
        percent = load["hottest_percent"]
        at_least = "" if load["is_complete"] else "at least "
        sentences.append(
            f"table {name!r}: {at_least}{load['pulls']:,} pulls of rows; the hottest: {rows}"
        )
        sentences.append(
            f"table {name!r}: the hottest 1% of rows take {_percent(percent)} of pulls"
        )
        if len(load["as_served"]) > 1 and load["is_complete"]:
            sentences.append(f"table {name!r}: {_spread(load)}")
        if name in hit_rates:
            kept = f"{hit_rates[name]:.0%} of the rows that this worker used were kept"
            sentences.append(f"table {name!r}: {kept} from earlier steps")
    return sentences


def _percent(percent: dict[str, Any]) -> str:
    if percent["share"] - percent["at_least"] < 0.005:
        return f"{percent['share']:.1%}"
    return f"{percent['at_least']:.1%} to {percent['share']:.1%}"


def _spread(load: dict[str, Any]) -> str:
    before = f"largest/mean load of servers {load['max_over_mean_by_owner']:.2f}"
    if not load["copied_rows"]:
        return f"{before}, without copies"
    after = f"{load['max_over_mean_as_served']:.2f} with copies of {load['copied_rows']:,} rows"
    return f"{before} by owners, {after}"
