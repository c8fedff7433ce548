// libFuzzer harness: kvq.* metadata of any bytes, as a sidecar beside a tiny model (docs/trust.md). The cache is created and freed.
#include "llama.h"

#include <cstdio>
#include <cstdlib>
#include <string>

static llama_model * model;
static std::string   sidecar;

extern "C" int LLVMFuzzerInitialize(int *, char ***) {
    llama_log_set([](ggml_log_level, const char *, void *) {}, nullptr);
    const char * path = getenv("KVQ_FUZZ_MODEL");
    model = path ? llama_model_load_from_file(path, llama_model_default_params()) : nullptr;
    if (!model) {
        fprintf(stderr, "set KVQ_FUZZ_MODEL to a model in a folder of its own\n");
        exit(1);
    }
    sidecar = std::string(path).substr(0, std::string(path).size() - 5) + ".kvq.gguf";
    return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t * data, size_t size) {
    FILE * f = fopen(sidecar.c_str(), "wb");
    fwrite(data, 1, size, f);
    fclose(f);
    llama_context_params params = llama_context_default_params();
    params.n_ctx = 64;
    params.n_threads = params.n_threads_batch = 1;
    params.type_k = GGML_TYPE_OSCAR2_64;
    params.type_v = GGML_TYPE_TURBO3_64;
    params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_ENABLED;
    llama_free(llama_init_from_model(model, params));
    return 0;
}
