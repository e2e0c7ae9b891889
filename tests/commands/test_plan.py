"""`shoal predict` and `plan` from sizes alone, and the samples of the pages."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from shoal.cluster.discover import this_machine
from shoal.runtime.wording import counted
from tests import scripts
from tests.commands.terminal import document_of, shoal

SMALL = ("--gpt", "layers=4,hidden=1024,heads=4,sequence=512", "--cluster", "dgx-a100")
DOCS = Path(__file__).parents[2] / "docs"
PAGES = "".join((DOCS / name).read_text(encoding="utf-8") for name in ("planner.md", "goodput.md"))
SAMPLES = re.findall(r"```console\n\$ (.*)\n([\s\S]*?)```", PAGES)


def test_predict_shows_parts_bounds_and_memory() -> None:
    shown = shoal("predict", *SMALL, "-n", "16", "-s", "ddp + tp(2)")
    assert shown.exit_code == 0
    for word in ("forward", "backward", "gradients", "NVLink", "InfiniBand", "samples/s", "MFU"):
        assert word in shown.stdout


def test_predict_has_a_row_for_each_number_of_workers() -> None:
    words = ("predict", *SMALL, "-n", "2,4,8", "--batch", "16")
    lines = shoal(*words).stdout.splitlines()
    assert [line.split()[0] for line in lines[2:]] == ["workers", "2", "4", "8"]
    assert [one["workers"] for one in document_of(*words)["predictions"]] == [2, 4, 8]


WIRE = ("predict", "gpt-3", "--network", "200Gb/s", "-n")


@pytest.mark.parametrize(
    ("strategy", "words"),
    [
        ("ddp", ["gradients 37.8 s network"]),
        ('ps(placement="rank0")', ["push 55.9 s network", "pull 55.9 s network"]),
        ("gossip", ["neighbours 55.9 s network"]),
    ],
)
def test_a_network_alone_is_answered_with_the_time_on_the_wire(
    strategy: str, words: list[str]
) -> None:
    lines = shoal(*WIRE, "3", "-s", strategy).stdout.splitlines()
    assert lines[1].startswith("175 billion parameters: 698 GB of gradients a replica (4 bytes")
    found = [" ".join(line.split()) for line in lines[5:-1]]
    assert [one[: len(word)] for one, word in zip(found, words, strict=True)] == words
    assert max(map(len, lines)) <= 80 and lines[2].startswith("  ")


def test_the_time_on_the_wire_has_a_row_for_each_number_and_a_cluster_adds_its_computing() -> None:
    several = document_of(*WIRE, "3,5")["predictions"]
    ring_s = [2 * (n - 1) / n * 174.6e9 * 4 / 25e9 for n in (3, 5)]
    assert [one["wire_s"] for one in several] == pytest.approx(ring_s, rel=0.05)
    assert "forward" in shoal(*WIRE, "3", "--cluster", "dgx-a100").stdout


@pytest.mark.parametrize(
    "option", ["--no-overlap", "--even-stages", "--scatter-sends", "--order=megatron"]
)
def test_predict_takes_how_other_systems_run(option: str) -> None:
    words = ("predict", "gpt-3-1.3b", "-n", "32", "--cluster", "dgx-a100", "--batch", "64")
    words += ("-s", 'ddp + tp(2) + pp(8, schedule="interleaved", chunks=2)')
    assert document_of(*words, option)["step_s"] != document_of(*words)["step_s"]


def test_the_first_of_a_plan_can_be_predicted() -> None:
    planned = document_of("plan", *SMALL, "-n", "8", "--batch", "16")["ranked"][0]
    words = ("predict", *SMALL, "-n", "8", "--batch", "16", "-s", planned["strategy"])
    assert document_of(*words, *planned["options"].split())["step_s"] == planned["step_s"]


FAILING = (*SMALL, "-n", "32", "--batch", "32", "--mtbf", "8h")


def test_a_plan_is_ranked_by_what_failures_leave() -> None:
    ranked = document_of("plan", *FAILING, "--top", "4")["ranked"]
    assert all(0.5 < one["useful"] < 1 for one in ranked)
    first = ranked[0]["goodput"]
    assert [one["name"] for one in first["answers"]] == ["restart", "elastic"]
    assert (first["nodes"], first["failures"]["mtbf_s"]) == (4, 8 * 3600)
    spares = document_of("plan", *FAILING, "--spare", "2", "--top", "1")["ranked"][0]
    assert spares["useful"] > ranked[0]["useful"]


def test_predict_says_what_a_month_costs(tmp_path: Path) -> None:
    file = tmp_path / "priced.toml"
    keys = "mtbf_hours = 100\nrepair_hours = 1\nprice_per_hour = 10\nwatts = 1000"
    file.write_text(f'base = "dgx-a100"\n[node]\n{keys}\n[storage]\nGB_per_s = 5\n')
    words = ("predict", *SMALL[:2], "-n", "32", "--cluster", str(file))
    said = " ".join(shoal(*words).stdout.split())
    for text in (
        "a failure every 1.04 days (4 nodes, each fails every 4.17 days)",
        "a month costs 28,800, of which",
        "a month takes 2,880 kWh, of which",
        "to load at 5 GB/s; repairs take 1 h, 0 nodes to spare",
    ):
        assert text in said
    assert "goodput" in document_of(*words)
    asked = document_of(*words, "--mtbf", "1h", "--spare", "1", "--saves", "sharded")["goodput"]
    assert asked["failures"]["mtbf_s"] == 3600 and asked["failures"]["repair_s"] == 3600
    assert shoal(*words[:-4], "-n", "8,16", *words[-2:]).exit_code == 0  # a row each, without it


def test_a_plan_where_nothing_fits_fails_in_a_sentence() -> None:
    answer = shoal("plan", *SMALL, "-n", "1", "--limit", "300MB")
    assert answer.exit_code == 1
    assert "nothing fits 300 MB on 1 worker: the least is " in answer.stdout.replace("\n", " ")


MODEL = ("--gpt", "layers=4,hidden=512,heads=8,sequence=256", "--batch", "32")


def test_a_plan_hides_communication_says_why_not_and_what_a_token_costs(tmp_path: Path) -> None:
    priced = tmp_path / "priced.toml"
    priced.write_text('base = "dgx-a100"\nname = "priced"\n[node]\nprice_per_hour = 20\n')
    words = ("plan", *SMALL[:2], "--cluster", str(priced), "-n", "16", "--batch", "64")
    words += ("--kernels", "fused")
    shown = shoal(*words, "--hide", "tp", "--why", "tp(2) + pp(8)").stdout
    assert "tp(2) + pp(8): " in shown and "million tokens, at 20 a node and hour" in shown
    found = document_of(*words, "--hide", "tp", "--why", "tp(2) + pp(8)", "--top", "40")
    hidden = [one for one in found["ranked"] if "--hide tp" in one["options"]]
    assert hidden and all("tp(" in one["strategy"] for one in hidden)
    assert "ms is sending between stages over" in found["why"]


def test_slow_and_lost_workers_lengthen_a_step() -> None:
    words = ("predict", *MODEL, "--cluster", "dgx-a100", "-n", "4", "--kernels", "fused")
    even_s, slow_s, fewer_s = (
        document_of(*words, *more)["step_s"] for more in ((), ("--slow", "1:4x"), ("--lost", "3"))
    )
    assert slow_s > even_s and fewer_s > even_s
    both = document_of(*words, "--lost", "1", "--slow", "1:4x")
    assert both["step_s"] == fewer_s and both["workers"] == 3


def shape(text: str) -> list[tuple[bool, str]]:
    """Of each line that is not empty: whether it is indented, and its first word."""
    found = []
    indent = -1
    for line in filter(str.strip, text.splitlines()):
        depth = len(line) - len(line.lstrip())
        if depth == 0 or depth != indent + 2:  # else the line before goes on here
            indent = depth
            found.append((depth > 0, re.sub(r"[\d.%]+", "0", line.split()[0])))
    return found


@pytest.mark.parametrize(("command", "printed"), SAMPLES, ids=[one for one, _ in SAMPLES])
def test_a_sample_of_the_page_has_the_shape_of_the_output(command: str, printed: str) -> None:
    assert len(SAMPLES) == 4
    answer = shoal(*shlex.split(command)[1:])
    assert answer.exit_code == 0 and shape(answer.stdout) == shape(printed)


def test_a_model_that_does_not_fit_is_told_what_helps_and_how_long_its_gradients_travel() -> None:
    words = ("-n", "64", "-s", "tp(8) + pp(8)", "--cluster", "dgx-a100", "gpt-3")
    said = " ".join(shoal("predict", *words).stdout.split())
    assert "27.9 s on the wire of one InfiniBand HDR" in said
    assert "--recompute full or --microbatch 1 keeps fewer; shoal plan finds what fits" in said


def test_what_was_taken_for_granted_is_said() -> None:
    here = this_machine().devices
    said = document_of("predict", "-n", str(2 * here), "-s", "ddp", "gpt-2")["notes"]
    assert any(f"--batch was not given: {32 * here} follows from -n" in note for note in said)
    assert any(f"this machine has room for {counted(here, 'worker')}" in note for note in said)
    asked = document_of("predict", "-n", "1", "--batch", "8", "gpt-2")["notes"]
    assert not any("--batch" in note or "room for" in note for note in asked)
    assert any("follows from -n" in note for note in document_of("plan", *SMALL)["notes"])


OWN = """
import torch, shoal
from torch import nn

def train(job):
    models = [nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 3)) for _ in range(MODELS)]
    for model in models:
        net, optimizer = job.setup(model, torch.optim.AdamW(model.parameters()))
    for x, y in job.batches(torch.utils.data.TensorDataset(*[torch.randn(40, 8)] * 2), 20):
        job.backward(nn.functional.cross_entropy(net(x), y[:, :3].softmax(1)))
        optimizer.step()

shoal.run(train)
"""


def test_the_model_of_an_own_loop_is_traced_where_there_is_one(tmp_path: Path) -> None:
    for models, said in ((1, "batch 20: "), (2, "the script trains 2 models in a loop of its own")):
        (tmp_path / "own.py").write_text(OWN.replace("MODELS", str(models)))
        words = ("-n", "2", "-s", "ddp", "--cluster", "laptop", "own.py")
        done = scripts.shoal("predict", *words, cwd=tmp_path)
        assert said in " ".join((done.stdout + done.stderr).split())
        assert models > 1 or "771 parameters" in done.stdout
