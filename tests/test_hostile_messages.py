"""Results that cannot be used."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from fedstrata.common.errors import RunFailed
from fedstrata.common.model.layout import ModelLayout
from fedstrata.common.protocol.manifest import describe
from fedstrata.common.protocol.messages import Result
from tests.helpers.nodes import (
    FINE,
    Facts,
    assert_models,
    child_of,
    drawn,
    ending_with,
    layout_of,
    living,
    lying,
    parent_of,
    play,
    serving,
    together,
)
from tests.helpers.records import with_work
from tests.helpers.sites import SimulatedSite, until, virtual

MANY = 2**63 - 1

Change = Callable[[Result], Result]


def lies(layout: ModelLayout) -> dict[str, tuple[Change, str]]:
    """Return what a child may do to its result, and what the reason of its refusal must name."""
    huge = describe(
        memoryview(bytes(4_000_000)), chunk_bytes=1024, codec="fp32", layout=layout.digest
    )

    def model(**fields: Any) -> Change:
        return lambda result: replace(result, inline=None, model=replace(result.model, **fields))

    def other_bits(data: bytes) -> bytes:
        return bytes(byte ^ 0xFF for byte in data)

    return {
        "huge": (lambda result: replace(result, inline=None, model=huge), "4000000 bytes"),
        "digest": (
            lambda result: model(digests=other_bits(result.model.digests))(result),
            "wrong digest",
        ),
        "inline": (
            lambda result: replace(result, inline=other_bits(result.inline or b"")),
            "wrong digest",
        ),
        "short": (
            lambda result: replace(result, inline=(result.inline or b"")[:-4]),
            "wrong digest",
        ),
        "layout": (model(layout="0123456789abcdef"), "wrong layout '0123456789abcdef'"),
        "codec": (model(codec="zip"), "codec 'zip'"),
        "against": (model(reference="0123456789abcdef"), "reference model '0123456789abcdef'"),
        "loss": (lambda result: with_work(result, loss=float("nan")), "loss is nan"),
        "samples": (lambda result: with_work(result, samples=MANY), f"{MANY} samples"),
        "steps": (lambda result: with_work(result, steps=MANY), f"{MANY} steps"),
        "seconds": (lambda result: with_work(result, train_s=float("inf")), "inf s of training"),
        "pause": (lambda result: with_work(result, pause_s=float("nan")), "a pause of nan s"),
        "empty": (lambda result: with_work(result, samples=0), "no samples"),
    }


def test_offers_that_cannot_be_used_are_refused_with_a_reason(
    caplog: pytest.LogCaptureFixture,
) -> None:
    @virtual
    async def run(site: SimulatedSite) -> None:
        layout = layout_of(100_000)
        observed: list[Facts] = []
        reasons = {name: text for name, (_, text) in lies(layout).items()} | {
            "nan": "NaN or Inf",
            "inf": "NaN or Inf",
        }
        names = ["honest", *reasons]
        parent = parent_of(site, names, layout=layout, transfer=FINE, observed=observed)
        children = {name: child_of(site, name, transfer=FINE) for name in names}
        tasks = [
            lying(site, children[name], layout, change)
            for name, (change, _) in lies(layout).items()
        ]
        tasks += [
            ending_with(site, children["nan"], layout, math.nan),
            ending_with(site, children["inf"], layout, -math.inf),
        ]
        async with together(
            living(site, parent), serving(site, children["honest"], layout, 7), *tasks
        ):
            row = drawn(layout, 1)
            played = await play(parent, row)
            assert_models(played, row, layout=layout, places={"honest": 7})
            assert set(played.refused) == set(reasons)
            assert played.missing == ()
            assert parent.session.coordinator.refused == len(reasons)
            reported = {
                str(facts["node"]): str(facts["reason"])
                for event, facts in observed
                if event == "refused"
            }
            for name, text in reasons.items():
                assert text in played.refused[name], name
                assert reported[name] == played.refused[name]
                assert any(name in line and text in line for line in caplog.messages), name
                await until(lambda name=name: children[name].refusals)
                assert children[name].refusals == [played.refused[name]]
            # The next round finds all of them ready again.
            second = await play(parent, row, global_round=1)
            assert set(second.refused) == set(reasons)

    with caplog.at_level(logging.WARNING, "fedstrata.parent"):
        run()


@virtual
async def test_a_round_in_which_all_are_refused_fails_and_names_them(site: SimulatedSite) -> None:
    layout = layout_of(4000)
    names = ["device-0", "device-1"]
    parent = parent_of(site, names, layout=layout)
    tasks = [ending_with(site, child_of(site, name), layout, math.nan) for name in names]
    async with together(living(site, parent), *tasks):
        with pytest.raises(
            RunFailed, match=r"device-0 and device-1 sent a model that was refused: .*NaN"
        ):
            await play(parent, drawn(layout, 1))
