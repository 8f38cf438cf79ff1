"""A trace as one HTML file that opens without a server: the page's own view, with its data."""

from routetrace.page.one_file.content import Other
from routetrace.page.one_file.document import document

__all__ = ["Other", "document"]
