"""A page of what trainings have left on the disk, for a browser without a network.

`collect` reads folders, and `write_page` writes what it has found into one HTML file
that draws itself. Neither trains, scores or averages anything, and both need Python
alone.
"""

from lightning_adpsgd.report.collect import Report, collect
from lightning_adpsgd.report.page import write_page

__all__ = ["Report", "collect", "write_page"]
