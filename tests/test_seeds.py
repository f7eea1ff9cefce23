"""Drawn labs: every seed plays a lab with faults beside its undisturbed twin, and the invariants hold."""

from __future__ import annotations

import os
from itertools import accumulate
from math import inf

import pytest

from deploy.simulation.outcome import LabOutcome
from tests.simulation.drawn import draw_lab
from tests.simulation.faults import Fault, FaultKind, longest_s
from tests.simulation.kills import kill_at
from tests.simulation.losses import ENDING_S, copes_with_a_loss, spends_few_deadlines
from tests.simulation.monitor import Evidence, LabRun
from tests.simulation.permanent import KINDS
from tests.simulation.report import describe, summary
from tests.simulation.runs import SeedReport, run_seed, run_seeds

SEEDS = (
    4,
    5,
    6,
    8,
    19,
    100_001,
    200_001,
)  # newer methods, devices that keep vectors (the last two); 4 and 19 have a permanent fault; others play 0, 7, 14, 24
MANY = (
    *range(4),
    *range(10_000, 12_000),
    *range(100_000, 100_400),
    *range(200_000, 200_100),
    *range(300_000, 300_060),
    *range(400_000, 400_100),
    *range(500_000, 500_100),
)
FOUND = (
    83,  # a task and the end of the run come at once: the child began the task, and never ended
    177,  # a device restarts while its link is measured: the institution waited for idle_s
    188,  # the parent's last presence is damaged: the child waited for ever
    207,  # a device is stopped as the run ends: the institution had cleared its state from the broker
    1202,  # a second institution, refused on one broker, answered for the first on the other: a device believed it
    1337,  # an institution of many lost what its rule remembers, and went on with a wrong model
    1378,  # an institution's broker was away when the run ended: its devices never learned of it
    1488,  # the broker was away when the run ended, and came back empty
    2255,  # the cloud supersedes a task: an upload came for the round that was cancelled, and the institution crashed
    10243,  # a device's first messages were all damaged: its institution never learned of it
    11801,  # a device is stopped until the run is over, and a second one takes its place
    21331,  # for 7 s every second message is damaged: six chunks in 5 s ended the run
    23620,  # a second node ends in another way than by its name: the simulator's supervisor died of it
    28702,  # a second node began while its name's device was to hang, and hung for ever
    25416,  # a child's session changed twice at once: its upload was read from a buffer that was never written
    40201,  # a second node takes the place of one with a slow link, and ends before that one learns of it
    51232,  # two second nodes of one name, one after the other
    53582,  # a node's two connections to one broker had the same client id, and ended each other for ever
    62800,  # a link's measurement ran out of time at the moment in which its child was lost
    13856,  # a presence lost as the broker came back: its parent waited for a child that sent and was answered
    14728,  # a stranger's presence had another count of samples, in the 20 ms in which Tempo decided by it
    15941,  # the end of a run is lost, and its nodes blamed a broker that had come back long ago
    12640,  # a stranger's count came first, and the question about it was forgotten with the next message
    63447,  # an uplink far slower than declared: all else waited behind the noise for idle_s
    100108,  # an institution selected by losses lost its rule's state, and could not know that it had one
    11832,  # the cloud began anew at its first round, and its institution counted tasks of rounds yet to come
    200252,  # a device without files had its last vectors alone, and the result that they led to was refused
    200337,  # the same, of results that came too late
    2102,  # links that nobody declared are slow: their measurement had too little patience
    850021,  # a device was away while its parent gave up: it ended as if the run were over, so nobody started it again
    401243,  # a second institution without the first one's state failed before it learned that the name was taken
)
PERMANENT = (
    134,  # a broker comes back with an old store, in which a device that was killed for good is READY
    840_039,  # a device is killed while another is away by its trace, without which there is no quorum
)


def violations(seeds: list[int]) -> list[str]:
    reports = list(run_seeds(seeds, jobs=min(2, os.cpu_count() or 1)))
    print(summary(reports, real_s=sum(report.real_s for report in reports)))
    return [f"seed {report.seed}: {name}: {wrong}" for report in reports for name, wrong in report.violations]


def test_drawn_labs_hold_what_is_promised() -> None:
    assert violations([*PERMANENT, *SEEDS]) == []


@pytest.mark.slow
def test_labs_that_found_faults_hold_what_is_promised() -> None:
    assert violations([*FOUND]) == []


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_many_drawn_labs_hold_what_is_promised() -> None:
    assert violations(list(MANY)) == []


def test_a_cloud_that_is_killed_after_the_last_global_round_does_not_wait_for_children_that_left() -> None:
    assert [wrong for number in (292, 300, 318) if (wrong := kill_at(0, ("cloud", number)))] == []


def test_a_seed_draws_the_same_lab_and_gives_the_same_report() -> None:
    assert draw_lab(7) == draw_lab(7) != draw_lab(8)
    first, second = run_seed(7), run_seed(7)
    assert (first.virtual_s, first.gap_s, first.violations) == (second.virtual_s, second.gap_s, ())
    assert "devices" in describe(7)


def test_a_reduced_seed_plays_fewer_faults() -> None:
    seed = next(seed for seed in range(5, 100) if len(draw_lab(seed).faults) > 2)
    report = run_seed(seed, only={0, 2})
    assert report.faults == (draw_lab(seed).faults[0], draw_lab(seed).faults[2])


def test_the_longest_time_without_a_quiet_moment() -> None:
    def kill(at_s: float, for_s: float) -> Fault:
        return Fault(FaultKind.KILL, at_s, for_s, "device-0")

    assert longest_s((), keepalive_s=10) == 0.0
    assert longest_s((kill(5, 1),), keepalive_s=10) == pytest.approx(11.0)
    assert longest_s((kill(5, 1), kill(10, 2)), keepalive_s=10) == pytest.approx(17.0)
    assert longest_s((kill(5, 1), kill(50, 2)), keepalive_s=10) == pytest.approx(12.0)
    assert longest_s((Fault(FaultKind.STOP, 0.0, 3.0, "device-0"),), keepalive_s=10) == pytest.approx(33.0)
    assert longest_s((kill(5, 1), kill(7, inf)), keepalive_s=10) == pytest.approx(11.0)


# Permanent faults


def test_every_fifth_seed_has_one_permanent_fault_and_no_seed_that_once_failed() -> None:
    lasting = {seed: [fault for fault in draw_lab(seed).faults if fault.permanent] for seed in range(200)}
    assert [seed for seed, faults in lasting.items() if faults] == list(range(4, 200, 5))
    assert all(len(faults) <= 1 for faults in lasting.values())
    assert {faults[0].kind for faults in lasting.values() if faults} == set(KINDS)
    assert all(draw_lab(seed).permanent is None for seed in FOUND)
    assert "for ever kill device-6" in describe(PERMANENT[0])


def test_labs_of_the_newest_seeds_have_devices_that_leave_and_return() -> None:
    traces = [draw_lab(seed).experiment.availability.trace for seed in range(499_999, 500_040)]
    assert traces[0] is None and all(traces[1:])
    changes = [each for trace in traces if trace is not None for each in trace.changes.values()]
    assert {each[0] > 0 for each in changes} == {True, False} and all(len(each) % 2 for each in changes)
    assert {draw_lab(seed).timed for seed in range(500_000, 500_020)} == {
        True,
        False,
    }  # the latter's models are compared
    assert "leaves" in describe(500_000) and "leaves" not in describe(499_999)


@pytest.mark.parametrize(("seed", "failed"), [(14, False), (24, True)], ids=["a quorum without it", "it is needed"])
def test_a_lab_without_one_device_finishes_or_ends_in_time(seed: int, failed: bool) -> None:
    report = run_seed(seed)
    assert report.violations == () and report.failed is failed


def played(seed: int, *, closed_s: list[float], failed_s: float | None = None) -> LabRun:
    """Return a run of a seed's lab, in which the permanent fault began after 1 s."""
    error = "NoProgress: no child is left"
    outcome = LabOutcome(
        result="ok" if failed_s is None else f"failed: cloud: {error}",
        ended={"cloud": "" if failed_s is None else error}, digest="", virtual_s=500.0, messages=0, trace="",
        trainings=0, errors=(), warnings=(), faults=((1.0, str(draw_lab(seed).permanent)),), rounds=(),
    )  # fmt: skip
    return LabRun(outcome, Evidence(closed_s=closed_s, failed_s=failed_s))


def test_a_loss_excuses_no_failure_of_a_quorum_and_no_late_end() -> None:
    def wrong(seed: int, *, failed_s: float) -> str:
        run, twin = played(seed, closed_s=[5.0], failed_s=failed_s), played(seed, closed_s=[4.0, 8.0, 12.0])
        return copes_with_a_loss(draw_lab(seed), run, twin)

    assert wrong(14, failed_s=70.0).startswith("could continue without device")
    idle_s = draw_lab(24).experiment.transfer.idle_s
    assert wrong(24, failed_s=5.0 + idle_s + 20.0) == ""
    assert "after the loss" in wrong(24, failed_s=5.0 + idle_s + ENDING_S + 100.0)


def test_one_deadline_is_spent_on_a_known_loss() -> None:
    def wrong(seed: int, *deadlines: int) -> str:
        deadline_s = draw_lab(seed).experiment.institution.closing.deadline_s
        assert deadline_s is not None
        closed_s = list(accumulate(number * deadline_s + 4.0 for number in deadlines))
        return spends_few_deadlines(draw_lab(seed), played(seed, closed_s=closed_s), played(seed, closed_s=[4.0, 8.0]))

    assert wrong(19, 1, 0, 0) == "" != wrong(19, 1, 0, 1)
    assert wrong(19, 0, 2, 0).startswith("[0, 2, 0] deadlines")
    rounds = draw_lab(4).experiment.institution.rounds  # its device offers results, and serves no chunk
    assert wrong(4, rounds, rounds, rounds) == "" != wrong(4, rounds, rounds + 1, rounds)


@pytest.mark.parametrize("case", [("cloud", 90), ("institution-0", 60), ("device-0", 75)])
def test_a_kill_at_a_message_is_survived(case: tuple[str, int]) -> None:
    assert kill_at(0, case) == ""


def test_a_violation_is_reported_with_its_command(capsys: pytest.CaptureFixture[str]) -> None:
    from tests.simulation.report import print_report

    print_report(SeedReport(3, (("ends_as_documented", "stuck: device-0"),), (), 2, 10.0, 1.0))
    printed = capsys.readouterr().out
    assert "ends_as_documented: stuck: device-0" in printed and "--seed 3 --trace" in printed
