"""Predictions with presets as they are, against runs that papers describe; nothing is fitted."""

from __future__ import annotations

import re
from statistics import fmean, median

import pytest

from benchmarks.validation.compare import MEGATRON, validate
from benchmarks.validation.published import GPT, MODELS, published_tables
from shoal.cluster.presets import load_cluster
from shoal.errors import BadInput
from shoal.plan.predict import PlanSettings, Predictor
from shoal.plan.prediction import DeviceMemory
from shoal.plan.workloads import Recompute, parameters_of
from shoal.plan.workloads.model_presets import PRESETS, is_transformer, transformer_named
from shoal.plan.workloads.transformer_block import Transformer, TransformerSizes
from shoal.strategy.strategy import as_strategy

# the median error of every table is below this, with presets as they are
MOST, NARROWER = 0.1, {"sc21 table 1": 0.03, "ptd": 0.03, "korthikanti": 0.05, "megascale": 0.05}
NARROWER["megascale own"] = 0.05
PUBLISHED = {table.name: table for table in published_tables()}


def errors_of(table: str) -> list[float]:
    one = PUBLISHED[table]
    return [row.error for row in validate(one.rows, load_cluster(one.cluster), one.runs_as).rows]


@pytest.mark.parametrize("table", PUBLISHED)
def test_median_error_of_a_published_table(table: str) -> None:
    assert median(map(abs, errors_of(table))) < NARROWER.get(table, MOST)


def test_zero_3_is_bound_by_one_nic_of_a_node() -> None:
    """On 768 GPUs and more; on fewer it computes."""
    errors = errors_of("zero-3")
    assert max(map(abs, errors)) < 0.25


def test_zero_3_of_shoal_gathers_over_all_nics_of_a_node() -> None:
    predictor = Predictor(transformer_named("llama-2-7b"), load_cluster("dgx-a100").of_size(64))
    parts = predictor.predict(as_strategy("zero(3)"), 64, PlanSettings(1024)).parts
    (bound,) = [part.bound for part in parts if part.name == "weights"]
    assert "Tb/s" in bound and "one InfiniBand" not in bound


def test_deepseek_v3_takes_about_what_its_report_says() -> None:
    """180,000 hours of an H800 a trillion tokens: 19.9 s a step of 15,360 samples on 2,048."""
    model = transformer_named("deepseek-v3,precision=fp8")
    strategy = as_strategy('zero + ep(64) + pp(16, schedule="zb-h1", microbatches=120)')
    asked = PlanSettings(15360, recompute="selective", hide=("ep", "pp"))
    found = Predictor(model, load_cluster("h800").of_size(2048)).predict(strategy, 2048, asked)
    assert found.step_s == pytest.approx(19.9, rel=0.2)


def test_zero_3_is_not_before_a_pipeline_on_many_nodes() -> None:
    predictor = Predictor(transformer_named("gpt-3"), load_cluster("dgx-a100").of_size(1024))
    sharded, split = (
        predictor.predict(
            as_strategy(text), 1024, PlanSettings(1536, 1, "full", zero3_of="deepspeed")
        )
        for text in ("zero(3)", "ddp + tp(8) + pp(8)")
    )
    assert split.step_s < 0.7 * sharded.step_s
    assert any("one InfiniBand HDR a node" in part.bound for part in sharded.parts)


# the same, figures 1 and 7, in GiB: parameters with optimizer, activations without recompute,
# activations with sequence parallelism and selective recompute; with the sizes of each model,
# stages, chunks, workers, batch and micro-batch
KORTHIKANTI_MEMORY = {
    22: ((45.5625, 59.25, 9.5625), TransformerSizes(48, 6144, 64), 1, 1, 8, 4, 4),
    175: ((45.5625, 66.84375, 12.3515625), GPT, 8, 3, 64, 64, 1),
    530: ((31.640625, 114.0234375, 23.076171875), MODELS["530B"], 35, 3, 280, 280, 1),
    1000: ((32.958984375, 131.25, 26.5625), TransformerSizes(128, 25600, 160), 64, 1, 512, 512, 1),
}
GIB = 2**30


def memory_of(model: int, recompute: Recompute, sequence_parallel: bool) -> DeviceMemory:
    _, sizes, stages, chunks, workers, batch, microbatch = KORTHIKANTI_MEMORY[model]
    tp = "tp(8, sequence=True)" if sequence_parallel else "tp(8)"
    shape = f', schedule="interleaved", chunks={chunks}' if chunks > 1 else ""
    strategy = as_strategy(tp if stages == 1 else f"{tp} + pp({stages}{shape})")
    predictor = Predictor(
        Transformer("gpt", sizes, MEGATRON), load_cluster("dgx-a100").of_size(workers)
    )
    settings = PlanSettings(batch, microbatch, recompute, False, even_stages=True)
    return predictor.predict(strategy, workers, settings).memory


@pytest.mark.parametrize("model", KORTHIKANTI_MEMORY)
def test_activations_are_those_of_korthikanti(model: int) -> None:
    _, whole, little = KORTHIKANTI_MEMORY[model][0]
    assert memory_of(model, "none", False).activations / GIB == pytest.approx(whole, rel=0.05)
    assert memory_of(model, "selective", True).activations / GIB == pytest.approx(little, rel=0.05)


def test_weights_and_optimizer_are_18_bytes_a_parameter() -> None:
    """The figures leave out embeddings, which the fullest device has."""
    errors = []
    for model, ((weights, _, activations), sizes, stages, *_) in KORTHIKANTI_MEMORY.items():
        memory = memory_of(model, "selective", True)
        held = memory.parameters + memory.gradients + memory.optimizer
        errors.append((held + memory.activations) / GIB / (weights + activations) - 1)
        embedding = (sizes.vocab / 8 + sizes.sequence) * sizes.hidden
        assert (held - 18 * embedding) / GIB == pytest.approx(weights, rel=0.01), stages
    assert fmean(map(abs, errors)) < 0.05


# GPT-2: sizes of the released weights; GPT-3: table 2.1 of its paper, 174.6 billion in its
# appendix D; BERT without its pooler; others: the number of weights of the published checkpoints
PARAMETERS = """\
gpt-2 124.44e6          gpt-2-xl 1557.6e6       gpt-3 174.6e9           GPT_3-175B 174.6e9
gpt-3-13b 12.85e9       llama-2-7b 6.738e9      llama-2-13b 13.016e9    llama-2-70b 68.98e9
deepseek-v3 671.03e9    gpt-oss-20b 20.91e9     gpt-oss-120b 116.8e9    qwen-3-30b-a3b 30.53e9
qwen3-235b-a22b 235.09e9
llama-3-8b 8.030e9      llama3-70b 70.554e9     llama-3.1-405b 405.85e9 llama-3-405b 405.85e9
llama-3.2-1b 1.236e9    llama-3.2-3b 3.213e9    mistral-7b 7.242e9      mistral-large 122.61e9
mixtral-8x7b 46.70e9    mixtral-8x22b 140.6e9   qwen-2.5-0.5b 494e6     qwen-2.5-7b 7.616e9
qwen2.5-72b 72.706e9    bert-large 334.09e6     vit-l 304.33e6          vit-h 632.05e6
"""


@pytest.mark.parametrize(("name", "number"), re.findall(r"(\S+) (\S+)", PARAMETERS))
def test_a_model_has_its_published_number_of_parameters(name: str, number: str) -> None:
    assert parameters_of(transformer_named(name)) == pytest.approx(float(number), rel=0.003)


def test_sizes_give_the_same_as_the_name_which_can_be_changed() -> None:
    sizes = "layers=96, hidden=12288, heads=96, vocab=50257, sequence=2048"
    assert transformer_named(sizes).sizes == transformer_named("gpt-3").sizes
    assert transformer_named("layers=2,hidden=8,heads=2,tied=no").sizes.tied is False
    model = transformer_named("llama-3-70b,seq=4096,precision=fp16")
    assert (model.sizes.sequence, model.precision.compute) == (4096, "fp16")
    assert transformer_named("llama-3-70b").precision.compute == "bf16"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("gpt-33", "there is no transformer 'gpt-33'; did you mean 'gpt-3'"),
        ("train.py", "there is no transformer 'train.py'; known are gpt-2, "),
        ("layers=96,hidden=12288", "lack heads"),
        ("layers=96,hidden", "'hidden' of 'layers=96,hidden' is not key=value, such as layers=96"),
        ("layers=x,hidden=8,heads=2", "layers=x of .* is not a whole number above 0"),
        ("layers=2,hidden=10,heads=4", "heads=4 must divide hidden=10"),
        ("layers=2,layers=3", "says layers twice"),
        ("gpt-3,hiden=5", "a transformer has no 'hiden' .*; did you mean 'hidden'"),
        ("gpt-3,gated=maybe", "gated=maybe of 'gpt-3,gated=maybe' is none of true, yes, 1"),
        ("gpt-3,precision=fp7", "precision=fp7 of .* is none of fp16, bf16, fp8, fp32, tf32"),
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
