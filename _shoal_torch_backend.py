"""What `import torch` calls in an environment with Shoal (entry point "torch.backends").

It succeeds or warns; it never fails, or every program that imports torch would. So it stands
outside the package: a folder `shoal` in the working directory may hide the package, and a package
that is broken cannot say so itself.
"""

from __future__ import annotations

import sys
import warnings


def register() -> None:
    """Make the backend "shoal" known to torch.distributed, if Shoal can be imported."""
    try:
        from shoal.comm.torch_backend import register

        register()
    except (Exception, SystemExit) as error:
        _warn(f'torch.distributed has no backend "shoal": {error!r}{_place()}')


def _place() -> str:
    """Where the package was found: often a folder that is not the installed Shoal."""
    try:
        return f", in {next(iter(sys.modules['shoal'].__path__))}"
    except Exception:  # it was not found, or is no package
        return ""


def _warn(message: str) -> None:
    try:
        warnings.warn(message, stacklevel=3)
    except Exception:  # python -W error
        print(f"shoal: {message}", file=sys.stderr)
