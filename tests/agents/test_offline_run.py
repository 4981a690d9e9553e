"""The reader of W&B's transaction logs, which polls a file that another process writes."""

from __future__ import annotations

import struct

import pytest

from tests.agents.offline_run import _chunks

RECORDS = (b"first", b"second one")
WHOLE = b":W&B" + bytes(3) + b"".join(struct.pack("<IHB", 0, len(r), 1) + r for r in RECORDS)


@pytest.mark.parametrize(("missing", "count"), [(0, 2), (1, 1), (9, 1), (12, 1), (18, 0)])
def test_a_record_that_is_being_written_is_left_for_later(missing: int, count: int) -> None:
    data = WHOLE[: len(WHOLE) - missing]
    assert list(_chunks(data)) == list(RECORDS[:count])
