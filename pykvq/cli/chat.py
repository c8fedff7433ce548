"""pykvq chat."""
from __future__ import annotations

import math
import sys
from pathlib import Path

import click

from pykvq.cli.errors import InputError
from pykvq.cli.model import KvType, check_input, model_argument, model_path, pair_name, window_options
from pykvq.cli.output import Output, common


class Conversation:
    """Turns of one chat. When they outgrow the context, whole turns are dropped from the front, never the system prompt."""

    def __init__(self, llm, system: str | None, max_tokens: int, temperature: float):
        self.llm, self.max_tokens, self.temperature = llm, max_tokens, temperature
        self.system = [{"role": "system", "content": system}] if system else []
        self.turns: list[dict] = []
        self.dropped = 0

    def _room(self) -> bool:
        """Whether the turns and a full answer fit; counted on the text plus a few tokens per message for the template."""
        used = sum(len(self.llm.tokenize(m["content"].encode(), add_bos=False)) + 8 for m in self.system + self.turns)
        return used + self.max_tokens <= self.llm.n_ctx()

    def ask(self, prompt: str):
        """Yield the answer piece by piece. Raises InputError when the prompt alone is too long for the context."""
        self.turns.append({"role": "user", "content": prompt})
        while not self._room():
            if len(self.turns) == 1:
                self.turns.pop()
                raise InputError(f"the prompt does not fit a context of {self.llm.n_ctx()} tokens with --max-tokens {self.max_tokens}; raise --ctx")
            del self.turns[:2]
            self.dropped += 1
        pieces = []
        for chunk in self.llm.create_chat_completion(self.system + self.turns, stream=True, max_tokens=self.max_tokens,
                                                     temperature=self.temperature):
            piece = chunk["choices"][0]["delta"].get("content")
            if piece:
                pieces.append(piece)
                yield piece
        self.turns.append({"role": "assistant", "content": "".join(pieces)})


def prompts(out: Output):
    """Prompts from the terminal until Ctrl-D, or the lines of a piped stdin."""
    if not sys.stdin.isatty():
        try:
            yield from (line for raw in sys.stdin.buffer if (line := raw.decode(sys.stdin.encoding).strip()))
        except UnicodeDecodeError as error:
            raise InputError(f"stdin is not {error.encoding} text ({error.reason}, byte 0x{error.object[error.start]:02x})") from error
        return
    out.note("Ctrl-D ends the chat.")
    while True:
        try:
            line = input("> ").strip()
        except EOFError:
            click.echo(err=True)
            return
        if line:
            yield line


@click.command("chat")
@common
@model_argument
@click.option("--kv-type", type=KvType(), default="turbo3", show_default=True, help="Cache type, or K,V.")
@window_options
@click.option("--ctx", type=click.IntRange(256), default=4096, show_default=True, help="Context size in tokens.")
@click.option("--system", help="System prompt.")
@click.option("--max-tokens", type=click.IntRange(1), default=512, show_default=True, help="Longest answer.")
@click.option("--temperature", type=click.FloatRange(0), default=0.7, show_default=True, help="0 is greedy.")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the sampler.")
@click.option("--threads", type=click.IntRange(1, 512), help="CPU threads. Default: all cores.")
@click.option("--gpu-layers", type=click.IntRange(-1), default=0, show_default=True, help="Layers on the GPU; -1: all.")
def chat(out: Output, model: Path | None, kv_type: tuple[str, str], window: dict, ctx: int, system: str | None, max_tokens: int, temperature: float,
         seed: int, threads: int | None, gpu_layers: int) -> None:
    """Talk to a model through a compressed cache.

    MODEL is a GGUF file; without it SmolLM2-135M from the extra [demo] is used. A piped stdin is read line by line, one prompt
    per line. The cache's effective types and bytes are told on stderr at the start and at the end.
    """
    if math.isnan(temperature):
        raise click.BadParameter("nan is no temperature", param_hint="'--temperature'")
    path = model_path(model)
    max_tokens = min(max_tokens, ctx // 2)
    import os

    from llama_cpp import Llama

    from pykvq.engine import quiet_log
    quiet_log()
    check_input(out, path, [kv_type], ctx, gpu_layers)
    llm = Llama(str(path), kv_type=kv_type, **window, n_ctx=ctx, seed=seed, n_threads=threads or os.cpu_count(), n_gpu_layers=gpu_layers,
                verbose=False)
    info = llm.kv_cache_info()
    out.note(f"{path.name}, {pair_name(kv_type)}, context {ctx}: {info}")
    conversation, asked = Conversation(llm, system, max_tokens, temperature), 0
    try:
        for prompt in prompts(out):
            dropped, answer = conversation.dropped, []
            try:
                for piece in conversation.ask(prompt):
                    answer.append(piece)
                    if not out.as_json:
                        click.echo(piece, nl=False)
            except InputError as error:
                if not sys.stdin.isatty():
                    raise
                out.warn(str(error))             # somebody sits there and can ask again
                continue
            asked += 1
            if out.as_json:
                out.line({"prompt": prompt, "answer": "".join(answer), "context_used": llm.n_tokens, "context": ctx,
                          "dropped_turns": conversation.dropped, "kv_bytes": info.bytes, "kv_bytes_f16": info.bytes_f16})
            else:
                click.echo()
            if conversation.dropped > dropped:
                out.warn(f"the context was full; the oldest {conversation.dropped - dropped} turns were dropped")
    except KeyboardInterrupt:
        if not sys.stdin.isatty():
            raise                                # a script must see that answers are missing
        click.echo(err=True)
    out.note(f"{asked} answer{'s' * (asked != 1)}, {llm.n_tokens} of {ctx} tokens used; {info}")
    llm.close()
