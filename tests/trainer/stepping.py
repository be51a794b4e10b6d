"""Steps of an optimizer with gradients that depend on the step alone."""

import torch
from torch import Tensor

from fp8scope_trainer.optimizer import StateOptimizer

SHAPE = (24, 200)


def gradient(step: int, shape: tuple[int, ...] = SHAPE) -> Tensor:
    """Gaussian."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(step))


def stepped(optimizer: StateOptimizer, steps: range) -> None:
    """Makes `steps` of all parameters of the first group."""
    for step in steps:
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.grad = gradient(step, tuple(parameter.shape)).to(parameter.dtype)
        optimizer.step()
