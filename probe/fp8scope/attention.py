"""`attn_logit_bound`: how large an attention logit may be, max ||q|| max ||k|| / sqrt(d), in measured steps.

q and k are the vectors of one head, d elements long, and the maxima run over a whole forward: by Cauchy and
Schwarz no logit of that layer is larger. Logits that grow without bound were seen 17 to 27 steps before runs
blew up. The sentinel is the worst layer's.

Where q and k are found: in modules with the children `q_norm` and `k_norm` (QKNorm), else with `q_proj` and
`k_proj`, by their outputs, which is Hugging Face's naming and our decoder's. Rotary positions come later
and change no length. d is the module's `head_dim`, or its configuration's `head_dim` or `head_width`.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from fp8scope.inert import Inert
from fp8scope.watch import Watch
from fp8scope_protocol.series import canonical_name

PAIRS = (("q_norm", "k_norm"), ("q_proj", "k_proj"))

Report = Callable[[Tensor], None]


def install_attention(
    model: nn.Module, watch: Watch, report: Report, rename: Callable[[str], str] = str
) -> list[RemovableHandle]:
    """Hooks on queries and keys of every attention that is found; `report` gets the bound of each forward."""
    handles: list[RemovableHandle] = []
    for path, module in model.named_modules():
        name, pair = rename(canonical_name(path)), _pair(module)
        if pair is None:
            continue
        width = _head_width(module)
        if width is None:
            watch.unobserved(name, "attn_logit_bound: the size of a head is not known (head_dim)")
            continue
        probe = AttentionProbe(name, width, watch, report)
        handles += [child.register_forward_hook(SizeHook(probe, which)) for which, child in enumerate(pair)]
    return handles


class AttentionProbe:
    """One attention: the largest query and key of the forward under way."""

    def __init__(self, name: str, width: int, watch: Watch, report: Report) -> None:
        self.name = name
        self.width = width
        self.watch = watch
        self.report = report
        self.sizes: list[Tensor | None] = [None, None]

    def add(self, which: int, x: Tensor) -> None:
        """x [..., heads x d]: queries (0) or keys (1)."""
        if not x.numel():
            return
        heads = x.reshape(*x.shape[:-1], -1, self.width)
        self.sizes[which] = torch.linalg.vector_norm(heads, dim=-1, dtype=torch.float32).amax()
        q, k = self.sizes
        if q is not None and k is not None:
            self.report(q.double() * k / self.width**0.5)
            self.sizes = [None, None]


class SizeHook(Inert):
    """Reads the queries or the keys of a measured forward."""

    def __init__(self, probe: AttentionProbe, which: int) -> None:
        self.probe = probe
        self.which = which

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        watch = self.probe.watch
        if torch.compiler.is_compiling() or not watch.sampling or not isinstance(output, Tensor):
            return
        if watch.capturing():  # what has no flag would run in every step
            return
        if watch.counts(module):
            with watch.guarded(self.probe.name):
                self.probe.add(self.which, output.detach())


def _pair(module: nn.Module) -> tuple[nn.Module, nn.Module] | None:
    for names in PAIRS:
        q, k = (getattr(module, name, None) for name in names)
        if isinstance(q, nn.Module) and isinstance(k, nn.Module):
            return q, k
    return None


def _head_width(module: nn.Module) -> int | None:
    config = getattr(module, "config", None)
    found = (getattr(module, "head_dim", None), getattr(config, "head_dim", None),
             getattr(config, "head_width", None))
    return next((width for width in found if isinstance(width, int) and width > 0), None)
