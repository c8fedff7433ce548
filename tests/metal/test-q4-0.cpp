// Upstream's own q4_0 kernels on the host machine against the CPU backend: what they compute shows that the machine is right,
// and with a fault planted in their source, that it sees faults. Exit code 1 when something differs or the machine complains.
//   test-q4-0 [case ...]     cases: set get from to vec mat; all when none is named
#include "ggml.h"
#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml-cpu.h"

#include <cmath>
#include <cstdio>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <vector>

extern "C" int metal_host_faults(void);

typedef std::vector<uint8_t> bytes;
typedef std::function<ggml_tensor * (ggml_context *, std::vector<std::pair<ggml_tensor *, const bytes *>> &)> builder;

static std::mt19937 rng(3);
static int failures;

static bytes floats(const size_t n) {
    bytes b(n*4);
    std::normal_distribution<float> d;
    for (size_t i = 0; i < n; ++i) {
        ((float *) b.data())[i] = d(rng);
    }
    return b;
}

static bytes as_type(const ggml_type type, const bytes & x) {
    bytes y(ggml_row_size(type, int64_t(x.size()/4)));
    ggml_get_type_traits(type)->from_float_ref((const float *) x.data(), y.data(), int64_t(x.size()/4));
    return y;
}

static bytes as_floats(const ggml_type type, const bytes & x) {
    bytes y(x.size()/ggml_type_size(type)*ggml_blck_size(type)*4);
    ggml_get_type_traits(type)->to_float(x.data(), (float *) y.data(), int64_t(y.size()/4));
    return y;
}

static bytes compute(const ggml_backend_t backend, const builder & build) {
    ggml_context * ctx = ggml_init({ ggml_tensor_overhead()*32 + ggml_graph_overhead(), nullptr, true });
    std::vector<std::pair<ggml_tensor *, const bytes *>> inputs;
    ggml_tensor * out = build(ctx, inputs);
    ggml_cgraph * graph = ggml_new_graph(ctx);
    ggml_build_forward_expand(graph, out);
    ggml_backend_buffer_t buffer = ggml_backend_alloc_ctx_tensors(ctx, backend);
    ggml_backend_buffer_clear(buffer, 0xFF);
    for (const auto & i : inputs) {
        ggml_backend_tensor_set(i.first, i.second->data(), 0, i.second->size());
    }
    ggml_backend_graph_compute(backend, graph);
    const ggml_tensor * whole = out->view_src ? out->view_src : out;
    bytes r(ggml_nbytes(whole));
    ggml_backend_tensor_get(whole, r.data(), 0, r.size());
    ggml_backend_buffer_free(buffer);
    ggml_free(ctx);
    return r;
}

static double error(const bytes & a, const bytes & b) {
    double num = 0.0, den = 1e-30;
    for (size_t i = 0; i < a.size()/4; ++i) {
        const double x = ((const float *) a.data())[i], y = ((const float *) b.data())[i];
        num += (x - y)*(x - y);
        den += y*y;
    }
    return std::sqrt(num/den);
}

static ggml_backend_t gpu, cpu;

static void check(const std::string & name, const double limit, const builder & build, const builder & on_cpu) {
    const bytes a = compute(gpu, build), b = compute(cpu, on_cpu);
    const double e = limit == 0.0 ? (a == b ? 0.0 : 1.0) : error(a, b);
    const bool good = e <= limit;           // false for a NaN
    failures += !good;
    printf("%s %s: error %.1e\n", good ? "ok" : "FAIL", name.c_str(), e);
}
static void check(const std::string & name, const double limit, const builder & build) { check(name, limit, build, build); }

static void check_attention(const char * name, const int d, const int tokens, const int n_kv) {
    const int heads_kv = 2, gqa = 3;
    const bytes q = floats(size_t(d)*heads_kv*gqa*tokens), k = as_type(GGML_TYPE_Q4_0, floats(size_t(d)*heads_kv*n_kv)), v = as_type(GGML_TYPE_Q4_0, floats(size_t(d)*heads_kv*n_kv));
    bytes mask(size_t(2)*n_kv*tokens), sinks = floats(heads_kv*gqa);
    for (int i = 0; i < n_kv*tokens; ++i) {
        ((ggml_fp16_t *) mask.data())[i] = ggml_fp32_to_fp16(i % n_kv > n_kv - tokens + i/n_kv ? -INFINITY : 0.0f);
    }
    // the CPU's attention over q4_0 rounds the queries, so it gets the same keys and values as f32
    auto build = [&](const ggml_type type, const bytes & k, const bytes & v) -> builder {
        return [&, type](ggml_context * ctx, auto & in) {
            auto input = [&](const ggml_type type, std::vector<int64_t> ne, const bytes & data) {
                in.push_back({ ggml_new_tensor(ctx, type, int(ne.size()), ne.data()), &data });
                return in.back().first;
            };
            ggml_tensor * tq = ggml_permute(ctx, input(GGML_TYPE_F32, { d, heads_kv*gqa, tokens }, q), 0, 2, 1, 3);
            ggml_tensor * tk = input(type, { d, n_kv, heads_kv }, k);
            ggml_tensor * tv = input(type, { d, n_kv, heads_kv }, v);
            ggml_tensor * out = ggml_flash_attn_ext(ctx, tq, tk, tv, input(GGML_TYPE_F16, { n_kv, tokens }, mask), 1.0f/std::sqrt(float(d)), 0.0f, 0.0f);
            ggml_flash_attn_ext_add_sinks(out, input(GGML_TYPE_F32, { heads_kv*gqa }, sinks));
            return out;
        };
    };
    const bytes k32 = as_floats(GGML_TYPE_Q4_0, k), v32 = as_floats(GGML_TYPE_Q4_0, v);
    check(std::string(name) + " d " + std::to_string(d) + " n_kv " + std::to_string(n_kv), 2e-3, build(GGML_TYPE_Q4_0, k, v), build(GGML_TYPE_F32, k32, v32));
}

int main(int argc, char ** argv) {
    gpu = ggml_backend_dev_init(ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_GPU), nullptr);
    cpu = ggml_backend_cpu_init();
    ggml_backend_cpu_set_use_ref(cpu, true);
    auto wanted = [&](const char * name) {
        for (int i = 1; i < argc; ++i) {
            if (!strcmp(argv[i], name)) {
                return true;
            }
        }
        return argc == 1;
    };
    const bytes x = floats(128*7), table = as_type(GGML_TYPE_Q4_0, floats(128*20));
    bytes index(7*4), index64(7*8);
    for (int i = 0; i < 7; ++i) {
        ((int32_t *) index.data())[i] = ((int64_t *) index64.data())[i] = (i*11) % 20;
    }
    auto put = [&](ggml_context * ctx, auto & in, const ggml_type type, const int64_t ne0, const int64_t ne1, const bytes & data) {
        in.push_back({ ggml_new_tensor_2d(ctx, type, ne0, ne1), &data });
        return in.back().first;
    };
    if (wanted("set")) {
        check("set_rows", 0.0, [&](ggml_context * ctx, auto & in) { return ggml_set_rows(ctx, put(ctx, in, GGML_TYPE_Q4_0, 128, 20, table), put(ctx, in, GGML_TYPE_F32, 128, 7, x), put(ctx, in, GGML_TYPE_I64, 7, 1, index64)); });
    }
    if (wanted("get")) {
        check("get_rows", 1e-6, [&](ggml_context * ctx, auto & in) { return ggml_get_rows(ctx, put(ctx, in, GGML_TYPE_Q4_0, 128, 20, table), put(ctx, in, GGML_TYPE_I32, 7, 1, index)); });
    }
    if (wanted("from")) {
        check("cpy from f32", 0.0, [&](ggml_context * ctx, auto & in) { return ggml_cpy(ctx, put(ctx, in, GGML_TYPE_F32, 128, 7, x), ggml_new_tensor_2d(ctx, GGML_TYPE_Q4_0, 128, 7)); });
    }
    if (wanted("to")) {
        check("cpy to f32", 1e-6, [&](ggml_context * ctx, auto & in) { return ggml_cast(ctx, put(ctx, in, GGML_TYPE_Q4_0, 128, 20, table), GGML_TYPE_F32); });
    }
    if (wanted("vec")) {
        check_attention("vec", 64, 1, 150);
        check_attention("vec", 128, 2, 256);
    }
    if (wanted("mat")) {
        check_attention("mat", 64, 23, 150);
        check_attention("mat", 128, 40, 128);
    }
    printf("%d failures, %d faults\n", failures, metal_host_faults());
    return failures != 0 || metal_host_faults() != 0;
}
