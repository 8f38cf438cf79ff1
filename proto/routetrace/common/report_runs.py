"""Runs of reports: rows that a trainer reports are in a run of their own, beside those of its run.

So no list, total or alarm of the run counts them, and every call works on them: they have leases,
quotas and ids like any other rows.
"""

from __future__ import annotations

from routetrace.common.limits import check_id

_MARK = "@report:"


def report_run(run: str, reporter: str) -> str:
    """Return the run of what a reporter reports of a run.

    Raises:
        InvalidArgument: if the names are no ids, or too long together.
    """
    check_id("reporter", reporter)
    name = f"{run}{_MARK}{reporter}"
    check_id("run and reporter", name)
    return name


def reported_run(run: str) -> str:
    """Return the run whose traces are reported in a run; the same name if it has no reports."""
    return run.partition(_MARK)[0]


def reporter_of(run: str, of: str) -> str:
    """Return the reporter whose reports of the run `of` are in a run; "" if none are."""
    return run.removeprefix(f"{of}{_MARK}") if run.startswith(f"{of}{_MARK}") else ""


def is_report_run(run: str) -> bool:
    """Return whether a run holds reports."""
    return _MARK in run
