"""``kvc store``: what is in a disk store, whether it is whole, and what may go."""

from __future__ import annotations

import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from kvcontract.cli import view
from kvcontract.cli.launching import JsonFlag
from kvcontract.tiers import disk_audit

app = typer.Typer(
    help="Look at, check and tidy the directory of a disk tier.", no_args_is_help=True, rich_markup_mode=None
)

Directory = Annotated[Path, typer.Argument(metavar="DIR", help="The directory of a disk tier.")]

_EVERY_S: Final = 2.0
_TOLD: Final = 20


@app.command("ls")
def ls(directory: Directory, *, json: JsonFlag = False) -> int:
    """List what a store holds, by fingerprint, part and shard.

    Its owner may be at work: what is told may be stale.
    """
    found = disk_audit.inventory(directory)
    groups = disk_audit.groups(found)
    if json:
        view.emit_json(
            {
                "schema": "kvc.store-ls/1",
                "directory": str(found.path),
                "label": asdict(found.label),
                "owner": None if found.owner is None else asdict(found.owner) | {"runs": found.owner.here},
                "records": groups,
                "foreign": list(found.files.foreign),
                "rows_damaged": found.contents.damaged,
            }
        )
        return 0
    out = view.console()
    meta = "".join(f", {name} {value}" for name, value in found.label.meta.items())
    out.print(f"{found.path}: format {found.label.format}, since {found.label.created}{meta}")
    if found.owner is not None:
        state = {True: "open in", False: "not closed by", None: "opened by"}[found.owner.here]
        out.print(f"{state} {found.owner}")
    view.table(
        view.count(len(found.contents.records), "record"),
        ("fingerprint", "part", "shard", "records", "bytes"),
        [
            (
                row["fingerprint"] or "no frame",
                row["part"],
                f"{row['shard']} of {row['shards']}",
                f"{row['records']:,}",
                view.bytes_text(row["record_bytes"]),
            )
            for row in groups
        ],
    )
    if found.files.foreign:
        out.print(f"not ours, left alone: {', '.join(found.files.foreign)}")
    if found.contents.damaged:
        out.print(
            f"{view.count(found.contents.damaged, 'row')} of the index damaged; kvc store gc removes them"
        )
    return 0


@app.command("du")
def du(directory: Directory, *, json: JsonFlag = False) -> int:
    """Tell how many bytes a store takes, by what they are for."""
    found = disk_audit.inventory(directory)
    usage = disk_audit.usage(found)
    if json:
        view.emit_json({"schema": "kvc.store-du/1", "directory": str(found.path), "bytes": usage})
        return 0
    view.table(
        f"{found.path}",
        ("bytes", "what"),
        [(view.bytes_text(usage[name]), text) for name, text in _USAGE.items()],
    )
    return 0


_USAGE: Final = {
    "record_bytes": "records",
    "padding_bytes": "what rounds records up to slots",
    "free_slot_bytes": "free slots",
    "orphan_bytes": "files that belong to nothing; the next start removes them",
    "segment_bytes": "segment files, all of the above",
    "index_bytes": "index and small files",
    "capacity_bytes": "quota of the segment files",
    "free_bytes": "left of the quota for new records",
    "disk_free_bytes": "free on the disk",
}


@app.command("verify")
def verify(directory: Directory, *, json: JsonFlag = False) -> int:
    """Read every record and check its place, its frame and every segment.

    Its owner may be at work. Exit code 1: something is damaged; kvc store gc removes it.
    """
    verdict = disk_audit.verify(directory, _progress("checked"))
    _tell("kvc.store-verify/1", directory, verdict, {}, json=json)
    return 0 if verdict.whole else 1


@app.command("gc")
def gc(directory: Directory, *, json: JsonFlag = False) -> int:
    """Remove what is damaged or belongs to nothing.

    Reads every record first. The store must not be open.
    """
    verdict, figures = disk_audit.collect(directory, _progress("checked"))
    _tell("kvc.store-gc/1", directory, verdict, figures, json=json)
    return 0


def _tell(
    schema: str, directory: Path, verdict: disk_audit.Verdict, figures: dict[str, int], *, json: bool
) -> None:
    done = bool(figures)
    if json:
        document: dict[str, Any] = {
            "schema": schema,
            "directory": str(directory),
            "whole": verdict.whole,
            "records": verdict.records,
            "record_bytes": verdict.record_bytes,
            "moved": verdict.moved,
            "unframed": verdict.unframed,
            "rows_damaged": verdict.rows_damaged,
            "damaged": [{"key": key.hex(), "why": why} for key, why in verdict.damaged],
        }
        view.emit_json(document | ({"after": figures} if done else {}))
        return
    out = view.console()
    for key, why in verdict.damaged[:_TOLD]:
        out.print(f"{'removed' if done else 'DAMAGED'}  {key.hex()}  {why}")
    if len(verdict.damaged) > _TOLD:
        out.print(f"... {len(verdict.damaged) - _TOLD} more (--json lists them)")
    counts = [
        view.count(verdict.records, "record") + f" of {view.bytes_text(verdict.record_bytes)} read",
        f"{len(verdict.damaged)} damaged",
        *([f"{verdict.rows_damaged} rows of the index damaged"] if verdict.rows_damaged else []),
        *([f"{verdict.moved} evicted meanwhile"] if verdict.moved else []),
        *([f"{verdict.unframed} without a frame"] if verdict.unframed else []),
    ]
    if done:
        orphans = figures["orphans_removed"]
        counts += [f"{view.count(orphans, 'file')} that belonged to nothing removed"] if orphans else []
        counts += [f"{view.count(figures['rows_dropped'], 'row')} dropped"] if figures["rows_dropped"] else []
    out.print(f"{directory}: {', '.join(counts)}")


def _progress(verb: str) -> disk_audit.Progress:
    """Tell on stderr now and then how far it is."""
    talk = view.console(sys.stderr)
    told = time.monotonic()

    def tell(done: int, count: int) -> None:
        nonlocal told
        if time.monotonic() - told >= _EVERY_S:
            told = time.monotonic()
            talk.print(f"{verb} {done:,} of {view.count(count, 'record')}")

    return tell
