"""Conversations on disk: an SQLite index, which holds the text, and a folder of cache files per conversation.

The index is the truth. Files have names of their own and are never written over; a transaction makes the new ones count, and only then the old ones
go. So whatever moment a process dies at, the index points to whole files, and what it does not point to is swept when the store is opened.
"""
from __future__ import annotations

import hashlib
import json
import shutil
import sqlite3
import threading
import time
import uuid
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from pykvq.epicache import files
from pykvq.epicache.chat import Conversation
from pykvq.epicache.files import Saved, Unusable
from pykvq.epicache.memory import Memory
from pykvq.epicache.messages import Message

_SCHEMA = """
CREATE TABLE IF NOT EXISTS conversations(id TEXT PRIMARY KEY, created REAL, used REAL, system TEXT, said TEXT);
CREATE TABLE IF NOT EXISTS files(conversation TEXT, number INTEGER, version TEXT, name TEXT, bytes INTEGER, sha256 TEXT,
                                 PRIMARY KEY(conversation, number));
CREATE TABLE IF NOT EXISTS prefixes(hash TEXT, conversation TEXT, messages INTEGER, PRIMARY KEY(hash, conversation));
"""
_INDEX, _LOCK, _MEMORY = "index.sqlite", ".lock", -1        # _MEMORY: number of the file that holds no rows


@dataclass(frozen=True)
class Entry:
    """One conversation of the index. created, used: seconds since 1970; files: of rows, 0 while it has none; bytes: of all its files."""
    id: str
    created: float
    used: float
    messages: int
    files: int
    bytes: int


class Store:
    """The folder `root`, made if absent. limit: bytes of cache files; beyond it the least recently used conversations lose theirs, not their text.
    watch: only look, beside a process that uses it.

    Raises ValueError when another process has the store open, OSError.
    """

    def __init__(self, root: str | Path, limit: int | None = None, watch: bool = False):
        self.root, self.limit, self._lock = Path(root), limit, threading.RLock()
        self._process = FileLock(self.root / _LOCK)
        if watch:
            if not (self.root / _INDEX).is_file():
                raise ValueError(f"no conversations are saved in {self.root}")
            self._db = self._connect("ro")
            return
        self.root.mkdir(parents=True, exist_ok=True)
        try:
            self._process.acquire(timeout=0)
        except Timeout as error:
            raise ValueError(f"{self.root} is in use by another process; end that one, or name another folder") from error
        self._db = self._connect("rwc")
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=FULL")
        self._db.executescript(_SCHEMA)
        self._sweep()

    def _connect(self, mode: str) -> sqlite3.Connection:
        path = self.root / _INDEX
        db = sqlite3.connect(f"{path.absolute().as_uri()}?mode={mode}", uri=True, isolation_level=None, check_same_thread=False)
        try:
            db.execute("SELECT count(*) FROM sqlite_master")
        except sqlite3.DatabaseError as error:
            db.close()
            self._process.release()
            raise ValueError(f"the index {path} is damaged ({error}); move the folder away to begin anew") from error
        return db

    def close(self) -> None:
        """Let another process in."""
        self._db.close()
        self._process.release()

    def put(self, id: str, conversation: Conversation, identity: dict) -> None:
        """Save a conversation: its text first, then the caches that changed since the last time. Raises OSError."""
        now = time.time()
        with self._transaction():
            said = json.dumps([list(m) for m in conversation.said])
            self._db.execute("INSERT INTO conversations VALUES(?, ?, ?, ?, ?) ON CONFLICT(id) DO UPDATE SET used=excluded.used, system=excluded.system, "
                             "said=excluded.said", (id, now, now, json.dumps([list(m) for m in conversation.system]), said))
            hashes = prefix_hashes([*conversation.system, *conversation.said])
            self._db.execute("DELETE FROM prefixes WHERE conversation=?", (id,))
            self._db.executemany("INSERT OR REPLACE INTO prefixes VALUES(?, ?, ?)", [(h, id, n) for n, h in hashes.items()])
        if conversation.memory:
            self._put_memory(id, conversation.memory, identity)
        else:
            self._forget_files(id)
        self._make_room(id)

    def get(self, id: str, identity: dict) -> tuple[Conversation, str | None]:
        """A conversation, and why its caches do not serve, so that the text has to be replayed; None when they do or when there are none.

        Raises KeyError for an unknown id.
        """
        with self._lock:
            row = self._db.execute("SELECT system, said FROM conversations WHERE id=?", (id,)).fetchone()
            if row is None:
                raise KeyError(id)
            self._db.execute("UPDATE conversations SET used=? WHERE id=?", (time.time(), id))
            system, said = ([Message(*m) for m in json.loads(text)] for text in row)
            saved = self._files(id)
        conversation = Conversation(system, said)
        if not saved:
            return conversation, None
        try:
            conversation.memory = self._read(id, saved, identity)
        except Unusable as error:
            return conversation, str(error)
        return conversation, None

    def find(self, messages: Sequence[Message]) -> tuple[str, int] | None:
        """The conversation that begins like `messages` the furthest, and for how many of them; the most recently used of several."""
        with self._lock:
            for n, digest in sorted(prefix_hashes(messages).items(), reverse=True):
                row = self._db.execute("SELECT conversation FROM prefixes JOIN conversations ON id=conversation WHERE hash=? ORDER BY used DESC",
                                       (digest,)).fetchone()
                if row:
                    return row[0], n
        return None

    def length(self, id: str) -> int:
        """Messages of a conversation, its system prompt included."""
        with self._lock:
            system, said = self._db.execute("SELECT system, said FROM conversations WHERE id=?", (id,)).fetchone()
            return len(json.loads(system)) + len(json.loads(said))

    def entries(self) -> list[Entry]:
        """All conversations, the most recently used first."""
        with self._lock:
            rows = self._db.execute("SELECT id, created, used, said FROM conversations ORDER BY used DESC").fetchall()
            return [Entry(id, created, used, len(json.loads(said)), max(0, len(saved := self._files(id)) - 1), sum(s.bytes for s in saved.values()))
                    for id, created, used, said in rows]

    def memory(self, id: str) -> Memory | None:
        """The memory of a conversation whatever model it belongs to, for looking at it. Raises Unusable for damaged files."""
        with self._lock:
            saved = self._files(id)
        return self._read(id, saved, None) if saved else None

    def delete(self, id: str) -> None:
        """Remove text and files."""
        self._forget_files(id)
        with self._transaction():
            self._db.execute("DELETE FROM prefixes WHERE conversation=?", (id,))
            self._db.execute("DELETE FROM conversations WHERE id=?", (id,))
        shutil.rmtree(self.root / id, ignore_errors=True)

    def _read(self, id: str, saved: dict[int, Saved], identity: dict | None) -> Memory:
        arrays = files.read(self.root / id, saved[_MEMORY], identity)
        try:
            return files.restored(arrays, [files.read(self.root / id, saved[part], identity) for part in range(files.part_count(arrays))])
        except (KeyError, ValueError) as error:
            raise Unusable(str(error)) from error

    def _put_memory(self, id: str, memory: Memory, identity: dict) -> None:
        with self._lock:
            known = dict(self._db.execute("SELECT number, version FROM files WHERE conversation=?", (id,)).fetchall())
            before = self._files(id)
        parts = files.parts(memory)
        wanted = {_MEMORY: memory.version, **{n: part.version for n, part in enumerate(parts)}}
        if wanted == known:
            return
        folder = self.root / id
        folder.mkdir(exist_ok=True)
        written = {}
        for number, version in wanted.items():
            if known.get(number) != version:
                name = f"{'memory' if number == _MEMORY else f'part{number}'}-{uuid.uuid4().hex[:12]}.npz"
                arrays = files.memory_arrays(memory) if number == _MEMORY else files.part_arrays(parts[number])
                written[number] = (version, files.write(folder, name, arrays, identity))
        files.flush(folder)
        with self._transaction():
            self._db.execute(f"DELETE FROM files WHERE conversation=? AND number>={len(parts)}", (id,))
            self._db.executemany("INSERT OR REPLACE INTO files VALUES(?, ?, ?, ?, ?, ?)",
                                 [(id, number, version, s.name, s.bytes, s.sha256) for number, (version, s) in written.items()])
        kept = {s.name for s in self._files(id).values()}
        self._unlink(id, [s.name for s in before.values() if s.name not in kept])

    def _files(self, id: str) -> dict[int, Saved]:
        rows = self._db.execute("SELECT number, name, bytes, sha256 FROM files WHERE conversation=?", (id,)).fetchall()
        return {number: Saved(*rest) for number, *rest in rows}

    def _forget_files(self, id: str) -> None:
        with self._lock:
            before = self._files(id)
            if before:
                self._db.execute("DELETE FROM files WHERE conversation=?", (id,))
        self._unlink(id, [s.name for s in before.values()])

    def _make_room(self, current: str) -> None:
        if self.limit is None:
            return
        by_age = sorted(self.entries(), key=lambda e: (e.id == current, e.used))
        total = sum(e.bytes for e in by_age)
        for entry in by_age:
            if total <= self.limit:
                return
            self._forget_files(entry.id)
            total -= entry.bytes

    def _sweep(self) -> None:
        """Remove files that no transaction made count."""
        for folder in (p for p in self.root.iterdir() if p.is_dir()):
            kept = {name for s in self._files(folder.name).values() for name in (s.name, f"{s.name}.json")}
            for path in folder.iterdir():
                if path.name not in kept:
                    path.unlink()

    def _unlink(self, id: str, names: list[str]) -> None:
        for name in names:
            (self.root / id / name).unlink(missing_ok=True)
            (self.root / id / f"{name}.json").unlink(missing_ok=True)

    @contextmanager
    def _transaction(self):
        with self._lock:
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
            except BaseException:
                self._db.execute("ROLLBACK")
                raise
            self._db.execute("COMMIT")


def prefix_hashes(messages: Sequence[Message]) -> dict[int, str]:
    """A hash of the first n messages for every n at which an answer ends, the last one included: {n: hash}."""
    digest, out = hashlib.sha256(), {}
    for n, m in enumerate(messages, 1):
        digest.update(json.dumps(list(m)).encode() + b"\n")
        if m.role == "assistant":
            out[n] = digest.hexdigest()
    return out
