"""Where a model is cut, and who holds what."""

from __future__ import annotations

import itertools
import math
import re
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.comm.executors.solo import solo_group
from shoal.comm.group import Group
from shoal.commands.examples.gpt import GPT, Block, Size
from shoal.errors import BadInput
from shoal.replica.pipeline.balance import balanced_split
from shoal.replica.pipeline.graph_split import GraphSplit
from shoal.replica.pipeline.stages import Stages
from shoal.replica.split.comparison import gradients_of, is_close
from shoal.replica.split.stage_check import StageCheck
from shoal.train.job import Job
from tests.conftest import World
from tests.models import samples
from tests.splitting import assert_close, assert_equal, linears, model, on_workers, refused, train


def gpt(layers: int = 4) -> GPT:
    torch.manual_seed(0)
    return GPT(Size(layers, 64, 2, 8, 1e-3))


@given(
    st.lists(st.integers(0, 20), min_size=1, max_size=8).flatmap(
        lambda costs: st.tuples(
            st.just(costs),
            st.lists(st.integers(1, max(1, len(costs) - 1)), unique=True).map(sorted),
            st.integers(1, 4),
        )
    )
)
def test_no_cut_has_a_cheaper_dearest_part(case: tuple[list[int], list[int], int]) -> None:
    costs, places, parts = case
    places = [p for p in places if p < len(costs)]
    if len(places) < parts - 1:
        with pytest.raises(BadInput, match="something to train"):
            balanced_split(costs, places, [1.0] * len(places), parts)
        return
    found = balanced_split(costs, places, [1.0] * len(places), parts, slack=0.0)

    def dearest(cuts: tuple[int, ...]) -> int:
        edges = [0, *cuts, len(costs)]
        return max(sum(costs[a:b]) for a, b in itertools.pairwise(edges))

    every = itertools.combinations(places, parts - 1)
    assert dearest(tuple(found)) == min(map(dearest, every))


def test_among_equals_the_cheapest_cut_is_taken() -> None:
    assert balanced_split([5, 0, 0, 5], [1, 2, 3], [3.0, 1.0, 2.0], 2, slack=0.0) == [2]


def test_a_gpt_is_cut_between_blocks() -> None:
    assert Stages(gpt(4), 2).cuts == ("blocks.2",)
    assert Stages(gpt(4), 4).cuts == ("blocks.1", "blocks.2", "blocks.3")
    assert Stages(gpt(4), 2, chunks=2).cuts == ("blocks.1", "blocks.2", "blocks.3")


def test_the_heavier_layers_get_a_stage_of_their_own() -> None:
    widths = [8, 64, 64, 8, 8, 8]
    model = nn.Sequential(*(nn.Linear(a, b) for a, b in itertools.pairwise(widths)))
    assert Stages(model, 3).cuts == ("1", "2")


def test_blocks_are_opened_where_there_are_too_few_or_it_balances_better() -> None:
    assert len(Stages(gpt(2), 4, chunks=2).cuts) == 7
    assert Stages(nn.Sequential(*(Block(16, 2) for _ in range(3))), 2).cuts == ("1.norm2",)
    assert Stages(nn.Sequential(*(Block(16, 2) for _ in range(7))), 2).cuts == ("3",)


def test_a_tied_embedding_has_two_holders() -> None:
    stages = Stages(gpt(4), 2)
    assert stages.holders["tokens.weight"] == (0, 1)
    assert stages.holders["positions.weight"] == (0,)
    assert stages.holders["norm.weight"] == (1,)
    assert {n for n, h in stages.holders.items() if len(h) > 1} == {"tokens.weight"}


def test_a_tie_by_another_name_is_a_tie() -> None:
    model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 4), nn.Linear(4, 9, bias=False))
    model[2].weight = model[0].weight
    stages = Stages(model, 2)
    assert stages.aliases["2.weight"] == "0.weight"
    assert stages.holders["0.weight"] == (0, 1)
    assert next(name for name, _ in stages.keep(1)) == "0.weight"


@pytest.mark.parametrize("stage", [0, 1])
def test_a_stage_keeps_its_own_tensors_and_the_shapes_of_others(stage: int) -> None:
    model = gpt(4)
    shapes = {name: p.shape for name, p in model.named_parameters()}
    whole = sum(p.numel() for p in model.parameters())
    stages = Stages(model, 2)
    named = stages.keep(stage)
    assert {name: p.shape for name, p in model.named_parameters()} == shapes
    here = {n for n, p in model.named_parameters() if p.device.type != "meta"}
    assert here == {name for name, _ in named}
    assert sum(p.numel() for _, p in named) < whole / 2 + model.tokens.weight.numel()


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.h = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4))
        self.register_buffer("scale", torch.full((4,), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.h:
            x = block(x) * self.scale
        return x


@model(transformer=Inner, head=(4, 2))
def outer(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """A trunk inside a module, as Hugging Face's models have it."""
    hidden = self.transformer(x)
    return self.head(hidden), hidden


@pytest.mark.parametrize(("size", "chunks"), [(2, 1), (2, 2), (3, 1)])
def test_a_trunk_inside_a_module_is_found(size: int, chunks: int) -> None:
    model = outer()
    stages = Stages(model, size, chunks)
    assert all(cut.startswith("transformer.h.") for cut in stages.cuts)
    assert stages.holders["transformer.scale"] == tuple(range(size))
    x = torch.randn(3, 4)
    values: tuple[Tensor, ...] = (x,)
    for virtual in range(stages.virtual_stages):
        values = stages.segment(virtual)(*values)
    for found, wanted in zip(values, model(x), strict=True):
        assert torch.equal(found, wanted)


@model(first=(4, 4), second=(4, 4))
def dropping(self: Any, x: Tensor) -> Tensor:
    return self.second(F.dropout(self.first(x), 0.9, self.training))


def test_training_and_evaluating_are_traced_apart() -> None:
    model = dropping()
    model.second.eval()
    stages = Stages(model, 2)
    assert model.training and not model.second.training
    x = torch.randn(50, 4)
    model.eval()
    assert torch.equal(stages.segment(1)(*stages.segment(0)(x)), model(x))
    model.train()
    dropped = stages.segment(1)(*stages.segment(0)(x))
    assert len(dropped.unique(dim=0)) < 50


def test_a_cut_may_open_a_block() -> None:
    stages = Stages(gpt(2), 2, cuts=["blocks.0.mlp"])
    assert stages.holders["blocks.0.attention.qkv.weight"] == (0,)
    assert stages.holders["blocks.0.mlp.up.weight"] == (1,)
    assert stages.holders["blocks.0.norm1.weight"] == (0,)


@pytest.mark.parametrize(
    ("cuts", "said"),
    [
        (["blocks.9"], "the model has no such module; it has positions, blocks.0, blocks.1"),
        ([""], "no such module"),
        (["blocks.1", "blocks.2", "blocks.3"], "3 stages need 2 modules"),
        (["blocks.2", "blocks.1"], "in the order in which"),
    ],
)
def test_cuts_that_make_no_sense_are_refused(cuts: list[str], said: str) -> None:
    with pytest.raises(BadInput, match=re.escape(said)):
        Stages(gpt(), 3, cuts=cuts)


def test_inputs_that_the_model_does_not_take_are_refused() -> None:
    with pytest.raises(BadInput, match="cannot be called with this batch"):
        Stages(gpt(), 2).bind_inputs({"words": torch.zeros(1)})


@model(blocks=linears(4))
def optional(self: Any, x: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
    """Its mask cannot be traced, and without required arguments a batch may have one."""
    if mask is not None and mask.dim() == 1:
        x = x * mask
    for block in self.blocks:
        x = block(x)
    return x


def by_type(question: Callable[[Any], bool]) -> type[nn.Module]:
    """It asks for the type of what a module returns."""

    @model(layers=linears(4), head=(6, 3))
    def by_type(self: Any, x: Any) -> Any:
        for layer in self.layers:
            x = layer(x)
            if question(x):
                x = torch.tanh(x)
        return self.head(x)

    return by_type


def test_a_question_whose_answer_changes_nothing_does_not_matter() -> None:
    assert not Stages(by_type(lambda x: isinstance(x, int | str))(), 2).replays
    assert isinstance(1, int) and isinstance.__module__ == "builtins"


@model(layers=linears(4), head=(6, 3))
def fixed_features(self: Any, x: Tensor) -> Any:
    with torch.no_grad():
        x = torch.tanh(self.layers[0](x))
    for layer in self.layers[1:]:
        x = torch.tanh(layer(x))
    return self.head(x)


def test_a_gradient_that_stages_lose_is_refused_by_the_name_of_its_parameter(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.replica.pipeline.faithful_trace._modes", tuple)  # a wrong trace
    said = refused(world, 2, "pp(2)", fixed_features, samples(16))
    assert re.search(r"split at .*, do not give layers\.0\.weight the gradient", said)


def test_gradients_that_cannot_be_compared_are_named_at_the_start(
    world: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = StageCheck._expected

    def fails(*args: Any, **options: Any) -> Any:
        return expected(*args, **options) if options else 1 / 0

    monkeypatch.setattr(StageCheck, "_expected", fails)
    assert_equal(world, 2, "pp(2)", fixed_features, samples(16))
    assert capsys.readouterr().err.count("fixed_features could not be compared") == 1


@model(layers=linears(4), norm=lambda: nn.BatchNorm1d(6))
def tied_and_random(self: Any, x: Tensor) -> Any:
    for layer in self.layers:
        x = F.dropout(torch.tanh(layer(x)), 0.5, self.training)
    return self.norm(x)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_gradients_of_tied_weights_and_with_dropout_are_compared(
    world: World, monkeypatch: pytest.MonkeyPatch, schedule: str
) -> None:
    verdicts: list[float] = []
    judge = StageCheck._judge

    def note(*args: Any) -> float:
        verdicts.append(judge(*args))
        return verdicts[-1]

    monkeypatch.setattr(StageCheck, "_judge", note)

    def make() -> nn.Module:
        made = tied_and_random()
        made.layers[3].weight = made.layers[0].weight
        made.layers[1].bias.requires_grad_(False)
        return made

    def body(job: Job, step: Any) -> None:
        step(next(job.batches(samples(16), 8)))

    on_workers(world, f'pp(2, schedule="{schedule}")', make, body)
    assert verdicts == [-1.0]  # no difference, at once


@model(layers=linears(4), head=(6, 3))
def leaving(self: Any, x: Any) -> Any:
    if type(x) is not Tensor:
        sys.exit(1)
    for layer in self.layers:
        x = torch.tanh(layer(x))
    return self.head(x)


def test_a_forward_that_ends_the_process_while_it_is_traced() -> None:
    with pytest.raises(BadInput, match=r"leaving cannot be split .*it calls sys.exit\(1\)"):
        GraphSplit(leaving(), 2)


@pytest.mark.parametrize(
    "make",
    [
        *(optional, fixed_features, leaving),  # without gradients in some modules, the second one
        *(by_type(torch.is_tensor), by_type(lambda x: isinstance(x, Tensor))),
    ],
)
def test_what_torch_fx_does_not_follow_is_split_between_modules(
    world: World, make: type[nn.Module]
) -> None:
    assert Stages(make(), 2).replays
    assert_equal(world, 2, "pp(2)", make, samples(16))


@model(layers=linears(4), head=(6, 3))
def mapped(self: Any, x: Tensor) -> Any:
    for layer in self.layers:
        x = torch.func.vmap(layer)(x)
    return self.head(x)


@model(layers=lambda: nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3)))
def nested(self: Any, x: Any) -> Any:
    """A traced value has every attribute."""
    return self.layers(x.tensors if hasattr(x, "tensors") else x)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (mapped, "calls layers.0 inside a transform of torch.func"),
        (nested, r"nested, traced .* \(AttributeError: .* 'tensors'"),
        (lambda: nn.Sequential(nn.Linear(6, 6), nn.LazyLinear(3)), "1 is a LazyLinear whose shape"),
        (lambda: nn.Sequential(*(torch.jit.script(nn.Linear(6, 6)) for _ in "ab")), "torch.jit"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_what_pp_cannot_split_is_refused(
    world: World, make: Callable[[], nn.Module], said: str
) -> None:
    assert re.search(said, refused(world, 2, "pp(2)", make, samples(16)))


def test_nan_in_the_same_places_is_equal_and_hides_no_difference() -> None:
    expected = torch.tensor([1.0, math.nan, 3.0])
    assert is_close(expected, expected.clone())
    assert not is_close(expected, torch.tensor([1.0, math.nan, 3.1]))
    assert not is_close(expected, torch.tensor([1.0, 2.0, 3.0]))


def test_an_output_of_nan_does_not_hide_gradients_of_the_others() -> None:
    weight = torch.ones(2, requires_grad=True)
    outputs = [torch.stack([weight[0] * 2, weight[1] * 3, torch.tensor(math.nan)])]
    gradient = gradients_of(outputs, {"weight": weight})["weight"]
    assert gradient is not None and bool(gradient.isfinite().all()) and bool(gradient.all())


# ---- tensors that modules keep as attributes while they compute ----------------------------------


@model(linear=(6, 6))
def block(self: Any, x: Tensor) -> Tensor:
    y = torch.tanh(self.linear(x))
    if self.training:
        self.aux = y.square().mean()
    return y


BLOCKS = {"blocks": lambda: nn.ModuleList(block() for _ in range(4)), "last": (6, 3)}


@model(**BLOCKS)
def net(self: Any, x: Tensor) -> Tensor:
    """The blocks keep an auxiliary loss in training mode alone."""
    for each in self.blocks:
        x = each(x)
    return self.last(x)


@model(**BLOCKS)
def adding(self: Any, x: Tensor) -> Tensor:
    return net.forward(self, x) + getattr(self.blocks[0], "aux", 0.0)


@model(**BLOCKS)
def keeping(self: Any, x: Tensor) -> Tensor:
    """The model itself keeps what its loss uses."""
    x = self.blocks[0](x)
    self.kept = x.square().mean()
    for each in self.blocks[1:]:
        x = each(x)
    return self.last(x)


def untraced(kind: type[nn.Module]) -> type[nn.Module]:
    @model(**BLOCKS)
    def untraced(self: Any, x: Tensor) -> Tensor:
        return kind.forward(self, x if bool(x.isfinite().all()) else x * 0)

    return untraced


def _with_aux(model: Any, outputs: Tensor, targets: Tensor) -> Any:
    return F.cross_entropy(outputs, targets) + sum(block.aux for block in model.blocks)


def _with_kept(model: Any, outputs: Tensor, targets: Tensor) -> Any:
    return F.cross_entropy(outputs, targets) + model.kept


def _pipelined(world: World, make: Callable[[], nn.Module], loss: Any = None) -> Any:
    models = [make(), make()]

    def run(group: Group) -> Any:
        model = models[group.rank]
        used = F.cross_entropy if loss is None else partial(loss, model)
        return train(group, "pp(2)", model, samples(16), 8, loss=used)

    return world(2, run)


@pytest.mark.parametrize(
    ("make", "loss"),
    [(net, _with_aux), (untraced(net), _with_aux), (adding, None), (untraced(adding), None)],
)
def test_what_another_stage_keeps_cannot_be_used(
    world: World, make: Callable[[], nn.Module], loss: Any
) -> None:
    with pytest.raises(BadInput, match=r"blocks\.0\.aux is set by stage 0 .* let the forward of"):
        _pipelined(world, make, loss)


@pytest.mark.parametrize("make", [net, untraced(net)])
def test_what_is_kept_and_not_used_does_not_matter(
    world: World, make: Callable[[], nn.Module]
) -> None:
    assert_equal(world, 2, "pp(2)", make, samples(16))


def test_the_loss_uses_what_the_model_keeps(world: World) -> None:
    whole = keeping()
    alone = train(solo_group(), "single", whole, samples(16), 8, loss=partial(_with_kept, whole))
    losses, tensors = _pipelined(world, keeping, _with_kept)[0]
    assert losses == pytest.approx(alone[0], abs=2e-5)
    assert_close(tensors, alone[1])
