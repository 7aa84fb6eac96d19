"""What there is to say about a compiled step, as text, as a page and in pictures."""

from wholestep.report.cut_picture import save_failing_cut
from wholestep.report.document import Bar, Card, Code, Figure, Prose, Report, Section, Table
from wholestep.report.memory_pictures import save_curve
from wholestep.report.sections import step_report

__all__ = [
    "Bar",
    "Card",
    "Code",
    "Figure",
    "Prose",
    "Report",
    "Section",
    "Table",
    "save_curve",
    "save_failing_cut",
    "step_report",
]
