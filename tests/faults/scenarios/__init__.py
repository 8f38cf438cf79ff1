"""One module for each scenario: `run(seed, **options)` returns its counts."""
