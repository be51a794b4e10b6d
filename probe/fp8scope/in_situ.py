"""What the probe hears from layers that quantize by themselves; hooks.py puts it into them."""

import torch
from torch import Tensor

from fp8scope.gemm import WgradSample, gemm_error, wgrad_row_error_max
from fp8scope.inert import InertObserver
from fp8scope.layer_probe import CHANNEL_OUTLIER, GEMM_ERROR, WGRAD_ROW_ERROR, LayerProbe
from fp8scope.roundtrip import channel_outlier_ratio
from fp8scope.sums import RowSums
from fp8scope.watch import matrix
from fp8scope_protocol.formats import E4M3, parse_format


class InSituObserver(InertObserver):
    """What a self-quantizing layer reports to: a `LinearObserver` and a `GraphObserver`."""

    def __init__(self, probe: LayerProbe) -> None:
        self.probe = probe

    @property
    def active(self) -> bool:
        """In a forward: as its pre-hook decided. In a backward: whether the step is measured."""
        if self.probe.call.inside:
            return self.probe.call.live
        watch = self.probe.watch
        return watch.measuring and not watch.rehearsing and torch._C._current_graph_task_id() != -1

    def begins(self) -> None:
        """A forward in compiled code; see `LayerProbe.operands`."""
        probe, watch = self.probe, self.probe.watch
        module = probe.layer.module
        if watch.rehearsing or not (watch.attends() and module.training):
            return
        counts = watch.is_first_pass(module)
        if watch.measuring:
            probe.call.inside, probe.call.live = True, counts
            if counts:
                watch.ran.add(probe.layer.name)
                probe.weights.begin()

    def ends(self) -> None:
        """Of the same."""
        self.probe.call.inside = self.probe.call.live = False

    def keep(self, call: int, sample: WgradSample | None) -> None:
        """Until the step ends."""
        self.probe.watch.calls.setdefault(self.probe.layer.name, {})[call] = sample

    def kept(self, call: int) -> WgradSample | None:
        """Once."""
        kept = self.probe.watch.sample_of(self.probe.layer.name, call)
        return None if kept is None else kept.sample()

    def sums(self, role: str, x: Tensor, *, policy: str) -> RowSums | None:
        """The row of x, unless more than the quantizer's sums is wanted of it, or only in some replays."""
        watch = self.probe.watch
        if watch.detailed or watch.recording or policy == "delayed" or x.device != watch.rows.device:
            return None
        if not self.probe.counts(role, x):
            return None
        with watch.guarded(self.probe.layer.name):
            return watch.rows.row(self.probe.series(role, "rowwise", E4M3, "tile 1x128", policy))
        return None

    def tensor(
        self, role: str, orientation: str, x: Tensor, scales: Tensor, *, scaling: str, policy: str,
        power_of_two: bool = False, format: str = "e4m3",
    ) -> None:
        """One quantization with the scales that were used.

        Outside of detailed steps current scales are computed again, to the same bits: x over one's own amax
        is divided in fewer instructions than x over any scale.
        """
        probe, watch = self.probe, self.probe.watch
        with watch.guarded(probe.layer.name):
            if orientation == "columnwise" and not watch.detailed:
                return
            element = parse_format(format)
            series = probe.series(role, orientation, element, scaling, policy)
            used = scales if policy == "delayed" or watch.detailed else None
            if role == "weight":
                probe.add_weight(series, x, element, used, power_of_two=power_of_two,
                                 current=policy != "delayed")
                return
            if not probe.counts(role, x):
                return
            x = matrix(x)
            watch.measure(series, x, element, scales=used, power_of_two=power_of_two)
            if watch.detailed and (role, orientation) == ("activation", "rowwise"):
                watch.largest(series, CHANNEL_OUTLIER, channel_outlier_ratio(x))

    def gemm(
        self, x: Tensor, weight: Tensor, x_scales: Tensor, weight_scales: Tensor, *,
        scaling: str = "tile 1x128", weight_scaling: str = "block 128x128",
    ) -> None:
        """The operands of the first forward of a detailed step."""
        probe = self.probe
        with probe.watch.guarded(probe.layer.name):
            if probe.watch.detailed and probe.watch.once("gemm", probe.layer.name):
                error = gemm_error(matrix(x), matrix(weight), E4M3, x_scaling=scaling, x_scales=x_scales,
                                   weight_scaling=weight_scaling, weight_scales=weight_scales)
                series = probe.series("activation", "rowwise", E4M3, scaling)
                probe.watch.largest(series, GEMM_ERROR, error)

    def sample(self, x: Tensor, column_scales: Tensor) -> WgradSample | None:
        """What the call is to keep of x until its backward."""
        with self.probe.watch.guarded(self.probe.layer.name):
            return self.probe.add_sample(matrix(x), column_scales)
        return None

    def wgrad(
        self, dy: Tensor, column_scales: Tensor, sample: WgradSample, *, scaling: str = "tile 1x128",
        format: str = "e4m3",
    ) -> None:
        """The operands of the wgrad of a call that kept a sample. Under one scale a tensor the series is the
        rowwise one: it has the codes of both orientations."""
        with self.probe.watch.guarded(self.probe.layer.name):
            element = parse_format(format)
            orientation = "rowwise" if scaling == "tensorwise" else "columnwise"
            series = self.probe.series("gradient", orientation, element, scaling)
            error = wgrad_row_error_max(matrix(dy), sample, element, x_element=E4M3, dy_scaling=scaling,
                                        x_scaling=scaling, dy_scales=column_scales)
            self.probe.watch.largest(series, WGRAD_ROW_ERROR, error)
