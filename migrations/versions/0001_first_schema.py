"""First schema: runs, attempts, frames, steps, events, rules, commands, precision."""

from typing import Any

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import BYTEA, JSONB
from sqlalchemy.types import TypeEngine

revision = "0001"
down_revision = None


def upgrade() -> None:
    _create_runs()
    _create_measurements()
    _create_policies()


def downgrade() -> None:
    for table in ("precision", "commands", "rules", "events", "steps", "frames", "batches", "layouts",
                  "producers", "attempts", "runs"):
        op.drop_table(table)


def _create_runs() -> None:
    op.create_table(
        "runs",
        _text("id"), _text("name"), _now("created_at"), _now("last_seen_at"),
        _column("remote_control", sa.Boolean()), _int("every"), _json("facts"),
        _key("runs", "id"),
    )
    op.create_index("ix_runs_name_created_at", "runs", ["name", "created_at"])
    op.create_table(
        "attempts",
        _text("id"), _text("run_id"), _int("number"), _now("started_at"), _json("hello"),
        _key("attempts", "id"), _of_run("attempts"),
    )
    op.create_index("ix_attempts_run_id_number", "attempts", ["run_id", "number"], unique=True)
    op.create_table(
        "producers",
        _text("attempt_id"), _text("producer"), _text("run_id"),
        _int("last_seq", server_default="-1"), _int("last_step", server_default="-1"), _json("lost"),
        _key("producers", "attempt_id", "producer"), _of_attempt("producers"), _of_run("producers"),
    )
    op.create_index("ix_producers_run_id", "producers", ["run_id"])
    op.create_table(
        "layouts",
        _text("run_id"), _text("id"), _int("size"), _column("body", BYTEA()), _now("created_at"),
        _key("layouts", "run_id", "id"), _of_run("layouts"),
    )


def _create_measurements() -> None:
    op.create_table(
        "batches",
        _text("attempt_id"), _text("producer"), _int("seq"), _text("run_id"), _int("step"),
        _now("received_at"), _int("frames"), _int("samples"),
        _key("batches", "attempt_id", "producer", "seq"), _of_attempt("batches"), _of_run("batches"),
    )
    op.create_index("ix_batches_run_id", "batches", ["run_id"])
    op.create_table(
        "frames",
        _text("run_id"), _text("metric"), _int("step"), _text("attempt_id"), _text("producer"), _int("seq"),
        _text("layout_id"), _text("type"), _int("rows"), _column("values", BYTEA()),
        _key("frames", "run_id", "metric", "step", "attempt_id", "producer", "seq"),
    )
    # Matrices of floats hardly compress: spare the attempt, and let substring() read one column.
    op.execute('ALTER TABLE frames ALTER COLUMN "values" SET STORAGE EXTERNAL')
    op.create_index("ix_frames_run_id_step", "frames", ["run_id", "step"])
    op.create_table(
        "steps",
        _text("run_id"), _int("step"), _text("attempt_id"), _text("producer"),
        _column("skipped", sa.Boolean()), _json("sentinels"),
        _key("steps", "run_id", "step", "attempt_id", "producer"), _of_run("steps"), _of_attempt("steps"),
    )
    op.create_table(
        "events",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        _text("run_id"), _text("attempt_id"), _int("step"), _now("at"),
        _text("kind"), _text("name"), _text("text"),
        _key("events", "id"), _of_run("events"), _of_attempt("events"),
    )
    op.create_index("ix_events_run_id_id", "events", ["run_id", "id"])


def _create_policies() -> None:
    op.create_table(
        "rules",
        _text("run_id"), _text("name"), _json("body"), _json("state"),
        _key("rules", "run_id", "name"), _of_run("rules"),
    )
    op.create_table(
        "commands",
        _text("run_id"), _int("id"), _text("attempt_id"), _json("action"), _text("issued_by"),
        _text("reason"), _text("state"), _int("issued_step"), _now("issued_at"),
        _int("expires_step", nullable=True), _int("applied_step", nullable=True),
        _json("steps_by_rank"), _text("answer"), _json("reports"),
        _key("commands", "run_id", "id"), _of_run("commands"), _of_attempt("commands"),
    )
    op.create_index("ix_commands_attempt_id_state", "commands", ["attempt_id", "state"])
    op.create_table(
        "precision",
        _text("run_id"), _text("module"), _text("producer"), _text("running"),
        _column("requested", sa.Text(), nullable=True), _int("since_step", nullable=True),
        _column("switchable", sa.Boolean()), _text("reason"),
        _key("precision", "run_id", "module"), _of_run("precision"),
    )


def _column(
    name: str, kind: TypeEngine[Any], *, nullable: bool = False, server_default: str | None = None
) -> sa.Column[Any]:
    return sa.Column(name, kind, nullable=nullable, server_default=server_default)


def _text(name: str) -> sa.Column[Any]:
    return _column(name, sa.Text())


def _int(name: str, *, nullable: bool = False, server_default: str | None = None) -> sa.Column[Any]:
    return _column(name, sa.BigInteger(), nullable=nullable, server_default=server_default)


def _json(name: str) -> sa.Column[Any]:
    return _column(name, JSONB())


def _now(name: str) -> sa.Column[Any]:
    return sa.Column(name, sa.DateTime(timezone=True), nullable=False, server_default=sa.func.now())


def _key(table: str, *columns: str) -> sa.PrimaryKeyConstraint:
    return sa.PrimaryKeyConstraint(*columns, name=f"pk_{table}")


def _of_run(table: str) -> sa.ForeignKeyConstraint:
    return sa.ForeignKeyConstraint(
        ["run_id"], ["runs.id"], name=f"fk_{table}_run_id_runs", ondelete="CASCADE")


def _of_attempt(table: str) -> sa.ForeignKeyConstraint:
    return sa.ForeignKeyConstraint(
        ["attempt_id"], ["attempts.id"], name=f"fk_{table}_attempt_id_attempts", ondelete="CASCADE")
