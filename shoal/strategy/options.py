"""What the options of terms may be."""

from __future__ import annotations

from shoal.schedules import user
from shoal.schedules.gossip import graphs as edges
from shoal.strategy.constraints import (
    Constraint,
    fraction_or_count,
    is_names,
    is_plan,
    one_of,
    one_of_or_like,
    text_like,
)

GRAPHS = (
    *("ring", "torus", "hypercube", "exponential"),
    *("star", "complete", "one-peer", "random-regular"),
)

# of schedules/pipelines/catalog.py, which need not be loaded for it
SCHEDULES = ("inter-op", "gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "bfs")
GRAPHS_OF_ANY_NUMBER = tuple(graph for graph in GRAPHS if graph != "hypercube")
_SETTING = r"[a-z][a-z0-9_]*=[0-9]+(\.[0-9]+)?(e-?[0-9]+)?"
_FRACTION = r"(1|0\.0{0,9}[1-9][0-9]{0,9}|[1-9](\.[0-9]{1,9})?e-[1-9][0-9]?)"
SYNC_OR_ASYNC = one_of("sync", "async")
QUORUM = fraction_or_count("workers")
FLAG = Constraint("True or False", lambda value: isinstance(value, bool))
_USER_SCHEDULE = '"FILE.py:FUNCTION"'
ALGORITHM = text_like(
    f'a name such as "ring" or "tree", or {_USER_SCHEDULE}',
    rf"[A-Za-z_][A-Za-z0-9_-]*|{user.PATTERN}",
)
SCHEDULE = one_of_or_like(
    f"{_USER_SCHEDULE} (chunks=2 beside it gives a device two stages)", SCHEDULES, user.PATTERN
)
COMPRESS = text_like(
    '"fp16", "bf16", "int8", "topk(0.01)", "powersgd(rank=4)" or "onebit"',
    rf"fp16|bf16|int8|onebit|topk\({_FRACTION}\)|powersgd\(rank=[1-9][0-9]{{0,5}}\)",
)
_GRAPH_TEXT = text_like(
    f"one of {', '.join(GRAPHS)}, a path that ends in .txt, .csv or .edges, edges such as "
    '"edges:0-1,1-2,2-0", or a networkx graph',
    "|".join(GRAPHS)
    + r"|random-regular\(degree=[0-9]{1,3}(, ?seed=[0-9]{1,9})?\)"
    + rf"|{edges.PATTERN}|(?!{edges.INLINE}).+\.(txt|csv|edges)",
)
GRAPH = Constraint(
    _GRAPH_TEXT.allowed,
    lambda value: edges.is_networkx(value) or _GRAPH_TEXT.accepts(value),
    lambda value: edges.write_edges(value) if edges.is_networkx(value) else value,
)
OUTER = text_like(
    'an optimizer such as "nesterov(lr=0.7)"',
    rf"[a-z][a-z0-9_]*(\({_SETTING}(, ?{_SETTING})*\))?",
)
PLAN = Constraint(
    'a dict of module names to "column", "row" or "whole"',
    is_plan,
    lambda v: dict(sorted(v.items())),
)
NAMES = Constraint("a list of module names", is_names, tuple)
