"""Secure sums: keys, shares, masks and the ring by themselves, one exchange in memory, and whole
labs in virtual time whose nodes are killed in each turn.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import pairwise
from typing import Any, Final

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare

from fedstrata.common.errors import InvalidExperiment, RefusedModel, WireError
from fedstrata.common.experiment.reading import parse
from fedstrata.common.model.layout import ModelLayout, Row, Section
from fedstrata.common.protocol import serialization, topics
from fedstrata.common.protocol.messages import Key, RoundTurn, Task
from fedstrata.common.randomness import Purpose, generator
from fedstrata.common.secure import masks, shamir
from fedstrata.common.secure.exchange import SecureExchange
from fedstrata.common.secure.member import MASKS, SecureMember
from fedstrata.common.secure.neighbours import neighbours
from fedstrata.common.secure.records import Boxes, Opened, Present, Roster, SumMember, packed, read
from fedstrata.common.secure.ring import LOSS_CLIP, Ring, Words, weight_of
from fedstrata.common.settings.secure import SecureSettings
from fedstrata.deploy.simulation.simulated_broker import Routed
from tests.helpers.scenarios import lab, played
from tests.simulation.lab import Scenario, ScenarioLab

LAYOUT: Final = ModelLayout.build(
    [("w", (37,), Section.PARAMETER), ("m", (3,), Section.BUFFER), ("n", (2,), Section.COUNTER)]
)
ROUND: Final = (3, 1)


def noise_of(seed: int) -> Callable[[int], bytes]:
    return random.Random(seed).randbytes


def row_of(seed: int, scale: float = 0.1) -> Row:
    row = LAYOUT.empty()
    LAYOUT.floats(row)[:] = np.random.default_rng(seed).normal(0, scale, LAYOUT.columns)
    LAYOUT.integers(row)[:] = seed
    return row


@dataclass
class SumInMemory:
    """One exchange of children with models of their own; `samples`: of each."""

    samples: Sequence[int]
    settings: SecureSettings = field(default_factory=SecureSettings)
    word_bits: int = 64
    attempt: int = 0
    members: dict[str, SecureMember] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.ring = Ring(self.settings, LAYOUT, self.word_bits)
        self.names = [f"device-{place}" for place in range(len(self.samples))]
        self.received = row_of(1000)
        self.models = {name: row_of(place) for place, name in enumerate(self.names)}
        for place, name in enumerate(self.names):
            self.members.setdefault(
                name, SecureMember(self.ring, node=name, seed=7, noise=noise_of(place))
            )
        self.exchange = SecureExchange(self.ring, exchange=noise_of(99 + self.attempt)(16))

    def key(self, turn: RoundTurn) -> Key:
        return Key(self.attempt, *ROUND, turn)

    def ask(self, turn: RoundTurn, name: str, question: bytes) -> bytes:
        return self.members[name].answer(self.key(turn), question)

    def keys_and_shares(self) -> None:
        begin = self.exchange.begin()
        for name in self.names:
            self.exchange.take_keys(name, self.ask(RoundTurn.KEYS, name, begin))
        self.roster = self.exchange.roster(self.names, samples_most=max(self.samples))
        for name in self.names:
            self.exchange.take_shares(name, self.ask(RoundTurn.SHARES, name, self.roster))

    def upload(self, name: str) -> Words:
        place = self.names.index(name)
        words = self.members[name].masked(
            self.key(RoundTurn.MODEL),
            self.models[name],
            self.received,
            samples=self.samples[place],
            loss=float(place),
        )
        return self.ring.words(words)

    def plain(self, name: str) -> Words:
        """Return the words of a child without masks."""
        place = self.names.index(name)
        chance = generator(7, Purpose.SECURE, f"{name}/{ROUND[0]}", ROUND[1])
        weight = weight_of(self.samples[place], most=max(self.samples))
        return self.ring.quantised(
            self.models[name], self.received, weight=weight, loss=float(place), chance=chance
        )

    def opened(self, present: Sequence[str], *, answering: Sequence[str]) -> Words:
        uploads = [self.upload(name) for name in present]
        questions = self.exchange.unmask(present)
        answers = {name: self.ask(RoundTurn.UNMASK, name, questions[name]) for name in answering}
        return self.exchange.total(uploads, answers)


# Vectors


def test_keys_streams_and_boxes_are_those_of_their_standards() -> None:
    """RFC 7748 6.1; the first block of ChaCha20 for zeros (RFC 8439 A.1, 1)."""
    private = "77076d0a7318a57d3c16c17251b26645df4c2f87ebc0992ab177fba51db92c2a"
    public = "8520f0098930a754748b7ddcb43ef75a0dbf3a0d26381af4eba4a98eaa9b4e6a"
    assert masks.public_key(bytes.fromhex(private)).hex() == public
    words = np.zeros(16, np.uint32)
    masks.add(words, bytes(32))
    block = "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7"
    assert words.tobytes().hex().startswith(block)
    masks.add(words, bytes(32), subtract=True)
    assert not words.any()


@given(seed=st.integers(0, 2**32), needed=st.integers(1, 9), more=st.integers(0, 4))
def test_any_shares_that_are_enough_give_the_secret_and_fewer_do_not(
    seed: int, needed: int, more: int
) -> None:
    rng = random.Random(seed)
    secret = rng.randbytes(32)
    shares = shamir.split(secret, needed=needed, count=needed + more, noise=rng.randbytes)
    numbered = dict(enumerate(shares, 1))
    chosen = dict(rng.sample(sorted(numbered.items()), needed))
    assert shamir.join(chosen) == secret == newton(chosen)
    if needed > 1:
        chosen.popitem()
        with pytest.raises(ValueError, match="different secrets"):
            shamir.join(chosen)


def newton(shares: dict[int, bytes]) -> bytes:
    """Interpolate at 0 by Newton's divided differences, another way than the product's."""
    xs, table = list(shares), [int.from_bytes(share, "big") for share in shares.values()]
    p = shamir.PRIME
    for order in range(1, len(xs)):
        for k in range(len(xs) - 1, order - 1, -1):
            step = pow(xs[k] - xs[k - order], -1, p)
            table[k] = (table[k] - table[k - 1]) * step % p
    value = 0
    for x, coefficient in zip(reversed(xs), reversed(table), strict=True):
        value = (coefficient - x * value) % p
    return value.to_bytes(32, "big")


@given(count=st.integers(2, 60), most=st.integers(1, 60), seed=st.integers(0, 99))
def test_neighbours_are_mutual_and_reach_everybody(count: int, most: int, seed: int) -> None:
    noise = noise_of(seed)
    members = [SumMember(f"device-{k}", noise(32), noise(32)) for k in range(count)]
    near = neighbours(members, most)
    assert all(name in near[other] for name, others in near.items() for other in others)
    sizes = {len(others) for others in near.values()}
    assert sizes == {min(count, 2 * max(1, (most - 1) // 2) + 1)}
    reached = {"device-0"}
    for _ in range(count):
        reached = {other for name in reached for other in near[name]}
    assert len(reached) == count


# The ring


@given(
    bits=st.integers(4, 32),
    clip=st.sampled_from([0.01, 1.0, 50.0]),
    samples=st.integers(1, 900),
    scale=st.sampled_from([0.001, 0.3, 5.0]),
)
def test_a_value_is_rounded_by_less_than_a_step(
    bits: int, clip: float, samples: int, scale: float
) -> None:
    ring = Ring(SecureSettings(bits=bits, clip=clip), LAYOUT, 64)
    model, received, weight = row_of(1, scale), row_of(2, scale), samples / 900
    chance = np.random.default_rng(0)
    words = ring.quantised(model, received, weight=weight, loss=2.5, chance=chance)
    found = ring.mean(words, received, weights=[weight])
    change = LAYOUT.floats(model).astype(float) - LAYOUT.floats(received)
    size = LAYOUT.parameters
    step = clip / ring.level / weight
    expected = np.clip(change[:size], -clip, clip)
    got = LAYOUT.floats(found.row)[:size].astype(float) - LAYOUT.floats(received)[:size]
    assert np.abs(got - expected).max() <= step + 1e-5 * scale
    share = np.count_nonzero(np.abs(change[:size]) > clip) / LAYOUT.columns
    assert found.clipped == pytest.approx(share, abs=1 / ring.level / weight)
    assert LAYOUT.integers(found.row).tolist() == [2, 2]


def test_rounding_is_right_in_the_mean_and_a_loss_that_nobody_knows_is_none() -> None:
    ring = Ring(SecureSettings(bits=4), LAYOUT, 64)
    zero, model = LAYOUT.empty(), LAYOUT.empty()
    LAYOUT.floats(zero)[:], LAYOUT.floats(model)[:] = 0, 0.3
    words = [
        ring.quantised(model, zero, weight=1.0, loss=None, chance=np.random.default_rng(k))
        for k in range(400)
    ]
    found = ring.mean(sum_of(words), zero, weights=[1.0] * 400)
    mean = float(LAYOUT.floats(found.row)[: LAYOUT.parameters].mean())
    assert mean == pytest.approx(0.3, abs=5 * 0.5 / 7 / np.sqrt(400 * LAYOUT.parameters))
    assert found.loss is None


def sum_of(words: Sequence[Words]) -> Words:
    total = np.zeros_like(words[0])
    for each in words:
        np.add(total, each, out=total)
    return total


def test_a_word_is_as_wide_as_the_sum_of_all_children() -> None:
    settings = SecureSettings(bits=24)
    assert [settings.word_bits(n) for n in (2, 256, 257, 10_000)] == [32, 32, 64, 64]
    ring = Ring(settings, LAYOUT, settings.word_bits(256))
    most = np.full(256, ring.level, np.int64).sum()
    assert most < 2**31


# One exchange


@given(
    samples=st.lists(st.integers(1, 500), min_size=2, max_size=9),
    threshold=st.sampled_from([0.51, 0.7, 1.0]),
    bits=st.sampled_from([4, 16, 24, 28]),
    most=st.sampled_from([3, 5, 50]),
    narrow=st.booleans(),
    data=st.data(),
)
def test_the_sum_is_that_of_the_present_children_exactly(
    samples: list[int], threshold: float, bits: int, most: int, narrow: bool, data: st.DataObject
) -> None:
    settings = SecureSettings(threshold=threshold, bits=bits, neighbours=most)
    word_bits = 32 if narrow else 64
    summed = SumInMemory(samples, settings, word_bits)
    summed.keys_and_shares()
    present = data.draw(st.lists(st.sampled_from(summed.names), unique=True).map(sorted))
    present.sort(key=summed.names.index)
    if not summed.exchange.enough(present):
        assert len(present) < max(2, summed.exchange.uploads_needed)
        return
    needed = summed.exchange.answers_needed(present)
    answering = data.draw(st.permutations(present))[:needed]
    total = summed.opened(present, answering=answering)
    assert total.tolist() == sum_of([summed.plain(name) for name in present]).tolist()
    weights = [weight_of(samples[summed.names.index(n)], most=max(samples)) for n in present]
    found = summed.ring.mean(total, summed.received, weights=weights)
    places = [summed.names.index(name) for name in present]
    loss = np.average(places, weights=weights)
    resolution = 2 * LOSS_CLIP * len(present) / summed.ring.level / sum(weights)
    assert found.loss == pytest.approx(loss, abs=3 * resolution)


def test_an_upload_is_uniform_to_its_parent_and_to_all_but_one_of_those_that_open_it() -> None:
    """The bytes of an update of zeros, as the parent sees it; and without the masks of colluding
    children, of whose secrets the parent knows all.
    """
    summed = SumInMemory([1] * 5)
    summed.ring = Ring(summed.settings, wide := wide_layout(), 64)
    zero = np.zeros(wide.row_bytes, np.uint8)
    for place, name in enumerate(summed.names):
        noise = noise_of(place)
        summed.members[name] = SecureMember(summed.ring, node=name, seed=7, noise=noise)
    summed.exchange = SecureExchange(summed.ring, exchange=bytes(16))
    summed.keys_and_shares()
    victim, *colluders = summed.names[: summed.settings.shares_needed(5)]
    key = summed.key(RoundTurn.MODEL)
    row = summed.members[victim].masked(key, zero, zero, samples=1, loss=0.0)
    assert is_uniform(row)
    words = summed.ring.words(row)
    roster = {member.name: member for member in read(Roster, summed.roster).members}
    for name in colluders:  # a child adds the masks of those behind it
        exchange = summed.members[name]._now
        assert exchange is not None
        seed = masks.agreed(exchange.masks, roster[victim].masks, about=MASKS)
        masks.add(words, seed, subtract=True)
        assert is_uniform(row)
    # the last ones: the other two neighbours' masks, and its own
    for name in summed.names[1 + len(colluders) :]:
        exchange = summed.members[name]._now
        assert exchange is not None
        seed = masks.agreed(exchange.masks, roster[victim].masks, about=MASKS)
        masks.add(words, seed, subtract=True)
    own = summed.members[victim]._now
    assert own is not None and is_uniform(row)
    masks.add(words, own.own, subtract=True)
    assert not is_uniform(row)


def is_uniform(row: Row) -> bool:
    return bool(chisquare(np.bincount(row, minlength=256)).pvalue > 1e-6)


def wide_layout() -> ModelLayout:
    return ModelLayout.build([("w", (20_000,), Section.PARAMETER)])


def test_a_child_opens_one_sum_of_a_round_whatever_it_is_asked() -> None:
    summed = SumInMemory([5, 5, 5, 5], SecureSettings(threshold=0.51))
    summed.keys_and_shares()
    first, second = summed.names[:3], summed.names[1:]
    summed.opened(first, answering=first)
    questions = summed.exchange.unmask(second)
    with pytest.raises(RefusedModel, match="opened another sum of this round"):
        summed.ask(RoundTurn.UNMASK, "device-1", questions["device-1"])
    # nor in a later exchange of the round, of which its keys inform the parent
    again = SumInMemory(summed.samples, summed.settings, attempt=1, members=dict(summed.members))
    again.keys_and_shares()
    assert again.exchange.opened == set(first)
    questions = again.exchange.unmask(second)
    with pytest.raises(RefusedModel, match="opened another sum of this round"):
        again.ask(RoundTurn.UNMASK, "device-1", questions["device-1"])
    total = again.opened(first, answering=first)
    assert total.tolist() == sum_of([again.plain(name) for name in first]).tolist()


def test_a_child_refuses_what_would_show_its_model() -> None:
    summed = SumInMemory([5, 5, 5])
    summed.keys_and_shares()
    member, ask = summed.members["device-0"], partial(summed.ask, RoundTurn.UNMASK, "device-0")
    questions = summed.exchange.unmask(summed.names)
    present = read(Present, questions["device-0"])
    with pytest.raises(RefusedModel, match="too few"):
        ask(packed(replace(present, names=present.names[:1])))
    with pytest.raises(WireError, match="another exchange"):
        ask(packed(replace(present, exchange=bytes(16))))
    box = present.boxes[0]
    moved = (box._replace(name="device-1"), *present.boxes[1:])
    opened = read(Opened, ask(packed(replace(present, boxes=moved))))
    assert [share.name for share in opened.shares] == ["device-1", "device-2"]
    roster = read(Roster, summed.roster)
    for other, problem in (
        (replace(roster, members=roster.members[:1]), "one child"),
        (replace(roster, members=(*roster.members, roster.members[1])), "a child twice"),
        (replace(roster, members=roster.members[1:]), "another exchange"),
        (replace(roster, samples_most=99), "second roster"),
    ):
        with pytest.raises(WireError, match=problem):
            summed.ask(RoundTurn.SHARES, "device-0", packed(other))
    upload = partial(member.masked, summed.key(RoundTurn.MODEL), samples=5, loss=None)
    upload(summed.models["device-0"], summed.received)
    with pytest.raises(RefusedModel, match="a second upload"):
        upload(summed.models["device-1"], summed.received)
    row = summed.models["device-0"].copy()
    LAYOUT.floats(row)[3] = np.nan
    with pytest.raises(RefusedModel, match="entry w holds NaN"):
        upload(row, summed.received)


def test_a_process_that_has_begun_anew_holds_no_keys() -> None:
    summed = SumInMemory([5, 5])
    summed.keys_and_shares()
    new = SecureMember(summed.ring, node="device-0", seed=7, noise=noise_of(5))
    for turn in (RoundTurn.SHARES, RoundTurn.MODEL, RoundTurn.UNMASK):
        assert summed.members["device-0"].holds(summed.key(turn))
        assert not new.holds(summed.key(turn))
        assert not summed.members["device-0"].holds(Key(1, *ROUND, turn))
    with pytest.raises(RefusedModel, match="another process"):
        new.answer(summed.key(RoundTurn.SHARES), summed.roster)


@pytest.mark.parametrize("kind", [Roster, Boxes, Opened, Present])
def test_bytes_that_are_no_record_are_refused(kind: Any) -> None:
    for data in (b"", b"\xc1", b"\x90", b"\x93\x01\x02\x03", b"\x91\x91\x91\x91\xc0"):
        with pytest.raises(WireError):
            read(kind, data)


def test_shares_that_others_have_changed_do_not_open_a_sum() -> None:
    summed = SumInMemory([5, 5, 5], SecureSettings(threshold=1.0))
    summed.keys_and_shares()
    uploads = [summed.upload(name) for name in summed.names]
    questions = summed.exchange.unmask(summed.names)
    answers = {n: summed.ask(RoundTurn.UNMASK, n, questions[n]) for n in summed.names}
    opened = read(Opened, answers["device-0"])
    short = replace(opened, shares=opened.shares[1:])
    with pytest.raises(RefusedModel, match="2 shares of device-0's secret, 3 are needed"):
        summed.exchange.total(uploads, answers | {"device-0": packed(short)})
    wrong = opened.shares[0]._replace(share=b"\1" * shamir.SHARE_BYTES)
    changed = replace(opened, shares=(wrong, *opened.shares[1:]))
    with pytest.raises(RefusedModel, match="device-0: shares of different secrets"):
        summed.exchange.total(uploads, answers | {"device-0": packed(changed)})


# Settings


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"institution": {"aggregation": "median"}}, "must depend on the uploads' mean alone"),
        ({"institution": {"aggregation": "fedcross"}}, "must depend on the uploads' mean alone"),
        ({"institution": {"selection": "power_of_choice"}}, "it needs each child's loss"),
        ({"institution": {"norm_bound": {"action": "clip"}}}, "no upload is seen"),
        ({"transfer": {"lan": {"up": "int8"}}}, "uploads are words of a sum"),
        ({"evaluation": {"at": "devices"}}, "devices send scores of their own"),
        ({"topology": {"institutions": 4, "devices": 4}}, "the sum of a single child"),
        (
            {"institution": {"closing": {"rule": "quorum", "quorum": 2, "deadline_s": 1.0}}},
            "of 4 children 3 open a sum",
        ),
        (
            {"adversaries": [{"attack": "sign_flip", "links": ["device-1"]}]},
            "the parent learns the sum of uploads alone",
        ),
    ],
    ids=str,
)
def test_what_a_sum_cannot_do_is_refused_by_name(change: dict[str, Any], problem: str) -> None:
    tree: dict[str, Any] = {"topology": {"institutions": 2, "devices": 8}}
    tree |= {key: value for key, value in change.items() if key != "institution"}
    tree["institution"] = {"secure": {}} | change.get("institution", {})
    with pytest.raises(InvalidExperiment, match=problem):
        parse(tree)


def test_the_clouds_sums_leave_tempos_distances_to_nobody() -> None:
    cloud = {"secure": {}, "epoch_control": {"name": "tempo"}}
    with pytest.raises(InvalidExperiment, match="the epoch control compares the uploads"):
        parse({"cloud": cloud, "topology": {"institutions": 2, "devices": 4}})


# Labs in virtual time

TREE: Final[dict[str, Any]] = {
    "topology": {"institutions": 2, "devices": 6},
    "institution": {"rounds": 2, "secure": {}},
    "cloud": {"secure": {}, "aggregation": {"name": "fedadam", "learning_rate": 0.1}},
}


def killed_at(turn: RoundTurn, node: str, parent: str, *, again: bool = True) -> Scenario:
    """Return the scenario in which a node is killed as a child of `parent` gets a task of this
    turn, and perhaps started again.
    """

    async def scenario(sim: ScenarioLab) -> None:
        reached = asyncio.Event()

        def hook(message: Routed) -> None:
            topic = topics.parse(message.topic)
            if message.body and isinstance(topic, topics.InboxTopic) and topic.sender == parent:
                content = serialization.decode(message.body)[1]
                if isinstance(content, Task) and content.key.turn == turn:
                    reached.set()

        sim.network.hooks.append(hook)
        await reached.wait()
        sim.kill(node)
        if again:
            await asyncio.sleep(0.5)
            sim.start(node)

    return scenario


@pytest.mark.parametrize("turn", RoundTurn, ids=lambda turn: turn.name)
@pytest.mark.parametrize(
    ("node", "parent"),
    [("device-1", "institution-0"), ("institution-0", "institution-0"), ("cloud", "cloud")],
)
def test_a_lab_killed_in_any_turn_has_the_model_of_an_undisturbed_one(
    turn: RoundTurn, node: str, parent: str
) -> None:
    outcome = lab(killed_at(turn, node, parent), tree=TREE)
    assert outcome.ok, outcome.result
    assert outcome.faults and outcome.digest == undisturbed()


@cache
def undisturbed() -> str:
    return lab(tree=TREE).digest


def test_a_device_that_is_lost_after_its_shares_is_taken_out_of_the_sum() -> None:
    """Its institution goes on with three of four, whose sum is opened with the shares of its
    key.
    """
    closing = {"rule": "quorum", "quorum": 3, "deadline_s": 30.0}
    tree = {
        "rounds": 1,
        "topology": {"institutions": 2, "devices": 8},
        "institution": {"secure": {}, "closing": closing},
    }
    scenario = killed_at(RoundTurn.MODEL, "device-3", "institution-0", again=False)
    _, plans, _ = played(tree, scenario)
    assert {plan["node"]: plan.get("without") for plan in plans if plan["node"] != "cloud"} == {
        "institution-0": ["device-3"],
        "institution-1": None,
    }


def test_a_child_that_lies_about_its_shares_ends_the_run_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answer = SecureMember.answer

    def lying(member: SecureMember, key: Key, question: bytes | memoryview) -> bytes:
        found = answer(member, key, question)
        if member._node != "device-1" or key.turn != RoundTurn.SHARES:
            return found
        boxes = read(Boxes, found).boxes
        return packed(Boxes(tuple(box._replace(box=bytes(len(box.box))) for box in boxes)))

    monkeypatch.setattr(SecureMember, "answer", lying)
    problem = "the sum of round 0.0 cannot be opened: 0 shares of device-1's secret, 3 are needed"
    assert f"RunFailed: {problem}" in lab(tree=TREE).result


def test_each_round_has_four_turns_in_order() -> None:
    turns: list[tuple[int, ...]] = []

    async def note(sim: ScenarioLab) -> None:
        def hook(message: Routed) -> None:
            topic = topics.parse(message.topic)
            if message.body and isinstance(topic, topics.InboxTopic) and topic.node == "device-1":
                content = serialization.decode(message.body)[1]
                if isinstance(content, Task) and tuple(content.key) not in turns:
                    turns.append(tuple(content.key))

        sim.network.hooks.append(hook)
        await asyncio.get_running_loop().create_future()

    assert lab(note, tree=TREE).ok
    assert turns == [(0, r, i, turn) for r in range(2) for i in range(2) for turn in RoundTurn]
    assert all(one < other for one, other in pairwise(turns))
