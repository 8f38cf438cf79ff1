"""Errors of the operating system at the files of a store, with path, cause and remedy."""

from __future__ import annotations

import errno
from pathlib import Path

from routetrace.common.errors import quoted

_FULL = "the disk is full: cannot write to", "free space, or lower store_capacity"
_FORBIDDEN = "cannot write to", "choose a writable data_dir"
_NO_DIRECTORY = "cannot write to", "choose a data_dir whose path has directories alone"
#: Fact before the path, and remedy.
_BY_ERRNO = {
    errno.ENOSPC: _FULL,
    errno.EDQUOT: _FULL,
    errno.EFBIG: ("cannot write to", "raise the limit of file sizes (ulimit -f)"),
    errno.EACCES: _FORBIDDEN,
    errno.EPERM: _FORBIDDEN,
    errno.EROFS: _FORBIDDEN,
    errno.ENOTDIR: _NO_DIRECTORY,
    errno.EEXIST: _NO_DIRECTORY,
    errno.ENOENT: ("cannot open", "it was removed: restore data_dir from a backup"),
    errno.EMFILE: ("cannot open", "raise the limit of open files (ulimit -n)"),
    errno.ENFILE: ("cannot open", "raise the machine's limit of open files (fs.file-max)"),
    errno.EIO: ("cannot read or write", "the disk fails: check it (dmesg), or replace it"),
}


def explain(error: OSError, directory: Path) -> str:
    """Return a line with the path, the cause and a remedy.

    Args:
        error: error of a call on a file.
        directory: directory of the store, which stands for a path that the error lacks.
    """
    path = Path(str(error.filename or directory))
    fact, remedy = _BY_ERRNO.get(error.errno or 0, ("cannot use", ""))
    if error.errno == errno.ENOENT and path in (directory, *directory.parents):
        fact, remedy = _FORBIDDEN  # the file system, such as /proc, takes no new directory
    text = f"{fact} {quoted(str(path))} ({error.strerror or error})"
    return f"{text}; {remedy}" if remedy else text
