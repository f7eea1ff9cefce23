"""What a member of a lab may do under its own name, as an access control list allows it: it costs
only itself.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from fedstrata.common.accounting.child_report import ChildReport
from fedstrata.common.accounting.counters import Account
from fedstrata.common.accounting.ledger import BYTES_MOST, Ledger
from fedstrata.common.accounting.traffic import TcpStats, Traffic
from fedstrata.common.accounting.work import Work
from fedstrata.common.errors import Flooded, InvalidExperiment, RefusedModel, WireError
from fedstrata.common.experiment.reading import announced, parse
from fedstrata.common.learning import splits
from fedstrata.common.model.layout import ROW_BYTES_MOST, ModelLayout
from fedstrata.common.protocol import serialization, topics
from fedstrata.common.protocol.admission import (
    ANSWERS_MOST,
    MESSAGES_MOST,
    PRESENCES_MOST,
    Admission,
    Refusal,
)
from fedstrata.common.protocol.events import PeerChanged, ProbeReceived
from fedstrata.common.protocol.limits import (
    MESSAGE_MOST,
    SKIPPED,
    ChildLimits,
    SenderBounds,
    check_report,
    limits_below,
    task_limits,
)
from fedstrata.common.protocol.messages import (
    Alive,
    Announcement,
    Ask,
    Declined,
    Farewell,
    Gone,
    Key,
    Manifest,
    Message,
    NodeState,
    Phase,
    Preparing,
    Presence,
    Probe,
    Probed,
    Progress,
    Question,
    Reports,
    Result,
    Target,
    Task,
)
from fedstrata.common.protocol.presence import ASK_FIRST_S, Identity
from fedstrata.common.protocol.round_state import ChildState
from fedstrata.common.runtime.discovery import Found, _play
from fedstrata.common.runtime.roll import RollEntry
from fedstrata.common.settings.data import Data, root_below, samples_most
from fedstrata.common.text import JSON_MOST
from tests.bench import hostile
from tests.helpers.session_lab import (
    FORM,
    LAB,
    MODEL_BYTES,
    PARENT,
    RUN,
    WORK,
    Lab,
    manifest_of,
    names_of,
    parent_session,
    settled,
)
from tests.helpers.session_messages import READY, seek

MANY = Traffic(*[BYTES_MOST] * 16, TcpStats(*[BYTES_MOST] * 11))
KEY = Key(0, 0, 0)
THREE_TIERS = {
    "rounds": 3,
    "institution": {"rounds": 2},
    "topology": {"institutions": 2, "devices": 5},
    "training": {"epochs": 4},
}


def result(**changes: Any) -> Result:
    """Return a result with other fields, of its own or of its work."""
    in_work = {field.name for field in fields(Work)} & set(changes)
    work = replace(WORK, **{name: changes.pop(name) for name in in_work})
    model = manifest_of(b"1" * MODEL_BYTES)
    return replace(Result(KEY, model, None, work, 6, (), ""), **changes)


def lab_in_a_round() -> Lab:
    lab = settled(2)
    lab.open()
    lab.rest(1.0)
    return lab


def publish(lab: Lab, message: Message, *, process: str = "") -> None:
    """Give the broker a message of the first child's process, or of another one with its name."""
    lab.publish(PARENT, "device-0", process or lab.child.process, message)


def publish_presence(lab: Lab, session: str, presence: Presence) -> None:
    lab.publish("", "device-0", session, presence, retained=True)


# Results


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"samples": 301}, "301 samples, at most 300"),
        ({"epochs": 5}, "5 epochs, at most 4"),
        ({"steps": 2401}, "2401 steps of SGD, at most 2400"),
        ({"path_steps": 2401}, "2401 steps of SGD in a row"),
        ({"train_s": 2.1e9}, r"2100000000.0 s of training"),
        ({"loss": 1e300}, r"loss is 1e\+300"),
        ({"children": (ChildReport("nobody"),)}, "'nobody', which is not below it"),
        ({"children": (ChildReport("d", Work(101)),)}, "'d' reports 101 samples"),
        ({"children": (ChildReport("d", Work(1), 3),)}, "'d' reports 3 rounds"),
        ({"children": (ChildReport("d", Work(1, float("nan"))),)}, "'d' has a loss of nan"),
        ({"plans": json.dumps({"d": []})}, "0 decisions of 'd'"),
        ({"plans": json.dumps({"i": [{}] * 3})}, "3 decisions of 'i'"),
    ],
)
def test_a_result_beyond_what_its_child_can_have_done_is_refused(
    changes: dict[str, Any], reason: str
) -> None:
    limits = ChildLimits(samples=300, rounds=2, below={"d": 100}, aggregators={"i"})
    check_report(
        result(children=(ChildReport("d", Work(100), 2),), plans=json.dumps({"i": [{}, {}]})),
        limits=limits,
        epochs=4,
    )
    with pytest.raises(RefusedModel, match=reason):
        check_report(result(**changes), limits=limits, epochs=4)


def test_what_passes_at_an_institution_passes_at_the_cloud() -> None:
    """Else a device that exaggerates as far as it may costs its institution, and so all devices
    there, the round.
    """
    experiment = parse(THREE_TIERS)
    above, below = limits_below(experiment, "cloud"), limits_below(experiment, "institution-1")
    worst, works = [], {}
    for name, limit in below.items():
        steps = limit.steps(4)
        most = {"samples": limit.samples, "epochs": 4, "steps": steps, "path_steps": steps}
        worst.append(result(**most, loss=1e39, train_s=1e9))
        check_report(worst[-1], limits=limit, epochs=4)
        works[name] = replace(worst[-1].work, epochs=8, steps=2 * steps)
    twice = tuple(ChildReport(name, work, rounds=2) for name, work in works.items())
    sums = {
        "samples": sum(each.samples for each in worst),
        "steps": sum(each.steps for each in works.values()),
    }
    most = max(each.steps for each in works.values())
    whole = result(**sums, epochs=4, path_steps=most, train_s=2e9, loss=1e39, children=twice)
    check_report(whole, limits=above["institution-1"], epochs=4)


@pytest.mark.parametrize(
    "data",
    [
        {"partition": "iid"},
        {"partition": "shards", "shards": 3},
        {"partition": "dirichlet", "concentration": 0.2},
        {"partition": "dirichlet_overlap", "partition_size": 70},
        {"dataset": "synthetic", "classes": 10, "samples": 500},
        {"partition": "institution_dirichlet"},
    ],
)
def test_no_device_can_have_more_samples_than_the_limit(data: dict[str, Any]) -> None:
    experiment = parse({"topology": {"institutions": 2, "devices": 7}, "data": data})
    split = splits.split_of(experiment)
    most = samples_most(experiment.data, devices=7)
    assert max(map(len, split.partitions)) <= most
    if data.get("partition") in ("iid", "shards", "dirichlet_overlap"):
        assert most <= max(map(len, split.partitions)) + 3
    assert (
        len(splits.partition(split.labels, data=experiment.data, tree=experiment.tree, seed=1)) == 7
    )


def test_a_child_that_reports_more_samples_than_its_data_has_is_not_ready() -> None:
    lab = Lab(names_of(1), limits={"device-0": ChildLimits(samples=9)})
    lab.rest(2.0)  # it has 10
    assert lab.parent.refused(Refusal.MISFIT) == 1
    assert lab.parent.session.samples == {} and not lab.readiness.ready


def test_a_devices_samples_change_with_its_session_alone() -> None:
    lab = lab_in_a_round()
    one, samples = replace(READY, samples=1), lab.parent.session.samples
    publish_presence(lab, lab.child.process, one)
    lab.rest(0.1)
    assert samples["device-0"] == 10
    lab.parent.inject_state("device-0", "its-next-one", one)
    assert samples["device-0"] == 10, "a stranger's may be believed for a moment: it is asked first"
    lab.parent.session.to_send(lab.now + ASK_FIRST_S)
    lab.parent.inject("device-0", "its-next-one", Alive(lab.parent.process, one))
    assert samples["device-0"] == 1


@pytest.mark.parametrize(
    "message",
    [result(), Progress(KEY, Phase.TRAINING, 3, 6, Traffic(), ())],
    ids=["result", "progress"],
)
def test_two_processes_that_use_one_session_are_noticed(message: Message) -> None:
    """Without an access control list anybody can announce a result under a session that it has
    seen.
    """
    lab = settled(2)
    lab.children["device-1"].train_s = 20.0
    lab.open()
    lab.until(lambda: lab.coordinator.children["device-0"].state is ChildState.ACCEPTED)
    publish(lab, message)
    lab.rest(0.1)
    assert lab.parent.refused(Refusal.MISFIT) == 1
    lab.finish()


def test_a_child_that_counts_too_many_bytes_does_not_silence_its_institution() -> None:
    institution = Ledger(["d0", "d1"], Account())
    for device in ("d0", "d1"):
        institution.enter(device, "s", link=MANY)
    cloud = Ledger(["i0"], Account(), below={"i0": ("d0", "d1")})
    cloud.enter("i0", "s", link=Traffic(), below=institution.tiers())
    cloud.enter_reports("i0", "s", institution.reports().values())
    assert cloud.tiers()[1].sent_model_payload == BYTES_MOST


def test_a_replayed_report_takes_no_bytes_back() -> None:
    ledger = Ledger(["i0"], Account(), below={"i0": ("d0",)})
    early, late = (
        ChildReport("d0", traffic=Traffic(received_model_payload=count)) for count in (5, 9)
    )
    for report in (early, late, early):
        count = report.traffic
        ledger.enter("i0", "s", link=count, below=(count,))
        ledger.enter_reports("i0", "s", [report])
    assert [tier.sent_model_payload for tier in ledger.tiers()] == [9, 0]
    assert (
        ledger.tiers()[1].received_model_payload
        == ledger.reports()["d0"].traffic.received_model_payload
        == 9
    )


def test_progress_with_impossible_counts_is_progress() -> None:
    lab = lab_in_a_round()
    impossible = Progress(KEY, Phase.TRAINING, 99, 99, Traffic(2 * BYTES_MOST), ())
    lab.parent.inject("device-0", lab.child.process, impossible)
    assert lab.coordinator.children["device-0"].mark == (Phase.TRAINING, 99)
    assert lab.parent.refused(Refusal.MALFORMED) == 1


# Sessions


def test_a_late_proof_of_life_does_not_replace_a_session() -> None:
    lab = lab_in_a_round()
    publish(lab, Alive(lab.parent.process, READY), process="an-earlier-one")
    lab.rest(0.2)
    known = lab.parent.link.proofs.session("device-0")
    assert known == lab.coordinator.children["device-0"].session == lab.child.process
    assert lab.parent.refused(Refusal.MISFIT) == 1
    lab.finish()


def test_a_flood_of_presences_costs_few_tasks_and_few_events() -> None:
    lab = lab_in_a_round()
    before, seen = Counter(lab.kinds), len(lab.parent.events)

    def lie(number: int) -> None:
        state = NodeState.READY if number % 2 else NodeState.INIT
        presence = Presence(state, "device", samples=1, reason=f"{number}" * 1000)
        publish_presence(lab, f"s{number}", presence)

    lab.flood(lie, 1000, 1.0)
    lab.rest(3.0)
    sent = lab.kinds - before
    assert sent["Task"] <= 6 and sent["Presence"] <= 2 * PRESENCES_MOST, sent
    assert sent["Question"] <= 10, sent
    assert len(lab.parent.events) - seen <= 2 * PRESENCES_MOST + 60
    assert all(len(event.reason) <= 1000 for event in lab.parent.of(PeerChanged))
    assert lab.parent.refused(Refusal.FLOOD) > 750
    lab.rest(10.0)
    # The living process is asked who it is, and takes part again.
    assert lab.parent.link.proofs.session("device-0") == lab.child.process
    lab.finish()


def test_results_without_a_model_cost_few_tasks() -> None:
    lab = lab_in_a_round()
    before = lab.kinds["Task"]

    def lie(number: int) -> None:
        model = manifest_of(random.Random(number).randbytes(MODEL_BYTES))
        publish(lab, result(model=model))
        lab.after(0.06, publish, lab, Gone(model.blob))

    lab.flood(lie, 200, 2.0)
    lab.rest(2.0)
    assert lab.kinds["Task"] - before <= 5


def test_a_flood_of_messages_is_refused_before_it_is_read_and_hides_nobody() -> None:
    lab = lab_in_a_round()
    for number in range(2 * MESSAGES_MOST + 500):
        publish(lab, Preparing(number, "x" * 5000))
    lab.rest(0.5)
    assert lab.parent.refused(Refusal.FLOOD) > MESSAGES_MOST
    assert len(lab.parent.session.attendance.waits_for["device-0"]) == 1000
    lab.rest(20.0)
    lab.finish()


def test_answers_to_nodes_that_are_not_in_the_run_are_counted_together() -> None:
    lab = lab_in_a_round()
    lab.parent.link.announce(Announcement("{}", "[]"))
    for number in range(100):
        seek(lab, f"anybody-{number}")
    lab.rest(1.0)
    counted = {peer for peer, *_ in lab.parent.link.counters.cells}
    assert counted <= {*lab.names, "all", "others"}


# Link calibrations


def test_noise_of_one_child_is_no_noise_of_another() -> None:
    """A blob's id is its content's: a child may know that of another one's model before it is
    announced.
    """
    lab = lab_in_a_round()
    for name, other in itertools.permutations(lab.names):
        blob = manifest_of(lab.parent.expected[name]).blob
        lab.parent.link.outbox.add_aside("probe", other, blob)
    lab.finish()
    links = lab.parent.session.ledger.links()
    assert {links[name].sent_model_payload for name in lab.names} == {MODEL_BYTES}


# Tasks


@pytest.mark.parametrize(
    ("key", "epochs", "reason"),
    [
        (Key(0, 3, 0), 4, "round 3.0, this run has 3 global rounds of 2"),
        (Key(0, 2, 2), 4, "round 2.2"),
        (Key(0, 2**63 - 1, 0), 4, "this run has"),
        (Key(9, 0, 0), 5, "5 epochs, this run has 1 to 4"),
        (Key(0, 0, 0), 0, "0 epochs"),
    ],
)
def test_a_task_that_no_round_of_the_run_has_is_declined(
    key: Key, epochs: int, reason: str
) -> None:
    limits = task_limits(parse(THREE_TIERS), "device-0", "institution-0")
    model = manifest_of(b"1" * MODEL_BYTES)
    limits.check(Task(Key(9, 2, 1), 4, model, None))
    with pytest.raises(RefusedModel, match=reason):
        limits.check(Task(key, epochs, model, None))


def test_a_flood_of_tasks_that_do_not_fit_has_few_answers() -> None:
    lab = lab_in_a_round()
    before = lab.kinds["Declined"]
    task = Task(Key(0, 9, 0), 1, manifest_of(b"1" * 9000), None)
    lab.flood(lambda _: lab.publish("device-0", PARENT, lab.parent.process, task), 500, 1.0)
    lab.rest(1.5)
    assert lab.kinds["Declined"] - before <= 2 * ANSWERS_MOST
    assert lab.child.refused(Refusal.MISFIT) == 500
    lab.finish()


@pytest.mark.parametrize(("variant", "most"), [("paper", 8), ("plato", 8)])
def test_tempo_gives_at_most_the_epochs_of_the_limit(variant: str, most: int) -> None:
    tempo = {"cloud": {"epoch_control": {"name": "tempo", "variant": variant}}}
    assert task_limits(parse(THREE_TIERS | tempo), "institution-0", "cloud").epochs == most


# Announcements


@pytest.mark.parametrize(
    "entries",
    [
        [["w", [10**9, 10**9], "parameter"]],
        [["w", [ROW_BYTES_MOST], "parameter"], ["b", [1], "parameter"]],
        [["w", [10**30], "parameter"]],
        [["\ud800", [1], "parameter"]],
        [["w" * 10_000, [1], "parameter"]],
        [["w", [1], "x" * 100_000]],
    ],
)
def test_a_layout_beyond_its_bounds_is_refused_briefly(entries: list[object]) -> None:
    with pytest.raises(WireError) as caught:
        ModelLayout.from_json(json.dumps(entries))
    assert len(str(caught.value)) < 300


def test_a_topology_beyond_its_bounds_is_not_made() -> None:
    with pytest.raises(InvalidExperiment):
        assert parse({"topology": {"devices": 10**8}}).tree


LONG = "x" * 100_000


@pytest.mark.parametrize(
    "tree",
    [
        {"name": LONG},
        {LONG: 1},
        {"topology": {"devices": [LONG]}},
        {"training": {"objective": {"name": LONG}}},
        {"model": {"name": f"a:{LONG}"}},
        {"data": {"root": LONG}},
        {"links": {"of": {LONG: {}}, "wan": f'\\"{LONG}'}},
    ],
    ids=lambda tree: next(iter(tree))[:10],
)
def test_no_text_of_an_announced_experiment_is_long(tree: dict[str, Any]) -> None:
    """It would be repeated in errors, and so in logs and messages."""
    with pytest.raises(InvalidExperiment, match=r"a text of 10000\d characters") as caught:
        announced(json.dumps(tree))
    assert len(str(caught.value)) < 300


def test_an_announcement_that_nobody_expected_ends_no_node_that_stays() -> None:
    async def take_part(found: Found) -> None:
        raise UnicodeEncodeError("utf-8", "\ud800", 0, 1, "surrogates")

    found = Found("run-1", "s", None)  # type: ignore[arg-type]
    entry = RollEntry.__new__(RollEntry)
    assert asyncio.run(_play(found, "device-0", take_part, entry, lambda: True)) is found
    assert entry.run == ""
    with pytest.raises(UnicodeEncodeError):
        asyncio.run(_play(found, "device-0", take_part, None, lambda: True))


@pytest.mark.parametrize(
    ("root", "read"),
    [
        ("data", True),
        ("sets/{node}", True),
        ("{allowed}/data", True),
        ("..", False),
        ("data/../../etc", False),
        ("/etc", False),
        ("link", False),
        ("{node}/../..", False),
        ("a\0b", False),
    ],
)
def test_an_experiment_reads_nothing_outside_of_the_hosts_data_root(
    tmp_path: Path, root: str, read: bool
) -> None:
    allowed = tmp_path / "allowed"
    allowed.mkdir()
    (allowed / "link").symlink_to("/etc")
    data = Data(dataset="mnist", root=root.replace("{allowed}", str(allowed)))
    if read:
        assert Path(root_below(data, "device-0", allowed=allowed)).is_relative_to(allowed)
        return
    with pytest.raises(InvalidExperiment, match=r"data\.root = .*outside .*--data-root"):
        root_below(data, "device-0", allowed=allowed)


def test_the_default_data_root_is_the_folder_of_the_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert root_below(Data(dataset="mnist"), "device-0", allowed=Path()) == "data"
    with pytest.raises(InvalidExperiment):
        root_below(Data(dataset="mnist", root="/etc"), "device-0", allowed=Path())
    # digits have no files
    assert root_below(Data(root="/etc"), "device-0", allowed=Path()) == "/etc"


# A lab of processes


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_an_attack_by_members_leaves_a_labs_model_and_memory_as_they_are(tmp_path: Path) -> None:
    found = hostile.measure(tmp_path, messages=26_000, rate=3000.0)
    assert [problem for problem in found.problems() if "times as long" not in problem] == []
    assert min(found.published.values()) == 2000


# Messages that are too large


@pytest.fixture
def traced() -> Iterator[Callable[[], int]]:
    """The most bytes that were in use at once beyond those at the last call."""
    before = 0

    def peak() -> int:
        nonlocal before
        now, most = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        found, before = most - before, now
        return found

    tracemalloc.start()
    yield peak
    tracemalloc.stop()


TOPICS = [
    topics.inbox(LAB, RUN, PARENT, "device-0"),
    topics.state(LAB, RUN, "device-0"),
    topics.state(LAB, RUN, PARENT),
    topics.ask(LAB, PARENT, "device-0"),
    topics.ask(LAB, PARENT, "anybody"),
    topics.chunk(LAB, RUN, "device-0", topics.ALL, "0" * 16, 0, 1),
    "fs1/" + "x" * 60_000,
]


@pytest.mark.parametrize("topic", TOPICS, ids=lambda topic: topic[:40])
def test_what_is_too_large_for_its_topic_is_refused_before_it_arrives_or_is_read(
    topic: str, traced: Callable[[], int]
) -> None:
    """Of a client that cannot refuse it earlier neither the digest nor a text is formed."""
    lab = lab_in_a_round()
    parent = lab.parent
    for size in (10**8, MESSAGE_MOST + 1):
        assert parent.link.place(topic, size) is SKIPPED
    kind = Refusal.MALFORMED if topic.endswith("x") else Refusal.LARGE
    assert parent.refused(kind) == parent.refused() == 2
    packed = serialization.encode(Preparing(1, "\x1b" * 5_000_000), lab.child.process)
    bodies = [packed, b"01234567" + packed[8:]]
    traced()
    for body, retained in itertools.product(bodies, (False, True)):
        parent.receive(topic, body, retained=retained)
    assert traced() < 50_000 and parent.refused() == 6
    lab.finish()


LARGE: list[Message] = [
    Preparing(1, "x" * 9000),
    Declined(KEY, "x" * 9000),
    Gone("0" * 9000),
    Question("n" * 9000),
    Alive("n", replace(READY, reason="x" * 9000)),
    Ask("0" * 16, bytes(9000), 0, 0, 8, False),
    Farewell(Traffic(), (Traffic(),) * 500),
    Progress(KEY, Phase.TRAINING, 1, 1, Traffic(), (Traffic(),) * 500),
    Reports((ChildReport("d"),) * 500),
    result(plans="x" * 600_000),
    result(inline=bytes(300_000)),
    result(children=(ChildReport("d"),) * 5000),
    Probed("a", 1.0, Manifest("0" * 16, 1024 * 8000, 1024, bytes(8 * 8000), "noise", "")),
]
MISFITS: list[Message] = [
    Reports((ChildReport("nobody"),)),
    result(key=Key(0, 99, 0)),
    Progress(Key(7, 0, 0), Phase.TRAINING, 1, 1, Traffic(), ()),
    Alive("n", READY),
]


@pytest.mark.parametrize(
    ("message", "refusal"),
    [
        *((message, Refusal.LARGE) for message in LARGE),
        *((message, Refusal.MISFIT) for message in MISFITS),
        (Probe(manifest_of(b"1" * 5000)), Refusal.MALFORMED),
    ],
    ids=lambda each: each.value if isinstance(each, Refusal) else type(each).__name__,
)
def test_a_message_of_a_member_that_cannot_be_is_counted(
    message: Message, refusal: Refusal
) -> None:
    """Of a device, whose model has six chunks, which has nobody below it and aggregates nothing."""
    lab = lab_in_a_round()
    publish(lab, message)
    lab.rest(0.1)
    assert lab.parent.refused(refusal) == 1 and not lab.parent.of(ProbeReceived)
    lab.finish()


def test_the_limits_are_those_of_the_experiment() -> None:
    experiment = parse(THREE_TIERS)
    limits = limits_below(experiment, "cloud")
    parent = parent_session(
        ("institution-0", "institution-1"),
        identity=Identity(RUN, "cloud", "cloud", "s"),
        transfer=experiment.transfer,
        limits=limits,
    )
    parent.set_form(FORM)
    below = limits["institution-0"].below
    reports = Reports(tuple(ChildReport(name) for name in below))

    def with_targets(count: int) -> Presence:
        targets = tuple(Target(f"d{i}", f"{'h' * 250}:1") for i in range(count))
        return replace(READY, targets=targets)

    plans = json.dumps({"institution-0": [{"x": "y" * 3_000_000}]})
    state = topics.state(LAB, RUN, "institution-0")
    inbox = topics.inbox(LAB, RUN, "cloud", "institution-0")
    for message, fits in [
        (reports, True),
        (Reports(reports.children * 200), False),
        (result(plans=plans), True),
        (with_targets(len(below)), True),
        (with_targets(50), False),
    ]:
        large = parent.link.refusals.of(Refusal.LARGE)
        topic = state if isinstance(message, Presence) else inbox
        body = serialization.encode(message, "s1")
        parent.link.receive(topic, body, retained=False, now=0.0)
        assert (parent.link.refusals.of(Refusal.LARGE) == large) is fits, type(message)


def test_json_of_control_characters_is_given_up_once_it_is_too_long(
    traced: Callable[[], int],
) -> None:
    body = serialization.encode(Announcement("\x1b" * JSON_MOST, ""), "s")
    traced()
    with pytest.raises(WireError, match="a text of 4000000 characters"):
        serialization.decode(body)
    assert traced() < 4 * JSON_MOST  # the text itself, and as much of it as may be


def test_large_messages_of_one_peer_are_counted_by_their_bytes() -> None:
    admission = Admission()
    admission.bounds = {"a": SenderBounds(), "b": SenderBounds()}
    large = serialization.encode(result(inline=bytes(1_000_000)), "s" * 16)

    def read_at(now: float) -> int:
        count = 0
        with suppress(Flooded):
            while count < 1000:
                admission.read("a", "s" * 16, large, now)
                count += 1
        return count * len(large)

    assert 60e6 < read_at(0.0) < 70e6
    admission.read("b", "s" * 16, large, 0.0)
    assert 45e6 < read_at(3.0) < 52e6


def test_reports_are_counted_once_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand of them take as long as a hundred messages: an institution may send five a second."""
    admission = Admission()
    admission.bounds = {"a": SenderBounds()}
    reports = serialization.encode(
        Reports(tuple(ChildReport(f"d{i}") for i in range(1000))), "s" * 16
    )
    monkeypatch.setattr(serialization, "decode", cache(serialization.decode))
    now = read = 0
    for now in range(12):
        for _ in range(15):
            with suppress(Flooded):
                admission.read("a", "s" * 16, reports, float(now))
                read += 1
    assert 4 * now < read < 6 * now + 40 < 15 * now
