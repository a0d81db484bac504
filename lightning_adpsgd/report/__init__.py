"""A page about trainings, made from their files, for any browser.

`collect` reads folders, `page_of` makes one HTML page of what it finds, and
`write_page` writes that. The page draws itself, and needs no network. All three need
only Python, and neither train, score nor average anything.
"""

from lightning_adpsgd.report.collect import Report, collect
from lightning_adpsgd.report.page import page_of, write_page

__all__ = ["Report", "collect", "page_of", "write_page"]
