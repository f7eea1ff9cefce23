"""What an institution's rule remembers: the same after a restart, a step back, global rounds without it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from common.aggregation.selection.client_selection import ClientSelection
from common.errors import RunFailed, StorageFailed
from common.experiment.tiers import Tier
from common.storage import rule_states
from institution.memory import Memory


class Counting:
    """A rule that remembers which global rounds it played."""

    def __init__(self) -> None:
        self.played: list[int] = []

    def save(self, folder: Path) -> dict[str, object]:
        (folder / "played").write_text(json.dumps(self.played))
        return {"count": len(self.played)}

    def restore(self, folder: Path, facts: Mapping[str, object]) -> None:
        self.played = json.loads((folder / "played").read_text())
        assert facts["count"] == len(self.played)


def selection() -> ClientSelection:
    return ClientSelection(Tier(name="lan"), seed=1, node="institution-0")


def memory(folder: Path | None, *, kept: int = 2, took_part: bool = True) -> Any:
    build: Any = Counting
    return Memory(build, selection, remembers=True, folder=folder, kept=kept, must_remember=lambda _: took_part)


def play(one: Any, *global_rounds: int) -> list[int]:
    """Play global rounds, and return what the rule remembered before the last of them."""
    before: list[int] = []
    for global_round in global_rounds:
        rule, _ = one.before(global_round)
        before = list(rule.played)
        rule.played.append(global_round)
        one.after(global_round)
    return before


def test_it_goes_on_from_global_round_to_global_round(tmp_path: Path) -> None:
    for folder in (None, tmp_path):
        assert play(memory(folder), 0, 1, 2, 3) == [0, 1, 2]


def test_a_new_process_goes_on_with_what_the_last_one_left(tmp_path: Path) -> None:
    play(memory(tmp_path), 0, 1, 2)
    assert play(memory(tmp_path), 3) == [0, 1, 2]


def test_a_global_round_that_was_broken_off_begins_where_it_began(tmp_path: Path) -> None:
    one = memory(tmp_path)
    play(one, 0, 1)
    one.before(2)[0].played.append("half")
    assert play(one, 2) == [0, 1]
    assert play(memory(None), 0) == []


def test_the_cloud_may_go_back_as_far_as_its_checkpoints(tmp_path: Path) -> None:
    one = memory(tmp_path, kept=3)
    play(one, 0, 1, 2, 3, 4)
    assert play(one, 3) == [0, 1, 2]
    assert play(one, 4) == [0, 1, 2, 3]
    assert len(list(tmp_path.iterdir())) == 3
    with pytest.raises(RunFailed, match="--spool"):
        play(one, 1)
    assert play(one, 0) == []


def test_what_is_lost_is_an_error_with_its_remedy(tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match=r"task 2 is lost.*--spool"):
        memory(tmp_path).before(2)
    with pytest.raises(RunFailed, match="--spool"):
        memory(None).before(2)


def test_an_institution_that_is_not_drawn_remembers_its_last_global_round(tmp_path: Path) -> None:
    one = memory(tmp_path, took_part=False)
    assert play(one, 2, 5, 6) == [2, 5]
    assert play(memory(tmp_path, took_part=False), 9) == [2, 5, 6]


def test_half_a_state_is_none(tmp_path: Path) -> None:
    def broken(folder: Path) -> dict[str, object]:
        (folder / "played").write_text("[0]")
        raise OSError("no space")

    rule_states.write(tmp_path, "before-000001", Counting().save)
    with pytest.raises(StorageFailed, match=r"before-000002.* no space"):
        rule_states.write(tmp_path, "before-000002", broken)
    assert rule_states.latest(tmp_path, "before-000009") == tmp_path / "before-000001"
    assert rule_states.latest(tmp_path, "before-000000") is None


def test_a_rule_that_remembers_nothing_is_never_kept(tmp_path: Path) -> None:
    build: Any = Counting
    one = Memory(build, selection, remembers=False, folder=tmp_path, kept=2, must_remember=lambda _: True)
    assert one.before(7) is one.before(3)
    one.after(3)
    assert not list(tmp_path.iterdir())


def test_a_parent_that_selects_by_results_reports_that_there_was_a_task(tmp_path: Path) -> None:
    """Then the institution cannot compute by itself whether it took part."""
    with pytest.raises(RunFailed, match="before its task 3 is lost"):
        memory(tmp_path, took_part=False).before(3, had_tasks=True)
    assert memory(tmp_path, took_part=False).before(3, had_tasks=False)[0].played == []
