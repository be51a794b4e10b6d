"""Rules and commands over HTTP: from a measurement to a changed precision and back."""

import json
from collections.abc import Callable
from typing import Any

import httpx
import numpy as np
import pytest
from tests.server.conftest import Job

from fp8scope_protocol.commands import CommandReport

Rows = Callable[..., list[tuple[Any, ...]]]
Jobs = Callable[..., Job]


def rule(**fields: Any) -> dict[str, Any]:
    """Send a layer to BF16 when its activation underflows over 5 %, back when it is under 1 %."""
    condition = {"metric": "underflow_ratio", "role": "activation", "threshold": 0.05}
    calm = {**condition, "threshold": 0.01, "beyond": "below"}
    return {"name": "underflow", "modules": "layers.*", "enter": {"conditions": [condition]},
            "leave": {"conditions": [calm]}, "dwell_steps": 2, "cooldown_steps": 4, "max_switches": 2,
            "max_share": 0.5, **fields}


@pytest.fixture
def started(job: Jobs, client: httpx.Client) -> Callable[..., tuple[Job, str]]:
    """A job with one rule, and its run."""
    def start(*, rule_fields: dict[str, Any] | None = None, **fields: Any) -> tuple[Job, str]:
        one = job(**fields)
        run = one.start()
        answer = client.put(f"/runs/{run}/rules/underflow", json=rule(**rule_fields or {}))
        assert answer.status_code == 200, answer.text
        return one, run

    return start


def events(client: httpx.Client, run: str, *kinds: str) -> list[tuple[str, int, str]]:
    found = client.get(f"/runs/{run}/events", params={"limit": 500}).json()
    return [(one["kind"], one["step"], one["name"]) for one in found if not kinds or one["kind"] in kinds]


def test_a_bad_layer_goes_to_bf16_and_comes_back(started: Any, client: httpx.Client) -> None:
    """Measurement, alert, command in the ingest reply, delivery, report, precision map, and the return."""
    one, run = started()
    assert one.send(0, one.values())["commands"] == 0
    assert one.send(1, one.values(layers_0=0.5))["commands"] == 1
    [command] = client.get(f"/runs/{one.run}/commands", params={"attempt": one.attempt}).json()
    assert (command["state"], command["issued_by"]) == ("delivered", "rule:underflow")
    assert command["action"] == {"kind": "set_precision", "modules": ["layers.0"], "precision": "bf16"}
    assert command["expires_step"] == 11
    assert "underflow_ratio = 0.5" in command["reason"]
    report = CommandReport(id=1, state="applied", step=3, steps_by_rank=(3, 3))
    assert one.send(3, one.values(layers_0=0.5), reports=(report,))["commands"] == 0
    layers = {layer["name"]: layer for layer in client.get(f"/runs/{run}/layers").json()}
    assert (layers["layers.0"]["running"], layers["layers.0"]["since_step"]) == ("bf16", 3)
    assert layers["layers.1"]["running"] == "fp8"
    [command] = client.get(f"/runs/{run}/commands").json()
    assert (command["state"], command["applied_step"], command["steps_by_rank"]) == ("applied", 3, [3, 3])
    assert one.send(4, one.values())["commands"] == 2
    one.send(6, reports=(CommandReport(id=2, state="applied", step=6, steps_by_rank=(6, 6)),))
    layers = {layer["name"]: layer["running"] for layer in client.get(f"/runs/{run}/layers").json()}
    assert layers["layers.0"] == "fp8"
    assert events(client, run) == [
        ("alert", 1, "layers.0"), ("decision", 1, "layers.0"), ("switch", 3, "layers.0"),
        ("decision", 4, "layers.0"), ("switch", 6, "layers.0")]


def test_what_a_layer_really_runs_in_is_what_the_report_says(started: Any, client: httpx.Client) -> None:
    """Asked for bf16, the layer runs shadow: the layers, the event and the cell say so. An unknown word is
    refused, with all of its batch."""
    one, run = started()
    one.send(1, one.values(layers_0=0.5))
    wrong = one.encode(3, reports=(CommandReport(id=1, state="applied", step=3, precision="bf61"),))
    assert one.post(wrong).json()["near"] == ["bf16"]
    one.send(3, one.values(), reports=(CommandReport(id=1, state="applied", step=3, precision="shadow"),))
    layers = {layer["name"]: layer["running"] for layer in client.get(f"/runs/{run}/layers").json()}
    assert layers["layers.0"] == "shadow"
    [switch] = [one for one in client.get(f"/runs/{run}/events").json() if one["kind"] == "switch"]
    assert switch["text"].startswith("fp8 -> shadow (command 1")
    assert client.get(f"/runs/{run}/cell", params={"series": 0, "step": 3}).json()["precision"] == "shadow"
    assert client.get(f"/runs/{run}").json()["layers_in_bf16"] == 2


def test_an_answer_tells_of_an_alert_while_it_lasts(started: Any, client: httpx.Client) -> None:
    """From the batch that raises it to the one that ends it, to a probe that sends again too."""
    one, _ = started()
    assert not one.send(0, one.values())["alert"]
    assert one.send(1, one.values(layers_0=0.5))["alert"]
    repeated = one.encode(2, one.values(layers_0=0.5))
    assert [one.post(repeated).json()["alert"] for _ in range(2)] == [True, True]
    assert not one.send(4, one.values())["alert"]
    assert not one.send(5)["alert"]


def test_a_command_names_each_layer_once(started: Any, client: httpx.Client) -> None:
    """100,000 times the same layer is refused by name in a short answer; so is a name without end."""
    _, run = started()
    for modules in (["layers.0"] * 100_000, ["x" * 1_000_000]):
        answer = client.post(f"/runs/{run}/commands",
                             json={"action": {"modules": modules, "precision": "bf16"}})
        assert answer.status_code == 422
        assert len(answer.content) < 2000


def test_f3_one_switch_is_one_event_whatever_the_number_of_ranks(started: Any, client: httpx.Client) -> None:
    """A report from 64 ranks, and its repetition in a later batch, make one event and keep all steps."""
    one, run = started()
    one.send(1, one.values(layers_0=0.5))
    report = CommandReport(id=1, state="applied", step=3, steps_by_rank=(3,) * 64)
    one.send(3, reports=(report,))
    one.send(4, reports=(report,))
    assert events(client, run, "switch") == [("switch", 3, "layers.0")]
    assert client.get(f"/runs/{run}/commands").json()[0]["steps_by_rank"] == [3] * 64


def test_f5_a_metric_that_hovers_switches_once_in_a_cool_down(started: Any, client: httpx.Client) -> None:
    """0.49 / 0.51 around a threshold of 0.5 for 100 steps: at most one entry per cool-down, and an end."""
    condition = {"metric": "underflow_ratio", "role": "activation", "threshold": 0.5}
    calm = {**condition, "beyond": "below"}
    one, run = started(rule_fields={
        "enter": {"conditions": [condition]}, "leave": {"conditions": [calm]}, "dwell_steps": 10,
        "cooldown_steps": 20})
    reports: tuple[CommandReport, ...] = ()
    for step in range(100):
        waiting = one.send(step, one.values(layers_0=0.51 if step % 2 else 0.49), reports=reports)["commands"]
        reports = (CommandReport(id=waiting, state="applied", step=step + 1),) if waiting else ()
    switches = [step for kind, step, _ in events(client, run, "alert")]
    assert len(switches) == 2
    assert switches[1] - switches[0] >= 20
    assert len(events(client, run, "stuck")) == 1
    assert [one["action"]["precision"] for one in client.get(f"/runs/{run}/commands").json()] == [
        "bf16", "fp8", "bf16"]


def test_f5_nan_is_bad_and_missing_is_not_good(started: Any, client: httpx.Client) -> None:
    """A NaN sends the layer to BF16; steps without its metric never bring it back."""
    one, run = started()
    one.send(1, one.values(layers_1=float("nan")))
    assert client.get(f"/runs/{run}/commands").json()[0]["action"]["modules"] == ["layers.1"]
    for step in range(2, 12):
        one.send(step, {"amax": np.zeros(6, dtype="<f4")})
    assert len(client.get(f"/runs/{run}/commands").json()) == 1


def test_dry_run_records_and_sends_nothing(started: Any, client: httpx.Client) -> None:
    """The decision is there with its reason, and there is no command."""
    one, run = started(rule_fields={"mode": "dry-run"})
    assert one.send(1, one.values(layers_0=0.5))["commands"] == 0
    assert client.get(f"/runs/{run}/commands").json() == []
    [text] = [one["text"] for one in client.get(f"/runs/{run}/events").json() if one["kind"] == "decision"]
    assert text.startswith("dry-run of underflow: layers.0 would go to bf16")


def test_a_run_without_remote_control_takes_no_commands(started: Any, client: httpx.Client) -> None:
    """A person gets 409 with the reason; a rule's decision is recorded, without a command."""
    one, run = started(remote_control=False)
    wish = {"action": {"modules": ["layers.0"], "precision": "bf16"}}
    answer = client.post(f"/runs/{run}/commands", json=wish)
    assert answer.status_code == 409
    assert "remote_control=True" in answer.json()["detail"]
    assert one.send(1, one.values(layers_0=0.5))["commands"] == 0
    assert events(client, run) == [("alert", 1, "layers.0"), ("decision", 1, "layers.0")]


def test_replays_old_attempts_and_stale_samples_cause_nothing(started: Any, client: httpx.Client) -> None:
    """A duplicate, a step at or before one judged, a step over ten cadences old, an older attempt."""
    first, run = started(every=2, rule_fields={"max_share": 1})
    first.send(10, first.values())
    first.post(first.last)
    first.send(9, first.values(layers_0=0.5))
    first.send(100)
    first.send(79, first.values(layers_0=0.5))
    second = first.__class__(client=client, run=first.run, resume=True)
    second.start()
    first.send(101, first.values(layers_0=0.5))
    assert client.get(f"/runs/{run}/commands").json() == []
    second.send(81, second.values(layers_0=0.5))
    assert len(client.get(f"/runs/{run}/commands").json()) == 1


def test_c4_rules_see_the_new_attempt_only(started: Any, client: httpx.Client) -> None:
    """A window that an old attempt began is not completed by the new one."""
    condition = {"metric": "underflow_ratio", "role": "activation", "threshold": 0.05, "k": 2, "n": 3}
    first, run = started(rule_fields={"enter": {"conditions": [condition]}})
    first.send(5, first.values(layers_0=0.5))
    second = first.__class__(client=client, run=first.run, resume=True)
    second.start()
    second.send(5, second.values(layers_0=0.5))
    assert client.get(f"/runs/{run}/commands").json() == []
    assert second.send(6, second.values(layers_0=0.5))["commands"] == 1


def test_a_resumed_run_expires_what_was_asked_of_the_old_attempt(started: Any, client: httpx.Client) -> None:
    """An unanswered command is not given to the next life of the run."""
    first, run = started()
    first.send(1, first.values(layers_0=0.5))
    second = first.__class__(client=client, run=first.run, resume=True)
    second.start()
    [command] = client.get(f"/runs/{run}/commands").json()
    assert (command["state"], command["answer"]) == ("expired", "the run went on as attempt 2")
    assert client.get(f"/runs/{run}/commands", params={"attempt": second.attempt}).json() == []


def test_a_rejected_command_leaves_the_layer_as_it_runs(started: Any, client: httpx.Client) -> None:
    """The rule knows that the layer still runs FP8, and asks again after its cool-down, not before."""
    one, run = started()
    one.send(1, one.values(layers_0=0.5))
    one.send(2, one.values(layers_0=0.5), reports=(
        CommandReport(id=1, state="rejected", step=2, reason="compiled"),))
    [command] = client.get(f"/runs/{run}/commands").json()
    assert (command["state"], command["answer"]) == ("rejected", "compiled")
    layers = {layer["name"]: layer["running"] for layer in client.get(f"/runs/{run}/layers").json()}
    assert layers["layers.0"] == "fp8"
    one.send(3, one.values(layers_0=0.5))
    assert len(client.get(f"/runs/{run}/commands").json()) == 1
    one.send(6, one.values(layers_0=0.5))
    assert len(client.get(f"/runs/{run}/commands").json()) == 2


def test_an_unanswered_rule_command_expires(started: Any, client: httpx.Client) -> None:
    """A command that the job is long past ends as expired, and its rule may ask again."""
    one, run = started()
    one.send(1, one.values(layers_0=0.5))
    one.send(22, one.values(layers_0=0.5))
    states = [command["state"] for command in client.get(f"/runs/{run}/commands").json()]
    assert states == ["expired"]
    assert one.send(30, one.values(layers_0=0.5))["commands"] == 2


def test_applied_means_that_all_owners_did(job: Jobs, client: httpx.Client) -> None:
    """A command over two producers is delivered until both have reported."""
    first = job(modules=("layers.0",), producer="0")
    second = job(modules=("layers.1",), producer="1", run=first.run, attempt=first.attempt)
    run = first.start()
    second.start()
    wish = {"action": {"modules": ["layers.0", "layers.1"], "precision": "bf16"}, "reason": "to be safe"}
    assert client.post(f"/runs/{run}/commands", json=wish).status_code == 201
    client.get(f"/runs/{run}/commands", params={"attempt": first.attempt})
    first.send(4, reports=(CommandReport(id=1, state="applied", step=4, steps_by_rank=(4, 4)),))
    assert client.get(f"/runs/{run}/commands").json()[0]["state"] == "delivered"
    second.send(4, reports=(CommandReport(id=1, state="applied", step=4, steps_by_rank=(4, 4)),))
    [command] = client.get(f"/runs/{run}/commands").json()
    assert (command["state"], command["steps_by_rank"]) == ("applied", [4, 4, 4, 4])
    assert events(client, run, "switch") == [("switch", 4, "layers.0"), ("switch", 4, "layers.1")]


def test_the_budget_is_said_once_per_cool_down(started: Any, client: httpx.Client) -> None:
    """Where a rule may hold no more layers, it says so, but not at every sample."""
    one, run = started(modules=("layers.0", "layers.1", "layers.2"), rule_fields={"max_share": 0.34})
    for step in range(6):
        one.send(step, one.values(layers_0=0.5, layers_1=0.5))
    assert events(client, run, "alert") == [("alert", 0, "layers.0"), ("alert", 0, "layers.1"),
                                            ("alert", 5, "layers.1")]


def test_a_layer_that_another_rule_holds_is_not_taken_back(started: Any, client: httpx.Client) -> None:
    """Two rules on one layer: it returns when the second one lets go."""
    one, run = started()
    condition = {"metric": "amax", "role": "activation", "threshold": 9}
    calm = {**condition, "threshold": 1, "beyond": "below"}
    strict = rule(name="amax", enter={"conditions": [condition]}, leave={"conditions": [calm]})
    assert client.put(f"/runs/{run}/rules/amax", json=strict).status_code == 200

    def send(step: int, underflow: float, amax: float) -> list[str]:
        one.send(step, one.values(layers_0=underflow) | {"amax": np.full(6, amax, dtype="<f4")})
        return [command["action"]["precision"] for command in client.get(f"/runs/{run}/commands").json()
                if "layers.0" in command["action"]["modules"]]

    assert send(1, 0.5, 10) == ["bf16", "bf16"]
    assert send(5, 0.001, 10) == ["bf16", "bf16"]
    assert send(9, 0.001, 0.5) == ["bf16", "bf16", "fp8"]


def test_what_if_series_are_judged_where_nothing_is_live(started: Any, client: httpx.Client) -> None:
    """A job that runs no FP8 yet can be judged by what FP8 would do."""
    one, _ = started(live=False)
    assert one.send(1, one.values(layers_0=0.5))["commands"] == 1


def test_commands_name_switchable_layers(job: Jobs, client: httpx.Client) -> None:
    """An unknown layer, or one that cannot be switched, is 422 with near misses; nothing is queued."""
    run = job().start()
    for name, near in (("layer.0", ["layers.0", "layers.1"]), ("head", [])):
        wish = {"action": {"modules": [name], "precision": "bf16"}}
        answer = client.post(f"/runs/{run}/commands", json=wish)
        assert answer.status_code == 422
        assert sorted(answer.json()["near"]) == near
    for action in ({"modules": [], "precision": "bf16"}, {"modules": ["layers.0"], "precision": "fp4"},
                   {"modules": ["\ud800"], "precision": "bf16"}, {"modules": ["a\0"], "precision": "bf16"}):
        answer = client.post(f"/runs/{run}/commands", content=json.dumps({"action": action}),
                             headers={"content-type": "application/json"})
        assert answer.status_code == 422, answer.text
    assert client.get(f"/runs/{run}/commands").json() == []


def test_rules_are_kept_replaced_and_deleted(job: Jobs, client: httpx.Client) -> None:
    """PUT, GET and DELETE agree; a rule that is not there is 404 with near misses."""
    run = job().start()
    address = f"/runs/{run}/rules"
    assert client.get(address).json() == []
    saved = client.put(f"{address}/underflow", json=rule()).json()
    assert client.get(address).json() == [saved]
    changed = client.put(f"{address}/underflow", json=rule(mode="dry-run")).json()
    assert client.get(f"{address}/underflow").json() == changed
    answer = client.get(f"{address}/underflw")
    assert (answer.status_code, answer.json()["near"]) == (404, ["underflow"])
    assert client.delete(f"{address}/underflow").status_code == 204
    assert client.delete(f"{address}/underflow").status_code == 404
    assert client.get("/runs/nowhere/rules").status_code == 404


@pytest.mark.parametrize(("fields", "word"), [
    ({"modules": "layer.*"}, "near misses: layers"),
    ({"modules": "head"}, "modules"),
    ({"name": "other"}, "address"),
    ({"dwell_steps": -1}, "dwell_steps"),
    ({"mode": "approve"}, "mode"),
    ({"enter": {"conditions": []}}, "conditions"),
    ({"enter": {"conditions": [{"metric": "underflw_ratio", "role": "weight", "threshold": 1}]}},
     "underflow_ratio"),
    ({"enter": {"conditions": [{"metric": "underflow_ratio", "role": "activation", "threshold": 1.5}]}},
     "can never hold: underflow_ratio is at most 1"),
    ({"enter": {"conditions": [{"metric": "gemm_error", "role": "weight", "threshold": 0.1}]}},
     "gemm_error is measured of activation, not of weight"),
    ({"leave": {"conditions": [{"metric": "underflow_ratio", "role": "activation", "threshold": 0.1,
                                "beyond": "below"}]}}, "can hold while enter does"),
])
def test_rules_that_make_no_sense_are_422(
    fields: dict[str, Any], word: str, job: Jobs, client: httpx.Client
) -> None:
    """The answer names the field or the near miss."""
    run = job().start()
    answer = client.put(f"/runs/{run}/rules/underflow", json=rule(**fields))
    assert answer.status_code == 422
    assert word in answer.json()["detail"]
    assert client.get(f"/runs/{run}/rules").json() == []


def test_json_needs_no_content_type_but_no_other_one(job: Jobs, client: httpx.Client) -> None:
    """As with `curl -d`, which calls everything a form: 415, which says what is accepted."""
    run = job().start()
    wish = {"action": {"modules": ["layers.0"], "precision": "bf16"}}
    for method, path, body, done in (("PUT", f"/runs/{run}/rules/underflow", rule(), 200),
                                     ("POST", f"/runs/{run}/commands", wish, 201)):
        content = json.dumps(body).encode()
        form = client.request(method, path, content=content, headers={"content-type": "text/form"})
        assert form.status_code == 415
        assert "content-type = 'text/form'; send JSON, with application/json" in form.json()["detail"]
        assert client.request(method, path, content=content).status_code == done
        assert client.request(method, path, content=b"{").status_code == 422
        assert client.request(method, path).status_code == 422


def test_a_rule_from_before_such_checks_is_still_read_and_judged(
    started: Any, client: httpx.Client, rows: Rows
) -> None:
    """One that would be refused today stays in its run, and no batch fails for it."""
    one, run = started()
    rows("UPDATE rules SET body = jsonb_set(body::jsonb, '{enter,conditions,0,threshold}', '1.5') "
         "WHERE run_id = %s RETURNING 1", run)
    assert client.get(f"/runs/{run}/rules/underflow").json()["enter"]["conditions"][0]["threshold"] == 1.5
    assert one.send(1, one.values(layers_0=0.5))["commands"] == 0


def test_a_replaced_rule_still_knows_which_layers_it_holds(started: Any, client: httpx.Client) -> None:
    """A layer that the old version sent to BF16 is taken back by the new one."""
    one, run = started()
    one.send(1, one.values(layers_0=0.5))
    assert client.put(f"/runs/{run}/rules/underflow", json=rule(dwell_steps=1)).status_code == 200
    one.send(2, one.values())
    assert [command["action"]["precision"] for command in client.get(f"/runs/{run}/commands").json()] == [
        "bf16", "fp8"]


def test_commands_of_an_unknown_attempt_are_409(job: Jobs, client: httpx.Client) -> None:
    """The probe is told to say hello."""
    one = job()
    answer = client.get(f"/runs/{one.run}/commands", params={"attempt": one.attempt})
    assert (answer.status_code, answer.json()["missing"]) == (409, "attempt")
