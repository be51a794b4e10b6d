"""One watched linear layer: which series it has, and what is measured of its operands.

A plain `nn.Linear` is measured as if it quantized its operands with current scales: activation and gradient
in both orientations, in the formats and scalings of `Watch.recipes`; layers that say how they cast are also
measured as they do. Hooks (hooks.py), compiled code (compiled.py) and layers that report by themselves
(in_situ.py) come here with tensors.
"""

import threading

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from fp8scope.compiled import Key
from fp8scope.gemm import WgradSample, gemm_error, sample_columns, wgrad_row_error_max
from fp8scope.layers import Layer
from fp8scope.observer import Cut
from fp8scope.roundtrip import channel_outlier_ratio
from fp8scope.saved_input import Kept, saved_input
from fp8scope.sharding import is_first_copy, is_measured_here, unreadable
from fp8scope.sums import MAX_COLUMNS
from fp8scope.transformer_engine import by_gemm
from fp8scope.watch import Watch, matrix
from fp8scope.weights import Weights
from fp8scope_protocol.formats import Format
from fp8scope_protocol.recipes import what_ifs
from fp8scope_protocol.series import Series

CHANNEL_OUTLIER, GEMM_ERROR = MAX_COLUMNS.index("channel_outlier"), MAX_COLUMNS.index("gemm_error")
WGRAD_ROW_ERROR = MAX_COLUMNS.index("wgrad_row_error")


class Call(threading.local):
    """The forward of a layer that is under way in this thread: jobs may run one model in several."""

    inside = False
    """True between the layer's pre-hook and its hook, in a measured step."""
    live = False
    """Whether it is measured."""
    sample: Kept | None = None
    """What it keeps of its input."""
    output: Tensor | None = None
    """What it has returned, where its input is measured when it is over."""
    late: list[Tensor] | None = None
    """Its inputs, where the weight is computed on the way and is read when the call is over."""


class LayerProbe:
    """One watched layer: its series, and the forward under way."""

    def __init__(self, layer: Layer, watch: Watch, weights: Weights) -> None:
        self.layer = layer
        self.watch = watch
        self.weights = weights
        """Of all layers."""
        self.call = Call()
        self.left: RemovableHandle | None = None
        """Of a forward hook that is the first of its layer, and stays if the forward raises."""
        self.key = Key(self, watch.rows.device)
        self._series: dict[tuple[str, ...], Series] = {}

    def remove(self) -> None:
        """Takes away a hook that the last forward left behind."""
        if self.left is not None:
            self.left.remove()

    def series(
        self, role: str, orientation: str, element: Format, scaling: str, policy: str = "current", *,
        live: bool = False, gemm: int = 0,
    ) -> Series:
        """The series of one of this layer's tensors; `gemm` tells its weights apart."""
        layer = self.layer
        owner = layer.weight(gemm) if role == "weight" else layer
        key = (owner.name, role, orientation, element.name, scaling)
        if key not in self._series:
            self._series[key] = Series(
                name=owner.name, role=role, orientation=orientation,  # type: ignore[arg-type]
                format=element.name, scaling=scaling, policy=policy, live=live or layer.in_situ,
                module=layer.name, depth=layer.depth, aliases=owner.aliases,
            )
        return self._series[key]

    @property
    def cut(self) -> Cut | None:
        """How ranks share the layer, where it says so itself."""
        cut = getattr(self.layer.module, "cut", None)
        return cut if isinstance(cut, Cut) else None

    def counts(self, role: str, operand: Tensor) -> bool:
        """Whether this rank counts it, and no other that holds the same."""
        return is_first_copy(operand) and not (self.cut is not None and self.cut.repeats(role))

    def add_operand(self, role: str, x: Tensor, gemm: int = 0) -> None:
        """x [R, C] as a what-if, in all formats: along its rows, in a detailed step also x.t(), for wgrad."""
        views = {"rowwise": x, "columnwise": x.t()} if self.watch.detailed else {"rowwise": x}
        for orientation, view in views.items():
            cast = self.layer.cast(role, orientation, gemm)
            if cast is not None:
                series = self.series(role, orientation, cast.element, cast.scaling, cast.policy, live=True)
                self.watch.measure(series, view, cast.element, scales=cast.scales(),
                                   power_of_two=cast.power_of_two)
            for element, scaling in what_ifs(self.watch.recipes, role):
                if cast is None or (element, scaling) != cast[:2]:
                    self.watch.measure(self.series(role, orientation, element, scaling), view, element)

    def add_sample(self, x: Tensor, scales: Tensor | None = None) -> WgradSample | None:
        """Columns of x [M, K], the first input of a step, for the error of the weight's gradient."""
        return sample_columns(x, scales) if self._has_turn() else None

    def _has_turn(self) -> bool:
        return self.watch.has_turn(self.layer.index) and self.watch.once("wgrad", self.layer.name)

    def _kept(self, x: Tensor) -> Kept | None:
        """As `add_sample`, without a copy where autograd keeps x."""
        if not self._has_turn():
            return None
        output = self.call.output
        return (None if output is None else saved_input(output, x)) or sample_columns(x)

    def add_errors(self, x: Tensor, weight: Tensor | None) -> None:
        """Of a detailed step: outlying channels of x [M, K], the error of its product with the weight [N, K],
        and what the call keeps for the error of the weight's gradient."""
        self.call.sample = self._kept(x) or self.call.sample
        outliers = channel_outlier_ratio(x)
        for recipe in self.watch.recipes:
            series = self.series("activation", "rowwise", recipe.element, recipe.scaling_of("activation"))
            self.watch.largest(series, CHANNEL_OUTLIER, outliers)
        if weight is not None:
            self.add_product(x, weight)

    def add_product(self, x: Tensor, weight: Tensor) -> None:
        """The error of the product of x [M, K] and the weight [N, K], in the first call of detailed steps."""
        for recipe in self.watch.recipes:
            scaling = recipe.scaling_of("activation")
            series = self.series("activation", "rowwise", recipe.element, scaling)
            if self.watch.once("gemm", *series.key):
                self.watch.largest(series, GEMM_ERROR, gemm_error(
                    x, matrix(weight), recipe.element, x_scaling=scaling,
                    weight_scaling=recipe.scaling_of("weight")))

    def add_wgrad_error(self, dy: Tensor, sample: WgradSample) -> None:
        """The error of the product of dy [M, N] and the sampled input of the same call, as a what-if."""
        for recipe in self.watch.recipes:
            scaling = recipe.scaling_of("gradient")
            error = wgrad_row_error_max(dy, sample, recipe.element, dy_scaling=scaling,
                                        x_scaling=recipe.scaling_of("activation"))
            series = self.series("gradient", "columnwise", recipe.element, scaling)
            self.watch.largest(series, WGRAD_ROW_ERROR, error)

    def add_weight(
        self, series: Series, weight: Tensor, element: Format, scales: Tensor | None = None, *,
        power_of_two: bool = False, current: bool = False, gemm: int = 0,
    ) -> None:
        """Once a step. Under FSDP all ranks hold the whole weight here, and one of them measures it.

        current: in steps that are not detailed, the scales are always those of the weight itself."""
        watch = self.watch
        if not watch.announce(series):  # all ranks have the same series
            return
        if current:
            self.weights.expect(self.layer, gemm, series, weight, element, power_of_two=power_of_two)
        mine = is_measured_here(weight, rank=watch.rank, world=watch.world, index=self.layer.dealt,
                                parts=1 if self.cut is None else self.cut.parts)
        if watch.once(*series.key) and mine:
            watch.measure(series, matrix(weight), element, scales=scales, power_of_two=power_of_two)

    def add_casts(self, weight: Tensor, gemm: int = 0) -> None:
        """A weight as the layer casts it, and as what-ifs."""
        cast = self.layer.cast("weight", "rowwise", gemm)
        if cast is not None:
            series = self.series("weight", "rowwise", cast.element, cast.scaling, cast.policy, live=True,
                                 gemm=gemm)
            self.add_weight(series, weight, cast.element, cast.scales(), power_of_two=cast.power_of_two)
        for element, scaling in what_ifs(self.watch.recipes, "weight"):
            self.add_weight(self.series("weight", "rowwise", element, scaling, gemm=gemm), weight, element,
                            current=True, gemm=gemm)

    def add_operands(self, weight: Tensor | None, inputs: list[Tensor]) -> None:
        """Inputs [..., K]; the weight [N, K] and the errors of products in the first call of a step."""
        for operand in inputs:
            x = matrix(operand)
            if self.counts("activation", operand):
                self.add_operand("activation", x)
            if self.watch.detailed:
                self.add_errors(x, weight)
        if weight is not None:
            self.add_casts(weight)

    def add_late_weight(self, weight: Tensor, inputs: list[Tensor]) -> None:
        """What `add_operands` left out, of a weight [N, K] that was computed since."""
        if self.watch.detailed:
            for operand in inputs:
                self.add_product(matrix(operand), weight)
        self.add_casts(weight)

    def add_gradient(self, gradient: Tensor, kept: Kept | None, rows: tuple[int, ...] = ()) -> None:
        """The gradient of an output [..., N]; what its call kept; `rows` as in `by_gemm`."""
        self.watch.gradients.add(self.layer.name)
        with self.watch.guarded(self.layer.name):
            if kind := unreadable(gradient):
                self.watch.unobserved(self.layer.name, f"its gradient cannot be read: {kind}")
                return
            dy = matrix(gradient)
            if self.counts("gradient", gradient):
                for gemm, part in by_gemm(dy, rows):
                    self.add_operand("gradient", part, gemm)
            if kept is not None and (sample := kept.sample()) is not None:
                self.add_wgrad_error(dy, sample)

    def operands(self, x: Tensor, weight: Tensor, call: int) -> None:
        """One call in a compiled region; see `compiled.Traced`."""
        watch, name = self.watch, self.layer.name
        if watch.rehearsing or not watch.attends():
            return
        if watch.is_first_pass(self.layer.module) and watch.measuring:
            watch.ran.add(name)
            self.weights.begin()
            with watch.guarded(name):
                self.add_operands(weight, [x])
                watch.calls.setdefault(name, {})[call] = self.call.sample
            self.call.sample = None

    def gradient(self, dy: Tensor, call: int) -> None:
        """The gradient of the output of that call."""
        if self.watch.measuring and not self.watch.rehearsing:
            self.add_gradient(dy, self.watch.sample_of(self.layer.name, call))
