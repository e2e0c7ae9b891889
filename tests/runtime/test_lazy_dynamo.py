"""torch._dynamo is loaded by what compiles, once, and not by an optimizer."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAD = """
import sys
import torch
from shoal.runtime.lazy_dynamo import load_when_used
load_when_used()
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.Adam(model.parameters())
def step():
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
step()
optimizer.load_state_dict(optimizer.state_dict())
torch._dynamo.trace_rules.clear_lru_cache()
import inspect; inspect.getmodule(step)
import importlib.metadata; importlib.metadata.version("torch")
assert "torch._dynamo.config" not in sys.modules, "loaded by an optimizer"
disabled = torch.optim.Optimizer.add_param_group.__wrapped__
assert disabled.__dynamo_disable is disabled
"""

TAIL = """
import torch._dynamo
assert torch._dynamo is sys.modules["torch._dynamo"] and torch._dynamo.__file__
assert torch._dynamo.config is sys.modules["torch._dynamo.config"]
assert type(torch._dynamo.trace_rules) is type(sys)
assert not hasattr(disabled, "__dynamo_disable"), "it is disabled by the module itself"
step()
"""

USES = [
    "import torch._dynamo.config as c; torch._dynamo.reset(); assert torch._dynamo.config is c",
    "from torch._dynamo.utils import counters; assert torch._dynamo.utils.counters is counters",
    "from torch._dynamo import utils; assert sys.modules['torch._dynamo.utils'] is utils",
    "torch._dynamo.config.verbose",
    "torch._dynamo.trace_rules.lookup",
    "assert torch.compile(lambda x: x + 1, backend='eager')(torch.ones(1)) == 2",
    "import torch._inductor.config, torch._dynamo.backends.common; torch._dynamo.reset()",
]


def test_fake_tensors_load_its_configuration_alone() -> None:
    use = """
from torch._subclasses.fake_tensor import FakeTensorMode
with FakeTensorMode():
    assert torch.ones(3).add(1).shape == (3,)
found = [name for name in sys.modules if name.startswith("torch._dynamo.")]
assert found == ["torch._dynamo.config"], found
"""
    done = subprocess.run([sys.executable, "-c", HEAD + use], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.whole
@pytest.mark.parametrize("use", USES)
def test_what_uses_the_compiler_loads_it(use: str) -> None:
    script = HEAD + use + TAIL
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
