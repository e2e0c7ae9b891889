"""Compressors: how many bytes, what comes back, and what is refused."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shoal.comm.compress import BLOCK, Compressor, OneBit, PowerSgd, TopK, make_compressor
from shoal.errors import ShoalError

FLAT = ["fp16", "bf16", "int8", "int4", "onebit", "topk(0.01)", "topk(1)"]
SIZES = st.sampled_from([1, 7, 8, 255, 256, 257, 511, 512, 513, 2000])
SCALES = st.sampled_from([0.0, 1e-30, 1e-3, 1.0, 1e4, 1e30])


def make(text: str, numel: int = 0) -> Compressor:
    return make_compressor(text, [], numel)


def numbers(numel: int, scale: float = 1.0, seed: int = 0) -> Tensor:
    """Sizes spread over three orders of magnitude."""
    generator = torch.Generator().manual_seed(seed)
    spread = 10 ** (3 * torch.rand(numel, generator=generator))
    return torch.randn(numel, generator=generator) * spread * scale


def there_and_back(text: str, x: Tensor) -> Tensor:
    compressor = make(text, x.numel())
    payload = compressor.pack(x)
    assert payload.dtype == torch.uint8
    assert payload.shape == (compressor.num_bytes(x.numel()),)
    assert payload.numel() % 4 == 0
    found = compressor.unpack(payload, x.numel())
    assert found.shape == x.shape and found.dtype == torch.float32
    return found


@given(SIZES, SCALES, st.integers(0, 99))
@settings(deadline=None)
def test_half_precision_keeps_8_and_11_bits(numel: int, scale: float, seed: int) -> None:
    x = numbers(numel, scale, seed)
    assert ((there_and_back("bf16", x) - x).abs() <= x.abs() * 2**-8).all()
    tiny = x.abs().max() * 2**-39  # the smallest steps of fp16 below its largest number
    assert ((there_and_back("fp16", x) - x).abs() <= x.abs() * 2**-11 + tiny).all()


@given(SIZES, SCALES, st.integers(0, 99))
@settings(deadline=None)
def test_integers_are_off_by_half_a_step_of_their_chunk(
    numel: int, scale: float, seed: int
) -> None:
    """The scale of int4 is a bf16, which is off by up to 1/256."""
    x = numbers(numel, scale, seed)
    for text, size, steps, scale_error in (("int8", 256, 254, 1.001), ("int4", 64, 14, 1.06)):
        off = (there_and_back(text, x) - x).abs()
        for chunk, error in zip(x.split(size), off.split(size), strict=True):
            assert error.max() <= chunk.abs().max() / steps * scale_error


def test_int4_has_two_numbers_in_a_byte() -> None:
    x = torch.tensor([-7.0, 7, 0, 3, -1])
    assert make("int4").pack(x).tolist() == [0x80, 0x3F, 0xF1, 0xB8, 0x07, 0, 0, 0]
    assert torch.equal(there_and_back("int4", x), x)


@given(SIZES, st.integers(0, 99))
@settings(deadline=None)
def test_onebit_always_comes_nearer(numel: int, seed: int) -> None:
    x = numbers(numel, seed=seed)
    assert (there_and_back("onebit", x) - x).norm() < x.norm()


def test_onebit_loses_36_percent_of_the_square_whatever_the_shape() -> None:
    """1 - 2/pi of it, of a bell curve as of few large elements among small ones."""
    bell = torch.randn(64 * 512, generator=torch.Generator().manual_seed(0))
    few = bell.clone()
    few[::20] *= 100
    for x in (bell, few):
        lost = (there_and_back("onebit", x) - x).norm() ** 2 / x.norm() ** 2
        assert float(lost) == pytest.approx(1 - 2 / math.pi, abs=0.02)


@given(SIZES | st.just(2 * BLOCK + 1000), st.sampled_from([0.01, 0.001]), st.integers(0, 99))
@settings(deadline=None)
def test_topk_keeps_the_largest_of_every_block_and_nothing_else(
    numel: int, share: float, seed: int
) -> None:
    x = numbers(numel, seed=seed)
    found = there_and_back(f"topk({share})", x)
    for block, kept in zip(x.split(BLOCK), found.split(BLOCK), strict=True):
        largest = block.abs().topk(math.ceil(share * len(block))).indices
        wanted = torch.zeros(len(block))
        wanted[largest] = block[largest].bfloat16().float()
        assert torch.equal(kept, wanted)


@pytest.mark.parametrize("text", FLAT)
def test_nothing_becomes_nothing_and_bytes_repeat(text: str) -> None:
    assert (there_and_back(text, torch.zeros(700)) == 0).all()
    x = numbers(700)
    assert torch.equal(make(text).pack(x), make(text).pack(x.clone()))


@pytest.mark.parametrize("text", [*FLAT, "powersgd(rank=1)"])
def test_a_message_of_another_length_is_refused(text: str) -> None:
    compressor = make_compressor(text, [(0, (20, 30))], 600)
    payload = compressor.pack(numbers(600))
    for wrong in (payload[:-4], torch.cat([payload, payload[:4]]), payload.float()):
        with pytest.raises(ShoalError, match="expected a compressed tensor of"):
            compressor.unpack(wrong, 600)


@pytest.mark.parametrize("numel", [100, BLOCK + 100])
@pytest.mark.parametrize("index", [100, 101, BLOCK - 1])
def test_an_element_that_is_not_there_is_refused(index: int, numel: int) -> None:
    """Every 16 bits are an element of a whole block; the rest has fewer."""
    topk = TopK(0.02)
    payload = topk.pack(numbers(numel))
    last = 2 * (topk.count(numel) - 1)
    payload[last : last + 2] = torch.tensor([index - BLOCK // 2]).short().view(torch.uint8)
    with pytest.raises(ShoalError, match=f"outside of {numel}"):
        topk.unpack(payload, numel)


def test_onebit_rotates_differently_for_every_tensor() -> None:
    seeds = {int(OneBit().pack(numbers(600, seed=s))[:4].view(torch.int32)) for s in range(20)}
    assert len(seeds) == 20


# ------------------------------------------------------------------------------ powersgd

SHAPES = [(0, (40, 30)), (1200, (30,)), (1232, (8, 5, 5))]  # a gap of 2 before the last


def test_powersgd_sends_r_times_n_plus_m_and_the_rest_as_it_is() -> None:
    compressor = PowerSgd(4, SHAPES, 1440)
    assert compressor.num_bytes(1440) == 4 * (4 * (40 + 30) + 30 + 4 * (8 + 25))
    assert [(m.rows, m.columns) for m in compressor.matrices] == [(40, 30), (8, 25)]


def test_a_matrix_that_would_not_get_smaller_is_left_as_it_is() -> None:
    compressor = PowerSgd(4, [(0, (8, 8)), (64, (100, 1))], 164)  # 4·(8 + 8) = 64
    assert compressor.matrices == []
    x = numbers(164)
    assert torch.equal(compressor.unpack(compressor.pack(x), 164), x)


def test_from_step_to_step_powersgd_finds_the_largest_directions() -> None:
    """Of a matrix that stays, the error becomes that of the best matrix of this rank."""
    matrix = numbers(1200).view(40, 30)
    x = torch.cat([matrix.view(-1), torch.full((30,), 7.0), torch.zeros(210)])
    compressor = PowerSgd(4, SHAPES, 1440)
    for _ in range(30):
        found = compressor.unpack(compressor.pack(x), 1440)
    best = torch.linalg.svdvals(matrix)[4:].norm()
    assert float((found - x).norm()) == pytest.approx(float(best), rel=0.02)


def test_a_step_without_gradients_does_not_stop_powersgd() -> None:
    compressor = PowerSgd(4, SHAPES[:1], 1200)
    compressor.pack(torch.zeros(1200))
    x = numbers(1200)
    assert (compressor.unpack(compressor.pack(x), 1200) - x).norm() < 0.95 * x.norm()
