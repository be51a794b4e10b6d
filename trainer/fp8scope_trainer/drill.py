"""Fault drills: a known fault at a known step, so that a monitor's alarm can be judged against the truth.

`frozen-amax`. In one block, the linear that reads the normalized stream runs under delayed scaling. From
`fault_step` on its amax history is stuck, as a cache that is no longer refreshed would be, while the gain of
the norm in front of it grows by `growth` each step. The scale no longer follows: the layer saturates first
and distorts then. In BF16 the same gain does no harm. At `released_at` the history is refreshed again.

    step    fault_step        fault_step + gain_steps        released_at
            |- gain grows -------------|                           |
            |- history frozen -------------------------------------|- one step later the scale fits

Measured with `python benchmarks/drill.py` (demo model, attention and mlp, two seeds): saturation passes 1e-3
three steps after the fault, distortion 5e-3 eight, GEMM error 0.08 eight or nine. Around the release the loss
is 0.08 to 0.18 above the twin's; over the last ten steps it is anything from 0.01 below to 0.20 above.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from fp8scope_protocol.bounds import check_whole
from fp8scope_protocol.errors import Invalid, UnknownName
from fp8scope_trainer.linear import Fp8Linear

DRILLS = ("frozen-amax",)

RELEASE_AFTER = 10

Part = Literal["attention", "mlp"]
_READERS: dict[str, tuple[str, str]] = {
    # part: (norm in front, linear behind it), in a layer of the reference decoder
    "attention": ("attention_norm", "attention.qkv"),
    "mlp": ("mlp_norm", "mlp.gate_up"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class FrozenAmax:
    """Where and when. Steps are optimizer steps, counted from 0."""

    block: str = "layers.2"
    part: Part = "attention"
    fault_step: int = 25
    gain_steps: int = 40
    """Steps during which the gain grows."""
    growth: float = 1.1
    """Factor on the gain, per step."""
    release_step: int | None = None
    """When the history is refreshed again; None for `RELEASE_AFTER` steps after the gain has stopped."""

    def __post_init__(self) -> None:
        if self.part not in _READERS:
            raise Invalid("part", self.part, f"must be one of {', '.join(_READERS)}")
        check_whole("fault_step", self.fault_step)
        check_whole("gain_steps", self.gain_steps, least=1)
        if not 1 < self.growth <= 2:
            raise Invalid("growth", self.growth, "must be above 1 and at most 2")
        if self.release_step is not None:
            check_whole("release_step", self.release_step, least=1)
        if self.release_step is not None and self.release_step <= self.fault_step:
            raise Invalid("release_step", self.release_step, f"must be after fault_step = {self.fault_step}")

    @property
    def released_at(self) -> int:
        """First step whose amax enters the history again."""
        end_of_growth = self.fault_step + self.gain_steps
        return end_of_growth + RELEASE_AFTER if self.release_step is None else self.release_step

    @property
    def layer(self) -> str:
        """Name of the linear that is hurt; it must run under delayed scaling."""
        return f"{self.block}.{_READERS[self.part][1]}"

    @property
    def norm(self) -> str:
        """Name of the norm whose gain grows."""
        return f"{self.block}.{_READERS[self.part][0]}"

    def check_names(self, model: nn.Module) -> None:
        """Refuses a block that `model` does not have."""
        names = dict(model.named_modules())
        if self.layer not in names or self.norm not in names:
            raise UnknownName("block", self.block, _blocks(names, self.part))

    def check(self, model: nn.Module) -> None:
        """Refuses a converted model that this drill would leave unharmed."""
        self.check_names(model)
        layer = model.get_submodule(self.layer)
        if not isinstance(layer, Fp8Linear) or layer.history is None:
            raise Invalid("block", self.block, f"{self.layer} must be an Fp8Linear with delayed scaling")

    def before_step(self, model: nn.Module, step: int) -> None:
        """Does to `model` what is due before the forward of `step`. Call it on every rank."""
        layer = model.get_submodule(self.layer)
        if isinstance(layer, Fp8Linear) and layer.history is not None:
            layer.history.frozen = self.fault_step <= step < self.released_at
        if self.fault_step <= step < self.fault_step + self.gain_steps:
            gain = model.get_submodule(self.norm).get_parameter("weight")
            with torch.no_grad():
                gain.mul_(self.growth)


def _blocks(names: dict[str, nn.Module], part: Part) -> list[str]:
    """Names of the modules that have what the drill hurts."""
    norm = _READERS[part][0]
    return [name.removesuffix(f".{norm}") for name in names if name.endswith(f".{norm}")]
