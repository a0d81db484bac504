"""A page of what trainings have left on the disk, for a browser without a network.

`collect` reads folders, `page_of` makes one HTML file of what it has found, which draws
itself, and `write_page` writes it. Neither trains, scores or averages anything, and
both need Python alone.
"""

from lightning_adpsgd.report.collect import Report, collect
from lightning_adpsgd.report.page import page_of, write_page

__all__ = ["Report", "collect", "page_of", "write_page"]
