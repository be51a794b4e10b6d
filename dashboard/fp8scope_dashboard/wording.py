"""How numbers and states read on the page."""

from datetime import UTC, datetime

from fp8scope_protocol.documents import LayerDocument, Number, RunDocument

EVENT_GLYPHS = {"alert": "▲", "switch": "◆", "command": "●", "gap": "▮", "other": "○"}
_EVENT_KINDS = {
    "alert": ("alert", "stuck", "probe_error", "nonfinite"), "switch": ("switch",),
    "command": ("command", "decision"), "gap": ("gap", "lost"),
}

PRECISION_WORDS = {"fp8": "FP8", "bf16": "BF16", "shadow": "BF16, FP8 still measured",
                   "autocast": "FP8 or not, as its autocast says"}
CLOCK_AHEAD_S, CLOCK_BEHIND_S = 2.0, 60.0
"""Beyond these a clock is said to be off. Batches need time to come, so a little behind is nothing."""


def number(value: Number, digits: int = 4) -> str:
    """`value` for people: NaN and infinities spelled out, an en dash where nothing was measured."""
    if value is None:
        return "–"
    if isinstance(value, str):
        return {"Infinity": "+Inf", "-Infinity": "-Inf"}.get(value, value)
    if float(value).is_integer() and abs(value) < 10**digits:
        return f"{value:.0f}"
    return f"{value:.{digits}g}"


def count(value: int) -> str:
    """`value` with thin spaces between thousands."""
    return f"{value:,}".replace(",", " ")


def percent(share: float) -> str:
    """A share of the job's time."""
    return f"{100 * share:.2g} %"


def clock(ahead_s: float | None) -> tuple[str, bool]:
    """How a job's clock compares with the collector's, and whether that is odd."""
    if ahead_s is None:
        return "not known yet", False
    if ahead_s > CLOCK_AHEAD_S:
        return f"{ahead_s:.0f} s ahead of the collector's", True
    if ahead_s < -CLOCK_BEHIND_S:
        return f"{-ahead_s:.0f} s behind the collector's, or every batch came so late", True
    return "agrees with the collector's", False


def in_bf16(layer: LayerDocument) -> bool:
    """Whether the layer computes in BF16, its FP8 still measured or not."""
    return layer.running in ("bf16", "shadow")


def precision(running: str) -> str:
    return PRECISION_WORDS.get(running, running)


def ago(moment: str, now: datetime | None = None) -> str:
    """How long ago an ISO 8601 moment was, in the largest unit that fits."""
    try:
        then = datetime.fromisoformat(moment)
    except ValueError:
        return moment
    if then.tzinfo is None:
        then = then.replace(tzinfo=UTC)
    seconds = max(0, int(((now or datetime.now(UTC)) - then).total_seconds()))
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds // size} {unit} ago"
    return "just now"  # pages look again every half minute: seconds would be wrong


def event_look(kind: str) -> str:
    """Which of the looks in `EVENT_GLYPHS` an event has."""
    return next((look for look, kinds in _EVENT_KINDS.items() if kind in kinds), "other")


def health(run: RunDocument) -> tuple[str, str]:
    """(state, words) of a run: `bad`, `warn`, `good` or `idle`, the worst thing first."""
    if run.loss in ("NaN", "Infinity", "-Infinity"):
        return "bad", f"loss is {number(run.loss)}"
    if run.firing:
        return "bad", f"{run.firing} alert{'s' if run.firing > 1 else ''} firing"
    if sum(run.lost.values()):
        return "warn", "batches lost"
    if run.last_step is None:
        return "idle", "no data yet"
    return ("good", "no alerts") if run.active else ("idle", "not reporting")
