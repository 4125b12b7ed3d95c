"""One sentence for each refused configuration value: the key, the value, what is allowed."""

from __future__ import annotations

from collections.abc import Sequence

from ops.errors import ConfigError

_VALUE_MAX = 200


def refuse(key: str, value: object, allowed: str) -> ConfigError:
    """The error to raise for `value` at the dotted configuration `key`; a long value is cut."""
    text = repr(value)
    if len(text) > _VALUE_MAX:
        text = f"{text[:_VALUE_MAX]}..."
    return ConfigError(f"{key} = {text} is not possible: {allowed}.")


def check_int(key: str, value: object, *, low: int, high: int | None = None) -> None:
    """Raise ConfigError unless `value` is an int in [low, high]."""
    fine = isinstance(value, int) and not isinstance(value, bool) and value >= low
    if not fine or (high is not None and isinstance(value, int) and value > high):
        upper = "" if high is None else f" and at most {high}"
        raise refuse(key, value, f"allowed is a whole number of at least {low}{upper}")


def check_float(
    key: str, value: object, *, low: float, high: float | None = None, open_low: bool = False
) -> None:
    """Raise ConfigError unless `value` is a finite number in [low, high] (or (low, high])."""
    fine = isinstance(value, (int, float)) and not isinstance(value, bool) and value == value
    if fine:
        try:
            number = float(value)  # type: ignore[arg-type]
        except OverflowError:  # a whole number of hundreds of digits
            number = float("inf")
        fine = number > low if open_low else number >= low
        fine = fine and number < float("inf") and (high is None or number <= high)
    if not fine:
        lower = f"above {low}" if open_low else f"of at least {low}"
        upper = "" if high is None else f" and at most {high}"
        raise refuse(key, value, f"allowed is a number {lower}{upper}")


def check_choice(key: str, value: object, allowed: Sequence[object]) -> None:
    """Raise ConfigError unless `value` is one of `allowed`."""
    if value not in allowed:
        raise refuse(key, value, "allowed is " + ", ".join(str(item) for item in allowed))


def check_bool(key: str, value: object) -> None:
    """Raise ConfigError unless `value` is true or false."""
    if not isinstance(value, bool):
        raise refuse(key, value, "allowed is true or false")
