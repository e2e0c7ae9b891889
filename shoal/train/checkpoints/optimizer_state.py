"""The state of an optimizer as tensors by name, and back.

A tensor is stored as "parameter/key"; what is no tensor goes into JSON, with a list of all keys.

Schedulers of a loop of the user's own: found by their optimizers, saved and continued.

torch gives an optimizer no list of its schedulers, so they are looked for when a checkpoint is
written or loaded, among the objects that refer to it. One inside of another belongs to that.
A script that runs finished epochs without batches steps them there, too: what was loaded counts
again when it begins to train.
"""

from __future__ import annotations

import base64
import gc
import json
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from shoal.comm.objects import decode, encode
from shoal.errors import BadInput, CheckpointError, ShoalError
from shoal.replica.deferred_init import is_placeholder
from shoal.replica.split.state_dicts import state_of
from shoal.runtime.checkpoint_folders import damaged
from shoal.runtime.decoders import convert
from shoal.server.model.expected_state import Form, Forms, expected_state, misfit
from shoal.sync.movable_shards import parameter_groups


class SavedScheduler(msgspec.Struct, frozen=True):
    """As a manifest has it; `state` is encoded, in base64."""

    optimizer: int  # the number of its optimizer
    kind: str
    state: str


class Schedulers:
    """Those of the optimizers of `job.setup`."""

    def __init__(self, optimizers: Callable[[], Sequence[Optimizer]], say: Callable[[str], None]):
        self._optimizers = optimizers
        self._say = say
        self._loaded: list[tuple[LRScheduler, dict[str, Any], list[float]]] = []

    def document(self) -> list[dict[str, Any]]:
        saved = []
        for (number, kind), scheduler in self._found():
            state = {key: _plain(value) for key, value in scheduler.state_dict().items()}
            try:
                text = base64.b64encode(encode(state)).decode()
            except BadInput:
                self._say(
                    f"checkpoints lack the state of the {kind}, which is no plain data: save what "
                    "it needs in `about` of job.save"
                )
                continue
            saved.append(msgspec.to_builtins(SavedScheduler(number, kind, text)))
        return saved

    def fit(self, document: Any) -> list[tuple[LRScheduler, dict[str, Any]]]:
        """Those that have a state, and it; nothing is changed. What has no place is said."""
        found = dict(self._found())
        fitting = []
        try:
            for saved in convert(document, list[SavedScheduler]):
                state = decode(base64.b64decode(saved.state))
                scheduler = found.get((saved.optimizer, saved.kind))
                if scheduler is None or scheduler.state_dict().keys() != state.keys():
                    self._say(
                        f"the checkpoint has the state of a {saved.kind}, and its optimizer has "
                        "none like it: make it before job.load"
                    )
                else:
                    fitting.append((scheduler, state))
        except (msgspec.ValidationError, ValueError, AttributeError, ShoalError) as error:
            raise CheckpointError(f"its schedulers: {error}") from error
        return fitting

    def load(self, fitting: list[tuple[LRScheduler, dict[str, Any]]]) -> None:
        """After their optimizers."""
        self._loaded = [(s, state, [float(r) for r in _rates(s)]) for s, state in fitting]
        self._put()

    def begin(self) -> None:
        """The script trains now: finished epochs are over."""
        if self._loaded:
            self._put()
            self._loaded.clear()

    def _put(self) -> None:
        for scheduler, state, rates in self._loaded:
            for key, present in scheduler.state_dict().items():
                if isinstance(present, dict):
                    state[key] = type(present)(state[key])  # such as a Counter
            scheduler.load_state_dict(dict(state))
            for group, present, rate in zip(
                scheduler.optimizer.param_groups, _rates(scheduler), rates, strict=True
            ):
                group["lr"] = present.fill_(rate) if isinstance(present, Tensor) else rate

    def _found(self) -> Iterator[tuple[tuple[int, str], LRScheduler]]:
        """By optimizer and kind; of one kind the first."""
        for number, optimizer in enumerate(self._optimizers()):
            referrers = gc.get_referrers(optimizer)
            owners = [o for d in referrers if type(d) is dict for o in gc.get_referrers(d)]
            own = {id(o): o for o in (*referrers, *owners) if isinstance(o, LRScheduler)}
            own = {key: o for key, o in own.items() if o.optimizer is optimizer}
            inner = {id(i) for o in own.values() for i in getattr(o, "_schedulers", ())}
            outer = {type(o).__name__: o for key, o in own.items() if key not in inner}
            if len(outer) + len(inner) < len(own):
                self._say(
                    f"checkpoints have the state of one of several schedulers of a kind that "
                    f"change one {type(optimizer).__name__}: save them in `about` of job.save"
                )
            yield from (((number, kind), scheduler) for kind, scheduler in outer.items())


def _rates(scheduler: LRScheduler) -> list[Any]:
    return [group["lr"] for group in scheduler.optimizer.param_groups]


def _plain(value: Any) -> Any:
    return dict(value) if isinstance(value, dict) else value


def model_tensors(
    model: nn.Module, without: Collection[str] = (), copy: bool = True
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The model's tensors of this rank, on the CPU, and the names that are tied to another."""
    tensors: dict[str, Tensor] = {}
    tied: dict[str, str] = {}
    seen: dict[tuple[int, torch.Size, tuple[int, ...]], str] = {}
    for name, value in state_of(model).items():
        if not isinstance(value, Tensor) or value.device.type == "meta":
            continue  # another worker holds it
        key = (value.data_ptr(), value.shape, value.stride())
        if value.numel() and key in seen:
            tied[name] = seen[key]
            continue
        seen[key] = name
        if name not in without:
            tensors[name] = on_cpu(value, copy)
    return tensors, tied


def fit_model(
    model: nn.Module, tensors: dict[str, Tensor], tied: dict[str, str], where: Path
) -> dict[str, Tensor]:
    """A tensor for each one of the model, tied ones included; another model's are an error."""
    if twice := sorted(set(tied) & set(tensors)):
        raise damaged(where, f"{twice[0]!r} is there twice")
    complete = {**tensors, **{name: tensors[t] for name, t in tied.items() if t in tensors}}
    targets = {n: t for n, t in state_of(model).items() if isinstance(t, Tensor)}
    for name, tensor in targets.items():
        saved = complete.get(name)
        if saved is None:
            raise _another_model(where, f"it has no tensor {name!r}")
        for there, here in ((tuple(saved.shape), tuple(tensor.shape)), (saved.dtype, tensor.dtype)):
            if there != here:
                raise _another_model(where, f"{name} is {there} there and {here} here")
    extra = sorted(set(complete) - set(targets))
    if extra:
        raise _another_model(where, f"this one has no tensor {extra[0]!r}")
    return complete


def copy_into(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Copy what `fit_model` returned into the model."""
    with torch.no_grad():
        for name, tensor in state_of(model).items():
            if isinstance(tensor, Tensor) and not is_placeholder(tensor):
                tensor.copy_(tensors[name])


def _another_model(where: Path, sentence: str) -> CheckpointError:
    return CheckpointError(f"the checkpoint at {where} is of another model: {sentence}")


def on_cpu(tensor: Tensor, copy: bool = True) -> Tensor:
    """Contiguous, on the CPU; without `copy` it may be the same memory."""
    return tensor.detach().to("cpu", copy=copy).contiguous()


State = dict[str, dict[str, Any]]  # by the name of a parameter, then by key


def optimizer_tensors(
    optimizer: torch.optim.Optimizer, named: list[tuple[str, nn.Parameter]], copy: bool = True
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The optimizer's state by parameter name: tensors, and a JSON-able rest."""
    names = {id(p): name for name, p in named}
    tensors: dict[str, Tensor] = {}
    values: State = {}
    for p, state in optimizer.state.items():
        name = names[id(p)]
        for key, value in state.items():
            if isinstance(value, Tensor):
                tensors[f"{name}/{key}"] = on_cpu(value, copy)
            else:
                values.setdefault(name, {})[key] = value
    keys = {names[id(p)]: sorted(state) for p, state in optimizer.state.items() if state}
    groups = parameter_groups(optimizer, named)
    kind = type(optimizer).__name__
    return tensors, {"class": kind, "groups": groups, "values": values, "keys": keys}


def join_optimizers(shards: list[dict[str, Any]]) -> dict[str, Any]:
    """The rest of `optimizer_tensors` of all shards, as that of the complete model.

    Groups with the same settings become one.
    """
    groups: dict[str, dict[str, Any]] = {}
    for shard in shards:
        for group in shard["groups"]:
            settings = {key: value for key, value in group.items() if key != "params"}
            joined = groups.setdefault(json.dumps(settings), {"params": [], **settings})
            joined["params"] += [n for n in group["params"] if n not in joined["params"]]
    by_parameter = {
        part: {name: value for shard in shards for name, value in shard[part].items()}
        for part in ("values", "keys")
    }
    return {"class": shards[0]["class"], "groups": list(groups.values()), **by_parameter}


class OptimizerRest(msgspec.Struct, frozen=True):
    """What the manifest has of an optimizer: the rest of `optimizer_tensors`."""

    kind: str = msgspec.field(name="class")
    groups: list[dict[str, Any]]
    values: dict[str, dict[str, Any]]
    keys: dict[str, list[str]]


def fit_optimizer(
    optimizer: torch.optim.Optimizer,
    named: list[tuple[str, nn.Parameter]],
    tensors: dict[str, Tensor],
    rest: OptimizerRest,
    of_model: Collection[str],
    where: Path,
) -> tuple[dict[str, Any], list[str]]:
    """A `state_dict` for an optimizer of the same class over the same parameters.

    Also the names of parameters that have no state and will need one. Changes nothing; what does
    not fit is an error. `of_model` are the names of the whole model.
    """
    if rest.kind != type(optimizer).__name__:
        raise CheckpointError(
            f"the checkpoint at {where} has the state of {rest.kind}, and the script now trains "
            f"with {type(optimizer).__name__}"
        )
    names = {id(p): name for name, p in named}
    document = optimizer.state_dict()
    pairs = list(zip(document["param_groups"], optimizer.param_groups, strict=True))
    for packed, group in pairs:  # numbers (lr, betas, …) of a copy become the saved ones
        if group_names := [names[id(p)] for p in group["params"]]:
            _restore_numbers(packed, _group_of(group_names, rest, where), where)
    settings = [
        {**group, **{k: v for k, v in packed.items() if k != "params"}} for packed, group in pairs
    ]
    expected = expected_state(optimizer, settings)
    state = _state_by_name(tensors, rest, of_model, where)
    document["state"] = {}
    bare = []
    for packed, group in pairs:
        for index, p in zip(packed["params"], group["params"], strict=True):
            name = names[id(p)]
            forms = None if expected is None else expected.get(p, {})
            if name in state:
                _check(name, state[name], p, forms, where)
                document["state"][index] = state[name]
            elif forms and p.requires_grad:
                bare.append(name)
    return document, bare


def own_state(optimizer: torch.optim.Optimizer) -> None:
    """Copies, in place of tensors that were loaded: these keep their file on the disk."""
    for state in optimizer.state.values():
        for key, value in state.items():
            if isinstance(value, Tensor) and value.device.type == "cpu":
                state[key] = value.clone()


def _group_of(names: list[str], rest: OptimizerRest, where: Path) -> dict[str, Any]:
    """The saved group that holds these parameters; it may also hold those of other ranks."""
    for group in rest.groups:
        saved = group.get("params")
        held = saved if isinstance(saved, list) else []
        if set(names) <= {name for name in held if isinstance(name, str)}:
            return group
    raise CheckpointError(
        f"the checkpoint at {where} has other parameter groups than the script: none holds "
        f"{names[0]} and the {len(names) - 1} others of its group"
    )


def _state_by_name(
    tensors: dict[str, Tensor], rest: OptimizerRest, of_model: Collection[str], where: Path
) -> State:
    state: State = {name: dict(value) for name, value in rest.values.items() if value}
    for full, tensor in tensors.items():
        name, _, key = full.rpartition("/")
        if key in state.get(name, {}):
            raise damaged(where, f"{full} is there twice")
        state.setdefault(name, {})[key] = tensor
    if strange := sorted(set(state) - set(of_model)):
        raise damaged(where, f"optimizer state of {strange[0]!r}, which the model has not")
    if rest.keys != {name: sorted(values) for name, values in state.items()}:
        raise damaged(where, "its optimizer state is not what its manifest lists")
    return state


def _check(name: str, state: dict[str, Any], p: Tensor, forms: Forms | None, where: Path) -> None:
    if missing := sorted(set(forms or {}) - set(state)):
        raise damaged(where, f"it has no {missing[0]} of {name}, which the optimizer needs")
    for key, value in state.items():
        problem = None
        if isinstance(value, Tensor):
            problem = misfit(key, Form.of(value), p, forms)
        elif key in (forms or {}) and not (key == "step" and _numbers_in(value) == -1):
            problem = f"{key} is no tensor"
        if problem:
            raise damaged(where, f"optimizer state of {name}: {problem}")


def _restore_numbers(group: dict[str, Any], saved: dict[str, Any], where: Path) -> None:
    """Restore numbers (lr, betas, weight_decay, …); flags stay as the script has them."""
    for key, now in group.items():
        if key != "params" and key in saved and _numbers_in(now) is not None:
            value = tuple(saved[key]) if isinstance(saved[key], list) else saved[key]
            if _numbers_in(value) != _numbers_in(now):
                raise damaged(where, f"{key}={saved[key]!r}")
            group[key] = value


def _numbers_in(value: Any) -> int | None:
    """The length of a tuple of numbers; -1 for a number, None for anything else."""
    items = value if isinstance(value, tuple) else (value,)
    for item in items:
        if not isinstance(item, (int, float)) or isinstance(item, bool):
            return None
        if not (abs(item) < 1e300 or item in (math.inf, -math.inf)):
            return None
    return len(value) if isinstance(value, tuple) else -1
