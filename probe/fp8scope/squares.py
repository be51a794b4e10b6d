"""Sums of squares of many tensors at once: gradients, all of which are read for their norm.

In plain torch; the reference of `squares_kernel`. In float64, since the square of a gradient may be out of
the range of fp32, on either side.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def squares(tensors: Sequence[Tensor]) -> Tensor:
    """Sum of squares of each, float64 [N]; of one device and type. NaN or Inf where a tensor holds one."""
    return torch.stack(torch._foreach_norm(list(tensors), 2.0, dtype=torch.float64)).square_()
