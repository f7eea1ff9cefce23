"""The wire: every record survives the way, and any other bytes are a WireError, never another
exception.
"""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import fields, replace
from enum import StrEnum
from functools import partial
from itertools import pairwise
from types import NoneType, UnionType
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import msgpack
import pytest
import xxhash
from hypothesis import assume, given
from hypothesis import strategies as st

from fedstrata.common.accounting.child_report import ChildReport
from fedstrata.common.accounting.traffic import TcpStats, Traffic
from fedstrata.common.accounting.work import Work
from fedstrata.common.errors import TooLarge, WireError
from fedstrata.common.experiment.tiers import TIERS_MOST
from fedstrata.common.host.examination import Finding
from fedstrata.common.model.codecs import BUILT_IN, codec_of
from fedstrata.common.protocol import messages, serialization, topics
from fedstrata.common.protocol.limits import NOISE_CHUNKS_MOST, SMALL_BYTES, STRANGER, SenderBounds
from fedstrata.common.protocol.messages import (
    About,
    Key,
    Manifest,
    NodeState,
    Phase,
    Presence,
    Progress,
    Task,
)
from fedstrata.common.protocol.status import NAMED_MOST
from fedstrata.common.text import JSON_MOST, escaped
from tests.helpers.examples import examples

SESSION = "c0ffee"
COUNTS = st.integers(0, serialization.MAX_INT)
NAMES = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", fullmatch=True)

# else `decode` escapes or refuses it
TEXT = st.text(max_size=20).map(escaped).filter(lambda text: len(text) <= 64)


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    size = draw(st.integers(1, 50_000))
    chunk_bytes = draw(st.integers(messages.MIN_CHUNK_BYTES, 20_000))
    length = 8 * -(-size // chunk_bytes)
    blob = draw(st.text("0123456789abcdef", min_size=16, max_size=16))
    digests = draw(st.binary(min_size=length, max_size=length))
    reference = draw(st.sampled_from(["", "0123456789abcdef"]))
    return Manifest(
        blob,
        size,
        chunk_bytes,
        digests,
        draw(TEXT),
        draw(TEXT),
        reference,
        draw(st.integers(0, size)),
    )


SCALARS: dict[Any, st.SearchStrategy[Any]] = {
    int: COUNTS,
    float: st.floats(),
    str: TEXT,
    bytes: st.binary(max_size=40),
    bool: st.booleans(),
    Manifest: manifests(),
}


def strategy(hint: Any) -> st.SearchStrategy[Any]:
    if hint in SCALARS:
        return SCALARS[hint]
    if get_origin(hint) is UnionType:
        return st.one_of(
            *(st.none() if arg is NoneType else strategy(arg) for arg in get_args(hint))
        )
    if get_origin(hint) is tuple:
        return st.lists(strategy(get_args(hint)[0]), max_size=3).map(tuple)
    if issubclass(hint, StrEnum):
        return st.sampled_from(list(hint))
    names = hint._fields if issubclass(hint, tuple) else [f.name for f in fields(hint)]
    hints = get_type_hints(hint)
    return st.tuples(*(strategy(hints[name]) for name in names)).map(lambda values: hint(*values))


MESSAGES = {kind: strategy(kind) for kind in serialization.KINDS}
ANY_MESSAGE = st.one_of(*MESSAGES.values())
ANY_VALUE = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(2**63), 2**64 - 1),
        st.floats(),
        st.text(max_size=5),
        st.binary(max_size=5),
        st.just(msgpack.Timestamp(1, 2)),
        st.just(msgpack.ExtType(5, b"x")),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=2), inner, max_size=2)
    ),
    max_leaves=6,
)


def same(one: Any, other: Any) -> bool:
    """Compare records; NaN equals NaN."""
    if isinstance(one, float):
        return type(other) is float and (one == other or (math.isnan(one) and math.isnan(other)))
    if isinstance(one, tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    if hasattr(one, "__dataclass_fields__"):
        return type(one) is type(other) and all(
            same(getattr(one, f.name), getattr(other, f.name)) for f in fields(one)
        )
    return type(one) is type(other) and bool(one == other)


def sealed(body: bytes) -> bytes:
    """Return the message that carries these bytes, whatever they are."""
    return xxhash.xxh3_64_digest(body) + body


def pack(tree: Any) -> bytes:
    return sealed(msgpack.packb(tree))


def survives(data: bytes) -> messages.Message | None:
    """Return the record, or None where it was refused as it should be; also by those who allow a
    sender nothing.
    """
    for decode in (partial(serialization.decode, sender=STRANGER), serialization.decode_shared):
        with suppress(WireError):
            decode(data)
    try:
        session, message = serialization.decode(data)
    except WireError:
        return None
    assert session and type(message) in serialization.KINDS
    return message


def refusal(data: bytes) -> str:
    with pytest.raises(WireError) as caught:
        serialization.decode(data)
    return str(caught.value)


def tree_of(message: messages.Message) -> list[Any]:
    tree: list[Any] = msgpack.unpackb(
        serialization.encode(message, SESSION)[8:], use_list=True, strict_map_key=False
    )
    return tree


# Messages


@pytest.mark.parametrize("kind", serialization.KINDS, ids=lambda kind: kind.__name__)
@examples(40)
@given(data=st.data())
def test_every_kind_survives_the_way(kind: type[messages.Message], data: st.DataObject) -> None:
    message = data.draw(MESSAGES[kind])
    encoded = serialization.encode(message, SESSION)
    for form in (encoded, bytearray(encoded), memoryview(encoded)):
        session, decoded = serialization.decode(form)
        assert session == SESSION and same(message, decoded)


def test_the_codes_of_the_kinds_are_what_another_process_uses() -> None:
    assert " ".join(kind.__name__ for kind in serialization.KINDS) == (
        "Presence Announcement Task Progress Result Acknowledgement Ask Gone Reports Farewell "
        "Probe Probed Question "
        "Alive Preparing Declined Goodbye Here Status FrozenOffered"
    )


@examples(300)
@given(data=st.binary(max_size=60))
def test_any_bytes_give_a_record_or_a_wire_error(data: bytes) -> None:
    survives(data)
    survives(sealed(data))


@examples(300)
@given(tree=ANY_VALUE)
def test_any_msgpack_gives_a_record_or_a_wire_error(tree: Any) -> None:
    survives(pack(tree))


@examples(300)
@given(
    message=ANY_MESSAGE,
    flips=st.lists(st.tuples(st.integers(0, 2**31), st.integers(1, 255)), min_size=1, max_size=4),
    cut=st.one_of(st.none(), st.integers(0, 2**31)),
)
def test_mutated_bytes_give_a_record_or_a_wire_error(
    message: messages.Message, flips: list[tuple[int, int]], cut: int | None
) -> None:
    body = bytearray(serialization.encode(message, SESSION)[8:])
    for place, mask in flips:
        body[place % len(body)] ^= mask
    survives(sealed(bytes(body if cut is None else body[: cut % len(body)])))


@examples(300)
@given(message=ANY_MESSAGE, place=st.integers(0, 2**31))
def test_a_flipped_bit_is_refused_as_damage(message: messages.Message, place: int) -> None:
    data = bytearray(serialization.encode(message, SESSION))
    index, bit = divmod(place % (8 * len(data)), 8)
    data[index] ^= 1 << bit
    assert refusal(bytes(data)).startswith("damaged message")


@given(message=ANY_MESSAGE, tail=st.binary(min_size=1, max_size=4), cut=st.integers(0, 2**31))
def test_truncated_and_prolonged_messages_are_refused(
    message: messages.Message, tail: bytes, cut: int
) -> None:
    data = serialization.encode(message, SESSION)
    assert survives(data[: cut % len(data)]) is None
    assert survives(data + tail) is None
    assert survives(sealed(data[8:][: cut % (len(data) - 8)])) is None
    assert survives(sealed(data[8:] + tail)) is None


def paths(tree: Any, path: tuple[int, ...] = ()) -> list[tuple[int, ...]]:
    found = [path] if path else []
    if isinstance(tree, list):
        for index, item in enumerate(tree):
            found += paths(item, (*path, index))
    return found


@examples(500)
@given(message=ANY_MESSAGE, value=ANY_VALUE, choice=st.integers(0, 2**31))
def test_a_field_of_any_value_gives_a_record_or_a_wire_error(
    message: messages.Message, value: Any, choice: int
) -> None:
    tree = tree_of(message)
    places = paths(tree)
    *parents, last = places[choice % len(places)]
    inner = tree
    for index in parents:
        inner = inner[index]
    inner[last] = value
    decoded = survives(pack(tree))
    if decoded is not None:  # whatever is taken is a record that can be said again
        assert same(serialization.decode(serialization.encode(decoded, SESSION))[1], decoded)


@given(message=ANY_MESSAGE, change=st.sampled_from(["less", "more"]))
def test_a_wrong_number_of_fields_is_refused(message: messages.Message, change: str) -> None:
    assume(not isinstance(message, Presence))  # whose last field may be absent
    tree = tree_of(message)
    assert survives(pack(tree[:-1] if change == "less" else [*tree, 0])) is None


@pytest.mark.parametrize("depth", [10, 500, 1000, 1015, 1022, 1023, 1024, 5000])
def test_deep_nesting_is_a_wire_error(depth: int) -> None:
    nested = b"\x91" * depth + b"\xc0"
    assert survives(sealed(nested)) is None
    for place in range(5):  # version, session, kind, and the two fields of a Acknowledgement
        parts = [b"\x03", b"\xa1s", b"\x05", b"\x93\x00\x00\x00", b"\xa0"]
        parts[place] = nested
        assert survives(sealed(b"\x95" + b"".join(parts))) is None


@pytest.mark.parametrize("version", [0, 1, -1, True, 1.0, "1", b"\x01", None, [1]], ids=repr)
def test_another_version_is_refused_by_its_name(version: Any) -> None:
    text = refusal(pack([version, SESSION, 7, "0" * 16]))
    assert "protocol version" in text and f"uses {serialization.VERSION}" in text


@pytest.mark.parametrize("session", ["", "x" * 33, 7, None, b"abc", ["a"]], ids=repr)
def test_a_lie_about_the_session_is_refused(session: Any) -> None:
    assert "session" in refusal(pack([serialization.VERSION, session, 7, "0" * 16]))


@pytest.mark.parametrize(
    "kind", [-1, len(serialization.KINDS), 255, True, False, 0.0, "0", None, [0]], ids=repr
)
def test_an_unknown_kind_is_refused(kind: Any) -> None:
    assert "kind" in refusal(pack([serialization.VERSION, SESSION, kind, "0" * 16]))


def test_an_error_names_the_field() -> None:
    assert refusal(pack([serialization.VERSION, SESSION, 5, [0, 0, -1, 2], ""])).startswith(
        "Acknowledgement.key: Key.local_round: -1 is not a count"
    )
    assert refusal(
        pack(
            [
                serialization.VERSION,
                SESSION,
                0,
                "dozing",
                "device",
                "",
                0,
                "",
                "",
                "",
                False,
                [],
                0.0,
                "",
                0,
                0,
            ]
        )
    ) == ("Presence.state: 'dozing' is not a NodeState")


def test_an_error_is_short_whatever_it_quotes() -> None:
    for value in ("x" * 100_000, b"x" * 100_000, [[0] * 1000] * 100, 2**64 - 1):
        for place in range(5):
            tree: list[Any] = [serialization.VERSION, SESSION, 5, [0, 0, 0], ""]
            tree[place] = value
            if place == 4 and isinstance(value, str):
                continue  # a long reason is a reason
            assert len(refusal(pack(tree))) < 200


def test_numbers_at_the_caps_pass_and_above_are_refused() -> None:
    key = Key(serialization.MAX_INT, 0, serialization.MAX_INT)
    most = messages.Acknowledgement(key, "")
    assert survives(serialization.encode(most, SESSION)) == most
    assert (
        survives(pack([serialization.VERSION, SESSION, 5, [serialization.MAX_INT + 1, 0, 0], ""]))
        is None
    )


def test_what_begins_as_no_list_is_no_message() -> None:
    body = pack([serialization.VERSION, SESSION, 0])[serialization.DIGEST_BYTES :]
    with pytest.raises(WireError, match=r"^not a message$"):
        serialization.decode(sealed(b"\x83" + body[1:]))  # a table


def test_long_lists_and_texts_are_refused() -> None:
    few = SenderBounds(nodes=3)
    reports = messages.Reports(tuple(ChildReport(f"device-{i}") for i in range(200)))
    assert serialization.decode(serialization.encode(reports, SESSION))[1] == reports
    with pytest.raises(TooLarge):
        serialization.decode(serialization.encode(reports, SESSION), sender=few)
    with pytest.raises(WireError, match="not msgpack"):
        serialization.decode(
            pack([serialization.VERSION, SESSION, 8, [None] * (serialization.ITEMS + 4)]),
            sender=few,
        )
    nonce = messages.Question("x" * 64, About.ENTRY)
    assert survives(serialization.encode(nonce, SESSION)) == nonce
    assert refusal(serialization.encode(messages.Question("x" * 65, About.ENTRY), SESSION)) == (
        "Question.nonce: a text of 65 characters, at most 64 are possible"
    )
    assert "at most 64" in refusal(
        serialization.encode(messages.Question("x" * 54 + "\x1b" * 2, About.ENTRY), SESSION)
    )
    most = messages.Announcement("x" * JSON_MOST, "y" * JSON_MOST)
    assert survives(serialization.encode(most, SESSION)) == most
    assert "at most 4000000" in refusal(
        serialization.encode(messages.Announcement("x" * (JSON_MOST + 1), ""), SESSION)
    )


def test_a_text_for_people_is_cut() -> None:
    for text, kept in [("x" * 1500, "x" * 1000), ("\x1b" * 500, (r"\u001b" * 500)[:1000])]:
        message = survives(serialization.encode(messages.Declined(Key(0, 0, 0), text), SESSION))
        assert message == messages.Declined(Key(0, 0, 0), kept)


# Sizes


LARGEST = {
    int: serialization.MAX_INT,
    float: math.pi,
    bool: True,
    bytes: b"",
    Manifest: Manifest("0" * 16, 1024, 1024, b"d" * 8, "c" * 64, "l" * 64, "0" * 16, 1024),
    messages.Target: messages.Target("x" * 64, f"https://{'x' * 253}:65535"),
}


def largest(hint: Any, *, nodes: int) -> Any:
    """Return the value of a field that takes the most bytes, texts of JSON and blobs aside."""
    if get_origin(hint) is Annotated:
        limit = hint.__metadata__[0]
        return "x" * limit.most if limit.most <= 1000 else ""
    if get_origin(hint) is UnionType or hint in LARGEST:
        return LARGEST.get(hint)
    if get_origin(hint) is tuple:
        item = get_args(hint)[0]
        bounded = {
            Traffic: TIERS_MOST,
            messages.LinkBytes: TIERS_MOST,
            messages.ChildStatus: NAMED_MOST,
        }
        bounded |= dict.fromkeys((Finding, messages.ChildCount), serialization.ITEMS)
        count = bounded.get(item, nodes)
        return (largest(item, nodes=nodes),) * count
    if issubclass(hint, StrEnum):
        return max(hint, key=len)
    hints = get_type_hints(hint, include_extras=True)
    return hint(*(largest(hints[name], nodes=nodes) for name in hints))


@pytest.mark.parametrize("nodes", [0, 100])
@pytest.mark.parametrize("kind", serialization.KINDS, ids=lambda kind: kind.__name__)
def test_the_largest_message_of_each_kind_is_within_its_limit(
    kind: type[messages.Message], nodes: int
) -> None:
    """Of a node with a manifest of one chunk, no model inside, and no JSON."""
    bounds = SenderBounds(
        nodes=nodes,
        blob_bytes=1024,
        inline_bytes=0,
        frozen_bytes=1024,
        plans=False,
        announces=False,
    )
    message = largest(kind, nodes=nodes)
    tiers = getattr(message, "below", ())
    if tiers and len(tiers) > nodes:
        message = replace(message, below=tiers[:nodes])  # a tier has a node at least
    body = serialization.encode(message, "s" * 32)
    assert len(body) <= bounds.most(kind) <= max(4 * len(body), SMALL_BYTES + NOISE_CHUNKS_MOST * 8)
    assert serialization.decode(body, sender=bounds)[1] == message


def test_each_part_of_a_message_has_its_room() -> None:
    few = SenderBounds(
        nodes=0, blob_bytes=0, inline_bytes=0, frozen_bytes=0, plans=False, announces=False
    )
    for more, kinds, room in [
        ({"blob_bytes": 1024 * 1000}, {messages.Task, messages.Result}, 8 * 1000),
        ({"inline_bytes": 5000}, {messages.Task, messages.Result}, 5000),
        ({"frozen_bytes": 1024 * 1000}, {messages.FrozenOffered}, 8 * 1000),
        ({"plans": True}, {messages.Result}, JSON_MOST),
        ({"announces": True}, {messages.Alive, messages.Announcement}, 2 * JSON_MOST),
    ]:
        fields: dict[str, Any] = {
            "nodes": 0,
            "blob_bytes": 0,
            "inline_bytes": 0,
            "frozen_bytes": 0,
            "plans": False,
            "announces": False,
            **more,
        }
        bounds = SenderBounds(**fields)
        grown = {kind: bounds.most(kind) - few.most(kind) for kind in serialization.KINDS}
        assert all(grown[kind] >= room for kind in kinds)
        assert {kind for kind, by in grown.items() if by} - kinds <= {messages.Ask}


def test_a_diverged_loss_is_received() -> None:
    manifest = Manifest("0" * 16, 1, 1024, b"d" * 8, "fp32", "l")
    result = messages.Result(
        Key(0, 0, 0), manifest, None, Work(1, math.nan, 1, 1, math.inf, 0.0, 0.0), 1, (), ""
    )
    decoded = survives(serialization.encode(result, SESSION))
    assert (
        isinstance(decoded, messages.Result)
        and math.isnan(decoded.loss)
        and decoded.work.train_s == math.inf
    )


def test_traffic_adds_and_subtracts_field_by_field() -> None:
    one = Traffic(1, 2, 3, 4, 5, 6, 7, 8)
    other = Traffic(10, 20, 30, 40, 50, 60, 70, 80)
    assert one + other == Traffic(11, 22, 33, 44, 55, 66, 77, 88)
    assert (one + other) - other == one
    assert one.sent == 2 + 4 and one.received == 6 + 8


WIRES = st.builds(
    TcpStats, *[st.integers(0, 2**50)] * 6, *[st.integers(0, 3)] * 3, *[st.integers(0, 10**6)] * 2
)


@given(WIRES, WIRES, WIRES)
def test_connections_add_up_in_any_grouping(one: TcpStats, two: TcpStats, three: TcpStats) -> None:
    assert (one + two) + three == one + (two + three)
    assert TcpStats() + one == one + TcpStats() == one
    both = one + two
    assert (both.sent, both.received) == (one.sent + two.sent, one.received + two.received)
    assert both.rtt_us in (one.rtt_us, two.rtt_us) and both.rtt_min_us in (
        one.rtt_min_us,
        two.rtt_min_us,
    )
    assert both.measured == (
        one.connections + two.connections > 0 and not one.unmeasured + two.unmeasured
    )


@given(WIRES, WIRES)
def test_what_was_carried_since_is_no_more_and_no_less(before: TcpStats, since: TcpStats) -> None:
    found = (before + since) - before
    assert (found.sent, found.received) == (since.sent, since.received)
    assert (found.retransmitted, found.retransmitted_segments) == (
        since.retransmitted,
        since.retransmitted_segments,
    )
    assert (found.sent_segments, found.received_segments) == (
        since.sent_segments,
        since.received_segments,
    )
    # a kernel that no longer reports: a message has no negative count
    backward = before - (before + since)
    assert (backward.sent, backward.received, backward.retransmitted) == (0, 0, 0)


def test_the_least_round_trip_counts_only_where_there_is_one() -> None:
    assert (
        (TcpStats(rtt_us=30, rtt_min_us=9) + TcpStats()).rtt_min_us
        == (TcpStats() + TcpStats(rtt_min_us=9)).rtt_min_us
        == 9
    )
    assert TcpStats(rtt_us=30, rtt_min_us=9) + TcpStats(rtt_us=20, rtt_min_us=12) == TcpStats(
        rtt_us=20, rtt_min_us=9
    )


# Manifest


GOOD = Manifest("0123456789abcdef", 2500, 1024, b"d" * 24, "fp32", "layout")


@pytest.mark.parametrize(
    ("lie", "reports"),
    [
        ({"blob": "0123456789ABCDEF"}, "hexadecimal"),
        ({"blob": "0123456789abcde"}, "hexadecimal"),
        ({"blob": "0123456789abcde+"}, "hexadecimal"),
        ({"blob": ""}, "hexadecimal"),
        ({"reference": "0123456789abcde"}, "hexadecimal"),
        ({"reference": "no"}, "blob id 'no' is not 16 hexadecimal"),
        ({"size": 0, "digests": b""}, "no bytes"),
        ({"chunk_bytes": 1023, "digests": b"d" * 24}, "is outside 1024"),
        ({"chunk_bytes": 4_000_001, "digests": b"d" * 8}, "is outside 1024"),
        ({"chunk_bytes": 0}, "outside"),
        ({"digests": b"d" * 23}, "23 digest bytes for 3 chunks"),
        ({"digests": b"d" * 32}, "32 digest bytes for 3 chunks"),
        ({"digests": b""}, "0 digest bytes for 3 chunks"),
        ({"extras": 2501}, "2501 bytes of extras in a blob of 2500"),
        (
            {"size": serialization.MAX_INT, "chunk_bytes": messages.MAX_CHUNK_BYTES},
            "digest bytes for",
        ),
    ],
)
def test_a_manifest_beyond_its_caps_is_refused(lie: dict[str, Any], reports: str) -> None:
    with pytest.raises(WireError, match=reports):
        replace(GOOD, **lie)
    values = {**{f.name: getattr(GOOD, f.name) for f in fields(GOOD)}, **lie}
    assert reports in refusal(
        pack(
            [serialization.VERSION, SESSION, 2, [0, 0, 0, 2], 1, list(values.values()), None, False]
        )
    )


@pytest.mark.parametrize(
    "most",
    [
        {"size": 1, "digests": b"d" * 8},
        {"chunk_bytes": 4_000_000, "digests": b"d" * 8},
        {"extras": 2500},
        {"reference": "f" * 16},
    ],
    ids=str,
)
def test_a_manifest_at_its_caps_is_accepted(most: dict[str, Any]) -> None:
    manifest = replace(GOOD, **most)
    assert all(getattr(manifest, name) == value for name, value in most.items())


@given(manifest=manifests())
def test_the_chunks_of_a_manifest_tile_the_blob(manifest: Manifest) -> None:
    spans = [manifest.span(index) for index in range(manifest.chunks)]
    assert spans[0].start == 0 and spans[-1].stop == manifest.size
    assert all(one.stop == other.start for one, other in pairwise(spans))
    assert all(0 < span.stop - span.start <= manifest.chunk_bytes for span in spans)


def test_a_presence_task_and_progress_by_hand() -> None:
    """The bytes that another release must still read."""
    assert serialization.encode(Presence(NodeState.READY, "device", samples=7), "s") == (
        bytes.fromhex("853ff258f9dc48b1")
        + b"\xdc\x00\x10\x04\xa1s\x00\xa5ready\xa6device\xa0\x07\xa0\xa0\xa0\xa0\x90"
        + b"\xcb\xbf\xf0\x00\x00\x00\x00\x00\x00\xa0\x00\x00"
    )
    task = Task(Key(1, 2, 3), 4, replace(GOOD, size=1, digests=b"d" * 8), None, 5)
    assert serialization.encode(task, "s") == (
        bytes.fromhex("294fdbcbcdb53ea5")
        + b"\x98\x04\xa1s\x02\x94\x01\x02\x03\x02\x04\x98\xb00123456789abcdef\x01\xcd\x04\x00\xc4\x08ddddddddd"[
            :-1
        ]
        + b"\xa4fp32\xa6layout\xa0\x00\xc0\x05"
    )
    progress = Progress(Key(0, 0, 0), Phase.TRAINING, 1, 2, Traffic(), (Traffic(),))
    assert serialization.encode(progress, "s") == (
        bytes.fromhex("4701b13a022bfee5")
        + b"\x99\x04\xa1s\x03\x94\x00\x00\x00\x02\xa8training\x01\x02"
        + (b"\xdc\x00\x11" + bytes(16) + b"\x9b" + bytes(11))
        + (b"\x91\xdc\x00\x11" + bytes(16) + b"\x9b" + bytes(11))
    )


# Topics

LAB = "lab"
RUNS = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_.]{0,30}-[A-Za-z0-9_.-]{0,30}", fullmatch=True)


@given(
    lab=NAMES,
    run=RUNS,
    names=st.tuples(NAMES, NAMES),
    blob=st.from_regex(r"[0-9a-f]{16}", fullmatch=True),
    index=st.integers(0, 10**9 - 1),
    number=st.integers(0, 10**18 - 1),
)
def test_topics_are_parsed_as_they_were_built(
    lab: str, run: str, names: tuple[str, str], blob: str, index: int, number: int
) -> None:
    node, peer = names
    assert topics.parse(topics.state(lab, run, node)) == topics.StateTopic(lab, run, node)
    assert topics.parse(topics.spec(lab, run, node)) == topics.SpecTopic(lab, run, node)
    assert topics.parse(topics.inbox(lab, run, node, peer)) == topics.InboxTopic(
        lab, run, node, peer
    )
    assert topics.parse(topics.ask(lab, node, peer)) == topics.AskTopic(lab, node, peer)
    chunk = topics.chunk(lab, run, node, peer, blob, index, number)
    assert topics.parse(chunk) == topics.ChunkTopic(lab, run, node, peer, blob, index, number)


LEVELS = [
    "fs1",
    "lab",
    "r-1",
    "ask",
    "state",
    "spec",
    "inbox",
    "blob",
    "all",
    "0" * 16,
    "7",
    "",
    "+",
    "#",
    "n",
]


@examples(500)
@given(levels=st.lists(st.one_of(st.sampled_from(LEVELS), st.text(max_size=4)), max_size=9))
def test_any_levels_are_a_topic_or_a_wire_error(levels: list[str]) -> None:
    text = "/".join(["fs1", *levels])
    try:
        topic = topics.parse(text)
    except WireError:
        return
    assert topic.lab == levels[0] == topics.check_lab(topic.lab)
    match topic:
        case topics.StateTopic(lab, run, node):
            rebuilt = topics.state(lab, run, node)
        case topics.SpecTopic(lab, run, node):
            rebuilt = topics.spec(lab, run, node)
        case topics.InboxTopic(lab, run, node, sender):
            rebuilt = topics.inbox(lab, run, node, sender)
        case topics.ChunkTopic(lab, run, node, lane, blob, index, number):
            rebuilt = topics.chunk(lab, run, node, lane, blob, index, number)
        case topics.AskTopic(lab, parent, child):
            rebuilt = topics.ask(lab, parent, child)
    assert topics.parse(rebuilt) == topic


@pytest.mark.parametrize(
    "text",
    [
        "fs2/l/r-1/n/state", "fs1/l/r-1/n/state/", "fs1/l/r-1/n/state\n", " fs1/l/r-1/n/state",
        "fs1/l/r-1//state",
        "fs1//r-1/n/state", "fs1/+/r-1/n/state", "fs1/#", "fs1/-l/r-1/n/state", "fs1/ñ/r-1/n/state",
        "fs1/l /r-1/n/state",
        f"fs1/{'l' * 65}/r-1/n/state", "fs1/r-1/n/state", "fs1/r-1/n/inbox/m",
        "fs1/l/+/n/state", "fs1/l/r/n/state", "fs1/l/ask/n/inbox/m", f"fs1/l/{'r-' * 33}/n/state",
        "fs1/l/-r/n/state",
        "fs1/l/r-1/-n/state", "fs1/l/r-1/n/inbox", "fs1/l/r-1/n/inbox/a/b",
        f"fs1/l/r-1/{'n' * 65}/state",
        "fs1/l/r-1/ñ/state", "fs1/l/ask/n", "fs1/l/ask/n/", "fs1/l/ask/n/+", "fs1/l/ask/n/m/x",
        "fs1/ask/n/m",
        "fs1/l/r-1/n/blob/all/0123456789abcde/0/0", "fs1/l/r-1/n/blob/all/0123456789abcdef/-1/0",
        "fs1/l/r-1/n/blob/all/0123456789abcdef/0/٣",
        f"fs1/l/r-1/n/blob/all/0123456789abcdef/0/{'1' * 19}",
        "fs1/l/r-1/n/blob/all/0123456789abcdef/0", "$SYS/broker/uptime", "",
    ],
)  # fmt: skip
def test_topics_of_others_are_refused(text: str) -> None:
    with pytest.raises(WireError):
        topics.parse(text)


def test_no_name_of_a_node_makes_a_question_a_presence() -> None:
    assert topics.parse("fs1/ask/r-1/n/state") == topics.StateTopic("ask", "r-1", "n")
    assert topics.parse("fs1/l/ask/n/state") == topics.AskTopic("l", "n", "state")


@pytest.mark.parametrize("name", ["", "a/b", "+", "#", "a b", "-a", "a\n", "ñ", "x" * 65])
def test_a_lab_of_another_form_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"is not a lab name\. Use 1 to 64 letters") as caught:
        topics.check_lab(name)
    assert repr(name) in str(caught.value)


def test_a_receiver_subscribes_to_two_streams() -> None:
    streams = topics.streams(LAB, "r-1", "cloud", "device-1", "0123456789abcdef")
    assert streams == (
        "fs1/lab/r-1/cloud/blob/all/0123456789abcdef/+/+",
        "fs1/lab/r-1/cloud/blob/device-1/0123456789abcdef/+/+",
    )
    for stream, filter_ in zip(("all", "device-1"), streams, strict=True):
        sent = topics.chunk(LAB, "r-1", "cloud", stream, "0123456789abcdef", 3, 14)
        assert sent.startswith(filter_.removesuffix("+/+"))


# Codecs


def test_an_unknown_codec_is_a_wire_error() -> None:
    with pytest.raises(WireError, match="unknown codec 'zip'; known: fp32"):
        codec_of("zip")
    assert all(codec_of(name) is codec for name, codec in BUILT_IN.items())
