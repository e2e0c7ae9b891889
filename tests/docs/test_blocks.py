"""Every code block of README and docs runs, or, where it needs other machines, is understood."""

from __future__ import annotations

import re
import shlex
import textwrap
from pathlib import Path
from typing import Any

import pytest
import typer.main

from shoal.commands.cli import COMMANDS, build_app
from shoal.strategy.strategy import parse
from tests.docs import pages
from tests.docs.pages import Block, blocks, lines

# what a test cannot do here; options of Shoal's commands among these are read all the same
ELSEWHERE = {
    r"sudo |node\d\$ |ssh |scp |torchrun ": "root, or other hosts",
    r"pip |make ": "installs",
    r".*(--on ray|etcd:|shoal submit)": "an engine, a cluster or a queue",
    r".*--elastic 2:8(?! -n)|.*-n 8 --cluster rack": "many workers",
    r"shoal rehearse gpt": "minutes",
    r"python -m (benchmarks rehears|tests\.rehearse)": "a lab, or many minutes",
    r"shoal (lab|join)": "a lab or a run",
}
COMMAND = re.compile(r"(sudo |node\d\$ |\w+=\S+ )*(shoal|python|torchrun|pip|make|ssh|scp) (?!:)")
# examples that only have the part which the page is about
AROUND = """
import os, socket, sys
from functools import partial
from pathlib import Path
import safetensors.torch, torch, shoal
from torch import nn
PAD = -1
torch.manual_seed(0)
Net = lambda: nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
model = Net()
net = Net()
loss = criterion = nn.functional.cross_entropy
adamw = partial(torch.optim.AdamW, lr=1e-3)
inputs = torch.randn(8, 6)
accuracy = lambda outputs, targets: (outputs.argmax(1) == targets).float().mean()
dataset = torch.utils.data.TensorDataset(torch.randn(96, 6), torch.randint(0, 3, (96,)))
train_set = test_set = dataset
if ALONE:
    with socket.create_server(("localhost", 0)) as free:
        port = str(free.getsockname()[1])
    os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="localhost", MASTER_PORT=port)
"""
COORDINATOR = """
import shoal.server.coordinator.client as client
from tests.server.coordinator.helpers import LocalCoordinator
value = b"0"
local = LocalCoordinator()
local.put_if("chain/0", value, 0)
client.open_coordinator = lambda *_, **__: local
"""
TRAINER = """
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments
sizes = dict(vocab_size=16, hidden_size=8, num_hidden_layers=1, num_attention_heads=2)
model = BertForSequenceClassification(BertConfig(**sizes, intermediate_size=8))
dataset = [{"input_ids": [1, 2, 3], "labels": i % 2} for i in range(16)]
args = TrainingArguments("out", save_strategy="no", max_steps=2, report_to=[], use_cpu=True)
"""
SAVED = """
shoal.run(lambda job: (job.step(model, loss, optimizer=adamw), job.save("model")))
"""


def program(block: Block) -> str:
    """The block as a script, with what it leaves to the reader around it."""
    text = block.text
    before = AROUND.replace("ALONE", str("init_process_group" in text))
    before += COORDINATOR if "open_coordinator" in text else ""
    before += TRAINER if "Trainer(" in text else ""
    before += SAVED if "load_file" in text else ""
    if "shoal.run(train, " in text:
        before += "def train(job):\n"
        before += "    step = job.step(Net(), loss, optimizer=adamw)\n"
        before += "    for batch in job.batches(dataset, batch_size=32): step(batch)\n"
        return before + "if __name__ == '__main__':\n" + textwrap.indent(text, "    ")
    if "def train(job)" in text:
        return before + text + "\nif __name__ == '__main__':\n    shoal.run(train)\n"
    if "job." in text:
        body = "    global model, loss\n" + textwrap.indent(text, "    ")
        return f"{before}\ndef body(job):\n{body}\nshoal.run(body)\n"
    return before + text


def elsewhere(command: str) -> bool:
    return any(re.match(pattern, command) for pattern in ELSEWHERE)


def test_commands_stand_in_blocks_of_their_own_kind() -> None:
    wrong = [
        str(b) for b in blocks("", "text") for line in b.text.splitlines() if COMMAND.match(line)
    ]
    assert wrong == []
    assert pages.languages() <= {"", "text", "sh", "console", "python", "toml"}


@pytest.mark.parametrize("block", blocks("python"), ids=str)
def test_python_compiles(block: Block) -> None:
    compile(program(block), str(block), "exec")


def test_strategies_that_a_block_lists_are_known() -> None:
    listed = [b for b in blocks("") if b.page.name in ("strategies.md", "splitting.md")]
    texts = [text for block in listed for text in re.split(r"\s{3,}|\n", block.text) if text]
    assert len(texts) >= 9 and all(parse(text) for text in texts)


@pytest.mark.parametrize("block", blocks("sh", "console"), ids=str)
def test_commands_of_shoal_are_understood(
    block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of those that need root or other hosts; those of no process run."""
    pages.lay_out(tmp_path, block.page)
    monkeypatch.chdir(tmp_path)
    for line in lines(block):
        if pages.QUICK.match(line) and ".toml" not in line:
            assert pages.run_here(line).exit_code == 0, line
        elif found := re.search(r"(?:^|\s)shoal ([^&]*)", line):
            understand(shlex.split(found[1]))


def understand(words: list[str]) -> None:
    assert words[0] in COMMANDS, words
    command: Any = typer.main.get_command(build_app([words[0]]))
    while getattr(command, "commands", None) and words and words[0] in command.commands:
        command = command.commands[words.pop(0)]
    command.make_context("shoal", words)  # raises a usage error


RUN = [block for block in blocks("sh", "console") if not all(map(elsewhere, lines(block)))]


@pytest.mark.whole
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("block", RUN, ids=str)
def test_commands_run(block: Block, tmp_path: Path) -> None:
    pages.lay_out(tmp_path, block.page)
    for line in lines(block):
        if elsewhere(line) or (pages.QUICK.match(line) and ".toml" not in line):
            continue
        done = pages.run(line, tmp_path)
        refused = f"$ {line}\nshoal: " in block.text
        assert done.returncode == (1 if refused else 0), f"{line}\n{done.stdout}\n{done.stderr}"


@pytest.mark.whole
@pytest.mark.timeout(900)
@pytest.mark.parametrize("block", blocks("python"), ids=str)
def test_python_runs(block: Block, tmp_path: Path) -> None:
    if "Trainer(" in block.text:
        pytest.importorskip("transformers")
    if "61036" in block.text or "100_000" in block.text:
        pytest.skip("16 GB: `shoal memory` reads it in tests/commands")
    (tmp_path / "block.py").write_text(program(block), "utf-8")
    done = pages.run("python block.py", tmp_path)
    assert done.returncode == 0, done.stderr
