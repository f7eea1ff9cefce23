"""An institution's state between tasks: after a restart, a step back, results that were not used."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedstrata.common.errors import RunFailed, StateLost, StorageFailed
from fedstrata.common.experiment.tiers import Tier
from fedstrata.common.methods.rule import Rule
from fedstrata.common.methods.selection import ClientSelection
from fedstrata.common.storage.spool import Spool
from fedstrata.common.storage.states import TaskStates
from fedstrata.institution.rounds import Memory
from tests.helpers.examples import examples


class Counting:
    """A rule that remembers which tasks it did."""

    def __init__(self) -> None:
        self.played: list[int] = []

    def save(self, folder: Path) -> dict[str, object]:
        (folder / "played").write_text(json.dumps(self.played))
        return {"count": len(self.played)}

    def restore(self, folder: Path, facts: Mapping[str, object]) -> None:
        self.played = json.loads((folder / "played").read_text())
        assert facts["count"] == len(self.played)


def selection(rule: Rule) -> ClientSelection:
    return ClientSelection(Tier(name="lan"), seed=1, node="institution-0")


def memory(folder: Path | None, *, rounds_back: int = 2, remembers: bool = True) -> Any:
    build: Any = Counting
    return Memory(
        build, selection, remembers=remembers, spool=Spool(folder), rounds_back=rounds_back
    )


def play(one: Any, *tasks: tuple[int, int], rounds: int = 1) -> list[int]:
    """Do tasks, each (number, follows), `rounds` in each global round; return what the last one
    found.
    """
    before: list[int] = []
    for task, follows in tasks:
        rule, _ = one.before(follows)
        before = list(rule.played)
        rule.played.append(task)
        one.after(task, global_round=(task - 1) // rounds)
    return before


def chain(*tasks: int) -> list[tuple[int, int]]:
    return list(zip(tasks, (0, *tasks), strict=False))


def kept(folder: Path) -> list[int]:
    return sorted(int(path.name.partition("-")[2]) for path in (folder / "states").iterdir())


def test_a_task_that_was_broken_off_begins_where_it_began(tmp_path: Path) -> None:
    one = memory(tmp_path)
    play(one, *chain(1, 2))
    one.before(2)[0].played.append("half")
    assert play(one, (3, 2)) == [1, 2]
    assert play(memory(None), (1, 0)) == []


def test_the_cloud_may_go_back_as_far_as_its_checkpoints(tmp_path: Path) -> None:
    one = memory(tmp_path, rounds_back=2)
    play(one, *chain(1, 2, 3, 4, 5, 6))
    assert kept(tmp_path) == [3, 4, 5, 6]  # global rounds 3 to 5 began after tasks 3 to 5
    assert play(one, (4, 3)) == [1, 2, 3]
    assert play(one, (5, 4)) == [1, 2, 3, 4]
    with pytest.raises(RunFailed, match="--spool"):
        play(one, (2, 1))
    assert play(one, (1, 0)) == []


def test_a_result_that_was_not_used_leaves_no_trace(tmp_path: Path) -> None:
    for folder in (None, tmp_path):
        assert play(memory(folder), (1, 0), (2, 1), (3, 1), (4, 1), (5, 4)) == [1, 4]
    assert play(memory(tmp_path), (6, 4)) == [1, 4]


def test_a_state_that_is_followed_is_kept_however_long_no_result_is_used(tmp_path: Path) -> None:
    one = memory(tmp_path, rounds_back=1)
    assert play(one, *chain(1, 2), *((task, 2) for task in range(3, 30))) == [1, 2]
    assert kept(tmp_path) == [2, 29]


def test_a_parent_goes_back_to_the_start_of_its_own_task_in_the_present_global_round(
    tmp_path: Path,
) -> None:
    one = memory(tmp_path, rounds_back=1)
    play(one, *chain(*range(1, 12)), rounds=4)
    assert kept(tmp_path) == [4, 8, 9, 10, 11]
    for again in (8, 9, 10):
        assert play(memory(tmp_path), (again + 1, again), rounds=4) == list(range(1, again + 1))


@given(st.data())
@examples(60)
def test_each_task_that_a_parent_may_give_finds_the_state_it_follows(data: st.DataObject) -> None:
    """A parent that goes back and forth: it returns to a checkpoint of its history, and uses some
    results. What was out of reach once has no checkpoint any more, wherever it returned since.
    """
    rounds, back = data.draw(st.integers(1, 3), "rounds"), data.draw(st.integers(1, 3), "back")
    oldest = 0
    with TemporaryDirectory() as name:
        one = memory(Path(name), rounds_back=back)
        # the tasks whose results were used: the history that a rule's state must equal
        used: list[int] = []
        histories = {0: used}  # at the start of each global round
        task = 1
        for _ in range(data.draw(st.integers(1, 25), "steps")):
            if data.draw(st.booleans(), "restart"):
                one = memory(Path(name), rounds_back=back)
            if data.draw(st.integers(0, 3), "return") == 0:
                present = (task - 1) // rounds
                returned = data.draw(st.integers(oldest, present), "to")
                task, used = returned * rounds + 1, histories[returned]
            follows = used[-1] if used else 0
            assert play(one, (task, follows), rounds=rounds) == used
            if data.draw(st.booleans(), "used"):
                used = [*used, task]
            task += 1
            oldest = max(oldest, (task - 1) // rounds - back)
            if (task - 1) % rounds == 0:
                histories[(task - 1) // rounds] = used


def test_what_is_lost_is_an_error_with_its_remedy(tmp_path: Path) -> None:
    for folder in (tmp_path, None):
        with pytest.raises(RunFailed, match=r"after its task 2 is lost.*--spool"):
            memory(folder).before(2)


def test_half_a_state_is_none(tmp_path: Path) -> None:
    def broken(folder: Path) -> dict[str, object]:
        (folder / "played").write_text("[0]")
        raise OSError("no space")

    states = TaskStates(Spool(tmp_path).states(), rounds_back=1, what="it", who="nodes")
    states.write(1, Counting().save, follows=0, global_round=0)
    with pytest.raises(StorageFailed, match=r"after-0+2.* no space"):
        states.write(2, broken, follows=1, global_round=1)
    states.read(1, Counting().restore)
    with pytest.raises(
        StateLost, match=r"^it after its task 2 is lost\. Start nodes with the same --spool DIR"
    ):
        states.read(2, Counting().restore)
    states.write(3, Counting().save, follows=1, global_round=2)
    assert kept(tmp_path) == [1, 3]


def test_a_rule_without_state_is_never_kept(tmp_path: Path) -> None:
    one = memory(tmp_path, remembers=False)
    assert one.before(7) is one.before(3)
    one.after(3, global_round=3)
    assert not list(tmp_path.iterdir())
