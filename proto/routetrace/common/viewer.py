"""Name by which the web page's calls are known."""

#: Begin of the user agent of clients that only show traces: their reads are no use of a trace.
USER_AGENT = "routetrace-page"
