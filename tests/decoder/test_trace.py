"""Traces: what they hold, and what becomes of them on disk."""

from __future__ import annotations

import io
import json
import pickle
import zipfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdepth.decoder import trace as trace_module
from specdepth.decoder import trace_format
from specdepth.decoder.trace import MAX_REQUEST_TOKENS, Trace, TraceInfo
from tests.decoder.traces import toy_trace

LATER = ("match_tokens", "match_distance", "match_in_output", "agreement")
SIGNALS = ("target_top1", "target_entropy", "draft_top1", "draft_entropy", "draft_margin")


def assert_equal(a: Trace, b: Trace, rounded: bool = False) -> None:
    """Equal in all fields; signals to half precision if `rounded`."""
    for field in fields(Trace):
        left, right = getattr(a, field.name), getattr(b, field.name)
        if left is None or not isinstance(left, np.ndarray):
            assert left == right, field.name
            continue
        if rounded and field.name in SIGNALS:
            left = left.astype(np.float16)
        np.testing.assert_array_equal(left, right, err_msg=field.name)


# ------------------------------------------------------------------ round trips

traces = st.builds(
    toy_trace,
    st.lists(st.integers(1, 12), min_size=1, max_size=6).map(tuple),
    seed=st.integers(0, 999),
    drafter=st.sampled_from(["prompt-lookup", "draft-model", "recorded-text"]),
    top=st.sampled_from([1, 2, 8, 255]),
)


@given(trace=traces)
@settings(max_examples=25)
def test_a_file_gives_back_counts_exactly_and_signals_in_half_precision(
    trace: Trace, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("trace") / "t.npz"
    trace.save(path)
    assert_equal(trace, Trace.load(path), rounded=True)


def test_info_comes_back_whole(tmp_path: Path) -> None:
    info = TraceInfo(
        model_pair="Größe+klein",
        drafter="prompt-lookup",
        max_num_speculative_tokens=8,
        verification="coupled",
        source="outputs",
        temperature=0.7,
        top_k=50,
        top_p=0.9,
        lookup={"max_ngram": 4, "max_length": None},
        versions={"numpy": "2.0"},
        created="2026-01-01T00:00:00+00:00",
    )
    toy_trace(info=info).save(tmp_path / "t.npz")
    assert Trace.load(tmp_path / "t.npz").info == info


def test_equal_traces_give_equal_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        toy_trace().save(tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_a_failed_save_leaves_the_old_file(tmp_path: Path, monkeypatch: Any) -> None:
    toy_trace().save(tmp_path / "t.npz")
    before = (tmp_path / "t.npz").read_bytes()

    def fail(*args: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(OSError, match="disk full"):
        toy_trace(seed=1).save(tmp_path / "t.npz")
    assert (tmp_path / "t.npz").read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["t.npz"]


def test_more_kinds_than_a_byte_counts_come_back(tmp_path: Path) -> None:
    kinds = tuple(f"kind {i}" for i in range(300))
    toy_trace((1,) * 300, kinds=kinds).save(tmp_path / "t.npz")
    assert Trace.load(tmp_path / "t.npz").kinds == kinds


# ------------------------------------------------------------------ parts of traces


@given(trace=traces, data=st.data())
@settings(max_examples=25)
def test_what_is_taken_apart_and_put_together_is_the_same(trace: Trace, data: Any) -> None:
    cut = data.draw(st.integers(1, trace.num_requests))
    rows = np.arange(trace.num_requests)
    parts = [trace.select(part) for part in (rows[:cut], rows[cut:]) if len(part)]
    assert_equal(Trace.concatenate(parts), trace)


def test_select_takes_requests_in_the_order_asked_for() -> None:
    trace = toy_trace((5, 3, 9, 1))
    part = trace.select(np.array([2, 0]))
    assert part.ids == ("request 2", "request 0")
    assert part.starts.tolist() == [0, 9]
    assert part.accepted.tolist() == [*trace.accepted[8:17], *trace.accepted[:5]]
    assert part.num_prompt.tolist() == trace.num_prompt[[2, 0]].tolist()


def test_a_draft_models_signals_go_with_their_requests() -> None:
    trace = toy_trace((5, 3), drafter="draft-model")
    assert trace.draft_entropy is not None
    part = trace.select(np.array([1]))
    assert part.draft_entropy is not None
    np.testing.assert_array_equal(part.draft_entropy, trace.draft_entropy[5:])


def test_rows_are_chosen_by_split_kind_and_looping() -> None:
    trace = toy_trace(
        (1,) * 6,
        kinds=("code", "chat", "maths", "code", "chat", "maths"),
        looping=np.array([True, True, False, False, True, False]),
    )
    assert trace.rows().tolist() == [0, 1, 2, 3, 4, 5]
    assert trace.rows("held-out").tolist() == [1, 3, 5]
    assert trace.rows("train").tolist() == [0, 2, 4]
    assert trace.rows(kinds=["code", "chat"]).tolist() == [0, 1, 3, 4]
    assert trace.rows(looping=False).tolist() == [2, 3, 5]
    assert trace.rows("held-out", kinds=["code", "chat"], looping=True).tolist() == [1]


def test_an_unknown_kind_or_split_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"no kind 'poems' in the trace; .*'chat', 'code'"):
        toy_trace().rows(kinds=["poems"])
    with pytest.raises(ValueError, match=r"unknown split 'test', expected one of .*'held-out'"):
        toy_trace().rows("test")  # type: ignore[arg-type]


def test_agreement_is_the_share_of_matches() -> None:
    trace = toy_trace((3,), num_matches=np.array([4, 0, 1]), num_agreeing=np.array([3, 0, 1]))
    assert trace.match_agreement.tolist() == [0.75, 0.0, 1.0]


def test_traces_made_differently_are_not_put_together() -> None:
    a = toy_trace()
    b = toy_trace(info=replace(a.info, lookup={"max_ngram": 3}))
    with pytest.raises(ValueError, match="recorded differently"):
        Trace.concatenate([a, b])
    later = toy_trace(info=replace(a.info, created="later", versions={"numpy": "9"}))
    assert Trace.concatenate([a, later]).info == a.info
    with pytest.raises(ValueError, match="no traces to put together"):
        Trace.concatenate([])


# ------------------------------------------------------------------ impossible numbers


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"accepted": np.zeros(4, np.int64)}, r"accepted is not \[5\]"),
        ({"kinds": ("a",)}, r"kinds is not \[2\]"),
        ({"held_out": np.zeros(3, np.bool_)}, r"held_out is not \[2\]"),
        ({"num_prompt": np.array([0, 3])}, "a prompt is empty"),
        ({"num_tokens": np.array([5, 0])}, "a request has no tokens"),
        ({"max_new_tokens": np.array([2, 2])}, "a text passes its limit"),
        ({"num_prompt": np.array([1, MAX_REQUEST_TOKENS])}, "a request may have 41943"),
        ({"accepted": np.array([-1, 0, 0, 0, 0])}, "accepted is out of range"),
        ({"accepted": np.array([1, 1, 1, 0, 0])}, "longer than its proposal"),
        ({"accepted": np.array([0, 0, 2, 0, 0])}, "longer than its proposal or its text"),
        ({"proposal_length": np.full(5, 9)}, "a proposal is longer than 8"),
        ({"match_length": np.full(5, 256)}, "match_length is out of range"),
        ({"num_agreeing": np.full(5, 2)}, "more matches agree than exist"),
        ({"match_tokens": np.full(5, 256)}, "match_tokens is out of range"),
        ({"match_in_output": np.zeros(4, np.bool_)}, r"match_in_output is not \[5\]"),
        ({"agreement": np.zeros((5, 7), np.uint8)}, r"agreement is not bytes \[5, 8\]"),
        ({"agreement": np.zeros((5, 8))}, r"agreement is not bytes \[5, 8\]"),
        (
            {"agreement": np.tile(np.arange(8, dtype=np.uint8), (5, 1))},
            "agreement rises with depth",
        ),
        ({"target_top1": np.full(5, 1.5)}, "target_top1 is out of range"),
        ({"target_entropy": np.full(5, np.inf)}, "target_entropy is out of range"),
        ({"draft_top1": np.zeros((5, 8))}, "draft_top1 does not fit the drafter"),
    ],
)
def test_what_cannot_be_is_refused(changed: dict[str, Any], message: str) -> None:
    possible: dict[str, Any] = {
        "accepted": np.zeros(5, np.int64),
        "proposal_length": np.array([0, 8, 8, 8, 8]),
        "num_matches": np.ones(5, np.int64),
        "num_agreeing": np.ones(5, np.int64),
    }
    toy_trace((3, 2), **possible)
    with pytest.raises(ValueError, match=message):
        toy_trace((3, 2), **(possible | changed))


def test_a_draft_models_signals_are_checked() -> None:
    with pytest.raises(ValueError, match=r"draft_margin is not \[3, 8\]"):
        toy_trace((3,), drafter="draft-model", draft_margin=np.zeros((3, 7)))
    with pytest.raises(ValueError, match="draft_top1 does not fit the drafter"):
        toy_trace((3,), drafter="draft-model", draft_top1=None)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"drafter": "none"}, "needs a drafter, got 'none'"),
        ({"drafter": ["prompt-lookup"]}, "needs a drafter"),
        ({"max_num_speculative_tokens": 0}, r"depths up to 1\.\.255, got 0"),
        ({"max_num_speculative_tokens": 256}, r"1\.\.255, got 256"),
        ({"max_num_speculative_tokens": True}, r"1\.\.255, got True"),
        ({"max_num_speculative_tokens": "8"}, r"1\.\.255, got '8'"),
        ({"verification": "rejection"}, "verification of a trace is one of"),
        ({"source": 3}, "source of a trace is one of"),
        ({"temperature": -0.1}, "temperature -0.1 is below 0"),
        ({"temperature": float("nan")}, "temperature nan"),
        ({"temperature": 0.7}, "coupled, not greedy"),
        ({"top_k": 1.5}, "top_k must be 0 or more"),
        ({"top_p": 0}, r"top_p must be in \(0, 1\]"),
        ({"lookup": []}, "lookup of a trace is a mapping"),
        ({"model_pair": None}, "model_pair of a trace is a text"),
    ],
)
def test_an_info_that_cannot_be_is_refused(changed: dict[str, Any], message: str) -> None:
    good: dict[str, Any] = {
        "model_pair": "a+b",
        "drafter": "prompt-lookup",
        "max_num_speculative_tokens": 8,
    }
    TraceInfo(**good)
    with pytest.raises(ValueError, match=message):
        TraceInfo(**(good | changed))


# ------------------------------------------------------------------ bad files


def refusal(path: Path) -> str:
    """The one sentence that a bad file gets."""
    with pytest.raises(ValueError, match="trace") as caught:
        Trace.load(path)
    sentence = str(caught.value)
    assert str(path) in sentence
    assert sentence.endswith(".")
    assert "\n" not in sentence
    return sentence


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "t.npz"
    toy_trace((40, 30, 20)).save(path)
    return path


def edit(path: Path, change: Callable[[dict[str, Any], dict[str, Any]], None]) -> None:
    """Write the file anew after `change(header, arrays)`."""
    with np.load(path) as file:
        arrays = dict(file)
    header = json.loads(arrays.pop("header").tobytes())
    change(header, arrays)
    text = json.dumps(header).encode()
    with path.open("wb") as out:
        np.savez_compressed(out, header=np.frombuffer(text, np.uint8), **arrays)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    assert "No such file" in refusal(tmp_path / "absent.npz")


def test_a_folder_is_no_trace(tmp_path: Path) -> None:
    assert "cannot read trace" in refusal(tmp_path)


def test_an_empty_file_says_so(tmp_path: Path) -> None:
    (tmp_path / "t.npz").write_bytes(b"")
    assert "it is empty" in refusal(tmp_path / "t.npz")


@pytest.mark.parametrize("share", [0.001, 0.1, 0.5, 0.9, 0.99, 0.9999])
def test_a_truncated_file_says_so(saved: Path, share: float) -> None:
    data = saved.read_bytes()
    saved.write_bytes(data[: max(int(share * len(data)), 1)])
    assert "truncated, damaged or no trace" in refusal(saved)


@given(data=st.data())
@settings(max_examples=80)
def test_no_damage_gives_anything_but_a_sentence(
    data: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("damaged") / "t.npz"
    toy_trace((4, 3)).save(path)
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, 20))
    path.write_bytes(bytes(content[cut:]))
    # Damage to what no reader looks at may pass.
    with suppress(ValueError):
        Trace.load(path)


def test_a_foreign_zip_is_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "t.npz", "w") as archive:
        archive.writestr("hello.txt", "hello")
    refusal(tmp_path / "t.npz")


def test_a_foreign_npz_is_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "t.npz", weights=np.zeros(3))
    assert "it has no header" in refusal(tmp_path / "t.npz")


def test_pickled_objects_are_refused_and_not_run(saved: Path) -> None:
    class Trap:
        def __reduce__(self) -> Any:
            return pytest.fail, ("unpickled",)

    buffer = io.BytesIO()
    np.save(buffer, np.array([1], object))
    trap = buffer.getvalue()[: len(buffer.getvalue()) - len(pickle.dumps(np.array([1], object)))]
    with zipfile.ZipFile(saved, "a") as archive:
        archive.writestr("trap.npy", trap[:128] + pickle.dumps(Trap()))
    assert "trap holds no numbers" in refusal(saved)


def test_an_array_that_unpacks_to_too_much_is_refused(saved: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(trace_format, "MAX_ARRAY_BYTES", 1000)
    assert "the most that is read is 1000" in refusal(saved)


def test_a_file_that_is_too_large_is_refused(saved: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(trace_format, "MAX_FILE_BYTES", 100)
    assert "larger than 100 bytes" in refusal(saved)


def test_an_array_that_claims_to_be_huge_is_refused_before_it_is_made(saved: Path) -> None:
    header = b"{'descr': '<i8', 'fortran_order': False, 'shape': (1099511627776,), }"
    header += b" " * (117 - len(header)) + b"\n"
    npy = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + bytes(8)
    with zipfile.ZipFile(saved, "a") as archive:
        archive.writestr("bomb.npy", npy)
    assert "bomb is not as large as it says" in refusal(saved)


def test_an_array_that_is_there_twice_is_refused(saved: Path) -> None:
    with zipfile.ZipFile(saved) as archive:
        again = archive.read("accepted.npy")
    with zipfile.ZipFile(saved, "a") as archive, pytest.warns(UserWarning, match="Duplicate"):
        archive.writestr("accepted.npy", again)
    assert "twice" in refusal(saved)


def test_another_format_version_says_what_to_do(saved: Path) -> None:
    edit(saved, lambda header, arrays: header.update(format_version=2))
    assert "format version 2, this specdepth reads 1; record it again" in refusal(saved)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda h, a: h.update(format="other"), 'the field "format" must be "specdepth-trace"'),
        (lambda h, a: h.pop("info"), "its header has no info"),
        (lambda h, a: h.update(info=[1]), "its header has no info"),
        (lambda h, a: h["info"].pop("created"), "lacks fields or has unknown ones"),
        (lambda h, a: h["info"].update(more=1), "lacks fields or has unknown ones"),
        (lambda h, a: h["info"].update(drafter=None), "needs a drafter, got None"),
        (lambda h, a: h["info"].update(max_num_speculative_tokens=0), r"1..255, got 0"),
        (lambda h, a: h["info"].update(max_num_speculative_tokens="8"), r"1..255, got '8'"),
        (lambda h, a: h["info"].update(temperature="hot"), "temperature 'hot'"),
        (lambda h, a: h["info"].update(versions=7), "versions of a trace is a mapping"),
        (lambda h, a: h.pop("ids"), "ids in its header is no list of texts"),
        (lambda h, a: h.update(ids=[1, 2, 3]), "ids in its header is no list of texts"),
        (lambda h, a: h.update(ids=["a"]), "its kinds do not fit its requests"),
        (lambda h, a: h.update(kinds=None), "kinds in its header is no list of texts"),
        (lambda h, a: h.update(kinds=[]), "its kinds do not fit its requests"),
        (lambda h, a: a.pop("looping"), "it lacks looping"),
        (lambda h, a: a.update(extra=np.zeros(2)), "it holds the unknown extra"),
        (lambda h, a: a.update(kind=np.array([0.0] * 3)), "kind holds no counts"),
        (lambda h, a: a.update(accepted=a["accepted"][:-1]), r"accepted is not [90]"),
        (lambda h, a: a.update(accepted=a["accepted"][None]), r"accepted is not [90]"),
        (lambda h, a: a.update(accepted=a["accepted"] + 0.5), "accepted holds no counts"),
        (
            lambda h, a: a.update(num_prompt=np.full(3, 2**64 - 1, np.uint64)),
            "num_prompt holds no counts",
        ),
        (
            lambda h, a: a.update(num_prompt=np.full(3, 2**32 - 1, np.uint32)),
            "a request may have 4294967",
        ),
        (lambda h, a: a.update(num_tokens=np.full(3, 2**31)), "a text passes its limit"),
        (lambda h, a: a.update(draft_top1=np.zeros((90, 8))), "draft_top1 does not fit"),
        (lambda h, a: a.pop("agreement"), "it lacks agreement; record it again"),
        (lambda h, a: a.update(agreement=a["agreement"][:, :7]), "agreement is not bytes [90, 8]"),
        (lambda h, a: a.update(match_distance=np.full(90, 0.5)), "match_distance holds no counts"),
        (lambda h, a: a.update(held_out=np.array("x")), "held_out holds no numbers"),
    ],
)
def test_contents_that_do_not_fit_are_one_clear_sentence(
    saved: Path, change: Any, message: str
) -> None:
    edit(saved, change)
    assert message in refusal(saved)


def without_later_arrays(header: dict[str, Any], arrays: dict[str, Any]) -> None:
    for name in LATER:
        del arrays[name]


def test_a_prompt_lookup_trace_of_before_it_showed_agreement_is_to_be_recorded_again(
    saved: Path,
) -> None:
    edit(saved, without_later_arrays)
    assert f"it lacks {', '.join(LATER)}; record it again" in refusal(saved)


@pytest.mark.parametrize("drafter", ["draft-model", "recorded-text"])
def test_an_old_trace_of_another_drafter_shows_no_places(tmp_path: Path, drafter: str) -> None:
    trace = toy_trace((4, 3), drafter=drafter)
    trace.save(tmp_path / "t.npz")
    edit(tmp_path / "t.npz", without_later_arrays)
    old = Trace.load(tmp_path / "t.npz")
    assert not any(getattr(old, name).any() for name in LATER)
    zeros = {name: np.zeros_like(getattr(trace, name)) for name in LATER}
    assert_equal(replace(trace, **zeros), old, rounded=True)


def test_an_old_file_cannot_ask_for_any_memory(saved: Path, monkeypatch: Any) -> None:
    toy_trace((4, 3), drafter="recorded-text").save(saved)
    edit(saved, without_later_arrays)
    monkeypatch.setattr(trace_module, "MAX_ARRAY_BYTES", 55)
    assert "7 positions of depth 8, too many" in refusal(saved)


def test_a_header_that_is_no_json_is_refused(saved: Path) -> None:
    for text in (b"\xff\xfe", b"not json", b"[" * 100_000, b"3"):
        with np.load(saved) as file:
            arrays = dict(file) | {"header": np.frombuffer(text, np.uint8)}
        np.savez_compressed(saved, **arrays)
        refusal(saved)


def test_an_empty_trace_is_refused(saved: Path) -> None:
    def empty(header: dict[str, Any], arrays: dict[str, Any]) -> None:
        header["ids"] = []
        arrays.update({name: values[:0] for name, values in arrays.items()})

    edit(saved, empty)
    assert "a trace needs at least one request" in refusal(saved)
