"""Every term that a strategy is made of, by the name that it has in the notation.

A new way to agree is a file in `sync_terms/`, its name below, and a plan in `shoal/sync/NAME.py`.
The parser, `import shoal`, `shoal compare` and the tests of memory find it by themselves.
"""

from __future__ import annotations

from shoal.strategy.base import Term
from shoal.strategy.split_terms import Cp, Ep, Pp, Tp
from shoal.strategy.sync_terms.ddp import Ddp
from shoal.strategy.sync_terms.gossip import Gossip
from shoal.strategy.sync_terms.hogwild import Hogwild
from shoal.strategy.sync_terms.localsgd import Localsgd
from shoal.strategy.sync_terms.mapreduce import Mapreduce
from shoal.strategy.sync_terms.ps import Ps
from shoal.strategy.sync_terms.single import Single
from shoal.strategy.sync_terms.zero import Zero

__all__ = [
    "cp",
    "ddp",
    "ep",
    "gossip",
    "hogwild",
    "localsgd",
    "mapreduce",
    "pp",
    "ps",
    "single",
    "tp",
    "zero",
]

single = Single
ddp = Ddp
zero = Zero
ps = Ps
gossip = Gossip
hogwild = Hogwild
mapreduce = Mapreduce
localsgd = Localsgd
tp = Tp
pp = Pp
ep = Ep
cp = Cp

# in the order in which they are compared and proposed
_SYNC: tuple[type[Term], ...] = (Single, Ddp, Zero, Ps, Gossip, Hogwild, Mapreduce, Localsgd)
_SPLIT: tuple[type[Term], ...] = (Tp, Ep, Cp, Pp)
TERMS: dict[str, type[Term]] = {kind.__name__.lower(): kind for kind in (*_SYNC, *_SPLIT)}
