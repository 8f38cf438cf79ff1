"""User agent of the web page."""

#: Prefix of the user agent of clients that only display traces; the server does not count their
#: reads.
USER_AGENT = "routetrace-page"
