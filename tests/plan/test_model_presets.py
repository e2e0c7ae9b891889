"""Transformers by name have the parameters that were published for them."""

from __future__ import annotations

import pytest

from shoal.errors import BadInput
from shoal.plan.workloads.model_presets import PRESETS, is_transformer, transformer_named
from shoal.plan.workloads.workload import Split


def parameters(text: str) -> float:
    model = transformer_named(text)
    return sum(run.count * model.cost(i, Split()).parameters for i, run in enumerate(model.runs))


# GPT-2: sizes of the released weights; GPT-3: table 2.1 of its paper, 174.6 billion in its
# appendix D; others: the number of weights of the published checkpoints
@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("gpt-2", 124.44e6),
        ("gpt-2-xl", 1557.6e6),
        ("gpt-3", 174.6e9),
        ("GPT-3 175B", 174.6e9),
        ("gpt-3-13b", 12.85e9),
        ("llama-2-7b", 6.738e9),
        ("llama-2-13b", 13.016e9),
        ("llama-2-70b", 68.98e9),
        ("llama-3-8b", 8.030e9),
        ("llama3-70b", 70.554e9),
        ("llama-3.1-405b", 405.85e9),
        ("mistral-7b", 7.242e9),
        ("mixtral-8x7b", 46.70e9),
        ("mixtral-8x22b", 140.6e9),
        ("llama-3-405b", 405.85e9),
        ("llama-3.2-1b", 1.236e9),
        ("llama-3.2-3b", 3.213e9),
        ("qwen-2.5-0.5b", 494e6),
        ("qwen-2.5-7b", 7.616e9),
        ("qwen2.5-72b", 72.706e9),
        ("mistral-large", 122.61e9),
        ("bert-large", 334.09e6),  # without its pooler
        ("vit-l", 304.33e6),
        ("vit-h", 632.05e6),
    ],
)
def test_a_model_has_its_published_number_of_parameters(name: str, published: float) -> None:
    assert parameters(name) == pytest.approx(published, rel=0.003)


def test_sizes_give_the_same_as_the_name() -> None:
    sizes = "layers=96, hidden=12288, heads=96, vocab=50257, sequence=2048"
    assert transformer_named(sizes).sizes == transformer_named("gpt-3").sizes
    assert transformer_named("layers=2,hidden=8,heads=2,tied=no").sizes.tied is False


def test_a_name_can_be_changed() -> None:
    model = transformer_named("llama-3-70b,seq=4096,precision=fp16")
    assert (model.sizes.sequence, model.precision.compute) == (4096, "fp16")
    assert transformer_named("llama-3-70b").precision.compute == "bf16"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("gpt-33", "there is no transformer 'gpt-33'; did you mean gpt-3?"),
        ("train.py", "there is no transformer 'train.py'; there are gpt-2, "),
        ("layers=96,hidden=12288", "lack heads"),
        ("layers=96,hidden", "'hidden' of 'layers=96,hidden' is not key=value, such as layers=96"),
        ("layers=x,hidden=8,heads=2", "layers=x of .* is not a whole number above 0"),
        ("layers=2,hidden=10,heads=4", "heads=4 must divide hidden=10"),
        ("layers=2,layers=3", "says layers twice"),
        ("gpt-3,hiden=5", "a transformer has no 'hiden' .*; it has hidden"),
        ("gpt-3,gated=maybe", "gated=maybe of 'gpt-3,gated=maybe' is none of true, yes, 1"),
        ("gpt-3,precision=fp7", "precision=fp7 of .* is none of fp16, bf16, fp32, tf32"),
        ("", "there is no transformer ''"),
    ],
)
def test_a_mistake_is_named(text: str, says: str) -> None:
    with pytest.raises(BadInput, match=says):
        transformer_named(text)


def test_scripts_are_no_transformers() -> None:
    assert not is_transformer("train.py") and not is_transformer("gpt")
    assert all(is_transformer(name) for name in PRESETS)
    assert is_transformer("layers=2,hidden=8,heads=2")
