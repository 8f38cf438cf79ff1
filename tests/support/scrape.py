"""Samples of a server's /metrics, and the status of its other pages."""

from __future__ import annotations

import urllib.error
import urllib.request

from prometheus_client.parser import text_string_to_metric_families


def http_status(address: str, path: str) -> int:
    """Status with which a page at a metrics port is served."""
    try:
        with urllib.request.urlopen(f"http://{address}{path}", timeout=60) as response:
            return response.status
    except urllib.error.HTTPError as error:
        return error.code


class Scraped:
    """One scrape.

    Attributes:
        types: by family, as Prometheus knows it: counters end in _total.
        labels: by family, the names of the labels of its samples, those of all of them together.
    """

    def __init__(self, target: str) -> None:
        with urllib.request.urlopen(f"http://{target}/metrics", timeout=30) as answer:
            text = answer.read().decode()
        self.types: dict[str, str] = {}
        self.labels: dict[str, set[str]] = {}
        self._values: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
        for family in text_string_to_metric_families(text):
            name = family.name + "_total" * (family.type == "counter")
            self.types[name] = family.type
            self.labels[name] = set()
            for sample in family.samples:
                self.labels[name] |= sample.labels.keys() - {"le"}
                self._values[sample.name, frozenset(sample.labels.items())] = sample.value

    def samples(self, name: str, **labels: str) -> list[tuple[dict[str, str], float]]:
        """Those with these labels, and any others."""
        return [
            (dict(having), value)
            for (sample, having), value in self._values.items()
            if sample == name and having >= labels.items()
        ]

    def value(self, name: str, **labels: str) -> float:
        """Of them together; 0 if there is none."""
        return sum(value for _, value in self.samples(name, **labels))
