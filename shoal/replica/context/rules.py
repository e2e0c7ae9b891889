"""Which operations of torch are computed on the positions that are here, and by which rule."""

from __future__ import annotations

from collections.abc import Callable

from shoal.comm.group import Group
from shoal.replica.context import attention, products, reductions, views
from shoal.replica.context.sequence_shard import SequenceContext, SequenceShard
from shoal.replica.split.sharded_tensor import ELEMENTWISE, METADATA, alike, drawn, on_itself

_ITSELF = (
    "register_hook register_post_accumulate_grad_hook retain_grad requires_grad_ __hash__ "
    "__set__.requires_grad __get__.grad __get__._base"
)
_ALIKE = "int long short bool byte cpu cuda detach alias __get__.data __deepcopy__"
_RANDOM = "rand_like randn_like randint_like bernoulli"

SequenceShard.rules = {
    **METADATA,
    **dict.fromkeys(_ITSELF.split(), on_itself),
    **dict.fromkeys(_ALIKE.split(), alike),
    **ELEMENTWISE,
    **dict.fromkeys(_RANDOM.split(), drawn),
    **views.RULES,
    **reductions.RULES,
    **products.RULES,
    **attention.RULES,
}


def sequence_context(
    group: Group, say: Callable[[str], None] = lambda sentence: None
) -> SequenceContext:
    """The ranks of a group as those that share sequences."""
    return SequenceContext(group, say)
