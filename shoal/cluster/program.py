"""What a training program runs, beside the sizes of its model."""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

Kernels = Literal["eager", "compiled", "fused"]
Attention = Literal["sdpa", "flash2", "flash3", "efficient", "cudnn", "math"]
Loss = Literal["autocast", "fp32", "chunked"]
Update = Literal["foreach", "fused"]


class ModelProgram(NamedTuple):
    """`FUSED` is what Megatron-LM runs, `PYTORCH` a plain loop.

    kernels     eager: each operation of PyTorch alone; compiled: as torch.compile fuses them;
                fused: those of Megatron-LM
    attention   the kernel; sdpa is the one that PyTorch chooses, None the one of the cluster's
                factors
    loss        autocast: log_softmax in 16 bits, nll_loss in fp32; fp32: logits.float() before;
                chunked: logits are never whole in memory
    update      of the optimizer, by several kernels or by one
    """

    kernels: Kernels = "fused"
    attention: Attention | None = None
    loss: Loss = "autocast"
    update: Update = "foreach"


FUSED = ModelProgram()
PYTORCH = ModelProgram("eager", "sdpa")
CHOICES: dict[str, tuple[str, ...]] = {
    name: get_args(kind)
    for name, kind in zip(ModelProgram._fields, (Kernels, Attention, Loss, Update), strict=True)
}
