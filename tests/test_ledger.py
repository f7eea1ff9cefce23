"""A parent's byte ledger over restarts of its children and of itself."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.accounting.child_report import ChildReport
from common.accounting.counters import Account
from common.accounting.ledger import BYTES_MOST, Ledger
from common.accounting.traffic import TcpStats, Traffic
from common.errors import WireError

BELOW = {"child": ("device",)}


def down(count: int) -> Traffic:
    """Return a link on which a child received so many bytes of models."""
    wire = TcpStats(sent=3 * count, received=5 * count)
    return Traffic(received_model_payload=count, received_model_message=count, wire=wire)


# Processes of a child: what each counts at each of its messages, growing within a process.
PROCESSES = st.lists(st.lists(st.integers(0, 1000), min_size=1, max_size=4).map(sorted), min_size=1, max_size=4)


@given(PROCESSES, st.sets(st.integers(0, 15)))
def test_totals_are_the_sum_of_the_processes_whenever_the_parent_is_restarted(
    processes: list[list[int]], restarts: set[int]
) -> None:
    ledger = Ledger(["child"], Account(), below=BELOW)
    messages = [(f"process-{i}", count) for i, counts in enumerate(processes) for count in counts]
    for number, (session, count) in enumerate(messages):
        ledger.enter("child", session, link=down(count), below=down(2 * count))
        ledger.enter_reports("child", session, [ChildReport("device", samples=7, traffic=down(3 * count))])
        if number in restarts:
            books = ledger.to_json()
            ledger = Ledger(["child"], Account(), below=BELOW)
            ledger.restore(books)
    total = sum(counts[-1] for counts in processes)
    assert ledger.links()["child"].sent_model_payload == total
    assert ledger.links()["child"].wire == TcpStats(sent=3 * total, received=5 * total)
    assert ledger.below() == down(2 * total)
    assert ledger.brokers() == {"child": TcpStats(sent=6 * total, received=10 * total)}
    (report,) = ledger.reports()["child"]
    assert report == ChildReport("device", samples=7, traffic=down(3 * total))


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


@pytest.mark.parametrize(
    "lie", [Traffic(sent_model_payload=BYTES_MOST + 1), Traffic(wire=TcpStats(retransmitted=BYTES_MOST + 1))]
)
def test_counts_that_cannot_be_are_refused(lie: Traffic) -> None:
    ledger = Ledger(["child"], Account())
    for link, below in ((lie, Traffic()), (Traffic(), lie)):
        with pytest.raises(WireError, match="child counts more bytes than there are"):
            ledger.enter("child", "s", link=link, below=below)
    assert ledger.links()["child"] == Traffic()


def test_a_child_reports_on_its_own_children_alone() -> None:
    ledger = Ledger(["child", "other"], Account(), below=BELOW | {"other": ("its-device",)})
    reports = [ChildReport(name, samples=7, traffic=down(5)) for name in ("device", "its-device", "child", "x" * 5000)]
    for session in ("s", "t"):
        ledger.enter_reports("child", session, reports)
    ((report,), others) = ledger.reports().values()
    assert report.name == "device" and report.traffic == down(10) and others == ()


def test_ten_thousand_names_below_a_child_leave_nothing() -> None:
    ledger = Ledger(["child"], Account(), below=BELOW)
    for number in range(1000):
        ledger.enter_reports("child", f"s{number}", [ChildReport(f"d{number}-{i}", traffic=down(1)) for i in range(10)])
    assert ledger.reports() == {"child": ()} and len(ledger.to_json()) < 2000
