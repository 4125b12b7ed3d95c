"""YAML by the core schema, overrides, and composition of dataclasses."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch.compose import apply_overrides, compose, dotted_keys, parse_mapping, parse_yaml
from ops.errors import ConfigError


@dataclass(frozen=True)
class Inner:
    """A section."""

    width: int
    rate: float = 0.5
    flag: bool = False


@dataclass(frozen=True)
class Outer:
    """A configuration."""

    inner: Inner
    other: Inner = field(default_factory=lambda: Inner(1))
    title: str = "x"
    limit: int | None = None


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 1e-3),
        ("1.0e-3", 1e-3),
        ("-2E+4", -2e4),
        (".5", 0.5),
        ("3.", 3.0),
        (".inf", float("inf")),
        ("-.inf", float("-inf")),
        ("010", 10),
        ("1_000", 1000),
        ("+7", 7),
        ("true", True),
        ("False", False),
        ("~", None),
        ("", None),
        ("no", "no"),
        ("on", "on"),
        ("none", "none"),
        ("1:30", "1:30"),
        ("0x10", "0x10"),
        ("2026-01-02", "2026-01-02"),
        ("48MiB", "48MiB"),
        ('"1"', "1"),
        ("=", "="),
    ],
)
def test_scalars_are_read_as_people_mean_them(text: str, value: object) -> None:
    found = parse_yaml(text, "the test")
    assert found == value
    assert type(found) is type(value)


def test_not_a_number_is_a_float() -> None:
    found = parse_yaml(".nan", "the test")
    assert isinstance(found, float)
    assert found != found


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_every_python_float_is_read_back(value: float) -> None:
    assert parse_yaml(repr(value), "the test") == value


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: 2\na: 3", "line 3, column 1: the key 'a' stands twice"),
        ("s:\n  k: 1\n  k: 1", "the key 'k' stands twice"),
        ("a: [1", "is not valid YAML"),
        ("a: !!python/object:os.system x", "is not valid YAML"),
        ("a: 1\n---\nb: 2", "is not valid YAML"),
        ("", "is empty"),
        ("- 1", "holds a list"),
        ("12", "holds a number"),
        ("a: \x00", "is not valid YAML"),
        ("a: " + "[" * 5000, "is not valid YAML"),
    ],
)
def test_a_bad_document_is_refused_in_one_sentence(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=r"file\.yaml") as caught:
        parse_mapping(text, "file.yaml")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_merge_keys_do_not_count_as_duplicates() -> None:
    text = "base: &b {width: 1}\nmore:\n  <<: *b\n  width: 2"
    assert parse_mapping(text, "t")["more"] == {"width": 2}


def test_composes_defaults_and_converts_whole_numbers_to_floats() -> None:
    config = compose(Outer, {"inner": {"width": 3, "rate": 2}})
    assert config == Outer(Inner(3, 2.0))
    assert isinstance(config.inner.rate, float)
    assert compose(Outer, {"inner": {"width": 3}, "limit": None}).limit is None
    assert compose(Outer, {"inner": {"width": 3}, "limit": 4}).limit == 4


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        ({}, "inner is missing and is required."),
        ({"inner": {}}, "inner.width is missing and is required."),
        ({"inner": {"widht": 1}}, "inner.widht is not a configuration key; did you mean inner.wid"),
        ({"inner": {"width": 1}, "rate": 1}, "did you mean inner.rate or other.rate?"),
        ({"inner": {"width": 1}, "zzz": 1}, "the keys are inner, other, title, limit."),
        ({"inner": {"width": 1, "q": 1}}, "the keys of inner are width, rate, flag."),
        ({"inner": {"width": 1, 5: 1}}, "inner.5 is not a configuration key"),
        ({"inner": {"width": 1.5}}, "inner.width = 1.5 is not possible: allowed is a whole number"),
        ({"inner": {"width": True}}, "inner.width = True is not possible"),
        ({"inner": {"width": "3"}}, "inner.width = '3' is not possible"),
        ({"inner": {"width": None}}, "inner.width has no value."),
        ({"inner": {"width": 1, "rate": "fast"}}, "inner.rate = 'fast' is not possible"),
        ({"inner": {"width": 1, "rate": True}}, "inner.rate = True is not possible"),
        ({"inner": {"width": 1, "flag": "no"}}, "inner.flag = 'no' is not possible: allowed"),
        ({"inner": {"width": 1}, "title": 3}, "title = 3 is not possible: allowed is text"),
        ({"inner": {"width": 1}, "limit": "x"}, "limit = 'x' is not possible: allowed is a whole"),
        ({"inner": 3}, "inner = 3 is not possible: allowed is a section with the keys width"),
        ({"inner": None}, "inner = None is not possible: allowed is a section"),
    ],
)  # fmt: skip
def test_a_refusal_names_key_value_and_what_is_allowed(mapping: dict, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose(Outer, mapping)
    assert message in str(caught.value)


def test_overrides_set_nested_keys_and_the_last_one_wins() -> None:
    before = {"inner": {"width": 1}}
    after = apply_overrides(before, ["inner.width=2", "other.rate=1e-3", "inner.width = 4"])
    assert after == {"inner": {"width": 4}, "other": {"rate": 1e-3}}
    assert before == {"inner": {"width": 1}}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("inner.width", "is not an override"),
        ("=3", "is not an override"),
        ("inner..width=3", "is not an override"),
        ("inner.width=", "gives no value for inner.width"),
        ("inner.width=[1", "the value of --set inner.width=[1 is not valid YAML"),
        ("title.x=1", "title = 'x' is not possible: --set title.x=1 needs it to be a section"),
    ],
)
def test_a_bad_override_is_refused(override: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        apply_overrides({"inner": {"width": 1}, "title": "x"}, [override])
    assert message in str(caught.value)


def test_dotted_keys_are_the_leaves_in_order() -> None:
    assert list(dotted_keys(Outer))[:4] == [
        "inner.width",
        "inner.rate",
        "inner.flag",
        "other.width",
    ]
