"""The parameters of an address: one that a route does not know is refused, since it would change nothing."""

from difflib import get_close_matches

from fastapi.dependencies.models import Dependant
from starlette.requests import HTTPConnection

from fp8scope_server.problems import Refused


async def known_parameters(connection: HTTPConnection) -> None:
    """A dependency of whole routers: 422 for an unknown parameter, and for one that is given twice; 404
    for a name in the path that nothing can have.

    Not for what probes send: a newer one may say more than this collector reads.
    """
    for name, value in connection.path_params.items():
        if "\0" in str(value):  # which the database does not take, not even to look for it
            raise Refused(404, f"{name} = {value!r}: matches nothing", near=[])
    known = list(dict.fromkeys(_names(connection.scope["route"].dependant)))
    accepted = f"accepted: {', '.join(known)}" if known else "this route takes none"
    given = [name for name, _ in connection.query_params.multi_items()]
    for name in given:
        if name not in known:
            near = get_close_matches(name[:80], known, n=3, cutoff=0.4)
            raise Refused(422, f"unknown query parameter {name[:80]!r}; {accepted}", field=name[:80],
                          near=near, known=known)
        if given.count(name) > 1:
            times = given.count(name)
            raise Refused(422, f"query parameter {name!r} is given {times} times; once is enough", field=name)


def _names(dependant: Dependant) -> list[str]:
    """The parameters of a route, and of what it depends on."""
    below = [name for one in dependant.dependencies for name in _names(one)]
    return [field.alias for field in dependant.query_params] + below
