"""Data and messages of the version before this one, which this one must read.

`make previous-fixtures` writes them to `tests/fixtures/previous`, with the code of the time: run it
in the version that becomes the previous one, before its formats change.
"""
