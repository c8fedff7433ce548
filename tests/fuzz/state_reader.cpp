// libFuzzer harness: a sequence state of any bytes, read into a context of a tiny model (docs/trust.md).
//
// The input's first byte chooses: 0 as it is; else the rest replaces the rows behind a right header, so that the reader itself
// is reached and not the checksum alone.
#include "kvq-state.h"
#include "llama.h"

#include <cstdio>
#include <cstdlib>
#include <vector>

static llama_context * ctx;
static std::vector<uint8_t> other;               // the state of sequence 1, which must not change

static std::vector<uint8_t> saved(llama_seq_id seq) {
    std::vector<uint8_t> state(llama_state_seq_get_size(ctx, seq));
    llama_state_seq_get_data(ctx, state.data(), state.size(), seq);
    return state;
}

static void decode(llama_seq_id seq) {
    llama_batch batch = llama_batch_init(12, 0, 1);
    for (batch.n_tokens = 0; batch.n_tokens < 12; batch.n_tokens++) {
        const int i = batch.n_tokens;
        batch.token[i] = 7*i + seq;
        batch.pos[i] = i;
        batch.n_seq_id[i] = 1;
        batch.seq_id[i][0] = seq;
        batch.logits[i] = false;
    }
    if (llama_decode(ctx, batch) != 0) {
        abort();
    }
    llama_batch_free(batch);
}

extern "C" int LLVMFuzzerInitialize(int *, char ***) {
    llama_log_set([](ggml_log_level, const char *, void *) {}, nullptr);
    const char * path = getenv("KVQ_FUZZ_MODEL");
    llama_model * model = path ? llama_model_load_from_file(path, llama_model_default_params()) : nullptr;
    if (!model) {
        fprintf(stderr, "set KVQ_FUZZ_MODEL to a model, such as pykvq.tiny_model writes\n");
        exit(1);
    }
    llama_context_params params = llama_context_default_params();
    params.n_ctx = 64;
    params.n_seq_max = 2;
    params.n_threads = params.n_threads_batch = 1;
    params.type_k = params.type_v = GGML_TYPE_TURBO3_64;
    params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_ENABLED;
    params.kv_unified = true;
    params.kv_sink = 2;
    params.kv_recent = 4;
    ctx = llama_init_from_model(model, params);
    decode(0);
    decode(1);
    other = saved(1);
    return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t * data, size_t size) {
    if (size == 0) {
        return 0;
    }
    if (data[0] == 0) {
        llama_state_seq_set_data(ctx, data + 1, size - 1, 0);
    } else {
        std::vector<uint8_t> state(llama_kvq_seal_state(ctx, nullptr, data + 1, size - 1));
        llama_kvq_seal_state(ctx, state.data(), data + 1, size - 1);
        llama_state_seq_set_data(ctx, state.data(), state.size(), 0);
    }
    static int n = 0;
    if (++n % 64 == 0 && saved(1) != other) {
        fprintf(stderr, "another sequence has changed\n");
        abort();
    }
    return 0;
}
