"""Text values that have settings of their own: `topk(0.01)`, `nesterov(lr=0.7)`."""

from __future__ import annotations

from shoal.errors import StrategyError

# Outer optimizers of localsgd: what can be set, and its default.
OUTERS: dict[str, dict[str, float]] = {
    "sgd": {"lr": 1.0, "momentum": 0.0, "warmup": 10.0},
    "nesterov": {"lr": 0.7, "momentum": 0.9, "warmup": 10.0},
    "adam": {"lr": 0.3, "beta1": 0.9, "beta2": 0.95, "eps": 0.1},
}


def read_setting(text: str) -> tuple[str, dict[str, float]]:
    """The name before the bracket and the numbers inside; one without a name is called ""."""
    name, _, inside = text.rstrip(")").partition("(")
    settings = {}
    for word in filter(None, inside.split(",")):
        key, _, value = word.strip().rpartition("=")
        settings[key] = float(value)
    return name, settings


def outer_settings(text: str) -> tuple[str, dict[str, float]]:
    """The outer optimizer that `text` names, with all its settings, checked."""
    name, given = read_setting(text)
    if name not in OUTERS:
        raise StrategyError(
            f"localsgd: there is no outer optimizer {name!r}; there are {', '.join(OUTERS)}"
        )
    known = OUTERS[name]
    for key in given:
        if key not in known:
            raise StrategyError(f"localsgd: outer {name} has no {key!r}; it has {', '.join(known)}")
    settings = {**known, **given}
    for key, value in settings.items():
        if key in ("lr", "eps") and not 0 < value < float("inf"):
            raise StrategyError(f"localsgd: {key} of outer {name} has to be above 0, not {value}")
        if key == "warmup" and not 0 <= value < float("inf"):
            raise StrategyError(f"localsgd: warmup of outer {name} has to be 0 or more rounds")
        if key not in ("lr", "eps", "warmup") and not 0 <= value < 1:
            raise StrategyError(
                f"localsgd: {key} of outer {name} has to be from 0 to below 1, not {value}"
            )
    if name == "nesterov" and settings["momentum"] == 0:
        raise StrategyError("localsgd: outer nesterov without momentum is sgd: say sgd")
    return name, settings
