"""The frozen-amax drill does harm in FP8, where and when it says, and none in BF16."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fp8scope.gemm import WgradSample
from fp8scope.quantize import dequantize, quantize_blocks, quantize_tiles
from fp8scope_protocol.commands import Precision
from fp8scope_protocol.errors import Invalid, UnknownName
from fp8scope_protocol.formats import E4M3
from fp8scope_trainer.adamw import AdamW, parameter_groups
from fp8scope_trainer.convert import Conversion, convert
from fp8scope_trainer.data import batch_at, standard_library
from fp8scope_trainer.decoder import Decoder, DecoderConfig
from fp8scope_trainer.drill import FrozenAmax, Part
from fp8scope_trainer.history import advance_histories
from fp8scope_trainer.linear import Fp8Linear

FAULT, GROWTH = 8, 20
CONFIG = DecoderConfig(width=128, layers=2, heads=2, kv_heads=1, head_width=64, hidden=128, context=64)


class Meter:
    """Saturation, distortion and GEMM error of one layer's activation, from what it hands over."""

    active = True

    def __init__(self) -> None:
        self.saturation: list[float] = []
        self.distortion: list[float] = []
        self.gemm_error: list[float] = []

    def sums(self, role: str, x: Tensor, *, policy: str) -> None:
        """Reads x itself."""

    def tensor(
        self, role: str, orientation: str, x: Tensor, scales: Tensor, *, scaling: str, policy: str,
        power_of_two: bool = False, format: str = "e4m3",
    ) -> None:
        if (role, orientation) == ("activation", "rowwise"):
            d = dequantize(quantize_tiles(x, E4M3, scales=scales))
            self.saturation.append((x.abs() > 448 * scales[:, :1]).double().mean().item())
            cosine = F.cosine_similarity(x.double().flatten(), d.double().flatten(), dim=0)
            self.distortion.append(1 - cosine.item())

    def sample(self, x: Tensor, column_scales: Tensor) -> None:
        """Keeps nothing."""

    def wgrad(
        self, dy: Tensor, column_scales: Tensor, sample: WgradSample, *, scaling: str = "tile 1x128",
        format: str = "e4m3",
    ) -> None:
        """Never called: nothing was kept."""

    def gemm(
        self, x: Tensor, weight: Tensor, x_scales: Tensor, weight_scales: Tensor, *,
        scaling: str = "tile 1x128", weight_scaling: str = "block 128x128",
    ) -> None:
        exact, w = x @ weight.t(), dequantize(quantize_blocks(weight, E4M3, scales=weight_scales))
        y = dequantize(quantize_tiles(x, E4M3, scales=x_scales)) @ w.t()
        self.gemm_error.append(((y - exact).norm() / exact.norm()).item())


def drilled(precision: Precision, steps: int, drill: FrozenAmax) -> tuple[Meter, list[float]]:
    torch.manual_seed(0)
    model = Decoder(CONFIG)
    convert(model, Conversion(precision=precision, delayed=(drill.layer,)))
    drill.check(model)
    layer = model.get_submodule(drill.layer)
    assert isinstance(layer, Fp8Linear)
    layer.observer = meter = Meter()
    optimizer = AdamW(parameter_groups(model), lr=1e-3)
    corpus, losses = standard_library(limit=200_000), []
    for step in range(steps):
        drill.before_step(model, step)
        tokens, targets = batch_at(corpus.train, step=step, batch=4, length=64)
        loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        advance_histories(model)
        losses.append(loss.item())
    return meter, losses


@pytest.mark.parametrize("part", ["attention", "mlp"])
def test_frozen_history_passes_the_limits_and_heals_on_release(part: Part) -> None:
    """Healthy before the fault; saturation, distortion and GEMM error pass their limits within 15 steps of
    it, saturation first; two steps after the release all are healthy again."""
    drill = FrozenAmax(block="layers.1", part=part, fault_step=FAULT, gain_steps=GROWTH,
                       release_step=FAULT + GROWTH + 2)
    meter, losses = drilled("fp8", drill.released_at + 4, drill)
    healthy = slice(1, FAULT)  # step 0 runs with the initial scale of 1
    assert max(meter.saturation[healthy]) < 1e-3
    assert max(meter.distortion[healthy]) < 1e-3
    assert max(meter.gemm_error[healthy]) < 0.05
    series = ((meter.saturation, 1e-3), (meter.distortion, 5e-3), (meter.gemm_error, 0.08))
    crossed = [next(step for step, value in enumerate(values) if step >= FAULT and value > limit)
               for values, limit in series]
    assert crossed[0] == min(crossed)
    assert max(crossed) <= FAULT + 15
    assert max(meter.saturation[drill.released_at + 2:]) < 1e-3
    assert max(meter.gemm_error[drill.released_at + 2:]) < 0.05
    assert all(loss < 6 for loss in losses)


def test_bf16_twin_survives() -> None:
    """The same gain in BF16: every loss stays below the untrained model's, and the last below the fault's."""
    drill = FrozenAmax(block="layers.1", fault_step=FAULT, gain_steps=GROWTH)
    _, losses = drilled("bf16", FAULT + GROWTH + 4, drill)
    assert losses[-1] < losses[FAULT] < losses[0]


def test_a_drill_that_would_do_nothing_is_refused() -> None:
    """No such block, a layer without delayed scaling, impossible steps: an error, not a silent dry run."""
    model = Decoder(CONFIG)
    convert(model)
    with pytest.raises(Invalid, match="must be an Fp8Linear with delayed scaling"):
        FrozenAmax(block="layers.1").check(model)
    with pytest.raises(UnknownName, match=r"near misses: layers\.1"):
        FrozenAmax(block="layers.11").check(model)
    with pytest.raises(Invalid, match="must be after fault_step = 25"):
        FrozenAmax(release_step=25)
    with pytest.raises(Invalid, match="must be above 1"):
        FrozenAmax(growth=1.0)
