"""The page of recorded runs: from data made by hand, and in a real browser."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import nullcontext
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from shoal.cluster import Cluster, Node
from shoal.cluster.hardware import Device, LinkSpec
from shoal.cluster.toml_file import cluster_text
from shoal.commands.timeline import KINDS
from shoal.errors import BadInput
from shoal.observe.report_page.record import RecordedRun
from shoal.observe.report_page.schedules import animations
from shoal.observe.report_page.sections import _asset, page
from shoal.observe.report_page.traffic import link_loads, traffic_of
from shoal.observe.time_shares import write_chrome
from shoal.runtime.trace import Span, Trace, open_trace
from tests import scripts
from tests.browser import CHROMIUM, Page, browser
from tests.scripts import shoal

MS = 1_000_000
HOSTILE = "</script><script>alert(1)</script><!-- \u2028"


def spans(ranks: int, steps: int = 2) -> Trace:
    """Each step of 10 ms: forward, backward, an all-reduce that waits for the last rank."""
    trace: Trace = {}
    for rank in range(ranks):
        trace[rank] = own = []
        for step in range(steps):
            at, call = step * 10 * MS, f"{','.join(map(str, range(ranks)))} #{step}"
            late = at + (7 if rank == ranks - 1 else 5) * MS
            own.append(Span("step", at, at + 9 * MS, "steps", f"step {step + 1}"))
            own.append(Span("forward", at, at + 2 * MS, "main", "F0", 0))
            own.append(Span("backward", at + 2 * MS, late, "main", "B0", 0))
            own.append(
                Span("reduce", late, at + 8 * MS, "comm", "all_reduce", None, 600, None, call)
            )
            own.append(Span("wait", late, at + 8 * MS, "main", "all_reduce", None, 0, None, call))
            own.append(Span("send", late, late, "issued", "", None, 50, (rank + 1) % ranks, "m"))
    return trace


def report(ranks: int, strategy: str = "ddp", **more: Any) -> dict[str, Any]:
    known: dict[str, Any] = {"strategy": strategy, "workers": ranks, "steps": 2, "seconds": 1.5}
    known |= {"samples_per_s": 10.0, "servers": 0, "script": ["train.py"]}
    known |= {key: [] for key in ("lost", "came_back", "joined", "absent", "servers_lost")}
    losses = {"losses": [2.0, None], "loss_steps": [1, 2], "loss_s": [0.009, 0.019]}
    mine = {"steps": 2, "evaluated": {"": 0.5}, "sync": [], "peak_host_bytes": 1 << 28, **losses}
    return known | {"ranks": [{"rank": r, **mine} for r in range(ranks)]} | more


def recorded(folder: Path, document: dict[str, Any], trace: Trace) -> RecordedRun:
    folder.mkdir()
    (folder / "report.json").write_text(json.dumps(document))
    write_chrome(trace, folder / "trace.json")
    return RecordedRun.read(folder)


class Parsed(HTMLParser):
    """The data of a page, and how often each tag is there."""

    def __init__(self, text: str):
        super().__init__()
        self.tags: list[str] = []
        self.loaded: list[str] = []
        self.data = ""
        self._is_data = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.loaded += [value or "" for name, value in attrs if name in ("src", "href")]
        self._is_data = ("id", "data") in attrs

    def handle_data(self, data: str) -> None:
        self.data += data if self._is_data else ""

    def handle_endtag(self, tag: str) -> None:
        self._is_data = False

    @property
    def sections(self) -> dict[str, list[dict[str, Any]]]:
        known = json.loads(self.data)["sections"]
        return {one["title"]: [i for p in one["panels"] for i in p["items"]] for one in known}


def test_a_page_has_the_sections_that_the_run_has_data_for(tmp_path: Path) -> None:
    run = recorded(tmp_path / "one", report(3), spans(3))
    parsed = Parsed(page([run]))
    assert parsed.loaded == ["data:,"]  # nothing from elsewhere
    assert [*parsed.sections] == [
        "Runs",
        "Timeline",
        "Loss",
        "Where the time went",
        "Traffic",
        "Schedule",
        "Memory",
    ]
    (timeline,) = parsed.sections["Timeline"]
    rows = [(row["process"], row["track"], len(row["start"])) for row in timeline["rows"]]
    of_rank = (("main", 6), ("comm", 2), ("steps", 2))
    assert rows == [(f"rank {rank}", *one) for rank in range(3) for one in of_rank]
    (line,) = parsed.sections["Loss"][0]["lines"]  # one, where all ranks have the same
    assert (line["y"], line["seconds"]) == ([2.0, None], [0.009, 0.019])
    shares, waits = parsed.sections["Where the time went"]
    assert shares["parts"] == ["computing", "exposed", "waiting", "other"]
    assert [row[2] for row in waits["texts"]] == ["22.2%", "22.2%", ""]  # 2 of 9 ms, for rank 2
    (rounds,) = parsed.sections["Schedule"]
    assert [len(one) for one in rounds["rounds"]] == [3] * 4


def test_bytes_go_to_the_peer_or_along_the_schedule(tmp_path: Path) -> None:
    ring = recorded(tmp_path / "ring", report(4), spans(4))
    assert traffic_of(ring) == ({(r, (r + 1) % 4): 1300 for r in range(4)}, True)
    star = recorded(tmp_path / "star", report(4, 'ddp(algorithm="star")'), spans(4))
    found, _ = traffic_of(star)
    assert found[0, 1] == 2 * 600 / 3 + 100  # the root sends to all, and a message of 50 twice
    assert found[2, 0] == 2 * 600


@pytest.mark.parametrize(
    ("strategy", "sync", "names", "rounds"),
    [
        (
            'gossip(graph="ring")',
            {},
            "0123",
            [{(a, b, "0.33") for a in range(4) for b in ((a + 1) % 4, (a - 1) % 4)}] * 3,
        ),
        (
            'gossip(graph="one-peer")',
            {},
            "0123",
            [{(a, (a + hop) % 4, "0.5") for a in range(4)} for hop in (1, 2)],
        ),
        (
            "ps(replicas=2)",
            {"servers": [{}]},
            ["0", "1", "2", "3", "S0.0", "S0.1"],
            [
                {(worker, 4, "push") for worker in range(4)},
                {(4, 5, "copy")},
                {(4, 0, "pull"), (5, 1, "pull"), (4, 2, "pull"), (5, 3, "pull")},
            ],
        ),
    ],
)
def test_gossip_and_chains_are_animated(
    tmp_path: Path, strategy: str, sync: Any, names: Any, rounds: Any
) -> None:
    found = report(4, strategy)
    found["ranks"] = [rank | {"sync": [sync]} for rank in found["ranks"]]
    (item,) = animations(recorded(tmp_path / "one", found, spans(4)))
    assert item["names"] == [*names]
    assert [{*one} for one in item["rounds"]] == rounds
    for number, levels in enumerate(item.get("levels", ())):  # rank 0's weights, spread
        assert sum(levels) == pytest.approx(1, abs=1e-3)
        assert number or max(levels) < 1


PS = {
    "servers": [
        {
            **{"updates": 9, "requests": 40, "received_bytes": 10, "sent_bytes": 20, "cpu_s": 0.5},
            "workers": {"0": {"admitted": 9, "folded": 0, "dropped": 0}},
            "missed_updates": {"0": 7, "2": 1},
        }
    ],
    "steps_ahead": {"1": 3},
    "tables": {
        "words": {
            "hottest": [{"row": 5, "pulls": 80}],
            "hottest_percent": {"share": 0.5},
            "as_served": [80, 20],
        }
    },
    "interruptions_s": [[0.25]],
}
GOSSIP = {"consensus_distance": [[10, 2.0], [20, float("inf")]]}
LOST = {"server": 1, "shard": 0, "replica": 1, "how": "was killed", "after_s": 4.0}


@pytest.mark.parametrize(
    ("sync", "expected"),
    [
        (
            PS,
            {
                "Staleness": [["0", "1", "2"], ["0", "1"], ["rank 0"]],
                "Servers": [["server 0"], ["row 5"], ["server 0", "replica 1"]],
                "Leader changes": [["server 1"], ["rank 0, shard 0", "rank 1, shard 0"]],
            },
        ),
        (GOSSIP, {"Consensus distance": [[2.0, None]]}),
    ],
)
def test_what_a_strategy_counts_is_shown(
    tmp_path: Path, sync: dict[str, Any], expected: dict[str, Any]
) -> None:
    document = report(2)
    document["servers_lost"] = [{**LOST, "is_started_again": True}] if sync is PS else []
    for rank in document["ranks"]:
        rank["sync"] = [sync]
    known = Parsed(page([recorded(tmp_path / "run", document, spans(2))])).sections
    found = {
        title: [
            item["lines"][0]["y"] if "lines" in item else [row[0] for row in item["rows"]]
            for item in known[title]
        ]
        for title in expected
    }
    assert found == expected


WIRE, NET = LinkSpec("wire", 1e9, 1e-6), LinkSpec("net", 1e6, 1e-5)
PAIRS = Cluster("pairs", Device("d", 1e9, 1e9, {"fp32": 1e12}), Node(2, fabric=WIRE, nic=NET), 2)


def test_links_have_the_load_of_what_crosses_them(tmp_path: Path) -> None:
    run = recorded(tmp_path / "run", report(4, cluster=cluster_text(PAIRS)), spans(4))
    assert run.cluster is not None
    (node, rack) = link_loads(run, run.cluster)
    assert (node[0], node[2], rack[0], rack[2]) == ("node", "2.6 KB", "rack", "2.6 KB")
    assert rack[-1] == "6.8%"  # 2,600 bytes in 19 ms, of 2 links of 1 MB/s
    assert "Topology" in Parsed(page([run])).sections


@pytest.mark.parametrize(
    ("strategy", "crossing"),
    [
        ("ps(servers=2)", ("20 B", "20 B")),  # server 1 is on the other node
        ("ps(replicas=2)", ("20 B", "20 B")),  # and so is copy 1
        ('ps(placement="workers")', ("40 B", "0 B")),  # worker 1 is beside worker 0
    ],
)
def test_servers_load_links_from_where_a_run_places_them(
    tmp_path: Path, strategy: str, crossing: tuple[str, str]
) -> None:
    shard = "shard 0 copy" if "replicas" in strategy else "server"
    pushes = [Span("push", MS, MS, "push", "", None, 20, f"{shard} {i}") for i in range(2)]
    trace: Trace = {0: [Span("step", 0, 2 * MS, "steps", "step 1"), *pushes]}
    run = recorded(tmp_path / "run", report(4, strategy, cluster=cluster_text(PAIRS)), trace)
    assert run.cluster is not None
    assert tuple(row[2] for row in link_loads(run, run.cluster)) == crossing


def test_hostile_names_stay_text(tmp_path: Path) -> None:
    trace = {rank: [s._replace(kind=HOSTILE) for s in own] for rank, own in spans(2).items()}
    trace = {**trace, HOSTILE: [Span("pull", 0, MS, HOSTILE, HOSTILE, None, 5, 0)]}
    plain = page([recorded(tmp_path / "a", report(2), spans(2))])
    text = page([recorded(tmp_path / "b<b>", report(2, script=[HOSTILE]), trace)])
    assert sorted(Parsed(text).tags) == sorted(Parsed(plain).tags)
    assert HOSTILE in Parsed(text).sections["Timeline"][0]["kinds"]


@pytest.mark.parametrize(
    ("files", "why"),
    [
        ({}, "is no recorded run: it has no trace.json and no report.json"),
        ({"report.json": "{}", "trace.json": "{}"}, "report.json is no report of shoal run"),
        ({"report.json": '{"ranks": []}', "trace.json": "[]"}, "trace.json is no trace"),
        (
            {"report.json": '{"ranks": [], "workers": 2}', "trace.json": '{"traceEvents": []}'},
            "report.json is no report of shoal run: 'strategy'",
        ),
    ],
)
def test_what_is_no_record_is_refused(tmp_path: Path, files: dict[str, str], why: str) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(BadInput, match=why):
        RecordedRun.read(tmp_path)


# ------------------------------------------------------------------------------ in a browser

SETTLE = "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"
CANVAS = "document.querySelector('canvas[role=application]')"
DEEP = scripts.script("""
def train(job):
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4)))
    step = job.step(net, loss, optimizer=sgd)
    for batch in job.batches(data, batch_size=20, epochs=2):
        job.log(loss=step(batch))
""")


@pytest.fixture(scope="module")
def tab() -> Iterator[Page]:
    if CHROMIUM is None:
        pytest.skip("there is no chromium")
    with browser() as tab:
        yield tab


def view(tab: Page) -> list[float]:
    tab.evaluate(SETTLE)
    found: list[float] = tab.evaluate("timelines[0].view")
    return found


@pytest.mark.whole
@pytest.mark.parametrize(
    ("words", "servers", "sections"),
    [
        (["-s", "ddp + pp(2)"], [], {"timeline", "loss", "traffic", "schedule", "memory"}),
        (
            ["-s", "ps(quorum=0.75)", "--slow", "3:4x"],
            ["server 0"],
            {"timeline", "staleness", "servers"},
        ),
        (
            ["-s", "ps(replicas=2)"],
            ["shard 0 copy 0", "shard 0 copy 1"],
            {"traffic", "schedule", "servers"},
        ),
        (["-s", "gossip"], [], {"traffic", "schedule", "consensus-distance"}),
    ],
)
def test_the_page_of_a_run_works_in_chromium(
    tmp_path: Path, tab: Page, words: list[str], servers: list[str], sections: set[str]
) -> None:
    (tmp_path / "train.py").write_text(DEEP)
    done = shoal("run", "-n", "4", *words, "--record", "run", "train.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    trace = open_trace(tmp_path / "run")
    assert {span.peer for one in trace.values() for span in one} <= {None, *trace}
    done = shoal("report", "run", "-o", "page.html", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    tab.errors.clear()
    for width in (1280, 390):
        tab.open(tmp_path / "page.html", width)
        assert tab.evaluate("document.documentElement.scrollWidth") <= width
    names = tab.evaluate("[...document.querySelectorAll('.names .main')].map(e => e.textContent)")
    assert names == [*(f"rank {r}" for r in range(4)), *servers]
    assert sections <= set(tab.evaluate("[...document.querySelectorAll('section')].map(e => e.id)"))

    tab.evaluate(f"{CANVAS}.focus()")
    first, last = view(tab)
    tab.press("+")
    near = view(tab)
    assert near[1] - near[0] == pytest.approx((last - first) / 2)
    tab.press("ArrowRight")
    assert view(tab)[0] == pytest.approx(near[0] + 0.2 * (near[1] - near[0]))
    tab.press("0")
    assert view(tab) == [first, last]
    x, y = tab.evaluate(f"(b => [b.left + 90, b.top + 30])({CANVAS}.getBoundingClientRect())")
    tab.wheel(x, y, -240)
    wheeled = view(tab)
    assert first < wheeled[0] < wheeled[1] < last

    color = "getComputedStyle(document.body).backgroundColor"
    light = tab.evaluate(color)
    tab.color_scheme(dark=True)
    assert (light, tab.evaluate(color)) == ("rgb(251, 252, 253)", "rgb(20, 24, 29)")
    assert tab.errors == []


def test_a_kind_of_span_has_one_color_on_the_page_and_in_the_picture_of_shoal_timeline() -> None:
    script = _asset("timeline.js").partition("const KINDS = {")[2].partition("}")[0]
    on_page = {kind.strip('"'): hue for kind, hue in re.findall(r'("[^"]+"|\w+): "(#\w+)"', script)}
    for kind, (_, _, hue) in KINDS.items():
        assert on_page.get(kind, hue) == hue, kind
    assert {"update", "push", "load", "injected"} <= on_page.keys() & KINDS.keys()


@pytest.mark.parametrize(
    ("strategy", "ranks", "known", "sentence"),
    [
        ("pp(4096)", 4096, {"microbatches": 4096}, None),
        ("ddp", 4096, {}, None),
        ('ddp(algorithm="direct")', 4096, {}, None),
        ("gossip", 10_000_000, {}, None),
        ("ddp", 2, {"peak_host_bytes": float("inf")}, "run is not .* it holds Infinity or NaN"),
        ("ddp", float("inf"), {}, "is no report of shoal run: cannot convert float infinity"),
        ("ddp", float("nan"), {}, "is no report of shoal run: cannot convert float NaN"),
    ],
)
def test_records_of_any_size_and_number_are_a_page_or_a_sentence(
    tmp_path: Path, strategy: str, ranks: float, known: dict[str, float], sentence: str | None
) -> None:
    document = report(1, strategy, workers=ranks)
    document["ranks"][0] |= known
    call = ",".join(map(str, range(4096 if ranks == 4096 else 1))) + " #1"
    span = Span("reduce", 0, MS, "comm", "all_reduce", None, 600, None, call)
    with pytest.raises(BadInput, match=sentence) if sentence else nullcontext():
        page([recorded(tmp_path / "run", document, {0: [span]})])
