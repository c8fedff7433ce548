"""A slow llama with both copies of every token: quantised and f16. Which copy a query reads is picked by the rule of
docs/windows.md, token by token; cells, sequences, shifts and saved states are lists of Python objects."""
from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from pykvq.codecs import turbo
from pykvq.formats import FAMILIES

BLOCK = 64


def stored(kind: str, x: np.ndarray) -> np.ndarray:
    """What a cache of that type gives back for vectors of one block; float32 [..., 64]."""
    if kind == "f16":
        return x.astype(np.float16).astype(np.float32)
    return turbo.dequantise(turbo.quantise(x, f"{kind}_{BLOCK}"), f"{kind}_{BLOCK}")


def windowed(kind: str, x: np.ndarray) -> np.ndarray:
    """What the window beside such a cache gives back."""
    return stored("f16", x) if kind not in FAMILIES else turbo.dequantise_window(turbo.quantise_window(x, BLOCK), BLOCK)


def met(kind: str, q: np.ndarray) -> np.ndarray:
    """The query as such keys meet it: int8 in the rotated domain for packed ones."""
    if kind not in FAMILIES:
        return q
    raw = turbo.quantise_activation(q, BLOCK).reshape(*q.shape[:-1], BLOCK + 4)
    d = np.ascontiguousarray(raw[..., :4]).view("<f4")
    return turbo.unrotate(raw[..., 4:].view(np.int8).astype(np.float32)) * d / np.sqrt(np.float32(BLOCK))


def turn(x: np.ndarray, position: np.ndarray) -> np.ndarray:
    """RoPE of llama: pairs (0, 1), (2, 3), ...; x [n, heads, 64], position [n]."""
    a = np.multiply.outer(position.astype(np.float64), 10000.0 ** (-np.arange(BLOCK // 2) * 2 / BLOCK))[:, None, :]
    out = np.empty_like(x)
    out[..., 0::2] = x[..., 0::2] * np.cos(a) - x[..., 1::2] * np.sin(a)
    out[..., 1::2] = x[..., 0::2] * np.sin(a) + x[..., 1::2] * np.cos(a)
    return out


@dataclass
class Cell:
    """One cached token: its key and value of every layer, once as the cache keeps it and once as the window does."""
    pos: int
    seqs: set[int]
    layers: list[dict[str, np.ndarray]] = field(default_factory=list)
    row: bool = False                            # has an f16 copy
    shift: int = 0                               # not yet applied to the keys


class Reference:
    """The model of a GGUF that tiny_model.write_tiny_model wrote, head size 64."""

    def __init__(self, path, kv_type: tuple[str, str], sink: int, recent: int, unified: bool, room: int = 1 << 30):
        from gguf import GGUFReader
        self.w = {t.name: np.asarray(t.data, np.float32) for t in GGUFReader(path).tensors}
        self.k_type, self.v_type = kv_type
        self.sink, self.recent, self.unified, self.room = sink, recent, unified, room
        self.cells: list[Cell] = []

    # ---- the rule

    def stream(self, seq: int) -> list[Cell]:
        """Cells that are looked after together with those of seq."""
        return [c for c in self.cells if self.unified or seq in c.seqs]

    def next(self, seq: int) -> int:
        """Position of the sequence's next token."""
        return max((c.pos for c in self.cells if seq in c.seqs), default=-1) + 1

    def needed(self, cell: Cell, first: dict[int, int]) -> bool:
        """first: position of the first token of a batch, by sequence; elsewhere the next token counts."""
        return cell.pos < self.sink or any(cell.pos > first.get(s, self.next(s)) - self.recent for s in cell.seqs)

    def trim(self, seq: int, first: dict[int, int]) -> None:
        for cell in self.stream(seq):
            cell.row = cell.row and self.needed(cell, first)

    # ---- what a cache does

    def decode(self, entries: list[tuple[int, int]]) -> np.ndarray:
        """(token, sequence) each at its sequence's next position; logits [n, vocabulary]."""
        for cell in self.cells:
            self._apply_shift(cell)
        first: dict[int, int] = {}
        new = []
        for token, seq in entries:
            first.setdefault(seq, self.next(seq))
        for seq in first:
            self.trim(seq, first)
        for token, seq in entries:
            cell = Cell(self.next(seq), {seq})
            cell.row = self.recent > 0 or cell.pos < self.sink
            self.cells.append(cell)
            new.append((token, seq, cell))
        logits = self._forward(new)
        if self.recent and any(sum(self.unified or s == seq for _, s in entries) > self.room for seq in first):
            for seq in first:                    # a batch without room in the ring leaves there what the next one needs
                self.trim(seq, {})
        return logits

    def copy(self, source: int, target: int) -> None:
        self.remove(target, 0)
        if self.unified:
            for cell in self.cells:
                if source in cell.seqs:
                    cell.seqs.add(target)
        else:
            self.cells += [replace(c, seqs={target}, layers=[dict(x) for x in c.layers]) for c in self.cells if source in c.seqs]

    def remove(self, seq: int, start: int, end: int = 1 << 30) -> None:
        for cell in self.cells:
            if start <= cell.pos < end:
                cell.seqs.discard(seq)
        self.cells = [c for c in self.cells if c.seqs]

    def shift(self, seq: int, start: int, delta: int) -> None:
        for cell in self.cells:
            if seq in cell.seqs and cell.pos >= start:
                cell.pos += delta
                cell.shift += delta

    def restore(self, source: int, target: int) -> None:
        """Save one sequence and load it as another."""
        saved = [replace(c, seqs={target}, layers=[dict(x) for x in c.layers], row=c.row and self.needed(c, {}))
                 for c in sorted(self.cells, key=lambda c: c.pos) if source in c.seqs]
        self.remove(target, 0)
        self.cells += saved
        self.trim(target, {})

    # ---- arithmetic

    def _apply_shift(self, cell: Cell) -> None:
        if cell.shift:
            by = np.array([cell.shift])
            for x in cell.layers:
                x["k"] = stored(self.k_type, turn(x["k"][None], by))[0]
                x["k16"] = windowed(self.k_type, turn(x["k16"][None], by))[0]
            cell.shift = 0

    def _norm(self, x: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x.astype(np.float64) ** 2).mean(-1, keepdims=True) + 1e-5).astype(np.float32)

    def _forward(self, new) -> np.ndarray:
        w = self.w
        x = w["token_embd.weight"][[token for token, _, _ in new]]
        position = np.array([cell.pos for _, _, cell in new])
        for i in range(sum(name.endswith("attn_q.weight") for name in w)):
            h = self._norm(x)
            q, k, v = ((h @ w[f"blk.{i}.attn_{name}.weight"].T).reshape(len(new), -1, BLOCK) for name in "qkv")
            q, k = turn(q, position), turn(k, position)
            copies = {"k": stored(self.k_type, k), "k16": windowed(self.k_type, k), "v": stored(self.v_type, v), "v16": windowed(self.v_type, v)}
            for j, (_, _, cell) in enumerate(new):
                cell.layers.append({name: value[j] for name, value in copies.items()})
            out = np.stack([self._attend(q[j], seq, cell, i) for j, (_, seq, cell) in enumerate(new)])
            x = x + out.reshape(len(new), -1) @ w[f"blk.{i}.attn_output.weight"].T
            h = self._norm(x)
            gate = h @ w[f"blk.{i}.ffn_gate.weight"].T
            x = x + (gate / (1 + np.exp(-gate)) * (h @ w[f"blk.{i}.ffn_up.weight"].T)) @ w[f"blk.{i}.ffn_down.weight"].T
        return self._norm(x) @ w["output.weight"].T

    def _attend(self, q: np.ndarray, seq: int, own: Cell, layer: int) -> np.ndarray:
        seen = [c for c in self.cells if seq in c.seqs and c.pos <= own.pos and len(c.layers) > layer]
        rows = np.array([c.row for c in seen])[:, None, None]
        k, k16, v, v16 = (np.stack([c.layers[layer][name] for c in seen]) for name in ("k", "k16", "v", "v16"))
        group = len(q) // k.shape[1]
        k, k16, v = (np.repeat(x, group, 1) for x in (k, k16, np.where(rows, v16, v)))
        logit = np.where(rows[..., 0], (q * k16).sum(-1), (met(self.k_type, q) * k).sum(-1)) / np.sqrt(BLOCK)
        weight = np.exp(logit - logit.max(0))
        return np.einsum("th,thd->hd", weight / weight.sum(0), v)
