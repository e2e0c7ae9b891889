"""What a tensor knows of itself: shapes are those of the full tensor."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from shoal.replica.context.sequence_shard import SequenceCall, SequenceShard


def _shape(op: SequenceCall) -> Any:
    return op.args[0].full_shape


def _size(op: SequenceCall) -> Any:
    dim = op.argument(1, "dim")
    shape = op.args[0].full_shape
    return shape if dim is None else shape[dim]


def _numel(op: SequenceCall) -> int:
    return math.prod(op.args[0].full_shape)


def _length(op: SequenceCall) -> int:
    return int(op.args[0].full_shape[0])


def _stride(op: SequenceCall) -> Any:
    strides = torch.empty(op.args[0].full_shape, device="meta").stride()
    dim = op.argument(1, "dim")
    return strides if dim is None else strides[dim]


def _of_local(op: SequenceCall) -> Any:
    """The same for some positions as for all of them."""
    args = [arg.local if isinstance(arg, SequenceShard) else arg for arg in op.args]
    return op.function(*args, **op.kwargs)


def _on_itself(op: SequenceCall) -> Any:
    """Hooks and flags belong to this very tensor."""
    return op.function(*op.args, **op.kwargs)


def _alike(op: SequenceCall) -> Any:
    """Another dtype, device or history of the first tensor; a second one is a pattern."""
    first = op.args[0]
    args = [arg.local if isinstance(arg, SequenceShard) else arg for arg in op.args]
    kwargs = {k: v.local if isinstance(v, SequenceShard) else v for k, v in op.kwargs.items()}
    result: Tensor = op.function(*args, **kwargs)
    if not isinstance(first, SequenceShard):
        return result
    made = op.context.wrap(result, first.spec)
    if first.full_value is not None and not first.full_value.requires_grad:
        made.full_value = op.function(first.full_value, *args[1:], **kwargs)
    return made


_SHAPED = {"__get__.shape": _shape, "size": _size, "numel": _numel, "nelement": _numel}
_LOCAL = (
    "dim ndimension is_floating_point is_complex is_signed get_device element_size is_contiguous "
    "is_shared untyped_storage data_ptr is_nested is_sparse is_inference is_conj is_neg "
    "has_names is_same_size _is_view _is_zerotensor __get__.dtype __get__.device __get__.ndim "
    "__get__.requires_grad __get__.is_cuda __get__.is_cpu __get__.is_leaf __get__.layout "
    "__get__.grad_fn __get__._version __get__.is_sparse __get__.is_quantized __get__.is_nested "
    "__get__.is_meta __get__.is_mps __get__.is_xpu __get__.itemsize __get__.names "
    "__get__.retains_grad __get__.output_nr __get__._backward_hooks __get__.is_mkldnn "
    "__get__.is_sparse_csr __get__.is_vulkan __get__.is_xla __get__.is_ipu __get__.is_maia "
    "new_zeros new_ones new_empty new_full new_tensor"
)
_ITSELF = (
    "register_hook register_post_accumulate_grad_hook retain_grad requires_grad_ __hash__ "
    "as_subclass __set__.requires_grad __get__.grad __get__._base"
)
_ALIKE = (
    "to type float half bfloat16 double int long short bool byte cpu cuda type_as contiguous "
    "clone detach alias __get__.data __deepcopy__"
)
RULES = {
    **_SHAPED,
    "__len__": _length,
    "stride": _stride,
    **dict.fromkeys(_LOCAL.split(), _of_local),
    **dict.fromkeys(_ITSELF.split(), _on_itself),
    **dict.fromkeys(_ALIKE.split(), _alike),
}
