"""The outer optimizer of local SGD: its step on the weights that replicas agree on."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from shoal.errors import CheckpointError
from shoal.server.model.expected_state import Form, expected_state, misfit
from shoal.strategy.options import outer_settings
from shoal.sync import under
from shoal.sync.compressed_sum import check_number, check_size


class Outer:
    """`nesterov(lr=0.7)` and the like, on slices of the flat buffer, each with its own rounds.

    Momentum comes in gradually: in round r it is r / (r + warmup), up to the one asked for. Early
    outer gradients all point the same way, and momentum of 0.9 would make ten of each of them.
    """

    def __init__(self, text: str, weights: Tensor, slices: Sequence[slice]):
        self.name, self.settings = outer_settings(text)
        self.weights = weights
        self.slices = slices
        self.params = [nn.Parameter(weights[at], requires_grad=False) for at in slices]
        self.rounds = [0] * len(slices)
        lr = self.settings["lr"]
        groups = [{"params": [p]} for p in self.params]
        self.optimizer: torch.optim.Optimizer
        if self.name == "adam":
            betas = self.settings["beta1"], self.settings["beta2"]
            self.optimizer = torch.optim.Adam(groups, lr, betas, self.settings["eps"])
        else:
            momentum = self.settings["momentum"]
            nesterov = self.name == "nesterov"
            self.optimizer = torch.optim.SGD(groups, lr, momentum, nesterov=nesterov)

    def step(self, number: int, difference: Tensor) -> None:
        """One round of a slice: how far the replicas have come, downhill from the weights."""
        self.rounds[number] += 1
        if self.settings.get("momentum"):
            warm = self.rounds[number] / (self.rounds[number] + self.settings["warmup"])
            self.optimizer.param_groups[number]["momentum"] = min(self.settings["momentum"], warm)
        self.params[number].grad = difference
        self.optimizer.step()
        self.params[number].grad = None

    def state(self) -> dict[str, Tensor]:
        """What has the shape of the weights, in full; single numbers are those of a first slice."""
        saved = {"rounds": torch.tensor(self.rounds)}
        for p, at in zip(self.params, self.slices, strict=True):
            for key, value in self.optimizer.state[p].items():
                if isinstance(value, Tensor) and value.dim():
                    saved.setdefault(key, torch.zeros_like(self.weights))[at] = value
                elif isinstance(value, Tensor):
                    saved.setdefault(key, value)
        return {f"{self.name}/{key}": value for key, value in saved.items()}

    def check_state(self, saved: dict[str, Tensor]) -> None:
        """Refuse what `load_state` could not take: all of the optimizer's tensors, or none."""
        state = under(f"{self.name}/", saved)
        for number in state.pop("rounds", torch.zeros(0)).reshape(-1):
            check_number(number)
        forms = expected_state(self.optimizer) or {}
        expected = forms.get(self.params[0], {})
        if state and set(state) != set(expected):
            raise CheckpointError(
                f"the checkpoint's state of the outer optimizer has {', '.join(sorted(state))}, "
                f"and {self.name} needs {', '.join(sorted(expected))}"
            )
        for key, tensor in state.items():
            if tensor.dim():
                check_size(tensor, self.weights)
                tensor = tensor[self.slices[0]]
            if problem := misfit(key, Form.of(tensor), self.params[0], expected):
                raise CheckpointError(f"the checkpoint's state of the outer optimizer: {problem}")

    def load_state(self, saved: dict[str, Tensor]) -> None:
        """Load what the same optimizer has saved; ignore what another one has."""
        state = under(f"{self.name}/", saved)
        if "rounds" in state:
            rounds = state.pop("rounds").reshape(-1).tolist()
            is_alike = len(rounds) == len(self.rounds)
            self.rounds = rounds if is_alike else [max(rounds, default=0)] * len(self.rounds)
        for p, at, steps in zip(self.params, self.slices, self.rounds, strict=True):
            for key, tensor in state.items():
                if tensor.dim():
                    value = tensor[at].to(p.device, copy=True)
                else:  # Adam's steps
                    value = torch.full_like(tensor, steps, device="cpu")
                self.optimizer.state[p][key] = value
