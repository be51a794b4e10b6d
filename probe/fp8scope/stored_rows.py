"""What can be told of moments that were found as codes, not seen being encoded, in detailed steps.

Of torchao's and bitsandbytes' states the original is gone when the step is over. Known are the codes and
scales: zero codes, the histogram of |y|, moments and extremes of what the codes mean, on the sample of
blocks; scales and blocks of zeros of the whole state. Unknown, and missing in every such series, are
underflow, distortion, SQNR, gain, saturation (the largest element of every block has the largest code by
design) and bad blocks. What the rounding does to the update the twins tell.

Their second moment is v itself, where our own optimizer and the what-ifs of floating states have its root.
"""

import math

import torch
from torch import Tensor
from torch.optim import Optimizer

from fp8scope.adam import adam_form
from fp8scope.codes import Codes
from fp8scope.layers import ParameterPlace
from fp8scope.roundtrip import exponent_counts, packed
from fp8scope.sharding import local
from fp8scope.stored import MOMENTS, codes_of
from fp8scope.sums import COUNT_COLUMNS, MAX_COLUMNS, SUM_COLUMNS, RowSums
from fp8scope.updates import Samples, state_of
from fp8scope.watch import Watch
from fp8scope_protocol.series import Series


def measure_stored(optimizer: Optimizer, samples: Samples, watch: Watch) -> None:
    """Adds the sample of every moment that is stored as codes to the row of its series."""
    for group in optimizer.param_groups:
        if adam_form(optimizer, group) is None:
            continue
        for parameter in group["params"]:  # all ranks have the same series
            place = samples.places.get(id(parameter))
            for key in MOMENTS:
                if place is not None and (codes := codes_of(state_of(optimizer, parameter), key)) is not None:
                    watch.rows.row(_series(place, key, codes))
    for _, sample in samples.of(optimizer):
        for part in sample.parts:
            for key in MOMENTS:
                codes = codes_of(state_of(optimizer, part.parameter), key)
                if codes is not None:
                    with watch.guarded(part.place.name):
                        found = stored_row(codes, part.indices(sample.device))
                        watch.rows.row(_series(part.place, key, codes)).add(found.to(watch.rows.device))


def stored_row(codes: Codes, at: Tensor) -> RowSums:
    """The row of one stored moment: elements at flat indices `at` int64 [n], scales of all blocks."""
    y, scales = codes.quotients(at), local(codes.scales).double()
    d = (y * codes.scales[at // codes.block]).double()
    finite = torch.isfinite(d)
    x = torch.where(finite, d, 0.0)
    square, size = x.square(), x.abs()
    used = torch.isfinite(scales) & (scales > codes.empty_scale)
    bits = torch.where(used, torch.log2(scales), 0.0)
    row = RowSums.zeros(at.device)
    number = row.counts.new_full((), at.numel())
    row.counts.add_(packed(COUNT_COLUMNS, {
        "elements": number, "stored": number, "calls": torch.ones_like(number),
        "nonzero": torch.count_nonzero(x), "nan": torch.count_nonzero(torch.isnan(d)),
        "inf": torch.count_nonzero(torch.isinf(d)), "zero_codes": torch.count_nonzero(y == 0),
        "zero_blocks": torch.count_nonzero(scales <= codes.empty_scale),
        "scaled_blocks": torch.count_nonzero(used),
    }, torch.zeros_like(number)))
    row.sums.add_(packed(SUM_COLUMNS, {
        "x2": square.sum(), "abs": size.sum(), "x4": square.square().sum(), "scale_log2": bits.sum(),
        "scale_log2_sq": bits.square().sum(),
    }, row.sums.new_zeros(())))
    nothing = row.maxes.new_full((), -math.inf)
    extremes = {
        "amax": torch.where(finite, size, -math.inf),
        "neg_amin_nonzero": torch.where(size > 0, -size, -math.inf),
        "neg_scale_min": torch.where(used, -scales, -math.inf),
        "scale_max": torch.where(used, scales, -math.inf),
    }
    row.maxes.copy_(packed(MAX_COLUMNS, {key: one.amax() for key, one in extremes.items()}, nothing))
    row.histogram.add_(exponent_counts(torch.where(torch.isfinite(y), y, 0.0)))
    return row


def _series(place: ParameterPlace, key: str, codes: Codes) -> Series:
    return Series(name=place.name, role=key, format=codes.format, scaling=codes.scaling,  # type: ignore[arg-type]
                  live=True, module=place.module, depth=place.depth, aliases=place.aliases)
