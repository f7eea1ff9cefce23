"""HTML report of one or several runs: figures and tables from the runs' files, in one self-contained file.

The page loads nothing and runs no scripts; its Content-Security-Policy forbids both.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from deploy.console.tabular import Table, html, show, size
from deploy.report import link_sections, sections
from deploy.report.figures import STYLE, Figure
from deploy.runs.run import Run, State

POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
PAGE = Path(__file__).with_name("report.css")


@dataclass
class Page:
    """A report under construction: its HTML, and the figures and tables in it."""

    figures: list[Figure] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    parts: list[str] = field(default_factory=list)

    def add_heading(self, level: int, content: str) -> None:
        """Add a heading."""
        self.parts.append(f"<h{level}>{html(content)}</h{level}>")

    def add_paragraph(self, content: str, kind: str = "") -> None:
        """Add a paragraph."""
        attribute = f' class="{kind}"' if kind else ""
        self.parts.append(f"<p{attribute}>{html(content)}</p>")

    def add_figures(self, figures: Sequence[Figure], *, kind: str = "") -> None:
        """Add figures; those of kind `curves` are placed side by side if there is room."""
        drawn = []
        for figure in figures:
            self.figures.append(figure)
            drawn.append(f'<figure tabindex="0">{figure.inline(f"f{len(self.figures)}")}</figure>')
        self.parts.append(f'<div class="{kind}">{"".join(drawn)}</div>' if kind else "".join(drawn))

    def add_table(self, table: Table, *, folded: bool = False) -> None:
        """Add a table if it has rows; a folded one is collapsed at first."""
        if not table.rows:
            return
        self.tables.append(table)
        body = table.html()
        if folded:
            body = f"<details><summary>{html(table.title)} ({len(table.rows)} rows)</summary>{body}</details>"
        self.parts.append(body)

    def add_facts(self, rows: Sequence[tuple[str, str]]) -> None:
        """Add a table of names and values."""
        lines = "".join(
            f'<tr><th scope="row" class="text">{html(name)}</th><td>{html(value)}</td></tr>' for name, value in rows
        )
        self.parts.append(f'<div class="scroll"><table class="facts"><tbody>{lines}</tbody></table></div>')

    def add_numbers(self, pairs: Sequence[tuple[str, str]]) -> None:
        """Add the headline numbers."""
        cells = "".join(f"<div><dt>{html(name)}</dt><dd>{html(value)}</dd></div>" for name, value in pairs)
        self.parts.append(f"<dl>{cells}</dl>")

    def add_folded(self, summary: str, content: str) -> None:
        """Add a preformatted text, collapsed at first."""
        lines = "\n".join(html(line) for line in content.splitlines())
        self.parts.append(f"<details><summary>{html(summary)}</summary><pre>{lines}</pre></details>")

    def html(self, title: str) -> str:
        """Return the whole page."""
        return (
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
            f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
            f"<title>{html(title)}</title>\n<style>\n{STYLE}\n{PAGE.read_text(encoding='utf-8')}</style>\n</head>\n"
            "<body>\n<main>\n" + "\n".join(self.parts) + "\n</main>\n</body>\n</html>\n"
        )


def compose(runs: Sequence[Run]) -> tuple[Page, str]:
    """Return the page of the runs, and its title. Raises InvalidExperiment if a run cannot be read."""
    names = sections.labels(runs)
    page = Page()
    title = f"{runs[0].name} {runs[0].id}" if len(runs) == 1 else f"{len(runs)} runs: {', '.join(names)}"
    page.parts.append(f"<header><h1>{html(title)}</h1></header>")
    for run in runs:
        if run.state is not State.FINISHED:
            page.add_paragraph(_unfinished(run), "state")
    if len(runs) == 1:
        page.add_numbers(list(_first_numbers(runs[0])))
    else:
        page.add_table(sections.overview(runs, names))
    if any(run.rounds for run in runs):
        page.add_heading(2, " and ".join(dict.fromkeys(run.scored_by.label.capitalize() for run in runs)))
        page.add_paragraph(sections.SCORES)
        page.add_figures(sections.scores(runs, names), kind="curves")
        page.add_heading(2, "Time by phase")
        page.add_paragraph(sections.SECONDS)
        page.add_figures([sections.budget(runs, names), *map(sections.budgets, runs)], kind="curves")
        page.add_table(sections.phases(runs, names))
    for run, name in zip(runs, names, strict=True):
        if len(runs) > 1:
            page.add_heading(2, name)
        _add_run(page, run, 3 if len(runs) > 1 else 2)
    return page, title


def _add_run(page: Page, run: Run, level: int) -> None:
    """Add the sections of a single run."""
    if run.links:
        page.add_heading(level, "Bytes")
        page.add_paragraph(link_sections.DIRECT if run.direct else link_sections.BYTES)
        page.add_figures([link_sections.traffic(run)], kind="curves")
        page.add_table(link_sections.tiers(run))
        page.add_table(link_sections.links(run), folded=len(run.links) > link_sections.FOLD)
    page.add_heading(level, "Topology")
    page.add_paragraph(link_sections.TOPOLOGY)
    page.add_figures([link_sections.topology(run)])
    if run.rounds:
        page.add_heading(level, "Epochs and work")
        page.add_paragraph(sections.EPOCHS)
        page.add_figures([sections.epochs(run)])
        page.add_table(sections.work(run), folded=len(run.nodes.aggregators) > 1)
    if picture := sections.partition(run):
        page.add_heading(level, "Data")
        page.add_paragraph(sections.DATA)
        page.add_figures([picture])
    page.add_heading(level, "Events")
    events, omitted = sections.events(run)
    page.add_table(events)
    if omitted:
        page.add_paragraph(f"{omitted} earlier events are in events.jsonl.", "soft")
    page.add_table(sections.plans(run), folded=True)
    page.add_table(sections.global_rounds(run), folded=True)
    page.add_heading(level, "The run")
    page.add_facts(sections.facts(run))
    page.add_folded("experiment.toml", (run.path / "experiment.toml").read_text(encoding="utf-8", errors="replace"))


def _first_numbers(run: Run) -> Iterator[tuple[str, str]]:
    totals = run.totals
    yield sections.score_column([run]), "-" if run.score is None else f"{run.score:.4f}"
    yield "global rounds", f"{len(run.rounds)} of {run.global_rounds}"
    yield "time", f"{show(run.seconds)} s"
    for tier in run.tiers:
        yield f"{tier.upper()} up / down", f"{size(totals[f'{tier}_up_bytes'])} / {size(totals[f'{tier}_down_bytes'])}"


def _unfinished(run: Run) -> str:
    done = f"{len(run.rounds)} of {run.global_rounds} global rounds are done"
    if run.state is State.RUNNING:
        return f"{run.id} is still running: {done}. This page shows the run so far."
    if run.state is State.FAILED:
        reason = next((str(e.facts.get("reason", "")) for e in reversed(run.events) if e.name == "failed"), "")
        return f"{run.id} failed: {reason} {done}."
    return f"{run.id} was interrupted or killed: {done}. This page shows the run so far. It can be resumed."
