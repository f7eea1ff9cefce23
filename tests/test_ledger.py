"""A parent's byte ledger over restarts of its children and of itself."""

from __future__ import annotations

from uuid import uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedstrata.common.accounting.child_report import ChildReport
from fedstrata.common.accounting.counters import Account
from fedstrata.common.accounting.ledger import BYTES_MOST, Ledger, Mark
from fedstrata.common.accounting.traffic import BYTES, TcpStats, Traffic
from fedstrata.common.accounting.work import Work
from fedstrata.common.errors import WireError
from fedstrata.common.protocol import serialization
from fedstrata.common.protocol.messages import Farewell, Reports

BELOW = {"child": ("device",)}


def down(count: int) -> Traffic:
    """Return a link on which a child received so many bytes of models."""
    wire = TcpStats(sent=3 * count, received=5 * count)
    return Traffic(received_model_payload=count, received_model_message=count, wire=wire)


class _Counter:
    """A process that counts: a device, or a parent of nodes with these names."""

    def __init__(self, *below: str) -> None:
        self.session = uuid4().hex
        self.counted = Traffic()
        self.ledger = Ledger(below[:1], Account(), below={below[0]: below[1:]} if below else {})
        self.marks: dict[Ledger, Mark] = {}

    def mark(self) -> Mark:
        """Return what it begins with for a parent's ledger: nothing for its first."""
        return Mark(Traffic(), self.ledger.tiers(), self.ledger.reports()) if self.marks else Mark()


# Processes of a child: what each counts at each of its messages, growing within a process.
PROCESSES = st.lists(
    st.lists(st.integers(0, 1000), min_size=1, max_size=4).map(sorted), min_size=1, max_size=4
)


@given(PROCESSES, st.sets(st.integers(0, 15)))
def test_totals_are_the_sum_of_the_processes_whenever_the_parent_is_restarted(
    processes: list[list[int]], restarts: set[int]
) -> None:
    ledger = Ledger(["child"], Account(), below=BELOW)
    messages = [(f"process-{i}", count) for i, counts in enumerate(processes) for count in counts]
    for number, (session, count) in enumerate(messages):
        ledger.enter("child", session, link=down(count), below=(down(2 * count),))
        ledger.enter_reports(
            "child", session, [ChildReport("device", Work(7), traffic=down(3 * count))]
        )
        if number in restarts:
            books = ledger.to_json()
            ledger = Ledger(["child"], Account(), below=BELOW)
            ledger.restore(books)
    total = sum(counts[-1] for counts in processes)
    assert ledger.links()["child"].sent_model_payload == total
    assert ledger.links()["child"].wire == TcpStats(sent=3 * total, received=5 * total)
    assert ledger.tiers()[1:] == (down(2 * total),)
    reports = ledger.reports()
    assert list(reports) == ["child", "device"]
    assert reports["child"].broker == TcpStats(sent=6 * total, received=10 * total)
    assert reports["device"].traffic == down(3 * total)


@given(
    st.lists(
        st.tuples(st.sampled_from("ab"), st.sampled_from("123"), st.integers(0, 100)), max_size=30
    ),
    st.data(),
)
def test_the_sums_of_the_links_are_kept_whoever_restarts(
    messages: list[tuple[str, str, int]], data: st.DataObject
) -> None:
    """Messages of old sessions may come again, and those of one session in another order."""
    account = Account()
    ledger = Ledger("ab", account)
    for child, session, count in messages:
        account.add(child, "received", message=count + 5, model=count)
        account.add("others", "sent", message=count, control=count)
        ledger.enter(child, session, link=down(count))
        if data.draw(st.booleans()):
            kept, account = ledger.to_json(), Account()
            ledger = Ledger("ab", account)
            ledger.restore(kept)
        links = ledger.links().values()
        assert BYTES(ledger.tiers()[0]) == tuple(map(sum, zip(*map(BYTES, links), strict=True)))


def test_what_arrived_here_is_kept_over_our_own_restarts() -> None:
    account = Account()
    account.add("child", "received", message=110, model=100)
    ledger = Ledger(["child"], account, wire=lambda: TcpStats(sent=7, connections=1))
    later_account = Account()
    later = Ledger(["child"], later_account, wire=lambda: TcpStats(sent=5, connections=2))
    later.restore(ledger.to_json())
    assert later.broker() == TcpStats(sent=12, connections=3)
    later_account.add("child", "received", message=60, model=50)
    link = later.links()["child"]
    assert (link.received_model_payload, link.received_model_message) == (150, 170)


def test_of_children_that_left_the_last_thousand_are_counted() -> None:
    ledger = Ledger([], Account())
    for number in range(1001):
        ledger.add(f"device-{number}", parent="cloud")
        ledger.retire(f"device-{number}")
    assert [*ledger.links()] == [f"device-{number}" for number in range(1, 1001)]


@pytest.mark.parametrize(
    "lie",
    [
        Traffic(sent_model_payload=BYTES_MOST + 1),
        Traffic(wire=TcpStats(retransmitted=BYTES_MOST + 1)),
    ],
)
def test_counts_that_cannot_be_are_refused(lie: Traffic) -> None:
    ledger = Ledger(["child"], Account(), below=BELOW)
    for link, below in ((lie, ()), (Traffic(), (lie,))):
        with pytest.raises(WireError, match="child counts more bytes than there are"):
            ledger.enter("child", "s", link=link, below=below)
    for report in (
        ChildReport("device", traffic=lie),
        ChildReport("device", broker=lie.wire, traffic=lie),
    ):
        with pytest.raises(WireError, match="child counts more bytes than there are"):
            ledger.enter_reports("child", "s", [report])
    assert ledger.links()["child"] == Traffic() and list(ledger.reports()) == ["child"]


def test_a_child_counts_no_more_tiers_than_it_has_nodes() -> None:
    ledger = Ledger(["child", "device"], Account(), below=BELOW)
    with pytest.raises(WireError, match="child counts 2 tiers below it"):
        ledger.enter("child", "s", link=Traffic(), below=(Traffic(), Traffic()))
    with pytest.raises(WireError, match="device counts 1 tiers below it"):
        ledger.enter("device", "s", link=Traffic(), below=(Traffic(),))


@given(
    st.lists(
        st.tuples(st.sampled_from(["device", "institution", "region"]), st.integers(1, 100)),
        max_size=30,
    )
)
def test_the_links_of_four_layers_are_counted_once_whoever_restarts(
    steps: list[tuple[str, int]],
) -> None:
    """Each step adds bytes to the lowest link, or restarts a node; all is reported upward before
    and after it.
    """
    device, institution, region = _Counter(), _Counter("device"), _Counter("institution", "device")
    cloud = Ledger(["region"], Account(), below={"region": ("institution", "device")})
    total = 0

    def report() -> None:
        institution.ledger.enter("device", device.session, link=device.counted)
        for child, parent, name in (
            (institution, region.ledger, "institution"),
            (region, cloud, "region"),
        ):
            mark = child.marks.setdefault(parent, child.mark())
            parent.enter(
                name, child.session, link=Traffic(), below=mark.since(child.ledger.tiers())
            )
            parent.enter_reports(
                name, child.session, mark.reports_since(child.ledger.reports().values())
            )

    for who, count in steps:
        report()
        if who == "device":
            device.counted, total = device.counted + down(count), total + count
        elif who == "institution":
            device.counted = Traffic()  # it counts from zero for the new ledger
            institution = _Counter("device")
        else:
            region = _Counter("institution", "device")
    report()
    assert cloud.reports()["device"].traffic.sent_model_payload == total
    assert cloud.tiers()[2].sent_model_payload == total


def test_a_child_reports_on_its_own_children_alone() -> None:
    ledger = Ledger(["child", "other"], Account(), below=BELOW | {"other": ("its-device",)})
    reports = [
        ChildReport(name, Work(7), traffic=down(5))
        for name in ("device", "its-device", "child", "x" * 5000)
    ]
    for session in ("s", "t"):
        ledger.enter_reports("child", session, reports)
    assert ledger.reports().keys() == {"child", "other", "device"}
    assert ledger.reports()["device"].traffic == down(10)


def test_ten_thousand_names_below_a_child_leave_nothing() -> None:
    ledger = Ledger(["child"], Account(), below=BELOW)
    for number in range(1000):
        ledger.enter_reports(
            "child",
            f"s{number}",
            [ChildReport(f"d{number}-{i}", traffic=down(1)) for i in range(10)],
        )
    assert ledger.reports() == {"child": ChildReport("child")} and len(ledger.to_json()) < 2000


@given(st.lists(st.integers(0, 100), min_size=2, max_size=2), st.integers(0, 2))
def test_a_child_that_counts_less_than_before_makes_no_count_negative(
    counts: list[int], tiers: int
) -> None:
    before, now = map(down, counts)
    mark = Mark(
        before,
        (before,) * tiers,
        {"device": ChildReport("device", traffic=before, broker=before.wire)},
    )
    (report,) = mark.reports_since([ChildReport("device", traffic=now, broker=now.wire)])
    found = Farewell(now - mark.link, mark.since((now, now)))
    for message in (found, Reports((report,))):
        assert serialization.decode(serialization.encode(message, "s"))[1] == message
    assert found.traffic == down(max(0, counts[1] - counts[0]))
    assert found.below == (found.traffic,) * tiers + (now,) * (2 - tiers)
