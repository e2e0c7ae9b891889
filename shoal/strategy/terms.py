"""Every term that a strategy is made of, by the name that it has in the notation.

A new way to agree is a class in `sync_terms.py`, its name below, its step in
`schedules/steps/`, and a plan in `sync/NAME.py`.
The parser, `import shoal`, `shoal compare` and the tests of memory find it by themselves.
"""

from __future__ import annotations

from shoal.strategy.base import Term
from shoal.strategy.ps_term import Ps
from shoal.strategy.split_terms import Cp, Ep, Pp, Tp
from shoal.strategy.sync_terms import Ddp, Gossip, Hogwild, Localsgd, Mapreduce, Single, Zero

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
