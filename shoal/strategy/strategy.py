"""Strategies: one text for Python, the command line, TOML and logs.

    ddp(bucket_mb=4) + tp(2) + pp(4, schedule="zb-h1")
    ----------------   -------------------------------
    how replicas       how one replica is split
    agree

A `Strategy` joins terms (`shoal/strategy/terms.py`). Text is parsed with `ast` and never evaluated.
Every mistake in it is a `StrategyError`.
"""

from __future__ import annotations

import ast
import difflib
import itertools
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from functools import cache, cached_property
from typing import Any, NamedTuple

from shoal.errors import StrategyError
from shoal.runtime.decoders import parse_expression
from shoal.strategy.base import Batches, SyncTerm, Term
from shoal.strategy.options import clip, show, whole
from shoal.strategy.split_terms import Cp, Ep, Pp, Tp
from shoal.strategy.sync_terms import Ddp, Single
from shoal.strategy.terms import TERMS
from shoal.strategy.user_terms import load_term, stand_ins, unread_term

_ROLES = ("sync", "tp", "pp", "ep", "cp")
_SINGLE = Single()


AXES = ("dp", "pp", "ep", "cp", "tp")  # from the outermost to the innermost


class Layout(NamedTuple):
    """How many replicas there are, and over how many workers each one is split."""

    replicas: int
    tp: int = 1
    pp: int = 1
    ep: int = 1
    cp: int = 1

    @property
    def workers(self) -> int:
        return self.replicas * self.tp * self.pp * self.ep * self.cp

    @property
    def places(self) -> list[tuple[int, ...]]:
        """Of each rank, on all axes."""
        sizes = (self.replicas if axis == "dp" else getattr(self, axis) for axis in AXES)
        return list(itertools.product(*map(range, sizes)))

    @cache  # noqa: B019 - few layouts, and virtual workers ask for the same one
    def lines(self, *along: str) -> list[list[int]]:
        """The ranks of every line of the grid along an axis, or of every plane along several."""
        lines: dict[tuple[int, ...], list[int]] = {}
        for rank, place in enumerate(self.places):
            others = tuple(at for axis, at in zip(AXES, place, strict=True) if axis not in along)
            lines.setdefault(others, []).append(rank)
        return list(lines.values())


@dataclass(frozen=True)
class Strategy:
    """At most one way to agree, and one each of tp, pp, ep and cp; `str()` gives the notation.

    `sync=None` means ddp when workers are left over for further replicas, else single; so
    `single` beside these says nothing more and is dropped.
    """

    sync: SyncTerm | None = None
    tp: Tp | None = None
    pp: Pp | None = None
    ep: Ep | None = None
    cp: Cp | None = None

    def __post_init__(self) -> None:
        for role in _ROLES:
            value = getattr(self, role)
            if value is not None and getattr(value, "role", None) != role:
                raise StrategyError(f"a strategy is made of terms, and {show(value)} is none")
        splits = self.splits
        if splits and self.sync == _SINGLE:
            object.__setattr__(self, "sync", None)
        if splits and self.sync and self.sync.why_not_split:
            why = self.sync.why_not_split
            raise StrategyError(f"{self.sync.name} + {splits[0].name} makes no sense: {why}")
        if not 0 < len(str(self)) <= MAX_TEXT:
            raise StrategyError(f"a strategy has a term and at most {MAX_TEXT} characters of text")

    @property
    def terms(self) -> tuple[Term, ...]:
        return (self.sync, *self.splits) if self.sync is not None else self.splits

    @property
    def splits(self) -> tuple[Tp | Pp | Ep | Cp, ...]:
        """The terms that split a replica over workers."""
        return tuple(term for term in (self.tp, self.pp, self.ep, self.cp) if term is not None)

    def __add__(self, other: Term | Strategy) -> Strategy:
        if not isinstance(other, Term | Strategy):
            return NotImplemented
        return _join([self, other])

    def __str__(self) -> str:
        return self._text

    @cached_property
    def _text(self) -> str:
        return " + ".join(map(str, self.terms))

    @property
    def _agreement(self) -> SyncTerm:
        """The sync term, or that of further replicas."""
        return self.sync or Ddp()

    @property
    def is_synchronous(self) -> bool:
        """Whether the result should be the single-device one, up to rounding."""
        drops_tokens = self.ep is not None and self.ep.capacity is not None
        return not drops_tokens and self._agreement.equals_single

    @property
    def reference(self) -> Strategy:
        """What one worker runs to give the result that a synchronous strategy is to give."""
        needs_all = self._agreement.batches is Batches.WHOLE_DATASET
        return self if needs_all else Strategy(Single())

    @property
    def survives_loss(self) -> bool:
        """Whether the other replicas continue when a worker, and its replica, is killed."""
        return self._agreement.survives_loss

    @property
    def is_elastic(self) -> bool:
        """Whether workers leave and join between two steps."""
        return self._agreement.is_elastic

    def as_elastic(self) -> Strategy:
        """This strategy with workers that leave and join between two steps (`--elastic`)."""
        sync = self._agreement.as_elastic()
        if sync.is_elastic and self.splits:
            raise StrategyError(
                f"--elastic: the workers of a replica that {self.splits[0]} splits stay the same; "
                "leave out one of the two"
            )
        return replace(self, sync=sync)

    @property
    def is_exact_at_any_number(self) -> bool:
        """Whether exact=True allows any number of replicas up to that of micro-batches."""
        return self._agreement.is_exact_at_any_number and not self.splits

    @property
    def starts_apart(self) -> bool:
        """Whether workers can start without one that was lost before the rendezvous."""
        return self._agreement.starts_apart and not self.splits

    @property
    def takes_back(self) -> bool:
        """Whether a worker that was lost can come back; those of a split replica cannot."""
        return self._agreement.takes_back and not self.splits

    def taking_back(self, workers: int) -> Strategy:
        """The nearest strategy under which a worker that was lost can come back, or this one."""
        if self.sync is None or self.splits:
            return self
        return replace(self, sync=self.sync.taking_back(workers))

    def require_takes_back(self, option: str = "--restart") -> None:
        """Refuse to start workers later (`option`) where they could not go on."""
        sync = self._agreement
        if self.takes_back or sync.server_replicas > 1:
            return
        whom = "a worker back" if option == "--restart" else "a worker that comes later"
        why = sync.why_not_back or (
            "its workers have to be there from the start to the end; ddp(elastic=True), ps, "
            'gossip(mode="async") and hogwild can'
        )
        if self.splits and sync.taking_back(2).takes_back:
            split = self.splits[0]
            why = f"the workers of a replica that {split} splits meet at the start; leave it out"
        raise StrategyError(f"{option}: {self} cannot take {whom}: {why}")

    def require_server_saves(self) -> None:
        """Refuse periodic checkpoints of servers where there is nothing, or not all, to save."""
        self.sync_for(1).check_server_saves(self._workers_of_replica)

    def needs(self, rank: int) -> bool:
        """Whether the run fails with this worker even if it survives the loss of others."""
        return self._agreement.needs_first_replica and rank < self._workers_of_replica

    @property
    def _workers_of_replica(self) -> int:
        return math.prod(term.size for term in self.splits)

    def servers(self, workers: int) -> int:
        """How many processes a launcher has to start beside the workers."""
        return self.sync_for(workers).server_processes

    def layout(self, workers: int) -> Layout:
        """Divide the workers; what options name, in files too, is loaded and checked."""
        layout = self.division(workers)
        self.sync_for(layout.replicas).check(layout.replicas)
        if self.pp is not None:
            self.pp.check()
        return layout

    def division(self, workers: int) -> Layout:
        """tp x pp x ep x cp of the workers make a replica, and none is left over: by numbers."""
        if not whole(1).accepts(workers):
            raise StrategyError(f"workers={show(workers)} must be {whole(1).allowed}")
        there = f"there {'is' if workers == 1 else 'are'} {workers}"
        needed = self._workers_of_replica
        if workers < needed:
            raise StrategyError(f"{self} needs at least {needed} workers, and {there}")
        if workers % needed:
            raise StrategyError(f"{self} needs a multiple of {needed} workers, and {there}")
        return Layout(workers // needed, **{term.role: term.size for term in self.splits})

    def without_files(self) -> Strategy:
        """With the defaults of the options that name a file: nothing of it can be loaded."""
        return _join([term.without_files() for term in self.terms])

    def check_hosts(self, workers: int, are_several: bool) -> None:
        """Refuse workers on several hosts where all of them have to be on one."""
        term = self.sync_for(workers)
        if term.needs_one_host and are_several:
            raise StrategyError(
                f"{term} goes through the memory of one host, and these {workers} workers are on "
                'several: take ps(mode="async") or gossip'
            )

    def sync_for(self, replicas: int) -> SyncTerm:
        """The sync term, or what its absence means for this many replicas."""
        return self.sync or (Ddp() if replicas > 1 else Single())

    def require_built(self) -> None:
        """Refuse terms that cannot run together, before anything starts."""
        for split in self.splits:
            if self.sync is not None and split.size > 1:
                self.sync.check_split(split)


def as_strategy(value: str | Strategy | Term) -> Strategy:
    """A strategy from its text, which a user has given, one of its terms, or itself."""
    if isinstance(value, Strategy):
        return value
    return _join([value]) if isinstance(value, Term) else parse(value)


def parse(text: str) -> Strategy:
    """Read the notation; files that it names as terms are run: see `recorded`.

    Every failure is a StrategyError of one sentence.
    """
    return _join(_read(text, load_term))


def recorded(text: str) -> Strategy:
    """A strategy that a file names, and no user: a term of a file is not loaded."""
    return _join(_read(text, unread_term))


def _read(text: str, load: Callable[[str], Any]) -> list[Any]:
    if not isinstance(text, str) or ".py:" not in text:
        return read_terms(text, TERMS)
    text, files = stand_ins(text)
    return read_terms(text, {**TERMS, **{name: load(file) for name, file in files.items()}})


def _join(values: Sequence[Term | Strategy]) -> Strategy:
    by_role: dict[str, Any] = {}
    for value in values:
        for term in value.terms if isinstance(value, Strategy) else [value]:
            if term.role in by_role:
                both = f"{clip(str(by_role[term.role]))} + {clip(str(term))}"
                role = "way to synchronize replicas" if term.role == "sync" else term.role
                raise StrategyError(
                    f"{both}: a strategy has at most one {role}; keep one of the two"
                )
            by_role[term.role] = term
    return Strategy(**by_role)


def _add(values: Sequence[Any]) -> Any:
    if not all(isinstance(value, Term | Strategy) for value in values):
        return NotImplemented
    return _join(values)


Term.join = staticmethod(_add)


# ------------------------------------------------------------------ the notation

# words of the field that are no names here: what they are, and what to write
_SYNONYMS = {
    ("a ring all-reduce", 'ddp(algorithm="ring")'): "ring ring_allreduce",
    ("a tree all-reduce", 'ddp(algorithm="tree")'): "tree",
    ("an all-reduce of gradients", "ddp"): "allreduce all_reduce nccl gloo",
    (
        "data parallelism",
        "ddp",
    ): "dp data_parallel dataparallel distributed_data_parallel distributeddataparallel",
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
        if text.endswith("+"):
            why = "there is no term behind the last +"
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
    make: Any = terms[head.id]
    if isinstance(make, Term):  # of a file that is not read
        return make
    name = getattr(make, "source", None) or head.id
    given = _read_options(name, node, make) if isinstance(node, ast.Call) else {}
    for option in fields(make):
        if option.default is MISSING and option.name not in given:
            raise StrategyError(f"{name} needs a {option.name}, as in {name}(2)")
    return make(**given)


def _name_of(node: ast.expr) -> ast.expr:
    """The node; `inter-op`, which reads as a difference, as one name where the field says so."""
    text = ast.unparse(node).replace(" - ", "-") if isinstance(node, ast.BinOp) else ""
    return ast.Name(text) if hint_for(text) is not None else node


def _read_options(name: str, call: ast.Call, make: Any) -> dict[str, object]:
    options = [f.name for f in fields(make)]
    unnamed = [f.name for f in fields(make) if not f.kw_only]
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
