"""The row table."""

from __future__ import annotations

import numpy as np
import pytest

from cbengine.scheduling.request import Request
from cbengine.scheduling.rows import DEAD, FREE, LEAVING, RUNNING, RowTable
from tests.scheduling.desk import make_request


def _assign(table: RowTable, number: int = 0, prompt_len: int = 3, **params: object) -> tuple[Request, int]:
    request = make_request(number, prompt_len, 5, **params)
    return request, table.assign(request)


def test_a_row_is_loaded_with_what_is_known_of_its_request() -> None:
    table = RowTable(2, 64)
    request = make_request(
        0, 3, 5, min_new_tokens=2, ignore_eos=True, temperature=0.5, top_k=7, top_p=0.25, min_p=0.125
    )
    request.seed, request.stop_ids = 2**64 - 1, frozenset({4})
    row = table.assign(request)
    assert request.row == row and table.requests[row] is request and table.status[row] == RUNNING
    assert table.tokens[row, :3].tolist() == [1, 2, 3]
    assert (table.known[row], table.computed[row], table.planned[row], table.limit[row]) == (3, 0, 0, 8)
    assert (table.prompt_len[row], table.min_len[row]) == (3, 5)
    assert table.ignore_eos[row] and table.own_stops[row]
    assert int(table.seed[row]) == 2**64 - 1
    sampling = (table.temperature[row], table.top_k[row], table.top_p[row], table.min_p[row])
    assert sampling == (0.5, 7, 0.25, 0.125)


def test_nothing_of_the_last_owner_is_left_in_a_row() -> None:
    table = RowTable(1, 64)
    request, row = _assign(table, 0, 9, min_new_tokens=2, ignore_eos=True, temperature=0.5, top_k=7)
    table.append(np.array([row]), np.array([5]))
    table.computed[row] = table.planned[row] = 9
    table.status[row] = DEAD
    table.release(row)
    assert request.row == -1
    fresh = RowTable(1, 64)
    names = [name for name, value in vars(table).items() if isinstance(value, np.ndarray) and name != "tokens"]
    assert len(names) > 10
    for each in (table, fresh):
        assert _assign(each, 1, 2)[1] == row
    assert {name: getattr(table, name)[row] for name in names} == {name: getattr(fresh, name)[row] for name in names}


def test_rows_run_out_and_come_back() -> None:
    table = RowTable(3, 16)
    rows = [_assign(table, i)[1] for i in range(3)]
    assert sorted(rows) == [0, 1, 2] and table.dummy == 3
    assert (table.num_free, table.num_used) == (0, 3)
    table.status[rows[1]] = DEAD
    table.release(rows[1])
    assert table.status[rows[1]] == FREE and table.requests[rows[1]] is None
    assert _assign(table, 3)[1] == rows[1]


def test_only_a_row_on_its_way_back_can_be_released() -> None:
    table = RowTable(2, 16)
    _, row = _assign(table)
    with pytest.raises(AssertionError):
        table.release(row)  # it runs
    table.status[row] = LEAVING
    table.release(row)
    with pytest.raises(AssertionError):
        table.release(row)  # it is nobody's


def test_every_assignment_is_heard_of() -> None:
    heard: list[tuple[str, list[int]]] = []
    table = RowTable(2, 16, lambda kind, owned: heard.append((kind, owned)))
    rows = [_assign(table, i)[1] for i in range(2)]
    assert heard == [("row", [rows[0]]), ("row", [rows[1]])]


def test_sampled_tokens_are_appended() -> None:
    table = RowTable(3, 16)
    rows = [_assign(table, i, length)[1] for i, length in enumerate((1, 4, 2))]
    table.append(np.array([rows[0], rows[2]]), np.array([7, 8]))
    table.append(np.zeros(0, np.int64), np.zeros(0, np.int64))
    assert [table.known[row] for row in rows] == [2, 4, 3]
    assert [table.tokens[row, : table.known[row]].tolist() for row in rows] == [[1, 7], [1, 2, 3, 4], [1, 2, 8]]


def test_a_preempted_request_takes_its_tokens_along() -> None:
    table = RowTable(1, 16)
    request, row = _assign(table)
    table.append(np.array([row]), np.array([7]))
    table.save(request)
    table.status[row] = LEAVING
    table.release(row)
    table.tokens[row] = 0
    assert request.tokens.tolist() == [1, 2, 3, 7]
    assert table.assign(request) == row
    assert table.tokens[row, :4].tolist() == [1, 2, 3, 7] and table.known[row] == 4
    assert table.prompt_len[row] == 3  # what it has said is no part of its prompt
    assert request.saved is None


def test_the_token_table_grows_with_the_sequences() -> None:
    table = RowTable(2, 100_000)
    assert table.tokens.shape[1] < 2000
    long, row = _assign(table, 0, 5000)
    assert table.tokens.shape[1] >= 5001
    assert table.tokens[row, :5000].tolist() == list(range(1, 5001))
    short, other = _assign(table, 1, 2)
    for token in range(3000):
        table.append(np.array([row, other]), np.array([token, token]))
    assert table.tokens[row, 5000:8000].tolist() == list(range(3000))
    assert table.tokens[other, :3002].tolist() == [1, 2, *range(3000)]
    assert long.row == row and short.row == other
