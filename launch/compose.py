"""YAML text and `--set` overrides to frozen dataclasses, refusing everything unknown.

Generic: knows dataclasses and YAML, not which sections a run has (`launch/config.py` does).
Every message names the full dotted key. YAML is read by the core schema of YAML 1.2, because
YAML 1.1 reads `no` as false, `1e-3` as text, `010` as eight and `1:30` as ninety; duplicate keys,
which YAML forbids and PyYAML accepts, are refused.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import yaml

from ops.errors import ConfigError
from ops.validate import refuse

T = TypeVar("T")
Factory = Callable[[str, Any], Any]
_STR_TAG = "tag:yaml.org,2002:str"


class _CoreLoader(yaml.SafeLoader):
    """SafeLoader with the scalars of YAML 1.2's core schema and unique keys."""

    # A fresh table: the inherited one holds the YAML 1.1 scalars.
    yaml_implicit_resolvers = {}  # noqa: RUF012

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        """The mapping of `node`; raises ConstructorError when a key stands in it twice."""
        seen: set[str] = set()
        for key_node, _ in node.value:
            if key_node.tag != _STR_TAG:
                continue
            if key_node.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key_node.value!r} stands twice", key_node.start_mark
                )
            seen.add(key_node.value)
        return super().construct_mapping(node, deep=deep)


def _construct_bool(loader: yaml.SafeLoader, node: Any) -> bool:
    return str(loader.construct_scalar(node)).lower() == "true"


def _construct_int(loader: yaml.SafeLoader, node: Any) -> int:
    return int(str(loader.construct_scalar(node)))


def _construct_float(loader: yaml.SafeLoader, node: Any) -> float:
    return float(str(loader.construct_scalar(node)).lower().replace(".inf", "inf").lstrip())


def _construct_nan(loader: yaml.SafeLoader, node: Any) -> float:
    return float("nan")


_SCALARS: tuple[tuple[str, str, str, Any], ...] = (
    ("null", r"(?:~|null|Null|NULL|)", "~nN", None),
    ("bool", r"(?:true|True|TRUE|false|False|FALSE)", "tTfF", _construct_bool),
    ("int", r"[-+]?[0-9]+(?:_[0-9]+)*", "-+0123456789", _construct_int),
    (
        "float",
        r"[-+]?(?:(?:[0-9]+(?:_[0-9]+)*)?\.[0-9]+|[0-9]+(?:_[0-9]+)*\.?)(?:[eE][-+]?[0-9]+)?"
        r"|[-+]?\.(?:inf|Inf|INF)",
        "-+.0123456789",
        _construct_float,
    ),
    ("headrace-nan", r"\.(?:nan|NaN|NAN)", ".", _construct_nan),
)
for _name, _pattern, _first, _constructor in _SCALARS:
    _tag = f"tag:yaml.org,2002:{_name}"
    _CoreLoader.add_implicit_resolver(_tag, re.compile(f"^(?:{_pattern})$"), list(_first))
    if _name == "null":
        _CoreLoader.add_implicit_resolver(_tag, re.compile("^$"), [""])
    if _constructor is not None:
        _CoreLoader.add_constructor(_tag, _constructor)
_CoreLoader.add_implicit_resolver("tag:yaml.org,2002:merge", re.compile("^<<$"), ["<"])


def parse_yaml(text: str, where: str) -> Any:
    """The value of one YAML document; `where` names it in the ConfigError raised otherwise."""
    try:
        return yaml.load(text, Loader=_CoreLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        problem = error.problem or error.context or "it cannot be read"
        raise ConfigError(f"{where} is not valid YAML{line}: {problem}.") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(f"{where} is not valid YAML: {reason}.") from None


def parse_mapping(text: str, where: str) -> dict[str, Any]:
    """The mapping that one YAML document must be; raises ConfigError otherwise."""
    value = parse_yaml(text, where)
    if not isinstance(value, dict):
        found = "is empty" if value is None else f"holds {_kind(value)}"
        raise ConfigError(f"{where} {found}; allowed is a mapping of sections such as `model:`.")
    return value


def apply_overrides(mapping: dict[str, Any], overrides: typing.Sequence[str]) -> dict[str, Any]:
    """A copy of `mapping` with each `a.b=c` set, the last one winning; raises ConfigError."""
    result: dict[str, Any] = _copy(mapping)
    for text in overrides:
        key, equals, value_text = text.partition("=")
        path = [part.strip() for part in key.split(".")]
        if not equals or not all(path):
            raise ConfigError(
                f"--set {text} is not an override: allowed is SECTION.KEY=VALUE, "
                "for example --set train.steps=50."
            )
        value = parse_yaml(value_text, f"the value of --set {text}")
        if value is None:
            raise ConfigError(f"--set {text} gives no value for {'.'.join(path)}.")
        target = result
        for depth, part in enumerate(path[:-1], start=1):
            inner = target.setdefault(part, {})
            if not isinstance(inner, dict):
                raise refuse(
                    ".".join(path[:depth]), inner, f"--set {text} needs it to be a section of keys"
                )
            target = inner
        target[path[-1]] = value
    return result


def _copy(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copy(item) for key, item in value.items()}
    return [_copy(item) for item in value] if isinstance(value, list) else value


def compose(
    cls: type[T],
    value: Any,
    *,
    factories: Mapping[type, Factory] | None = None,
    sizes: frozenset[str] = frozenset(),
) -> T:
    """An instance of the dataclass `cls` from nested mappings.

    `factories` build the classes that do not take plain keywords; they get the dotted key and
    the mapping. `sizes` are the dotted keys whose owners parse sizes such as `32MiB` themselves.
    Raises ConfigError for unknown, missing and mistyped keys, with the full dotted key.
    """
    known = tuple(dotted_keys(cls))
    return typing.cast(T, _Composer(factories or {}, sizes, known).build(cls, "", value))


def dotted_keys(cls: type, prefix: str = "") -> Iterator[str]:
    """Every dotted leaf key of a nested dataclass, in order of definition."""
    for name, annotation in _fields(cls).items():
        key = _join(prefix, name)
        if dataclasses.is_dataclass(annotation):
            yield from dotted_keys(typing.cast(type, annotation), key)
        else:
            yield key


class _Composer:
    """One composition: what `compose` was given, so that the recursion need not carry it."""

    def __init__(
        self, factories: Mapping[type, Factory], sizes: frozenset[str], known: tuple[str, ...]
    ) -> None:
        self._factories = factories
        self._sizes = sizes
        self._known = known

    def build(self, cls: Any, prefix: str, value: Any) -> Any:
        """The dataclass `cls` found at the dotted `prefix`."""
        annotations = _fields(cls)
        if not isinstance(value, dict):
            allowed = f"allowed is a section with the keys {', '.join(annotations)}"
            raise refuse(prefix, value, allowed)
        for name in value:
            if name not in annotations:
                raise self._unknown(prefix, str(name), tuple(annotations))
        missing = [
            _join(prefix, field.name)
            for field in dataclasses.fields(cls)
            if _is_required(field) and field.name not in value
        ]
        if missing:
            verb = "is" if len(missing) == 1 else "are"
            raise ConfigError(f"{', '.join(missing)} {verb} missing and {verb} required.")
        keywords = {
            name: self._value(annotations[name], _join(prefix, name), item)
            for name, item in value.items()
        }
        factory = self._factories.get(cls)
        return factory(prefix, keywords) if factory else cls(**keywords)

    def _value(self, annotation: Any, key: str, value: Any) -> Any:
        if dataclasses.is_dataclass(annotation):
            return self.build(annotation, key, value)
        return value if key in self._sizes else _check_type(annotation, key, value)

    def _unknown(self, prefix: str, name: str, siblings: tuple[str, ...]) -> ConfigError:
        key = _join(prefix, name)
        near = difflib.get_close_matches(name, siblings, n=1, cutoff=0.6)
        candidates = [_join(prefix, item) for item in near]
        if not candidates:
            candidates = [item for item in self._known if item.rsplit(".", 1)[-1] == name]
        if not candidates:
            leaves = {item.rsplit(".", 1)[-1]: item for item in self._known}
            near = difflib.get_close_matches(name, leaves, n=1, cutoff=0.75)
            candidates = [leaves[item] for item in near]
        if candidates:
            return ConfigError(
                f"{key} is not a configuration key; did you mean {' or '.join(candidates[:3])}?"
            )
        section = f"of {prefix} " if prefix else ""
        return ConfigError(
            f"{key} is not a configuration key; the keys {section}are {', '.join(siblings)}."
        )


def _is_required(field: dataclasses.Field[Any]) -> bool:
    no_default = field.default is dataclasses.MISSING
    return field.init and no_default and field.default_factory is dataclasses.MISSING


def _fields(cls: Any) -> dict[str, Any]:
    hints = typing.get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls) if field.init}


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def _kind(value: Any) -> str:
    kinds = {bool: "true or false", int: "a number", float: "a number", str: "text", list: "a list"}
    return kinds.get(type(value), type(value).__name__)


def _check_type(annotation: Any, key: str, value: Any) -> Any:
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        options = typing.get_args(annotation)
        if value is None and type(None) in options:
            return None
        if isinstance(value, list) and any(typing.get_origin(x) is tuple for x in options):
            return tuple(value)  # its owner checks what is in it
        annotation = next(option for option in options if option is not type(None))
    if value is None:
        raise ConfigError(f"{key} has no value.")
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if annotation is int and not (is_number and isinstance(value, int)):
        raise refuse(key, value, "allowed is a whole number")
    if annotation is float:
        if not is_number:
            raise refuse(key, value, "allowed is a number")
        return float(value)
    if typing.get_origin(annotation) is list and not isinstance(value, list):
        raise refuse(key, value, "allowed is a list, such as [a, b]")
    if annotation is bool and not isinstance(value, bool):
        raise refuse(key, value, "allowed is true or false")
    if annotation is str and not isinstance(value, str):
        raise refuse(key, value, 'allowed is text (write numbers in quotes: "1")')
    return value


def flatten(mapping: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The values of nested mappings by dotted key, tuples as lists (JSON knows no tuples)."""
    found: dict[str, Any] = {}
    for key, value in mapping.items():
        if isinstance(value, Mapping):
            found |= flatten(value, f"{prefix}{key}.")
        else:
            found[prefix + key] = list(value) if isinstance(value, tuple) else value
    return found
