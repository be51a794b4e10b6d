"""The collector's tables.

Everything belongs to a run, and every query names its run. Text ids come from outside (attempts are UUIDs
drawn by the probe, layouts are content hashes); what the collector numbers itself are attempts within a
run, commands within a run, and events.

Frames have no foreign key: their ledger row in `batches`, written in the same transaction, has one.
"""

from datetime import datetime
from typing import Any

from sqlalchemy import BigInteger, DateTime, ForeignKey, Identity, Index, MetaData, Text, func
from sqlalchemy.dialects.postgresql import BYTEA, JSONB
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

Json = dict[str, Any]


class Base(DeclarativeBase):
    """Names every constraint, so that migrations can address it."""

    metadata = MetaData(naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s_%(referred_table_name)s",
        "pk": "pk_%(table_name)s",
    })
    type_annotation_map = {  # noqa: RUF012
        str: Text(),
        int: BigInteger(),
        bytes: BYTEA(),
        datetime: DateTime(timezone=True),
        Json: JSONB(),
        list[int]: JSONB(),
    }


def _run() -> ForeignKey:
    return ForeignKey("runs.id", ondelete="CASCADE")


def _attempt() -> ForeignKey:
    return ForeignKey("attempts.id", ondelete="CASCADE")


class Run(Base):
    """One training run. `id` is its name, or name-2, name-3 ... where the name was taken."""

    __tablename__ = "runs"
    __table_args__ = (Index(None, "name", "created_at"),)

    id: Mapped[str] = mapped_column(primary_key=True)
    name: Mapped[str]
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    last_seen_at: Mapped[datetime] = mapped_column(server_default=func.now())
    remote_control: Mapped[bool]
    every: Mapped[int]
    """Steps between two full measurements, as the newest attempt said."""
    facts: Mapped[Json]


class Attempt(Base):
    """One life of a run; `number` counts from 1 by first arrival. The highest number wins in the view."""

    __tablename__ = "attempts"
    __table_args__ = (Index(None, "run_id", "number", unique=True),)

    id: Mapped[str] = mapped_column(primary_key=True)
    run_id: Mapped[str] = mapped_column(_run())
    number: Mapped[int]
    started_at: Mapped[datetime] = mapped_column(server_default=func.now())
    hello: Mapped[Json]
    """The first producer's `wire.Hello`."""


class Producer(Base):
    """One pipeline stage x expert group of an attempt."""

    __tablename__ = "producers"
    __table_args__ = (Index(None, "run_id"),)

    attempt_id: Mapped[str] = mapped_column(_attempt(), primary_key=True)
    producer: Mapped[str] = mapped_column(primary_key=True)
    run_id: Mapped[str] = mapped_column(_run())
    last_seq: Mapped[int] = mapped_column(server_default="-1")
    last_step: Mapped[int] = mapped_column(server_default="-1")
    """Newest step stored; -1 before the first."""
    lost: Mapped[Json]
    """Batches lost so far in this attempt, by reason, as the probe counts them."""
    clock_ahead_s: Mapped[float | None]
    """Largest of (made - stored) over the batches, each by its own clock: of the batch that was fastest."""


class LayoutRow(Base):
    """An ordered list of series: `series.decode_layout(body)`; `size` is the number of series."""

    __tablename__ = "layouts"

    run_id: Mapped[str] = mapped_column(_run(), primary_key=True)
    id: Mapped[str] = mapped_column(primary_key=True)
    size: Mapped[int]
    body: Mapped[bytes]
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())


class BatchRow(Base):
    """The ledger: a batch is stored when its row is here, and only then."""

    __tablename__ = "batches"
    __table_args__ = (Index(None, "run_id"),)

    attempt_id: Mapped[str] = mapped_column(_attempt(), primary_key=True)
    producer: Mapped[str] = mapped_column(primary_key=True)
    seq: Mapped[int] = mapped_column(primary_key=True)
    run_id: Mapped[str] = mapped_column(_run())
    step: Mapped[int]
    received_at: Mapped[datetime] = mapped_column(server_default=func.now())
    frames: Mapped[int]
    samples: Mapped[int]
    """Values in the frames: rows x columns, summed over planes."""


class Part(Base):
    """A stretch of the bytes of a batch that is too large for one request and not complete yet."""

    __tablename__ = "parts"

    attempt_id: Mapped[str] = mapped_column(_attempt(), primary_key=True)
    producer: Mapped[str] = mapped_column(primary_key=True)
    seq: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    index: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    count: Mapped[int]
    """Into how many parts the batch was divided."""
    body: Mapped[bytes]


class Frame(Base):
    """One metric of one batch: `values` holds rows x layout.size little-endian numbers of `type`.

    `type` is "f4" (float32; the bits wire.MISSING_BITS mean not measured) or "u8" (uint64), `metric` a key
    of metrics.METRICS or "exponent_histogram". Where an attempt repeats a step (a rolled back job), the
    highest `seq` is the newest. The key serves one metric over steps, the index one step's metrics.
    """

    __tablename__ = "frames"
    __table_args__ = (Index(None, "run_id", "step"),)

    run_id: Mapped[str] = mapped_column(primary_key=True)
    metric: Mapped[str] = mapped_column(primary_key=True)
    step: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    attempt_id: Mapped[str] = mapped_column(primary_key=True)
    producer: Mapped[str] = mapped_column(primary_key=True)
    seq: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    layout_id: Mapped[str]
    type: Mapped[str]
    rows: Mapped[int]
    values: Mapped[bytes]


class Step(Base):
    """What every step has, sampled or not. Sentinels are `documents.Number`s: JSON has no NaN."""

    __tablename__ = "steps"

    run_id: Mapped[str] = mapped_column(_run(), primary_key=True)
    step: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    attempt_id: Mapped[str] = mapped_column(_attempt(), primary_key=True)
    producer: Mapped[str] = mapped_column(primary_key=True)
    skipped: Mapped[bool]
    sentinels: Mapped[Json]


class Event(Base):
    """Something that happened, in the order the collector learned of it.

    `kind`: alert, decision, stuck (rules); command, switch (commands); gap, lost (batches that did not
    arrive); attempt (a new life of the run); and whatever kinds the probe sends.
    """

    __tablename__ = "events"
    __table_args__ = (Index(None, "run_id", "id"),)

    id: Mapped[int] = mapped_column(Identity(always=True), primary_key=True)
    run_id: Mapped[str] = mapped_column(_run())
    attempt_id: Mapped[str] = mapped_column(_attempt())
    step: Mapped[int]
    at: Mapped[datetime] = mapped_column(server_default=func.now())
    kind: Mapped[str]
    name: Mapped[str]
    text: Mapped[str]


class RuleRow(Base):
    """A run's rule: `body` is a `rules.Rule`, `state` maps each producer to its `rules.RuleState`."""

    __tablename__ = "rules"

    run_id: Mapped[str] = mapped_column(_run(), primary_key=True)
    name: Mapped[str] = mapped_column(primary_key=True)
    body: Mapped[Json]
    state: Mapped[Json]


class CommandRow(Base):
    """A `commands.Command` for one attempt, and what each producer reported about it."""

    __tablename__ = "commands"
    __table_args__ = (Index(None, "attempt_id", "state"),)

    run_id: Mapped[str] = mapped_column(_run(), primary_key=True)
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    attempt_id: Mapped[str] = mapped_column(_attempt())
    action: Mapped[Json]
    issued_by: Mapped[str]
    reason: Mapped[str]
    state: Mapped[str]
    issued_step: Mapped[int]
    issued_at: Mapped[datetime] = mapped_column(server_default=func.now())
    expires_step: Mapped[int | None]
    applied_step: Mapped[int | None]
    steps_by_rank: Mapped[list[int]]
    answer: Mapped[str]
    reports: Mapped[Json]
    """Producer -> its `commands.CommandReport`."""


class PrecisionRow(Base):
    """What a layer of the newest attempt runs in now, as its producer measured it."""

    __tablename__ = "precision"

    run_id: Mapped[str] = mapped_column(_run(), primary_key=True)
    module: Mapped[str] = mapped_column(primary_key=True)
    producer: Mapped[str]
    running: Mapped[str]
    requested: Mapped[str | None]
    """The newest command's wish; None before the first."""
    since_step: Mapped[int | None]
    switchable: Mapped[bool]
    reason: Mapped[str]
