"""The schedule of vmapped training: every batch once, in order, beside as many others as possible."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedstrata.common.experiment import reading
from fedstrata.common.learning import splits
from fedstrata.device.vmapped.schedule import Load, VmappedSchedule, plan

Visit = tuple[int, int]

loads = st.lists(st.builds(Load, st.integers(1, 40), st.integers(1, 4)), min_size=1, max_size=8)
sizes = st.integers(1, 12)


def alone(load: Load, batch_size: int) -> list[Visit]:
    """Return the first sample and the size of each batch, as a loop over one device's epochs cuts
    them.
    """
    visits = []
    for epoch in range(load.epochs):
        left = list(range(epoch * load.samples, (epoch + 1) * load.samples))
        while left:
            batch, left = left[:batch_size], left[batch_size:]
            visits.append((batch[0], len(batch)))
    return visits


def visits(made: VmappedSchedule, devices: int) -> list[list[Visit]]:
    """Return what each device visits, step by step."""
    seen: list[list[Visit]] = [[] for _ in range(devices)]
    for step in made.steps:
        for place, start, count in zip(step.places, step.starts, step.counts, strict=True):
            seen[made.order[place]].append((int(start), int(count)))
    return seen


def useful_share(made: VmappedSchedule) -> float:
    """Return the fraction of the computed slots that have a sample."""
    useful = sum(int(step.counts.sum()) for step in made.steps)
    return useful / sum(len(step.places) * step.width for step in made.steps)


@given(loads, sizes, st.booleans())
def test_every_batch_of_every_epoch_is_taken_once_and_in_order(
    work: list[Load], batch: int, pad: bool
) -> None:
    made = plan(work, batch_size=batch, pad=pad)
    assert visits(made, len(work)) == [alone(load, batch) for load in work]
    assert made.totals.tolist() == [len(alone(work[k], batch)) for k in made.order]


@given(loads, sizes, st.booleans())
def test_places_ascend_and_who_has_finished_is_in_no_step(
    work: list[Load], batch: int, pad: bool
) -> None:
    made = plan(work, batch_size=batch, pad=pad)
    left = made.totals.copy()
    for step in made.steps:
        assert (np.diff(step.places) > 0).all()
        assert step.prefix == (step.places.tolist() == list(range(len(step.places))))
        assert (left[step.places] > 0).all()
        left[step.places] -= 1
    assert not left.any()


@given(loads, sizes)
def test_padded_schedules_are_views_and_take_the_longest_devices_steps(
    work: list[Load], batch: int
) -> None:
    made = plan(work, batch_size=batch, pad=True)
    assert all(step.prefix for step in made.steps)
    assert len(made.steps) == max(len(alone(load, batch)) for load in work)
    active = [len(step.places) for step in made.steps]
    assert active == sorted(active, reverse=True)


@given(loads, sizes)
def test_batch_statistics_see_no_padding(work: list[Load], batch: int) -> None:
    made = plan(work, batch_size=batch, pad=False)
    assert not any(step.ragged for step in made.steps) and useful_share(made) == 1
    assert all(step.prefix for step in made.steps if step.width == batch)


@given(loads, sizes)
def test_padding_is_a_sample_of_the_same_batch(work: list[Load], batch: int) -> None:
    for step in plan(work, batch_size=batch, pad=True).steps:
        slots = step.slots()
        assert slots.shape == (len(step.places), step.width)
        for row, start, count in zip(slots, step.starts, step.counts, strict=True):
            assert row[:count].tolist() == list(range(start, start + count))
            assert (row[count:] == start).all()


@given(loads, sizes, st.booleans(), st.data())
def test_what_is_left_for_some_of_them(
    work: list[Load], batch: int, pad: bool, data: st.DataObject
) -> None:
    made = plan(work, batch_size=batch, pad=pad)
    done = data.draw(st.integers(0, len(made.steps)))
    places = sorted(data.draw(st.sets(st.integers(0, len(work) - 1), min_size=1)))
    rest = made.after(done, np.array(places))
    before = visits(VmappedSchedule(made.order, made.steps[:done]), len(work))
    now = visits(rest, len(work))
    for place, k in enumerate(made.order):
        wanted = alone(work[k], batch)[len(before[k]) :] if place in places else []
        assert now[k] == wanted
    assert not pad or all(step.prefix for step in rest.steps)


def test_devices_of_one_size_take_their_partial_batches_together() -> None:
    made = plan([Load(25, 2)] * 40, batch_size=10, pad=False)
    assert [(len(step.places), step.width) for step in made.steps] == [
        (40, 10),
        (40, 10),
        (40, 5),
    ] * 2


def split(samples: int, devices: int, institutions: int) -> list[Load]:
    """Return a Dirichlet 0.1 split under Tempo: 3 to 12 epochs, by institution."""
    tree = {
        "topology": {"devices": devices},
        "data": {"partition": "dirichlet", "concentration": 0.1, "min_samples": 1},
    }
    lab = reading.parse(tree)
    labels = np.random.default_rng(1).integers(0, 10, samples)
    parts: Sequence[splits.Indices] = splits.partition(labels, data=lab.data, tree=lab.tree, seed=1)
    epochs = np.random.default_rng(2).permutation(np.linspace(3, 12, institutions).astype(int))
    return [
        Load(len(part), int(epochs[k * institutions // devices])) for k, part in enumerate(parts)
    ]


@pytest.mark.parametrize(
    ("samples", "devices", "institutions", "batch", "share"),
    [
        (60_000, 40, 5, 10, 0.99),
        (60_000, 40, 5, 50, 0.95),
        (1437, 12, 3, 10, 0.95),
        (1437, 40, 5, 10, 0.88),
    ],
)
def test_useful_slots_of_a_skewed_split(
    samples: int, devices: int, institutions: int, batch: int, share: float
) -> None:
    work = split(samples, devices, institutions)
    made = plan(work, batch_size=batch, pad=True)
    totals = [len(alone(load, batch)) for load in work]
    assert useful_share(made) >= share
    assert useful_share(made) > 1.3 * sum(load.samples * load.epochs for load in work) / (
        devices * max(totals) * batch
    )  # of a rectangle
