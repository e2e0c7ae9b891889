"""A forward that cannot be traced, split between calls of its modules.

Every stage runs the code of the forward from its start, and leaves it where the next stage begins
(`replay_segment.py`). So its code may do anything that follows from its inputs, its modules and
random numbers: encoders and decoders, skip connections, caches, layers that are skipped at random.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from shoal.errors import BadInput
from shoal.replica.compiled import Compiler
from shoal.replica.deferred_init import full_name, is_in, tensor_slots
from shoal.replica.pipeline.balance import Choice, balanced_split, best_depth, largest_cost
from shoal.replica.pipeline.graph_split import modules_to_open, weights_of
from shoal.replica.pipeline.replay_lineage import CallRecord
from shoal.replica.pipeline.replay_segment import Learned, Replay
from shoal.runtime.decoders import parse_module
from shoal.runtime.pytree import Tree, tensors_of

_METADATA = {"dtype", "device", "shape", "size", "data"}


@cache
def _read(kind: Any) -> _Reader:
    reader = _Reader(kind)
    reader.method("forward")
    return reader


class _Reader(ast.NodeVisitor):
    """Follows methods of the same file, and those of parents by super().

    `calls` are the attributes of self that are called, or whose modules are in a loop over them,
    once for every place, and twice in a loop around it. Of two branches only one counts, and none
    that leaves the forward. `paths` are calls of what is inside of a child, as of blocks[0].norm;
    `reads` the other attributes of children, as head.weight; `loops` the lists of modules that a
    loop goes over at once.
    """

    def __init__(self, kind: type):
        self.names: list[str] = []
        self.calls: list[str] = []
        self.loops: list[set[str]] = []
        self.paths: set[str] = set()
        self.reads: set[str] = set()
        self._kind = kind
        self._inside: list[Any] = []  # functions
        self._self = "self"  # what the present one calls its object
        self._local: dict[str, ast.expr] = {}  # and what it calls e, after e = self.child

    def method(self, name: str, behind: type | None = None) -> None:
        """Read a method; of a parent of `behind` where that is given."""
        parents = self._kind.__mro__
        start = 0 if behind is None else parents.index(behind) + 1
        found = next((k for k in parents[start:] if name in k.__dict__), None)
        function = None if found is None else inspect.unwrap(found.__dict__[name])
        is_open = any(function is other for _, other in self._inside)
        if is_open or found is nn.Module or not inspect.isfunction(function):
            return
        self._inside.append((found, function))
        before = self._self, self._local
        self._self = next(iter(inspect.signature(function).parameters), "self")
        self._local = {}
        with suppress(OSError, TypeError, SyntaxError):
            self.visit(parse_module(textwrap.dedent(inspect.getsource(function))))
        self._self, self._local = before
        self._inside.pop()

    def visit_Assign(self, node: ast.Assign) -> None:
        self.generic_visit(node)
        name = ast.unparse(node.targets[0])
        self._local.pop(name, None)
        if self._path(node.value):
            self._local[name] = node.value

    def visit_Call(self, node: ast.Call) -> None:
        """What is called is called behind its arguments."""
        for argument in [*node.args, *node.keywords]:
            self.visit(argument)
        node.func = self._local.get(ast.unparse(node.func), node.func)
        if isinstance(node.func, ast.Attribute) and ast.unparse(node.func)[:6] == "super(":
            self.method(node.func.attr, behind=self._inside[-1][0])
        else:
            if self._is_mine(node.func):
                assert isinstance(node.func, ast.Attribute)
                self._call(node.func.attr)
            elif path := self._path(node.func):
                self.paths.add(path)
            self.visit(node.func)

    def visit_For(self, node: ast.For) -> None:
        """Over modules, as in `for block in self.blocks`; or around calls, which come again."""
        is_count = isinstance(node.iter, ast.Call) and ast.unparse(node.iter.func) == "range"
        over = [path for n in ast.walk(node.iter) if (path := self._path(n))]
        for name in over if not is_count else ():
            self._call(name)
        numbered = [self._path(n.value) for n in ast.walk(node) if isinstance(n, ast.Subscript)]
        self.loops.append({*over, *numbered})
        self.visit(node.iter)
        for _ in range(2 if is_count else 1):
            for statement in [*node.body, *node.orelse]:
                self.visit(statement)

    def _call(self, name: str) -> None:
        """Its place is that of its first call, not where it is asked for (`if self.norm`)."""
        if name not in self.calls:
            self.names = [other for other in self.names if other != name]
        self.calls.append(name)

    def _path(self, node: ast.AST) -> str:
        """The name of self.CHILDREN[0].CHILD; empty where it is not one."""
        if self._is_mine(node):
            return node.attr  # type: ignore[attr-defined,no-any-return]
        if isinstance(node, ast.Attribute) and (path := self._path(node.value)):
            return f"{path}.{node.attr}"
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            path = self._path(node.value)
            index = node.slice.value
            return f"{path}.{index}" if path and isinstance(index, int) else ""
        return ""

    def visit_If(self, node: ast.If | ast.IfExp) -> None:
        self.visit(node.test)
        body, other = ([b] if isinstance(b, ast.expr) else b for b in (node.body, node.orelse))
        start = len(self.calls)
        for statement in body:
            self.visit(statement)
        if isinstance(body[-1], (ast.Return, ast.Raise)):
            del self.calls[start:]
        before = set(self.calls[start:])
        middle = len(self.calls)
        for statement in other:
            self.visit(statement)
        self.calls[middle:] = [name for name in self.calls[middle:] if name not in before]

    visit_IfExp = visit_If

    def visit_Attribute(self, node: ast.Attribute) -> None:
        inner = node.value = self._local.get(ast.unparse(node.value), node.value)
        if self._is_mine(node):
            method: Any = getattr(self._kind, node.attr, None)
            here = self._inside[-1][1]
            self.names.append(node.attr)
            if inspect.isfunction(method) and inspect.unwrap(method).__module__ == here.__module__:
                self.method(node.attr)
        elif not (node.attr in _METADATA and self._path(inner)):
            self.reads.add(self._path(node))
            self.visit(inner)

    def _is_mine(self, node: ast.AST) -> bool:
        """self.CHILD"""
        is_name = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
        return is_name and node.value.id == self._self  # type: ignore[attr-defined]


@dataclass(frozen=True, eq=False)
class SplitUnit:
    name: str
    module: nn.Module
    is_repeated: bool = False  # it was called before, and other units since

    @property
    def is_trained(self) -> bool:
        return any(p.requires_grad and p.numel() for p in self.module.parameters())

    def cost(self, seconds: Mapping[str, float] | None) -> float:
        if self.is_repeated:  # counted where it is first; the source may name it in vain
            return 0.0
        if seconds is not None:
            return seconds.get(self.name, 0.0)
        return float(sum(weights_of(self.module)))


def find_units(model: nn.Module, cuts: Sequence[str] = (), deeper: int = 0) -> list[SplitUnit]:
    """A module with several names (a shared embedding) is a unit at each of them.

    One that a forward calls again behind others (an embedding of sources and of targets) is a unit
    at each call: every stage with one of them holds it.
    """
    return _units_in(model, "", modules_to_open(model, cuts, deeper, torch_too=True))


def _units_in(module: nn.Module, name: str, opened: set[str]) -> list[SplitUnit]:
    read = _read(cast(Any, type(module)))
    units: list[SplitUnit] = []
    inside: dict[str, list[SplitUnit]] = {}  # by child
    for key, child in ordered_children(module):
        start = len(units)
        child_name = full_name(name, key)
        # a norm with an activation in it is one unit
        has_units = any(True for inner in child.children() for _ in inner.parameters())
        if child_name in opened and has_units:
            units += _units_in(child, child_name, opened)
        elif next(child.parameters(), None) is not None:
            units.append(SplitUnit(child_name, child))
        inside[key] = [unit for unit in units[start:] if not unit.is_repeated]
    depth = full_name(name, "list").count(".")
    for loop in read.loops:  # over layers and norms: the first of each, then the second
        lists = {key for key in loop if isinstance(module._modules.get(key), nn.ModuleList)}
        together = [unit for unit in units if unit.name.split(".")[depth] in lists]
        ordered = iter(sorted(together, key=lambda unit: int(unit.name.split(".")[depth + 1])))
        units = [next(ordered) if unit in together else unit for unit in units]
    if "get_input_embeddings" in read.names:  # of Hugging Face, wherever that module is
        embedding = module.get_input_embeddings()  # type: ignore[operator]
        units.sort(key=lambda unit: unit.module is not embedding)
    called = [key for key in read.calls if inside.get(key)]
    after: dict[str, list[SplitUnit]] = {}  # what is called again, by the unit before it
    for i, again in enumerate(called):
        if again in called[:i] and (called[i - 1] != again or len(inside[again]) > 1):
            before = inside[called[i - 1]][-1].name
            after.setdefault(before, []).extend(
                replace(unit, is_repeated=True) for unit in inside[again]
            )
    return [u for unit in units for u in (unit, *after.get(unit.name, ()))]


def ordered_children(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Children in the order in which the forward names them; others stay as registered."""
    children = [(key, child) for key, child in module._modules.items() if child is not None]
    if isinstance(module, nn.Sequential | nn.ModuleList | nn.ModuleDict):
        return children
    places = {key: place for place, (key, _) in enumerate(children)}
    named = [name for name in dict.fromkeys(_read(cast(Any, type(module))).names) if name in places]
    places |= dict(zip(named, sorted(places[name] for name in named), strict=True))
    return sorted(children, key=lambda item: places[item[0]])


def _reached(module: nn.Module) -> Iterator[Iterable[nn.Module]]:
    """The modules that a forward calls inside of others, and those whose tensors it uses."""
    read = _read(cast(Any, type(module)))
    for path in read.paths:
        with suppress(AttributeError):
            yield module.get_submodule(path).modules()
    for path in read.reads:
        owner, _, key = path.rpartition(".")
        with suppress(AttributeError):
            found = module.get_submodule(owner)
            if key in found._parameters or key in found._buffers:
                yield [found]
            elif is_parametrized(found, key):
                yield found.modules()


class ModuleSplit:
    """`cuts` are the units that begin a virtual stage."""

    def __init__(
        self,
        model: nn.Module,
        virtual_stages: int,
        cuts: Sequence[str] | None = None,
        seconds: Mapping[str, float] | None = None,
    ):
        self.model = model
        self.virtual_stages = virtual_stages
        self._signature = inspect.signature(model.forward)
        found: list[Any] = [getattr(module, "config", None) for module in model.modules()]
        self._configs = {id(c): c for c in found if getattr(c, "use_cache", None) is True}
        # by arguments that are given, training, and virtual stage; of `Learned`, used here so far
        self._usage: dict[tuple[tuple[str, ...], bool, int], Learned] = {}
        self._learned: dict[tuple[tuple[str, ...], bool, int], Learned] = {}
        self.units, points = self._check(cuts) if cuts is not None else self._choose(seconds)
        self.cuts = tuple(self.units[point].name for point in points)
        edges = [0, *points, len(self.units)]
        self.stages_of: dict[nn.Module, set[int]] = {}
        for virtual, (start, stop) in enumerate(pairwise(edges)):
            for unit in self.units[start:stop]:
                self.stages_of.setdefault(unit.module, set()).add(virtual)
        inside = {module for unit in self.units for module in unit.module.modules()}
        self.around = [module for module in model.modules() if module not in inside]
        # what a forward calls or uses inside of a unit: every stage may
        self._shared = {m for outer in self.around for inner in _reached(outer) for m in inner}
        self.cost = largest_cost([u.cost(seconds) for u in self.units], points)
        self.compiled: dict[nn.Module, Callable[..., Any]] = {}  # forwards of units

    def compile(self, compiler: Compiler) -> None:
        """Compile each unit: the code between them runs to learn what it uses."""
        for unit in self.units:
            self.compiled[unit.module] = compiler(unit.module.forward)

    # ------------------------------------------------------------------ where it is split

    def _choose(self, seconds: Mapping[str, float] | None) -> tuple[list[SplitUnit], list[int]]:
        def balanced(deeper: int) -> Choice:
            units = find_units(self.model, deeper=deeper)
            costs = [unit.cost(seconds) for unit in units]
            trained = [i for i, u in enumerate(units) if u.is_trained and not u.is_repeated]
            candidates = trained[1:]
            prices = [1.0 if units[i].name[-1].isdigit() else 2.0 for i in candidates]
            points = balanced_split(costs, candidates, prices, self.virtual_stages)
            everywhere = 0.0  # the cost of weights that belong to no unit: every stage holds them
            if seconds is None:
                modules = {unit.module: unit for unit in units if not unit.is_repeated}
                owned = sum(unit.cost(None) for unit in modules.values())
                everywhere = max(0.0, float(sum(weights_of(self.model))) - owned)
            return Choice(largest_cost(costs, points) + everywhere, points, units)

        best = best_depth(balanced)
        return best.row, best.points

    def _check(self, cuts: Sequence[str]) -> tuple[list[SplitUnit], list[int]]:
        units = find_units(self.model, cuts)
        points = [next((i for i, u in enumerate(units) if is_in(u.name, name)), 0) for name in cuts]
        needed = self.virtual_stages - 1
        if len(cuts) != needed or points != sorted(set(points)) or 0 in points:
            raise BadInput(
                f"cuts={list(cuts)}: {type(self.model).__name__}, whose forward cannot be traced, "
                f"is split into {self.virtual_stages} stages at {needed} of "
                f"{', '.join(unit.name for unit in units[1:])}, in this order"
            )
        return units, points

    def follow_replacements(self) -> None:
        """Modules were replaced in the model, as tensor parallelism does: units are those now."""
        present = {u.module: self.model.get_submodule(u.name) for u in self.units}
        self.units = [replace(unit, module=present[unit.module]) for unit in self.units]
        self.stages_of = {present[module]: stages for module, stages in self.stages_of.items()}

    def tensors_of(self, virtual: int) -> Iterator[Tensor]:
        """Those of its units, and those that belong to no unit: any stage may use them."""
        inside: dict[nn.Module, set[int]] = {}
        for unit, stages in self.stages_of.items():
            for module in unit.modules():
                inside.setdefault(module, set()).update(stages)
        for slot in tensor_slots(self.model):
            if slot.module in self._shared or virtual in inside.get(slot.module, {virtual}):
                yield slot.tensor

    # ------------------------------------------------------------------ what a stage computes

    def segment(self, virtual: int, given: tuple[str, ...]) -> Callable[..., Tree]:
        """A function from a batch's inputs, and from what a stage receives, to what it sends."""
        return partial(self._compute, virtual, given)

    def _compute(
        self,
        virtual: int,
        given: tuple[str, ...],
        inputs: tuple[Any, ...],
        received: Sequence[Any] = (),
    ) -> Tree:
        key = (given, self.model.training, virtual)
        learned = self._learned.get(key)
        replay = Replay(self, virtual, [CallRecord(*record) for record in received], learned)
        call = inspect.BoundArguments(self._signature, OrderedDict(zip(given, inputs, strict=True)))
        devices = [t.device for t in tensors_of(inputs)] or [torch.device("cpu")]
        with ExitStack() as stack:
            for config in self._configs.values():  # keys and values for text are not kept
                stack.callback(setattr, config, "use_cache", config.use_cache)
                config.use_cache = False
            outputs = replay.run(lambda: self.model(*call.args, **call.kwargs), devices[0])
        if learned is None:
            usage = self._usage.setdefault(key, Learned(set(), set()))
            usage.used.update(replay.used)
            usage.modified.update(replay.modified)
        return outputs if virtual == self.virtual_stages - 1 else (replay.message(),)

    # ------------------------------------------------------------------ what first batches show

    def usage(self) -> list[Any]:
        """What this rank's stages used in the forwards so far; for `learn`."""
        return [
            [list(given), training, virtual, sorted(used), sorted(modified)]
            for (given, training, virtual), (used, modified) in self._usage.items()
        ]

    def learn(self, usage: Sequence[Any]) -> None:
        """From now on a stage sends what later stages have used, by the usage of all of them."""
        self._usage.clear()
        for given, training, later, used, modified in usage:
            for virtual in range(self.virtual_stages):
                key = (tuple(given), training, virtual)
                learned = self._learned.setdefault(key, Learned(set(), set()))
                learned.used.update(tuple(mark) for mark in used if later > virtual)
                learned.modified.update(tuple(call) for call in modified)

    def out_of_order(self, calls: Sequence[int]) -> BadInput:
        """The last of these units belongs to a stage before this one."""
        pairs = [*pairwise(calls)]
        fits = [i for i in range(1, len(self.units)) if not any(b < i <= a for a, b in pairs)]
        names = [self.units[i].name for i in fits]
        return self.refused(
            f"calls {self.units[calls[-1]].name} behind modules of a later stage (its calls so far "
            f"fit a cut at {', '.join(names) or 'none'})"
        )

    def refused(self, what: str) -> BadInput:
        return BadInput(
            f"the forward of {type(self.model).__name__} cannot be traced, nor split at "
            f"{', '.join(self.cuts)}, since it {what}: choose other cuts, or put what is special "
            "into a module"
        )
