"""The daemon: takes chunks from capture agents, keeps them, and serves traces to readers."""
