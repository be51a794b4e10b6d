"""The sample of blocks: which elements it takes, the same on every mesh, and its sums."""

import pytest
import torch
from torch import Tensor, nn

from fp8scope.layers import ParameterPlace
from fp8scope.sample import BLOCK, MOST, MOST_OF_ONE, Sample, draw, stride_of


def place(name: str, index: int = 0) -> ParameterPlace:
    return ParameterPlace(name=name, aliases=(), module="", depth=0, index=index)


def sample_of(*parameters: Tensor, rank: int = 0, world: int = 1) -> tuple[Sample, ...]:
    places = {id(p): place("abcdefgh"[i], i) for i, p in enumerate(parameters)}
    return draw(parameters, places, rank=rank, world=world)


@pytest.mark.parametrize("shape", [
    (2048, 1024), (61 * 128, 1300), (4096, 61 * 128), (900, 3, 3, 100), (2**21,)])
def test_blocks_are_those_of_a_plain_loop(shape: tuple[int, ...]) -> None:
    """128 or a little fewer, evenly spaced through the flat tensor, in whole blocks of 128 elements."""
    x = torch.arange(torch.Size(shape).numel(), dtype=torch.float64).view(shape)
    (sample,) = sample_of(x)
    (part,) = sample.parts
    stride = stride_of(x.shape)
    taken = sample.gather([x])
    assert torch.equal(taken, x.flatten()[part.indices(x.device)])
    blocks = taken.view(-1, BLOCK)[:, 0].div(BLOCK).tolist()
    first = int(blocks[0])
    assert first < stride
    assert blocks == list(range(first, x.numel() // BLOCK, stride))
    assert 100 * BLOCK <= taken.numel() <= MOST_OF_ONE
    assert part.weight == stride
    if len(shape) > 1 and shape[-1] % BLOCK == 0:  # every column has its turn
        assert len({int(block) % (shape[-1] // BLOCK) for block in blocks}) == shape[-1] // BLOCK


def test_small_parameters_are_taken_whole() -> None:
    """Vectors, ragged matrices and single numbers too."""
    parameters = [torch.randn(shape) for shape in ((7,), (), (120, 67), (128, 128))]
    (sample,) = sample_of(*parameters)
    assert torch.equal(sample.gather(parameters), torch.cat([p.flatten() for p in parameters]))
    assert stride_of(torch.Size((2**14,))) == 1


@pytest.mark.parametrize("columns", [1, 100, 128, 768, 3840, 4096, 128_000])
def test_what_is_taken_of_one_parameter_is_bounded(columns: int) -> None:
    """At any size, and where no number nearby is coprime to the blocks in a row; not much less either."""
    for rows in (*range(1, 200), 1000, 4096, 28_672, 2**20):
        shape = torch.Size((rows, columns))
        taken = -(-(shape.numel() // BLOCK) // stride_of(shape)) * BLOCK
        assert taken <= MOST_OF_ONE
        assert taken >= min(shape.numel() - BLOCK, MOST_OF_ONE // 8)


def test_views_that_are_not_contiguous_give_the_same() -> None:
    """The sample is one of values, not of memory."""
    x = torch.randn(1024, 2048)
    (sample,) = sample_of(x)
    wide = torch.zeros(1024, 4096)
    wide[:, ::2] = x
    assert torch.equal(sample.gather([x.t().contiguous().t()]), sample.gather([x]))
    assert torch.equal(sample.gather([wide[:, ::2]]), sample.gather([x]))


def test_sums_are_of_each_part() -> None:
    """In float64, in the order of the parts, whole ones first; `spread` is the way back."""
    parameters = [torch.randn(1024, 2048), torch.randn(5), torch.randn(300, 300)]
    (sample,) = sample_of(*parameters)
    order = [next(i for i, p in enumerate(parameters) if p is part.parameter) for part in sample.parts]
    assert order == [1, 0, 2] or order == [1, 2, 0]
    x = sample.gather([parameters[i] for i in order])
    pieces = torch.split(x, [part.elements for part in sample.parts])
    exact = torch.stack([p.double().square().sum() for p in pieces])
    assert torch.allclose(sample.squares(x), exact, rtol=1e-12)
    spread = sample.spread(torch.arange(3.0))
    assert torch.equal(spread, torch.cat([torch.full_like(p, i) for i, p in enumerate(pieces)]))
    assert torch.equal(sample.pick(x, [0, 2]), torch.cat([pieces[0], pieces[2]]))
    assert [part.elements for part in sample.only([2]).parts] == [len(pieces[2])]


def test_samples_are_bounded_and_of_one_kind() -> None:
    """At most MOST elements, one device and dtype each; integers and unknown parameters are left out."""
    many = [torch.zeros(60, 60, dtype=torch.bfloat16 if i % 2 else torch.float32) for i in range(4000)]
    places = {id(p): place(f"p{i}") for i, p in enumerate(many)}
    samples = draw([*many, torch.zeros(4)], places, rank=0, world=1)
    assert sum(len(sample.parts) for sample in samples) == len(many)
    assert max(sample.elements for sample in samples) <= MOST
    assert len(samples) > 2
    for sample in samples:
        assert {part.parameter.dtype for part in sample.parts} == {sample.dtype}
    whole_number = nn.Parameter(torch.zeros(4, dtype=torch.int64), requires_grad=False)
    assert draw([whole_number], {id(whole_number): place("n")}, rank=0, world=1) == ()


def test_what_ranks_hold_alike_is_taken_by_one() -> None:
    """In turn, so that every rank takes some."""
    parameters = [torch.zeros(4, 4) for _ in range(4)]
    taken = [{id(part.parameter) for part in sample_of(*parameters, rank=rank, world=2)[0].parts}
             for rank in (0, 1)]
    assert taken[0].isdisjoint(taken[1])
    assert taken[0] | taken[1] == set(map(id, parameters))
