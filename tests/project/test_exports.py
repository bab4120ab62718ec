"""The public names: complete, sorted, and seen as `cbengine.X` by whoever prints or documents them."""

from __future__ import annotations

import types

import pytest

import cbengine
import cbengine.errors
import cbengine.outputs


def test_all_is_sorted_and_without_repeats() -> None:
    names = list(cbengine.__all__)
    assert names == sorted(set(names))


def test_all_is_complete() -> None:
    public = {
        name
        for name, value in vars(cbengine).items()
        if not name.startswith("_") and name != "annotations" and not isinstance(value, types.ModuleType)
    }
    assert public == set(cbengine.__all__) - {"__version__"}


@pytest.mark.parametrize("name", cbengine.__all__)
def test_names_are_public_wherever_they_are_shown(name: str) -> None:
    value = getattr(cbengine, name)
    if isinstance(value, (type, types.FunctionType)):
        assert value.__module__ == "cbengine"
        assert value.__doc__


@pytest.mark.parametrize("module", [cbengine.errors, cbengine.outputs])
def test_every_error_and_output_is_exported(module: types.ModuleType) -> None:
    own = {name for name, value in vars(module).items() if isinstance(value, type) and value.__module__ == "cbengine"}
    own |= {name for name, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__}
    assert {name for name in own if not name.startswith("_")} <= set(cbengine.__all__)


def test_the_tree_in_the_docstring_is_the_tree_of_errors() -> None:
    errors = [
        v for v in vars(cbengine.errors).values() if isinstance(v, type) and issubclass(v, cbengine.CBEngineError)
    ]
    assert len(errors) >= 13
    for error in errors:
        assert error.__name__ in (cbengine.errors.__doc__ or "")
