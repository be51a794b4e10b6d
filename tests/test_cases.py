"""Faults that users of neighbouring projects have reported: each has a test that carries its id."""

import ast
import re
from pathlib import Path

import pytest

PROBE = ("p2", "p4", "p6", "p8", "p9", "p10", "p11", "p12")
QUANTIZATION = ("q2", "q4", "q6", "q8", "q9", "q10", "q11", "q12", "q13")
RANKS = ("z2", "z3", "z5", "z6")
COMPILED = ("f6",)
TRAINER = ("f2", "o3", "o4", "o5")


def by_id() -> dict[str, list[str]]:
    """Test functions by the ids in their names, `test_p2_...` or `test_f3_z3_...`."""
    found: dict[str, list[str]] = {}
    for path in Path(__file__).parent.rglob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and (ids := re.match(r"test_((?:[a-z]\d+_)+)", node.name)):
                for one in ids[1].rstrip("_").split("_"):
                    found.setdefault(one, []).append(node.name)
    return found


@pytest.mark.parametrize("one", [*PROBE, *QUANTIZATION, *RANKS, *COMPILED, *TRAINER])
def test_every_reported_fault_has_a_test(one: str) -> None:
    """By its name, so that `pytest -k p4` runs the case."""
    assert by_id().get(one)
