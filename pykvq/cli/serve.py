"""pykvq serve."""
from __future__ import annotations

import os
import socket
from contextlib import suppress
from pathlib import Path

import click

from pykvq.cli.errors import InputError
from pykvq.cli.model import KvType, pair_name
from pykvq.cli.output import Output, common, mebibytes


def default_store() -> Path:
    """The user's folder of conversations."""
    import platformdirs
    return Path(platformdirs.user_data_dir("pykvq", appauthor=False)) / "conversations"


def bound(host: str, port: int) -> socket.socket:
    """A socket that has the address before anything is loaded, and refuses connections until the server listens. Raises InputError."""
    made = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        if os.name == "posix":                   # elsewhere it would take a port that somebody listens on
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind((host, port))
        return made
    except OSError as error:
        made.close()
        raise InputError(f"cannot listen on {host}, port {port}: {error.strerror or error}; use another --port or --host") from error


@click.command("serve")
@common
@click.argument("model", type=click.Path(path_type=Path))
@click.option("--epicache", is_flag=True, help="Keep long conversations in a fixed number of cache cells. The only mode of this command.")
@click.option("--budget", type=click.IntRange(64), default=4096, show_default=True, help="Cells that a conversation's history takes.")
@click.option("--room", type=click.IntRange(64), default=1024, show_default=True, help="Tokens for a question and its answer.")
@click.option("--kv-type", type=KvType(), default="f16", show_default=True, help="Cache type, or K,V.")
@click.option("--encoder", default="auto", show_default=True, metavar="NAME",
              help="What compares questions with episodes: minilm, model (its token embeddings), or a GGUF embedding model. auto: minilm if it is "
                   "installed, else model.")
@click.option("--store", type=click.Path(path_type=Path), help="Folder of the conversations. Default: in the user's data folder.")
@click.option("--disk-limit", type=click.IntRange(0), help="MiB of caches on disk; the least recently used go first, their text stays.")
@click.option("--memory-limit", type=click.IntRange(0), default=2048, show_default=True, help="MiB of caches kept in the process.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), default=8080, show_default=True, help="Port to listen on.")
@click.option("--threads", type=click.IntRange(1, 512), help="CPU threads. Default: all cores.")
@click.option("--gpu-layers", type=click.IntRange(-1), default=0, show_default=True, help="Layers on the GPU; -1: all.")
def serve(out: Output, model: Path, epicache: bool, budget: int, room: int, kv_type: tuple[str, str], encoder: str, store: Path | None,
          disk_limit: int | None, memory_limit: int, host: str, port: int, threads: int | None, gpu_layers: int) -> None:
    """Serve long conversations over the OpenAI protocol, in a fixed number of cache cells.

    A client sends its growing list of messages as it always does to /v1/chat/completions; the server knows the conversation by it. The text
    and the caches survive a restart. The field epicache of an answer says how it came about.
    """
    if not epicache:
        raise InputError(f"pykvq serve needs --epicache; a server of another kind is: llama-server -m {model}")
    from pykvq.epicache.extra import needed
    with needed("uvicorn"):
        import uvicorn
    listener = bound(host, port)

    from pykvq.epicache.chat import EpiCache
    from pykvq.epicache.conversations import Conversations
    from pykvq.epicache.server import create_app
    made = EpiCache(model, budget, kv_type=kv_type, room=room, encoder_name=encoder, threads=threads, gpu_layers=gpu_layers)
    folder = store or default_store()
    conversations = Conversations(made, folder, memory_limit << 20, None if disk_limit is None else disk_limit << 20)
    info = made.context.info()
    out.note(f"{model.name}, {pair_name(kv_type)}, budget {budget}, encoder {made.encoder_name}: {mebibytes(info.bytes)} of cache, {info[0].cells} cells; "
             f"conversations in {folder}")
    out.note(f"serving on http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}/v1; Ctrl-C ends it")
    try:
        with suppress(KeyboardInterrupt):
            uvicorn.Server(uvicorn.Config(create_app(conversations, model.stem), log_level="warning")).run([listener])
    finally:
        conversations.close()
        made.close()
