"""One configuration: read once, written for the processes below, and nowhere else."""

from __future__ import annotations

import os
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import BadInput
from shoal.runtime import variable_text as codecs
from shoal.runtime.config import VARIABLES, RunConfig
from shoal.runtime.run_dir import RunDir
from shoal.runtime.variable_text import Codec

text = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1)
word = st.text(st.characters(codec="utf-8", exclude_characters="\0,"), min_size=1).filter(
    lambda t: not t.isdigit()
)
count = st.integers(0, 10**9)
run_dirs = text.map(Path).map(RunDir)
VALUES: dict[Codec, st.SearchStrategy[Any]] = {
    codecs.TEXT: text,
    codecs.PATH: text.map(Path),
    codecs.INTEGER: st.integers(-(2**31), 2**31),
    codecs.COUNT: count,
    codecs.POSITIVE: st.integers(1, 10**9),
    codecs.SECONDS: st.floats(1e-3, 1e8),
    codecs.LEASE: st.floats(0.5, 1e8),
    codecs.FLAG: st.booleans(),
    codecs.WORDS: st.lists(word, max_size=3).map(tuple),
    codecs.SERVERS: count | st.lists(word, min_size=1, max_size=3).map(tuple),
    codecs.START_METHOD: st.sampled_from(["fork", "spawn"]),
    codecs.RENDEZVOUS: st.sampled_from(["file:///tmp/store", "tcp://[::1]:7", "env://"]),
    codecs.COORDINATOR: st.sampled_from(["unix:/tmp/c", "etcd://a:1,b:2"]),
    codecs.RUN_DIR: run_dirs,
    codecs.SECRET: st.binary(min_size=16, max_size=40),
}


def built(cls: type[Any]) -> st.SearchStrategy[Any]:
    """Any values of all variables."""
    found: dict[str, st.SearchStrategy[Any]] = {}
    for f in fields(cls):
        if "codec" in f.metadata:
            values = VALUES[f.metadata["codec"]]
            found[f.name] = values if f.default is not None else st.none() | values
        elif is_dataclass(f.default_factory):
            found[f.name] = built(f.default_factory)
    if cls is RunConfig:
        found["environ"] = st.dictionaries(st.sampled_from(["PATH", "RANK", "SLURM_PROCID"]), text)
        assert set(found) == {f.name for f in fields(cls)}
    return st.builds(cls, **found)


@given(built(RunConfig))
def test_what_is_written_is_read_back(config: RunConfig) -> None:
    assert RunConfig.from_environment(config.to_environment()) == config


def test_an_empty_variable_is_not_set() -> None:
    assert RunConfig.from_environment(dict.fromkeys(VARIABLES, "")) == RunConfig()
    assert RunConfig().to_environment() == {}


def test_other_variables_are_kept_as_they_are() -> None:
    environ = {"RANK": "3", "SHOAL_OF_FISH": "x", "SHOAL_SEED": "7"}
    config = RunConfig.from_environment(environ)
    assert config.environ == {"RANK": "3", "SHOAL_OF_FISH": "x"}
    assert config.to_environment() == environ


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("SHOAL_SEED", "abc", "SHOAL_SEED is 'abc', which is not a whole number"),
        ("SHOAL_SEED", "9" * 5000, "SHOAL_SEED is '999"),
        ("SHOAL_SEED", "1_000", "SHOAL_SEED is '1_000'"),
        ("SHOAL_CALL", "-1", "SHOAL_CALL is '-1'"),
        ("SHOAL_RANK", "²", "SHOAL_RANK is '²'"),
        ("SHOAL_SIZE", "0", "SHOAL_SIZE is '0', which is not a whole number of at least 1"),
        ("SHOAL_RENDEZVOUS", "/tmp/x", "SHOAL_RENDEZVOUS is '/tmp/x': use file:///"),
        ("SHOAL_PROGRESS_FD", "x", "SHOAL_PROGRESS_FD is 'x'"),
        ("SHOAL_CAPTURE_STEPS", "many", "SHOAL_CAPTURE_STEPS is 'many'"),
        ("SHOAL_LEASE", "0.0001", "SHOAL_LEASE is '0.0001': a lease lasts 0.5 s or longer"),
        ("SHOAL_SERVERS", ",", "SHOAL_SERVERS is ','"),
        ("SHOAL_SECRET", "00", "SHOAL_SECRET has to hold a secret of at least 32"),
        ("SHOAL_SECRET", "é" * 64, "SHOAL_SECRET has to hold a secret"),
        ("SHOAL_TRUSTED_NETWORK", "yes", "SHOAL_TRUSTED_NETWORK is 'yes': set it to 1"),
    ],
)
def test_a_bad_value_is_one_sentence_that_names_the_variable(
    name: str, value: str, says: str
) -> None:
    with pytest.raises(BadInput, match=says) as caught:
        RunConfig.from_environment({name: value})
    assert "\n" not in str(caught.value)


def test_the_secret_is_not_shown() -> None:
    config = RunConfig.from_environment({"SHOAL_SECRET": "ab" * 32, "PASSWORD": "swordfish"})
    assert "ab" * 32 not in repr(config) and "swordfish" not in repr(config)


def test_the_secret_in_the_run_directory_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))  # the user's own key is another one
    config = RunConfig(run_dir=RunDir(tmp_path), secret=b"b" * 32)
    assert config.read_secret() == b"b" * 32
    RunDir(tmp_path).write_secret(b"a" * 32)
    assert config.read_secret() == b"a" * 32
    assert RunConfig().read_secret() is None


def test_threads_are_one_number() -> None:
    assert RunConfig().num_threads is None
    assert RunConfig(environ={"OMP_NUM_THREADS": "4"}).num_threads == 4
    with pytest.raises(BadInput, match="OMP_NUM_THREADS is '4,2'"):
        _ = RunConfig(environ={"OMP_NUM_THREADS": "4,2"}).num_threads


def test_export_replaces_what_this_process_had(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_RANK", "3")
    monkeypatch.setenv("SHOAL_SEED", "1")
    RunConfig(seed=2).export()
    assert os.environ["SHOAL_SEED"] == "2" and "SHOAL_RANK" not in os.environ
