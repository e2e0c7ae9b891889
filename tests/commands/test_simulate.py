from __future__ import annotations

import json
from pathlib import Path

from tests.commands.terminal import Answer, shoal

MODEL = ("--gpt", "layers=4,hidden=512,heads=8,sequence=256", "--batch", "32")


def run(*arguments: str) -> Answer:
    return shoal("simulate", *MODEL, "--cluster", "rack-1-4", "-n", "4", *arguments)


def test_a_step_is_simulated_beside_the_closed_form(tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    shown = run("-s", "ddp", "--trace", str(trace))
    assert shown.exit_code == 0
    assert "a step simulated" in shown.stdout and "by the closed form" in shown.stdout
    assert "busiest link: Ethernet 25 of node 0, 23.5 Gb/s = 2.94 GB/s" in shown.stdout
    assert "communication exposed" in shown.stdout
    names = {event["name"] for event in json.loads(trace.read_text())["traceEvents"]}
    assert {"forward", "backward", "reduce", "wait", "update", "step"} <= names


def test_a_slow_worker_delays_all_or_itself_alone() -> None:
    def ends(strategy: str) -> list[float]:
        answer = run("-s", strategy, "--slow", "1:50x", "--steps", "2", "--json")
        document = json.loads(answer.stdout)
        assert document["steps"] == 2
        return list(document["rank_end_s"])

    together = ends("ddp")
    assert max(together) < 1.1 * min(together)
    apart = ends('ps(mode="async")')
    assert apart[1] == max(apart) and min(apart) < 0.8 * apart[1]
