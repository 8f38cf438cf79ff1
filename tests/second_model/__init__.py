"""A second model of which rows readers must get, and orders of calls to judge the product with.

Written from docs/rows.md, docs/ARCHITECTURE.md and public docstrings alone, by reading neither
tests/oracle nor the server. It shares no code and no data structure with either: `log.py` keeps
every call for ever, and `answers.py` works each cell out anew by going back through that log.

    log.py       every call, in order, and the questions that one engine's calls answer
    answers.py   what a reader may get for a cell, as a set of rows; lineage, reasons
    stand_ins.py which rows of other requests may stand in, by section 6 of docs/rows.md alone
    orders.py    every order of calls that the docstrings allow, by a little engine
    lineage.py   small orders, and by hand which pass made the KV
    drive.py     an order through a real agent and server core, every cell read back
    recorded.py  the same judgement over what the oracle's engines tell
"""
