"""What `SamplingParams` accepts, what it says about the rest, and how defaults come in."""

from __future__ import annotations

import copy
import pickle
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from cbengine.errors import InvalidRequestError
from cbengine.sampling import SamplingParams
from cbengine.text.structured_spec import StructuredSpec

BAD: list[tuple[str, Any, str]] = [
    ("max_new_tokens", 0, "at least 1"),
    ("max_new_tokens", -3, "at least 1"),
    ("max_new_tokens", 1.0, "an integer or None"),
    ("max_new_tokens", True, "an integer or None"),
    ("max_new_tokens", "5", "an integer or None"),
    ("min_new_tokens", -1, "at least 0"),
    ("min_new_tokens", None, "an integer"),
    ("temperature", -0.1, "of at least 0"),
    ("temperature", float("nan"), "finite"),
    ("temperature", float("inf"), "finite"),
    ("temperature", 10**400, "finite"),
    ("temperature", "0.5", "a number or None"),
    ("temperature", b"0.5", "a number or None"),
    ("temperature", False, "a number or None"),
    ("temperature", 1j, "a number or None"),
    ("temperature", torch.ones(2), "a number or None"),
    ("top_k", -1, "at least 0"),
    ("top_k", 2.5, "an integer or None"),
    ("top_k", torch.tensor(2.5), "an integer or None"),
    ("top_p", 1.0001, "from 0 to 1"),
    ("top_p", -0.0001, "from 0 to 1"),
    ("top_p", [0.5], "a number or None"),
    ("min_p", 2, "from 0 to 1"),
    ("min_p", float("nan"), "from 0 to 1"),
    ("seed", -1, "from 0 to 18446744073709551615"),
    ("seed", 2**64, "from 0 to 18446744073709551615"),
    ("seed", 0.5, "an integer or None"),
    ("stop_token_ids", "12", "a sequence of token ids"),
    ("stop_token_ids", b"12", "a sequence of token ids"),
    ("stop_token_ids", 12, "a sequence of token ids"),
    ("stop_token_ids", [1, -1], "at least 0"),
    ("stop_token_ids", [1, 2.0], "an integer"),
    ("stop_token_ids", ["1"], "an integer"),
    ("ignore_eos", 1, "True or False"),
    ("ignore_eos", None, "True or False"),
]


@pytest.mark.parametrize(("name", "value", "allowed"), BAD, ids=lambda v: repr(v)[:24])
def test_bad_values_say_what_is_allowed(name: str, value: Any, allowed: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**{name: value})
    message = str(caught.value)
    assert name in message
    assert allowed in message
    offending = next((v for v in value if not isinstance(v, int) or v < 0), value) if isinstance(value, list) else value
    assert repr(offending) in message or repr(value) in message
    with pytest.raises(InvalidRequestError):
        SamplingParams().merged(**{name: value})


@pytest.mark.parametrize("setting", [{"stop": "a\ud800"}, {"stop": ["b", "a\ud800"]}, {"bad_words": ["a\ud800"]}])
def test_half_a_character_is_in_no_answer(setting: dict[str, Any]) -> None:
    name = next(iter(setting))
    with pytest.raises(
        InvalidRequestError, match=rf"{name} has 'a\\ud800', with half a UTF-16 character at position 1"
    ):
        SamplingParams(**setting)


def test_min_and_max_new_tokens_go_together() -> None:
    with pytest.raises(InvalidRequestError, match=r"min_new_tokens=6 is more than max_new_tokens=5; lower .* raise"):
        SamplingParams(min_new_tokens=6, max_new_tokens=5)
    assert SamplingParams(min_new_tokens=5, max_new_tokens=5).min_new_tokens == 5
    with pytest.raises(InvalidRequestError, match="min_new_tokens=6"):
        SamplingParams(min_new_tokens=6).merged(max_new_tokens=5)


def test_ends_of_the_ranges_are_allowed() -> None:
    low = SamplingParams(max_new_tokens=1, temperature=0, top_k=0, top_p=0, min_p=0, seed=0, stop_token_ids=())
    high = SamplingParams(top_p=1, min_p=1, seed=2**64 - 1)
    assert (low.max_new_tokens, low.temperature, low.top_p, low.min_p, low.seed) == (1, 0.0, 0.0, 0.0, 0)
    assert (high.top_p, high.min_p, high.seed) == (1.0, 1.0, 2**64 - 1)


def test_values_become_plain_python() -> None:
    params = SamplingParams(
        max_new_tokens=np.int64(7),  # type: ignore[arg-type]
        temperature=np.float32(0.5),  # type: ignore[arg-type]
        top_k=torch.tensor(5),  # type: ignore[arg-type]
        top_p=Fraction(1, 2),  # type: ignore[arg-type]
        min_p=torch.tensor(0.25),  # type: ignore[arg-type]
        seed=np.uint64(2**64 - 1),  # type: ignore[arg-type]
        stop_token_ids=np.array([3, 4]),  # type: ignore[arg-type]
    )
    plain = SamplingParams(
        max_new_tokens=7, temperature=0.5, top_k=5, top_p=0.5, min_p=0.25, seed=2**64 - 1, stop_token_ids=(3, 4)
    )
    assert params == plain
    assert repr(params) == repr(plain)
    assert hash(params) == hash(plain)
    assert pickle.loads(pickle.dumps(params)) == plain


@pytest.mark.parametrize("ids", [[1, 2], (1, 2), {1: 0, 2: 0}, (i for i in (1, 2)), torch.tensor([1, 2])])
def test_stop_token_ids_from_any_iterable(ids: Any) -> None:
    assert SamplingParams(stop_token_ids=ids).stop_token_ids == (1, 2)


def test_numbers_without_end_fit_the_engines_arrays() -> None:
    """Whatever is accepted must go into int32, int64 and float32 arrays as the same thing."""
    params = SamplingParams(top_k=10**30, min_new_tokens=10**30, max_new_tokens=10**30, temperature=1e300)
    assert params.top_k is not None
    assert np.array([params.top_k], np.int32)[0] >= 2**31 - 1
    assert np.array([params.min_new_tokens], np.int64)[0] >= 2**31 - 1
    assert np.isfinite(np.array([params.temperature], np.float32)[0])
    assert params.max_new_tokens == 10**30


def test_is_frozen() -> None:
    with pytest.raises(AttributeError):
        SamplingParams().top_k = 3  # type: ignore[misc]
    with pytest.raises(TypeError):
        SamplingParams(logit_bias={1: 2.0}).logit_bias[1] = 3.0  # type: ignore[index]


def test_survives_copies_and_processes() -> None:
    given = {np.int64(7): np.float32(0.5), 3: -2}
    params = SamplingParams(
        logit_bias=given, bad_words=["no", [1, 2]], stop="end", structured=StructuredSpec(regex="a+")
    )  # type: ignore[arg-type]
    given.clear()
    for twin in (pickle.loads(pickle.dumps(params)), copy.deepcopy(params), copy.copy(params), params.merged(n=1)):
        assert twin == params and hash(twin) == hash(params) and repr(twin) == repr(params)
        assert twin.logit_bias == {7: 0.5, 3: -2.0} and dict(twin.logit_bias) == {7: 0.5, 3: -2.0}
    assert params != params.merged(logit_bias={7: 0.5}) and max(params.logit_bias or ()) == 7


def test_none_is_nothing() -> None:
    params = SamplingParams(stop_token_ids=None, bad_words=None, stop=None, logit_bias=None)  # type: ignore[arg-type]
    assert params == SamplingParams()
    assert SamplingParams(stop_token_ids=(1,), bad_words=["x"]).merged(stop_token_ids=None, bad_words=None) == params


def test_merged() -> None:
    params = SamplingParams(top_k=5, seed=9)
    assert params.merged() is params
    changed = params.merged(top_k=None, temperature=0.5)
    assert changed == SamplingParams(seed=9, temperature=0.5)
    assert params == SamplingParams(top_k=5, seed=9)


def test_merged_names_what_exists() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams().merged(top_q=1, topk=2, top_k=3)
    assert "unknown sampling parameter top_q, topk;" in str(caught.value)
    for name in ("ignore_eos", "max_new_tokens", "min_p", "stop_token_ids", "temperature"):
        assert name in str(caught.value)


OURS: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
"""What holds where neither the request nor the model says anything."""


def test_resolved_without_model_defaults() -> None:
    params = SamplingParams().resolved({})
    assert params == SamplingParams(**OURS)
    assert (params.max_new_tokens, params.seed) == (None, None)
    assert params.resolved({}) is params


def test_resolved_prefers_what_was_asked_for() -> None:
    model = {"temperature": 0.0, "top_k": 50, "top_p": 0.9, "min_p": 0.1, "max_new_tokens": 20, "unrelated": 1}
    expected = {**OURS, "temperature": 0.0, "top_k": 50, "top_p": 0.9, "min_p": 0.1, "max_new_tokens": 20}
    assert SamplingParams().resolved(model) == SamplingParams(**expected)
    asked = SamplingParams(**{**OURS, "temperature": 0.7, "max_new_tokens": 3, "seed": 1})
    assert asked.resolved(model) is asked


def test_resolved_takes_none_for_not_said() -> None:
    model = {"temperature": None, "top_k": None, "top_p": 0.5, "max_new_tokens": None}
    assert SamplingParams().resolved(model) == SamplingParams(**{**OURS, "top_p": 0.5})


def test_resolved_makes_room_for_min_new_tokens() -> None:
    """The model's own length is a default, and no reason to refuse what was asked for."""
    assert SamplingParams(min_new_tokens=30).resolved({"max_new_tokens": 20}).max_new_tokens == 30
