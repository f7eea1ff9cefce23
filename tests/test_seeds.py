"""Drawn labs: each plays with its faults beside its undisturbed twin, and the invariants hold."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from math import inf
from pathlib import Path

import pytest

from tests.helpers.examples import PROFILE, slow
from tests.simulation.attacked import ATTACKED
from tests.simulation.drawn import DrawnLab, draw_lab
from tests.simulation.fault_draws import LASTING
from tests.simulation.faults import Fault, FaultKind, longest_s
from tests.simulation.kills import kill_at
from tests.simulation.labs import LABS, kept_labs, read_lab, write_lab
from tests.simulation.losses import ENDING_S, copes_with_a_loss, spends_few_deadlines
from tests.simulation.monitor import Evidence, LabRun
from tests.simulation.mutations import MUTATIONS, mutated
from tests.simulation.outcome import LabOutcome
from tests.simulation.report import describe, print_report, summary
from tests.simulation.runs import LabReport, Source, check_lab, check_many, with_only

FEW = (0, 3, 9, 44, ATTACKED + 1)
LIED_TO = range(ATTACKED, ATTACKED + (300 if PROFILE == "thorough" else 12))
# `make simulate SEEDS=2000 FROM=20000` runs others
MANY = range(10_000, 10_300 if PROFILE == "thorough" else 10_030)
QUICK = ("old-store-with-a-dead-device", "lost-device-without-chunks")

# each with a lab that finds it
BUGS = {name: f"bug-{name.replace('_', '-')}" for name in MUTATIONS}


def kept(name: str) -> DrawnLab:
    return read_lab(LABS / f"{name}.toml")


def violations(sources: Sequence[Source], *, jobs: int = min(2, os.cpu_count() or 1)) -> list[str]:
    reports = list(check_many(sources, jobs=jobs))
    print(summary(reports, real_s=sum(report.real_s for report in reports)))
    return [
        f"{report.drawn.title}: {name}: {wrong}"
        for report in reports
        for name, wrong in report.violations
    ]


def test_drawn_labs_hold_what_is_promised() -> None:
    assert violations([*FEW, *(LABS / f"{name}.toml" for name in QUICK)], jobs=1) == []


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_labs_that_found_faults_hold_what_is_promised() -> None:
    assert violations(kept_labs()) == []


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_many_drawn_labs_hold_what_is_promised() -> None:
    assert violations(MANY) == []


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_drawn_labs_with_adversaries_hold_what_is_promised() -> None:
    assert violations(LIED_TO) == []


def test_labs_with_adversaries_are_those_of_smaller_seeds() -> None:
    attacks = set()
    for seed in range(40):
        drawn, plain = draw_lab(ATTACKED + seed), draw_lab(seed)
        attacks.update(table.attack.name for table in drawn.experiment.adversaries)
        honest = drawn.experiment.model_dump(mode="json")
        del honest["adversaries"]
        assert honest == plain.experiment.model_dump(mode="json") and drawn.faults == plain.faults
    assert len(attacks) > 7


def test_a_seed_draws_the_same_lab_and_gives_the_same_report() -> None:
    drawn = draw_lab(9)
    assert draw_lab(9) == drawn != draw_lab(8) and "devices" in describe(drawn)
    first, second = check_lab(drawn), check_lab(drawn)
    assert (first.virtual_s, first.gap_s, first.violations) == (second.virtual_s, second.gap_s, ())


def test_the_draw_has_labs_of_all_kinds() -> None:
    labs = [draw_lab(seed) for seed in range(300)]
    experiments = [drawn.experiment for drawn in labs]
    assert {len(experiment.tiers) for experiment in experiments} == {1, 2, 3}
    assert {drawn.timed for drawn in labs} == {True, False}  # the latter's models are compared
    assert {drawn.runs for drawn in labs} == {1, 2, 3} and {drawn.byte_s > 0 for drawn in labs} == {
        True,
        False,
    }
    assert {fault.kind for drawn in labs for fault in drawn.faults} == set(FaultKind)
    lasting = [[fault.kind for fault in drawn.faults if fault.permanent] for drawn in labs]
    assert all(len(kinds) <= 1 for kinds in lasting) and {
        kind for kinds in lasting for kind in kinds
    } == set(LASTING)
    traces = [experiment.availability.trace for experiment in experiments]
    changes = [each for trace in traces if trace is not None for each in trace.changes.values()]
    assert {each[0] > 0 for each in changes} == {True, False} and all(
        len(each) % 2 for each in changes
    )
    away = traces.index(next(filter(None, traces)))
    assert "leaves" in describe(labs[away]) and "leaves" not in describe(labs[traces.index(None)])


def test_a_tenth_of_the_labs_has_a_trainer_its_state_absences_and_deaths_together() -> None:
    labs = [draw_lab(seed) for seed in range(300)]
    together = [drawn for drawn in labs if drawn.has_everything]
    own = [drawn for drawn in labs if not drawn.experiment.training.trainer.learns_module]
    assert len(labs) / 10 <= len(together) < len(own)
    dying = {
        fault.node for drawn in together for fault in drawn.faults if fault.kind is FaultKind.WORKER
    }
    assert any(drawn.spool for drawn in together) and all(
        node.startswith("device-") for node in dying
    )


def test_a_worker_that_is_killed_costs_seconds_alone() -> None:
    """In the midst of the first training of one device, and after the last one of the other."""
    lab = kept("bug-retried-on-what-it-changed")
    late = Fault(FaultKind.WORKER, 3.5, 0.0, "device-1", 1.0)
    report = check_lab(replace(lab, faults=(*lab.faults, late)))
    assert not report.failed and report.violations == ()


def test_a_training_whose_workers_are_all_killed_ends_its_device() -> None:
    lab = kept("bug-retried-on-what-it-changed")
    report = check_lab(
        replace(lab, faults=tuple(replace(fault, amount=2.0) for fault in lab.faults))
    )
    assert report.failed and report.violations == ()


def test_a_lab_that_is_kept_is_read_as_it_was(tmp_path: Path) -> None:
    for seed in range(5):
        drawn = draw_lab(seed)
        file = tmp_path / f"lab-{seed}.toml"
        file.write_text(write_lab(drawn, why="a test"), encoding="utf-8")
        assert read_lab(file) == replace(drawn, name=f"lab-{seed}")


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_bug_that_is_put_back_is_found(name: str) -> None:
    with mutated(name):  # without it the lab holds: it is one of those that found faults
        assert check_lab(kept(BUGS[name])).violations


def test_a_lab_with_fewer_faults() -> None:
    drawn = next(drawn for drawn in map(draw_lab, range(100)) if len(drawn.faults) > 2)
    assert with_only(drawn, {0, 2}).faults == (drawn.faults[0], drawn.faults[2])


def test_the_longest_time_without_a_quiet_moment() -> None:
    def kill(at_s: float, for_s: float) -> Fault:
        return Fault(FaultKind.KILL, at_s, for_s, "device-0")

    assert longest_s((), keepalive_s=10) == 0.0
    assert longest_s((kill(5, 1),), keepalive_s=10) == pytest.approx(11.0)
    assert longest_s((kill(5, 1), kill(10, 2)), keepalive_s=10) == pytest.approx(17.0)
    assert longest_s((kill(5, 1), kill(50, 2)), keepalive_s=10) == pytest.approx(12.0)
    assert longest_s(
        (Fault(FaultKind.STOP, 0.0, 3.0, "device-0"),), keepalive_s=10
    ) == pytest.approx(33.0)
    assert longest_s((kill(5, 1), kill(7, inf)), keepalive_s=10) == pytest.approx(11.0)


# Permanent faults


LOST = (("lost-device-quorum", False), ("lost-device-needed", True))


@pytest.mark.parametrize(("name", "failed"), slow(LOST, but=LOST[1:]))
def test_a_lab_without_one_device_finishes_or_ends_in_time(name: str, failed: bool) -> None:
    report = check_lab(kept(name))
    assert report.violations == () and report.failed is failed


def played(drawn: DrawnLab, *, closed_s: list[float], failed_s: float | None = None) -> LabRun:
    """Return a run of a lab, in which the permanent fault began after 1 s."""
    error = "NoProgress: no child is left"
    outcome = LabOutcome(
        result="ok" if failed_s is None else f"failed: cloud: {error}",
        ended={"cloud": "" if failed_s is None else error},
        digest="",
        virtual_s=500.0,
        messages=0,
        trace="",
        trainings=0,
        errors=(),
        warnings=(),
        faults=((1.0, str(drawn.permanent)),),
        rounds=(),
    )
    return LabRun(outcome, Evidence(closed_s=closed_s, failed_s=failed_s))


def test_a_loss_excuses_no_failure_of_a_quorum_and_no_late_end() -> None:
    def wrong(drawn: DrawnLab, *, failed_s: float) -> str:
        run, twin = (
            played(drawn, closed_s=[5.0], failed_s=failed_s),
            played(drawn, closed_s=[4.0, 8.0, 12.0]),
        )
        return copes_with_a_loss(drawn, run, twin)

    assert wrong(kept("lost-device-quorum"), failed_s=70.0).startswith(
        "could continue without device"
    )
    needed = kept("lost-device-needed")
    idle_s = needed.experiment.transfer.idle_s
    assert wrong(needed, failed_s=5.0 + idle_s + 20.0) == ""
    assert "after the loss" in wrong(needed, failed_s=5.0 + idle_s + ENDING_S + 100.0)


def test_one_deadline_is_spent_on_a_known_loss() -> None:
    def wrong(drawn: DrawnLab, *deadlines: int) -> str:
        deadline_s = drawn.experiment.tiers[1].closing.deadline_s
        assert deadline_s is not None
        closed_s = list(accumulate(number * deadline_s + 4.0 for number in deadlines))
        return spends_few_deadlines(
            drawn, played(drawn, closed_s=closed_s), played(drawn, closed_s=[4.0, 8.0])
        )

    known, serves_no_chunk = kept("lost-device-one-deadline"), kept("lost-device-without-chunks")
    assert wrong(known, 1, 0, 0) == "" != wrong(known, 1, 0, 1)
    assert wrong(known, 0, 2, 0).startswith("[0, 2, 0] deadlines")
    rounds = serves_no_chunk.experiment.tiers[1].rounds
    assert (
        wrong(serves_no_chunk, rounds, rounds, rounds)
        == ""
        != wrong(serves_no_chunk, rounds, rounds + 1, rounds)
    )


@pytest.mark.parametrize(
    "case",
    [
        ("cloud", 90),
        ("institution-0", 60),
        ("device-0", 75),
        *(("cloud", number) for number in (292, 300, 318)),
    ],
)
def test_a_kill_at_a_message_is_survived(case: tuple[str, int]) -> None:
    """The last ones are after the last global round: the cloud does not wait for children that
    left.
    """
    assert kill_at(0, case) == ""


def test_a_violation_is_reported_with_its_command(capsys: pytest.CaptureFixture[str]) -> None:
    for drawn, source in ((draw_lab(3), "--seed 3"), (kept(QUICK[0]), f"--lab {QUICK[0]}")):
        print_report(LabReport(drawn, (("ends_as_documented", "stuck: device-0"),)))
        printed = capsys.readouterr().out
        assert "ends_as_documented: stuck: device-0" in printed and f"{source} --trace" in printed
