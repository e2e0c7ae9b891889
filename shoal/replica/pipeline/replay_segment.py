"""One forward of the model on one stage.

    calls       embed ─ blocks.0 ─ blocks.1 │ blocks.2 ─ blocks.3 ─ norm ─ head
    stage 0     computes these              └ leaves here
    stage 1     takes their results from      computes these
                stage 0, without computing

Every stage runs the code of the forward from its start. A unit that an earlier stage has computed
returns the result that was received; the code between units is computed on each stage that needs
it, with the same random numbers. So a gradient reaches every unit once: along each use of its
result, on the stage that uses it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from shoal.errors import ShoalError
from shoal.replica.deferred_init import tensor_slots
from shoal.replica.microbatch_context import get_generators, set_generators
from shoal.replica.pipeline.replay_lineage import (
    CallRecord,
    Lineage,
    Mark,
    description_of,
    is_description,
    map_leaves,
    memory_of,
    pack_result,
    unknown_values,
    unpack_result,
)
from shoal.replica.split.attributes import kept_by

if TYPE_CHECKING:
    from shoal.replica.pipeline.replay_split import ModuleSplit


class LeftForward(BaseException):
    """A forward was left where a later stage begins."""


class Learned(NamedTuple):
    """What the first batch has shown: marks that later stages use; calls whose results change."""

    used: set[Mark]
    modified: set[tuple[int, int]]


class Replay:
    """`received` are the records of the calls that earlier stages made.

    `learned` says what later stages use and what is modified in place; None: not known yet.
    """

    def __init__(
        self,
        plan: ModuleSplit,
        virtual: int,
        received: Sequence[CallRecord],
        learned: Learned | None,
    ):
        self._plan = plan
        self._virtual = virtual
        self._learned = learned
        self._number_of = {unit.module: i for i, unit in reversed(list(enumerate(plan.units)))}
        self._received = list(received)
        self.records: list[CallRecord] = []
        self._calls: list[tuple[int, int]] = []  # module and number of its call, per record
        self._memory: dict[int, Mark] = {}  # of results that the code between units has
        self._missing: set[Mark] = set()
        self.used: set[Mark] = set()
        self._used_later: set[Mark] = set()  # whatever the later stages did on the first batch
        self.modified: set[tuple[int, int]] = set()
        self._is_inside = False
        self._decided_by: str | None = None
        self._last_random: int | None = None  # the record with the latest states of generators
        self.lineage = Lineage(self._decide, self._modify, self._compute_elsewhere)

    # ------------------------------------------------------------------ running

    def run(self, forward: Callable[[], Any], device: torch.device) -> Any:
        """What the forward returns, or None where it is left for a later stage."""
        self._device = device
        with ExitStack() as stack:
            for module in self._number_of:
                replacement = self._replacement(module)
                if "forward" in module.__dict__:
                    stack.callback(module.__dict__.__setitem__, "forward", module.forward)
                else:
                    stack.callback(module.__dict__.pop, "forward")
                module.__dict__["forward"] = replacement
            stack.enter_context(self.lineage)
            try:
                outputs = forward()
            except LeftForward:
                return None
        # the loss may use what the model itself has kept
        self._read(self.lineage.marks_of((outputs, kept_by(self._plan.around))))
        return outputs

    def _replacement(self, module: nn.Module) -> Callable[..., Any]:
        original = self._plan.compiled.get(module, module.forward)

        def call(*args: Any, **kwargs: Any) -> Any:
            if self._is_inside:
                return original(*args, **kwargs)
            if self._decided_by is not None:
                raise self._plan.refused(
                    f"decides by the values that {self._decided_by} returned, before it calls "
                    f"{self._name(module)}: micro-batches may decide otherwise than the batch"
                )
            if len(self.records) < len(self._received):
                return self._replayed(module)
            marks = self.lineage.marks_of((args, kwargs))
            stages = self._plan.stages_of[module]
            if self._virtual in stages:
                self._use(marks)
                return self._computed(module, original, args, kwargs)
            if max(stages) > self._virtual:
                self._used_later |= marks
                raise LeftForward
            self._begin(module)
            raise self._plan.out_of_order([number for number, _ in self._calls])

        return call

    # ------------------------------------------------------------------ one call

    def _replayed(self, module: nn.Module) -> Any:
        """The result that an earlier stage computed."""
        record = self._received[len(self.records)]
        if record.module != self._number_of[module]:
            raise self._plan.refused(
                f"called {self._plan.units[record.module].name} on the stage before and "
                f"{self._name(module)} here: what it does has to follow from its inputs and from "
                "the random generators of torch, numpy and Python"
            )
        call = self._begin(module)
        self.records.append(record)
        if record.random is not None:
            states = (torch.frombuffer(bytearray(s), dtype=torch.uint8) for s in record.random)
            set_generators(self._device, list(states))
        return self._hand_out(record.result, module, call)

    def _computed(
        self, module: nn.Module, original: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        call = self._begin(module)
        before = self._random_states()
        self._is_inside = True
        try:
            with self.lineage.paused():
                result = original(*args, **kwargs)
        finally:
            self._is_inside = False
        if torch._C._functorch.peek_interpreter_stack() is not None:
            raise self._plan.refused(f"calls {self._name(module)} inside a transform of torch.func")
        packed = pack_result(result, module, self._name(module))
        self.records.append(CallRecord(call[0], packed, self._drawn(before)))
        if self._is_copied(call):
            return self._hand_out(packed, module, call)
        self._note(packed, call)
        return result

    def _begin(self, module: nn.Module) -> tuple[int, int]:
        number = self._number_of[module]
        call = (number, sum(1 for other, _ in self._calls if other == number))
        self._calls.append(call)
        return call

    def _random_states(self) -> list[bytes]:
        return [state.numpy().tobytes() for state in get_generators(self._device)]

    def _drawn(self, before: list[bytes]) -> list[bytes] | None:
        """The states of generators, if the call has drawn; those before are dropped if unused."""
        after = self._random_states()
        if after == before:
            return None
        if self._last_random is not None:
            earlier = self.records[self._last_random]
            if earlier.random == before:
                self.records[self._last_random] = earlier._replace(random=None)
        self._last_random = len(self.records)
        return after

    # ------------------------------------------------------------------ results between units

    def _hand_out(self, packed: Any, module: nn.Module, call: tuple[int, int]) -> Any:
        """A result for the code between units; a copy where that modifies it."""

        def given(leaf: Any, number: int) -> Any:
            if is_description(leaf):
                self._missing.add((*call, number))
                return unknown_values(leaf, self._device)
            if self._is_copied(call):
                return leaf.clone()
            return leaf.view_as(leaf) if leaf.is_leaf and leaf.requires_grad else leaf

        with self.lineage.paused():
            handed = map_leaves(given, packed)
        self._note(handed, call)
        return unpack_result(handed, module, self._name(module))

    def _is_copied(self, call: tuple[int, int]) -> bool:
        return self._learned is None or call in self._learned.modified

    def _note(self, handed: Any, call: tuple[int, int]) -> None:
        def note(leaf: Any, number: int) -> Any:
            mark = (*call, number)
            self.lineage.mark(leaf, frozenset({mark}))
            self._memory[memory_of(leaf).cdata] = mark
            return leaf

        map_leaves(note, handed)

    def _use(self, marks: frozenset[Mark]) -> None:
        missing = self._missing & marks
        if missing:
            names = sorted({self._plan.units[number].name for number, _, _ in missing})
            raise ShoalError(
                f"stage {self._virtual} needs what {names[0]} has computed, which no first batch "
                "needed here: split the model elsewhere, with pp(…, cuts=[…])"
            )
        self.used |= marks

    def _read(self, marks: frozenset[Mark]) -> None:
        """The code between units depends on it, and every later stage runs that code, too."""
        self._use(marks)
        self._used_later |= marks

    def _decide(self, marks: frozenset[Mark]) -> None:
        """Python reads a number that was computed from results of units."""
        self._read(marks)
        if marks:
            self._decided_by = self._plan.units[max(marks)[0]].name

    def _compute_elsewhere(self, tensor: Tensor) -> None:
        """A tensor that is on another stage is about to be used."""
        slots = tensor_slots(self._plan.model)
        name = next((s.name for s in slots if s.tensor is tensor), "a tensor on the meta device")
        raise self._plan.refused(f"computes with {name} outside of the forward of its module")

    def _modify(self, tensor: Tensor) -> None:
        """A tensor is about to be written to."""
        mark = self._memory.get(memory_of(tensor).cdata)
        if mark is None:
            return
        self.modified.add(mark[:2])
        if not self._is_copied(mark[:2]) and mark not in self._missing:
            raise self._plan.refused(
                f"modifies in place what {self._plan.units[mark[0]].name} returned, which it did "
                "not do on the first batch"
            )

    def _name(self, module: nn.Module) -> str:
        return self._plan.units[self._number_of[module]].name

    # ------------------------------------------------------------------ what is sent on

    def message(self) -> list[tuple[Any, ...]]:
        """The records of all calls so far. Results that no later stage uses are described only."""
        needed = None if self._learned is None else self._needed(self._learned.used)

        def pruned(record: CallRecord, call: tuple[int, int]) -> CallRecord:
            def keep(leaf: Any, number: int) -> Any:
                if is_description(leaf) or needed is None or (*call, number) in needed:
                    return leaf
                return description_of(leaf)

            return record._replace(result=map_leaves(keep, record.result))

        pairs = zip(self.records, self._calls, strict=True)
        return [tuple(pruned(record, call)) for record, call in pairs]

    def _needed(self, later: set[Mark]) -> set[Mark]:
        """What later stages used before, and what the call where this forward was left uses.

        A unit may have been skipped (LayerDrop); then what came before it may be used instead.
        """
        needed = later | self._used_later
        made = set(self._calls)
        for number, count, _ in later:
            before = [call for call in self._calls if call[0] < number]
            is_due = min(self._plan.stages_of[self._plan.units[number].module]) <= self._virtual
            if is_due and (number, count) not in made and before:
                needed |= {(*before[-1], leaf) for leaf in range(_MOST_LEAVES)}
        return needed


_MOST_LEAVES = 16  # tensors of a result that are sent where a unit was skipped
