"""What PyTorch runs of a transformer: held against GPT-2 on an H200, torch 2.11, bf16 autocast.

The preset was measured by `shoal cluster calibrate`; no row here had a part in it. A row: model,
samples, positions, eager or compiled, measured milliseconds of a step and GB at most.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from shoal.cluster.presets import load_cluster
from shoal.cluster.program import PYTORCH, ModelProgram
from shoal.cluster.toml_file import cluster_text, parse_cluster
from shoal.commands.subject import SubjectOptions, program_on
from shoal.errors import BadInput
from shoal.plan.predict import PlanSettings, predict
from shoal.plan.prediction import Prediction
from shoal.plan.workloads import Split
from shoal.plan.workloads.model_presets import named_workload
from shoal.plan.workloads.transformer_block import TransformerSizes, block_cost

H200 = load_cluster("h200")
MEASURED = """\
gpt-2        | 24 | 1024 | eager    | 102.45 | 22.47
gpt-2        | 6  | 2048 | eager    | 56.80  | 12.08
gpt-2-medium | 12 | 1024 | eager    | 108.60 | 22.11
gpt-2-large  | 6  | 1024 | eager    | 112.86 | 24.32
gpt-2-xl     | 4  | 1024 | eager    | 151.30 | 35.77
gpt-2        | 12 | 1024 | compiled | 29.45  | 8.39
gpt-2-medium | 12 | 1024 | compiled | 72.71  | 18.44
gpt-2-xl     | 6  | 1024 | compiled | 164.08 | 40.61
"""


def priced(
    model: str, batch: int, program: ModelProgram = PYTORCH, recompute: str = "none"
) -> Prediction:
    workload = named_workload(model, program=program)
    assert workload is not None
    settings = PlanSettings(batch, recompute=recompute, program=program)
    return predict(workload, H200, "single", 1, settings)


@pytest.mark.parametrize("row", MEASURED.splitlines())
def test_gpt_2_on_an_h200_is_predicted_within_8_percent_of_time_and_5_of_memory(row: str) -> None:
    model, batch, sequence, kernels, milliseconds, size_gb = (
        cell.strip() for cell in row.split("|")
    )
    program = PYTORCH._replace(kernels=kernels)
    found = priced(f"{model},sequence={sequence}", int(batch), program)
    assert 1e3 * found.step_s == pytest.approx(float(milliseconds), rel=0.08)
    assert found.memory.total / 1e9 == pytest.approx(float(size_gb), rel=0.05)


def test_a_vocabulary_that_is_no_multiple_of_8_takes_products_four_times_slower() -> None:
    odd, even = (priced(f"gpt-2,vocab={vocab}", 16).step_s for vocab in (50257, 50304))
    assert odd > 1.4 * even  # the head has a third of the operations
    device = H200.device
    assert device.product_share(8192, 50304, 768) > 4 * device.product_share(8192, 50257, 768)


def test_each_attention_kernel_has_its_own_price() -> None:
    kernels = ("flash3", "sdpa", "flash2", "efficient")
    times = [
        priced("gpt-2,sequence=8192", 2, PYTORCH._replace(attention=kernel)).step_s
        for kernel in kernels
    ]
    assert times == sorted(times)


def test_logits_in_fp32_take_memory_and_logits_in_chunks_take_none() -> None:
    losses = ("chunked", "autocast", "fp32")
    sizes = [priced("gpt-2", 16, PYTORCH._replace(loss=loss)).memory.total for loss in losses]
    table = 16 * 1024 * 50257
    assert sizes[1] - sizes[0] == pytest.approx(10 * table)
    assert sizes[2] - sizes[1] == pytest.approx(4 * table)


def test_a_foreach_update_takes_three_times_as_long_as_a_fused_one() -> None:
    foreach, fused = (
        next(p.seconds for p in priced("gpt-2", 8, one).parts if p.name == "update")
        for one in (PYTORCH, PYTORCH._replace(update="fused"))
    )
    assert 2 < foreach / fused < 4


def test_operations_that_are_recomputed_are_not_kept() -> None:
    sizes = TransformerSizes(2, 512, 8, vocab=1000, sequence=128, dropout=False)
    plain, less = (
        block_cost(sizes, 2, Split(4, flash_attention=True, recompute=way, program=PYTORCH), 4)
        for way in ("none", "norm,activation")
    )
    tokens = 4 * 128
    assert plain.activation_bytes - less.activation_bytes == 2 * tokens * (2 * 512 + 2048)
    assert {kernel.name for kernel in less.recompute} == {"native_layer_norm", "to_copy", "gelu"}


def test_half_of_the_power_leaves_three_quarters_of_the_clock() -> None:
    limited = replace(H200.device, power_limit_watts=350)
    assert limited.flops_of("bf16") / H200.device.flops_of("bf16") == pytest.approx(0.76, abs=0.01)


def test_a_limit_of_power_needs_a_cluster_that_says_its_watts() -> None:
    asked = SubjectOptions("gpt-2", power_limit=350, cluster="dgx-a100")
    device = asked.hardware(1).device
    assert device.flops_of("bf16") == pytest.approx((350 / 400) ** 0.4 * 312e12, rel=0.01)
    with pytest.raises(BadInput, match="laptop does not say its watts"):
        replace(asked, cluster="laptop").hardware(1)


def test_a_cluster_file_says_what_its_programs_run_and_options_come_first() -> None:
    text = cluster_text(replace(H200, program={"kernels": "compiled", "attention": "flash3"}))
    cluster = parse_cluster(text, "h.toml", "h")
    assert program_on(cluster, {}) == PYTORCH._replace(kernels="compiled", attention="flash3")
    assert program_on(cluster, {"attention": "math"}).attention == "math"
    assert program_on(H200, {}) == PYTORCH
    assert cluster_text(cluster) == text
