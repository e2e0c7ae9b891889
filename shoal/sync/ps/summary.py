"""The counters of the servers, in sentences for the end of a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from shoal.runtime.wording import counted
from shoal.server.consistency import Rule

_SUMS = ("sent_again", "requests", "received_bytes", "sent_bytes", "cpu_s")
_HISTOGRAMS = ("steps_ahead", "refused")
_HOTTEST = 10
Counts = Mapping[str, Any]


def counts_of_shards(stats: Sequence[Counts]) -> list[dict[str, Any]]:
    """Without counters of rows. `stats` has the head of each shard, with its other replicas.

    A copy that is lost takes with it how many requests it has answered; what follows from the log
    is known to all copies, and complete.
    """
    shards = []
    for head in stats:
        copies = [head, *head.get("replicas", [])]
        counts = {key: value for key, value in head.items() if key not in ("tables", "replicas")}
        counts |= {key: sum(each[key] for each in copies) for key in _SUMS if key in head}
        for key in _HISTOGRAMS:
            if key in head:
                total = sum((Counter(each[key]) for each in copies), Counter[str]())
                counts[key] = {k: total[k] for k in sorted(total, key=lambda k: (len(k), k))}
        counts["is_complete"] = is_complete(head)
        shards.append(counts)
    return shards


def is_complete(head: Counts) -> bool:
    """Whether no replica of the shard was lost or removed."""
    return all(each.get("is_complete", True) for each in (head, *head.get("replicas", [])))


def summarize(
    stats: Sequence[Counts],
    rule: Rule,
    memory: str | None = None,
    counted: str = "worker",
    holder: str = "server",
) -> list[str]:
    """`stats` has one entry per shard, the leader's first.

    `memory` is where gradients and weights are exchanged, if not over connections; `counted` is
    what pushes are of; `holder` is "shard" where several servers hold each.
    """
    sentences = []
    if stats and not rule.is_synchronous and "workers" in stats[0]:
        leader = stats[0]
        sentences += [f"{counted} {w}: {_pushes_of(leader, w, rule)}" for w in leader["workers"]]
        if missed := histogram(leader["missed_updates"]):
            sentences.append(f"updates between a pull and its push, and how often: {missed}")
    lost = sum(server.get("lost_pushes", 0) for server in stats)
    if lost:
        sentences.append(
            f"pushes that were acknowledged and lost with a server (eventual consistency): {lost}"
        )
    shards = counts_of_shards(stats)
    transport = "" if memory is None else f" by sockets; gradients and weights by {memory}"
    for index, counts in enumerate(shards):
        at_least = "" if counts["is_complete"] else "at least "
        sentences.append(
            f"{holder} {index}: {counts['updates']} updates, {at_least}{counts['requests']} "
            f"requests, {counts['received_bytes'] / 1e6:.1f} MB in, "
            f"{counts['sent_bytes'] / 1e6:.1f} MB out{transport}"
        )
    if not all(counts["is_complete"] for counts in shards):
        sentences.append("at least: what a server had counted before it was lost is not included")
    return sentences


def histogram(counts: Mapping[str, int]) -> str:
    """How often each number; those of two digits together."""
    found = {key: count for key, count in counts.items() if int(key) < 10}
    if more := sum(counts.values()) - sum(found.values()):
        found["10 and more"] = more
    return ", ".join(f"{key}: {count}" for key, count in found.items())


def _pushes_of(leader: Counts, worker: str, rule: Rule) -> str:
    counts = leader["workers"][worker]
    phrases = [f"{counts['admitted']} pushes counted"]
    if rule.quorum is not None:
        phrases.append(f"{counts['folded']} folded into a later step")
        phrases.append(f"{counts['dropped']} dropped as late")
    if leader["left_out"][worker]:
        phrases.append(f"{counted(leader['left_out'][worker], 'step')} left out")
    return ", ".join(phrases)


def table_loads(stats: Sequence[Counts]) -> dict[str, dict[str, Any]]:
    """The load of each table over all servers.

    `by_owner` and `as_served` compare the same pulls, from the first copies on: what the largest
    load of a server would be to the mean if every row was asked of its owner, and what it was.
    Without copies both are equal. Each replica of a server counts what it has served; counts of
    replicas that were lost are left out, and the load is not complete.
    """
    everyone = [*stats, *(other for server in stats for other in server.get("replicas", []))]
    loads = {}
    for name in stats[0].get("tables", {}) if stats else {}:
        load = _load([each["tables"][name] for each in everyone if name in each["tables"]])
        load["held_rows"] = sum(server["tables"][name]["held"] for server in stats)
        load["is_complete"] = all(map(is_complete, stats))
        loads[name] = load
    return loads


def _load(servers: Sequence[Counts]) -> dict[str, Any]:
    pulls = sum(server["pulls"] for server in servers)
    counts: Counter[int] = Counter()
    errors: Counter[int] = Counter()
    for server in servers:
        counts.update(dict(zip(server["ids"], server["counts"], strict=True)))
        errors.update(dict(zip(server["ids"], server["errors"], strict=True)))
    hottest = sorted(counts, key=lambda row: (-counts[row], row))
    percent = hottest[: max(1, servers[0]["rows"] // 100)]
    at_most = sum(counts[row] for row in percent)
    at_least = at_most - sum(errors[row] for row in percent)
    served = [server["served"] for server in servers]
    owned = [sum(column) for column in zip(*(s["by_owner"] for s in servers), strict=True)]
    if not sum(served):
        served = owned = [server["before"] for server in servers]
    return {
        "pulls": pulls,
        "hottest": [
            {"row": row, "pulls": counts[row], "at_most_too_large_by": errors[row]}
            for row in hottest[:_HOTTEST]
        ],
        "hottest_percent": {
            "rows": len(percent),
            "share": min(1.0, at_most / pulls) if pulls else 0.0,
            "at_least": at_least / pulls if pulls else 0.0,
        },
        "copied_rows": max(server["copies"] for server in servers),
        "by_owner": owned,
        "as_served": served,
        "max_over_mean_by_owner": _max_over_mean(owned),
        "max_over_mean_as_served": _max_over_mean(served),
    }


def _max_over_mean(loads: Sequence[int]) -> float:
    total = sum(loads)
    return max(loads) * len(loads) / total if total else 1.0


def load_sentences(loads: Mapping[str, Counts], hit_rates: Mapping[str, float]) -> list[str]:
    sentences = []
    for name, load in loads.items():
        if not load["pulls"]:
            continue
        table = f"table {name!r}:"
        rows = ", ".join(f"{each['row']} ({each['pulls']:,})" for each in load["hottest"])
        at_least = "" if load["is_complete"] else "at least "
        sentences.append(f"{table} {at_least}{load['pulls']:,} pulls of rows; the hottest: {rows}")
        least, most = (f"{load['hottest_percent'][key]:.1%}" for key in ("at_least", "share"))
        share = most if least == most else f"{least} to {most}"
        sentences.append(f"{table} the hottest 1% of rows take {share} of pulls")
        if len(load["as_served"]) > 1 and load["is_complete"]:
            spread = f"largest/mean load of servers {load['max_over_mean_by_owner']:.2f}"
            copies = "without copies"
            if load["copied_rows"]:
                after = f"{load['max_over_mean_as_served']:.2f}"
                spread += " by owners"
                copies = f"{after} with copies of {load['copied_rows']:,} rows"
            sentences.append(f"{table} {spread}, {copies}")
        if name in hit_rates:
            kept = f"{hit_rates[name]:.0%} of the rows that this worker used were kept"
            sentences.append(f"{table} {kept} from earlier steps")
    return sentences
