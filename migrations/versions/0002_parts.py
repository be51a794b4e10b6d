"""Parts of batches that are too large for one request."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import BYTEA

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    op.create_table(
        "parts",
        sa.Column("attempt_id", sa.Text(), nullable=False),
        sa.Column("producer", sa.Text(), nullable=False),
        sa.Column("seq", sa.BigInteger(), nullable=False),
        sa.Column("index", sa.BigInteger(), nullable=False),
        sa.Column("count", sa.BigInteger(), nullable=False),
        sa.Column("body", BYTEA(), nullable=False),
        sa.PrimaryKeyConstraint("attempt_id", "producer", "seq", "index", name="pk_parts"),
        sa.ForeignKeyConstraint(["attempt_id"], ["attempts.id"], name="fk_parts_attempt_id_attempts",
                                ondelete="CASCADE"),
    )


def downgrade() -> None:
    op.drop_table("parts")
