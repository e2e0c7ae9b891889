"""The counters of the servers, in sentences for the end of a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from shoal.runtime.wording import counted
from shoal.server.consistency import Rule

_SUMS = ("sent_again", "requests", "received_bytes", "sent_bytes", "cpu_s")
_HISTOGRAMS = ("steps_ahead", "refused")
_OF_ROWS = ("tables", "replicas")


def counts_of_shards(stats: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Without counters of rows. `stats` has the head of each shard, with its other replicas.

    A copy that is lost takes with it how many requests it has answered; what follows from the log
    is known to all copies, and complete.
    """
    return [_of_shard(head, [head, *head.get("replicas", [])]) for head in stats]


def _of_shard(head: Mapping[str, Any], replicas: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    counts = {key: value for key, value in head.items() if key not in _OF_ROWS}
    counts |= {key: sum(each[key] for each in replicas) for key in _SUMS if key in head}
    counts |= {key: _added([each[key] for each in replicas]) for key in _HISTOGRAMS if key in head}
    return counts | {"is_complete": is_complete(head)}


def _added(histograms: Sequence[Mapping[str, int]]) -> dict[str, int]:
    total = Counter[str]()
    for each in histograms:
        total.update(each)
    return {key: total[key] for key in sorted(total, key=lambda key: (len(key), key))}


def is_complete(head: Mapping[str, Any]) -> bool:
    """Whether no replica of the shard was lost or removed."""
    return all(each.get("is_complete", True) for each in (head, *head.get("replicas", [])))


def summarize(
    stats: Sequence[dict[str, Any]],
    rule: Rule,
    memory: str | None = None,
    counted: str = "worker",
    holder: str = "server",
) -> list[str]:
    """`stats` has one entry per shard, the leader's first.

    `memory` is where gradients and weights are exchanged, if not over connections; `counted` is
    what pushes are of; `holder` is "shard" where several servers hold each.
    """
    if not stats:
        return []
    leader = stats[0]
    sentences = []
    if not rule.is_synchronous and "workers" in leader:
        sentences += [
            f"{counted} {worker}: {_pushes_of(leader, worker, rule)}"
            for worker in leader["workers"]
        ]
        missed = ", ".join(f"{k}: {v}" for k, v in leader["missed_updates"].items())
        if missed:
            sentences.append(f"updates between a pull and its push, and how often: {missed}")
    lost = sum(server.get("lost_pushes", 0) for server in stats)
    if lost:
        sentences.append(
            f"pushes that were acknowledged and lost with a server (eventual consistency): {lost}"
        )
    shards = counts_of_shards(stats)
    for index, counts in enumerate(shards):
        sentences.append(f"{holder} {index}: {_traffic(counts, memory)}")
    if not all(counts["is_complete"] for counts in shards):
        sentences.append("at least: what a server had counted before it was lost is not included")
    return sentences


def _traffic(counts: dict[str, Any], memory: str | None) -> str:
    transport = "" if memory is None else f" by sockets; gradients and weights by {memory}"
    at_least = "" if counts["is_complete"] else "at least "
    return (
        f"{counts['updates']} updates, {at_least}{counts['requests']} requests, "
        f"{counts['received_bytes'] / 1e6:.1f} MB in, {counts['sent_bytes'] / 1e6:.1f} MB out"
        + transport
    )


def _pushes_of(leader: dict[str, Any], worker: str, rule: Rule) -> str:
    counts = leader["workers"][worker]
    phrases = [f"{counts['admitted']} pushes counted"]
    if rule.quorum is not None:
        phrases.append(f"{counts['folded']} folded into a later step")
        phrases.append(f"{counts['dropped']} dropped as late")
    if leader["left_out"][worker]:
        phrases.append(f"{counted(leader['left_out'][worker], 'step')} left out")
    return ", ".join(phrases)


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
