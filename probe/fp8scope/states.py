"""What quantization does, or would do, to optimizer states; measured after the step of a detailed step.

An optimizer with an attribute `observer` (see observer.py) hands over what it encoded. States that are held
in floating point are measured as what-ifs: exp_avg and momentum_buffer as they are,
exp_avg_sq as its square root, which is what a quantizer should store (twice the binades in the same codes).

Only matrices are measured: no state format quantizes vectors. Under FSDP a rank measures its own shard; what
all ranks hold alike is measured by one of them. Rows of a [R, C] state are rows of its parameter.
"""

from collections.abc import Iterator, Mapping

from torch import Tensor
from torch.optim import Optimizer

from fp8scope.inert import InertObserver
from fp8scope.layers import ParameterPlace
from fp8scope.quantize import DTYPES
from fp8scope.sharding import is_measured_here, local
from fp8scope.watch import Operand, Watch
from fp8scope_protocol.formats import Format, is_scaling, parse_format
from fp8scope_protocol.recipes import what_ifs
from fp8scope_protocol.series import Series

ROLES = {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq", "momentum_buffer": "momentum"}

Places = dict[int, ParameterPlace]


def measure_states(optimizer: Optimizer, places: Places, watch: Watch) -> None:
    """What-if of every floating-point state of a matrix, together where kernels can."""
    found: list[Operand] = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            place = places.get(id(parameter))
            state = optimizer.state.get(parameter)
            if place is None or not isinstance(state, Mapping) or parameter.dim() < 2:
                continue
            with watch.guarded(place.name):
                for key, role in ROLES.items():
                    if isinstance(x := state.get(key), Tensor) and is_high_precision(x, parameter):
                        found += _operands(watch, place, role, parameter, x)
    if found:
        watch.measure_all(found, "optimizer")


class StateRecorder(InertObserver):
    """What an optimizer with quantized states reports to: an `observer.StateObserver`."""

    def __init__(self, watch: Watch, places: Places) -> None:
        self.watch = watch
        self.places = places
        """Refreshed by the scope before each step."""

    @property
    def active(self) -> bool:
        return self.watch.detailed

    def state(
        self, parameter: Tensor, role: str, x: Tensor, scales: Tensor, *, scaling: str, rounding: str,
        format: str, codes: Tensor,
    ) -> None:
        """One encoded state, this rank's part."""
        place = self.places.get(id(parameter))
        if place is None:
            return
        with self.watch.guarded(place.name):
            if not is_measurable(format, scaling):
                self.watch.unobserved(place.name, f"{role} is stored as {format}, {scaling}")
                return
            element = parse_format(format)
            series = state_series(place, role, element, scaling, rounding=rounding, live=True)
            self.watch.rows.row(series)
            if _is_mine(self.watch, parameter, place):
                self.watch.measure(series, x, element, scales=scales, codes=codes)


def _operands(
    watch: Watch, place: ParameterPlace, role: str, parameter: Tensor, state: Tensor
) -> Iterator[Operand]:
    x = local(state).flatten(1)
    for element, scaling in what_ifs(watch.recipes, role):
        series = state_series(place, role, element, scaling)
        watch.rows.row(series)  # all ranks have the same series
        if _is_mine(watch, parameter, place):
            yield Operand(series, x, element, root=role == "exp_avg_sq")


def state_series(
    place: ParameterPlace, role: str, element: Format, scaling: str, *, rounding: str = "nearest",
    live: bool = False,
) -> Series:
    """The series of one state of a parameter."""
    return Series(
        name=place.name, role=role, format=element.name, scaling=scaling,  # type: ignore[arg-type]
        rounding=rounding, live=live, module=place.module, depth=place.depth,  # type: ignore[arg-type]
        aliases=place.aliases,
    )


def _is_mine(watch: Watch, parameter: Tensor, place: ParameterPlace) -> bool:
    return is_measured_here(parameter, rank=watch.rank, world=watch.world, index=place.index)


def is_measurable(format: str, scaling: str) -> bool:
    """Whether codes in `format` under `scaling` can be measured: the probe has a quantizer for both."""
    return format in DTYPES and is_scaling(scaling)


def is_high_precision(x: Tensor, parameter: Tensor) -> bool:
    """Whether a state is held in floating point, element by element."""
    ordinary = type(local(x)) is Tensor  # torchao's are of a class of their own, see stored_rows
    return ordinary and x.is_floating_point() and x.element_size() > 1 and x.shape == parameter.shape
