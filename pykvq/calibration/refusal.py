"""Models without a standard K/V cache are refused before they are loaded."""
from __future__ import annotations

from pykvq.gguf_header import Header

# architectures of the pinned llama.cpp, by what llama_model::create_memory makes for them
_NO_CACHE = frozenset("bert jina-bert-v2 jina-bert-v3 nomic-bert nomic-bert-moe neo-bert eurobert wavtokenizer-dec modern-bert gemma-embedding "
                      "dream llada llada-moe rnd1 clip".split())
_RECURRENT = frozenset("mamba mamba2 rwkv6 rwkv6qwen2 rwkv7 arwkv7".split())
_ENCODER_DECODER = frozenset(("t5", "t5encoder"))
_OWN_CACHE = frozenset("minimax-m3 glm-dsa deepseek32 glm5-next hy_v4 dots3note deepseek4 qwen4exp".split())
_DRAFT = frozenset("eagle3 dflash gemma4-assistant".split())
_NO_FLASH = frozenset(("grok",))


def check_architecture(header: Header) -> None:
    """Raises ValueError with the reason when the model's cache holds nothing that can be calibrated."""
    arch = header.architecture
    for names, why in ((_NO_CACHE, "runs without a KV cache"), (_RECURRENT, "is recurrent and has no KV cache"),
                       (_ENCODER_DECODER, "is an encoder-decoder, whose attention adds a position bias"),
                       (_OWN_CACHE, "selects keys through a cache of its own kind"), (_DRAFT, "drafts for another model; calibrate that one"),
                       (_NO_FLASH, "attends without flash attention, which quantised values need")):
        if arch in names:
            raise ValueError(f"{header.name}: {arch} {why}; there is nothing to calibrate")
    if header.mla:
        raise ValueError(f"{header.name}: {arch} caches one latent vector per token (MLA), no keys and values; there is nothing to calibrate")
    if not header.heads_kv:
        raise ValueError(f"{header.name}: no layer of this {arch} has KV heads; there is nothing to calibrate")
