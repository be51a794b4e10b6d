"""What a client misspells or mistypes is refused by name: fields, parameters, numbers."""

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest
import websockets.sync.client as websockets
from tests.server.conftest import TOKEN, Job, RunningCollector
from tests.server.test_policies import rule
from websockets.exceptions import InvalidStatus

from fp8scope_protocol.rules import Rule

Jobs = Callable[..., Job]


@pytest.fixture(scope="module")
def run(client: httpx.Client) -> str:
    return Job(client=client, run="strict").start()


def refused(answer: httpx.Response) -> dict[str, Any]:
    """The problem document of a 422."""
    assert answer.status_code == 422, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    document = answer.json()
    assert isinstance(document, dict)
    return document


def put(client: httpx.Client, run: str, body: Any) -> dict[str, Any]:
    """The refusal of a rule; none is stored."""
    content = body if isinstance(body, str) else json.dumps(body)
    said = refused(client.put(f"/runs/{run}/rules/underflow", content=content))
    assert client.get(f"/runs/{run}/rules").json() == []
    return said


@pytest.mark.parametrize(("change", "field", "known"), [
    ({"max_switch": 1}, "max_switch", "max_switches"),
    ({"enter": {"conditions": [{"metric": "amax", "role": "weight", "threshold": 1, "byond": "below"}]}},
     "enter.conditions[0].byond", "beyond"),
    ({"leave": {"conditions": [], "combin": "any"}}, "leave.combin", "combine"),
])
def test_an_unknown_field_of_a_rule_is_named(
    client: httpx.Client, run: str, change: dict[str, Any], field: str, known: str
) -> None:
    """With where it stands and what is known there, at every depth; `auto` with defaults was the answer."""
    said = put(client, run, rule(**change))
    assert said["field"] == field
    assert f"unknown field '{field}'" in said["detail"]
    assert known in said["known"]
    assert known in said["near"]


@pytest.mark.parametrize("place", ["command", "action"])
def test_an_unknown_field_of_a_command_is_named(client: httpx.Client, run: str, place: str) -> None:
    """Of the command and of its action; nothing is queued."""
    body: dict[str, Any] = {"action": {"modules": ["layers.0"], "precision": "bf16"}}
    (body if place == "command" else body["action"])["expires_stp"] = 5
    said = refused(client.post(f"/runs/{run}/commands", json=body))
    assert said["field"].endswith("expires_stp")
    assert client.get(f"/runs/{run}/commands").json() == []


@pytest.mark.parametrize("name", ["dwell_steps", "cooldown_steps", "max_switches", "max_share", "k", "n",
                                  "threshold"])
@pytest.mark.parametrize("value", ["true", '"5"', "1e400", "NaN", "null", "1" + 30 * "0", "-1e999", "[]"])
def test_a_number_of_a_rule_is_a_number_within_bounds(
    client: httpx.Client, run: str, name: str, value: str
) -> None:
    """Neither true nor text nor what no database holds; the field is named wherever JSON can be read."""
    if name == "threshold" and value.isdigit():
        pytest.skip("that is a number")
    body = rule()
    where = body["enter"]["conditions"][0] if name in ("k", "n", "threshold") else body
    where[name] = "HERE"
    said = put(client, run, json.dumps(body).replace('"HERE"', value))
    assert len(said["detail"]) < 600
    if value not in ("1e400", "NaN", "-1e999"):
        assert name in said["detail"]


@pytest.mark.parametrize("change", [{"name": 5}, {"modules": 5}, {"mode": True}, {"modules": ["layers.0"]}])
def test_text_of_a_rule_is_text(client: httpx.Client, run: str, change: dict[str, Any]) -> None:
    """A number is no name; the field and what came are named."""
    [(name, value)] = change.items()
    assert put(client, run, rule(**change))["detail"].startswith(f"{name} = {value!r}: expected str")


@pytest.mark.parametrize("change", [
    {"dwell_steps": 2**53}, {"cooldown_steps": 2**53, "max_switches": 1000}, {"max_share": 1},
])
def test_the_largest_numbers_are_kept_and_judged(job: Jobs, client: httpx.Client, change: Any) -> None:
    """What is accepted is stored to the digit and does not break the batch that it judges."""
    one = job()
    name = one.start()
    assert client.put(f"/runs/{name}/rules/underflow", json=rule(**change)).status_code == 200
    stored = client.get(f"/runs/{name}/rules/underflow").json()
    assert {key: stored[key] for key in change} == change
    one.send(1, one.values(layers_0=0.5))
    one.send(2, one.values())


@pytest.mark.parametrize("body", ["", "{", "[]", "null", "3", '"x"', "[" * 100_000, '{"name": "\\ud800"}'])
def test_what_is_no_rule_is_refused(client: httpx.Client, run: str, body: str) -> None:
    """In a short answer, never a 500."""
    assert len(put(client, run, body)["detail"]) < 600


def test_a_body_has_a_largest_size(client: httpx.Client, run: str, collector: RunningCollector) -> None:
    """JSON as much as what probes send: 413."""
    body = b" " * (collector.settings.max_body_bytes + 1)
    assert client.put(f"/runs/{run}/rules/underflow", content=body).status_code == 413


def test_losses_are_counts(client: httpx.Client) -> None:
    """true is no count, and neither is what no database holds."""
    one = Job(client=client, run="losses")
    one.start()
    query = {"attempt": one.attempt, "producer": one.producer}
    for count in (True, "5", 1.5, -1, 2**64):
        answer = client.put("/runs/losses/lost", params=query, json={"torn": count})
        assert "torn" in refused(answer)["detail"]


def routes(collector: RunningCollector) -> dict[str, list[str]]:
    """The readable routes of the collector, each with its parameters, as OpenAPI lists them."""
    app: Any = collector.app
    while not hasattr(app, "openapi"):
        app = app.app
    return {path: [one["name"] for one in methods["get"].get("parameters", []) if one["in"] == "query"]
            for path, methods in app.openapi()["paths"].items() if "get" in methods}


def test_every_read_route_names_unknown_parameters(
    client: httpx.Client, run: str, collector: RunningCollector
) -> None:
    """Whatever else is missing or wrong, and with what it accepts; all routes are walked."""
    found = routes(collector)
    assert len(found) > 12
    assert {"/metrics", "/healthz", "/openapi.json"} <= found.keys()
    for path, known in found.items():
        address = collector.url + path.replace("{run}", run).replace("{name}", "underflow")
        said = refused(client.get(address, params={"limt": 5}))
        assert (said["field"], sorted(said["known"])) == ("limt", sorted(known)), path
        assert "unknown query parameter 'limt'" in said["detail"]


def test_a_misspelt_parameter_has_near_misses(client: httpx.Client) -> None:
    """And one that is given twice is not settled by chance."""
    assert refused(client.get("/runs", params={"limt": 5}))["near"] == ["limit"]
    assert "given 2 times" in refused(client.get("/runs?limit=5&limit=6"))["detail"]
    assert client.get("/runs", params={"limit": 5}).status_code == 200


def test_writing_takes_no_unknown_parameters(client: httpx.Client, run: str) -> None:
    """Rules and commands as well."""
    refused(client.put(f"/runs/{run}/rules/underflow", params={"dry_run": 1}, json=rule()))
    refused(client.post(f"/runs/{run}/commands", params={"dry_run": 1},
                        json={"action": {"modules": ["layers.0"], "precision": "bf16"}}))
    assert client.get(f"/runs/{run}/rules").json() == client.get(f"/runs/{run}/commands").json() == []


def test_a_newer_probe_may_say_more(client: httpx.Client) -> None:
    """What probes send is read as before: a parameter that this collector does not know changes nothing."""
    one = Job(client=client, run="newer")
    one.start()
    assert client.post("/runs/newer/batches?hint=1", content=one.encode(0)).status_code == 200


def test_the_live_feed_names_unknown_parameters(collector: RunningCollector, run: str) -> None:
    """Before it opens."""
    address = f"ws://{collector.host}/api/v1/runs/{run}/live?since=3"
    with pytest.raises(InvalidStatus) as caught:
        websockets.connect(address, additional_headers={"authorization": f"Bearer {TOKEN}"}, proxy=None)
    assert caught.value.response.status_code == 422
    assert b"unknown query parameter 'since'" in caught.value.response.body


def test_openapi_describes_the_bodies(collector: RunningCollector) -> None:
    """Every route that reads JSON says which fields it takes, and that it takes no others."""
    app: Any = collector.app
    while not hasattr(app, "openapi"):
        app = app.app
    schema = app.openapi()["paths"]["/api/v1/runs/{run}/rules/{name}"]["put"]["requestBody"]["content"][
        "application/json"]["schema"]
    assert set(schema["properties"]) == set(Rule.__dataclass_fields__)
    assert schema["additionalProperties"] is False
    assert "$ref" not in json.dumps(schema)


def test_a_rule_for_a_run_that_is_not_there_says_so(client: httpx.Client, run: str) -> None:
    """404 with near misses, before its pattern is looked at."""
    answer = client.put("/runs/strct/rules/underflow", json=rule())
    assert answer.status_code == 404
    assert answer.json()["near"] == [run]


def test_a_rule_for_a_run_without_layers_says_so(job: Jobs, client: httpx.Client) -> None:
    """And what to wait for."""
    one = job()
    assert one.hello(precision=()).status_code == 200
    said = refused(client.put(f"/runs/{one.run}/rules/underflow", json=rule()))
    assert f"run {one.run} has told of no layers yet" in said["detail"]
    assert "none yet" not in said["detail"]


def test_a_rule_for_a_run_whose_layers_stay_says_so(job: Jobs, client: httpx.Client) -> None:
    """How many there are, why one of them stays, and which layers would do; commands alike."""
    one = job(modules=())
    assert one.hello().status_code == 200
    wish = {"action": {"modules": ["head"], "precision": "bf16"}}
    for answer in (client.put(f"/runs/{one.run}/rules/underflow", json=rule()),
                   client.post(f"/runs/{one.run}/commands", json=wish)):
        said = refused(answer)["detail"]
        assert f"none of the 1 layers of run {one.run} can be switched, as head: kept in bf16" in said
        assert "set_precision" in said


@pytest.mark.parametrize(("at", "text", "field"), [
    ('{"name"', '{"mode": "dry-run", "mode": "auto", "name"', "mode"),
    ('"threshold"', '"k": 1, "k": 2, "threshold"', "k"),
])
def test_a_field_that_is_given_twice_is_named(
    client: httpx.Client, run: str, at: str, text: str, field: str
) -> None:
    """At any depth; the last one won."""
    body = rule()
    body["enter"]["conditions"][0].pop("k", None)
    body = {"name": body.pop("name")} | {key: value for key, value in body.items() if key != "mode"}
    said = put(client, run, json.dumps(body).replace(at, text, 1))
    assert said["field"] == field
    assert f"field '{field}' is given twice" in said["detail"]


def test_the_character_nul_is_refused(client: httpx.Client, run: str) -> None:
    """In whatever text of a body, with the field; and no name in a path can hold it."""
    action = {"modules": ["layers.0"], "precision": "bf16"}
    for body, field in (({"action": action, "reason": "a\0"}, "reason"),
                        ({"action": action | {"modules": ["a\0"]}}, "modules")):
        said = refused(client.post(f"/runs/{run}/commands", json=body))
        assert said["field"] == field
        assert "NUL" in said["detail"]
    assert "NUL" in put(client, run, rule(modules="a\0"))["detail"]
    for path in ("/runs/%00", "/runs/%00/commands", f"/runs/{run}/rules/%00"):
        answer = client.get(path)
        assert (answer.status_code, "matches nothing" in answer.text) == (404, True)


def test_a_reason_that_is_too_long_is_refused(client: httpx.Client, run: str) -> None:
    """It was cut."""
    body = {"action": {"modules": ["layers.0"], "precision": "bf16"}, "reason": "a" * 2001}
    said = refused(client.post(f"/runs/{run}/commands", json=body))
    assert said["field"] == "reason"
    assert "2000" in said["detail"]
    assert client.get(f"/runs/{run}/commands").json() == []
