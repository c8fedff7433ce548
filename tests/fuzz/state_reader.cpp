// libFuzzer harness: a sequence state of any bytes, read into a context of a tiny model (docs/trust.md).
//
// The input's first byte chooses: 0 as it is; 1 as a slot file; else the rest replaces the rows behind a right header, so that
// the reader itself is reached and not the checksum alone, 3 those of the whole context. What was taken is then decoded upon.
#include "kvq-state.h"
#include "llama.h"

#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>
#include <unistd.h>

static llama_context * ctx;
static std::string slot_file;
static std::vector<uint8_t> other;               // the state of sequence 1, which must not change

static std::vector<uint8_t> saved(llama_seq_id seq) {
    std::vector<uint8_t> state(llama_state_seq_get_size(ctx, seq));
    llama_state_seq_get_data(ctx, state.data(), state.size(), seq);
    return state;
}

static int decode(llama_seq_id seq, llama_pos first, int n) {
    llama_batch batch = llama_batch_init(n, 0, 1);
    for (batch.n_tokens = 0; batch.n_tokens < n; batch.n_tokens++) {
        const int i = batch.n_tokens;
        batch.token[i] = 7*i + seq;
        batch.pos[i] = first + i;
        batch.n_seq_id[i] = 1;
        batch.seq_id[i][0] = seq;
        batch.logits[i] = false;
    }
    const int result = llama_decode(ctx, batch);
    llama_batch_free(batch);
    return result;
}

static void fill(llama_seq_id seq) {
    llama_memory_seq_rm(llama_get_memory(ctx), seq, -1, -1);
    if (decode(seq, 0, 12) != 0) {
        abort();
    }
}

static void write_file(const std::string & path, const void * data, size_t size, int mode = -1) {
    FILE * f = fopen(path.c_str(), "wb");
    if (!f) {
        abort();
    }
    if (mode >= 0) {
        fputc(mode, f);
    }
    fwrite(data, 1, size, f);
    fclose(f);
}

// KVQ_FUZZ_SEEDS: a folder for one right input of each kind
static void write_seeds(const std::string & folder) {
    const std::vector<uint8_t> state = saved(0);
    const size_t header = llama_kvq_seal_state(ctx, nullptr, nullptr, 0);
    write_file(folder + "/state", state.data(), state.size(), 0);
    write_file(folder + "/rows", state.data() + header, state.size() - header, 2);
    std::vector<uint8_t> whole(llama_state_get_size(ctx));
    llama_state_get_data(ctx, whole.data(), whole.size());
    write_file(folder + "/whole", whole.data() + header, whole.size() - header, 3);
    const llama_token tokens[] = { 0, 7, 14 };
    llama_state_seq_save_file(ctx, slot_file.c_str(), 0, tokens, 3);
    std::vector<uint8_t> file(state.size() + 1024);
    FILE * f = fopen(slot_file.c_str(), "rb");
    file.resize(fread(file.data(), 1, file.size(), f));
    fclose(f);
    write_file(folder + "/file", file.data(), file.size(), 1);
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
    fill(0);
    fill(1);
    other = saved(1);
    slot_file = std::string(access("/dev/shm", W_OK) == 0 ? "/dev/shm" : "/tmp") + "/kvq-fuzz-state." + std::to_string(getpid());
    if (const char * folder = getenv("KVQ_FUZZ_SEEDS")) {
        write_seeds(folder);
    }
    return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t * data, size_t size) {
    if (size == 0) {
        return 0;
    }
    size_t taken = 0;
    if (data[0] == 0) {
        taken = llama_state_seq_set_data(ctx, data + 1, size - 1, 0);
    } else if (data[0] == 1) {
        write_file(slot_file, data + 1, size - 1);
        llama_token tokens[16];
        size_t n_tokens = 0;
        taken = llama_state_seq_load_file(ctx, slot_file.c_str(), 0, tokens, 16, &n_tokens);
    } else {
        std::vector<uint8_t> state(llama_kvq_seal_state(ctx, nullptr, data + 1, size - 1));
        llama_kvq_seal_state(ctx, state.data(), data + 1, size - 1);
        taken = data[0] == 3 ? llama_state_set_data(ctx, state.data(), state.size())
                             : llama_state_seq_set_data(ctx, state.data(), state.size(), 0);
        if (data[0] == 3) {
            llama_memory_clear(llama_get_memory(ctx), false);
            fill(0);
            fill(1);
            other = saved(1);
        }
    }
    static int n = 0;
    if (++n % 64 == 0 && saved(1) != other) {
        fprintf(stderr, "another sequence has changed\n");
        abort();
    }
    if (taken && n % 8 == 0) {
        decode(0, (llama_pos) ((uint32_t) llama_memory_seq_pos_max(llama_get_memory(ctx), 0) + 1), 1);
        fill(0);
        fill(1);
        other = saved(1);
    }
    return 0;
}
