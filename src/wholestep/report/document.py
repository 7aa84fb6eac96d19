"""A report as data: cards and sections of prose, tables, figures and code, rendered by `html` and `explain`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from markupsafe import Markup

from wholestep._output import write_output


@dataclass(frozen=True)
class Bar:
    """A table cell that also shows its value as a bar; `tone` is a phase's name or empty."""

    text: str
    fraction: float
    tone: str = ""

    def __str__(self) -> str:
        return self.text


Cell = str | Bar


@dataclass(frozen=True)
class Table:
    """Rows under column names. The first column is text, the others are figures; `total` is set apart at the end.

    `ends_in_text`: the last column is text, too. `anchors` are ids of the rows, for pictures that lead to them.
    """

    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    total: tuple[Cell, ...] = ()
    caption: str = ""
    ends_in_text: bool = False
    anchors: tuple[str, ...] = ()


@dataclass(frozen=True)
class Prose:
    """A paragraph."""

    text: str


@dataclass(frozen=True)
class Figure:
    """A drawing as SVG, which carries its own title and description. Text renderings leave it out."""

    svg: Markup
    caption: str = ""


@dataclass(frozen=True)
class Code:
    """A long listing, folded away behind `summary`. Text renderings leave it out."""

    summary: str
    text: str


@dataclass(frozen=True)
class Line:
    """One line of code, and what there is to say about it."""

    code: str
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Group:
    """Lines that belong together, folded away behind a name; `num_left_out` more are not shown."""

    name: str
    lines: tuple[Line, ...]
    num_left_out: int = 0
    tone: str = ""


@dataclass(frozen=True)
class Browser:
    """Groups of lines that can be searched, by what they belong to. Text renderings leave it out.

    `what` says what a line is, in the plural. `note` says what is not shown.
    """

    chapters: tuple[tuple[str, tuple[Group, ...]], ...]
    what: str
    note: str = ""


Block = Table | Prose | Figure | Code | Browser


@dataclass(frozen=True)
class Section:
    """A titled part of a report."""

    title: str
    blocks: tuple[Block, ...]

    @property
    def slug(self) -> str:
        """The section's anchor."""
        return "-".join("".join(c if c.isalnum() else " " for c in self.title.lower()).split())


@dataclass(frozen=True)
class Card:
    """One figure worth seeing first."""

    label: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class Report:
    """Everything a report says, in order. Equal reports render to equal bytes."""

    title: str
    subtitle: str
    cards: tuple[Card, ...] = ()
    sections: tuple[Section, ...] = ()

    def before(self, *sections: Section) -> Report:
        """This report with further sections at its top."""
        return replace(self, sections=(*sections, *self.sections))

    def after(self, *sections: Section) -> Report:
        """This report with further sections at its end."""
        return replace(self, sections=(*self.sections, *sections))

    def to_text(self) -> str:
        """The report as plain text, without figures and listings."""
        from wholestep.report.explain import render_text

        return render_text(self)

    def to_html(self) -> str:
        """The report as one self-contained HTML page."""
        from wholestep.report.html import render_html

        return render_html(self)

    def write(self, path: Path) -> Path:
        """Write the HTML page, creating folders on the way, and return its path."""
        return write_output(path, self.to_html())
