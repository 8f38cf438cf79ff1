"""What /metrics of a server says."""

from __future__ import annotations

import urllib.request

from prometheus_client.parser import text_string_to_metric_families


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
