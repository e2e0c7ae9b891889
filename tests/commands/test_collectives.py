from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from shoal.cluster.units import (
    parse_bytes,
    parse_s_per_byte,
    parse_seconds,
    show_bytes,
    show_rate,
    show_seconds,
)
from shoal.errors import BadInput
from shoal.schedules.collectives.catalog import algorithms, kinds
from tests.commands.terminal import Answer, shoal
from tests.products import few_or_all
from tests.user_schedules import collectives

__all__ = ["collectives"]  # a fixture


def run(*arguments: str) -> Answer:
    return shoal("collectives", *arguments)


def test_the_table_shows_ring_against_star_as_the_notes_tell_it() -> None:
    shown = run("--ranks", "8", "--bytes", "100MB")
    assert shown.exit_code == 0
    lines = {line.split()[0]: line.split() for line in shown.stdout.splitlines() if line.strip()}
    total = lines["ring"].index("1.4")
    assert lines["ring"][total : total + 2] == lines["star"][-4:-2] == ["1.4", "GB"]
    assert "8.00" in lines["star"] and "1.00" in lines["ring"]
    assert "the root of the star carries 1.4 GB" in " ".join(shown.stdout.split())
    assert "8 times the 175 MB of every rank of the ring" in shown.stdout
    assert "2NZ, 1.6 GB," in shown.stdout and "(N-1)Z, 700 MB," in shown.stdout
    assert "slow_ring: 14 rounds, 140 ms, there and back; m·d/b, 80 ms," in shown.stdout


def test_the_table_has_every_algorithm_sorted_and_the_winner_marked() -> None:
    document = json.loads(run("--ranks", "8", "--json").stdout)
    (found,) = document["collectives"]
    assert {one["algorithm"] for one in found["algorithms"]} == set(algorithms("all_reduce"))
    times = [one["time_s"] for one in found["algorithms"]]
    assert times == sorted(times) and found["fastest"] == found["algorithms"][0]["algorithm"]
    (winner,) = [line for line in run().stdout.splitlines() if "<- fastest" in line]
    assert winner.startswith(found["fastest"])


def test_all_kinds_are_priced_and_proven() -> None:
    document = json.loads(run("--kind", "all", "--ranks", "5", "--prove", "--json").stdout)
    assert [one["kind"] for one in document["collectives"]] == kinds()
    assert document["proven"] is True


def test_alpha_and_beta_decide() -> None:
    def fastest(*arguments: str) -> str:
        answer = json.loads(run("--ranks", "16", "--json", *arguments).stdout)
        return str(answer["collectives"][0]["fastest"])

    assert fastest("--bytes", "64", "--alpha", "1ms") == "doubling"
    assert fastest("--bytes", "1GB", "--alpha", "0", "--beta", "1GB/s") != "doubling"


def test_show_draws_round_by_round() -> None:
    shown = run("show", "all_reduce", "ring", "--ranks", "4")
    assert shown.exit_code == 0
    assert "Round 1 of 6" in shown.stdout and "Round 6 of 6" in shown.stdout
    assert "0 ─c3+→ 1   1 ─c0+→ 2   2 ─c1+→ 3   3 ─c2+→ 0" in shown.stdout
    assert "rank 3  123  23   3    all" in shown.stdout
    assert "Done: all ranks have the sum of all." in shown.stdout


@pytest.mark.whole
@pytest.mark.parametrize("kind", kinds())
def test_every_algorithm_can_be_drawn_and_animated(kind: str, tmp_path: Path) -> None:
    for name in algorithms(kind):
        for ranks in few_or_all(["5"], ["1", "4", "5"]):
            assert "Done" in run("show", kind, name, "--ranks", ranks).stdout
            picture = tmp_path / f"{name}.svg"
            assert run("show", kind, name, "--ranks", ranks, "--svg", str(picture)).exit_code == 0
            ElementTree.parse(picture)


def test_show_proves() -> None:
    shown = run("show", "all_reduce", "hierarchical", "--ranks", "12", "--node", "4", "--prove",
                "--inner", "tree", "--outer", "doubling")  # fmt: skip
    assert shown.exit_code == 0 and "is proven" in shown.stdout


def test_show_gives_the_rounds_as_json_and_nothing_else() -> None:
    document = json.loads(run("show", "broadcast", "star", "--ranks", "3", "--json").stdout)
    assert document["rounds"] == [[
        {"src": 0, "dst": 1, "chunk": 0, "reduce": False, "into": 0},
        {"src": 0, "dst": 2, "chunk": 0, "reduce": False, "into": 0},
    ]]  # fmt: skip


def test_a_schedule_of_ones_own_is_proven_or_refused_with_1(collectives: Path) -> None:
    right = run("show", "all_reduce", f"{collectives}:two_hops", "--ranks", "2", "--prove")
    assert right.exit_code == 0 and "is proven" in right.stdout
    wrong = run("show", "all_reduce", f"{collectives}:half", "--ranks", "2", "--prove")
    assert wrong.exit_code == 1
    assert "at the end rank 0 lacks the contribution of rank 1 in chunk 0" in wrong.stderr


def test_sizes_times_and_rates_are_read_as_people_write_them() -> None:
    assert parse_bytes("100MB") == 100_000_000 and parse_bytes("64KiB") == 65_536
    assert parse_bytes("1.5 GB") == 1_500_000_000 and parse_bytes("12") == 12
    assert parse_seconds("10us") == pytest.approx(1e-5) and parse_seconds("2ms") == 0.002
    assert parse_s_per_byte("10GB/s") == pytest.approx(1e-10)
    assert parse_s_per_byte("1e-10") == pytest.approx(1e-10)
    for wrong in ("", "MB", "-5", "5 apples", "1e"):
        with pytest.raises(BadInput):
            parse_bytes(wrong)


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("8Gb", 10**9), ("8gb", 10**9), ("8 Gbit", 10**9), ("8GB", 8 * 10**9), ("8gB", 8 * 10**9),
     ("64GiB", 64 << 30), ("64Gib", 8 << 30), ("16b", 2), ("16B", 16), ("1 kB", 1000)],
)  # fmt: skip
def test_b_is_a_bit_and_capital_b_a_byte(text: str, num_bytes: int) -> None:
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize("text", ["200Gb/s", "200 Gbit/s", "200Gbps", "25GB/s", "25GBps"])
def test_200_gigabits_a_second_are_25_gigabytes(text: str) -> None:
    assert 1 / parse_s_per_byte(text) == pytest.approx(25e9)
    assert show_rate(1 / parse_s_per_byte(text)) == "200 Gb/s = 25 GB/s"


def test_sizes_and_times_are_written_with_three_digits() -> None:
    assert [show_bytes(n) for n in (0, 12, 1_400_000_000, 12_500_000, 999_999)] == [
        "0 B", "12 B", "1.4 GB", "12.5 MB", "1 MB",
    ]  # fmt: skip
    assert [show_seconds(n) for n in (0.0176, 2.0, 3e-7)] == ["17.6 ms", "2 s", "300 ns"]


def test_a_cluster_prices_algorithms_with_contention() -> None:
    document = json.loads(run("--cluster", "rack-1-4", "--bytes", "700GB", "--json").stdout)
    (found,) = document["collectives"]
    assert document["ranks"] == 32 and found["fastest"] == "ring"
    shuffled = next(one for one in found["algorithms"] if one["order"] == "random")
    assert shuffled["simulated_s"] > 2 * found["algorithms"][0]["simulated_s"]
    shown = run("--cluster", "rack-1-4", "--ranks", "16", "--kind", "all_gather")
    assert shown.exit_code == 0
    assert "all_gather of 100 MB over 16 ranks of rack-1-4, 8 nodes in a rack" in shown.stdout
    assert "uplinks 1:4" in shown.stdout and "47 Gb/s = 5.88 GB/s" in shown.stdout
