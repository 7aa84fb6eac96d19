"""What there is to say about a compiled step, as text and as a page."""

from wholestep.report.document import Bar, Card, Code, Figure, Prose, Report, Section, Table
from wholestep.report.sections import step_report

__all__ = ["Bar", "Card", "Code", "Figure", "Prose", "Report", "Section", "Table", "step_report"]
