"""`fp8scope estimate`: the memory of a job as a table."""

import json
import re
import sys
from dataclasses import asdict
from typing import Any

from fp8scope_protocol.command_line import Parser
from fp8scope_protocol.errors import Invalid, UnknownName
from fp8scope_trainer.estimate import (
    ACCOUNTINGS,
    CODE_BYTES,
    MOMENTS,
    PRECISIONS,
    Estimate,
    ModelSize,
    Plan,
    any_model,
    estimate,
)
from fp8scope_trainer.state_block import BLOCKS

UNITS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}


def main(argv: list[str] | None = None) -> int:
    """Entry of `fp8scope estimate`; returns the exit code."""
    given = _parser().parse_args(sys.argv[1:] if argv is None else argv)
    try:
        model, plan = _sized(given), _plan(given)
        found = estimate(model, plan)
    except Invalid as wrong:
        if wrong.field not in vars(given):
            raise
        raise Invalid(f"--{wrong.field.replace('_', '-')}", wrong.value, wrong.rule) from wrong
    print(json.dumps(document(found, plan)) if given.json else table(found, plan))
    return 0


def document(found: Estimate, plan: Plan) -> dict[str, Any]:
    """For `--json`; bytes are of one GPU."""
    return {
        "parameters": found.parameters, "plan": asdict(plan),
        "items": [asdict(item) | {"bytes_per_parameter": item.bytes_per_gpu / found.parameters}
                  for item in found.items],
        "bytes_per_gpu": found.bytes_per_gpu, "bytes_per_parameter": found.bytes_per_parameter,
    }


def table(found: Estimate, plan: Plan) -> str:
    """For people; GB is 10^9 bytes."""
    rows = [(item.name, f"{item.bytes_per_gpu / found.parameters:.3f}", f"{item.bytes_per_gpu / 1e9:,.3f}",
             item.lives, item.counted) for item in found.items]
    rows.append(("sum", f"{found.bytes_per_parameter:.3f}", f"{found.bytes_per_gpu / 1e9:,.3f}", "", ""))
    rows.insert(0, ("one GPU", "bytes/parameter", "GB", "lives", "counted"))
    widths = [max(len(row[i]) for row in rows) for i in range(5)]
    lines = [f"{found.parameters:,} parameters, {plan.ranks} GPUs, stage {plan.stage}, {plan.optimizer}, "
             f"accounting {plan.accounting}", ""]
    lines += ["  ".join((row[0].ljust(widths[0]), row[1].rjust(widths[1]), row[2].rjust(widths[2]),
                         row[3].ljust(widths[3]), row[4])).rstrip() for row in rows]
    return "\n".join(lines)


def _sized(given: Any) -> ModelSize:
    if (given.parameters is None) == (given.preset is None):
        raise Invalid("parameters", given.parameters, "must be given, or --preset, and not both")
    if given.preset is None:
        exempt = 0 if given.exempt is None else count_of("exempt", given.exempt)
        return any_model(count_of("parameters", given.parameters), exempt=exempt,
                         layers=1 if given.layers is None else given.layers)
    for option in ("exempt", "layers"):
        if getattr(given, option) is not None:
            raise Invalid(option, getattr(given, option), "goes with --parameters; a preset has its own")
    from fp8scope_trainer.decoder import SHAPES  # brings torch
    from fp8scope_trainer.decoder_size import size_of

    if given.preset not in SHAPES:
        raise UnknownName("--preset", given.preset, SHAPES)
    return size_of(SHAPES[given.preset]())


def _plan(given: Any) -> Plan:
    return Plan(
        optimizer=given.optimizer, states=given.states, block=given.block, stage=given.stage,
        ranks=given.ranks, shard_ranks=given.shard_ranks, tensor_parallel=given.tensor_parallel,
        precision=given.precision, fp8_gather=given.fp8_gather, accumulate=given.accumulate,
        tokens=given.tokens, accounting=given.accounting,
    )


def count_of(field: str, text: str) -> int:
    """7B, 350M, 1.3e9 or 12345: a number of parameters."""
    found = re.fullmatch(r"([0-9]{1,20}(?:\.[0-9]{1,12})?(?:e[0-9]{1,2})?)([kmbt]?)", text.lower())
    if found is None or not (value := float(found[1]) * UNITS[found[2]]) < 1e18:
        raise Invalid(field, text, "must be a number such as 7B, 350M, 1.3e9 or 12345")
    return round(value)


def _parser() -> Parser:
    parser = Parser(prog="fp8scope estimate", description="Tell what of a GPU's memory a training job fills.")
    add = parser.add_argument
    add("--parameters", help="of the model: 7B, 350M, 1.3e9")
    add("--exempt", help="of these, how many keep fp32 states: embedding, head, vectors (0)")
    add("--layers", type=int, help="of the model, gathered one at a time in stage 3 (1)")
    add("--preset", help="a model of fp8scope train instead, with its exact shapes and activations")
    add("--optimizer", default="adamw", help=f"{', '.join(MOMENTS)} (adamw)")
    add("--states", default="fp32", help=f"format of its states: {', '.join(CODE_BYTES)} (fp32)")
    add("--block", type=int, help="elements that share a scale "
        f"({', '.join(f'{name} {size}' for name, (_, _, size) in BLOCKS.items())})")
    add("--stage", default="2", help="of ZeRO, by number or by FSDP's name: 0, 1, 2, 3, HYBRID_SHARD (2)")
    add("--ranks", type=int, default=1, help="GPUs in all (1)")
    add("--shard-ranks", type=int, help="hybrid: GPUs that share one shard")
    add("--tensor-parallel", type=int, default=1, help="GPUs that share each linear (1)")
    add("--precision", default="bf16", help=f"of the linears: {', '.join(PRECISIONS)} (bf16)")
    add("--fp8-gather", action="store_true", help="gather linears' weights as FP8 codes")
    add("--accumulate", type=int, default=1, help="micro-batches a step (1)")
    add("--tokens", type=int, default=0, help="per GPU and micro-batch: count activations, too (0)")
    add("--accounting", default="fsdp2", help=f"{' or '.join(ACCOUNTINGS)}: what is counted (fsdp2)")
    add("--json", action="store_true", help="one line of JSON")
    return parser
