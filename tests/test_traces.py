"""Links whose rates change with time: the pure replay, the keys, the token bucket, and whole labs
in virtual time.
"""

from __future__ import annotations

import json
from math import inf
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from docs.tools import wifi_trace
from fedstrata.common.errors import InvalidExperiment
from fedstrata.common.experiment.reading import load, parse, to_toml
from fedstrata.common.protocol.outbox import Shaper
from fedstrata.common.settings import links
from fedstrata.common.settings.links import LinkDirection, RateTrace
from fedstrata.deploy.simulation.hardware import Durations
from tests.helpers.examples import slow
from tests.simulation.lab import ScenarioLab
from tests.simulation.outcome import LabOutcome


@st.composite
def traces(draw: st.DrawFn) -> RateTrace:
    lengths = draw(st.lists(st.sampled_from([0.5, 1.0, 3.0]), min_size=1, max_size=5))
    starts = tuple(sum(lengths[:place]) for place in range(len(lengths)))
    rates = draw(
        st.lists(
            st.sampled_from([0.0, 1.0, 8.0, 100.0]), min_size=len(lengths), max_size=len(lengths)
        )
    )
    repeat_s = draw(st.sampled_from([None, sum(lengths)]))
    rates[-1] = rates[-1] or 2.0
    return RateTrace(starts, tuple(rates), (0.0,) * len(rates), repeat_s)


def finish_by_steps(trace: RateTrace, begin: float, nbytes: float) -> float:
    """Return what `RateTrace.finish` returns, change by change."""
    t, left = begin, nbytes
    while True:
        offset = t if trace.repeat_s is None else t % trace.repeat_s
        period = t - offset
        place = max(i for i, start in enumerate(trace.starts) if start <= offset + 1e-12)
        last = inf if trace.repeat_s is None else trace.repeat_s
        end = period + (trace.starts[place + 1] if place + 1 < len(trace.starts) else last)
        if left <= (end - t) * trace.rates[place] and trace.rates[place]:
            return t + left / trace.rates[place]
        t, left = end, left - (end - t) * trace.rates[place]


@given(trace=traces(), begin=st.integers(0, 80).map(lambda n: n / 4), nbytes=st.integers(1, 4000))
def test_a_trace_carries_what_its_rates_carry(
    trace: RateTrace, begin: float, nbytes: float
) -> None:
    assert trace.finish(begin, nbytes) == pytest.approx(finish_by_steps(trace, begin, nbytes))


def test_means_and_delays_follow_the_trace() -> None:
    trace = RateTrace((0.0, 2.0, 4.0), (10.0, 0.0, 40.0), (0.1, 0.2, 0.3), 6.0)
    assert trace.mean() == pytest.approx((20 + 0 + 80) / 6)
    assert [trace.delay_at(t) for t in (0.0, 1.9, 2.0, 5.0, 6.5, 9.0)] == [
        0.1,
        0.1,
        0.2,
        0.3,
        0.1,
        0.2,
    ]
    held = RateTrace((0.0, 2.0), (10.0, 30.0), (0.0, 0.5))
    assert held.mean() == 10.0 and held.delay_at(100.0) == 0.5
    assert held.finish(100.0, 60.0) == 102.0


def test_the_bucket_waits_for_the_end_of_an_outage() -> None:
    trace = RateTrace((0.0, 2.0, 12.0), (1000.0, 0.0, 500.0), (0.0, 0.0, 1.0))
    shaper = Shaper({"a": LinkDirection(2000.0, trace=trace)})
    assert shaper.reserve(("a",), 1000, 100.0) == 100.5  # before the run: the declared rate
    shaper.begin(200.0)
    assert shaper.reserve(("a",), 1000, 200.0) == 201.0
    # 1000 until 202, the rest after the outage
    assert shaper.reserve(("a",), 1500, 201.0) == 200.0 + 12.0 + 1.0 + 1.0
    assert not shaper.ready(("a",), 205.0) and shaper.ready(("a",), 213.0)


CSV = "seconds,up_mbit,down_mbit,delay_ms\n0,8,16,10\n5,0,0,10\n9,4,4,50\n"


def test_a_trace_is_part_of_the_experiment_once_it_is_read(tmp_path: Path) -> None:
    (tmp_path / "lte.csv").write_text(CSV)
    (tmp_path / "bus.csv").write_text("seconds,up_mbit,down_mbit\n0,1,1\n")
    file = tmp_path / "lab.toml"
    file.write_text(
        '[links]\nwan = { trace = { file = "lte.csv", repeat_s = 12 } }\nof.device-0 = { trace = '
        '"bus.csv" }\n'
    )
    experiment = load(file)
    again = parse(experiment.to_json())
    assert again == experiment and "up_mbit = [8.0, 0.0, 4.0]" in to_toml(experiment)
    wan = experiment.tiers[0].link
    assert wan.up.trace == RateTrace((0.0, 5.0, 9.0), (1e6, 0.0, 5e5), (0.01, 0.01, 0.05), 12.0)
    assert wan.up.rate == pytest.approx((5 * 1e6 + 3 * 5e5) / 12) and wan.down.delay_s == 0.01
    assert experiment.link("device-0").down.trace == RateTrace((0.0,), (125_000.0,), (0.0,))
    assert load(file, ["links.lan.trace=bus.csv"]).tiers[-1].link.up.rate == 125_000.0


@pytest.mark.parametrize(
    ("text", "options", "problem"),
    [
        (CSV, {"repeat_s": 9}, "repeat_s = 9.*the trace is longer"),
        (CSV.replace("9,4,4,50", "9,0,4,50"), {}, "up_mbit = 0.*out for ever"),
        (CSV.replace("5,", "0,"), {}, "seconds = .*does not grow"),
        (CSV.replace("0,8", "1,8"), {}, "seconds = 1.*does not grow"),
        (CSV.replace("down_mbit", "down"), {}, "no column down_mbit"),
        (CSV.replace("16", "x"), {}, "no number"),
        (CSV.replace("16", "inf"), {}, "not finite"),
        (CSV.replace("16", "-1"), {}, "down_mbit"),
        ("seconds,up_mbit,down_mbit\n", {}, "not as many rows"),
        (None, {}, "No such file"),
    ],
)
def test_a_trace_that_cannot_be_replayed_is_refused(
    tmp_path: Path, text: str | None, options: dict[str, Any], problem: str
) -> None:
    if text is not None:
        (tmp_path / "lte.csv").write_text(text)
    file = tmp_path / "lab.toml"
    given = ", ".join(['file = "lte.csv"', *(f"{key} = {value}" for key, value in options.items())])
    file.write_text(f"[links]\nwan = {{ trace = {{ {given} }} }}\n")
    with pytest.raises(InvalidExperiment, match=f"(?s)links.wan.trace.*{problem}|{problem}"):
        load(file)


OUTAGE = {"seconds": [0, 6, 26], "up_mbit": [2, 0, 2], "down_mbit": [2, 0, 2]}
LAB: dict[str, Any] = {
    "rounds": 3,
    "topology": {"institutions": 2, "devices": 4},
    "institution": {"rounds": 2},
    "transfer": {"idle_s": 30.0, "keepalive_s": 5, "inline_bytes": 0},
}


def run(links: dict[str, Any], **settings: Any) -> LabOutcome:
    experiment = parse(LAB | {"links": {"check": "off"} | links} | settings)
    return ScenarioLab(
        experiment, seed=3, model_bytes=400_000, durations=Durations(spread=0.0)
    ).run()


SHAPED = {"up_mbit": 2, "down_mbit": 2}


@pytest.mark.parametrize("tier", slow(["wan", "lan"], but=["wan"]))
def test_a_lab_survives_an_outage_and_its_model_is_the_same(tier: str) -> None:
    plain, outage = run({tier: SHAPED}), run({tier: {"trace": OUTAGE}})
    assert plain.ok and outage.ok, outage
    assert outage.digest == plain.digest and outage.faults == ()
    assert plain.virtual_s + 15 < outage.virtual_s < plain.virtual_s + 30
    seconds = [float(row["elapsed_s"]) for row in outage.rounds]
    assert max(after - before for before, after in zip([0.0, *seconds], seconds, strict=False)) > 20


def test_the_manifest_has_the_digest_of_each_trace() -> None:
    manifests: list[dict[str, Any]] = []
    experiment = parse(
        LAB | {"rounds": 1, "links": {"check": "off", "of": {"device-0": {"trace": OUTAGE}}}}
    )

    def read(lab: ScenarioLab) -> None:
        manifests.extend(
            json.loads(path.read_text()) for path in lab.agents.runs.glob("*/manifest.json")
        )

    assert ScenarioLab(experiment, model_bytes=400, at_end=read).run().ok
    links = manifests[0]["links"]["of"]
    assert (
        links["device-0"]["trace"]["rows"] == 3 and len(links["device-0"]["trace"]["digest"]) == 16
    )
    assert "trace" not in links["device-1"]


def test_an_outage_of_a_single_device_delays_the_others_by_its_length() -> None:
    one, none = run({"lan": SHAPED, "of": {"device-0": {"trace": OUTAGE}}}), run({"lan": SHAPED})
    assert one.ok and one.digest == none.digest and one.virtual_s > none.virtual_s + 10


def test_a_longer_outage_than_idle_s_ends_the_run_with_its_reason() -> None:
    ended = run({"lan": {"trace": OUTAGE | {"seconds": [0, 6, 106]}}})
    assert not ended.ok and "made no progress for 30 s" in ended.ended["cloud"] + str(
        ended.ended
    ), ended


def test_a_quorum_goes_on_without_a_device_in_an_outage() -> None:
    closing = {"rule": "quorum", "quorum": 1, "deadline_s": 8.0}
    single = {"device-0": {"trace": OUTAGE | {"seconds": [0, 4, 400]}}}
    ended = run({"lan": SHAPED, "of": single}, institution={"rounds": 2, "closing": closing})
    assert ended.ended["cloud"] == "" and len(ended.rounds) == 3


# The trace that ships, and those that users record

WIFI = '[links]\nlan = { trace = "wifi-synthetic" }\n'


def test_a_trace_that_ships_is_named_and_made_by_its_generator(tmp_path: Path) -> None:
    file = tmp_path / "lab.toml"
    file.write_text(WIFI)
    trace = load(file).tiers[-1].link.trace
    assert trace is not None and (trace.file, trace.repeat_s) == ("wifi-synthetic", 300.0)
    assert len(trace.seconds) == 300 and trace.up_mbit.count(0) == 4
    assert trace.direction(trace.up_mbit).mean() == pytest.approx(23.53e6 / 8, rel=1e-3)
    shipped = Path(links.__file__).with_name("traces")
    assert {path.stem for path in shipped.iterdir()} == set(links.SHIPPED_TRACES)
    assert (shipped / "wifi-synthetic.csv").read_text() == wifi_trace.trace()
    file.write_text(WIFI.replace('"wifi-synthetic"', '{ file = "wifi-synthetic", repeat_s = 900 }'))
    trace = load(file).tiers[-1].link.trace
    assert trace is not None and trace.repeat_s == 900


def test_the_pages_script_makes_a_trace_of_what_iperf3_and_ping_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (Path(__file__).parents[1] / "docs" / "links.md").read_text()
    (script,) = [block for block in page.split("```python")[1:] if "icmp_seq" in block]
    for name, mbit in (("up", [19.12, 0.0, 9.56]), ("down", [28.68, 9.56, 9.56, 9.56])):
        intervals = [{"sum": {"bits_per_second": each * 1e6}} for each in mbit]
        (tmp_path / f"{name}.json").write_text(json.dumps({"intervals": intervals}))
    lines = [
        "64 bytes from 10.0.0.1: icmp_seq=1 ttl=64 time=3.20 ms",
        "no answer yet for icmp_seq=2",
    ]
    lines.append("64 bytes from 10.0.0.1: icmp_seq=3 ttl=64 time=12 ms")
    (tmp_path / "ping.txt").write_text("\n".join(lines))
    monkeypatch.chdir(tmp_path)
    exec(script.partition("```")[0], {})
    made = capsys.readouterr().out
    assert made.splitlines()[1:] == ["0,20,30,1.60", "1,0,10,1.60", "2,10,10,6.00"]
    (tmp_path / "wifi.csv").write_text(made)
    file = tmp_path / "lab.toml"
    file.write_text(WIFI.replace('"wifi-synthetic"', '{ file = "wifi.csv", repeat_s = 3 }'))
    trace = load(file).tiers[-1].link.trace
    assert trace is not None and trace.up_mbit == [20, 0, 10]
