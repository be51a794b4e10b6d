"""The fused step against plain torch: in Triton's interpreter, and as compiled code on a GPU."""

from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from fp8scope_trainer.moments import Slots, new_state, slots
from fp8scope_trainer.rules import ADAM, ADAMW, LION, SGD, Scalars, scalars
from fp8scope_trainer.state_format import Encoded, StateFormat
from fp8scope_trainer.step import ROW, StepTensors, update

triton = pytest.importorskip("triton", reason="triton is not installed")

RULES = {"adamw": ADAMW, "adam": ADAM, "sgd": SGD, "nesterov": SGD, "lion": LION}


class Case(NamedTuple):
    """One launch: parameters of these shapes."""

    rule: str
    format: str
    block: int | None
    shapes: tuple[tuple[int, int], ...]
    weight: torch.dtype = torch.float32
    gradient: torch.dtype = torch.float32
    clipped: bool = True
    factor: float | None = None
    master: bool = False
    wide: bool = False
    spoiled: bool = False
    """NaN and Inf in a gradient, a row of zero gradients, magnitudes over thirty decades."""
    offset: int = 0
    """Elements after where an allocator would begin."""
    gap: int = 0
    """Columns of the whole that other ranks have, after each row."""


EVEN = ((16, 128), (8, 1024), (3, 2048), (1, 256))
RAGGED = ((9, 130), (4, 1000), (17, 33), (1, 7))
BF16 = torch.bfloat16
CASES = {
    "adamw fp32": Case("adamw", "fp32", None, RAGGED),
    "adamw bf16": Case("adamw", "bf16", None, RAGGED),
    "adamw fp8": Case("adamw", "fp8", 128, ((16, 128), (8, 1024), (3, 2048), (1, 128))),
    "adamw fp8 ragged": Case("adamw", "fp8", 128, RAGGED),
    "adamw int8": Case("adamw", "int8", 256, EVEN[1:]),
    "adamw int8 in large blocks": Case("adamw", "int8", 2048, EVEN[2:3]),
    "adamw int8 ragged": Case("adamw", "int8", 256, ((9, 272), (4, 1008))),
    "adamw int16": Case("adamw", "int16", 1024, ((8, 1024), (3, 2048))),
    "adamw int4": Case("adamw", "int4", 64, EVEN),
    "adamw int4 ragged": Case("adamw", "int4", 64, RAGGED),
    "adamw fp8 bf16 weights": Case("adamw", "fp8", 128, ((8, 1024),), weight=BF16, gradient=BF16),
    "adamw int8 bf16 gradients": Case("adamw", "int8", 256, ((8, 1024),), gradient=BF16, factor=0.3),
    "adamw fp8 beyond 32 bits": Case("adamw", "fp8", 128, ((8, 1024),), wide=True),
    "adamw fp8 ragged beyond 32 bits": Case("adamw", "fp8", 128, ((9, 130),), wide=True),
    "adamw fp8 not finite": Case("adamw", "fp8", 128, ((8, 1024), (9, 130)), spoiled=True),
    "adamw int8 not finite": Case("adamw", "int8", 256, ((8, 1024),), spoiled=True),
    "adamw int4 not finite": Case("adamw", "int4", 64, ((8, 1024),), spoiled=True),
    "adamw bf16 not finite": Case("adamw", "bf16", None, ((8, 1024),), spoiled=True),
    "adamw fp8 anywhere": Case("adamw", "fp8", 128, ((8, 1024), (9, 130)), offset=3, clipped=False),
    "adamw fp8 cut rows": Case("adamw", "fp8", 128, ((8, 1024), (5, 256)), gap=256),
    "adamw int8 cut rows beyond 32 bits": Case("adamw", "int8", 256, ((4, 512),), gap=1 << 30),
    "adamw int4 cut rows anywhere": Case("adamw", "int4", 64, ((8, 192),), gap=64, offset=3),
    "lion bf16 cut rows": Case("lion", "bf16", None, ((9, 130),), weight=BF16, gradient=BF16, gap=130),
    "adamw fp8 master": Case("adamw", "fp8", 128, ((8, 1024),), weight=BF16, gradient=BF16, master=True),
    "adam fp8": Case("adam", "fp8", 128, ((8, 1024),), clipped=False, factor=2.0),
    "sgd int8": Case("sgd", "int8", 256, ((8, 1024), (9, 130))),
    "nesterov fp32": Case("nesterov", "fp32", None, ((8, 1024), (9, 130))),
    "nesterov fp8": Case("nesterov", "fp8", 128, ((8, 1024), (9, 130))),
    "lion int4": Case("lion", "int4", 64, ((8, 1024), (9, 130))),
    "lion bf16": Case("lion", "bf16", None, ((8, 1024), (9, 130)), weight=BF16),
}


def placed(x: Tensor, offset: int) -> Tensor:
    """x that begins some elements after where an allocator would."""
    return x.new_zeros(x.numel() + offset)[offset:].view(x.shape).copy_(x)


def gradient(shape: tuple[int, int], seed: int, case: Case) -> Tensor:
    """Columns span two decades, or, if the case is spoiled, thirty."""
    generator = torch.Generator().manual_seed(seed)
    g = torch.randn(shape, generator=generator) * torch.logspace(-2, 0, shape[1])
    if case.spoiled:
        g *= torch.logspace(-30, 0, shape[1])
        g[0, :64] = 0.0
        g[2, 5], g[3, 90], g[4, 17] = torch.nan, torch.inf, 1e25
    return g.to(case.gradient)


def by(case: Case, step: int) -> Scalars:
    """Of the rule, with a clip that clips something."""
    group: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.1, "betas": (0.9, 0.95), "momentum": 0.9,
                             "nesterov": case.rule == "nesterov", "eps": 1e-8, "seed": 77,
                             "clip": 1.5 if case.clipped else None}
    return scalars(RULES[case.rule], group, step)


def begun(shape: tuple[int, int], number: int, case: Case, device: str) -> StepTensors:
    """A weight, a gradient and states after a step of the reference, so that they are full."""
    generator = torch.Generator().manual_seed(100 + number)
    weight = torch.randn(shape, generator=generator).to(device, case.weight)
    rule, format = RULES[case.rule], StateFormat.of(case.format, case.block)
    state = new_state(weight, rule, format, exact=False, master=False)
    first = (1 << 32) - shape[0] * shape[1] // 2 + 64 if case.wide else 1000 * number
    whole = gradient(shape, number, case._replace(spoiled=False)).to(device)
    starts = first + torch.arange(shape[0], device=device) * (shape[1] + case.gap)
    one = StepTensors(weight=weight, gradient=whole, slots=slots(state, rule), stream=number, first=first,
                      starts=starts if case.gap else None,
                      master=weight.float() if case.master else None)
    update(one, rule, format, by(case, 1))
    return replace(one, gradient=gradient(shape, 50 + number, case).to(device))


def copied(one: StepTensors, offset: int) -> StepTensors:
    """The same in memory of its own, each tensor some elements after where an allocator would begin."""
    signed, root = (None if slot is None else Encoded(
        placed(slot.codes, offset), None if slot.scales is None else placed(slot.scales, offset))
        for slot in one.slots)
    assert signed is not None
    return replace(one, weight=placed(one.weight, offset), gradient=placed(one.gradient, offset),
                   slots=Slots(signed, root),
                   master=None if one.master is None else placed(one.master, offset))


def run(case: Case, device: str) -> list[str]:
    """What differs between kernel and reference after one step, in words."""
    from fp8scope_trainer.step_table import Kind, StepTable, kind_of

    rule, format, scalars_ = RULES[case.rule], StateFormat.of(case.format, case.block), by(case, 2)
    factor = None if case.factor is None else torch.tensor([case.factor], device=device)
    groups: dict[Kind, list[tuple[StepTensors, StepTensors, Tensor]]] = {}
    for number, shape in enumerate(case.shapes):
        wanted = begun(shape, number, case, device)
        ours = copied(wanted, case.offset)
        row, _ = update(wanted, rule, format, scalars_, factor)
        kind = kind_of(ours, rule, format, scalars_)
        assert kind is not None
        groups.setdefault(kind, []).append((ours, wanted, row))
    found = []
    for kind, members in groups.items():
        tensors = [ours for ours, _, _ in members]
        table = StepTable(tensors, kind)
        row = table.step(tensors, scalars_, factor)
        for ours, wanted, _ in members:
            found += [f"{kind}: {one}" for one in differences(ours, wanted)]
        found += rows_differ(row.tolist(), torch.stack([one for _, _, one in members]))
    return found


def stored(one: StepTensors) -> dict[str, Tensor | None]:
    """What a step writes."""
    signed, root = one.slots
    assert signed is not None
    return {"weight": one.weight, "master": one.master, "codes": signed.codes, "scales": signed.scales,
            "codes of the root": None if root is None else root.codes,
            "scales of the root": None if root is None else root.scales}


def differences(ours: StepTensors, wanted: StepTensors) -> list[str]:
    """Weights, codes and scales that are not the same."""
    found = []
    for (name, a), b in zip(stored(ours).items(), stored(wanted).values(), strict=True):
        if a is None or b is None:
            continue
        a, b = a.float(), b.float()
        other = ~((a == b) | (a.isnan() & b.isnan()))
        if other.any():
            at = int(other.flatten().nonzero()[0])
            found.append(f"{name} {list(a.shape)}: {int(other.sum())} differ, the first at {at}: "
                         f"{a.flatten()[at].item()} and {b.flatten()[at].item()}")
    return found


def rows_differ(ours: list[float], rows: Tensor) -> list[str]:
    """The five sums."""
    if rows.isnan().any():
        return [] if ours[0] != ours[0] else [f"the largest update is {ours[0]}, not NaN"]
    wanted = [float(rows[:, 0].amax()), *rows[:, 1:].double().sum(dim=0).tolist()]
    return [f"{name}: {a} and {b}" for name, a, b in zip(ROW, ours, wanted, strict=True)
            if abs(a - b) > 1e-5 * abs(b)]


def tell() -> dict[str, list[str]]:
    """Every case on the CPU; `interpreted` calls it in a process of its own."""
    return {name: run(case, "cpu") for name, case in CASES.items()}


@pytest.mark.parametrize("name", CASES)
def test_a_step_is_that_of_plain_torch(name: str, interpreted: dict[str, list[str]]) -> None:
    """Weights, codes and scales to the bit, at any size; totals to the rounding of sums."""
    assert interpreted[name] == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", CASES)
def test_the_same_on_a_gpu(name: str) -> None:
    """As compiled code."""
    assert run(CASES[name], "cuda") == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("format", "block"), [("fp8", 128), ("int8", 1024), ("int16", 1024), ("int4", 256)])
def test_sixteen_million_elements_on_a_gpu(format: str, block: int) -> None:
    """Roots and quotients without a branch are those of IEEE: codes and scales to the bit; of weights at most
    one in a million has another last bit. The same bits again from the same state."""
    from fp8scope_trainer.step_table import StepTable, kind_of

    case = Case("adamw", format, block, ())
    wanted, scalars_, found = begun((4096, 4096), 0, case, "cuda"), by(case, 2), []
    again = [copied(wanted, 0) for _ in range(2)]
    update(wanted, ADAMW, StateFormat.of(format, block), scalars_)
    for ours in again:
        kind = kind_of(ours, ADAMW, StateFormat.of(format, block), scalars_)
        assert kind is not None
        found.append(StepTable([ours], kind).step([ours], scalars_))
        assert [one for one in differences(ours, wanted) if not one.startswith("weight")] == []
        assert float((ours.weight != wanted.weight).double().mean()) < 1e-6
    assert torch.equal(*found)
    assert differences(*again) == []


@pytest.mark.parametrize(("format", "columns"), [
    ("fp8", 1024), ("int8", 2048), ("int8", 1040), ("int4", 1024), ("int16", 1024), ("bf16", 1000),
    ("fp32", 1000)])
def test_it_compiles_to_wide_accesses(format: str, columns: int) -> None:
    """No GPU is needed: ptxas comes with Triton. Weights travel 16 bytes at a time; codes lie in a warp as
    weights do: at most scales go through shared memory, never a tile."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from fp8scope_trainer import step_table
    from fp8scope_trainer.step_kernel import step_kernel

    case = Case("adamw", format, None, ())
    one = begun((4, columns), 0, case, "cpu")
    kind = step_table.kind_of(one, ADAMW, StateFormat.of(format), by(case, 2))
    assert kind is not None
    assert kind.aligned
    table = step_table.StepTable([one], kind)
    constants = table.constants(by(case, 2), scaled=True)
    constants["COMPILED"] = True
    kinds = {"table_ptr": "*i64", "gradient_ptr": "*i64", "part_ptr": "*i32", "coefficient_ptr": "*fp32",
             "out_ptr": "*fp32", "parts": "i32", "key": "i32"}
    names = step_kernel.arg_names
    assert list(constants) == names[-len(constants):]  # a launch hands them over in this order
    source = ASTSource(
        fn=step_kernel, signature={name: "constexpr" if name in constants else kinds.get(name, "fp32")
                                   for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()})
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=table.options)
    assert "ld.global.v4.b32" in compiled.asm["ptx"]
    assert "st.global.v4.b32" in compiled.asm["ptx"]
    assert compiled.metadata.shared <= 1024


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("states", ["fp32", "bf16", "int16", "fp8", "int8", "int4"])
def test_an_optimizer_on_a_gpu_is_the_one_on_a_cpu(states: str) -> None:
    """Ten steps of the same gradients over matrices, experts, a vector, bf16 with and without a master, a
    gradient that lies transposed and one that is missing at times: at most one weight or code in 100,000
    differs."""
    from fp8scope_trainer.adamw import AdamW

    generator = torch.Generator().manual_seed(5)
    shapes = ((256, 512), (96, 130), (4, 64, 256), (64,), (128, 256), (128, 256), (64, 128))
    starts = [torch.randn(shape, generator=generator) for shape in shapes]
    for i in (4, 5):
        starts[i] = starts[i].bfloat16()
    models = [[torch.nn.Parameter(x.to(device)) for x in starts] for device in ("cpu", "cuda")]
    optimizers = [AdamW([{"params": some[:4] + some[6:]}, {"params": some[4:5]},
                         {"params": some[5:6], "master": True}], states=states, warmup_steps=2)
                  for some in models]
    for step in range(10):
        gradients = [torch.randn(shape, generator=generator) for shape in shapes]
        for some, optimizer in zip(models, optimizers, strict=True):
            for i, (parameter, g) in enumerate(zip(some, gradients, strict=True)):
                g = g.to(parameter.device, parameter.dtype)
                parameter.grad = g.t().contiguous().t() if i == 6 else None if i == 1 and step % 3 == 1 else g
            optimizer.step()
    for a, b in zip(*models, strict=True):
        assert float((a != b.cpu()).double().mean()) < 1e-5
        ours, theirs = (optimizer.state[x] for optimizer, x in zip(optimizers, (a, b), strict=True))
        assert list(ours) == list(theirs)
        for key, value in ours.items():
            assert float((value.float() != theirs[key].float().cpu()).double().mean()) < 1e-5, key
    stats = [optimizer.step_stats for optimizer in optimizers]
    assert stats[0] is not None
    assert stats[1] is not None
    for name in ("update_max", "v_zero_share", "update_weight_ratio", "clipped_share"):
        ours, theirs = (float(getattr(one, name)) for one in stats)
        assert abs(ours - theirs) <= 1e-4 * abs(theirs), name
