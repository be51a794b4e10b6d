"""How far a producer's clock is ahead of the collector's."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    op.add_column("producers", sa.Column("clock_ahead_s", sa.Double(), nullable=True))


def downgrade() -> None:
    op.drop_column("producers", "clock_ahead_s")
