"""The Dockerfile and the compose file, as data."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from routetrace.server.settings.config import ServerConfig
from routetrace.server.settings.loading import load_config

ROOT = Path(__file__).parents[2]
COMPOSE = ROOT / "docker/compose.yaml"
COMPOSE_TLS = ROOT / "docker/compose.tls.yaml"


@dataclass
class Stage:
    """One stage of a Dockerfile, with what it has from the stages below it."""

    name: str
    base: str
    own: list[tuple[str, str]] = field(default_factory=list)
    below: list[tuple[str, str]] = field(default_factory=list)

    def values(self, instruction: str) -> list[str]:
        """Arguments of an instruction, in order."""
        return [value for name, value in self.below + self.own if name == instruction]

    def value(self, instruction: str) -> str:
        """The argument that counts, which is the last; "" if there is none."""
        return (self.values(instruction) or [""])[-1]

    def argv(self, instruction: str) -> list[str]:
        """The argument of an instruction in exec form."""
        value = json.loads(self.value(instruction) or "[]")
        assert all(isinstance(word, str) for word in value)
        return value

    def pairs(self, instruction: str) -> dict[str, str]:
        """KEY=value words of ENV or LABEL."""
        words = re.findall(r'([\w.]+)=("[^"]*"|\S+)', " ".join(self.values(instruction)))
        return {name: value.strip('"') for name, value in words}


def read_dockerfile(path: Path) -> dict[str, Stage]:
    text = re.sub(r"^\s*#[^\n]*\n", "", path.read_text("utf-8"), flags=re.MULTILINE)
    stages: dict[str, Stage] = {}
    stage = Stage("", "")
    for line in text.replace("\\\n", " ").splitlines():
        if not line.strip():
            continue
        name, _, value = line.strip().partition(" ")
        if name == "FROM":
            base, _, alias = value.partition(" AS ")
            below = stages[base].below + stages[base].own if base in stages else []
            stage = stages[alias] = Stage(alias, base, [], list(below))
        else:
            stage.own.append((name, value.strip()))
    return stages


STAGES = read_dockerfile(ROOT / "docker/Dockerfile")
SPEC: dict[str, Any] = yaml.safe_load(COMPOSE.read_text("utf-8"))
SERVICES: dict[str, dict[str, Any]] = SPEC["services"]


def stage_of(service: str) -> Stage:
    return STAGES[SERVICES[service]["build"]["target"]]


def compose_config() -> ServerConfig:
    assert stage_of("server").argv("ENTRYPOINT") == ["routetrace-server"]
    return load_config(SERVICES["server"]["command"])
