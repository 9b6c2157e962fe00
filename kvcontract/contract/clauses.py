"""The clause registry: every rule of the contract, once.

Ids are never reused.  A clause may be clarified within a revision, never tightened.  `kvc explain ID`, the
texts of failures and the one-page contract are all drawn from here; which clauses a revision has is written
down in `kvcontract/contract/revisions`.
"""

from __future__ import annotations

import difflib
from typing import Final

from kvcontract.contract.clause import LEVELS, Clause, Keeper, Level
from kvcontract.contract.errors import UsageFault
from kvcontract.contract.run_clauses import RUN, SOUND
from kvcontract.contract.tier_clauses import TIERS

__all__ = ["CLAUSES", "LEVELS", "TIER_CLAUSES", "Clause", "Keeper", "Level", "clause"]

_LOADED = ("KVC-DECL-01", "KVC-DECL-02", "KVC-DECL-03", "KVC-DECL-04")
_REGISTRY: Final[tuple[Clause, ...]] = (
    Clause(
        id="KVC-DECL-01",
        level="L0",
        who="author",
        rule="The plugin imports without error and its name is registered once.",
        why="A plugin that fails at import, or that shadows another, serves nobody and must be named.",
        fix="Import the module and read the traceback (--tb shows it); uninstall one of two namesakes.",
        rests_on=("I1",),
    ),
    Clause(
        id="KVC-DECL-02",
        level="L0",
        who="author",
        rule="Every kvc_ function of the plugin is a known hook and is marked @hookimpl.",
        why="A misspelt hook is never called, so the plugin silently lacks what it was meant to bring.",
        fix="Rename the function to the hook that the message suggests, or mark it with @hookimpl.",
        rests_on=("I1", "I4"),
    ),
    Clause(
        id="KVC-DECL-03",
        level="L0",
        who="author",
        rule="The plugin states KVC_CONTRACT, a contract revision that this host serves.",
        why="A plugin for another revision means other things by the same names.",
        fix="Install the kvcontract version that serves the plugin's revision, or port the plugin.",
        rests_on=("I2",),
    ),
    Clause(
        id="KVC-DECL-04",
        level="L0",
        who="author",
        rule="kvc_model returns one KvModel, with fields of the declared types and ranges.",
        why="Everything downstream is computed from these fields; unknown ones would be ignored silently.",
        fix="Correct the fields named; `kvc inspect` shows a declaration that is well formed.",
        rests_on=("D8", "I3"),
        requires=("KVC-DECL-01", "KVC-DECL-02", "KVC-DECL-03"),
    ),
    Clause(
        id="KVC-DECL-05",
        level="L0",
        who="author",
        rule="Calling kvc_model twice with equal contexts gives equal declarations.",
        why="Plugins load in every worker process; a declaration that differs there is other bytes.",
        fix="Take every fact from ctx; use no clock, random number, environment or global state.",
        requires=_LOADED,
    ),
    Clause(
        id="KVC-DECL-06",
        level="L0",
        who="author",
        rule="Names are unique and printable, references resolve, name is the plugin's own.",
        why="Arenas, groups and scale fields find each other by name; a lost reference is lost state.",
        fix="Rename what the message names, or correct the reference to one of the names listed.",
        requires=_LOADED,
    ),
    Clause(
        id="KVC-DECL-07",
        level="L0",
        who="author",
        rule="page_tokens is one of page_tokens_allowed, which states its reason.",
        why="Page sizes are gated for accuracy one by one; an ungated one must be refused, not tried.",
        fix="Choose one of the allowed sizes with --page-tokens.",
        requires=_LOADED,
    ),
    Clause(
        id="KVC-DECL-08",
        level="L0",
        who="author",
        rule="key_tokens is a multiple of page_tokens, and that of every tokens_per_row.",
        why="A record holds whole pages, and a page whole rows.",
        fix="Round the granularity up to the multiple that the message names.",
        requires=_LOADED,
    ),
    Clause(
        id="KVC-DECL-09",
        level="L0",
        who="author",
        rule="Every group has at least one arena, and every arena at least one field.",
        why="A group without bytes would be found, saved and restored as nothing.",
        fix="Add the missing arenas or fields, or drop the group.",
        requires=_LOADED,
    ),
    Clause(
        id="KVC-DECL-10",
        level="L0",
        who="author",
        rule="Every option given is known, well formed and honoured.",
        why="An option that is dropped silently makes a launch differ from what was asked for.",
        fix="Give an allowed value or the name suggested; or have the plugin read the option, or refuse it.",
        rests_on=("I4",),
        requires=("KVC-DECL-01", "KVC-DECL-02", "KVC-DECL-03"),
    ),
    Clause(
        id="KVC-DECL-11",
        level="L0",
        who="author",
        rule="Facts come from the config; what is missing or unserved is named, never guessed.",
        why="A guessed head count is a cache of another shape than the model writes.",
        fix="Give a complete config.json of the family; put the fact in place of each fill_in(...).",
        rests_on=("I3", "I5"),
        requires=("KVC-DECL-01", "KVC-DECL-02", "KVC-DECL-03"),
    ),
    Clause(
        id="KVC-DECL-12",
        level="L0",
        who="author",
        rule="Nothing is declared that this version of the runtime does not serve.",
        why="A field that is accepted and ignored would be a promise nobody keeps.",
        fix="Leave the field at its default, or use a version that serves it.",
        rests_on=("H10",),
        requires=_LOADED,
    ),
    Clause(
        id="KVC-DECL-13",
        level="L0",
        who="author",
        rule="Attributes fit the kind of group: boundary and snapshot belong to bounded ones.",
        why="An attribute of another kind has no meaning there, so what its author meant is not served.",
        fix="Move the attribute to a group of the kind it belongs to, or drop it.",
        requires=_LOADED,
    ),
    Clause(
        id="KVC-LAYOUT-01",
        level="L0",
        who="author",
        rule="Every dtype is in the table, rows fill whole bytes, and a page fits into memory.",
        why="Bytes follow from dtypes and axes; a fraction of a byte has no address.",
        fix="Use a dtype of the table; make the last axis fill whole bytes; check the sizes for a slip.",
        requires=_LOADED,
    ),
    Clause(
        id="KVC-LAYOUT-02",
        level="L0",
        who="author",
        rule="shard_axis is one of the field's own axes, and the tp asked for can cut it.",
        why="A cut through the middle of a head gives every worker a wrong slice.",
        fix="Name an axis of the field; choose a tp that divides it or that it divides.",
        rests_on=("E3",),
        requires=_LOADED,
    ),
    Clause(
        id="KVC-LAYOUT-03",
        level="L0",
        who="author",
        rule="Every field starts at a multiple of its element size, in every row and block.",
        why="Tensors of that dtype cannot be laid over a misaligned address.",
        fix="Reorder the fields from wide to narrow, or set align_bytes / stride_multiple_bytes.",
        rests_on=("E8",),
        requires=(*_LOADED, "KVC-DECL-06", "KVC-DECL-09", "KVC-LAYOUT-01"),
    ),
    Clause(
        id="KVC-LAYOUT-04",
        level="L0",
        who="author",
        rule="The token axis is implied; planes of a paged group may place it, with size 1.",
        why="Rows are interleaved by definition, and slots of a bounded group have no tokens.",
        fix="Drop 'token' from the axes, or give it size 1 in an arena of planes.",
        requires=_LOADED,
    ),
    Clause(
        id="KVC-LAYOUT-05",
        level="L1",
        who="engine",
        rule="Memory bound to an arena holds every block of the pool, aligned, without overlap.",
        why="A page beyond the end reads or overwrites another tensor's memory.",
        fix="Allocate as many blocks as the pool has pages, page 0 included; the message does the sum.",
        rests_on=("E8", "B22"),
        requires=SOUND,
    ),
    Clause(
        id="KVC-LAYOUT-06",
        level="L1",
        who="runtime",
        rule="Every element lies where the declaration puts it, at every page size and worker.",
        why="A shifted layer, head or token is another token's state in every answer.",
        fix="If the oracle is right, report a fault of kvcontract; else correct the declared order.",
        rests_on=("E1",),
        requires=SOUND,
    ),
    Clause(
        id="KVC-LAYOUT-07",
        level="L1",
        who="runtime",
        rule="Saving and restoring touch no other page, no padding and no guard byte.",
        why="A write past a page's end is another request's state.",
        fix="Report a fault of kvcontract with the seed that the failure prints.",
        rests_on=("E1", "E5"),
        requires=("KVC-LAYOUT-06", "KVC-REPACK-04"),
    ),
    Clause(
        id="KVC-LAYOUT-08",
        level="L1",
        who="author",
        rule="The declaration, and so the fingerprint, is the same for every tp.",
        why="Prefill at tp 2 and decode at tp 1 must name the same content the same way.",
        fix="State global sizes; never divide by ctx.options.tp.",
        rests_on=("D6",),
        requires=SOUND,
    ),
    Clause(
        id="KVC-REPACK-01",
        level="L0",
        who="author",
        capability="repack",
        rule="A derived repack has equal fields on both sides: moved, joined, split or widened.",
        why="Numbers that change need a callable; the runtime cannot guess it.",
        fix="List the same fields with the same dtypes or wider ones, or name a Conversion.",
        requires=_LOADED,
    ),
    Clause(
        id="KVC-REPACK-02",
        level="L1",
        who="author",
        capability="conversion",
        rule="The callables of a Conversion can be imported by the names given.",
        why="They run in every worker process, which has only their names.",
        fix="Give 'module:function' of an importable module.",
        requires=SOUND,
    ),
    Clause(
        id="KVC-REPACK-03",
        level="L1",
        who="author",
        rule="Bytes saved and restored come back to the field, head, token and place they had.",
        why="K where V belongs has the right shape and gives fluent, wrong answers.",
        fix="Compare to_wire and from_wire field by field; the failure decodes what was found where.",
        rests_on=("E6",),
        requires=("KVC-LAYOUT-06", "KVC-REPACK-04"),
    ),
    Clause(
        id="KVC-REPACK-04",
        level="L1",
        who="author",
        capability="conversion",
        rule="A conversion writes all of dst, never src, and gives the same bytes each time.",
        why="A changed source is a live page of a running request.",
        fix="Write with dst[...].copy_(...); allocate nothing that aliases src.",
        rests_on=("E6",),
        requires=(*SOUND, "KVC-REPACK-02"),
    ),
    *RUN,
)

_NAMED: Final = {item.id: item for item in (*_REGISTRY, *TIERS)}


def _depth(item: Clause) -> int:
    return 1 + max((_depth(_NAMED[required]) for required in item.requires), default=0)


CLAUSES: Final[tuple[Clause, ...]] = tuple(sorted(_REGISTRY, key=lambda item: (item.level, _depth(item))))
"""Every clause on models, lower levels first, and what a clause requires before it."""

TIER_CLAUSES: Final[tuple[Clause, ...]] = tuple(sorted(TIERS, key=_depth))
"""Every clause on tiers, what a clause requires before it."""


def clause(clause_id: str) -> Clause:
    """The clause of that id.

    Raises:
        UsageFault: there is none; the nearest ids are named.
    """
    found = _NAMED.get(clause_id.upper())
    if found is None:
        near = difflib.get_close_matches(clause_id.upper(), _NAMED, n=3)
        hint = f"; did you mean {', '.join(near)}?" if near else "; `kvc explain --all` lists them"
        raise UsageFault(f"there is no clause {clause_id!r}{hint}")
    return found
