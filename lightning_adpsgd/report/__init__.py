"""A page about trainings, made from their files, for a browser without a network.

`collect` reads folders, `page_of` turns the findings into one HTML file that draws
itself, and `write_page` writes it. None of them trains, scores or averages anything,
and they need only Python.
"""

from lightning_adpsgd.report.collect import Report, collect
from lightning_adpsgd.report.page import page_of, write_page

__all__ = ["Report", "collect", "page_of", "write_page"]
