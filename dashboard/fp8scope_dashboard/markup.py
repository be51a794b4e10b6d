"""Attributes that Dash's typed constructors do not know by name."""

from typing import Any


def aria(**words: str) -> dict[str, Any]:
    """`aria(label="Layers")` is {"aria-label": "Layers"}."""
    return {f"aria-{name}": value for name, value in words.items()}


def data(**values: str) -> dict[str, Any]:
    """`data(layer="a.b")` is {"data-layer": "a.b"}."""
    return {f"data-{name}": value for name, value in values.items()}
