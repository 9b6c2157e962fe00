"""The clause registry: every rule of the contract, once.

Ids are never reused.  A clause may be clarified within a revision, never tightened.  `kvc explain ID`, the
texts of failures and the one-page contract are all drawn from here.
"""

from __future__ import annotations

import difflib
from typing import Final

from kvcontract.contract.clause import LEVELS, Clause, Keeper, Level
from kvcontract.contract.errors import UsageFault
from kvcontract.contract.tier_clauses import TIERS

__all__ = ["CLAUSES", "LEVELS", "TIER_CLAUSES", "Clause", "Keeper", "Level", "clause"]

_LOADED = ("KVC-DECL-01", "KVC-DECL-02", "KVC-DECL-03", "KVC-DECL-04")
_SOUND = (
    "KVC-DECL-06",
    "KVC-DECL-08",
    "KVC-DECL-09",
    "KVC-DECL-12",
    "KVC-LAYOUT-01",
    "KVC-LAYOUT-02",
    "KVC-LAYOUT-03",
    "KVC-LAYOUT-04",
    "KVC-REPACK-01",
)
_LAID_OUT = ("KVC-LAYOUT-06", "KVC-REPACK-03")
_RUNS = ("KVC-LAYOUT-05", "KVC-PREFIX-01")
_BESIDE = ("KVC-BOUNDED-02", "KVC-PREFIX-08")

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
        rule="Every kvc_ function of the plugin is a hook the host knows, and is marked @hookimpl.",
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
        rule="kvc_model returns one KvModel whose fields have the declared names, types and ranges.",
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
        rule="Names are unique and printable, references resolve, and the model bears the plugin's name.",
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
        rule="key_tokens is a multiple of page_tokens, and page_tokens of every arena's tokens_per_row.",
        why="A record holds whole pages, and a page whole rows.",
        fix="Round the granularity up to the multiple that the message names.",
        requires=_LOADED,
    ),
    Clause(
        id="KVC-DECL-09",
        level="L0",
        who="author",
        rule="Every group keeps bytes: it has at least one arena, and every arena at least one field.",
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
        rule="Every fact comes from the config; what it lacks or cannot be served is named, never guessed.",
        why="A guessed head count is a cache of another shape than the model writes.",
        fix="Give a complete config.json of this family; every key that is at fault is named.",
        rests_on=("I3",),
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
        rule="Attributes agree with the kind: reach on paged groups, boundary and snapshot on bounded ones.",
        why="An attribute of another kind has no meaning there, so what its author meant is not served.",
        fix="Move the attribute to a group of the kind it belongs to, or drop it.",
        requires=_LOADED,
    ),
    Clause(
        id="KVC-LAYOUT-01",
        level="L0",
        who="author",
        rule="Every dtype is in the table, rows fill whole bytes, and a page fits any memory at all.",
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
        rule="Every field starts at a multiple of its element size, in every row and every block.",
        why="Tensors of that dtype cannot be laid over a misaligned address.",
        fix="Reorder the fields from wide to narrow, or set align_bytes / stride_multiple_bytes.",
        rests_on=("E8",),
        requires=(*_LOADED, "KVC-DECL-06", "KVC-DECL-09", "KVC-LAYOUT-01"),
    ),
    Clause(
        id="KVC-LAYOUT-04",
        level="L0",
        who="author",
        rule="The token axis is implied; a field of planes may place it, with size 1, in a paged group.",
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
        requires=_SOUND,
    ),
    Clause(
        id="KVC-LAYOUT-06",
        level="L1",
        who="runtime",
        rule="Every element lies where the declaration puts it, at every page size and worker.",
        why="A shifted layer, head or token is another token's state in every answer.",
        fix="If the oracle is right, report a fault of kvcontract; else correct the declared order.",
        rests_on=("E1",),
        requires=_SOUND,
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
        requires=_SOUND,
    ),
    Clause(
        id="KVC-REPACK-01",
        level="L0",
        who="author",
        rule="A derived repack has the same fields on both sides: reordered, joined, split or widened.",
        why="Numbers that change need a callable; the runtime cannot guess it.",
        fix="List the same fields with the same dtypes or wider ones, or name a Conversion.",
        requires=_LOADED,
    ),
    Clause(
        id="KVC-REPACK-02",
        level="L1",
        who="author",
        rule="The callables of a Conversion can be imported by the names given.",
        why="They run in every worker process, which has only their names.",
        fix="Give 'module:function' of an importable module.",
        requires=_SOUND,
    ),
    Clause(
        id="KVC-REPACK-03",
        level="L1",
        who="author",
        rule="Bytes that are saved and restored come back to the field, head, token and place they had.",
        why="K where V belongs has the right shape and gives fluent, wrong answers.",
        fix="Compare to_wire and from_wire field by field; the failure decodes what was found where.",
        rests_on=("E6",),
        requires=("KVC-REPACK-04",),
    ),
    Clause(
        id="KVC-REPACK-04",
        level="L1",
        who="author",
        rule="A conversion writes all of dst, never src, and gives the same bytes each time.",
        why="A changed source is a live page of a running request.",
        fix="Write with dst[...].copy_(...); allocate nothing that aliases src.",
        rests_on=("E6",),
        requires=(*_SOUND, "KVC-REPACK-02"),
    ),
    Clause(
        id="KVC-BOUNDED-01",
        level="L2",
        who="author",
        rule="Cutting a prefill at multiples of boundary_tokens changes no bit of the state.",
        why="A request that is cut where the kernel is not computes other numbers than an uncut one.",
        fix="Declare as boundary_tokens the tokens that the prefill kernel works through at a time.",
        rests_on=("F2",),
        requires=_RUNS,
    ),
    Clause(
        id="KVC-BOUNDED-02",
        level="L2",
        who="runtime",
        rule="A snapshot is found under the boundary it was taken at and no other, once it is whole.",
        why="Live state is rewritten by its owner: what is shared must be a copy, and of the right moment.",
        fix="Report a fault of kvcontract; the failure decodes whose state was found.",
        rests_on=("F1", "F2", "F3", "R3"),
        requires=("KVC-LAYOUT-05",),
    ),
    Clause(
        id="KVC-BOUNDED-03",
        level="L2",
        who="runtime",
        rule="A snapshot that a request is to begin with stays as it is until it is copied, and no longer.",
        why="Its slot, given to another, would be that one's state in this one's answer.",
        fix="Report a fault of kvcontract with the seed.",
        rests_on=("F4", "E4"),
        requires=("KVC-BOUNDED-02",),
    ),
    Clause(
        id="KVC-BOUNDED-04",
        level="L2",
        who="runtime",
        rule="A hit ends where every group has what it needs; pages beyond that are let go.",
        why="Full pages without the state at their end are worth nothing, and are others' room.",
        fix="Report a fault of kvcontract.",
        rests_on=("F5", "R2"),
        requires=("KVC-LAYOUT-05",),
    ),
    Clause(
        id="KVC-BOUNDED-05",
        level="L2",
        who="runtime",
        rule="Without a free slot no snapshot is taken and nobody waits; a slab for none is refused.",
        why="A snapshot is a chance; a live slot is a promise; and a silent 0 % is found out in production.",
        fix="Report a fault of kvcontract; of an engine: give more slots, as the refusal says.",
        rests_on=("F6", "F8"),
        requires=("KVC-BOUNDED-02",),
    ),
    Clause(
        id="KVC-PREFIX-01",
        level="L2",
        who="author",
        rule="Over the arenas the model computes the logits, and keeps the states, of the unmodified model.",
        why="An executor that skips a row, a head or a page still talks; only the original exposes it.",
        fix="Check which rows are read, page boundaries included, and when and how slots are written.",
        rests_on=("B17", "B19", "F2"),
        requires=("KVC-PREFIX-04",),
    ),
    Clause(
        id="KVC-PREFIX-02",
        level="L2",
        who="author",
        rule="A run that starts from a device hit gives the cold run's logits and states, bit for bit.",
        why="State that a page does not hold (a counter, a cached tensor) is lost on reuse.",
        fix="Keep everything a later step reads in the declared arenas.",
        rests_on=("R2", "B19"),
        requires=_RUNS,
    ),
    Clause(
        id="KVC-PREFIX-03",
        level="L2",
        who="author",
        rule="At the serving precision, logits stay within the bounds of regret against the original.",
        why="A precision that is lost in the cache shows only there.",
        fix="Store what the model computes; declare a narrower dtype as such.",
        requires=_RUNS,
    ),
    Clause(
        id="KVC-PREFIX-04",
        level="L2",
        who="author",
        rule="A step writes its own positions' rows and its requests' whole slots, and reads no leftover.",
        why="A write outside is another request's state, and what lay there before a stranger's.",
        fix="Address rows by the page table, slots by step.slots; start from nothing at context_len 0.",
        rests_on=("B17", "B21", "E5", "F1", "F3"),
        requires=("KVC-LAYOUT-05", *_LAID_OUT),
    ),
    Clause(
        id="KVC-PREFIX-05",
        level="L2",
        who="runtime",
        rule="A repeated prompt hits every full page but leaves a token to compute; partial pages never hit.",
        why="A full hit without a token to run has no logits; a partial page is not immutable.",
        fix="Report a fault of kvcontract with the trace.",
        rests_on=("A12", "A13", "B19"),
        requires=("KVC-LAYOUT-05", *_BESIDE),
    ),
    Clause(
        id="KVC-PREFIX-06",
        level="L2",
        who="runtime",
        rule="Equal tokens in unequal scopes, or under other identities, never meet.",
        why="Another tenant's or another adapter's state would be served.",
        fix="Report a fault of kvcontract.",
        rests_on=("D1", "D2", "D6"),
        requires=_SOUND,
    ),
    Clause(
        id="KVC-PREFIX-07",
        level="L2",
        who="runtime",
        rule="Under any mix of requests, reuse and eviction the pool's books balance and no live page moves.",
        why="A page given out twice is two requests writing one memory.",
        fix="Report a fault of kvcontract with the seed.",
        rests_on=("B2", "B3", "B4", "B11", "B14", "B15", "B16", "B21"),
        requires=("KVC-LAYOUT-05", *_BESIDE),
    ),
    Clause(
        id="KVC-PREFIX-08",
        level="L2",
        who="runtime",
        rule="A hit holds, and a request keeps, of each window exactly the pages that later steps read.",
        why="One page fewer is a hole in every answer; one more is room that others wait for.",
        fix="Report a fault of kvcontract.",
        rests_on=("R2", "F5", "B14"),
        requires=("KVC-LAYOUT-05",),
    ),
    Clause(
        id="KVC-OFFLOAD-01",
        level="L2",
        who="runtime",
        rule="Pages that left the device and came back through a tier hold the bytes they had.",
        why="A restored page is trusted like a computed one.",
        fix="Report a fault of kvcontract; the failure decodes what was found where.",
        rests_on=("R3", "E1", "E7"),
        requires=("KVC-LAYOUT-05", *_LAID_OUT, *_BESIDE),
    ),
    Clause(
        id="KVC-OFFLOAD-02",
        level="L2",
        who="author",
        rule="A run from a prefix restored from a tier gives the cold run's logits and states, bit for bit.",
        why="State beside the arenas survives a device hit but not an eviction.",
        fix="Keep everything a later step reads in the declared arenas.",
        rests_on=("R2", "R4"),
        requires=(*_RUNS, "KVC-OFFLOAD-01"),
    ),
    Clause(
        id="KVC-OFFLOAD-03",
        level="L2",
        who="runtime",
        rule="A damaged, foreign or missing record is a shorter hit: never bytes, never an exception.",
        why="Memory rots, disks lie; the answer must not.",
        fix="Report a fault of kvcontract.",
        rests_on=("R4", "E7", "H3"),
        requires=("KVC-OFFLOAD-01",),
    ),
    Clause(
        id="KVC-OFFLOAD-04",
        level="L2",
        who="runtime",
        rule="At idle every lease, pin, hold and reservation is back, and close leaves nothing running.",
        why="A leak of one page a request is an outage within the hour.",
        fix="Report a fault of kvcontract with the seed.",
        rests_on=("R8", "A6", "C1", "C6", "C10"),
        requires=("KVC-LAYOUT-05", *_BESIDE),
    ),
    Clause(
        id="KVC-OFFLOAD-05",
        level="L2",
        who="engine",
        rule="A tier that outlives the process needs resolved weights; tiers serve every degree that fits.",
        why="Unresolved weights name two checkpoints alike; a share of a page is not the page.",
        fix="Give a checkpoint folder, whose files are digested; for a larger tp, raise max_tp.",
        rests_on=("D6", "E3", "H10"),
        requires=_SOUND,
    ),
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
