"""The page in a real Chromium: `make test-page`; tests marked `quick` are the share of the gate."""
