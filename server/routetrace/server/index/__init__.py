"""Derive the state from records: slots, requests, traces and their joins."""
