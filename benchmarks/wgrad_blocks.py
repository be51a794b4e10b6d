"""What wgrad loses where it takes the activation in blocks: error of dY^T X against float64, on any machine.

    python benchmarks/wgrad_blocks.py [--quick] [--json]

X [tokens, K] is Gaussian with outliers of several kinds, dY [tokens, N] Gaussian in tiles along the tokens.
The error of the whole product is relative to its norm; that of the worst column, one input feature, to the
norm of the column: what an optimizer with a scale for each weight, as Adam, has to work with.
"""

import argparse
import json
import platform
import sys
from collections.abc import Callable

import torch
from torch import Tensor

from fp8scope.quantize import dequantize, quantize_tiles
from fp8scope_protocol.formats import E4M3
from fp8scope_trainer.recipe import Recipe, quantize_for_wgrad
from fp8scope_trainer.tensor import reference

SEEDS = 5


def scattered(x: Tensor) -> None:
    """Of every 1,000 values one, times 1,000."""
    x.view(-1)[::997] *= 1e3


def features(factor: float) -> Callable[[Tensor], None]:
    """Every 100th feature times `factor`, in all tokens."""
    def change(x: Tensor) -> None:
        x[:, ::100] *= factor

    return change


def token(x: Tensor) -> None:
    """The first token times 1,000."""
    x[0] *= 1e3


INPUTS: dict[str, Callable[[Tensor], None]] = {
    "Gaussian": lambda x: None, "features x 30": features(30.0), "features x 1,000": features(1e3),
    "features x 30,000": features(3e4), "one token x 1,000": token, "scattered x 1,000": scattered,
}


def errors(x: Tensor, dy: Tensor) -> dict[str, tuple[float, float]]:
    """Relative error of the whole and of the worst column, by how wgrad takes the activation."""
    exact = dy.double().t() @ x.double()
    tiles = dequantize(quantize_tiles(dy.t(), E4M3)).double()
    whole = reference(x, E4M3)
    taken = {name: dequantize(quantize_for_wgrad(x, Recipe(wgrad_activation=name))).t()
             for name in ("tile", "block")}
    taken["tensorwise"] = whole.codes.float() * whole.scale
    found = {}
    for name, one in taken.items():
        off = tiles @ one.double() - exact
        found[name] = (float(off.norm() / exact.norm()), float((off.norm(dim=0) / exact.norm(dim=0)).max()))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one seed instead of 5")
    parser.add_argument("--json", action="store_true", help="print the results as JSON in the last line")
    arguments = parser.parse_args()
    results: dict[str, dict[str, tuple[float, float]]] = {}
    for kind, change in INPUTS.items():
        rows = []
        for seed in range(1 if arguments.quick else SEEDS):
            generator = torch.Generator().manual_seed(seed)
            x, dy = (torch.randn(2048, width, generator=generator) for width in (1024, 256))
            change(x)
            rows.append(errors(x, dy))
        results[kind] = {name: (sum(row[name][0] for row in rows) / len(rows),
                                max(row[name][1] for row in rows)) for name in rows[0]}
        print(f"{kind:20}" + "   ".join(f"{name} {whole:.4f} (worst column {worst:.4f})"
                                        for name, (whole, worst) in results[kind].items()))
    if arguments.json:
        print(json.dumps({"benchmark": "wgrad_blocks", "machine": f"{platform.machine()}, torch "
                          f"{torch.__version__}", "results": results}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
