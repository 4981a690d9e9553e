"""Memory for weights and the KV pool."""

from __future__ import annotations

import gc
import itertools
import mmap
import weakref
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdepth.decoder.huge_pages import PAGE, HugePages
from specdepth.decoder.models import PackedModel
from specdepth.decoder.prepack import PackedLinear
from tests.decoder.bf16 import needs_kernels
from tests.decoder.tiny import tiny_llama

SHAPES = st.lists(st.lists(st.integers(0, 40), min_size=1, max_size=3).map(tuple), max_size=8)
DTYPES = st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.int64])


@given(SHAPES, DTYPES)
@settings(max_examples=50, deadline=None)
def test_pieces_are_zero_aligned_and_apart(
    shapes: list[tuple[int, ...]], dtype: torch.dtype
) -> None:
    memory = HugePages()
    pieces = [memory.zeros(shape, dtype) for shape in shapes]
    for number, (piece, shape) in enumerate(zip(pieces, shapes, strict=True), 1):
        assert (piece.shape, piece.dtype) == (shape, dtype)
        assert piece.is_contiguous()
        assert piece.data_ptr() % 64 == 0
        assert not piece.any()
        piece.fill_(number)
    for number, piece in enumerate(pieces, 1):
        assert bool((piece == number).all())


def test_large_pieces_and_many_small_ones_get_chunks_of_their_own() -> None:
    memory = HugePages()
    large = memory.zeros((40, 2**20), torch.bfloat16)  # 80 MB
    pieces = [memory.zeros((2**22,), torch.bfloat16) for _ in range(9)]  # 8 MB each
    starts = sorted([large.data_ptr(), *(piece.data_ptr() for piece in pieces)])
    assert large.data_ptr() % PAGE == 0
    assert all(b - a >= 2**23 for a, b in itertools.pairwise(starts))
    large[-1] = 1
    assert not any(piece.any() for piece in pieces)


def test_a_chunk_goes_with_its_last_piece() -> None:
    memory = HugePages()
    piece = memory.zeros((8,), torch.float32)
    assert memory._chunk is not None
    chunk = weakref.ref(memory._chunk)
    del memory
    gc.collect()
    assert chunk() is not None
    view = piece[2:]
    del piece
    gc.collect()
    assert chunk() is not None
    assert not view.any()
    del view
    gc.collect()
    assert chunk() is None


@pytest.mark.parametrize("count", [2**60, 2**46])
def test_too_much_is_a_memory_error(count: int) -> None:
    with pytest.raises(MemoryError, match=r"GiB"):
        HugePages().zeros((count,), torch.float32)


def test_a_system_without_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    assert not HugePages().zeros((100,), torch.float32).any()


@needs_kernels
def test_weights_and_pool_are_to_lie_in_huge_pages() -> None:
    """As the system has noted it, whether or not it will give them."""
    if not Path("/sys/kernel/mm/transparent_hugepage").exists():
        pytest.skip("this kernel was built without transparent huge pages")
    model = PackedModel(tiny_llama(dtype=torch.bfloat16, hidden_size=128, head_dim=32))
    model.allocate(64, 16)
    rows = model.layers[0].rows
    kernels = [m.kernel for m in model.model.modules() if isinstance(m, PackedLinear)]
    assert rows is not None
    addresses = [rows.data_ptr(), *(kernel.pointers[0] for kernel in kernels if kernel is not None)]
    assert len(addresses) > 1
    for address in addresses:
        assert "hg" in _flags(address)


def _flags(address: int) -> list[str]:
    """What Linux says of the mapping that an address is in; `hg` is advice to take huge pages."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = line.split()[0]
        if "-" in head and not head.endswith(":"):
            start, end = (int(part, 16) for part in head.split("-"))
            inside = start <= address < end
        elif inside and head == "VmFlags:":
            return line.split()[1:]
    raise AssertionError("no mapping holds that address")
