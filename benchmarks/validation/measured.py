"""Tables of measured step times of transformers, as papers and repositories publish them.

A row is one run: a model by its sizes, how it was split, and how long a step took. Columns are
known by several names. The time is a column of seconds or of milliseconds, or follows from the
operations a second of one device, as in Narayanan et al., "Efficient Large-Scale Language Model
Training on GPU Clusters Using Megatron-LM" (SC'21): 96 B s L h^2 (1 + s/6h + V/16Lh) operations.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from shoal.errors import BadInput
from shoal.plan.workloads import Recompute
from shoal.plan.workloads.transformer_block import TransformerSizes
from shoal.runtime.wording import counted

NAMES: Mapping[str, tuple[str, ...]] = {
    "workers": ("gpus", "# gpus", "workers", "devices"),
    "batch": ("batch", "global batch", "global_batch"),
    "microbatch": ("micro batch", "micro_batch", "microbatch"),
    "hidden": ("hidden", "hidden size", "hidden_size"),
    "heads": ("heads", "attention heads", "attention_heads"),
    "layers": ("layers", "# layers"),
    "sequence": ("sequence", "sequence length", "sequence_length", "seq"),
    "vocab": ("vocab", "vocabulary"),
    "tp": ("tp", "tensor parallelism"),
    "pp": ("pp", "pipeline parallelism"),
    "dp": ("dp", "data parallelism"),
    "chunks": ("interleave", "chunks"),
}
NEEDED = ("workers", "batch", "hidden", "heads", "layers")
# column: (seconds in one of its units, recompute, sequence parallelism); None: as the table has it
TIMES: Mapping[str, tuple[float, str | None, bool]] = {
    "iteration time (ms)": (1e-3, None, False),
    "iteration_ms": (1e-3, None, False),
    "iteration_s": (1.0, None, False),
    "step_s": (1.0, None, False),
    "iter_s": (1.0, None, False),
    "no_recompute_s": (1.0, "none", False),
    "selective_s": (1.0, "selective", False),
    "full_recompute_s": (1.0, "full", False),
    "seqpar_selective_s": (1.0, "selective", True),
}
RATE = "tflops_per_gpu"


class TimedRow(Protocol):
    """One measured run."""

    @property
    def line(self) -> int: ...
    @property
    def sizes(self) -> TransformerSizes: ...
    @property
    def strategy(self) -> str: ...
    @property
    def workers(self) -> int: ...
    @property
    def batch(self) -> int: ...
    @property
    def microbatch(self) -> int | None: ...
    @property
    def dp(self) -> int: ...
    @property
    def recompute(self) -> Recompute: ...
    @property
    def seconds(self) -> float: ...
    @property
    def question(self) -> tuple[object, ...]: ...


@dataclass(frozen=True)
class MeasuredRow:
    """One run of a table; `line` is its line in the file."""

    line: int
    sizes: TransformerSizes
    workers: int
    batch: int
    microbatch: int | None  # None: the table does not say; the best one is taken
    tp: int
    dp: int
    pp: int
    chunks: int
    recompute: Recompute
    sequence_parallel: bool
    seconds: float

    @property
    def strategy(self) -> str:
        terms = ["ddp" if self.dp > 1 else ""]
        if self.tp > 1:
            terms.append(
                f"tp({self.tp}, sequence=True)" if self.sequence_parallel else f"tp({self.tp})"
            )
        if self.pp > 1:
            more = f', schedule="interleaved", chunks={self.chunks}' if self.chunks > 1 else ""
            terms.append(f"pp({self.pp}{more})")
        return " + ".join(term for term in terms if term) or "single"

    @property
    def question(self) -> tuple[object, ...]:
        """Rows with the same answer are ways to train one model on one number of workers."""
        return (self.sizes, self.workers, self.batch)


@dataclass(frozen=True)
class TableDefaults:
    """What rows have where the table has no column for it."""

    recompute: Recompute = "full"
    sequence: int = 2048
    vocab: int = 51200


def read_table(path: Path, defaults: TableDefaults) -> list[MeasuredRow]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise BadInput(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise BadInput(f"cannot read {path}: it is not text") from None
    return read_rows(path, text, defaults)


def read_rows(path: Path, text: str, defaults: TableDefaults) -> list[MeasuredRow]:
    """Of a table's text; `path` is what messages call it."""
    reader = csv.DictReader(text.splitlines())
    columns = _columns(path, reader.fieldnames or ())
    rows = [
        one
        for record in reader
        for one in _rows(
            f"{path}, line {reader.line_num}", reader.line_num, record, columns, defaults
        )
    ]
    if not rows:
        raise BadInput(f"{path} has no rows")
    return rows


def _columns(path: Path, heads: Any) -> dict[str, str]:
    """Our names to those of the file; columns of times and rates by their own names."""
    there = {head.strip().lower(): head for head in heads if head}
    found = {
        name: there[alias]
        for name, aliases in NAMES.items()
        for alias in reversed(aliases)
        if alias in there
    }
    missing = [name for name in NEEDED if name not in found]
    if missing:
        tried = ", ".join(NAMES[missing[0]])
        raise BadInput(f"{path} has no column for {missing[0]}; it may be called {tried}")
    found |= {name: there[name] for name in (*TIMES, RATE) if name in there}
    if not any(name in found for name in (*TIMES, RATE)):
        raise BadInput(
            f"{path} has no column of measured times; known are {', '.join((*TIMES, RATE))}"
        )
    return found


def _rows(
    where: str,
    line: int,
    record: Mapping[str, str],
    columns: Mapping[str, str],
    defaults: TableDefaults,
) -> list[MeasuredRow]:
    def number(name: str, otherwise: int) -> int:
        text = (record.get(columns[name]) or "").strip() if name in columns else ""
        return _whole(where, columns.get(name, name), text) if text else otherwise

    values = {name: number(name, 1) for name in NEEDED}
    sequence = number("sequence", defaults.sequence)
    vocab = number("vocab", defaults.vocab)
    tp = number("tp", 1)
    pp = number("pp", 1)
    sizes = _sizes(where, values, vocab, sequence)
    workers = values["workers"]
    dp = number("dp", max(1, workers // (tp * pp)))
    if tp * pp * dp != workers:
        raise BadInput(f"{where}: tp {tp} x pp {pp} x dp {dp} are not {counted(workers, 'worker')}")
    microbatch = number("microbatch", 0) or None
    rows = []
    for name, (unit, recompute, sequence_parallel) in _times(columns).items():
        text = (record.get(columns[name]) or "").strip()
        if not text:
            continue
        measured = _positive(where, columns[name], text)
        seconds = measured * unit
        if name == RATE:
            seconds = operations(sizes, values["batch"]) / (workers * measured * 1e12)
        rows.append(
            MeasuredRow(
                line,
                sizes,
                workers,
                values["batch"],
                microbatch,
                tp,
                dp,
                pp,
                number("chunks", 1),
                recompute or defaults.recompute,
                sequence_parallel,
                seconds,
            )
        )
    return rows


def _sizes(where: str, values: Mapping[str, int], vocab: int, sequence: int) -> TransformerSizes:
    try:
        return TransformerSizes(
            values["layers"], values["hidden"], values["heads"], vocab=vocab, sequence=sequence
        )
    except BadInput as error:
        raise BadInput(f"{where}: {error}") from None


def _times(columns: Mapping[str, str]) -> dict[str, tuple[float, str | None, bool]]:
    found = {name: what for name, what in TIMES.items() if name in columns}
    return found or {RATE: (1.0, None, False)}


def operations(sizes: TransformerSizes, batch: int) -> float:
    """Narayanan et al., SC'21, equation 3: with recompute."""
    s, h, layers = sizes.sequence, sizes.hidden, sizes.layers
    more = 1 + s / (6 * h) + sizes.vocab / (16 * layers * h)
    return 96.0 * batch * s * layers * h**2 * more


def _whole(where: str, column: str, text: str) -> int:
    value = _positive(where, column, text)
    if value != int(value):
        raise BadInput(f"{where}: {column} is {text}, and must be a whole number")
    return int(value)


def _positive(where: str, column: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise BadInput(f"{where}: {column} is {text!r}, and must be a number above 0")
    return value
