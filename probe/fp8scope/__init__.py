"""fp8scope: an oscilloscope for low-precision training.

    import fp8scope
    scope = fp8scope.attach(model, optimizer, run="pretrain-7b", every=10)

The rest of the loop stays as it is. See `attach`.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fp8scope.attachment import attach
    from fp8scope.scope import Scope

__all__ = ["Scope", "attach"]


def __getattr__(name: str) -> Any:
    """Loads torch when the probe is first used: the console script runs on machines without one."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from fp8scope import attachment

    return getattr(attachment, name)
