// What libllama exports about its cache, and the hooks that its cache calls.
#pragma once

#include "ggml.h"
#include "ggml-backend.h"
#include "llama.h"

#ifdef __cplusplus
#include "kvq-bias-pairs.h"

extern "C" {
#endif

// one attention layer of the cache as allocated
struct llama_kvq_layer_info {
    int32_t  il;
    int32_t  type_k;        // effective ggml types
    int32_t  type_v;
    int32_t  n_head_kv;
    int32_t  head_dim_k;
    int32_t  head_dim_v;    // 0: MLA, V is a view of K
    int32_t  is_swa;
    uint32_t n_cells;       // of one stream
    uint64_t bytes_k;       // all streams
    uint64_t bytes_v;
    uint64_t bytes_f16;     // what K and V would take as f16
    char     device[32];    // buffer type, e.g. CPU, CUDA0
    uint32_t transform;     // hash of what keys go through before they are stored, 0: nothing
    int32_t  calibrated;    // by the model's own data
    int32_t  key_bias;      // 0: none, 1: stored with the keys, 2: left out of the keys and returned to the logit
    int32_t  bias_pairs;    // pairs of RoPE's frequencies of which it is left out
    uint32_t n_window;      // rows of the f16 window, of one stream; 0: none
    uint64_t bytes_window;  // K and V, all streams
    uint32_t n_sink;        // first and last tokens of a sequence that it holds
    uint32_t n_recent;
};

// Number of cached layers; the first `capacity` are written to out.
LLAMA_API int32_t llama_kvq_cache_info(const struct llama_context * ctx, struct llama_kvq_layer_info * out, int32_t capacity);

// What a context holds in the memory of one buffer type, in bytes.
struct llama_kvq_memory {
    char     device[32];    // buffer type, e.g. CPU, CUDA0
    int32_t  host;          // 1: in the host's memory
    uint64_t weights;
    uint64_t context;       // caches and recurrent states
    uint64_t compute;
};

// Number of buffer types; the first `capacity` are written to out. With llama_model_params.no_alloc: what would be allocated.
LLAMA_API int32_t llama_kvq_memory_info(const struct llama_context * ctx, struct llama_kvq_memory * out, int32_t capacity);

// Types of single layers in the contexts that this thread makes from now on: K and V of layer 0, of layer 1, ...; -1 leaves what
// the context's parameters say. n_layer 0 ends it. For measuring what a layer is worth (tools/measure_layer_bits.py).
LLAMA_API void llama_kvq_set_layer_types(const int32_t * types, int32_t n_layer);

// First error line that libllama logged on this thread since the last call with forget, "" when there is none.
LLAMA_API const char * llama_kvq_first_error(bool forget);

#ifdef __cplusplus
}

class llama_kv_cache;
struct llama_cparams;
struct llama_memory_context_i;
struct kvq_layer;
struct kvq_transforms;

// called by libllama's log
void kvq_record_error(ggml_log_level level, const char * text);

// The type that a layer's keys or values (value) really get: the member of the family for head_dim. view_dim: MLA reads the first
// view_dim values of a key as the value, so blocks must end there too; 0 elsewhere. Throws std::runtime_error with the
// reason and the remedy when no block divides these or the device has no kernels.
ggml_type kvq_cache_layer_type(ggml_type type, bool value, int64_t head_dim, int64_t view_dim, uint32_t il, ggml_backend_buffer_type_t buft);

// Heads of keys [d, heads, cells] whose last n_rot values turn with the position: returns a view of the others and leaves
// those in *keys; null when all turn, or when the cache is not of our types. The K-shift must write whole blocks.
ggml_tensor * kvq_split_unrotated(ggml_context * ctx, ggml_tensor ** keys, ggml_type type, int64_t n_rot);

// one log line: effective types, bytes, the f16 equivalent and what is calibrated
void kvq_log_cache(const llama_kv_cache & cache);

// The context whose caches this thread creates next.
void kvq_begin(const llama_context_params & params, const llama_cparams & cparams);

// A key bias b that the stored keys lack. The attention operation adds q . R(j) b to the logit of the token at position j,
// R(j) being its rotation, over the pairs of frequencies in `pairs`; b is zero in the others. Tensors are null when keys are stored
// as they are.
struct kvq_key_bias {
    ggml_tensor * q    = nullptr;   // f32 [d, n_head, n_tokens], before any transform
    ggml_tensor * b    = nullptr;   // f32 [d, n_head_kv]
    ggml_tensor * trig = nullptr;   // f32 [n_rot, 256 + n]: cosines, then sines, of positions 0..255 and of multiples of 256
    ggml_tensor * pos  = nullptr;   // i32 [n_kv, n_stream]
    bool interleaved   = false;     // pairs are (0, 1), (2, 3), ...; else (0, n_rot/2), (1, n_rot/2 + 1), ...
    kvq_pair_set pairs = {};
};

// Where a batch's keys and values go in the f16 window of a cache, and which of its rows each token sees. Null: no window.
struct kvq_window_input {
    ggml_tensor * idxs = nullptr;   // i64 [n_tokens]
    ggml_tensor * own  = nullptr;   // i64 [n_tokens], rows of the f16 copy that the graph makes; null: the batch has room in the ring
    ggml_tensor * mask = nullptr;   // f16 [rows that are read, n_tokens of a stream, 1, n_stream]
};

// What attention reads besides upstream's sources.
struct kvq_sources {
    kvq_key_bias bias;
    ggml_tensor * k16    = nullptr;   // [d, n_ring, n_head_kv, n_stream] of kvq_window_type
    ggml_tensor * v16    = nullptr;
    ggml_tensor * mask16 = nullptr;
};

// adds what is there of them to a FLASH_ATTN_EXT node
void kvq_add_sources(ggml_context * ctx, ggml_tensor * attention, const kvq_sources * sources);

// What the graph must add of the bias wk_b (may be null) of a layer's keys: all, what the cache does not leave out, or null.
ggml_tensor * kvq_kept_key_bias(const llama_memory_context_i * mctx, ggml_tensor * wk_b, int32_t il);

// Set in the type of a saved layer's keys where the rows of an f16 window follow the values.
constexpr int32_t KVQ_STATE_WINDOW = INT32_MIN;

// A type as saved states carry it: rows stored with other calibrated data count as another type.
inline int32_t kvq_state_type(ggml_type type, uint32_t transform) {
    return (int32_t) type | (int32_t) (transform & 0x7FFFFF) << 8;
}
#endif
