"""Which ranks make a producer, and who of them holds what: plain logic, by the names that ranks hold."""

from fp8scope.control import Answers
from fp8scope.producer import Holding, find_clash, find_producers, unite
from fp8scope_protocol.commands import CommandReport
from fp8scope_protocol.wire import ModulePrecision, Unobserved


def test_ranks_that_hold_the_same_are_one_producer() -> None:
    """Data parallel: one producer, called as ever, and everything is held by everyone."""
    (producer,) = find_producers([["a", "b"]] * 3)
    assert (producer.name, producer.members, producer.held) == ("all", (0, 1, 2), ())
    assert producer.holders("a") == producer.holders("unheard of") == (0, 1, 2)


def test_stages_are_producers() -> None:
    """Two stages of two replicas, dealt out in turn; a rank's place is that among its producer's ranks."""
    first, second = find_producers([["0.w"], ["1.w"], ["0.w"], ["1.w"]])
    assert (first.name, first.members) == ("part0", (0, 2))
    assert (second.name, second.members) == ("part1", (1, 3))
    assert second.holders("1.w") == (0, 1)


def test_expert_groups_that_share_layers_are_one_producer() -> None:
    """Rank 2's experts are tied to rank 0's only through a layer of rank 1; each name knows its holders."""
    (producer,) = find_producers([["e0", "router"], ["router", "norm"], ["e1", "norm"]])
    assert producer.members == (0, 1, 2)
    assert producer.holders("e1") == (2,)
    assert producer.holders("router") == (0, 1)
    assert producer.holders("norm") == (1, 2)


def test_expert_groups_that_share_nothing_are_producers() -> None:
    """Also ranks that hold nothing at all, which are alike."""
    assert [one.members for one in find_producers([["e0"], [], ["e1"], []])] == [(0,), (1, 3), (2,)]


def test_what_members_hold_is_put_together() -> None:
    """Each layer once, in the first member's words, then what only others hold."""
    one = Holding(names=("a", "e0"), depth=3, precision=(
        ModulePrecision(name="a", precision="fp8"), ModulePrecision(name="e0", precision="fp8")))
    other = Holding(names=("a", "e1"), depth=4, unobserved=(Unobserved(name="x", reason="y"),), precision=(
        ModulePrecision(name="a", precision="bf16"), ModulePrecision(name="e1", precision="fp8")))
    both = unite([one, other])
    assert both.names == ("a", "e0", "e1")
    assert [(layer.name, layer.precision) for layer in both.precision] == [
        ("a", "fp8"), ("e0", "fp8"), ("e1", "fp8")]
    assert (both.depth, both.unobserved) == (4, other.unobserved)


def test_what_has_one_name_and_two_shapes_is_found() -> None:
    """Among the ranks of a producer; the lowest ones are named, and what one alone holds is no clash."""
    narrow = Holding(shapes={"0.w": (8, 8), "1.w": (4, 4), "2.w": (1, 1)})
    wide = Holding(shapes={"0.w": (8, 16), "1.w": (4, 8), "3.w": (2, 2)})
    said = find_clash([narrow, narrow, wide, wide], (0, 1, 2, 3))
    assert said.startswith("0.w is [8, 8] on rank 0 and [8, 16] on rank 2 (and 1 more names)")
    assert "rename" in said
    assert find_clash([narrow, wide, narrow, wide], (1, 3)) == ""


def report(state: str, reason: str = "") -> CommandReport:
    return CommandReport(id=7, state=state, step=9, reason=reason)  # type: ignore[arg-type]


def test_only_owners_report() -> None:
    """Ranks 2 and 3 hold the layer: their producer reports both steps, the other one is silent."""
    applied = [[], [], [report("applied")], [report("applied")]]
    passed = [[report("rejected", "no such layer")], [report("rejected", "no such layer")], [], []]
    assert Answers((0, 1), first=True).add(applied, passed) == ()
    (said,) = Answers((2, 3), first=False).add(applied, passed)
    assert (said.state, said.steps_by_rank) == ("applied", (9, 9))


def test_a_command_for_nobody_is_rejected_once() -> None:
    """By the first producer; that one rank cannot switch its layer is that producer's to say."""
    nothing: list[list[CommandReport]] = [[], []]
    passed = [[report("rejected", "no such layer")]] * 2
    (said,) = Answers((0,), first=True).add(nothing, passed)
    assert (said.state, said.reason) == ("rejected", "no such layer")
    assert Answers((1,), first=False).add(nothing, passed) == ()
    refused = [[], [report("rejected", "computes in one precision only")]]
    assert Answers((0,), first=True).add(refused, [passed[0], []]) == ()
    (said,) = Answers((1,), first=False).add(refused, [passed[0], []])
    assert said.reason == "computes in one precision only"
