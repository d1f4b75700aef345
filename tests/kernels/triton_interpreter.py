"""Triton's interpreter without the half of its time that it needs not.

It replaces all functions of `triton.language` at each call of a function within a kernel, though they are
replaced already: seven milliseconds a call, two thousand calls in a check.
"""

import inspect
from typing import Any

from triton import language
from triton.runtime import interpreter

_REPLACED: set[int] = set()
"""The modules whose functions are replaced, while a kernel runs."""
_replace = interpreter._patch_lang


def replace_once_a_launch() -> None:
    """From now on functions are replaced as a kernel is launched, and given back at its end.

    Triton 3.5, of torch 2.9, does it otherwise, and is left as it is.
    """
    if hasattr(interpreter, "_LangPatchScope"):
        interpreter._patch_lang = _unless_replaced


def _unless_replaced(function: Any) -> Any:
    modules = {id(each) for each in function.__globals__.values() if inspect.ismodule(each)}
    modules &= {id(language), id(language.core)}
    if modules and modules <= _REPLACED:
        return interpreter._LangPatchScope()
    scope, launched = _replace(function), not _REPLACED
    _REPLACED.update(modules)
    if launched:
        give_back = scope.restore

        def restore() -> None:
            give_back()
            _REPLACED.clear()

        scope.restore = restore
    return scope
