"""pykvq epicache."""
from __future__ import annotations

import time
from pathlib import Path

import click

from pykvq.cli.errors import InputError
from pykvq.cli.output import Output, common, mebibytes, table


@click.group("epicache")
def epicache() -> None:
    """Look at saved conversations of pykvq serve --epicache and of EpiCache.save."""


@epicache.command("inspect")
@common
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--conversation", metavar="ID", help="Show the episodes of this one. Default: the most recently used.")
@click.option("--plot", "picture", type=click.Path(path_type=Path), help="Draw its timeline and kept tokens to this file (needs the extra [plot]).")
def inspect(out: Output, path: Path, conversation: str | None, picture: Path | None) -> None:
    """Show conversations, and the episodes of one: sizes, cells, timeline.

    PATH is a folder of --store or of EpiCache.save; a server may be using it. The timeline has one digit per window of utterances: the episode
    that it belongs to.
    """
    from pykvq.epicache.store import Store
    store = Store(path, watch=True)
    entries = store.entries()
    chosen = next((e for e in entries if conversation in (None, e.id)), None)
    if conversation and not chosen:
        raise InputError(f"{path} has no conversation {conversation}; it has {', '.join(e.id for e in entries) or 'none'}")
    memory = store.memory(chosen.id) if chosen else None
    store.close()
    if picture:
        if memory is None:
            raise InputError("nothing to draw: the conversation has no episodes yet")
        from pykvq.epicache.plot import plot
        plot(memory, chosen.id[:8], picture)
        out.note(f"drawn to {picture}")
    rows = [] if memory is None else [
        {"episode": i, "segments": int((memory.label == i).sum()), "tokens": memory.size(i), "cells": len(e.cache.state.positions) if e.cache else memory.size(i),
         "bytes": e.cache.state.bytes if e.cache else memory.archive.bytes * memory.size(i) // memory.archive.end, "about": next(s.text for s, label in zip(memory.segments, memory.label) if label == i)}
        for i, e in enumerate(memory.episodes)]
    timeline = [] if memory is None else memory.label.tolist()
    tables = [table("conversations", ("id", ">messages", ">files", ">on disk", "last used"),
                    [(e.id, e.messages, e.files, mebibytes(e.bytes), time.strftime("%Y-%m-%d %H:%M", time.localtime(e.used))) for e in entries])]
    if rows:
        tables.append(table(f"\nepisodes of {chosen.id}", (">episode", ">segments", ">tokens", ">kept", ">on disk", "begins"),
                            [(r["episode"], r["segments"], r["tokens"], r["cells"], mebibytes(r["bytes"]), " ".join(r["about"].split())[:60]) for r in rows]))
        tables.append(table("\ntimeline", ("",), [("".join(map(str, timeline)),)]))
    out.data({"path": str(path), "conversations": [vars(e) for e in entries], "conversation": chosen.id if chosen else None, "episodes": rows,
              "timeline": timeline}, *tables)
