"""Reading the notation of strategies: parsed with `ast`, never evaluated."""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import MISSING, fields
from typing import Any

from shoal.errors import StrategyError
from shoal.runtime.decoders import parse_expression
from shoal.strategy.options import clip, show

# words of the field that are no names here: what they are, and what to write
_SYNONYMS = {
    ("a ring all-reduce", 'ddp(algorithm="ring")'): "ring ring_allreduce",
    ("a tree all-reduce", 'ddp(algorithm="tree")'): "tree",
    ("an all-reduce of gradients", "ddp"): "allreduce all_reduce nccl gloo",
    ("data parallelism", "ddp"): "dp data_parallel",
    ("Horovod's all-reduce", "ddp"): "horovod",
    ("fully sharded data parallelism", "zero(3)"): "fsdp fsdp2 fully_shard zero3",
    ("DeepSpeed's sharding", "zero(1), zero(2) or zero(3)"): "deepspeed",
    ("sharded optimizer state", "zero(1)"): "zero1",
    ("sharded optimizer state and gradients", "zero(2)"): "zero2",
    ("synchronous SGD on a parameter server", "ps"): "ssgd",
    ("bulk synchronous training", "ddp, or ps with a server"): "bsp",
    ("synchronous SGD", "ddp, or ps with a server"): "sgd",
    ("asynchronous SGD", 'ps(mode="async")'): "asgd asp downpour",
    ("bounded staleness (SSP)", "ps(staleness=4)"): "ssp stale",
    ("a quorum of workers", "ps(quorum=0.75)"): "quorum",
    ("SGD with backup workers", "ps(quorum=0.75)"): "backup",
    ("a parameter server", "ps"): "parameter_server paramserver",
    ("local SGD with an outer optimizer", 'localsgd(outer="nesterov")'): "diloco",
    ("local SGD", "localsgd"): "fedavg federated post_local_sgd",
    ("decentralized averaging", 'gossip(graph="ring")'): "dpsgd decentralized",
    ("asynchronous decentralized averaging", 'gossip(graph="ring", mode="async")'): "adpsgd",
    ("pipeline parallelism", "pp(2)"): "pipeline",
    ("GPipe", 'pp(2, schedule="gpipe")'): "gpipe",
    ("inter-operator parallelism", "pp(2)"): "inter_op",
    ("a split model", "pp(2) by layers, or tp(2) inside layers"): "model_parallel mp",
    ("tensor parallelism", "tp(2)"): "tensor tensor_parallel",
    ("tensor parallelism as Megatron's", "tp(2)"): "megatron",
    ("intra-operator parallelism", "tp(2)"): "intra_op",
    ("context parallelism", "cp(2)"): "context context_parallel ulysses",
    ("context parallelism by ring attention", "cp(2)"): "ring_attention",
    ("expert parallelism", "ep(2)"): "expert experts expert_parallel moe",
    ("map-reduce", "mapreduce"): "map_reduce",
    ("one device", "single"): "local none",
}
_MEANT = {word: meant for meant, words in _SYNONYMS.items() for word in words.split()}


def hint_for(word: str) -> str | None:
    """What to write for a word of the field; None for any other word."""
    known = _MEANT.get(word.lower().replace("-", "_"))
    return None if known is None else f"{known[0]} is written {known[1]}"


MAX_TEXT = 10_000  # characters: no strategy is longer, and Python's parser has limits
Terms = Mapping[str, type[Any]]  # dataclasses by their name in the notation


def read_terms(text: str, terms: Terms) -> list[Any]:
    """The terms that `text` joins with +, made by `terms[name]`; StrategyError if it cannot."""
    if not isinstance(text, str):
        raise StrategyError(f'a strategy is text such as "ddp + tp(2)", not {show(text)}')
    if not text.strip():
        raise StrategyError('the strategy is empty; write for example "ddp"')
    if len(text) > MAX_TEXT:
        raise StrategyError(f"the strategy is longer than {MAX_TEXT} characters")
    text = text.strip()
    try:
        tree = parse_expression(text)
        return [_read_term(node, terms) for node in _operands(tree.body)]
    except SyntaxError as error:
        why = re.split(r"[.:;] ", error.msg)[0]  # the rest is advice on Python
        why += f" at character {error.offset}" if error.offset else ""
    except (RecursionError, MemoryError):
        why = "it is nested too deeply"
    except ValueError:  # NUL bytes, lone surrogates, numbers of thousands of digits
        why = "it holds a character or a number that cannot be read"
    raise StrategyError(f"cannot read {show(text)} as a strategy: {why}")


def _operands(node: ast.expr) -> Iterator[ast.expr]:
    """The operands of a chain of +, left to right; a stack, since the chain may be long."""
    stack = [node]
    while stack:
        node = stack.pop()
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            stack += [node.right, node.left]
        else:
            yield node


def _read_term(node: ast.expr, terms: Terms) -> Any:
    head = _name_of(node.func if isinstance(node, ast.Call) else node)
    if not isinstance(head, ast.Name):
        raise StrategyError(
            f"cannot read '{clip(ast.unparse(node))}' as a term of a strategy; "
            "a strategy is terms joined with +, such as ddp + tp(2)"
        )
    if head.id not in terms:
        hint = hint_for(head.id) or _nearest(head.id, terms, "strategies")
        raise StrategyError(f"unknown strategy '{clip(head.id)}'; {hint}")
    given = _read_options(head.id, node, terms) if isinstance(node, ast.Call) else {}
    make: Callable[..., Any] = terms[head.id]
    for option in fields(terms[head.id]):
        if option.default is MISSING and option.name not in given:
            raise StrategyError(f"{head.id} needs a {option.name}, as in {head.id}(2)")
    return make(**given)


def _name_of(node: ast.expr) -> ast.expr:
    """The node; `inter-op`, which reads as a difference, as one name where the field says so."""
    text = ast.unparse(node).replace(" - ", "-") if isinstance(node, ast.BinOp) else ""
    return ast.Name(text) if hint_for(text) is not None else node


def _read_options(name: str, call: ast.Call, terms: Terms) -> dict[str, object]:
    options = [f.name for f in fields(terms[name])]
    unnamed = [f.name for f in fields(terms[name]) if not f.kw_only]
    if len(call.args) > len(unnamed):
        takes = f"only {unnamed[0]}" if unnamed else "no value"
        raise StrategyError(f"{name} takes {takes} without a name; {_list(options, 'options')}")
    given: dict[str, object] = {}
    for option, node in [
        *zip(unnamed, call.args, strict=False),
        *((keyword.arg or "**", keyword.value) for keyword in call.keywords),
    ]:
        if option not in options:
            hint = _nearest(option, options, "options")
            raise StrategyError(f"{name} has no option '{clip(option)}'; {hint}")
        if option in given:
            raise StrategyError(f"{name}: {option} is given twice")
        given[option] = _literal(f"{name}: {option}", node)
    return given


def _literal(label: str, node: ast.expr) -> object:
    try:
        value = ast.literal_eval(node)
    except (ValueError, TypeError):
        raise StrategyError(
            f"{label}={clip(ast.unparse(node))} is not a literal value; "
            'numbers are written as they are and text in quotes, such as "sync"'
        ) from None
    if isinstance(node, ast.Dict) and len(node.keys) > len(value):
        raise StrategyError(f"{label} names a key twice")
    return value


def _nearest(word: str, known: Collection[str], what: str) -> str:
    close = difflib.get_close_matches(word.lower(), known)
    if not close:
        return _list(known, what)
    # difflib finds "pp" nearer to "dpp" than "ddp"; but a first letter is seldom the wrong one
    return f"did you mean '{min(close, key=lambda name: name[0] != word[0].lower())}'?"


def _list(known: Collection[str], what: str) -> str:
    return f"the {what} are {', '.join(known)}" if known else f"it has no {what}"
