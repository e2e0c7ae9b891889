"""Outer optimizers: what moves the weights that replicas agree on.

Momentum comes in gradually: in round r it is r / (r + warmup), up to the one that was asked for.
Early outer gradients all point the same way, and momentum of 0.9 would make ten of each of them;
with r / (r + 10) the weights go about as far as the mean of the gradients so far says.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from shoal.errors import CheckpointError
from shoal.server.model.expected_state import Form, expected_state, misfit
from shoal.strategy.settings import outer_settings
from shoal.sync.residuals import check_number


class Outer:
    """`nesterov(lr=0.7)` and the like, on the flat buffer: all of them work element by element."""

    def __init__(self, text: str, weights: nn.Parameter):
        self.name, self.settings = outer_settings(text)
        self.weights = weights
        self.rounds = 0
        lr = self.settings["lr"]
        self.optimizer: torch.optim.Optimizer
        if self.name == "adam":
            betas = self.settings["beta1"], self.settings["beta2"]
            self.optimizer = torch.optim.Adam([weights], lr, betas, self.settings["eps"])
        else:
            momentum = self.settings["momentum"]
            nesterov = self.name == "nesterov"
            self.optimizer = torch.optim.SGD([weights], lr, momentum, nesterov=nesterov)

    def step(self, difference: Tensor) -> None:
        """One round: `difference` is how far the replicas have come, downhill from the weights."""
        self.rounds += 1
        if self.settings.get("momentum"):
            warm = self.rounds / (self.rounds + self.settings["warmup"])
            self.optimizer.param_groups[0]["momentum"] = min(self.settings["momentum"], warm)
        self.weights.grad = difference
        self.optimizer.step()
        self.weights.grad = None

    def state(self) -> dict[str, Tensor]:
        held = self.optimizer.state[self.weights]
        tensors = {key: value for key, value in held.items() if isinstance(value, Tensor)}
        tensors["rounds"] = torch.tensor([self.rounds])
        return {f"{self.name}/{key}": value for key, value in tensors.items()}

    def check_state(self, saved: dict[str, Tensor]) -> None:
        """Refuse what `load_state` could not take: all of the optimizer's tensors, or none."""
        state = self._own(saved)
        if "rounds" in state:
            check_number(state.pop("rounds"))
        expected = (expected_state(self.optimizer) or {}).get(self.weights, {})
        if state and set(state) != set(expected):
            raise CheckpointError(
                f"the checkpoint's state of the outer optimizer has {', '.join(sorted(state))}, "
                f"and {self.name} needs {', '.join(sorted(expected))}"
            )
        for key, tensor in state.items():
            if problem := misfit(key, Form.of(tensor), self.weights, expected):
                raise CheckpointError(f"the checkpoint's state of the outer optimizer: {problem}")

    def load_state(self, saved: dict[str, Tensor]) -> None:
        """Load what the same optimizer has saved; ignore what another one has."""
        state = self._own(saved)
        if "rounds" in state:
            self.rounds = int(state.pop("rounds"))
        for key, tensor in state.items():
            device = self.weights.device if tensor.dim() else "cpu"
            self.optimizer.state[self.weights][key] = tensor.to(device, copy=True)

    def _own(self, saved: dict[str, Tensor]) -> dict[str, Tensor]:
        prefix = f"{self.name}/"
        return {n.removeprefix(prefix): t for n, t in saved.items() if n.startswith(prefix)}


def outer_state_bytes(text: str, buffer_bytes: int) -> int:
    """What the state of an outer optimizer takes after its first step."""
    name, settings = outer_settings(text)
    if name == "adam":
        return 2 * buffer_bytes + torch.float32.itemsize  # two moments, and the number of steps
    return buffer_bytes if settings["momentum"] else 0
