"""Every compressor by the text of `compress="…"`."""

from __future__ import annotations

from collections.abc import Sequence

from shoal.compress.compressor import Compressor
from shoal.compress.half import Bf16, Fp16
from shoal.compress.int8 import Int8
from shoal.compress.onebit import OneBit
from shoal.compress.powersgd import PowerSgd
from shoal.compress.topk import TopK
from shoal.strategy.settings import read_setting


def make_compressor(
    text: str, shapes: Sequence[tuple[int, Sequence[int]]], numel: int
) -> Compressor:
    """The compressor of flat tensors of `numel` elements.

    `shapes` are the parameters in them: where each begins, and its shape.
    """
    name, settings = read_setting(text)
    match name:
        case "fp16":
            return Fp16()
        case "bf16":
            return Bf16()
        case "int8":
            return Int8()
        case "onebit":
            return OneBit()
        case "topk":
            return TopK(settings[""])
    return PowerSgd(int(settings["rank"]), shapes, numel)
