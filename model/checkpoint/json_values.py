"""Values of a parsed config.json, each one checked: what the readers of all architectures have in common.

Every function raises ConfigError with one line naming the field at fault; the caller puts the file before it.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from fathom.model.errors import ConfigError, did_you_mean, quoted, shown

MAX_INTEGER = 2**31 - 1
MAX_NUMBER = 1e30  # also keeps an integer of any length out of float()
MIN_NUMBER = 1e-30  # the two keep quotients of fields finite

Json = Mapping[str, Any]


def check_fixed(obj: Json, fixed: Mapping[str, object], prefix: str = "") -> None:
    """Check that fields have the one value that is implemented; ``True`` is not 1 here."""
    for name, want in fixed.items():
        value = required(obj, name, prefix)
        if type(value) is not type(want) or value != want:
            raise ConfigError(f"{prefix}{name} is {shown(value)}; supported: {shown(want)}")


def check_keys(obj: Json, must: Sequence[str], where: str, may: Sequence[str] = ()) -> None:
    """Check that an object has all of `must`, and of others only `may`."""
    check_known(obj, {*must, *may}, f"{where}.")
    for name in must:
        required(obj, name, f"{where}.")


def check_known(obj: Json, known: Collection[str], prefix: str = "") -> None:
    """Check that an object has no other fields than these: before what is missing is told, which may be a typo."""
    for name in obj:
        if name not in known:
            hint = did_you_mean(name, (other for other in known if other not in obj))
            raise ConfigError(f"{prefix}{quoted(name)[1:-1]}: unknown field{hint}")


def required(obj: Json, name: str, prefix: str = "") -> Any:
    """The value of a field that must be there."""
    if name not in obj:
        raise ConfigError(f"{prefix}{name}: missing")
    return obj[name]


def mapping(value: Any, where: str) -> Json:
    """The value, which must be an object."""
    if not isinstance(value, dict):
        raise ConfigError(f"{where} is {shown(value)}; want an object")
    return value


def integer(obj: Json, name: str, prefix: str = "", *, least: int = 1) -> int:
    """A field that must hold an integer from `least` to `MAX_INTEGER`."""
    value = required(obj, name, prefix)
    if type(value) is not int or not least <= value <= MAX_INTEGER:
        raise ConfigError(f"{prefix}{name} is {shown(value)}; want an integer from {least} to {MAX_INTEGER}")
    return value


def number(obj: Json, name: str, prefix: str = "") -> float:
    """A field that must hold a positive finite number."""
    value = required(obj, name, prefix)
    if type(value) not in (int, float) or not MIN_NUMBER <= value <= MAX_NUMBER:
        want = f"want a positive number, {MIN_NUMBER:g} to {MAX_NUMBER:g}"
        raise ConfigError(f"{prefix}{name} is {shown(value)}; {want}")
    return float(value)
