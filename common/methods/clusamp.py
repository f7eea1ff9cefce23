"""CluSamp: client selection by clusters of similar steps (Fraboni et al. 2021), and FedAvg of the draws.

    next = 1/m sum over the m draws of v_k                    a child that is drawn twice trains once, with weight 2/m

The node keeps the last step of each child, float32 [N, D], zeros for one without. From the distances of the steps
Ward's linkage makes a dendrogram, and `clustered_draws` m distributions. As in the authors' code the rows of the
distance matrix are the points that are linked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from common.errors import InvalidExperiment
from common.experiment.aggregation import CluSamp, FedAvg
from common.lazy import np
from common.methods.blocks import COLUMNS, cut, over
from common.methods.clustered_draws import Merges, distributions, draw
from common.methods.mixing import Floats
from common.methods.selection.situation import Choose, Situation
from common.methods.single_model import SingleModelRule
from common.methods.statistics import Doubles
from common.methods.uploads import Aggregated, Dispatched, RuleContext, Uploads
from common.model.layout import Row

STEPS_FILE: Final = "steps"
PAIRS_FILE: Final = "pairs"
NUMBERS: Final = 2**20  # of a block of all steps


@dataclass(frozen=True, slots=True)
class Drawn:
    """A child's training statistics, with its draws in place of its samples: the mean weights by them."""

    samples: int
    loss: float
    path_steps: int


class ClusteredSampling:
    """The rule of one node, and its client selection."""

    reads_start: Final = False

    def __init__(self, settings: CluSamp, context: RuleContext) -> None:
        if find_spec("scipy") is None:
            remedy = "pip install 'fedstrata[methods]'."
            raise InvalidExperiment("aggregation.name", settings.name, "needs scipy, which is not installed", remedy)
        self._rule = SingleModelRule(FedAvg(), context)
        self._distance = settings.distance
        self._layout = context.layout
        self._rows = context.rows("steps", context.children)
        self._rows[:] = 0
        self._pairs_NN: Doubles = np.zeros((context.children, context.children))
        self._merges: Merges = ()
        self._received: Row = self._rule.model
        self._places: Mapping[str, int] = {}
        self._draws: Mapping[str, int] = {}

    @property
    def choose(self) -> Choose | None:
        """Its own client selection."""
        return self._choose

    @property
    def model(self) -> Row:
        """The mean of the last draws."""
        return self._rule.model

    @property
    def mixed(self) -> Row | None:
        """None: nothing is mixed."""
        return self._rule.mixed

    def begin(self, model: Row) -> None:
        """Dispatch this model next."""
        self._rule.begin(model)

    def dispatch(self, r: int, children: Sequence[str]) -> Dispatched:
        """Return the one model for all children."""
        found = self._rule.dispatch(r, children)
        self._received = found[0][0]
        return found

    def aggregate(self, r: int, uploads: Uploads) -> Aggregated:
        """Keep the steps and link the children anew; then write the mean of the draws. Facts: each child's draws."""
        self._keep(uploads)
        draws = {child: self._draws.get(child, 1) for child in uploads.children}
        reports = tuple(
            report and Drawn(draws[child], report.loss, report.path_steps)
            for child, report in zip(uploads.children, uploads.reports, strict=True)
        )
        done = self._rule.aggregate(r, replace(uploads, reports=reports))
        return replace(done, facts={**done.facts, "draws": draws})

    def save(self, folder: Path) -> dict[str, object]:
        """Write the steps and what was computed of them."""
        with (folder / STEPS_FILE).open("wb") as file:
            for step_D in self._steps_ND:
                file.write(step_D.data)
        (folder / PAIRS_FILE).write_bytes(self._pairs_NN.data)
        return self._rule.save(folder)

    def restore(self, folder: Path, facts: Mapping[str, Any]) -> None:
        """Read both."""
        self._steps_ND[:] = np.fromfile(folder / STEPS_FILE, np.float32).reshape(self._steps_ND.shape)
        self._pairs_NN[:] = np.fromfile(folder / PAIRS_FILE).reshape(self._pairs_NN.shape)
        self._rule.restore(folder, facts)
        self._merges = linked(self._distance, self._pairs_NN)

    @property
    def _steps_ND(self) -> Floats:
        return self._layout.floats(self._rows)[:, : self._layout.parameters]

    def _choose(self, now: Situation) -> list[str]:
        """Draw m = `now.count` times; return the children that were drawn, each once."""
        self._places = {child: place for place, child in enumerate(now.children)}
        samples_N = [max(now.samples.get(child, 1), 1) for child in now.children]
        drawn = draw(distributions(samples_N, now.count, self._merges), now.chance())
        self._draws = {now.children[place]: times for place, times in drawn.items()}
        return list(self._draws)

    def _keep(self, uploads: Uploads) -> None:
        """Keep the steps of a round, and link all children by the distances of their steps."""
        answered = [k for k in uploads.answered if uploads.children[k] in self._places]
        if not answered:
            return
        places = [self._places[uploads.children[k]] for k in answered]
        floats_K, received = self._layout.floats(uploads.rows_K), self._layout.floats(self._received)
        steps_ND = self._steps_ND

        def block(columns: slice) -> Doubles:
            for k, place in zip(answered, places, strict=True):
                np.subtract(floats_K[k, columns], received[columns], out=steps_ND[place, columns])
            steps_NC = steps_ND[:, columns].astype(np.float64)
            if self._distance == "l1":
                return np.stack([np.abs(steps_NC - steps_NC[place]).sum(axis=1) for place in places])
            found: Doubles = steps_NC[places] @ steps_NC.T
            return found

        blocks = list(cut(0, self._layout.parameters, _columns(len(steps_ND))))
        pairs_KN = np.sum(over(blocks, block, release=uploads.release), axis=0)
        self._pairs_NN[places] = pairs_KN
        self._pairs_NN[:, places] = pairs_KN.T
        self._merges = linked(self._distance, self._pairs_NN)


def linked(distance: str, pairs_NN: Doubles) -> Merges:
    """Return Ward's dendrogram of the children, from the products of their steps, of `l1` from their distances."""
    if len(pairs_NN) < 2:
        return ()
    from scipy.cluster.hierarchy import ward  # of an extra, and slow to import
    from scipy.spatial.distance import pdist

    return [(int(a), int(b)) for a, b, *_ in ward(pdist(distances(distance, pairs_NN)))]


def distances(distance: str, pairs_NN: Doubles) -> Doubles:
    """Return the distances [N, N] of the steps; by cosine a step of zeros is at distance 0 from every other."""
    if distance == "l1":
        return pairs_NN
    squares_N = np.diagonal(pairs_NN)
    if distance == "l2":
        return np.maximum(squares_N[:, None] + squares_N[None, :] - 2 * pairs_NN, 0.0)
    lengths_NN = np.sqrt(np.outer(squares_N, squares_N))
    cosines_NN = np.divide(pairs_NN, lengths_NN, out=np.ones_like(pairs_NN), where=lengths_NN > 0)
    found: Doubles = np.arccos(np.clip(cosines_NN, -1.0, 1.0))
    return found


def _columns(children: int) -> int:
    """Return how many columns of all steps a block has, in float64 some megabytes."""
    return max(256, min(COLUMNS, NUMBERS // children))
