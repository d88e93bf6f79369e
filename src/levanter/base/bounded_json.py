"""JSON from outside, read within limits of depth and of the length of its numbers."""

import json
import re
from collections.abc import Callable
from typing import Any

from levanter.base.input_limits import JSON_DEPTH, OutOfBoundsError

_TOKENS = re.compile(r'"(?:[^"\\]|\\.)*"|[\[\]{}]', re.DOTALL)


def parse_json(text: str, *, object_pairs_hook: Callable[[list[tuple[str, Any]]], object] | None = None) -> Any:
    """The value of a JSON text.

    Raises:
        json.JSONDecodeError: it is no JSON.
        OutOfBoundsError: it is nested deeper than `JSON_DEPTH`, or has a number of thousands of digits.
    """
    if text.count("[") + text.count("{") > JSON_DEPTH and _depth(text) > JSON_DEPTH:
        raise OutOfBoundsError(f"lists and objects are nested more than {JSON_DEPTH} deep, the limit for JSON")
    try:
        return json.loads(text, object_pairs_hook=object_pairs_hook)
    except json.JSONDecodeError:
        raise
    except RecursionError:
        raise OutOfBoundsError(f"lists and objects are nested more than {JSON_DEPTH} deep") from None
    except ValueError as error:
        if object_pairs_hook is not None and "limit" not in str(error):
            raise
        raise OutOfBoundsError(f"a number is longer than the limit ({error})") from error


def _depth(text: str) -> int:
    depth = deepest = 0
    for token in _TOKENS.finditer(text):
        sign = token[0]
        if sign in "[{":
            depth += 1
            if depth > deepest:
                deepest = depth
                if deepest > JSON_DEPTH:
                    return deepest
        elif sign in "]}":
            depth -= 1
    return deepest
