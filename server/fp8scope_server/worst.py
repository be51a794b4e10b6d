"""The worst series in the newest samples."""

import numpy as np
from sqlalchemy.ext.asyncio import AsyncSession

from fp8scope_protocol.documents import WorstDocument, to_number
from fp8scope_protocol.metrics import Metric
from fp8scope_server.catalogue import Selection, read_catalogue
from fp8scope_server.frames import read_newest
from fp8scope_server.scale import excess


async def read_worst(
    session: AsyncSession, run: str, metric: Metric, selection: Selection, count: int
) -> list[WorstDocument]:
    """The `count` worst of the selected series, worst first: NaN, then by excess over the floor."""
    catalogue = await read_catalogue(session, run)
    newest = await read_newest(session, run, metric.key, catalogue=catalogue)
    chosen = [index for index in catalogue.select(selection) if index in newest]
    values = np.array([[newest[index][1] for index in chosen]], dtype=np.float64)
    badness = excess(metric, values, [catalogue.series[index] for index in chosen])[0]
    order = np.lexsort((chosen, -badness, ~np.isnan(badness)))
    ranks = await read_newest(session, run, "worst_rank", catalogue=catalogue)
    documents = []
    for index in (chosen[i] for i in order[:count]):
        step, value = newest[index]
        limit = metric.limit_of(catalogue.series[index])
        measured, rank = ranks.get(index, (step, -1.0))
        documents.append(WorstDocument(
            series=catalogue.document(index), step=step,
            value=int(value) if metric.kind == "count" else to_number(value),
            limit=limit.value if limit else None,
            rank=int(rank) if measured == step and rank >= 0 else None))
    return documents
