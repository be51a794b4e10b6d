"""A real TransformerEngine: its output is the product of what the probe says its operands were cast to."""

import importlib
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fp8scope.quantize import dequantize, quantize
from fp8scope.scope import Scope
from fp8scope.testing import MemoryWorker
from fp8scope.transformer_engine import engine_cast, unread

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
BF16_OUTPUT = 4e-3
"""Relative; with scales of something else it is 0.04."""


def library(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except (ImportError, OSError) as error:
        return pytest.skip(f"transformer_engine is not installed: {error}")


def fp8(recipe: str) -> AbstractContextManager[Any]:
    """Its autocast, by the newer name or the older one."""
    te = library("transformer_engine.pytorch")
    made = getattr(library("transformer_engine.common.recipe"), recipe)()
    if hasattr(te, "autocast"):
        context: AbstractContextManager[Any] = te.autocast(enabled=True, recipe=made)
    else:
        context = te.fp8_autocast(enabled=True, fp8_recipe=made)
    return context


def cast(layer: nn.Module, role: str, x: Tensor) -> Tensor:
    """x as the layer casts it, fp32."""
    how = engine_cast(layer, role, "rowwise")
    assert how is not None, list(unread(layer))
    return dequantize(quantize(x, how.element, how.scaling, scales=how.scales(),
                               power_of_two=how.power_of_two))


@pytest.mark.parametrize("recipe", ["DelayedScaling", "Float8CurrentScaling", "Float8BlockScaling"])
def test_the_product_is_that_of_the_casts(recipe: str) -> None:
    """At every step, so with delayed scales that move; and the probe has a live series of each operand."""
    te = library("transformer_engine.pytorch")
    torch.manual_seed(0)
    layer = te.Linear(256, 384, bias=False, params_dtype=torch.bfloat16, device="cuda")
    worker = MemoryWorker()
    with Scope(nn.Sequential(layer), (), worker=worker, every=1) as scope:
        for step in range(4):
            x = torch.randn(128, 256, device="cuda", dtype=torch.bfloat16) * 2.0**step
            with fp8(recipe):
                y = layer(x)
                wanted = cast(layer, "activation", x) @ cast(layer, "weight", layer.weight.detach()).t()
            y.float().square().sum().backward()
            torch.cuda.synchronize()
            scope.step(step)
            error = ((y.detach().float() - wanted).norm() / wanted.norm()).item()
            assert error < BF16_OUTPUT, (step, error)
    record = worker.record(3)
    assert record.layout is not None
    live = {(one.role, one.orientation) for one in record.layout.series if one.live}
    assert live == {("activation", "rowwise"), ("activation", "columnwise"), ("weight", "rowwise"),
                    ("gradient", "rowwise"), ("gradient", "columnwise")}
    texts = [event.text for one in worker.records for event in one.events]
    assert [text for text in texts if text] == []
