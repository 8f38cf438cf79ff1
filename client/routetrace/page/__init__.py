"""The web page: an HTTP server beside a routetrace-server, and a client of it like any other.

`routetrace page` starts it; docs/page.md describes it.
"""
