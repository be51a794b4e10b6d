"""One number that a job says, in whatever it keeps it: Python's and NumPy's numbers, tensors of many kinds.

It is put on the device of the sums without waiting for any device, so arrays of other libraries, which may
lie on one, are refused, and so is a tensor whose value cannot be read later, when the step closes.
"""

from decimal import Decimal
from numbers import Real

import numpy as np
import torch
from torch import Tensor

from fp8scope.sharding import local
from fp8scope_protocol.errors import Invalid

RULE = "must be one real number"
PART = f"{RULE}, not this rank's part of one: full_tensor() puts it together"


def said(name: str, value: object, device: torch.device) -> Tensor:
    """`value` as float64 [] on `device`; `Invalid`, naming `name`, if it is not one number."""
    rule = RULE
    try:
        if not isinstance(value, Tensor):
            return to_scalar(_number(value), device)
        if not all(one.is_replicate() for one in getattr(value, "placements", ())):
            rule = PART
        elif not value.is_complex():
            return _lasting(to_scalar(value, device))
    except Exception:  # whatever the classes of others may raise
        rule = RULE
    raise Invalid(name, _kind(value) if isinstance(value, Tensor) else value, rule)


def to_scalar(value: Tensor | float, device: torch.device) -> Tensor:
    """`value` as float64 [] on `device`, of its own; nothing waits."""
    if isinstance(value, Tensor):
        return local(value).reshape(()).to(device, torch.float64, copy=True,
                                            non_blocking=device.type == "cuda")
    return torch.full((), value, dtype=torch.float64, device=device)


def _number(value: object) -> float:
    """A number of Python's or NumPy's, or an array of one; text that could be read as one is none."""
    if isinstance(value, np.ndarray | np.generic):
        value = value.item()
    if not isinstance(value, Real | Decimal):
        raise TypeError
    return float(value)


def _lasting(number: Tensor) -> Tensor:
    """`number` outside of the transforms of torch.func under way; not one for each row under `vmap`, and no
    tensor that only looks as if it had a value."""
    while torch._C._functorch.is_functorch_wrapped_tensor(number):
        if torch._C._functorch.is_batchedtensor(number):
            raise TypeError
        number = torch._C._functorch.get_unwrapped(number)
    if type(number) is not Tensor:
        raise TypeError
    return number


def _kind(tensor: Tensor) -> str:
    """What can be said of any tensor without a look at its values."""
    with torch._C.DisableTorchFunctionSubclass():
        form = "nested" if tensor.is_nested else str(list(tensor.shape))
        layout = "" if tensor.layout is torch.strided else f" {tensor.layout}"
        return f"{type(tensor).__name__} {form} {tensor.dtype}{layout} on {tensor.device.type}"
