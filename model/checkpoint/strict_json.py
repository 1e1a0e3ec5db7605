"""JSON read strictly: UTF-8, no duplicate keys, no NaN or Infinity however it is spelled, bounded depth.

The one reader of JSON in this project: files, safetensors headers, and the arguments of tool calls.

The json module keeps the last of two equal keys. In a config or a safetensors header that would choose
one of two contradictory facts without a word, so here it is an error. It also reads 1e999 as infinity,
which no JSON text can say again.
"""

import json
import math
from collections.abc import Sequence
from typing import Any, NoReturn

from fathom.model.errors import quoted


def parse(data: bytes) -> Any:
    """Parse one JSON document from its bytes.

    Parameters
    ----------
    data : bytes
        The document, UTF-8.

    Returns
    -------
    Any
        Its value; objects are dicts in the order of the file.

    Raises
    ------
    ValueError
        With one line that says what is wrong. Callers put the file's name before it.
    """
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 at byte {error.start}") from None
    return parse_text(text)


def parse_text(text: str) -> Any:
    """Parse one JSON document that is text already; returns and raises as `parse`."""
    try:
        return json.loads(text, object_pairs_hook=_object, parse_constant=_constant, parse_float=_float)
    except RecursionError:
        raise ValueError("JSON is nested too deeply") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"damaged JSON: {error.msg} at line {error.lineno}, column {error.colno}") from None


def _object(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"duplicate key {quoted(twice)}")
    return result


def _float(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"the number {quoted(text)[1:-1]} is beyond float64")
    return value


def _constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a JSON number")
