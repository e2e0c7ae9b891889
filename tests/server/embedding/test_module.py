"""shoal.Embedding takes the place of nn.Embedding, and its rows live elsewhere."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import shoal
from shoal.comm.executors.solo import solo_group
from shoal.comm.group import Group
from shoal.errors import BadInput, CheckpointError, NotBuilt
from shoal.server.embedding.module import (
    LocalStore,
    apply_embeddings,
    bind_embeddings,
    embeddings_of,
)
from shoal.server.embedding.spec import TableSpec
from shoal.strategy.strategy import parse
from shoal.train.job import Job
from tests.conftest import World
from tests.jobs import CPU

SGD = partial(torch.optim.SGD, lr=0.1)
ADAGRAD = partial(torch.optim.Adagrad, lr=0.1)
ADAM = partial(torch.optim.Adam, lr=0.01, betas=(0.8, 0.9))
# rows by the first, the rest of the model and nn.Embedding(sparse=True) by the others
OPTIMIZERS: dict[str, tuple[Any, Any, Any]] = {
    "sgd": (SGD, SGD, SGD),
    "adagrad": (ADAGRAD, ADAGRAD, ADAGRAD),
    "adagrad from 0.1": (partial(ADAGRAD, initial_accumulator_value=0.1),) * 3,
    "adam": (ADAM, ADAM, partial(torch.optim.SparseAdam, lr=0.01, betas=(0.8, 0.9))),
}


class Bags(nn.Module):
    """Sums of rows, with two calls of one embedding: (batch, 3) and (batch,) ids to 2 logits."""

    def __init__(self, rows: nn.Module):
        super().__init__()
        torch.manual_seed(1)
        self.rows = rows
        self.head = nn.Linear(4, 2)

    def forward(self, several: Tensor, one: Tensor) -> Tensor:
        logits: Tensor = self.head(self.rows(several).sum(1) * self.rows(one))
        return logits


def make_job(group: Group | None = None) -> Job:
    group = group or solo_group()
    return Job(parse("ddp" if group.size > 1 else "single"), group, device=CPU, seed=3)


def batches(job: Job, **options: Any) -> Any:
    """Of 60 samples, the last of which are a short batch."""
    random = torch.Generator().manual_seed(0)
    several, one = (torch.randint(0, 20, shape, generator=random) for shape in ((60, 3), (60,)))
    parts = [each.split(8) for each in (several, one, (several.sum(1) + one) % 2)]
    return job.batches([((a, b), y) for a, b, y in zip(*parts, strict=True)], **options)


def rows_of(embedding: shoal.Embedding) -> Tensor:
    with torch.no_grad():
        rows: Tensor = embedding(torch.arange(embedding.num_rows))
        return rows


def calls_of(embedding: shoal.Embedding) -> Mock:
    """Of the table of an embedding that is bound to a store."""
    bind_embeddings(embedding, SGD, seed=0)
    assert embedding.table is not None
    table = Mock(wraps=embedding.table)
    embedding.table = table
    return table


def ids_of(method: Mock) -> list[list[int]]:
    return [call.args[0].tolist() for call in method.call_args_list]


# ------------------------------------------------------------------------------ equal to torch's


@pytest.mark.product(pairs=True)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("lr", [None, lambda step: 0.1 / (1 + step)], ids=["", "falling lr"])
def test_training_equals_nn_embedding_with_sparse_gradients(
    optimizer: str, accumulate: int, lr: Callable[[int], float] | None
) -> None:
    """The last batch of an epoch is short; rows repeat within a sample, a batch, and calls."""
    for_rows, for_rest, for_sparse = OPTIMIZERS[optimizer]
    job = make_job()
    model = Bags(shoal.Embedding(20, 4, optimizer=for_rows))
    step = job.step(model, nn.CrossEntropyLoss(), optimizer=for_rest, accumulate=accumulate, lr=lr)
    assert isinstance(model.rows, shoal.Embedding)
    start = rows_of(model.rows)
    reference = Bags(nn.Embedding(20, 4, sparse=True, _weight=start))
    sparse = for_sparse(reference.rows.parameters())
    dense = for_rest(reference.head.parameters())
    base = sparse.defaults["lr"]
    for n, batch in enumerate(batches(job, epochs=2)):
        loss = step(batch)
        inputs, targets = batch
        expected = nn.functional.cross_entropy(reference(*inputs), targets)
        expected.backward()  # type: ignore[no-untyped-call]
        for one in (sparse, dense):
            for group in one.param_groups:
                group["lr"] = base if lr is None else lr(n)
            one.step()
            one.zero_grad()
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-5, atol=1e-6)
    assert step.steps == 16
    weight = reference.rows.weight
    assert isinstance(weight, Tensor)
    torch.testing.assert_close(rows_of(model.rows), weight.detach(), rtol=1e-4, atol=1e-5)


def test_rows_keep_their_ratio_to_the_learning_rate() -> None:
    embedding = shoal.Embedding(3, 1, init="zeros", optimizer=partial(torch.optim.SGD, lr=0.4))
    for lr, base in [(2.0, 0.1), (2.0, 0.0), (None, 0.1)]:
        embedding(torch.tensor([0])).sum().backward()
        apply_embeddings([embedding], lr, base)
    assert rows_of(embedding)[0].item() == pytest.approx(-(8.0 + 2.0 + 0.4))


# ------------------------------------------------------------------------------ pull and push


def test_a_step_pulls_and_pushes_every_row_once() -> None:
    embedding = shoal.Embedding(50, 2)
    table = calls_of(embedding)
    embedding(torch.tensor([[7, 7], [3, 9]])).sum().backward()
    embedding(torch.tensor([9, 1])).sum().backward()
    assert ids_of(table.pull) == [[3, 7, 9], [1, 9]] and not table.push.called
    for _ in range(2):
        apply_embeddings([embedding])
        assert ids_of(table.push) == [[1, 3, 7, 9]]


@given(
    calls=st.lists(st.lists(st.integers(0, 9), max_size=8), min_size=1, max_size=4),
    padding=st.none() | st.integers(-10, 9),
)
@settings(max_examples=60, deadline=None)
def test_gradients_are_those_of_nn_embedding(calls: list[list[int]], padding: int | None) -> None:
    """For any ids, any number of calls and any padding; no row twice, none without a call."""
    embedding = shoal.Embedding(10, 3, padding)
    reference = nn.Embedding(10, 3, padding)
    with torch.no_grad():
        reference.weight.copy_(rows_of(embedding))
    assert padding is None or not reference.weight[padding].any()
    for n, call in enumerate(calls):
        ids = torch.tensor(call, dtype=torch.int64)
        factors = torch.arange(3.0) + n
        out = embedding(ids)
        expected = reference(ids)
        assert torch.equal(out, expected)
        (out * out * factors).sum().backward()
        (expected * expected * factors).sum().backward()
    found = embedding.take_gradients()
    assert found is not None
    ids, grads = found
    assert ids.tolist() == sorted({i for call in calls for i in call} - {embedding.padding_idx})
    whole = torch.zeros(10, 3).index_add_(0, ids, grads)
    torch.testing.assert_close(whole, reference.weight.grad)
    assert embedding.take_gradients() is None


@pytest.mark.parametrize("shape", [(), (4,), (2, 3), (2, 3, 4), (0,), (0, 5)])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_ids_may_have_any_shape(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    embedding = shoal.Embedding(10, 3, optimizer=SGD)
    ids = torch.ones(shape, dtype=dtype)
    out = embedding(ids)
    assert out.shape == (*shape, 3) and out.dtype == torch.float32
    out.sum().backward()
    apply_embeddings([embedding])
    assert embedding.updates == 1


def test_without_gradients_rows_are_pulled_and_nothing_is_kept() -> None:
    embedding = shoal.Embedding(10, 3)
    table = calls_of(embedding)
    with torch.no_grad():
        assert not embedding(torch.tensor([1])).requires_grad
    embedding(torch.tensor([2]))  # no backward follows
    assert ids_of(table.pull) == [[1], [2]]
    assert embedding.take_gradients() is None
    out = embedding(torch.tensor([2]))
    leaf = weakref.ref(out.grad_fn.next_functions[0][0].variable)
    assert leaf() is not None
    del out
    gc.collect()
    assert leaf() is None


def test_an_embedding_that_was_first_used_in_inference_mode_can_be_trained() -> None:
    embedding = shoal.Embedding(10, 3, optimizer=ADAGRAD)
    with torch.inference_mode():
        before = embedding(torch.tensor([2])).clone()
    embedding(torch.tensor([2])).sum().backward()
    apply_embeddings([embedding])
    torch.testing.assert_close(rows_of(embedding)[2:3], before - 0.1)


def test_what_is_discarded_is_not_pushed() -> None:
    embedding = shoal.Embedding(10, 3)
    table = calls_of(embedding)
    embedding(torch.tensor([2])).sum().backward()
    embedding.discard()
    apply_embeddings([embedding])
    assert not table.push.called and embedding.updates == 0


# ------------------------------------------------------------------------------ in a model


def test_embeddings_go_by_their_place_in_the_model_or_their_name() -> None:
    shared = shoal.Embedding(3, 1)
    model = nn.ModuleDict(
        {"a": nn.Sequential(shared, nn.Tanh()), "b": shoal.Embedding(3, 1, name="b!"), "c": shared}
    )
    assert [name for name, _ in embeddings_of(model)] == ["a.0", "b!"]
    with pytest.raises(BadInput, match="two embeddings of the model have the name 'x'"):
        embeddings_of(nn.ModuleList([shoal.Embedding(3, 1, name="x") for _ in range(2)]))


def test_rows_depend_on_the_seed_of_the_job_and_the_name_in_the_model() -> None:
    def start(seed: int, name: str) -> Tensor:
        model = nn.ModuleDict({name: shoal.Embedding(5, 2)})
        rows_of(model[name])  # type: ignore[arg-type]  # looked at before the job knows it
        (embedding,) = bind_embeddings(model, SGD, seed)
        return rows_of(embedding)

    first = start(1, "users")
    assert torch.equal(start(1, "users"), first)
    assert torch.equal(TableSpec("users", 99, 2, seed=1).initial(torch.arange(5)), first)
    assert not torch.equal(start(2, "users"), first)
    assert not torch.equal(start(1, "films"), first)


def test_a_second_step_of_a_model_goes_on_with_its_rows() -> None:
    job = make_job()
    model = Bags(shoal.Embedding(20, 4))
    step = job.step(model, nn.CrossEntropyLoss(), optimizer=SGD)
    for batch in batches(job, steps=3):
        step(batch)
    (embedding,) = step.embeddings
    before = rows_of(embedding)
    job.step(model, nn.CrossEntropyLoss(), optimizer=ADAGRAD)
    assert torch.equal(rows_of(embedding), before)
    with pytest.raises(BadInput, match="have been trained already"):
        embedding.bind(LocalStore(), embedding.spec)


@pytest.mark.parametrize(
    "rows, optimizer, complaint",
    [
        (nn.Embedding(20, 4), SGD, "other embeddings"),
        (shoal.Embedding(20, 4, name="else"), SGD, "other embeddings"),
        (shoal.Embedding(5, 4), SGD, "table 'rows' has no row"),
        (shoal.Embedding(20, 4, optimizer=ADAGRAD), SGD, "another optimizer"),
    ],
)
def test_a_checkpoint_of_other_rows_is_refused(
    rows: nn.Module, optimizer: Any, complaint: str, tmp_path: Path
) -> None:
    job = make_job()
    step = job.step(Bags(shoal.Embedding(20, 4)), nn.CrossEntropyLoss(), optimizer=SGD)
    for batch in batches(job, steps=3):
        step(batch)
    job.save(tmp_path)
    other = make_job()
    other.step(Bags(rows), nn.CrossEntropyLoss(), optimizer=optimizer)
    with pytest.raises(CheckpointError, match=complaint):
        other.load(tmp_path)


# ------------------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    "ids, complaint",
    [
        (torch.tensor([[-1]]), "table 'users' has no row -1: ids are 0 to 9"),
        (torch.tensor([1.0]), "must be int64 or int32, not torch.float32"),
        (torch.tensor([1]), "has no optimizer: pass one"),
    ],
)
def test_what_cannot_be_trained_is_refused(ids: Tensor, complaint: str) -> None:
    embedding = shoal.Embedding(10, 3, name="users")
    with pytest.raises(BadInput, match=complaint):
        embedding(ids).sum().backward()
        apply_embeddings([embedding])


@pytest.mark.parametrize(
    "options, complaint",
    [
        ({"optimizer": partial(torch.optim.SGD, lr=0.1, momentum=0.9)}, r"SGD\(momentum=0.9\)"),
        ({"optimizer": SGD, "exact": True}, "exact=True"),
    ],
)
def test_a_step_that_rows_cannot_follow_is_refused(options: Any, complaint: str) -> None:
    with pytest.raises(BadInput, match=complaint):
        make_job().step(Bags(shoal.Embedding(20, 4)), nn.CrossEntropyLoss(), **options)


def test_several_workers_without_servers_are_refused(world: World) -> None:
    models = [Bags(shoal.Embedding(20, 4)) for _ in range(2)]
    with pytest.raises(NotBuilt, match=r"shoal\.Embedding trains on several workers under ps"):
        world(2, lambda g: make_job(g).step(models[g.rank], nn.CrossEntropyLoss(), optimizer=SGD))


def test_importing_shoal_loads_no_torch() -> None:
    code = "import shoal, sys; assert 'Embedding' in dir(shoal); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
