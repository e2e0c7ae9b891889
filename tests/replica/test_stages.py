"""Where a model is cut, and who holds what."""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from shoal.errors import BadInput
from shoal.examples.gpt import GPT, Block, Size
from shoal.replica.pipeline.balance import balanced_split
from shoal.replica.pipeline.graph_split import GraphSplit
from shoal.replica.pipeline.stages import Stages
from shoal.replica.split.stage_check import StageCheck
from tests.conftest import World
from tests.models import samples
from tests.splitting import assert_equal, refused, train


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
    found = balanced_split(costs, places, [1.0] * len(places), parts, slack=0.0)

    def dearest(cuts: tuple[int, ...]) -> int:
        edges = [0, *cuts, len(costs)]
        return max(sum(costs[a:b]) for a, b in itertools.pairwise(edges))

    every = list(itertools.combinations(places, parts - 1))
    if not every:
        assert found is None
    else:
        assert found is not None
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
    model[2].weight = model[0].weight  # type: ignore[union-attr]
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


class Outer(nn.Module):
    """A trunk inside a module, as Hugging Face's models have it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.transformer = Inner()
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.transformer(x)
        return self.head(hidden), hidden


@pytest.mark.parametrize(("size", "chunks"), [(2, 1), (2, 2), (3, 1)])
def test_a_trunk_inside_a_module_is_found(size: int, chunks: int) -> None:
    model = Outer()
    stages = Stages(model, size, chunks)
    assert all(cut.startswith("transformer.h.") for cut in stages.cuts)
    assert stages.holders["transformer.scale"] == tuple(range(size))
    x = torch.randn(3, 4)
    values: tuple[Tensor, ...] = (x,)
    for virtual in range(stages.virtual_stages):
        values = stages.segment(virtual)(*values)
    for found, wanted in zip(values, model(x), strict=True):
        assert torch.equal(found, wanted)


def test_training_and_evaluating_are_traced_apart() -> None:
    class Dropping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 4)
            self.second = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.second(nn.functional.dropout(self.first(x), 0.9, self.training))
            return out

    model = Dropping()
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
        ([], "3 stages need 2 cuts, got 0"),
        (["blocks.1", "blocks.2", "blocks.3"], "3 stages need 2 cuts, got 3"),
        (["blocks.2", "blocks.1"], "not in the order"),
    ],
)
def test_cuts_that_make_no_sense_are_refused(cuts: list[str], said: str) -> None:
    with pytest.raises(BadInput) as caught:
        Stages(gpt(), 3, cuts=cuts)
    assert said in str(caught.value)


def test_inputs_that_the_model_does_not_take_are_refused() -> None:
    with pytest.raises(BadInput, match="cannot be called with this batch"):
        Stages(gpt(), 2).bind_inputs({"words": torch.zeros(1)})


class Optional(nn.Module):
    """Its mask cannot be traced, and without required arguments a batch may have one."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        assert x is not None
        if mask is not None and mask.dim() == 1:
            x = x * mask
        for block in self.blocks:
            x = block(x)
        return x


def test_a_forward_that_some_optional_argument_makes_untraceable_is_split_between_modules() -> None:
    assert Stages(Optional(), 2).replays


class _ByType(nn.Module):
    """It asks for the type of its input, or of what a module returns."""

    def __init__(self, question: Callable[[Any], bool]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.head = nn.Linear(6, 3)
        self.question = question

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer(x)
            if self.question(x):
                x = torch.tanh(x)
        return self.head(x)


@pytest.mark.parametrize("question", [torch.is_tensor, lambda x: isinstance(x, Tensor)])
def test_a_forward_that_asks_for_types_is_split_between_modules(
    world: World, question: Callable[[Any], bool]
) -> None:
    assert Stages(_ByType(question), 2).replays
    assert_equal(world, 2, "pp(2)", lambda: _ByType(question), samples(16))


def test_a_question_whose_answer_changes_nothing_does_not_matter() -> None:
    assert not Stages(_ByType(lambda x: isinstance(x, int | str)), 2).replays
    assert isinstance(1, int) and isinstance.__module__ == "builtins"


class _Nested(nn.Module):
    """A traced value has every attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3))

    def forward(self, x: Any) -> Any:
        return self.layers(x.tensors if hasattr(x, "tensors") else x)


def test_a_trace_that_does_not_fit_the_batch_is_refused(world: World) -> None:
    said = refused(world, 2, "pp(2)", _Nested, samples(16))
    assert re.search(r"_Nested, traced .* \(AttributeError: .* 'tensors'", said)


class _FixedFeatures(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Any:
        with torch.no_grad():
            x = torch.tanh(self.layers[0](x))
        for layer in self.layers[1:]:
            x = torch.tanh(layer(x))
        return self.head(x)


def test_modules_that_a_forward_calls_without_gradients_stay_as_they_are(world: World) -> None:
    assert Stages(_FixedFeatures(), 2).replays
    assert_equal(world, 2, "pp(2)", _FixedFeatures, samples(16))


def test_a_gradient_that_stages_lose_is_refused_by_the_name_of_its_parameter(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.replica.pipeline.faithful_trace._modes", tuple)  # a wrong trace
    said = refused(world, 2, "pp(2)", _FixedFeatures, samples(16))
    assert re.search(r"split at .*, do not give layers\.0\.weight the gradient", said)


def test_gradients_that_cannot_be_compared_are_named_at_the_start(
    world: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = StageCheck._expected

    def fails(*args: Any, **options: Any) -> Any:
        return expected(*args, **options) if options else 1 / 0

    monkeypatch.setattr(StageCheck, "_expected", fails)
    models = [_FixedFeatures() for _ in range(2)]
    world(2, lambda group: train(group, "pp(2)", models[group.rank], samples(16), 8))
    assert capsys.readouterr().err.count("_FixedFeatures could not be compared") == 1


class _TiedAndRandom(nn.Module):
    """Weights that two stages use, dropout in a function, BatchNorm, a parameter that is fixed."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.norm = nn.BatchNorm1d(6)
        self.layers[3].weight = self.layers[0].weight
        self.layers[1].bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Any:
        for layer in self.layers:
            x = nn.functional.dropout(torch.tanh(layer(x)), 0.5, self.training)
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
    strategy = f'pp(2, schedule="{schedule}")'
    models = [_TiedAndRandom() for _ in range(2)]
    world(2, lambda group: train(group, strategy, models[group.rank], samples(16), 8))
    assert verdicts == [-1.0]  # no difference, at once


class _Leaving(_FixedFeatures):
    def forward(self, x: Any) -> Any:
        if type(x) is not Tensor:
            sys.exit(1)
        return super().forward(x)


def test_a_forward_that_ends_the_process_while_it_is_traced_is_split_by_its_modules(
    world: World,
) -> None:
    assert Stages(_Leaving(), 2).replays
    assert_equal(world, 2, "pp(2)", _Leaving, samples(16))
    with pytest.raises(BadInput, match=r"_Leaving cannot be split .*it calls sys.exit\(1\)"):
        GraphSplit(_Leaving(), 2)


class _Mapped(_FixedFeatures):
    def forward(self, x: Tensor) -> Any:
        for layer in self.layers:
            x = torch.func.vmap(layer)(x)
        return self.head(x)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (_Mapped, "calls layers.0 inside a transform of torch.func"),
        (lambda: nn.Sequential(nn.Linear(6, 6), nn.LazyLinear(3)), "1 is a LazyLinear whose shape"),
        (lambda: nn.Sequential(*(torch.jit.script(nn.Linear(6, 6)) for _ in "ab")), "torch.jit"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_what_pp_cannot_split_is_refused(
    world: World, make: Callable[[], nn.Module], said: str
) -> None:
    assert re.search(said, refused(world, 2, "pp(2)", make, samples(16)))
