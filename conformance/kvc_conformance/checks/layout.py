"""Level 1: bytes. The parent makes the fill and compares; a child writes, saves and restores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvc_conformance.bench import Bench, Check, Failed, NotApplicable, small_enough
from kvc_conformance.channel import Message
from kvc_conformance.driver import ProbeFailed
from kvc_conformance.oracle import (
    Fill,
    Map,
    compare,
    content_map,
    cut,
    device_map,
    side_by_side_map,
    wire_map,
)
from kvcontract.contract.errors import InternalFault
from kvcontract.contract.layout import layout, tp_faults, with_page_tokens
from kvcontract.contract.model import KvModel
from kvcontract.contract.wire import Part, parts

PAGE_SIZES: Final = (1, 3, 5)
"""Odd sizes, beside the declared one: nothing may depend on a page of 16."""

POISON: Final = 0xA5
BLOCKS: Final = 7
SOURCES: Final = (2, 5, 3, 6)
TARGETS: Final = (4, 1, 6, 2)
RECORD_PAGES: Final = ((3, 2), (1, 3))
"""Sizes of pages, in rows, and pages of a record, beside records of one page."""

MAX_TP: Final = (1, 8)
WHOLE_LIMIT_BYTES: Final = 4 << 20
"""A page as large as declared, up to which conversions are called on it too."""

HELD_OTHERS: Final = "saved, then restored, in memory that held other pages before"
CONVERSIONS: Final = 16
"""Calls of a conversion on the same page: one that keeps state may be right most of the time."""

FEW_CONVERSIONS: Final = 2
POISONS: Final = (0x00, 0xFF)
"""What lies in dst before a call, by turns."""


def _rows(model: KvModel) -> int:
    return int(np.lcm.reduce([1, *(arena.tokens_per_row for arena in model.arenas)]))


def _sizes(bench: Bench) -> tuple[int, ...]:
    model, rows = bench.small, _rows(bench.small)
    return tuple(dict.fromkeys([*(size * rows for size in PAGE_SIZES), model.page_tokens]))


def _page_cases(bench: Bench) -> tuple[str, ...]:
    return tuple(f"page {size}" for size in _sizes(bench))


def _conversion_cases(bench: Bench) -> tuple[str, ...]:
    pages = [*_page_cases(bench), *(f"page {size}" for size in _allowed(bench))]
    return (*pages, *(f"whole {case}" for case in _whole(bench)))


def _allowed(bench: Bench) -> tuple[int, ...]:
    """Further sizes that a launch may ask for: callables may know some of them only."""
    model = bench.small
    return tuple(
        size for size in model.page_tokens_allowed if _callables(model) and size not in _sizes(bench)
    )


def _whole(bench: Bench) -> tuple[str, ...]:
    """The page of the model itself: what callables compute from its sizes may be right for small ones."""
    if not bench.samples or not _callables(bench.declared):
        return ()
    size = sum(space.stride_bytes for space in layout(bench.declared).spaces)
    return (f"page {bench.declared.page_tokens}",) if size <= WHOLE_LIMIT_BYTES else ()


def _trips(bench: Bench) -> tuple[str, ...]:
    more = [f"page {size}, page-first, max_tp 1" for size in _allowed(bench)]
    return (*_forms(bench), *more, *(f"whole {case}" for case in _whole(bench)))


def _records(bench: Bench) -> tuple[tuple[int, int], ...]:
    """(page tokens, pages of a record): odd sizes, and what is declared as far as the memory goes."""
    model, rows = bench.small, _rows(bench.small)
    found = [(size * rows, pages) for size, pages in RECORD_PAGES]
    if 1 < model.record_pages <= len(SOURCES):
        found.append((model.page_tokens, model.record_pages))
    return tuple(dict.fromkeys(found))


def _blocks(pages: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Where as many whole records come from, and where they go."""
    count = 3 if pages == 1 else len(SOURCES) // pages * pages
    return SOURCES[:count], TARGETS[:count]


def _model(bench: Bench, page_tokens: int, pages: int = 1, *, whole: bool = False) -> KvModel:
    key_tokens = pages * page_tokens if pages > 1 else None
    return small_enough(with_page_tokens(bench.declared if whole else bench.small, page_tokens, key_tokens))


def _arrays(fill: Fill, number: int, worker: int = 0, tp: int = 1) -> dict[str, NDArray[np.uint8]]:
    fields = {(arena.name, field.name): field for arena in fill.model.arenas for field in arena.fields}
    out: dict[str, NDArray[np.uint8]] = {}
    for name in fill.fields():
        held = np.stack([cut(block, fields[name], worker, tp) for block in fill.serials(name)])
        out["|".join(name)] = fill.image(name, held, number)
    return out


def _author_line(model: KvModel, text: str) -> str | None:
    """The line that declared the arena a difference is about."""
    return next((arena.where for arena in model.arenas if arena.name in text), model.where)


def _where_it_lies(bench: Bench, case: str) -> str:
    """KVC-LAYOUT-06: what is written through the views lies where the oracle says, for every worker."""
    size = int(case.split()[1])
    model = _model(bench, size)
    degrees = [tp for tp in (1, 2, 4) if not tp_faults(model, tp) and _splits(model, tp)]
    fill = Fill(model, BLOCKS)
    for tp in degrees:
        for worker in range(tp):
            arguments = {"page_tokens": size, "tp": tp, "worker": worker}
            answers = [
                bench.small_child.call("memory.write", arguments, _arrays(fill, number, worker, tp))
                for number in range(fill.passes)
            ]
            for space in layout(model).spaces:
                maps = [device_map(fill, space.groups, block, worker, tp) for block in range(BLOCKS)]
                what = f"written at tp {tp}, worker {worker}"
                _expect(answers, f"image|{space.key}", maps, fill, range(BLOCKS), what)
    return f"{fill.count - 1:,} elements, {fill.passes} pass(es), tp {', '.join(map(str, degrees))}"


def _splits(model: KvModel, tp: int) -> bool:
    sizes = [f.axes[f.shard_axis] for arena in model.arenas for f in arena.fields if f.shard_axis]
    return tp == 1 or (bool(sizes) and all(size % tp == 0 for size in sizes))


def _expect(answers: list[Message], array: str, maps: list[Map], fill: Fill, rows: Any, what: str) -> None:
    nan_is_nan = _by_value(fill.model)  # others keep every bit
    for row, where in zip(rows, maps, strict=True):
        wrong = compare([answer.arrays[array][row] for answer in answers], where, fill, nan_is_nan=nan_is_nan)
        if wrong is not None:
            raise Failed(f"{what}: {wrong}", where=_author_line(fill.model, wrong))


def _roundtrip(bench: Bench, form: _Form) -> tuple[Fill, list[Message]]:
    """Save and restore once for each pass of the fill, kept for every check that looks at it."""
    key = f"roundtrip {form}"
    if key not in bench.kept:
        sources, targets = _blocks(form.pages)
        fill = Fill(_model(bench, form.size, form.pages), len(sources))
        arguments = {
            "page_tokens": form.size,
            "record_pages": form.pages,
            "sources": sources,
            "targets": targets,
            "blocks": BLOCKS,
            "max_tp": form.max_tp,
            "poison": POISON,
            "layer_first": form.layer_first,
        }
        answers = [
            bench.small_child.call("memory.roundtrip", arguments, _arrays(fill, number))
            for number in range(fill.passes)
        ]
        bench.kept[key] = (fill, answers)
    kept: tuple[Fill, list[Message]] = bench.kept[key]
    return kept


@dataclass(frozen=True, slots=True)
class _Form:
    """How pages lie, and how they are stored: records of so many of them, for so many workers."""

    size: int
    pages: int
    max_tp: int
    layer_first: bool

    @classmethod
    def of(cls, case: str) -> _Form:
        """From a case such as ``page 3 x 2, page-first, max_tp 1``."""
        size, order, max_tp = (part.strip().split() for part in case.split(","))
        return cls(
            int(size[1]), int(size[-1]) if "x" in size else 1, int(max_tp[1]), order == ["layer-first"]
        )


def _forms(bench: Bench) -> tuple[str, ...]:
    shards = MAX_TP if not _callables(bench.small) else MAX_TP[:1]
    sizes = [str(size) for size in _sizes(bench)]
    sizes += [f"{size} x {pages}" for size, pages in _records(bench)]
    return tuple(
        f"page {size}, {order}, max_tp {max_tp}"
        for size in sizes
        for order, max_tp in (("page-first", shards[0]), ("layer-first", shards[-1]))
    )


def _by_value(model: KvModel) -> bool:
    """Whether numbers are stored in another form: by callables, or in wider elements."""
    stored = () if model.repack is None else model.repack.arenas
    types = [sorted(f.dtype for arena in arenas for f in arena.fields) for arenas in (model.arenas, stored)]
    return _callables(model) or (model.repack is not None and set(types[0]) != set(types[1]))


def _callables(model: KvModel) -> bool:
    return model.repack is not None and not isinstance(model.repack.conversion, str)


def _comes_back(bench: Bench, case: str) -> str:
    """KVC-REPACK-03: the record is what the declaration says, and restoring gives every byte its place."""
    if case.startswith("whole "):
        return _whole_comes_back(bench, case)
    form = _Form.of(case)
    fill, answers = _roundtrip(bench, form)
    sources, targets = _blocks(form.pages)
    for answer in answers:
        codes = [*answer.body["saved"].values(), *answer.body["loaded"].values()]
        if any(map(any, codes)) or answer.body["faults"]:
            said = "; ".join(answer.body["faults"]) or f"codes {answer.body['saved']} {answer.body['loaded']}"
            raise Failed(f"pages could not be saved and restored: {said}")
    shards = max(_wire_is_right(fill, part, form, answers) for part in parts(fill.model))
    rows = [target + int(form.layer_first) for target in targets]
    for key, groups, stored in _stored(fill.model):
        lies = side_by_side_map if form.layer_first else device_map
        maps = [lies(fill, groups, block).only(fill, stored) for block in range(len(sources))]
        _expect(answers, f"restored|{key}", maps, fill, rows, HELD_OTHERS)
    return f"{shards} shard(s), {fill.passes} pass(es)"


def _whole_comes_back(bench: Bench, case: str) -> str:
    """A page as large as declared, through the callables alone."""
    fill, answers = _converted(bench, case)
    fields = (name.split("/") for name, _ in answers[0].body["fields"]["back"])
    where = content_map(fill, [(arena, field) for arena, field in fields])
    _expect(answers, "back", [where], fill, [0], "converted, and back")
    return f"{fill.passes} pass(es)"


def _wire_is_right(fill: Fill, part: Part, form: _Form, answers: list[Message]) -> int:
    """Whether records are what the declaration says; how many shards they have."""
    shards = sum(name.startswith(f"wire|{part.name}|") for name in answers[0].arrays)
    if _by_value(fill.model):  # the bytes between two callables are the author's own business
        return shards
    sources, _ = _blocks(form.pages)
    step = form.pages if fill.model.group(part.groups[0]).kind == "paged" else 1
    records = [range(at, at + step) for at in range(0, len(sources), step)]
    for shard in range(shards):
        maps = [wire_map(fill, part.groups, blocks, shard, shards) for blocks in records]
        what = f"part {part.name} stored, shard {shard}"
        _expect(answers, f"wire|{part.name}|{shard}", maps, fill, range(len(records)), what)
    return shards


def _stored(model: KvModel) -> list[tuple[str, tuple[str, ...], set[str]]]:
    """Each space: key, groups, and those of them that are saved."""
    saved = {name for part in parts(model) for name in part.groups}
    return [(space.key, space.groups, saved & set(space.groups)) for space in layout(model).spaces]


def _touches_nothing_else(bench: Bench, case: str) -> None:
    """KVC-LAYOUT-07: other pages, guards and padding keep their poison; the saved pages are unchanged."""
    form = _Form.of(case)
    fill, answers = _roundtrip(bench, form)
    if any(answer.body["source_changed"] for answer in answers):
        raise Failed("saving changed the device memory it read")
    sources, targets = _blocks(form.pages)
    lies = side_by_side_map if form.layer_first else device_map
    for key, groups, stored in _stored(fill.model):
        written = lies(fill, groups, 0)
        for answer in answers:
            _is_poison(answer, f"after_save|{key}", sources, written, form)
            _is_poison(answer, f"restored|{key}", targets, written.only(fill, stored), form)


def _is_poison(answer: Message, what: str, blocks: Sequence[int], written: Map, form: _Form) -> None:
    """All but some bytes of some blocks."""
    image = answer.arrays[what].copy()
    for block in blocks:
        image[block + int(form.layer_first)][written.content] = POISON
    stray = np.argwhere(image != POISON)
    if len(stray):
        block, byte = (int(number) for number in stray[0])
        block -= int(form.layer_first)
        verb, key = what.split("|")
        raise Failed(
            f"{verb}: byte {byte} of block {block} in {key} was overwritten; only blocks"
            f" {list(blocks)} are concerned ({len(stray):,} stray bytes)"
        )


def _refuses(bench: Bench, _case: str) -> str:
    """KVC-LAYOUT-05: memory that does not fit is refused when bound, with arithmetic."""
    small_enough(bench.small)
    answer = bench.small_child.call("memory.refusals", {"blocks": BLOCKS}).body
    tried = set[str]()
    for found in answer["spaces"].values():
        answers: dict[str, str | None] = dict(found["answers"])
        if answers.pop("fits") is not None:
            raise Failed("memory that fits every block was refused", fault="runtime")
        for attempt, said in answers.items():
            if said is None:
                raise Failed(f"binding {attempt} was accepted", fault="runtime")
            if "KVC-LAYOUT-05" not in said or found["arena"] not in said:
                raise Failed(
                    f"binding {attempt} was refused without clause or arena: {said}", fault="runtime"
                )
        tried |= set(answers)
    return f"refused: {', '.join(sorted(tried))}"


def _own_memory(bench: Bench, _case: str) -> str:
    """KVC-LAYOUT-05, the plugin's side: memory that an executor brings holds every block."""
    if not bench.runs:
        raise NotApplicable("the plugin brings no executor")
    small_enough(bench.small)
    answer = bench.small_plugin.call("engine.own_arenas", {"blocks": BLOCKS}, timeout_s=180).body
    if not answer["owns"]:
        raise NotApplicable("the executor takes the memory it is given")
    if answer["refused"] is not None:
        raise Failed(str(answer["refused"]), where=answer["where"], fault="plugin")
    return "the executor's own arenas fit"


def _page_of(case: str) -> int:
    """From a case such as ``whole page 16``."""
    return int(case.rsplit(maxsplit=1)[-1])


def _converted(bench: Bench, case: str) -> tuple[Fill, list[Message]]:
    """What a conversion did by itself, for each pass of the fill; kept for every check that looks at it."""
    key = f"conversion {case}"
    if key not in bench.kept:
        whole = case.startswith("whole ")
        model = _model(bench, _page_of(case), whole=whole)
        child, fill = bench.whole_child if whole else bench.small_child, Fill(model, 1)
        repeats = FEW_CONVERSIONS if whole else CONVERSIONS
        arguments = {"page_tokens": model.page_tokens, "repeats": repeats, "poisons": POISONS}
        answers = [
            child.call("memory.conversion", arguments, _arrays(fill, number)) for number in range(fill.passes)
        ]
        bench.kept[key] = (fill, answers)
    kept: tuple[Fill, list[Message]] = bench.kept[key]
    return kept


def _importable(bench: Bench, case: str) -> None:
    """KVC-REPACK-02."""
    del case
    answer = bench.small_child.call("memory.importable").body
    if answer["refused"]:
        raise Failed("\n".join(answer["refused"]))


def _well_behaved(bench: Bench, case: str) -> None:
    """KVC-REPACK-04: all of dst and nothing else, the same each time, and everywhere."""
    _, answers = _converted(bench, case)
    for answer in answers:
        got = answer.arrays
        if "to_wire" in answer.body["changed"]:
            raise Failed("to_wire changed its source, which is a live page")
        if answer.body["changed"]:
            raise Failed("from_wire changed its source, which is a record that others read too")
        for what, count in answer.body["beyond"].items():
            if count:
                raise Failed(
                    f"{what} wrote {count:,} B beyond the tensors of dst: into padding, or what lies next to"
                    " them"
                )
        for what, name in (("to_wire", "wire"), ("from_wire", "back")):
            calls = got[name]
            poison = np.resize(np.array(POISONS, np.uint8), (len(calls), 1))
            unwritten = np.flatnonzero((calls == poison).all(axis=0))
            if len(unwritten):
                first = _byte_of(answer.body["fields"][name], int(unwritten[0]))
                raise Failed(
                    f"{what} left {len(unwritten):,} of {calls.shape[1]:,} B of dst unwritten; first: {first}"
                )
            other = (calls != calls[0]).any(axis=1)
            if other.any():
                call = int(other.argmax())
                differs = np.flatnonzero(calls[call] != calls[0])
                first = _byte_of(answer.body["fields"][name], int(differs[0]))
                raise Failed(
                    f"{what} gave other bytes at call {call + 1} than at first, from the same page:"
                    f" {len(differs):,} of {calls.shape[1]:,} B; first: {first}"
                )
    if not case.startswith("whole "):
        _needs_the_wire_alone(bench, case, answers)


def _byte_of(fields: list[tuple[str, int]], byte: int) -> str:
    """Which byte of which field."""
    for name, size in fields:
        if byte < size:
            return f"byte {byte} of {name}"
        byte -= size
    raise InternalFault(f"byte {byte} is beyond the last field")


def _needs_the_wire_alone(bench: Bench, case: str, answers: list[Message]) -> None:
    """Another process, which has the stored bytes and nothing else, gets the same from them."""
    arguments = {"page_tokens": _page_of(case)}
    for answer in answers:
        stored = {name: array for name, array in answer.arrays.items() if name.startswith("stored|")}
        try:
            back = bench.small_peer.call("memory.unconverted", arguments, stored).arrays["back"]
        except ProbeFailed as error:
            if error.kind != "PluginFault":
                raise
            raise Failed(
                f"in a process that has not called to_wire, {error.text}", where=error.where, fault="plugin"
            ) from error
        differs = np.flatnonzero(back != answer.arrays["back"][0])
        if len(differs):
            raise Failed(
                f"in a process that has not called to_wire, from_wire gave {len(differs):,} of"
                f" {len(back):,} B otherwise: what is stored is not all that it needs; first:"
                f" {_byte_of(answer.body['fields']['back'], int(differs[0]))}"
            )


CHECKS: Final[tuple[Check, ...]] = (
    Check("KVC-LAYOUT-05", _refuses),
    Check("KVC-LAYOUT-05", _own_memory),
    Check("KVC-LAYOUT-06", _where_it_lies, _page_cases),
    Check("KVC-LAYOUT-07", _touches_nothing_else, _forms),
    Check("KVC-REPACK-02", _importable),
    Check("KVC-REPACK-03", _comes_back, _trips),
    Check("KVC-REPACK-04", _well_behaved, _conversion_cases),
)
