"""Routing layout of a model, from its Hugging Face config.

The expert count and the top-k have one meaning and many names. A config names its MoE layers in one
of these ways; the most explicit one wins:

1. a type for each layer (`mlp_layer_types`, `layers_block_type`, `hybrid_override_pattern`,
   `block_configs`);
2. the ids of the MoE layers (`moe_layers`, `moe_layers_enum`, `moe_layer_list`);
3. conditions on the layer's index, all of which must hold (`first_k_dense_replace`,
   `moe_layer_freq`, `decoder_sparse_step`, `mlp_only_layers`, ...);
4. nothing at all: every decoder layer is MoE, as in Mixtral.

MTP layers come after the decoder layers and are never part of a layout. Hash-routed layers
(DeepSeek-V4) are MoE layers like the others.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from routetrace.common.errors import ModelNotSupported, kind_of, quoted
from routetrace.common.limits import MAX_LAYERS

_Config = Mapping[str, Any]

# Keys of the language model in configs of multi-modal models.
_TEXT_CONFIGS = ("text_config", "llm_config", "language_config", "thinker_config")

_NUM_EXPERTS = (
    "num_experts",
    "n_routed_experts",
    "num_local_experts",
    "moe_num_experts",
    "num_routed_experts",
)
_TOP_K = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "experts_per_token",
    "num_selected_experts",
    "top_k_experts",
    "experts_top_k",
    "moe_top_k",
    "moe_topk",
    "moe_k",
)
_NUM_LAYERS = ("num_hidden_layers", "num_layers", "n_layers")
# False in the dense members of a family whose configs all have the expert keys.
_SWITCHES = ("enable_moe_block", "is_moe", "use_moe")

# key -> (words for a MoE layer, words for a dense one). A list without any of these words is about
# something else: `layer_types` mostly describes attention.
_TYPES: dict[str, tuple[frozenset[str], frozenset[str]]] = {
    "mlp_layer_types": (frozenset({"sparse", "moe", "hash_moe"}), frozenset({"dense"})),
    "layers_block_type": (frozenset({"moe"}), frozenset({"mlp"})),
    "layer_types": (frozenset({"moe"}), frozenset({"mlp"})),
    "hybrid_override_pattern": (frozenset("E"), frozenset("-")),
    "block_configs": (frozenset({"moe"}), frozenset({"mlp"})),  # Nemotron-H Puzzle
}
_IDS = ("moe_layers", "moe_layers_enum", "moe_layer_list")

_Test = Callable[[int, int], bool]  # (layer, value of the key) -> may the layer be MoE


def _from(layer: int, first: int) -> bool:
    return layer >= first


def _until(layer: int, last: int) -> bool:
    return last == -1 or layer <= last


def _multiple(layer: int, step: int) -> bool:
    return layer % step == 0


def _every(layer: int, step: int) -> bool:
    return (layer + 1) % step == 0


# key -> (least value allowed, condition)
_CONDITIONS: dict[str, tuple[int, _Test]] = {
    "first_k_dense_replace": (0, _from),
    "num_dense_layers": (0, _from),
    "n_dense_first_layers": (0, _from),
    "dense_mlp_idx": (0, _from),
    "moe_layer_num_skipped": (0, _from),
    "moe_layer_start_index": (0, _from),
    "moe_layer_end_index": (-1, _until),
    "moe_layer_freq": (1, _multiple),
    "expert_layer_period": (1, _multiple),  # counted from expert_layer_offset
    "decoder_sparse_step": (1, _every),
    "moe_layer_frequency": (1, _every),
    "moe_layer_interval": (1, _every),
    "interleave_moe_layer_step": (1, _every),
}

# Families whose own default is not "every layer": a config.json of theirs that leaves the layers
# out relies on a default that only their config class knows.
# fmt: off
_NEEDS_LAYERS = frozenset({
    "afmoe", "axk1", "axk2", "bailing_hybrid", "beam", "deepseek_v3", "deepseek_v32", "dots3_note",
    "ernie4_5_moe", "ernie4_5_vl_moe", "exaone_moe", "flint", "glm4_moe", "glm4_moe_lite",
    "glm4v_moe", "glm5_next", "glm_moe_dsa", "hy_v3", "hy_v4", "jamba", "kimi_linear", "laguna",
    "lfm2_moe", "mimo_v2_flash", "mistral_large4", "nemotron_h", "step3p5", "unlimited_ocr",
})
# fmt: on


class Routing(NamedTuple):
    """Numbers of a model's routing."""

    layer_ids: tuple[int, ...]
    num_hidden_layers: int
    num_experts: int
    top_k: int


def routing_of(config: object) -> Routing:
    """Return the numbers of all MoE layers of a model; see `ModelLayout.from_config`."""
    text = _language_model(_mapping("config", config))
    switch = next((key for key in _SWITCHES if text.get(key) is False), None)
    if switch is not None:
        raise _not_moe((switch,), text)
    num_experts = _number(text, _NUM_EXPERTS, 0)
    if num_experts <= 1:
        raise _not_moe(_NUM_EXPERTS, text)
    top_k = _number(text, _TOP_K, 1)
    count, layer_ids = _moe_layers(text)
    # The router of LongCat may also choose an expert that computes nothing.
    if text.get("zero_expert_num") is not None:
        num_experts += _number(text, ("zero_expert_num",), 0)
    return Routing(tuple(layer_ids), count, num_experts, top_k)


def _mapping(name: str, config: object) -> _Config:
    if isinstance(config, Mapping):
        return config
    values: object = None
    if callable(config) and hasattr(config, "config"):  # a model, which hides its numbers
        raise ModelNotSupported(
            field=name, value=kind_of(config), expected="a config", remedy="use model.config"
        )
    if not isinstance(config, type):
        to_dict = getattr(config, "to_dict", None)
        values = to_dict() if callable(to_dict) else getattr(config, "__dict__", None)
    if not isinstance(values, Mapping):
        raise ModelNotSupported(
            field=name,
            value=kind_of(config),
            expected="a config or a mapping",
            remedy="use AutoConfig.from_pretrained(...)" if isinstance(config, str) else "",
        )
    return values


def _sections(config: _Config) -> Iterator[_Config]:
    """Yield the configs of language models in `config`, innermost first, then `config`."""
    for key in _TEXT_CONFIGS:
        if config.get(key) is not None:
            outer = {"model_type": config.get("model_type")}
            yield from _sections({**outer, **_mapping(key, config[key])})
    if config.get("ffn_config") is not None:  # DBRX
        config = {**_mapping("ffn_config", config["ffn_config"]), **config}
    yield config


def _language_model(config: _Config) -> _Config:
    """Return the innermost config with experts, else the innermost."""
    sections = list(_sections(config))
    return next((section for section in sections if _found(section, _NUM_EXPERTS, 0)), sections[0])


def _given(config: _Config, keys: tuple[str, ...]) -> list[str]:
    return [key for key in keys if config.get(key) is not None]


def _not_moe(keys: tuple[str, ...], config: _Config) -> ModelNotSupported:
    value = ", ".join(f"{key} = {config[key]!r}" for key in _given(config, keys)) or "absent"
    names = " | ".join(keys)
    model = f" ({quoted(config['model_type'])})" if config.get("model_type") else ""
    return ModelNotSupported(
        f"not a MoE model{model}: looked for {names}, found {value}",
        field=names,
        value=value,
        expected="more than one routed expert",
    )


def _integers(key: str, value: object, least: int) -> list[int]:
    """Return the value, or the values of a list, as integers not below `least`."""
    values: list[Any] = list(value) if isinstance(value, (list, tuple)) else [value]
    if any(not isinstance(v, int) or isinstance(v, bool) or v < least for v in values):
        raise ModelNotSupported(field=key, value=value, expected=f"integers not below {least}")
    return values


def _found(config: _Config, keys: tuple[str, ...], least: int) -> dict[str, list[int]]:
    """Return all numbers that a config gives for these keys, for all layers and modalities.

    A list has one entry per layer (Hunyuan) or modality (Ernie); `per_layer_config` and
    `block_configs` (Nemotron-H Puzzle) have single layers.
    """
    overrides = config.get("per_layer_config")
    layers = list(overrides.values()) if isinstance(overrides, Mapping) else []
    blocks = config.get("block_configs")
    layers += blocks if isinstance(blocks, (list, tuple)) else []
    sources = [config, *(layer for layer in layers if isinstance(layer, Mapping))]
    found = {
        key: [
            number
            for source in sources
            if source.get(key) is not None
            for number in _integers(key, source[key], least)
        ]
        for key in keys
    }
    return {key: numbers for key, numbers in found.items() if numbers}


def _number(config: _Config, keys: tuple[str, ...], least: int) -> int:
    """Return the number that all given keys agree on, for all layers and modalities."""
    found = _found(config, keys, least)
    if not found:
        raise _not_known(keys, config)
    numbers = {number for values in found.values() for number in values}
    if len(numbers) != 1:
        raise ModelNotSupported(
            field=" | ".join(keys),
            value=found,
            expected="one number, the same for all layers and modalities",
        )
    return numbers.pop()


def _not_known(keys: tuple[str, ...], config: _Config) -> ModelNotSupported:
    """Return the error for a config without any of the names that are known for a number."""
    names, model = " | ".join(keys), config.get("model_type")
    known = {*_NUM_EXPERTS, *_TOP_K, *_NUM_LAYERS, *_CONDITIONS, *_TYPES, *_IDS}
    others = [
        f"{key} = {value}"
        for key, value in config.items()
        if isinstance(key, str) and re.search("expert|moe|top_?k", key) and key not in known
        if isinstance(value, int) and not isinstance(value, bool)
    ]
    value = f"absent, beside {', '.join(others)}" if others else "absent"
    expected = "one of these names; others are not known"
    remedy = "make a ModelLayout of the numbers of the model; a dense model has none"
    return ModelNotSupported(
        f"no known name in the config{f' ({quoted(model)})' if model else ''}: looked for {names}, "
        f"found {value}; expected {expected}; {remedy}",
        field=names,
        value=value,
        expected=expected,
        remedy=remedy,
    )


def _moe_layers(config: _Config) -> tuple[int, list[int]]:
    """Return the number of decoder layers, and the ids of the MoE layers among them."""
    blocks = config.get("layers_block_type")
    if not _given(config, _NUM_LAYERS) and isinstance(blocks, (list, tuple)):
        count = len(blocks)  # the only source for Nemotron-H
    elif config.get("model_type") == "longcat_flash":
        # transformers up to 5.17 also writes num_hidden_layers: attention blocks, two to a layer.
        count = _number(config, ("num_layers",), 1)
    else:
        count = _number(config, _NUM_LAYERS, 1)
    if count > MAX_LAYERS:  # before anything of that size is allocated
        names = " | ".join(_NUM_LAYERS)
        raise ModelNotSupported(field=names, value=count, expected=f"at most {MAX_LAYERS} layers")
    for rule in (_by_type, _by_id, _by_condition):
        found = rule(config, count)
        if found is not None:
            break
    else:
        model = str(config.get("model_type") or "").removesuffix("_text")
        if model in _NEEDS_LAYERS:
            tried = " | ".join((*_TYPES, *_IDS, *_CONDITIONS, "mlp_only_layers"))
            raise ModelNotSupported(
                f"{model} does not say which layers are MoE, and not all of them are: "
                f"looked for {tried}; give the config object of transformers instead of a mapping",
                field=tried,
                value="absent",
                expected="one of them",
            )
        found = ("num_hidden_layers", list(range(count)))
    keys, layers = found
    if not layers:
        raise ModelNotSupported(
            f"no MoE layer among {count} decoder layers, according to {keys}",
            field=keys,
            value={key: config.get(key) for key in keys.split(" & ")},
            expected=f"at least one MoE layer in [0, {count})",
        )
    return count, layers


def _by_type(config: _Config, count: int) -> tuple[str, list[int]] | None:
    for key in _given(config, tuple(_TYPES)):
        types, (moe, dense) = config[key], _TYPES[key]
        if key == "block_configs" and isinstance(types, (list, tuple)):
            types = [b.get("block_type") if isinstance(b, Mapping) else b for b in types]
        if not isinstance(types, (list, tuple, str)):
            types = ()
        known = [word for word in types if isinstance(word, str) and word in moe | dense]
        if key == "mlp_layer_types":
            if not known or len(known) < len(types):
                words = ", ".join(sorted(moe | dense))
                raise ModelNotSupported(field=key, value=config[key], expected=f"a list of {words}")
            types = types[:count]  # MTP layers may follow
        elif not known:
            continue
        if len(types) != count:
            raise ModelNotSupported(
                field=key, value=types, expected=f"one type for each of {count}"
            )
        return key, [layer for layer, word in enumerate(types) if word in moe]
    return None


def _by_id(config: _Config, count: int) -> tuple[str, list[int]] | None:
    for key in _given(config, _IDS):
        ids = config[key]
        if isinstance(ids, str):  # "3,4,5"
            words = [word.strip() for word in ids.split(",") if word.strip()]
            ids = [int(word) if word.isdecimal() else word for word in words]
        # MTP layers are counted on from the last decoder layer.
        return key, sorted({layer for layer in _integers(key, ids, 0) if layer < count})
    return None


def _by_condition(config: _Config, count: int) -> tuple[str, list[int]] | None:
    given = _given(config, (*_CONDITIONS, "mlp_only_layers"))
    layers = set(range(count))
    for key in given:
        value = config[key]
        if key == "mlp_only_layers":
            layers -= set(_integers(key, value, 0))
        elif key == "moe_layer_freq" and isinstance(value, (list, tuple)):
            if len(value) < count:
                raise ModelNotSupported(
                    field=key, value=value, expected=f"one flag for each of {count}"
                )
            layers &= {layer for layer in range(count) if value[layer]}
        else:
            least, test = _CONDITIONS[key]
            offset = 0
            if key == "expert_layer_period":
                offset = _number(config, ("expert_layer_offset",), 0)
            # A list has one entry per modality (Ernie).
            sets = [
                {layer for layer in range(count) if test(layer - offset, number)}
                for number in _integers(key, value, least)
            ]
            if any(other != sets[0] for other in sets):
                raise ModelNotSupported(
                    field=key, value=value, expected="the same layers for every modality"
                )
            layers &= sets[0]
    return (" & ".join(given), sorted(layers)) if given else None
