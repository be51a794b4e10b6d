"""The reference decoder and its text."""

from typing import Any

import pytest
import torch
from torch import nn

from fp8scope_protocol.errors import Invalid
from fp8scope_trainer.data import batch_at, standard_library
from fp8scope_trainer.decoder import Decoder, DecoderConfig, demo, hundred_million, rotate, turns


def tiny(**changes: Any) -> DecoderConfig:
    shape = {"width": 32, "layers": 1, "heads": 4, "kv_heads": 2, "head_width": 8, "hidden": 48}
    return DecoderConfig(**{**shape, "context": 12, **changes})


@pytest.mark.parametrize(("preset", "millions"), [(demo(), (1, 2)), (hundred_million(), (95, 105))])
def test_presets_have_their_size_and_fit_fp8(preset: DecoderConfig, millions: tuple[int, int]) -> None:
    """The demo has 1 to 2 M parameters, the other about 100 M; all widths of linears are multiples of 128."""
    with torch.device("meta"):
        model = Decoder(preset)
    assert millions[0] <= sum(p.numel() for p in model.parameters()) / 1e6 <= millions[1]
    sizes = [s for n, p in model.named_parameters() if p.dim() == 2 and "layers" in n for s in p.shape]
    assert all(size % 128 == 0 for size in sizes)


def test_shapes_and_causality() -> None:
    """[B, T] gives [B, T, vocabulary], and a token changes nothing before its place."""
    torch.manual_seed(0)
    model = Decoder(tiny())
    tokens = torch.randint(0, 256, (2, 12))
    logits = model(tokens)
    assert logits.shape == (2, 12, 256)
    changed = tokens.clone()
    changed[:, 8] = (changed[:, 8] + 1) % 256
    after = model(changed)
    torch.testing.assert_close(after[:, :8], logits[:, :8])
    assert not torch.allclose(after[:, 8:], logits[:, 8:])


def test_rotation_makes_products_relative() -> None:
    """q . k depends on the distance of two places only, and a rotation keeps lengths."""
    torch.manual_seed(0)
    q, k = (torch.randn(1, 1, 1, 8).expand(1, 1, 12, 8) for _ in range(2))
    cos, sin = turns(12, tiny(head_width=8), q.device)
    q, k = rotate(q, cos, sin)[0, 0], rotate(k, cos, sin)[0, 0]
    torch.testing.assert_close(q[3] @ k[1], q[11] @ k[9])
    assert not torch.isclose(q[3] @ k[1], q[3] @ k[2])
    torch.testing.assert_close(q.norm(dim=1), q[0].norm().expand(12))


def test_qk_norm_bounds_the_logits() -> None:
    """Scaling the attention's input by 1,000 leaves queries and keys, and so the attention, as they were."""
    torch.manual_seed(0)
    attention = Decoder(tiny()).get_submodule("layers.0.attention")
    x = torch.randn(1, 12, 32)
    cos, sin = turns(12, tiny(), x.device)
    torch.testing.assert_close(attention(1000 * x, cos, sin), 1000 * attention(x, cos, sin), rtol=1e-3,
                               atol=1e-3)


def test_settings_are_checked() -> None:
    """Heads that cannot be grouped, odd heads, too long a text: refused with the rule."""
    with pytest.raises(Invalid, match="must divide heads = 4"):
        tiny(kv_heads=3)
    with pytest.raises(Invalid, match="must be even"):
        tiny(head_width=7)
    with pytest.raises(Invalid, match="must be at least 1"):
        tiny(layers=0)
    with pytest.raises(Invalid, match="must be at most 12"):
        Decoder(tiny())(torch.zeros(1, 13, dtype=torch.long))


def test_qk_norm_is_on_unless_it_is_turned_off() -> None:
    """On, queries and keys have norms of their own; off, no parameter is left of them, and it computes."""
    tokens = torch.zeros(1, 12, dtype=torch.long)
    with_norm, without = Decoder(tiny()), Decoder(tiny(qk_norm=False))
    assert {"layers.0.attention.q_norm.weight", "layers.0.attention.k_norm.weight"} == {
        name for name, _ in with_norm.named_parameters()} - {name for name, _ in without.named_parameters()}
    assert isinstance(without.get_submodule("layers.0.attention.q_norm"), nn.Identity)
    assert without(tokens).isfinite().all()


def test_text_is_the_same_every_time_and_split_by_file() -> None:
    """Two readings agree byte for byte; held-out text is Python source that the training text lacks."""
    first, second = standard_library(limit=500_000), standard_library(limit=500_000)
    assert torch.equal(first.train, second.train)
    assert torch.equal(first.held_out, second.held_out)
    assert first.train.numel() == 500_000
    held_out, train = bytes(first.held_out.tolist()), bytes(first.train.tolist())
    assert b"import" in held_out
    assert held_out[:2000] not in train


def test_samples_depend_on_their_number_alone() -> None:
    """Two ranks with two samples each read what one rank with four does, at any step; a seed moves it."""
    text = (torch.arange(50_000) * 2654435761 % 251).to(torch.uint8)
    for step in (0, 3, 1000):
        whole, targets = batch_at(text, step=step, batch=4, length=16)
        parts = [batch_at(text, step=step, batch=2, length=16, rank=r, ranks=2)[0] for r in range(2)]
        assert torch.equal(whole, torch.cat(parts))
        assert torch.equal(whole[:, 1:], targets[:, :-1])
    assert not torch.equal(whole, batch_at(text, step=1000, batch=4, length=16, seed=1)[0])


def test_an_epoch_reads_every_window_once() -> None:
    """No window is read twice before all are read."""
    text = (torch.arange(16 * 60 + 1) // 16).to(torch.uint8)  # window w holds the byte w
    seen = [int(batch_at(text, step=s, batch=1, length=16)[0][0, 0]) for s in range(60)]
    assert sorted(seen) == list(range(60))
    with pytest.raises(Invalid, match="must be below"):
        batch_at(text[:10], step=0, batch=1, length=16)
