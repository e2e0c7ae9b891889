"""What joins hosts, chosen from what was measured between them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from shoal.calibration.between import calls_between
from shoal.cluster.hardware import BetweenChoice, MeasuredCalls, choose_between
from shoal.cluster.toml_file import cluster_text, read_cluster
from shoal.commands.run import with_cluster
from shoal.errors import BadInput
from shoal.lab.design import LabDesign
from shoal.runtime.config import RunConfig, TlsConfig


def measured(executor: str, small_s: float, large_s: float, spread: float = 0.0) -> MeasuredCalls:
    points = ((1024.0, small_s), (2.0**24, large_s))
    around = tuple(((1 - spread) * s, (1 + spread) * s) for _, s in points)
    return MeasuredCalls(executor, "all_reduce", "", 4, points, around)


def choice(tcp: tuple[float, ...], gloo: tuple[float, ...]) -> BetweenChoice:
    found = choose_between([measured("tcp", *tcp), measured("gloo", *gloo)])
    assert found is not None
    return found


GLOO_IS_FASTER = (measured("tcp", 1e-3, 0.3), measured("gloo", 2e-3, 0.25))


def test_large_messages_decide_and_small_ones_where_large_ones_are_equal() -> None:
    assert choice((1e-3, 0.3), (2e-3, 0.2)) == BetweenChoice(
        "gloo", "an all-reduce of 16.8 MB took 200 ms over gloo, 300 ms over tcp"
    )
    assert choice((2e-3, 0.200), (1e-3, 0.199)).why.startswith("an all-reduce of 1.02 KB took 1 ms")
    assert choice((1e-3, 0.2), (1e-3, 0.199)).executor == "tcp"


def test_what_lies_within_the_spread_is_no_difference_and_one_transport_no_choice() -> None:
    assert choice((1e-3, 0.22, 0.1), (1e-3, 0.2, 0.1)).why == "TCP and Gloo take equally long"
    assert choose_between([measured("tcp", 1e-3, 0.2)]) is None


@pytest.fixture
def file(tmp_path: Path) -> str:
    cluster = replace(LabDesign("lab", 4, 1, 125e6).cluster(), between=GLOO_IS_FASTER)
    written = tmp_path / "cluster.toml"
    written.write_text(cluster_text(cluster))
    assert read_cluster(written).between == GLOO_IS_FASTER
    return str(written)


def test_a_run_takes_what_was_faster_and_says_why(
    file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert with_cluster(RunConfig(), file, "lab").between == "gloo"
    assert capsys.readouterr().err == (
        "shoal: hosts are joined by gloo: an all-reduce of 16.8 MB took 250 ms over gloo, 300 ms "
        "over tcp (cluster lab)\n"
    )
    assert with_cluster(RunConfig(between="tcp"), file, "lab").between == "tcp"
    assert with_cluster(RunConfig(), file).between is None  # all workers are on this host
    assert capsys.readouterr().err == ""


def test_gloo_is_not_taken_where_strangers_could_join_it_or_workers_change(
    file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert with_cluster(RunConfig(), file, "ray").between == "tcp"
    assert "but Gloo needs SHOAL_TRUSTED_NETWORK=1" in capsys.readouterr().err
    trusted = RunConfig(tls=TlsConfig(trusted_network=True))
    assert with_cluster(trusted, file, "ray").between == "gloo"
    elastic = RunConfig(strategy="ddp(elastic=True)")
    assert with_cluster(elastic, file, "lab").between == "tcp"
    assert "but elastic groups need TCP" in capsys.readouterr().err


def test_workers_of_one_host_measure_nothing_between_hosts() -> None:
    with pytest.raises(BadInput, match="2 workers on one host"):
        calls_between({"hosts": 1, "even": True, "calls": []}, 2)
    with pytest.raises(BadInput, match="3 workers are not equally many on each of 2 hosts"):
        calls_between({"hosts": 2, "even": False, "calls": []}, 3)
