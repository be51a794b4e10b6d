"""Names, patterns and layouts."""

import pytest

from fp8scope_protocol.errors import Invalid
from fp8scope_protocol.series import (
    Layout,
    Series,
    canonical_name,
    decode_layout,
    encode_layout,
    matching_names,
)


@pytest.mark.parametrize(
    ("qualified", "name"),
    [
        ("layers.0.w1", "layers.0.w1"),
        ("_orig_mod.layers.0.w1", "layers.0.w1"),
        ("module._orig_mod.layers.0.w1", "layers.0.w1"),
        ("layers.0._checkpoint_wrapped_module._fsdp_wrapped_module.w1", "layers.0.w1"),
        ("layers.0._orig_mod", "layers.0"),
        ("", ""),
    ],
)
def test_p6_wrapper_prefixes_are_stripped(qualified: str, name: str) -> None:
    """One canonical name in all wrappings, so history and policies still match."""
    assert canonical_name(qualified) == name


def test_patterns_match_whole_parts() -> None:
    """`layers.1` is not `layers.10`; `*` is one part, `**` any number."""
    names = ["layers.1", "layers.10", "layers.1.w1", "head"]
    assert matching_names("layers.1", names) == ["layers.1"]
    assert matching_names("layers.*", names) == ["layers.1", "layers.10"]
    assert matching_names("layers.1.**", names) == ["layers.1", "layers.1.w1"]
    assert matching_names("**.w1", names) == ["layers.1.w1"]
    assert matching_names("layers", names) == []
    assert matching_names("**.**.1.**.**", names) == ["layers.1", "layers.1.w1"]
    assert matching_names("**", [*names, "layers"]) == [*names, "layers"]


def test_a_pattern_of_many_stars_is_matched_at_once() -> None:
    """40 times `**` against 128 parts: more ways than could be tried in a lifetime."""
    deep = ".".join(["a"] * 128)
    assert matching_names("**." * 40 + "b", [deep]) == []
    assert matching_names("**." * 40 + "a", [deep]) == [deep]


def test_layout_id_depends_on_order_and_content_only() -> None:
    """The same series in the same order have the same id in every process."""
    a = Series(name="a", role="activation", format="e4m3", scaling="tile 1x128")
    b = Series(name="b", role="weight", format="e4m3", scaling="block 128x128", depth=1)
    one = Layout(series=(a, b))
    assert one.id == Layout(series=(a, b)).id
    assert one.id != Layout(series=(b, a)).id
    assert decode_layout(encode_layout(one)) == one
    assert len(one.id) == 32


def test_a_series_is_listed_once() -> None:
    """Two columns with one key could not be told apart."""
    a = Series(name="a", role="activation", format="e4m3", scaling="tile 1x128")
    with pytest.raises(Invalid, match="listed once"):
        Layout(series=(a, a))


@pytest.mark.parametrize("name", ["", "x" * 257, "a\nb", "a\u202eb"])
def test_hostile_names(name: str) -> None:
    """Empty, endless and control characters stop at the door."""
    with pytest.raises(Invalid):
        Series(name=name, role="activation", format="e4m3", scaling="tile 1x128")


def test_unknown_format() -> None:
    """The near miss is named."""
    with pytest.raises(Invalid, match="e4m3"):
        Series(name="a", role="activation", format="e4m4", scaling="tile 1x128")
