"""What torch.compile makes of a model trains like the model, under every strategy.

The backend "aot_eager" traces as inductor does, without a C++ compiler; `--whole` takes inductor.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from shoal.comm.executors.solo import solo_group
from shoal.comm.group import Group
from shoal.replica.compiled import graph_breaks, uncompiled
from shoal.train.job import Job
from tests.conftest import World
from tests.models import convnet, samples
from tests.scripts import script, shoal
from tests.seeds import seeded
from tests.splitting import (
    ADAMW,
    GPT_OPTIONS,
    SGD,
    assert_equal,
    assert_same,
    assert_script_refused,
    gpt,
    job_of,
    mlp,
    on_workers,
    refused,
    run,
    texts,
    train,
    whole,
    workers,
)

QUICK = ["single", "ddp", "zero(3)", "pp(2)", "tp(2)"]
FURTHER = [
    *("zero(1)", "zero(2)", 'ps(placement="rank0")', 'gossip(graph="complete")'),
    *('mapreduce(batch="mini")', "localsgd(every=1)", "ddp + pp(2)", "zero(3) + pp(2)"),
    'pp(2, schedule="zb-h1")',
]


@pytest.fixture(autouse=True)
def fresh_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # torch 2.11, made for CUDA where no GPU is visible, crashes if a thread was the first to do it
    torch._C._ensureCUDADeviceGuardSet()
    torch._dynamo.reset()  # type: ignore[no-untyped-call]
    graph_breaks().news()
    if "tqdm" in sys.modules:  # it is installed beside torch, which shows its progress then
        monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)
    yield
    torch._dynamo.reset()  # type: ignore[no-untyped-call]


def assert_compiled_is_equal(world: World, strategy: str, backend: bool | str) -> None:
    """Losses and parameters are those of one worker without compile; the last batch is short."""
    size = workers(strategy)
    models = [mlp() for _ in range(size)]
    data = samples(50)
    alone = train(solo_group(), "single", mlp(), data, 16)
    together = world(size, lambda g: train(g, strategy, models[g.rank], data, 16, compile=backend))
    assert_same(together, alone)


@pytest.mark.parametrize("strategy", QUICK)
def test_equals_one_worker_that_compiles_nothing(world: World, strategy: str) -> None:
    assert_compiled_is_equal(world, strategy, "aot_eager")


@pytest.mark.whole
@pytest.mark.parametrize("strategy", FURTHER)
def test_equals_one_worker_under_other_strategies(world: World, strategy: str) -> None:
    assert_compiled_is_equal(world, strategy, "aot_eager")


@pytest.mark.whole
@pytest.mark.parametrize("strategy", QUICK)
def test_inductor_equals_one_worker(world: World, strategy: str) -> None:
    assert_compiled_is_equal(world, strategy, True)


@pytest.mark.whole
@pytest.mark.parametrize("strategy", ["zero(3)", "pp(2)", "tp(2)", "cp(2)"])
def test_a_compiled_transformer_equals_one_that_is_not(world: World, strategy: str) -> None:
    size = workers(strategy)
    models = [gpt(2) for _ in range(size)]
    options = {**GPT_OPTIONS, "optimizer": SGD}
    alone = train(solo_group(), "single", gpt(2), texts(20), 8, **options)
    options["compile"] = "aot_eager"
    together = world(size, lambda g: train(g, strategy, models[g.rank], texts(20), 8, **options))
    assert_same(together, alone)
    assert not graph_breaks().news()


def hogwild_in_turns(world: World, **options: Any) -> list[Any]:
    def body(job: Job, step: Any) -> Any:
        for rows in job.batches(samples(48), 8):
            for rank in range(job.size):
                if job.rank == rank:
                    step(rows)
                job.group.barrier().wait()
        return {name: tensor.clone() for name, tensor in step.model.state_dict().items()}

    return on_workers(world, "hogwild", mlp, body, size=2, **options)


def test_hogwild_writes_into_weights_that_compiled_models_read(world: World) -> None:
    compiled = hogwild_in_turns(world, compile="aot_eager")
    for found, expected in zip(compiled, hogwild_in_turns(world), strict=True):
        torch.testing.assert_close(found, expected)


class Dropping(nn.Module):
    """Its blocks are computed again in the backward, with the same dropout."""

    def __init__(self) -> None:
        super().__init__()
        widths = [(6, 12), (12, 12), (12, 3)]
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(*width), nn.Tanh(), nn.Dropout(0.3)) for width in widths
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param(True, marks=pytest.mark.whole)])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_dropout_of_recomputed_blocks_is_that_without_compile(
    accumulate: int, backend: bool | str
) -> None:
    def trained(**options: Any) -> Any:
        model = seeded(0)(Dropping)()
        options["accumulate"] = accumulate
        return train(solo_group(), "single", model, samples(50), 16, **options)

    assert_same([trained(compile=backend)], trained())


def test_batchnorm_of_all_replicas_stays_in_the_graph(world: World) -> None:
    data = samples(40, (1, 4, 4))
    models = [convnet(), convnet()]
    alone = train(solo_group(), "single", convnet(), data, 20)
    together = world(2, lambda g: train(g, "ddp", models[g.rank], data, 20, compile="aot_eager"))
    assert_same(together, alone)
    assert torch.__version__ < "2.12" or not graph_breaks().news()


class Breaking(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        torch._dynamo.graph_break()
        return x + 1


def breaking() -> nn.Module:
    torch.manual_seed(0)
    return Breaking(nn.Linear(6, 3))


def test_graph_breaks_are_told_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    train(solo_group(), "single", breaking(), samples(24), 8, compile="eager")
    (line,) = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"shoal: compile: 1 graph break, .*: replica/test_compiled.py:\d+ .*", line)


@pytest.mark.parametrize(("accumulate", "graphs"), [(1, 2), (2, 3)])
def test_shapes_are_compiled_for_one_size_then_for_all(accumulate: int, graphs: int) -> None:
    from torch._dynamo.utils import counters

    counters.clear()
    data = [batch(n) for n in range(5, 20)]
    train(solo_group(), "single", mlp(), data, None, compile="eager", accumulate=accumulate)
    assert counters["stats"]["unique_graphs"] == graphs


def batch(n: int) -> tuple[Tensor, Tensor]:
    return tuple(samples(n).tensors)


def saved_and_loaded(group: Group, path: Path, save: bool, compiled: bool, outside: bool) -> Any:
    model = mlp()
    options = {"compile": "eager"} if compiled and not outside else {}
    given: Any = torch.compile(model, backend="eager") if compiled and outside else model
    with job_of(group, "single", given, optimizer=ADAMW, **options) as (job, step):
        if not save:
            job.load(path)
        for rows in job.batches(samples(32), 8):
            step(rows)
            if save and job.steps == 2:
                job.save(path)
        return whole(step)


@pytest.mark.parametrize("outside", [False, True], ids=["compile=", "torch.compile"])
@pytest.mark.parametrize("saves_compiled", [True, False])
def test_checkpoints_have_the_names_of_the_plain_model(
    tmp_path: Path, saves_compiled: bool, outside: bool
) -> None:
    path = tmp_path / "saved"
    saved, loaded = (
        saved_and_loaded(solo_group(), path, saves, saves is saves_compiled, outside)
        for saves in (True, False)
    )
    assert list(saved) == list(loaded) == list(mlp().state_dict())
    for name, tensor in saved.items():
        torch.testing.assert_close(loaded[name], tensor)


@pytest.mark.parametrize("strategy", ["ddp", "zero(3)"])
def test_a_model_that_the_script_has_compiled(world: World, strategy: str) -> None:
    given: list[Any] = [torch.compile(mlp(), backend="eager") for _ in range(2)]
    alone = train(solo_group(), "single", mlp(), samples(40), 16)
    assert_same(world(2, lambda g: train(g, strategy, given[g.rank], samples(40), 16)), alone)


def test_a_module_that_the_script_has_compiled_keeps_its_names() -> None:
    model = mlp()
    names = list(model.state_dict())
    model[2] = torch.compile(model[2], backend="eager")  # type: ignore[index,operator]
    plain, compiler = uncompiled(model)
    assert list(plain.state_dict()) == names and plain is model and compiler is None
    assert plain[2]._compiled_call_impl is not None  # type: ignore[index]


def stepping(job: Job, model: nn.Module) -> None:
    job.step(model, F.cross_entropy, optimizer=SGD)


def own_loop(job: Job, model: Any) -> list[float]:
    model, optimizer = job.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    losses = []
    for x, y in job.batches(samples(40), 16):
        optimizer.zero_grad()
        losses.append(float(job.backward(F.cross_entropy(model(x), y))))
        optimizer.step()

    return losses


def test_the_users_own_loop_takes_a_compiled_model(world: World) -> None:
    given = [torch.compile(mlp(), backend="eager") for _ in range(2)]
    alone = run(solo_group(), "single", mlp(), own_loop)
    assert_same(world(2, lambda g: run(g, "ddp", given[g.rank], own_loop)), alone)


def in_place() -> nn.Module:
    model = mlp()
    model.compile(backend="eager")  # type: ignore[no-untyped-call]
    return model


def outside() -> Any:
    return torch.compile(mlp(), backend="eager")


@pytest.mark.parametrize(("script", "make"), [(stepping, in_place), (own_loop, outside)])
def test_the_scripts_own_calls_are_not_compiled_where_layers_change(
    world: World, script: Any, make: Any
) -> None:
    assert_script_refused(world, "zero(3)", script, r"compiled by torch\.compile.*zero\(3\)", make)


def test_evaluation_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    with job_of(solo_group(), "single", mlp(), compile="eager") as (job, step):
        for rows in job.batches(samples(16), 8):
            step(rows)
        compiled = job.evaluate(F.cross_entropy, samples(20), 10)
        monkeypatch.setattr(step.engine.stage, "_compiled", step.model)
        assert compiled == pytest.approx(job.evaluate(F.cross_entropy, samples(20), 10))


@pytest.mark.parametrize("options", [{"accumulate": 2}, {"precision": "bf16"}])
def test_options_beside_compile(world: World, options: dict[str, Any]) -> None:
    if "precision" in options:
        train(solo_group(), "single", mlp(), samples(20), 8, compile="aot_eager", **options)
    else:
        assert_equal(world, 2, "ddp", mlp, samples(50), 16, compile="aot_eager", **options)


@pytest.mark.whole
@pytest.mark.parametrize("backend", ["aot_eager", True])
def test_exact_bits_hold_over_the_number_of_workers(world: World, backend: bool | str) -> None:
    options: dict[str, Any] = {"compile": backend, "exact": True, "microbatches": 4}
    alone = train(solo_group(), "single", mlp(), samples(44), 16, **options)
    for size in (2, 4):
        models = [mlp() for _ in range(size)]
        together = world(
            size,
            lambda g: train(g, "ddp", models[g.rank], samples(44), 16, **options),  # noqa: B023
        )
        assert_same(together, alone, exactly=True)


@pytest.mark.parametrize(
    ("strategy", "options", "sentence"),
    [
        ("ddp", {"compile": "inductr"}, "a mode or a backend.*did you mean 'inductor'"),
        ("pp(2)", {"compile": True, "exact": True}, "omit compile"),
        ("zero(3)", {"compile": "reduce-overhead"}, "keeps its address"),
        ("pp(2)", {"compile": "reduce-overhead"}, "accumulate=1 without pp"),
    ],
)
def test_what_is_refused(
    world: World, strategy: str, options: dict[str, Any], sentence: str
) -> None:
    assert re.search(sentence, refused(world, 2, strategy, mlp, **options))


NO_COMPILER = """
import sys, torch
from functools import partial
import shoal

def train(job):
    model = torch.nn.Linear(4, 2)
    step = job.step(model, torch.nn.functional.mse_loss, compile=True,
                    optimizer=partial(torch.optim.SGD, lr=0.1))
    step((torch.ones(4, 4), torch.ones(4, 2)))

shoal.run(train)
"""


@pytest.mark.whole
def test_without_a_compiler_it_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(NO_COMPILER)
    environment = {
        "PATH": "/nowhere",
        "CXX": "/nowhere/g++",
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path),
    }
    done = subprocess.run(
        [sys.executable, "train.py"], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "compile needs a C++ compiler" in done.stderr and "Traceback" not in done.stderr


COMPILED = script("""
def train(job):
    step = job.step(model(), loss, optimizer=sgd, compile="aot_eager")
    for batch in job.batches(data, batch_size=20):
        step(batch)
""")


@pytest.mark.whole
@pytest.mark.parametrize(
    "words", ["verify -n 2 -s ddp train.py", "memory -n 2 train.py", "plan train.py"]
)
def test_commands_about_a_script_that_compiles(tmp_path: Path, words: str) -> None:
    (tmp_path / "train.py").write_text(COMPILED)
    done = shoal(*words.split(), cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
