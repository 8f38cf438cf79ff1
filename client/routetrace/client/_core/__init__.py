"""Plan calls and check answers, without network I/O: retries, read plans, results."""
