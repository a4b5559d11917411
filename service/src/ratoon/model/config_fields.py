"""Rules for the fields of a configuration of any supported family.

In: a value by the name that config.json has for it. Out: nothing, or the error that names the
field. Invariant: a configuration that passes computes finite numbers with finite weights, and none
of its sizes makes anybody count or allocate without bound. Imports neither torch nor transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from ratoon.errors import RatoonError, invalid, shown, unsupported

# Positions become float32 when they are turned into angles, and are exact up to here.
MAX_POSITIONS = 2**24
_MAX_SIZE = 2**20
MAX_LAYERS = 1024
FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """`holds` takes any value that JSON has."""

    expected: str
    holds: Callable[[object], bool]


def integer(low: int, high: int) -> Rule:
    """An integer in [low, high]."""

    def holds(value: object) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high

    return Rule(expected=f"an integer in [{low}, {high}]", holds=holds)


def number(low: float, high: float) -> Rule:
    """A finite number in [low, high]."""

    def holds(value: object) -> bool:
        # A NaN is in no range.
        return (
            isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high
        )

    return Rule(expected=f"a number in [{low:g}, {high:g}]", holds=holds)


def word(*words: str) -> Rule:
    """One of these texts."""

    def holds(value: object) -> bool:
        return isinstance(value, str) and value in words

    return Rule(expected=f"one of {', '.join(words)}", holds=holds)


def list_of(rule: Rule, most: int) -> Rule:
    """A list of at most `most` values that the rule holds for."""

    def holds(value: object) -> bool:
        if not isinstance(value, list) or len(cast("list[object]", value)) > most:
            return False
        return all(map(rule.holds, cast("list[object]", value)))

    return Rule(expected=f"a list of at most {most}, each {rule.expected}", holds=holds)


def either(first: Rule, second: Rule) -> Rule:
    """Either of two rules."""
    return Rule(
        expected=f"{first.expected}, or {second.expected}",
        holds=lambda value: first.holds(value) or second.holds(value),
    )


def or_null(rule: Rule) -> Rule:
    """The rule, or null."""
    return either(rule, Rule(expected="null", holds=lambda value: value is None))


FLAG = Rule(expected="true or false", holds=lambda value: isinstance(value, bool))
SIZE = integer(1, _MAX_SIZE)
_HEADS = integer(1, 4096)
TOKEN = integer(0, MAX_POSITIONS - 1)

FIELD_RULES: Mapping[str, Rule] = {
    "vocab_size": integer(1, MAX_POSITIONS),
    "hidden_size": SIZE,
    "intermediate_size": SIZE,
    "num_hidden_layers": integer(1, MAX_LAYERS),
    "num_attention_heads": _HEADS,
    "num_key_value_heads": or_null(_HEADS),
    "head_dim": or_null(integer(2, 4096)),
    "hidden_act": word(
        "silu", "swish", "gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "relu", "relu2"
    ),
    "max_position_embeddings": integer(1, MAX_POSITIONS),
    "initializer_range": number(0, 1),
    # The epsilon is added in float32 to a mean of squares, which may be zero.
    "rms_norm_eps": number(1e-12, 1),
    "use_cache": FLAG,
    # -1 stands for none in early folders.
    "pad_token_id": or_null(integer(-1, MAX_POSITIONS - 1)),
    "bos_token_id": or_null(TOKEN),
    "eos_token_id": or_null(either(TOKEN, list_of(TOKEN, 1024))),
    "pretraining_tp": or_null(integer(1, 4096)),
    "tie_word_embeddings": FLAG,
    "attention_bias": FLAG,
    "mlp_bias": FLAG,
    "use_sliding_window": FLAG,
    "sliding_window": or_null(integer(1, MAX_POSITIONS)),
    "max_window_layers": or_null(integer(0, _MAX_SIZE)),
    "layer_types": or_null(list_of(word(FULL, SLIDING), MAX_LAYERS)),
    "dtype": or_null(word("auto", "float32", "bfloat16", "float16", "float64")),
}
_FACTOR = number(1, 2**16)
_FINITE = number(-1e300, 1e300)
_ROTATIONS = number(1e-3, 1e6)
# An entry that transformers does not look at.
_PLAIN = Rule(
    expected="a finite number, a flag, a text or null, for all layers",
    holds=lambda value: value is None or isinstance(value, str | bool) or _FINITE.holds(value),
)
_ROPE_RULES: Mapping[str, Rule] = {
    "rope_theta": number(2, 1e12),
    "partial_rotary_factor": number(1, 1),
    "factor": _FACTOR,
    "original_max_position_embeddings": integer(1, MAX_POSITIONS),
    "attention_factor": or_null(number(1e-3, 1e3)),
    "beta_fast": or_null(_ROTATIONS),
    "beta_slow": or_null(_ROTATIONS),
    "mscale": or_null(number(0, 100)),
    "mscale_all_dim": or_null(number(0, 100)),
    "truncate": FLAG,
    "low_freq_factor": _ROTATIONS,
    "high_freq_factor": _ROTATIONS,
}
# The types whose frequencies are functions of the position alone, and the entries that each needs.
# "dynamic" and "longrope" depend on the length of the sequence, which a packed run does not have.
_ROPE_NEEDS: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
}
SUPPORTED_ROPE_TYPES = tuple(_ROPE_NEEDS)
_LENGTHENED = ("llama3", "yarn")
# Older folders have these in the configuration itself, newer ones in rope_parameters.
_ROPE_OUTSIDE = ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings")
ROPE_FIELDS = ("rope_parameters", "rope_scaling", *_ROPE_OUTSIDE)


def partial_rotary(head_dim: int) -> Mapping[str, Rule]:
    """Rules of `rope_parameters` where only a part of each head is rotated, of whole pairs."""

    def holds(value: object) -> bool:
        return number(1 / 1024, 1).holds(value) and not _is_odd(head_dim * cast("float", value))

    expected = f"a share of {head_dim} elements that leaves whole pairs"
    return {"partial_rotary_factor": Rule(expected=expected, holds=holds)}


def _is_odd(size: float) -> bool:
    return int(size) % 2 == 1 or int(size) == 0


def check_field(name: str, value: object, rule: Rule) -> None:
    """Raises INVALID_ARGUMENT for a value that the field `name` cannot have in any model."""
    if not rule.holds(value):
        raise invalid(f"config.{name}", shown(value), rule.expected)


def check_together(config: Mapping[str, Any]) -> None:
    """Raises INVALID_ARGUMENT for the first field of any family that contradicts another; each
    field was checked alone before."""
    layers = cast("int", config["num_hidden_layers"])
    types = cast("list[str] | None", config.get("layer_types"))
    if types is not None and len(types) != layers:
        raise invalid("config.layer_types", f"{len(types)} of them", f"one for each of {layers}")


def read_rope(
    raw: Mapping[str, object],
    max_positions: int,
    *,
    rules: Mapping[str, Rule] | None = None,
    theta: float = 10_000.0,
) -> dict[str, Any]:
    """Returns a configuration's rotary embeddings as `rope_parameters`, wherever it states them.

    `rules`: those of entries for which a family takes values of its own. `theta`: its default.

    Raises UNSUPPORTED for a value out of its range, for
    one that is stated twice and differently, and for a type whose frequencies are not functions of
    the position alone.
    """
    rope = _gathered(raw)
    rope_type = rope.setdefault("rope_type", "default")
    if not isinstance(rope_type, str) or rope_type not in _ROPE_NEEDS:
        expected = f"one of {', '.join(SUPPORTED_ROPE_TYPES)}"
        raise _no_rope("rope_type", rope_type, expected)
    # Not every reader takes null for the default.
    rope.setdefault("rope_theta", raw.get("rope_theta", theta))
    original = raw.get("original_max_position_embeddings")
    if rope_type in _LENGTHENED:
        # transformers uses the same default.
        rope.setdefault("original_max_position_embeddings", original or max_positions)
        _check_same("original_max_position_embeddings", rope, original)
    known = {**_ROPE_RULES, **(rules or {})}
    is_implied = rope_type == "yarn" and rope.get("factor", 0) is None
    for name, value in rope.items():
        if name == "factor" and is_implied:
            continue
        rule = known.get(name, _PLAIN)
        if not rule.holds(value):
            raise _no_rope(name, value, rule.expected)
    for name in _ROPE_NEEDS[rope_type]:
        if name not in rope:
            raise _no_rope(name, "nothing", f"a number, which {rope_type} needs")
    _check_rope_together(rope, max_positions)
    return rope


def read_rope_by_layer(
    raw: Mapping[str, object],
    max_positions: int,
    *,
    theta: float,
    local: tuple[str, float] | None = None,
) -> dict[str, Any]:
    """Returns the rotary embeddings of layers with full attention and of those with a window.

    A folder states them by the kind of a layer, or, as earlier ones, those of full attention like
    any other folder's and the base of the others in a field of its own. `local`: that field, and
    its default; None: all layers have one base. Layers with a window are never scaled. Raises what
    `read_rope` raises.
    """
    given = cast("dict[str, object]", raw.get("rope_parameters") or {})
    if not isinstance(given, dict) or given.keys() - {FULL, SLIDING}:
        expected = f"an object with {FULL} and {SLIDING}, or null"
        raise unsupported("config.rope_parameters", shown(given), expected)
    earlier = {name: raw[name] for name in ROPE_FIELDS if name in raw}
    full = read_rope(earlier | {"rope_parameters": given.get(FULL)}, max_positions, theta=theta)
    field, base = local or ("rope_theta", theta)
    own = {"rope_parameters": given.get(SLIDING), "rope_theta": raw.get(field)}
    windowed = read_rope({n: v for n, v in own.items() if v is not None}, max_positions, theta=base)
    if windowed["rope_type"] != "default":
        raise _no_rope(f"{SLIDING}.rope_type", windowed["rope_type"], "default")
    # transformers 5 reads a base that is not stated by kind for full attention alone, 4 for both.
    stated = given.get(SLIDING) is not None or windowed["rope_theta"] == base
    if local is None and not (stated and windowed["rope_theta"] == full["rope_theta"]):
        got = f"{full['rope_theta']} and {windowed['rope_theta']}"
        expected = f"one for both kinds of layers, in rope_parameters if it is not {base:g}"
        raise _no_rope("rope_theta", got, expected, is_text=True)
    return {FULL: full, SLIDING: windowed}


def _gathered(raw: Mapping[str, object]) -> dict[str, Any]:
    """Entries of `rope_parameters`, of the older `rope_scaling`, and of the configuration
    itself."""
    rope: dict[str, Any] = {}
    for field in ("rope_parameters", "rope_scaling"):
        given = raw.get(field)
        if given is None:
            continue
        if not isinstance(given, dict):
            raise unsupported(f"config.{field}", shown(given), "an object, or null")
        for name, value in cast("dict[str, object]", given).items():
            own = "rope_type" if name == "type" else name
            _check_same(own, rope, value)
            rope[own] = value
    for name in ("rope_theta", "partial_rotary_factor"):
        value = raw.get(name)
        _check_same(name, rope, value)
        if value is not None:
            rope[name] = value
    scaling = cast("dict[str, object]", raw.get("rope_scaling") or {})
    if scaling and "rope_theta" in rope.keys() - scaling.keys() - raw.keys():
        # transformers takes 10000 then: it reads `rope_scaling` in place of all `rope_parameters`.
        raise _no_rope("rope_theta", rope["rope_theta"], "beside rope_scaling, or in it, as well")
    return rope


def _check_same(name: str, rope: Mapping[str, object], value: object) -> None:
    """Refuses two different values, because readers of the folder may take either."""
    if value is not None and rope.get(name, value) not in (value, None):
        got = f"{shown(rope[name])} and {shown(value)}"
        raise _no_rope(name, got, "one value", is_text=True)


def _check_rope_together(rope: Mapping[str, Any], max_positions: int) -> None:
    if rope["rope_type"] == "llama3" and rope["low_freq_factor"] >= rope["high_freq_factor"]:
        expected = f"above low_freq_factor, {rope['low_freq_factor']}"
        raise _no_rope("high_freq_factor", rope["high_freq_factor"], expected)
    if rope["rope_type"] != "yarn":
        return
    if (rope.get("beta_fast") or 32) < (slow := rope.get("beta_slow") or 1):
        raise _no_rope("beta_fast", rope.get("beta_fast"), f"at least beta_slow, {slow}")
    original = cast("int", rope["original_max_position_embeddings"])
    factor = rope["factor"] or max_positions / original
    if not _FACTOR.holds(factor) or original * factor > MAX_POSITIONS:
        expected = f"at least 1 and at most {MAX_POSITIONS} positions, of {original}"
        raise _no_rope("factor", factor, expected)


def _no_rope(name: str, got: object, expected: str, *, is_text: bool = False) -> RatoonError:
    field = f"config.rope_parameters.{shown(name)[1:-1]}"
    return unsupported(field, got if is_text else shown(got), expected)
