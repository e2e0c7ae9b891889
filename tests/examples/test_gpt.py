"""The gpt example: its text, its windows, its model, its update, and a short run."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from shoal.commands.examples import gpt
from shoal.commands.examples.gpt import GPT, SIZES, Size, warm_up_then_cosine
from shoal.errors import BadInput
from shoal.train.checkpoints.files import read_manifest
from tests.examples.test_digits import make_job

MINI = Size(layers=2, width=16, heads=2, context=8, lr=1e-3)
SHORT = gpt.read_options(["--size", "tiny", "--steps", "3"])


def test_the_text_is_a_million_characters_of_python_and_the_same_every_time() -> None:
    text = gpt.library_text()
    assert len(text) == 1_000_000
    assert "import " in text and "\n    def " in text
    assert gpt.library_text() == text
    assert gpt.library_text(1000) == text[:1000]


def test_the_alphabet_is_printable_ascii_and_one_unknown() -> None:
    assert sorted(gpt.ALPHABET) == ["\t", "\n", *map(chr, range(32, 127))]
    assert (gpt.UNKNOWN, gpt.VOCABULARY) == (97, 98)
    codes = gpt.encode("a é\n")
    assert codes.tolist() == [gpt.ALPHABET.index("a"), gpt.ALPHABET.index(" "), 97, 1]


def test_windows_follow_each_other_and_targets_are_one_ahead() -> None:
    inputs, targets = gpt.windows(torch.arange(9), context=3).tensors
    assert inputs.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert targets.tolist() == [[1, 2, 3], [4, 5, 6]]
    assert len(gpt.windows(torch.arange(9), context=8)) == 1
    with pytest.raises(BadInput, match="a context of 9 is too long for 9 tokens"):
        gpt.windows(torch.arange(9), context=9)


def test_the_last_5_percent_are_held_out() -> None:
    train, held_out = gpt.load_windows(context=64)
    assert len(train) == (950_000 - 1) // 64
    assert len(held_out) == (50_000 - 1) // 64
    tokens = gpt.encode(gpt.library_text())
    assert torch.equal(held_out[0][0], tokens[950_000:950_064])


def test_sizes_go_from_a_hundred_thousand_parameters_to_those_of_gpt2() -> None:
    with torch.device("meta"):
        models = {name: GPT(size) for name, size in SIZES.items()}
    assert {name: sum(p.numel() for p in m.parameters()) for name, m in models.items()} == {
        "tiny": 108_416,
        "small": 239_424,
        "medium": 25_401_344,
        "large": 128_444_928,
    }


@pytest.mark.parametrize("changed", [1, 4, 7])
def test_a_later_token_does_not_change_earlier_logits(changed: int) -> None:
    model = GPT(MINI)
    tokens = torch.randint(0, 97, (2, 8))
    other = tokens.clone()
    other[:, changed] = 97
    before = model(tokens)
    after = model(other)
    assert torch.equal(before[:, :changed], after[:, :changed])
    assert not torch.isclose(before[:, changed:], after[:, changed:]).all(-1).any()


def test_the_head_is_the_embedding() -> None:
    model = GPT(MINI)
    assert model(torch.zeros(3, 5, dtype=torch.long)).shape == (3, 5, 98)
    assert not any("head" in name for name, _ in model.named_parameters())
    model(torch.zeros(1, 8, dtype=torch.long))[..., 50].sum().backward()
    gradient = model.tokens.weight.grad
    assert gradient is not None and gradient[50].abs().sum() > 0  # token 50 is no input


def test_matrices_decay_and_vectors_do_not() -> None:
    model = GPT(MINI)
    decayed, spared = gpt.adamw(model.named_parameters(), lr=1e-3).param_groups
    assert (decayed["weight_decay"], spared["weight_decay"]) == (0.1, 0.0)
    assert all(p.dim() == 2 for p in decayed["params"])
    assert all(p.dim() == 1 for p in spared["params"])
    assert all(n.endswith("bias") or "norm" in n for n in spared["param_names"])
    assert len(decayed["params"]) + len(spared["params"]) == len(list(model.parameters()))


def test_the_rate_rises_to_its_peak_and_falls_to_a_tenth() -> None:
    rates = [warm_up_then_cosine(step, peak=1.0, num_steps=1000) for step in range(1001)]
    assert rates[:3] == pytest.approx([0.02, 0.04, 0.06])
    assert rates[49] == 1.0 and max(rates) == 1.0
    assert rates[50:] == sorted(rates[50:], reverse=True)
    assert rates[525] == pytest.approx(0.55)
    assert rates[1000] == pytest.approx(0.1)


def test_context_and_rate_are_those_of_the_size_unless_given() -> None:
    usual = gpt.read_options([])
    assert (usual.size, usual.context, usual.lr) == ("small", 64, 4e-3)
    given = gpt.read_options(["--size", "large", "--context", "128", "--lr", "0.1"])
    assert (given.size, given.context, given.lr) == ("large", 128, 0.1)


def test_a_saved_model_is_tested_with_its_own_size_and_context(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = gpt.library_text(20_000)
    monkeypatch.setattr(gpt, "library_text", lambda: text)
    options = SHORT.but(context=16, out=str(tmp_path), dropout=0.1)
    gpt.train(make_job(), options)
    shown = capsys.readouterr().out
    about = read_manifest(tmp_path)["about"]
    assert about["example"] == "gpt" and about["options"]["context"] == 16
    found = gpt.evaluate(make_job(seed=1), str(tmp_path), about)
    assert found["loss"] < math.log(98)
    assert found["perplexity"] == pytest.approx(math.exp(found["loss"]))
    assert f"held-out loss {found['loss']:.4f}, perplexity {found['perplexity']:.3f}" in shown
