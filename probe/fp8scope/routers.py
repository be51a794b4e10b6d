"""`router_entropy` and `router_logit_max`: how sure a mixture of experts' routers are, in measured steps.

Entropy of the softmax over experts, mean over the tokens of a forward, as a share of log(experts): 1 where
every expert is as likely, 0 where each token knows its one. The sentinel is that of the lowest router. With
it the largest |logit| of any router. Entropy that falls while logits rise is how a collapse of routing
begins.

Where logits are found: in the output of a linear layer called gate, router, classifier or wg that is as
wide as its parent has experts (`num_experts`, `n_routed_experts` or `num_local_experts`, there or in its
configuration); or of a module called gate or router with a weight [experts, K] of its own, as transformers'
have, in the first output as wide as it has experts. It is the softmax of the logits, whatever the router
makes of them.

Some ten small launches for each router and forward, which is why it is taken at the cadence.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.hooks import RemovableHandle

from fp8scope.inert import Inert
from fp8scope.layers import expert_count, weight_of
from fp8scope.nested import tensors_in
from fp8scope.sharding import local
from fp8scope.watch import Watch
from fp8scope_protocol.series import canonical_name

LINEARS = ("gate", "router", "classifier", "wg")
MODULES = ("gate", "router")

Report = Callable[[str, Tensor], None]


def install_routers(
    model: nn.Module, watch: Watch, report: Report, rename: Callable[[str], str] = str
) -> list[RemovableHandle]:
    """Hooks on every router that is found; `report` gets two maxima of each forward, by column."""
    return [router.register_forward_hook(RouterHook(rename(name), experts, watch, report))
            for name, router, experts in find_routers(model)]


def find_routers(model: nn.Module) -> Iterator[tuple[str, nn.Module, int]]:
    """Name, module and number of experts of every router."""
    for path, parent in model.named_modules():
        for name, child in parent.named_children():
            own = expert_count(child)
            weight = weight_of(child)
            if weight is None or is_lazy(weight) or weight.dim() != 2:
                continue
            if isinstance(child, nn.Linear):
                found, experts = name in LINEARS, expert_count(parent) or own
            else:
                found, experts = name in MODULES, own
            if found and experts > 1 and weight.shape[0] == experts:
                yield canonical_name(f"{path}.{name}".lstrip(".")), child, experts


class RouterHook(Inert):
    """Reads the logits of a measured forward."""

    def __init__(self, name: str, experts: int, watch: Watch, report: Report) -> None:
        self.name = name
        self.experts = experts
        self.watch = watch
        self.report = report

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        watch = self.watch
        if torch.compiler.is_compiling() or not watch.sampling or watch.capturing():
            return
        if not watch.counts(module):
            return
        with watch.guarded(self.name):
            wide = (x for x in tensors_in(output)
                    if x.is_floating_point() and x.dim() > 0 and x.shape[-1] == self.experts)
            logits = next(wide, None)
            if logits is None:
                watch.unobserved(self.name, f"router_entropy: no output of {self.experts} logits")
            elif (logits := local(logits)).numel():
                self.report("neg_router_entropy", -entropy_share(logits))
                allowed = logits.masked_fill(logits == -math.inf, 0.0)  # a masked expert is no large logit
                self.report("router_logit_max", allowed.abs().amax().double())


def entropy_share(logits: Tensor) -> Tensor:
    """Entropy of the softmax of logits [..., E], mean over the others, as a share of log(E); float64 []."""
    entropy = torch.special.entr(torch.softmax(logits.float(), dim=-1)).sum(-1)
    mean: Tensor = entropy.mean(dtype=torch.float64)
    return mean / math.log(logits.shape[-1])
