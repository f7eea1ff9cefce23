"""What the sessions promise: parents and children joined in memory, on a hostile line, in virtual
time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedstrata.common.accounting.traffic import Traffic
from fedstrata.common.protocol import serialization, topics
from fedstrata.common.protocol.admission import MESSAGES_MOST, MessageRefused, Refusal
from fedstrata.common.protocol.child_session import QUIET_S
from fedstrata.common.protocol.events import (
    ModelFailed,
    ParentGone,
    PeerChanged,
    RunEnded,
    TaskReceived,
)
from fedstrata.common.protocol.limits import ChildLimits
from fedstrata.common.protocol.manifest import ModelForm
from fedstrata.common.protocol.messages import (
    Ask,
    Gone,
    Key,
    NodeState,
    Phase,
    Presence,
    Progress,
    Question,
    Task,
)
from fedstrata.common.protocol.participant import ParticipantState
from fedstrata.common.protocol.peer_link import SILENT_MOST_S
from fedstrata.common.protocol.presence import ASK_MOST_S, PROOF_EVERY_S, Proof
from tests.helpers.coordinators import quorum_of
from tests.helpers.examples import DRAWN, PROFILE
from tests.helpers.session_lab import (
    FORM,
    LAB,
    PARENT,
    RUN,
    Lab,
    manifest_of,
    model_of,
    names_of,
    settled,
)
from tests.helpers.session_messages import BLOB, IDLE_S, messages_of
from tests.helpers.snapshots import snapshot
from tests.simulation.faults import Fault, FaultKind


def test_the_messages_of_this_test_are_all_there_are() -> None:
    assert {type(message) for message in messages_of(Key(0, 0, 0), BLOB.blob)} == set(
        serialization.KINDS
    )


# What a refused message may change
COUNTS = {".link.refusals._counts", ".link.events", ".link.admission._messages._full_at"}


def changed(before: object, after: object, path: str = "") -> Iterator[str]:
    """Yield where two snapshots differ."""
    if isinstance(before, dict) and isinstance(after, dict) and before.keys() == after.keys():
        for name in before:
            yield from changed(before[name], after[name], f"{path}.{name}")
    elif before != after:
        yield path


# Who is not known changes nothing


@settings(max_examples=DRAWN[PROFILE] // 5)
@given(seed=st.integers(0, 2**32), moment=st.floats(0.0, 6.0), loss=st.sampled_from([0.0, 0.2]))
def test_a_message_of_an_unknown_session_changes_nothing(
    seed: int, moment: float, loss: float
) -> None:
    lab = settled(2, seed=seed, loss=loss, jitter_s=0.1, train_s=2.0)
    key = lab.open()
    lab.rest(moment)
    for node, sender in ((lab.parent, "device-0"), (lab.child, PARENT)):
        link = node.link
        blobs = [*link.sender._blobs, *(blob for _, blob in link.receiver.wanted()), "0" * 16]
        # anybody may ask
        messages = [each for each in messages_of(key, BLOB.blob) if not isinstance(each, Question)]
        about = [each for each in messages if isinstance(each, Ask | Gone)]
        messages += [replace(each, blob=blob) for blob in blobs for each in about]
        before = snapshot(node.session)
        for message in messages:
            refused = node.refused()
            node.inject(sender, "unknown", message)
            assert node.refused() == refused + 1
            after = snapshot(node.session)
            places, before = set(changed(before, after)), after
            assert places <= COUNTS | {".link.proofs._of", ".link.proofs._look_at"}
            assert link.proofs.session(sender) != "unknown"
    lab.finish(until_s=3000.0)
    lab.check()


@pytest.mark.parametrize(("count", "seconds"), [(3000, 0.0), (2000, 10.0)])
def test_an_unknown_session_is_answered_by_few_questions(count: int, seconds: float) -> None:
    lab = settled(2)
    lab.open()
    lab.rest(0.5)
    before = lab.kinds["Question"]

    def lie(number: int) -> None:
        message = Progress(Key(0, 0, 0), Phase.TRAINING, number, 9, Traffic(), ())
        lab.parent.inject("device-0", "unknown", message)

    lab.flood(lie, count, seconds)
    lab.finish()
    lab.rest(seconds)
    assert lab.kinds["Question"] - before <= 1 + seconds / PROOF_EVERY_S
    assert lab.parent.refused(Refusal.SESSION, Refusal.FLOOD) == count
    assert lab.parent.refused(Refusal.SESSION) >= min(count, MESSAGES_MOST)
    assert lab.parent.session.ledger.tiers()[0].received_control_payload < 10_000
    assert len(lab.parent.of(MessageRefused)) <= 2 * 14  # of each reason at 1, 2, 4, 8 ...


# Presences that are lost


FOUND_S = QUIET_S + ASK_MOST_S + 1.0
STATE = "device-0/state"


def test_a_child_whose_first_messages_are_all_lost_is_found_by_its_questions() -> None:
    """Its presences are lost, and its answers to the few questions of a parent that does not know
    it.
    """
    lab = Lab(names_of(1), start=False)
    lab.mute(STATE, f"/{PARENT}/inbox/device-0")
    lab.rest(1.0)
    lab.start()
    lab.rest(20.0)
    assert lab.readiness.missing == {"device-0": "has not joined yet"}
    lab.mute(STATE)
    lab.until(lambda: lab.readiness.ready, within_s=FOUND_S)
    lab.complete()


@pytest.mark.parametrize(
    ("will", "deaf_s", "in_round", "within_s"),
    [
        (True, 0.0, False, FOUND_S),
        (True, 0.0, True, 3.0),
        (False, 0.0, False, 3.0),
        (False, 20.0, False, FOUND_S - 1.0),
    ],
)
def test_a_child_whose_presence_was_lost_is_asked_for_it(
    will: bool, deaf_s: float, in_round: bool, within_s: float
) -> None:
    """The broker sent its will, or a stranger cleared its presence; the next one is lost, for a
    while all it sends.
    """
    lab = settled(1)
    if in_round:
        lab.open()
        lab.rest(0.1)
    lost = Presence(NodeState.LOST, "device", reason="connection lost")
    body = serialization.encode(lost, lab.child.process) if will else b""
    lab.mute(STATE, *(["/device-0"] if deaf_s else []))
    lab.parent.receive(topics.state(LAB, RUN, "device-0"), body)
    assert not lab.parent.session.attendance.present()
    lab.rest(deaf_s)
    lab.mute(STATE)
    lab.until(lab.parent.session.attendance.present, within_s=within_s)
    if in_round:
        lab.finish()
    else:
        lab.complete()


def test_a_child_whose_only_presence_was_refused_is_asked_for_another_one() -> None:
    lab = Lab(names_of(1), start=False)
    session = lab.parent.session
    session.limits["device-0"] = ChildLimits(samples=20)
    lab.mute(STATE)
    lab.start()
    wrong = Presence(NodeState.READY, "device", samples=21)
    lab.parent.inject_state("device-0", lab.child.process, wrong)
    assert "device-0" not in session.samples
    lab.until(lambda: lab.readiness.ready, within_s=FOUND_S)


@pytest.mark.parametrize("joined", [True, False])
def test_a_strangers_presence_changes_no_count_of_samples(joined: bool) -> None:
    """A node whose parent counts a stranger's samples would report a wrong sum to its own parent."""
    lab = settled(1, start=joined)
    samples, before = lab.parent.session.samples, {"device-0": 10} if joined else {}
    assert samples == before
    stranger = Presence(NodeState.READY, "device", samples=7)
    lab.parent.inject_state("device-0", "stranger", stranger)
    for seconds in (0.0, 1.0):
        lab.rest(seconds)
        assert samples == before
    if not joined:
        lab.start()
        lab.rest(1.0)
        assert samples == {"device-0": 10}


def test_the_wait_for_a_lost_child_is_progress_once_so_its_parents_parent_waits_longer() -> None:
    lab = settled(1)
    lab.open()
    lab.rest(0.5)
    lab.kill()
    session = lab.parent.session
    idle_s = session.link.transfer.idle_s
    lab.rest(1.0)
    moves, killed = session.moves.count, lab.now
    lab.until(lambda: session.moves.count > moves, within_s=idle_s)
    vouched_s = lab.now - killed
    assert session.moves.count == moves + 1 and idle_s / 4 < vouched_s <= idle_s / 2
    lab.until(lambda: not session.coordinator.is_open, within_s=idle_s)
    # a round that was given up is progress, too: it may begin again without the lost one
    assert session.moves.count == moves + 2 and lab.now - killed >= vouched_s + idle_s / 4
    lab.rest(4 * idle_s)
    assert session.moves.count == moves + 3  # it is no heartbeat: a wait has its end


# The remains of the dead


def test_a_retained_ready_of_a_dead_parent_captures_no_child() -> None:
    lab = Lab(names_of(1), start=False)
    lab.kill(PARENT, will_after_s=inf)
    lab.remains(PARENT)
    child = lab.start()
    lab.rest(IDLE_S - 1.0)
    assert child.link.proofs.proof(PARENT) is Proof.CLAIMED and not child.of(ParentGone)
    assert not child.link._known - {PARENT} and not child.session._ledger
    lab.rest(2.0)
    assert child.of(ParentGone) == [ParentGone()]
    assert lab.kinds["Question"] >= IDLE_S / 5.0
    lab.start()
    lab.rest(20.0)
    lab.kill(PARENT, for_s=0.0)  # one that lives is believed at once
    lab.complete(until_s=10.0)


def test_a_retained_ready_of_a_dead_child_captures_no_parent() -> None:
    lab = Lab(names_of(2), start=False)
    lab.remains("device-0")
    lab.kill(PARENT, for_s=0.0, will_after_s=inf)
    lab.start("device-1")
    lab.rest(2.0)
    session, readiness = lab.parent.session, lab.readiness
    assert session.attendance.present() == ["device-1"] and session.samples == {"device-1": 10}
    assert readiness.ready == {"device-1"} and not readiness.failed and not readiness.hanging
    assert readiness.missing == {"device-0": "has not joined yet"}
    lab.open()
    lab.rest(5.0)
    assert ("device-1", "device-0") not in {who[:2] for who in lab.messages}
    assert lab.kinds["Task"] == 1  # none for the dead
    lab.start()
    lab.finish()


def test_a_stranger_that_takes_the_name_of_a_child_hides_no_end_from_its_parent() -> None:
    lab = settled(1)
    lab.hit(
        Fault(FaultKind.STRANGER, 0.0, 0.0, "device-0", detail="ready"),
        Fault(FaultKind.TERMINATE, 0.0, 0.0, "device-0", detail="failed"),
    )
    lab.rest(1.0)
    assert lab.parent.of(PeerChanged)[-1] == PeerChanged("device-0", "failed", "it is over")


@pytest.mark.parametrize("store", ["before the restart", "of a run that was resumed"])
def test_an_old_store_ends_nobody_whose_parent_lives(store: str) -> None:
    """A broker that comes back old may hold the end of an earlier process of this run."""
    lab = settled(2)
    lab.round()
    if store == "of a run that was resumed":
        lab.parent.set_state(NodeState.FINISHED)
        lab.rest(0.001)
        for child in lab.children.values():
            child.alive = False  # they end, and new ones come
    lab.rest(1.0)
    old = dict(lab.broker.retained)
    lab.kill(PARENT, will_after_s=inf, for_s=0.0)
    lab.rest(0.1)
    for name in lab.names:
        lab.kill(name)
        lab.start(name, parent=lab.parent.process)
    lab.rest(1.0)
    lab.open(local_round=1)
    lab.rest(1.0)
    lab.restart_broker(down_s=1.0, retained=old)
    lab.finish()
    for child in lab.children.values():
        assert child.of(RunEnded) == [] and len(child.trained) == 1
    lab.check()


def test_who_died_while_the_broker_was_away_is_found_out() -> None:
    lab = settled(3)
    lab.restart_broker(down_s=1.0)  # it crashed: no will is sent, and the store has everybody READY
    lab.kill(will_after_s=inf)
    lab.until(lambda: lab.parent.of(PeerChanged)[-1].state == "lost", within_s=SILENT_MOST_S + 10)
    assert lab.parent.session.attendance.present() == ["device-1", "device-2"]
    (lost,) = [event for event in lab.parent.of(PeerChanged) if event.state == "lost"]
    assert lost.child == "device-0" and "no reply" in lost.reason
    begun = lab.now
    assert lab.round(closing=quorum_of(2, 300.0)).missing == ("device-0",)
    assert lab.now - begun < 10.0
    lab.start()
    lab.complete(local_round=1)


# A task that does not fit


def test_a_task_that_does_not_fit_changes_nothing_at_the_child() -> None:
    lab = settled(1)
    lab.round()
    child, manifest = lab.child, manifest_of(model_of(5))
    lab.rest(1.0)
    other = manifest_of(model_of(5, 9000))
    lies = [replace(manifest, layout="other"), replace(manifest, codec="zip"), other]
    for number, lie in enumerate(lies):
        before = snapshot(child.session)
        child.inject(PARENT, lab.parent.process, Task(Key(0, 1, number), 1, lie, None))
        assert set(changed(before, snapshot(child.session))) <= COUNTS | {
            "._declined",
            ".link.counters.cells",
            ".link.counters.sums",
            ".link.receiver._last_arrival",
            ".link.receiver._arrived",
            ".link.receiver._carried",
            "._quiet_at",
            ".link.answers._full_at",
        }
        lab.rest(0.1)
        assert lab.kinds["Declined"] == number + 1
    assert not child.of(ModelFailed) and len(child.of(TaskReceived)) == 1
    assert child.session.participant.state is ParticipantState.DONE
    assert child.refused(Refusal.MISFIT) == len(lies)


def test_a_round_whose_task_fits_nobody_stalls_with_the_reason() -> None:
    lab = settled(2)
    for child in lab.children.values():
        child.session.set_form(ModelForm("their own layout", "fp32", 5000, exact=True, delta=False))
    begun = lab.now
    lab.open()
    stalled = lab.stall()
    assert lab.now - begun <= IDLE_S + 1.0
    declined = "made no progress for 60 s (its state is ready; it declined its task: wrong"
    assert f"device-0 and device-1 {declined}" in stalled.reason
    assert lab.kinds["Task"] == lab.kinds["Declined"] <= 2 * 16
    for child in lab.children.values():
        assert not child.of(TaskReceived) and child.refused(Refusal.MISFIT)
        child.session.set_form(FORM)
    lab.complete(global_round=1)


def test_a_child_that_does_not_know_its_form_yet_takes_its_task() -> None:
    lab = Lab(names_of(1), start=False)
    lab.start(ready_s=inf)
    lab.complete()
