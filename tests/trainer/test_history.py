"""Many amax histories go on together."""

import copy

import pytest
import torch
from torch import Tensor, nn

from fp8scope_protocol.formats import E4M3, E5M2
from fp8scope_trainer.history import AmaxHistory, advance_histories

KINDS = [(3, 0, E4M3), (1024, 0, E4M3), (3, 2, E4M3), (2, 0, E5M2), (3, 0, E4M3)]


@pytest.mark.parametrize("frozen", [False, True])
def test_scales_of_many_are_those_of_each(frozen: bool) -> None:
    """Of other lengths, margins and formats, over turns of the ring, to the bit; a frozen one keeps its
    scale, and its step is forgotten as well."""
    histories = nn.ModuleList(
        AmaxHistory(length, margin=margin, element=element) for length, margin, element in KINDS)
    generator = torch.Generator().manual_seed(0)
    seen: list[list[float]] = [[] for _ in KINDS]
    for step in range(5):
        for number, (history, (length, *_)) in enumerate(zip(histories, KINDS, strict=True)):
            assert isinstance(history, AmaxHistory)
            history.frozen = frozen and number == 4
            if step:
                history.observe(torch.randn(7, generator=generator))
            seen[number] = [*seen[number], 0.0 if history.frozen else history.pending.item()][-length:]
        advance_histories(histories)
        for history, amaxes, (*_, margin, element) in zip(histories, seen, KINDS, strict=True):
            assert isinstance(history, AmaxHistory)
            assert history.pending.item() == 0
            together, most = history.scale(), max(amaxes)
            wanted = torch.tensor(most) / torch.tensor(element.largest) * 2.0**margin if most else 1.0
            assert together.shape == (1, 1)
            assert together.item() == float(wanted)
            assert torch.equal(copy.deepcopy(history).scale(), together)


def test_a_ring_that_is_written_elsewhere_has_another_scale() -> None:
    """As a checkpoint would: the scale that came with the last step is no longer taken."""
    history = AmaxHistory(4)
    history.observe(torch.ones(1))
    advance_histories(history)
    before: Tensor = history.scale()
    history.amaxes.fill_(2.0)
    assert torch.equal(history.scale(), 2 * before)
