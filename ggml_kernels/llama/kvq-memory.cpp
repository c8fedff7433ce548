// upstream's memory breakdown, which is a C++ map, for callers of C
#include "kvq-llama.h"
#include "llama-ext.h"

#include <algorithm>
#include <cstdio>
#include <vector>

int32_t llama_kvq_memory_info(const llama_context * ctx, llama_kvq_memory * out, int32_t capacity) {
    std::vector<llama_kvq_memory> rows;
    for (const auto & [buft, memory] : llama_get_memory_breakdown(ctx)) {
        llama_kvq_memory row = {};
        snprintf(row.device, sizeof(row.device), "%s", ggml_backend_buft_name(buft));
        row.host    = ggml_backend_buft_is_host(buft);
        row.weights = memory.model;
        row.context = memory.context;
        row.compute = memory.compute;
        rows.push_back(row);
    }
    std::copy_n(rows.begin(), std::min<size_t>(std::max(capacity, 0), rows.size()), out);
    return (int32_t) rows.size();
}
