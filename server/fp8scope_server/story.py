"""What happened in a demo: read back from the collector, judged, told as a table or as JSON."""

from dataclasses import asdict, dataclass
from statistics import fmean

import msgspec
from rich.table import Table

from fp8scope_protocol.commands import Command
from fp8scope_protocol.documents import EventDocument, RunDocument, StepsDocument, from_number
from fp8scope_server.reader import Reader

WINDOW = 5
"""Steps over which a loss is averaged."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Story:
    """The summary of a demo. Steps are optimizer steps; losses are means over five steps."""

    steps: int
    samples_stored: int
    batches_lost: int
    fault_step: int
    alert_step: int | None
    fallback_step_by_rank: list[int]
    return_step: int | None
    loss_before: float
    """Before the fault."""
    loss_after: float
    """At the end."""
    loss_after_without_rule: float
    """At the end of the same run with the rule off."""

    def shortfalls(self, *, ranks: int) -> list[str]:
        """What should have happened and did not; empty when the demo worked."""
        missing = []
        if self.batches_lost:
            missing.append(f"{self.batches_lost} batches were lost")
        if self.alert_step is None or self.alert_step < self.fault_step:
            missing.append(f"no alert after the fault at step {self.fault_step} (alert: {self.alert_step})")
        if len(self.fallback_step_by_rank) != ranks or len(set(self.fallback_step_by_rank)) != 1:
            missing.append(f"the {ranks} ranks did not switch at one step: {self.fallback_step_by_rank}")
        if self.return_step is None:
            missing.append("the layer did not return to FP8")
        elif self.fallback_step_by_rank and self.return_step <= self.fallback_step_by_rank[0]:
            missing.append(f"the return at step {self.return_step} is not after the fallback")
        return missing

    def as_json(self) -> str:
        """One line."""
        return msgspec.json.encode(asdict(self)).decode()

    def as_table(self) -> Table:
        """For people."""
        table = Table(title="what happened", show_header=False, title_justify="left")
        by_rank = ", ".join(f"rank {i}: step {step}" for i, step in enumerate(self.fallback_step_by_rank))
        rows = [
            ("steps trained", str(self.steps)),
            ("values stored", f"{self.samples_stored:,}"),
            ("batches lost", str(self.batches_lost)),
            ("amax history froze", f"step {self.fault_step}"),
            ("alert", "none" if self.alert_step is None else f"step {self.alert_step}"),
            ("to BF16", by_rank or "never"),
            ("back to FP8", "never" if self.return_step is None else f"step {self.return_step}"),
            ("loss before the fault", f"{self.loss_before:.4f}"),
            ("loss at the end", f"{self.loss_after:.4f}"),
            ("loss at the end without the rule", f"{self.loss_after_without_rule:.4f}"),
        ]
        for row in rows:
            table.add_row(*row)
        return table


def read_story(reader: Reader, *, run: str, control: str, fault_step: int) -> Story:
    """Put the story of `run` together from what the collector stored."""
    document = reader.get(f"/runs/{run}", RunDocument)
    commands = reader.get(f"/runs/{run}/commands", list[Command])
    events = reader.get(f"/runs/{run}/events?limit=1000", list[EventDocument])
    applied = [one for one in commands if one.state == "applied"]
    fallback = next((one for one in applied if one.action.precision != "fp8"), None)
    returned = next((one for one in applied if one.action.precision == "fp8"), None)
    steps, losses = _losses(reader, run)
    _, control_losses = _losses(reader, control)
    alerts = [event.step for event in events if event.kind == "alert"]
    return Story(
        steps=len(steps),
        samples_stored=document.samples,
        batches_lost=sum(document.lost.values()),
        fault_step=fault_step,
        alert_step=min(alerts, default=None),
        fallback_step_by_rank=list(fallback.steps_by_rank) if fallback else [],
        return_step=returned.applied_step if returned else None,
        loss_before=fmean(losses[max(0, fault_step - WINDOW):fault_step]),
        loss_after=fmean(losses[-WINDOW:]),
        loss_after_without_rule=fmean(control_losses[-WINDOW:]),
    )


def _losses(reader: Reader, run: str) -> tuple[list[int], list[float]]:
    document = reader.get(f"/runs/{run}/steps", StepsDocument)
    return document.steps, [from_number(value) for value in document.columns["loss"]]
