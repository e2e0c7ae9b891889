"""Words of the field that are no names here: what they are called, and what to write."""

from __future__ import annotations

_RING = "a ring all-reduce"
_ASYNC = "asynchronous SGD"
_SYNC = "synchronous SGD"
_STALE = "bounded staleness (SSP)"
_SHARDED = "fully sharded data parallelism"
_REPLICAS = "data parallelism"
_PIPELINE = "pipeline parallelism"
_TENSOR = "tensor parallelism"
_CONTEXT = "context parallelism"
_EXPERTS = "expert parallelism"
_SERVER = "a parameter server"
_LOCAL = "local SGD"
_GOSSIP = "decentralized averaging"

# word: (what it is, what to write)
_SYNONYMS = {
    "ring": (_RING, 'ddp(algorithm="ring")'),
    "ring_allreduce": (_RING, 'ddp(algorithm="ring")'),
    "tree": ("a tree all-reduce", 'ddp(algorithm="tree")'),
    "allreduce": ("an all-reduce of gradients", "ddp"),
    "all_reduce": ("an all-reduce of gradients", "ddp"),
    "dp": (_REPLICAS, "ddp"),
    "data_parallel": (_REPLICAS, "ddp"),
    "horovod": ("Horovod's all-reduce", "ddp"),
    "nccl": ("an all-reduce of gradients", "ddp"),
    "gloo": ("an all-reduce of gradients", "ddp"),
    "fsdp": (_SHARDED, "zero(3)"),
    "fsdp2": (_SHARDED, "zero(3)"),
    "fully_shard": (_SHARDED, "zero(3)"),
    "deepspeed": ("DeepSpeed's sharding", "zero(1), zero(2) or zero(3)"),
    "zero1": ("sharded optimizer state", "zero(1)"),
    "zero2": ("sharded optimizer state and gradients", "zero(2)"),
    "zero3": (_SHARDED, "zero(3)"),
    "ssgd": (_SYNC + " on " + _SERVER, "ps"),
    "bsp": ("bulk synchronous training", "ddp, or ps with a server"),
    "sgd": (_SYNC, "ddp, or ps with a server"),
    "asgd": (_ASYNC, 'ps(mode="async")'),
    "asp": (_ASYNC, 'ps(mode="async")'),
    "downpour": (_ASYNC, 'ps(mode="async")'),
    "ssp": (_STALE, "ps(staleness=4)"),
    "stale": (_STALE, "ps(staleness=4)"),
    "quorum": ("a quorum of workers", "ps(quorum=0.75)"),
    "backup": ("SGD with backup workers", "ps(quorum=0.75)"),
    "parameter_server": (_SERVER, "ps"),
    "paramserver": (_SERVER, "ps"),
    "diloco": (_LOCAL + " with an outer optimizer", 'localsgd(outer="nesterov")'),
    "fedavg": (_LOCAL, "localsgd"),
    "federated": (_LOCAL, "localsgd"),
    "post_local_sgd": (_LOCAL, "localsgd"),
    "dpsgd": (_GOSSIP, 'gossip(graph="ring")'),
    "decentralized": (_GOSSIP, 'gossip(graph="ring")'),
    "adpsgd": ("asynchronous " + _GOSSIP, 'gossip(graph="ring", mode="async")'),
    "pipeline": (_PIPELINE, "pp(2)"),
    "gpipe": ("GPipe", 'pp(2, schedule="gpipe")'),
    "inter_op": ("inter-operator parallelism", "pp(2)"),
    "model_parallel": ("a split model", "pp(2) by layers, or tp(2) inside layers"),
    "mp": ("a split model", "pp(2) by layers, or tp(2) inside layers"),
    "tensor": (_TENSOR, "tp(2)"),
    "tensor_parallel": (_TENSOR, "tp(2)"),
    "megatron": (_TENSOR + " as Megatron's", "tp(2)"),
    "intra_op": ("intra-operator parallelism", "tp(2)"),
    "context": (_CONTEXT, "cp(2)"),
    "context_parallel": (_CONTEXT, "cp(2)"),
    "ring_attention": (_CONTEXT + " by ring attention", "cp(2)"),
    "ulysses": (_CONTEXT, "cp(2)"),
    "expert": (_EXPERTS, "ep(2)"),
    "experts": (_EXPERTS, "ep(2)"),
    "expert_parallel": (_EXPERTS, "ep(2)"),
    "moe": (_EXPERTS, "ep(2)"),
    "map_reduce": ("map-reduce", "mapreduce"),
    "local": ("one device", "single"),
    "none": ("one device", "single"),
}


def hint_for(word: str) -> str | None:
    """What to write for a word of the field; None for any other word."""
    known = _SYNONYMS.get(word.lower().replace("-", "_"))
    if known is None:
        return None
    what, to_write = known
    return f"{what} is written {to_write}"
