"""An OpenAI-compatible server in front of Conversations: /v1/chat/completions, streamed or not, /v1/models, /health."""
from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator
from dataclasses import asdict

from pykvq.epicache.conversations import Answer, Conversations
from pykvq.epicache.extra import needed

_KNOWN = ("max_tokens", "temperature", "top_p", "seed", "stop")
_UNSERVED = ("tools", "functions", "response_format", "logprobs", "logit_bias")


def options(body: dict) -> dict:
    """Keyword arguments of EpiCache.chat from a request. Raises ValueError for what is not served, instead of leaving it out."""
    refused = [name for name in _UNSERVED if body.get(name)] + (["n"] if body.get("n", 1) != 1 else [])
    if refused:
        raise ValueError(f"{', '.join(refused)}: not served by pykvq serve; leave it out, or use llama-server")
    out = {name: body[name] for name in _KNOWN if body.get(name) is not None}
    if body.get("max_completion_tokens"):
        out["max_tokens"] = body["max_completion_tokens"]
    numbers = [out[name] for name in ("temperature", "top_p") if name in out] + [out.get("max_tokens", 1)]
    if not all(isinstance(x, (int, float)) and not isinstance(x, bool) and 0 <= x < 1 << 31 for x in numbers) or out.get("max_tokens") == 0:
        raise ValueError("max_tokens, temperature and top_p take numbers from 0 on, and max_tokens at least 1")
    out.setdefault("temperature", 0.8)
    out.setdefault("top_p", 0.95)
    out["stop"] = [out["stop"]] if isinstance(out.get("stop"), str) else list(out.get("stop", ()))
    return out


def create_app(conversations: Conversations, name: str):
    """A FastAPI application. name: of the model, as /v1/models tells it. Raises RuntimeError without FastAPI."""
    with needed("fastapi"):
        from fastapi import Body, FastAPI
        from fastapi.responses import JSONResponse, StreamingResponse
    app = FastAPI(title="pykvq serve")

    class Stream(StreamingResponse):
        """Closes the answer when the client is gone: the next one waits for it."""

        def __init__(self, events: Iterator[str], answer: Answer):
            super().__init__(events, media_type="text/event-stream")
            self.answer = answer

        async def __call__(self, scope, receive, send) -> None:
            try:
                await super().__call__(scope, receive, send)
            finally:
                self.answer.close()

    @app.exception_handler(ValueError)
    def refused(_, error: ValueError) -> JSONResponse:
        return JSONResponse({"error": {"message": " ".join(str(error).split()), "type": "invalid_request_error"}}, 400)

    @app.get("/health")
    def health() -> dict:
        return {"status": "ok"}

    @app.get("/v1/models")
    def models() -> dict:
        return {"object": "list", "data": [{"id": name, "object": "model", "created": int(time.time()), "owned_by": "pykvq"}]}

    # Not async: the model runs in this call, and FastAPI then gives it a thread.
    @app.post("/v1/chat/completions")
    def completions(body: dict = Body()):
        messages = body.get("messages")
        if not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages):
            raise ValueError("messages takes a list of {role, content}")
        answer = conversations.chat(messages, **options(body))
        first = next(answer.pieces, "")          # what is wrong with the request shows here, before a status is sent
        head = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": name}
        if body.get("stream"):
            usage = (body.get("stream_options") or {}).get("include_usage", False)
            return Stream(_events(answer, head, first, usage), answer)
        text = first + "".join(answer)
        choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": answer.turn.finish}
        return {**head, "object": "chat.completion", "choices": [choice], **_told(answer)}
    return app


def _events(answer: Answer, head: dict, first: str, usage: bool) -> Iterator[str]:
    """Server-sent events: the role, the pieces, the end, and the usage if asked for."""
    def event(delta: dict, finish: str | None = None, **more) -> str:
        return _event({**head, "object": "chat.completion.chunk", "choices": [{"index": 0, "delta": delta, "finish_reason": finish}], **more})
    yield event({"role": "assistant", "content": first})
    try:
        for piece in answer:
            yield event({"content": piece})
    except Exception as error:                   # noqa: BLE001  the status is sent; the client must still see that the answer broke off
        yield _event({"error": {"message": " ".join(str(error).split()), "type": "server_error"}})
        raise
    told = _told(answer)
    yield event({}, answer.turn.finish, epicache=told["epicache"])
    if usage:
        yield _event({**head, "object": "chat.completion.chunk", "choices": [], "usage": told["usage"]})
    yield "data: [DONE]\n\n"


def _event(value: dict) -> str:
    return f"data: {json.dumps(value)}\n\n"


def _told(answer: Answer) -> dict:
    """usage, whose cached tokens are the cells that were found, and `epicache`: how the answer came about."""
    turn = answer.turn
    prompt = turn.evaluated + turn.reused
    return {"usage": {"prompt_tokens": prompt, "completion_tokens": turn.answer, "total_tokens": prompt + turn.answer,
                      "prompt_tokens_details": {"cached_tokens": turn.reused}},
            "epicache": {"conversation": answer.id, "not_restored": answer.reason, **asdict(turn)}}
