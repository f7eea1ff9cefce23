"""Draw the pictures of `docs/algorithms/` by running the rules: `python -m docs.tools.drawing
docs/algorithms`.

Upload k has a one in a buffer column of its own. Buffers are mixed with the parameters' weights and
do not affect the rules' decisions, so the buffers of the next models are the rule's mixing matrix:
W @ I = W.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import cos, exp, pi, radians, sin
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from docs.tools.pictures import picture
from fedstrata.cloud import tempo
from fedstrata.common.methods.aggregator import build
from fedstrata.common.methods.fedadp import FedAdp, gompertz
from fedstrata.common.methods.fedavg import FedAvg
from fedstrata.common.methods.fedcda import FedCDA
from fedstrata.common.methods.fedcross import FedCross
from fedstrata.common.methods.fedmr import FedMR
from fedstrata.common.methods.multi_model import Independent
from fedstrata.common.methods.rule import RuleContext, Uploads
from fedstrata.common.methods.settings import RuleSettings
from fedstrata.common.methods.statistics import Doubles
from fedstrata.common.model.layout import ModelLayout, Section
from fedstrata.deploy.results.charts import Axis, Curve, curves
from fedstrata.deploy.results.figures import COLOURS, LETTER, Box, Canvas, Figure

SEED: Final = 5  # with this seed FedMR's permutations differ in all layers
ANGLES: Final = (0, 20, 60, 130)  # degrees, chosen so that all pairs of models differ in similarity

CELL: Final = (38.0, 15.0)  # points
GAP: Final = 18.0  # between matrices
TOP: Final = 30.0  # above the cells

Point = tuple[float, float]


def at(angle: float) -> Point:
    """Return the point of the unit circle at an angle in degrees."""
    return cos(radians(angle)), sin(radians(angle))


@dataclass
class Report:
    """A child's report of its training."""

    samples: int
    loss: float = 0.5
    path_steps: int = 1
    start_loss: float | None = None


class MixingProbe:
    """A rule over models with a point of the plane and a buffer of `marks` values in each layer."""

    def __init__(
        self, rule: RuleSettings, *, marks: int, layers: Sequence[str] = ("layer",)
    ) -> None:
        kinds = [("weight", 2, Section.PARAMETER), ("mark", marks, Section.BUFFER)]
        self._layers = layers
        self._layout = ModelLayout.build(
            [(f"{layer}.{name}", (n,), kind) for layer in layers for name, n, kind in kinds]
        )
        self._rule = build(
            rule, RuleContext(self._layout, "cloud", SEED, measures=True, rows=self._rows)
        )
        self._rule.begin(self._rows("start", 1)[0])
        self.facts: Mapping[str, object] = {}

    def run_round(
        self,
        global_round: int,
        children: Sequence[str],
        points: Sequence[Point],
        *,
        samples: Sequence[int],
        marks: Sequence[int],
    ) -> dict[str, Doubles]:
        """Run a round; return W [K, marks] of each layer: the composition of the next models."""
        uploads = self._rows("uploads", len(children))
        for row, point, mark in zip(uploads, points, marks, strict=True):
            views = self._layout.views(row)
            for layer in self._layers:
                views[f"{layer}.weight"][:] = point
                views[f"{layer}.mark"][mark] = 1
        order = tuple(
            child for _, dealt in self._rule.dispatch(global_round, children) for child in dealt
        )
        received = Uploads(order, uploads, tuple(Report(count) for count in samples), lambda: None)
        self.facts = self._rule.aggregate(global_round, received).facts
        following = [
            self._layout.views(row)
            for row, dealt in self._rule.dispatch(global_round + 1, children)
            for _ in dealt
        ]
        return {
            layer: np.array([views[f"{layer}.mark"] for views in following], float)
            for layer in self._layers
        }

    def _rows(self, name: str, count: int) -> npt.NDArray[np.uint8]:
        return np.zeros((count, self._layout.row_bytes), np.uint8)


@dataclass(frozen=True, slots=True)
class SvgPanel:
    """A matrix [rows, columns] with labels. 0 is drawn as an empty cell, NaN is not drawn."""

    title: str
    weights: npt.NDArray[np.float64]
    rows: Sequence[str]
    columns: Sequence[str]

    @property
    def left(self) -> float:
        """The points left of the cells, for the labels of the rows."""
        return 6 + LETTER * max(map(len, self.rows))

    @property
    def width(self) -> float:
        """The width in points."""
        return max(self.left + CELL[0] * len(self.columns), LETTER * len(self.title)) + GAP

    @property
    def height(self) -> float:
        """The height in points."""
        return TOP + CELL[1] * len(self.rows) + GAP

    def draw(self, canvas: Canvas, left: float, top: float) -> None:
        """Draw it with the upper left corner there."""
        wide, high = CELL[0] * len(self.columns), CELL[1] * len(self.rows)
        axes = canvas.axes()
        x, y = left + self.left, top + TOP
        canvas.place(
            axes, left=x, top=y, right=canvas.size[0] - x - wide, bottom=canvas.size[1] - y - high
        )
        canvas.sheet.text(left / canvas.size[0], 1 - (top + 9) / canvas.size[1], self.title)
        axes.set(xlim=(0, len(self.columns)), ylim=(len(self.rows), 0))
        axes.set_xticks(np.arange(len(self.columns)) + 0.5, self.columns)
        axes.set_yticks(np.arange(len(self.rows)) + 0.5, self.rows)
        axes.tick_params(top=False, bottom=False, labeltop=True, labelbottom=False)
        axes.spines["bottom"].set_visible(False)
        cells = [
            (i, j, float(weight))
            for (i, j), weight in np.ndenumerate(self.weights)
            if not np.isnan(weight)
        ]
        canvas.boxes(
            axes,
            [Box(j, i, 1, 1, "s0", opacity=0.1 + 0.6 * weight) for i, j, weight in cells if weight],
        )
        for i, j, weight in cells:
            frame = [j, j + 1, j + 1, j, j], [i, i, i + 1, i + 1, i]
            axes.plot(*frame, color=COLOURS["line"], linewidth=0.8, clip_on=False)
            if weight:
                axes.text(
                    j + 0.5,
                    i + 0.5,
                    f"{weight:.3f}".rstrip("0").rstrip("."),
                    ha="center",
                    va="center",
                )


def matrices(title: str, rows: Sequence[Sequence[SvgPanel]]) -> str:
    """Draw rows of matrices."""

    def draw() -> Canvas:
        canvas = Canvas(
            max(sum(panel.width for panel in row) for row in rows),
            sum(max(panel.height for panel in row) for row in rows),
        )
        top = 0.0
        for row in rows:
            left = 4.0
            for panel in row:
                panel.draw(canvas, left, top)
                left += panel.width
            top += max(panel.height for panel in row)
        return canvas

    text = "W: rows are the next models."
    return picture([[Figure("mixing", "", text, draw)]], title, text)


def mix(
    rule: RuleSettings,
    global_round: int = 0,
    *,
    samples: Sequence[int] = (100,) * 4,
    layers: Sequence[str] = ("layer",),
) -> dict[str, Doubles]:
    """Return W [4, 4] of each layer after a round of a rule."""
    probe = MixingProbe(rule, marks=4, layers=layers)
    return probe.run_round(
        global_round, "abcd", [at(angle) for angle in ANGLES], samples=samples, marks=range(4)
    )


def square(title: str, weights_KK: Doubles) -> SvgPanel:
    """Return a panel of W, from the uploads v to the next models w."""
    return SvgPanel(title, weights_KK, [f"w{k}" for k in range(4)], [f"v{k}" for k in range(4)])


def fedavg() -> str:
    """Draw FedAvg's two weights, and `independent`."""
    samples = (300, 100, 400, 200)
    columns = [f"n = {n}" for n in samples]
    weights = {'weights = "data"': FedAvg(), 'weights = "uniform"': FedAvg(weights="uniform")}
    means = [
        SvgPanel(title, mix(rule, samples=samples)["layer"][:1], ["w"], columns)
        for title, rule in weights.items()
    ]
    return matrices(
        "Mixing of FedAvg and independent",
        [means, [square("independent", mix(Independent())["layer"])]],
    )


def fedcross() -> str:
    """Draw FedCross's strategies and stages at alpha = 0.9."""
    in_order = FedCross(alpha=0.9, strategy="in_order")
    dynamic = FedCross(alpha=0.9, strategy="in_order", dynamic_alpha_rounds=5)
    rows: list[dict[str, tuple[FedCross, int]]] = [
        {f"in_order, r = {r}": (in_order, r) for r in range(3)},
        {
            "lowest": (FedCross(alpha=0.9), 0),
            "highest": (FedCross(alpha=0.9, strategy="highest"), 0),
            "propellers, r = 0": (FedCross(alpha=0.9, propeller_rounds=1), 0),
        },
        {
            "dynamic alpha, r = 0 of 5": (dynamic, 0),
            "dynamic alpha, r = 2 of 5": (dynamic, 2),
            "first stage": (FedCross(alpha=0.9, first_stage_rounds=1), 0),
        },
    ]
    panels = [
        [square(title, mix(rule, r)["layer"]) for title, (rule, r) in row.items()] for row in rows
    ]
    return matrices("Mixing of FedCross", panels)


def fedmr() -> str:
    """Draw FedMR's permutation of each layer."""
    found = mix(FedMR(), layers=("conv1", "conv2", "fc"))
    return matrices(
        "Mixing of FedMR", [[square(layer, weights) for layer, weights in found.items()]]
    )


def fedcda() -> str:
    """Draw the uploads in FedCDA's mean, in the last round of the warm-up and in the one after."""
    children, rule = "abcd", FedCDA(depth=3, warmup_rounds=3)
    points = {
        "a": [(3.0, 0.0), (0.0, 2.0), (0.2, 0.1), (2.0, 2.0)],
        "b": [(0.0, 3.0), (0.0, -0.1), (1.5, -1.0), (-1.0, 2.0)],
        "c": [(2.0, 2.0), (1.5, 0.0), (0.5, 0.0)],
        "d": [(-2.0, 1.0), (-1.0, 1.0), (-0.5, 0.0)],
    }
    probe, panels = MixingProbe(rule, marks=16), []
    kept: dict[str, list[int]] = {child: [] for child in children}
    for r, selected in enumerate(("abcd", "abcd", "abcd", "ab")):
        places = [children.index(child) for child in selected]
        found = probe.run_round(
            r,
            selected,
            [points[child][r] for child in selected],
            samples=[100 * (1 + place) for place in places],
            marks=[4 * place + r for place in places],
        )
        weights = np.full((4, 4), np.nan)
        for place, child in enumerate(children):
            kept[child] = [*kept[child], *([r] if child in selected else [])][-rule.depth :]
            weights[place, kept[child]] = found["layer"][0, 4 * place :][kept[child]]
        title = f"r = {r}: {'the warm-up ends' if r < rule.warmup_rounds else 'a and b take part'}"
        panels.append(
            SvgPanel(title, weights, list(children), [f"r = {past}" for past in range(4)])
        )
    return matrices("Mixing of FedCDA", [panels[2:]])


def fedadp() -> str:
    """Draw FedAdp's weights beside FedAvg's, for three similar steps and a different one."""
    steps, weights, columns = [at(angle) for angle in (0, 40, -30, 110)], [], []
    for rule in (FedAvg(), FedAdp()):
        probe = MixingProbe(rule, marks=4)
        weights.append(
            probe.run_round(0, "abcd", steps, samples=(100,) * 4, marks=range(4))["layer"][0]
        )
        angles = probe.facts.get("angles")
        columns = [f"{angle:.2f}" for angle in angles.values()] if isinstance(angles, dict) else []
    panel = SvgPanel(
        "angle to the mean step, rad", np.array(weights), ["FedAvg", "FedAdp"], columns
    )
    return matrices("Mixing of FedAdp", [[panel]])


def fedadp_gain() -> str:
    """Draw a child's weight over its angle under FedAdp."""
    points = [(s, exp(gompertz(s, 5.0) - 5.0)) for s in np.linspace(0, pi, 201).tolist()]
    title = "exp(f) over the smoothed angle s at a = 5, as a part of exp(a)"
    return curve("fedadp-gain", title, "exp(f)", points, x=Axis("s", "rad"), y=Axis("exp(f)"))


def epochs() -> str:
    """Draw Tempo's epochs over an institution's distance at c = 6, with the farthest at 100 times
    the nearest.
    """
    points: list[Point] = []
    # exact; the last bit of a logarithm depends on the processor
    for exponent in (i / 200 for i in range(401)):
        tau = tempo.next_epochs({"near": 1.0, "m": 10.0**exponent, "far": 100.0}, 6)["m"]
        points += [(exponent, points[-1][1] if points else tau), (exponent, tau)]
    title = "tau_c of institution m in the next global round, c = 6"
    across = Axis("log10 of omega of m; 0 is the nearest, 2 the farthest")
    return curve("tempo", title, "m", points, x=across, y=Axis("tau_c"))


def curve(name: str, title: str, label: str, points: Sequence[Point], *, x: Axis, y: Axis) -> str:
    """Draw one curve."""
    figure = curves(name, title, {label: Curve(points)}, x=x, y=y)
    return picture([[figure]], figure.title, figure.text)


PICTURES: Final[Mapping[str, Callable[[], str]]] = {
    "fedavg.svg": fedavg,
    "fedcross.svg": fedcross,
    "fedmr.svg": fedmr,
    "fedcda.svg": fedcda,
    "fedadp.svg": fedadp,
    "fedadp-gain.svg": fedadp_gain,
    "tempo.svg": epochs,
}

if __name__ == "__main__":
    for name, draw in PICTURES.items():
        Path(sys.argv[1], name).write_text(draw(), encoding="utf-8")
