"""Sentences about predictions: why a strategy stands where it stands, and what does not fit."""

from __future__ import annotations

from dataclasses import replace

from shoal.cluster.hardware import LinkSpec
from shoal.cluster.units import show_bytes, show_seconds
from shoal.plan.accuracy import is_faster
from shoal.plan.candidates import divisors
from shoal.plan.predict import PlanSettings, Predictor
from shoal.plan.prediction import DeviceMemory, Part, Prediction
from shoal.plan.search import NEAR_MISS, Priced
from shoal.plan.workloads import Workload, parameters_of
from shoal.runtime.wording import counted
from shoal.strategy.strategy import Strategy

_NAMES = {
    "forward": "the forward",
    "backward": "the backward",
    "recompute": "the forward that is computed again",
    "tp": "the communication of tensor parallelism",
    "cp": "the communication of context parallelism",
    "ep": "the all-to-all of experts",
    "cp gradients": "the sum of gradients over context parallelism",
    "ep gradients": "the sum of gradients over expert parallelism",
    "pp": "sending between stages",
    "bubble": "the bubble of the pipeline",
    "accumulate": "adding up gradients of micro-batches",
    "gradients": "the reduction of gradients",
    "weights": "the all-gather of weights",
    "servers": "the parameter servers",
    "update": "the update of the optimizer",
    "fixed": "what every step costs beside its kernels",
}
_ON_DEVICE = ("compute", "memory", "launch", "pipeline", "host", "")
_NOTABLE = 0.01  # of a step: a smaller difference explains nothing


def part_words(part: Part) -> str:
    """`the reduction of gradients over spine uplink 1:4 (200 Gb/s = 25 GB/s)`."""
    name = _NAMES.get(part.name, part.name)
    if part.bound in _ON_DEVICE:
        return name
    joined = "bound by the" if part.bound.startswith("latency") else "over"
    return f"{name} {joined} {part.bound}"


def bound_words(part: Part) -> str:
    return "waiting for other stages" if part.bound == "pipeline" else part.bound or "-"


def why_first(one: Prediction) -> str:
    """What the step of the fastest strategy consists of."""
    computing = [part for part in one.parts if part.name in ("forward", "backward")]
    useful_s = sum(part.seconds for part in computing)
    others = [part for part in one.parts if part not in computing]
    share = f"{useful_s / one.step_s:.0%} of the step is forward and backward"
    if not others:
        return f"{share}, and nothing else"
    most = max(others, key=lambda part: part.seconds)
    return f"{share}; of the rest most is {part_words(most)}, {show_seconds(most.seconds)}"


def why(one: Priced, best: Priced) -> str:
    """One sentence why a strategy stands where it stands."""
    if not one.prediction.fits:
        return does_not_fit(one.prediction, one.candidate.settings)
    if one is best:
        return why_first(one.prediction)
    mine = one.prediction
    first = best.prediction
    less = 1 - mine.effective_s / first.effective_s
    if less > 0:
        return f"{less:.1%} faster than the first, which is plainer"
    if mine.step_s < first.step_s:
        return f"{1 - mine.step_s / first.step_s:.1%} faster a step, and less of its time is useful"
    lost = {part.name: part.seconds for part in mine.parts}
    for part in first.parts:
        lost[part.name] = lost.get(part.name, 0.0) - part.seconds
    worst = max(mine.parts, key=lambda part: lost[part.name])  # where it loses most
    if lost[worst.name] < _NOTABLE * mine.step_s:
        return f"as fast as the first up to {mine.step_s / first.step_s - 1:.1%}"
    words = f"{show_seconds(worst.seconds)} of {show_seconds(mine.step_s)} is {part_words(worst)}"
    before = worst.seconds - lost[worst.name]
    words = f"{words}, against {show_seconds(before) if before else 'none'} in the first"
    return words if is_faster(first, mine) else f"equal to the first within their ranges; {words}"


def does_not_fit(one: Prediction, settings: PlanSettings) -> str:
    """With what else would help, of what was not given."""
    if not one.fits_host:
        return f"does not fit: {host_needs(one)}; shoal plan finds what fits"
    kind, most = largest_kind(one.memory)
    need, limit = (show_bytes(size) for size in (one.memory.total, one.memory_limit_bytes))
    over = one.memory.total / one.memory_limit_bytes - 1
    words = f"a near miss, {over:.1%} too large" if over < NEAR_MISS else "does not fit"
    ways = [
        way
        for way, is_given in (
            ("--recompute full", settings.recompute == "full" or "recompute=True" in one.strategy),
            ("--microbatch 1", settings.microbatch == 1 or one.microbatches == one.batch),
        )
        if not is_given and kind == "activations"
    ]
    less = f"{' or '.join(ways)} keeps fewer; " if ways else ""
    sizes = f"{need} of {limit}, of which {kind} {show_bytes(most)}"
    return f"{words}: {sizes}; {less}shoal plan finds what fits"


def host_needs(one: Prediction) -> str:
    limit = show_bytes(one.host_limit_bytes or 0.0)
    return f"{show_bytes(one.memory.host)} in the host's memory, which has {limit} for a worker"


def largest_kind(memory: DeviceMemory) -> tuple[str, float]:
    kinds = ("parameters", "gradients", "optimizer", "activations", "buffers")
    most = max(kinds, key=lambda kind: getattr(memory, kind))
    name = "optimizer state" if most == "optimizer" else most
    return name, getattr(memory, most)


def options_of(settings: PlanSettings) -> str:
    """The options of `shoal predict` that give what is not in the notation."""
    words = []
    if settings.microbatch is not None:
        words.append(f"--microbatch {settings.microbatch}")
    if settings.recompute != "none":
        words.append(f"--recompute {settings.recompute}")
    if settings.hide:
        words.append(f"--hide {','.join(settings.hide)}")
    if not settings.flash_attention:
        words.append("--attention math")
    return " ".join(words)


def in_script(strategy: Strategy, settings: PlanSettings, microbatches: int) -> str:
    """What a training script has to say beside the strategy; without pp, `job.step` accumulates."""
    words = []
    if strategy.pp is None and settings.microbatch is not None:
        words.append(f"job.step(…, accumulate={microbatches})")
    if settings.recompute != "none":
        part = "the blocks" if settings.recompute == "full" else "attention"
        words.append(f"torch.utils.checkpoint of {part}")
    return f"in the script: {' and '.join(words)}" if words else ""


def smaller_micro_batches(
    predictor: Predictor, strategy: Strategy, too_large: Prediction, settings: PlanSettings
) -> str:
    """The largest micro-batch of a replica that fits, where its whole batch does not."""
    if settings.microbatch is not None or strategy.pp is not None or too_large.fits:
        return ""
    layout = strategy.layout(too_large.workers)
    samples = -(-settings.batch // (layout.replicas * layout.ep))
    for size in reversed(divisors(samples)[:-1]):
        smaller = replace(settings, microbatch=size)
        found = predictor.predict(strategy, too_large.workers, smaller)
        if found.fits:
            asked = in_script(strategy, replace(smaller, recompute="none"), found.microbatches)
            return (
                f"with --microbatch {size} it fits: {show_bytes(found.memory.total)}, "
                f"{show_seconds(found.step_s)} a step; {asked}"
            )
    return ""


def nothing_fits(least: Priced | None, larger: Priced | None) -> str:
    """What would be needed where no strategy fits."""
    if least is None:
        return "no strategy fits"
    prediction = least.prediction
    kind, most = largest_kind(prediction.memory)
    workers = counted(prediction.workers, "worker")
    text = (
        f"nothing fits {show_bytes(prediction.memory_limit_bytes)} on {workers}: "
        f"the least is {show_bytes(prediction.memory.total)} a worker under "
        f"{prediction.strategy}, of which {kind} {show_bytes(most)}"
    )
    if prediction.memory.host:
        text += f", and {host_needs(prediction)}"
    if larger is None:
        return f"{text}; more workers do not help either"
    enough = larger.prediction
    return (
        f"{text}; with {counted(enough.workers, 'worker')} {enough.strategy} needs "
        f"{show_bytes(enough.memory.total)}"
    )


def gradient_traffic(workload: Workload, replicas: int, link: LinkSpec | None = None) -> str:
    """How much gradients there are, what adding them up has to move, and its time on a link."""
    width = workload.precision.gradient_bytes
    parameters = parameters_of(workload)
    one = parameters * width
    text = (
        f"{_count(parameters)} parameters: {show_bytes(one)} of gradients a replica ({width} bytes "
        f"each){_on_wire(one, link, ' on the wire')}{_of(link)}"
    )
    if replicas == 1:
        return text
    up = (replicas - 1) * one
    ring = 2 * (replicas - 1) / replicas * one
    return (
        f"{text}; added up at one of {replicas} replicas {show_bytes(up)} go there and "
        f"{show_bytes(up)} come back{_on_wire(up, link, ' each way')}; a ring sends "
        f"{show_bytes(ring)} from each{_on_wire(ring, link)}"
    )


def _of(link: LinkSpec | None) -> str:
    return "" if link is None or link.name == "network" else f" of one {link.name}"


def _on_wire(num_bytes: float, link: LinkSpec | None, words: str = "") -> str:
    return f", {show_seconds(num_bytes / link.bytes_per_s)}{words}" if link else ""


def _count(number: float) -> str:
    if number < 1e6:
        return f"{number:,.0f}"
    return f"{number / 1e9:.3g} billion" if number >= 1e9 else f"{number / 1e6:.3g} million"
