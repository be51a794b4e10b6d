"""What the probe measures is what the catalogue says can be measured, of what and in which range."""

import pytest
import torch
from torch import nn

from fp8scope.scope import Scope
from fp8scope.testing import MemoryWorker
from fp8scope_protocol.metrics import METRICS
from fp8scope_trainer.adamw import AdamW
from fp8scope_trainer.linear import Fp8Linear
from fp8scope_trainer.recipe import Recipe


@pytest.mark.parametrize("fp8", [True, False])
def test_roles_orientations_and_ranges_are_the_catalogues(fp8: bool) -> None:
    """Of FP8 layers under both policies with quantized states and BF16 weights, and of what-ifs: rules on
    anything else are refused."""
    torch.manual_seed(0)
    model = nn.Sequential(Fp8Linear(128, 256, recipe=Recipe(policy="delayed")), Fp8Linear(256, 128)) if fp8 \
        else nn.Sequential(nn.Linear(128, 256), nn.Linear(256, 128))
    if not fp8:
        model[1].to(torch.bfloat16)
    optimizer = AdamW(model.parameters(), lr=1e-3, states="fp8") if fp8 \
        else torch.optim.AdamW(model.parameters(), lr=1e-3)
    worker = MemoryWorker()

    def loss() -> torch.Tensor:
        x = model[0](torch.randn(256, 128))
        y: torch.Tensor = model[1](x if fp8 else x.bfloat16())
        return y.float().square().mean()

    with Scope(model, (optimizer,), worker=worker, every=1, detail_every=1) as scope:
        for step in range(3):
            torch.autograd.backward(loss())
            optimizer.step()
            optimizer.zero_grad()
            if fp8:
                scope.grad_fidelity(loss, loss)
            scope.step(step)
    found = [(key, role, orientation, value) for step in range(3)
             for (_, role, orientation), values in worker.metrics(step).items()
             for key, value in values.items() if METRICS[key].kind == "value" or value]
    measured = {one[:2] for one in found}
    assert {("gemm_error", "activation"), ("wgrad_row_error_max", "gradient"),
            ("update_error", "exp_avg_sq")} <= measured
    assert (("grad_fidelity", "wgrad") in measured) == fp8
    assert (("update_gain", "weight") in measured) == (not fp8)
    assert not {("rms", "wgrad"), ("mean_abs", "wgrad")} & measured, "only its elements were counted"
    for key, role, orientation, value in found:
        metric = METRICS[key]
        assert metric.range[0] <= value <= metric.range[1], (key, role)
        assert role in metric.roles, key
        assert orientation in metric.orientations_of(role), (key, role)
