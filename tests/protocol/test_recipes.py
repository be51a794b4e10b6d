"""How a person names what-ifs, and what they stand for."""

import pytest

from fp8scope_protocol.errors import Invalid
from fp8scope_protocol.formats import E4M3, FORMATS, INT8, check_pair, parse_scaling
from fp8scope_protocol.recipes import parse_recipe, parse_recipes, usual_scaling, what_ifs
from fp8scope_protocol.series import ROLES


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("format", FORMATS)
def test_usual_scalings_are_possible(format: str, role: str) -> None:
    """Every format has one for every role, and goes with it."""
    check_pair(FORMATS[format], parse_scaling(usual_scaling(FORMATS[format], role)))


@pytest.mark.parametrize(("name", "role", "scaling"), [
    ("e4m3", "activation", "tile 1x128"), ("e4m3", "weight", "block 128x128"),
    ("e5m2", "gradient", "tile 1x128"),
    ("e4m3", "exp_avg", "tile 1x128"), ("int8", "activation", "rowwise"), ("int8", "weight", "rowwise"),
    ("int8", "exp_avg_sq", "flat 256"), ("int4", "weight", "tile 1x128"),
    ("mxfp8", "gradient", "mx 1x32 rceil"),
    ("int8/tile 1x128", "weight", "tile 1x128"), ("mxfp8/mx 1x32 floor", "weight", "mx 1x32 floor"),
    ("e4m3/tensorwise", "momentum", "tensorwise"), ("int4/flat 64", "activation", "flat 64")])
def test_a_recipe_gives_each_role_its_scaling(name: str, role: str, scaling: str) -> None:
    """The usual one, or the one that was named, for all roles."""
    assert parse_recipe(name).scaling_of(role) == scaling


@pytest.mark.parametrize(("name", "says"), [
    ("fp8", "near misses"), ("int9", "near misses: int8"), ("int8/tile", "near misses: tile 1x128"),
    ("int8/", "scaling"), ("int8/mx 1x32 floor", "mxfp8"), ("mxfp8/rowwise", "mx 1x32"),
    ("int8/flat 7", "32 to 4096"),
    ("int8/rowwise/flat 256", "scaling"), ("", "format")])
def test_what_cannot_be_is_refused(name: str, says: str) -> None:
    """Before a model is touched, with what is near."""
    with pytest.raises(Invalid, match=says):
        parse_recipe(name)


def test_no_series_is_measured_twice() -> None:
    """Recipes that agree on a role share its series; those that do not each have their own."""
    recipes = parse_recipes(("e4m3", "e4m3/tile 1x128", "int8", "int8", "int8/tile 1x128"))
    assert what_ifs(recipes, "activation") == (
        (E4M3, "tile 1x128"), (INT8, "rowwise"), (INT8, "tile 1x128"))
    assert what_ifs(recipes, "weight") == (
        (E4M3, "block 128x128"), (E4M3, "tile 1x128"), (INT8, "rowwise"), (INT8, "tile 1x128"))
