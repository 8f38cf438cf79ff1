"""The table as a picture and as a page."""
