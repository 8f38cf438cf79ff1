"""Hash of a model: says which engines run the same model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

from routetrace.common.errors import InvalidArgument, quoted, typed

#: Keys of a configuration that say where a model lies, or which software wrote or runs it.
_NOT_OF_THE_MODEL = frozenset(
    {"_name_or_path", "name_or_path", "transformers_version", "_attn_implementation_autoset"}
)

_DIGITS = 16


def model_hash(config: Any, quantization: str | None = None) -> str:
    """Return the hash of a model's configuration and quantization: 16 hexadecimal digits.

    Paths and versions of software do not count. Models of one architecture have one hash: their
    weight versions, or runs of their own, tell them apart.

    Args:
        config: a mapping, or a configuration of Transformers.
        quantization: the engine's name for how it quantizes the weights; None or "": it does not.

    Raises:
        InvalidArgument: if `config` is neither.
    """
    facts = config.to_dict() if hasattr(config, "to_dict") else config
    if not isinstance(facts, Mapping):
        raise InvalidArgument(
            field="config", value=typed(config), expected="a mapping, or a configuration"
        )
    text = json.dumps([_of_the_model(facts), quantization or ""], sort_keys=True, default=str)
    return blake2b(text.encode(), digest_size=_DIGITS // 2).hexdigest()


def _of_the_model(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {
            str(key): _of_the_model(item)
            for key, item in value.items()
            if key not in _NOT_OF_THE_MODEL
        }
    if isinstance(value, (list, tuple)):
        return [_of_the_model(item) for item in value]
    return value


def model_number(field: str, text: object) -> int:
    """Return a model's hash as the number of the contract; 0 for "", which is unknown.

    Raises:
        InvalidArgument: if it is no such hash.
    """
    if text == "":
        return 0
    if isinstance(text, str) and len(text) == _DIGITS:
        try:
            return int(text, 16)
        except ValueError:
            pass
    raise InvalidArgument(
        field=field,
        value=quoted(text) if isinstance(text, str) else typed(text),
        expected=f"{_DIGITS} hexadecimal digits",
        remedy="use model_hash(config)",
    )
