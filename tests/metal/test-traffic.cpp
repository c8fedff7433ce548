// Bytes of the cache that one token's attention reads, counted by the host machine: one line of JSON for each pair of types and
// group size. Depth 512, 2 KV heads of 128.
#include "ggml.h"
#include "ggml-alloc.h"
#include "ggml-backend.h"

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <vector>

uint64_t metal_host_fetched(const char * tensor);

static void measure(const ggml_backend_t backend, const ggml_type tk, const ggml_type tv, const int gqa) {
    const int d = 128, heads = 2, n_kv = 512;
    ggml_context * ctx = ggml_init({ ggml_tensor_overhead()*16 + ggml_graph_overhead(), nullptr, true });
    ggml_tensor * q = ggml_new_tensor_4d(ctx, GGML_TYPE_F32, d, 1, heads*gqa, 1);
    auto cache = [&](const ggml_type type, const char * name) {
        ggml_tensor * t = ggml_new_tensor_3d(ctx, type, d, heads, n_kv);
        ggml_tensor * view = ggml_permute(ctx, t, 0, 2, 1, 3);
        ggml_set_name(view, name);
        return view;
    };
    ggml_tensor * k = cache(tk, "k"), * v = cache(tv, "v");
    ggml_tensor * mask = ggml_new_tensor_2d(ctx, GGML_TYPE_F16, n_kv, 1);
    ggml_tensor * out = ggml_flash_attn_ext(ctx, q, k, v, mask, 1.0f/std::sqrt(float(d)), 0.0f, 0.0f);
    ggml_cgraph * graph = ggml_new_graph(ctx);
    ggml_build_forward_expand(graph, out);
    ggml_backend_buffer_t buffer = ggml_backend_alloc_ctx_tensors(ctx, backend);
    ggml_backend_buffer_clear(buffer, 0);
    const uint64_t k0 = metal_host_fetched("k"), v0 = metal_host_fetched("v");
    ggml_backend_graph_compute(backend, graph);
    printf("{\"k\": \"%s\", \"v\": \"%s\", \"gqa\": %d, \"k_bytes\": %llu, \"v_bytes\": %llu, \"k_stored\": %zu}\n", ggml_type_name(tk), ggml_type_name(tv), gqa,
        (unsigned long long) (metal_host_fetched("k") - k0), (unsigned long long) (metal_host_fetched("v") - v0), ggml_nbytes(k));
    ggml_backend_buffer_free(buffer);
    ggml_free(ctx);
}

int main() {
    ggml_backend_t backend = ggml_backend_dev_init(ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_GPU), nullptr);
    const ggml_type turbo3 = GGML_TYPE_TURBO3_128, f16 = GGML_TYPE_F16;
    for (const int gqa : { 1, 4, 8 }) {
        measure(backend, turbo3, turbo3, gqa);
        measure(backend, f16, turbo3, gqa);
        measure(backend, turbo3, f16, gqa);
        measure(backend, f16, f16, gqa);
    }
}
