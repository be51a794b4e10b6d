"""fp8scope: an oscilloscope for low-precision training.

    import fp8scope
    scope = fp8scope.attach(model, optimizer, run="pretrain-7b", every=10)

The rest of the loop stays as it is. See `attach`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fp8scope.attachment import attach
    from fp8scope.diagnosis import diagnose
    from fp8scope.scope import Scope

__all__ = ["Scope", "attach", "diagnose"]

_HOMES = {"Scope": "fp8scope.scope", "attach": "fp8scope.attachment", "diagnose": "fp8scope.diagnosis"}


def __getattr__(name: str) -> Any:
    """Loads torch when the probe is first used: the console script runs on machines without one."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
