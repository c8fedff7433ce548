// Rungs 2 and 3 of the correctness ladder: the CPU backend's kernels against the scalar reference and against attention
// in double precision. Links against ggml-base and ggml-cpu only.
//
//   test_cpu_kernels [--cases N] [--seed S] [--threads T] [--quick]   run everything; exit code 1 on a mismatch
//   test_cpu_kernels --bench [--threads T] [--depth D] [--batch B] [--type K]
//                                                           attention of all layers, by cache type
#include "ggml.h"
#include "ggml-cpu.h"
#include "kvq.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <random>
#include <string>
#include <vector>

static std::mt19937_64 rng(1);
static int failures = 0;
static bool quick = false;   // a tenth of the work, for emulators

static float normal() {
    static std::normal_distribution<float> d;
    return d(rng);
}

static int pick(int n) { return (int) (rng() % (uint64_t) n); }

#define EXPECT(ok, ...) do { if (!(ok)) { if (failures++ < 20) { printf("FAIL " __VA_ARGS__); printf("\n"); } } } while (0)

struct type_info { ggml_type type; int bits, n; };

static const std::vector<type_info> cache_types = {
#define ENTRY(E, F, NAME, FAMILY, BITS, N, BYTES) { GGML_TYPE_##E, BITS, N },
    KVQ_FOR_EACH_CACHE_TYPE(ENTRY)
#undef ENTRY
};

static const std::vector<type_info> window_types = {
#define ENTRY(E, F, NAME, N, BYTES) { GGML_TYPE_##E, 16, N },
    KVQ_FOR_EACH_WINDOW_TYPE(ENTRY)
#undef ENTRY
};

static const std::vector<type_info> activation_types = {
#define ENTRY(E, F, NAME, N, BYTES) { GGML_TYPE_##E, 8, N },
    KVQ_FOR_EACH_ACTIVATION_TYPE(ENTRY)
#undef ENTRY
};

// ---- rows ----

// kinds 0..8 are compared with the reference; from 9 on the input is not finite and must only not crash
constexpr int FINITE_INPUTS = 9, INPUTS = 12;

static std::vector<float> make_input(int kind, int n) {
    std::vector<float> x(n);
    for (int i = 0; i < n; i++) {
        switch (kind) {
            case 0:  x[i] = normal(); break;
            case 1:  x[i] = 0.0f; break;
            case 2:  x[i] = 1.0f; break;
            case 3:  x[i] = normal()*1e15f; break;
            case 4:  x[i] = normal()*1e-15f; break;
            case 5:  x[i] = i == 5 ? 100.0f : 0.0f; break;
            case 6:  x[i] = i % 2 ? -3.0f : 3.0f; break;
            case 7:  x[i] = normal()*1e7f; break;          // the scale saturates fp16
            case 8:  x[i] = normal()*std::exp(4*normal()); break;
            case 9:  x[i] = i == 3 ? NAN : normal(); break;
            case 10: x[i] = i == 7 ? INFINITY : normal(); break;
            default: x[i] = normal()*1e30f; break;         // squares overflow
        }
    }
    return x;
}

static void test_quantize(const type_info & t) {
    const auto * base = ggml_get_type_traits(t.type);
    const auto * cpu  = ggml_get_type_traits_cpu(t.type);
    for (int round = 0; round < (quick ? 4 : 40); round++) {
        for (int kind = 0; kind < INPUTS; kind++) {
            const int n = t.n*(1 + pick(4));
            const std::vector<float> x = make_input(kind, n);
            const size_t bytes = ggml_row_size(t.type, n);
            std::vector<uint8_t> want(bytes + 64, 0xA5), got(bytes + 64, 0xA5);
            cpu->from_float(x.data(), got.data(), n);
            if (kind < FINITE_INPUTS) {
                base->from_float_ref(x.data(), want.data(), n);
                EXPECT(want == got, "quantize %s: input kind %d", ggml_type_name(t.type), kind);
            }
            EXPECT(std::all_of(got.begin() + bytes, got.end(), [](uint8_t b) { return b == 0xA5; }),
                   "quantize %s writes past its row", ggml_type_name(t.type));
        }
    }
}

// code i of a block, by the layout in docs/formats.md
static int code_at(const uint8_t * block, int bits, int n, int i) {
    if (bits == 4) {
        return i < n/2 ? block[i] & 15 : block[i - n/2] >> 4;
    }
    const int q = n/4, h = n/8, k = i/q, b = i % q;
    int code = (block[b] >> (2*k)) & 3;
    if (bits == 3) {
        code |= ((block[q + b % h] >> (2*k + b/h)) & 1) << 2;
    }
    return code;
}

static void test_vec_dot(const type_info & t) {
    const auto * cpu = ggml_get_type_traits_cpu(t.type);
    const size_t bytes = ggml_type_size(t.type);
    const bool int8_query = kvq_bits(t.type) > 0;
    for (int round = 0; int8_query && round < (quick ? 50 : 500); round++) {
        // one block at the end of its allocation, so that a memory checker sees a load past it
        std::vector<uint8_t> x(bytes), y(t.n + sizeof(float));
        const float unit = 1.0f;
        const uint16_t one = 0x3C00;
        memcpy(y.data(), &unit, sizeof(unit));
        int64_t want = 0;
        for (size_t i = 0; i + 2 < bytes; i++) {
            x[i] = round == 0 ? 0 : round == 1 ? 255 : (uint8_t) rng();
        }
        memcpy(x.data() + bytes - 2, &one, sizeof(one));
        for (int i = 0; i < t.n; i++) {
            const int q = round < 2 ? (i % 2 ? 127 : -127) : round < 4 ? 127 : pick(255) - 127;
            ((int8_t *) y.data())[sizeof(float) + i] = (int8_t) q;
            want += q*kvq_levels(t.type)[code_at(x.data(), t.bits, t.n, i)];
        }
        float s = NAN;
        cpu->vec_dot(t.n, &s, 0, x.data(), 0, y.data(), 0, 1);
        const double got = (double) s*kvq_scale(t.type);
        EXPECT(std::llround(got) == want && std::fabs(got - want) < 0.4, "vec_dot %s: %.3f, want %lld",
               ggml_type_name(t.type), got, (long long) want);
    }
    for (int blocks = 1; blocks <= 5; blocks++) {
        const int n = t.n*blocks;
        std::vector<float> k(n), q(n), kd(n), qd(n);
        for (int i = 0; i < n; i++) { k[i] = normal(); q[i] = normal(); }
        std::vector<uint8_t> x(ggml_row_size(t.type, n)), y(ggml_row_size(cpu->vec_dot_type, n));
        cpu->from_float(k.data(), x.data(), n);
        ggml_get_type_traits_cpu(cpu->vec_dot_type)->from_float(q.data(), y.data(), n);
        ggml_get_type_traits(t.type)->to_float(x.data(), kd.data(), n);
        if (int8_query) {
            ggml_get_type_traits(cpu->vec_dot_type)->to_float(y.data(), qd.data(), n);
        } else {
            qd = q;
        }
        double want = 0.0;
        for (int i = 0; i < n; i++) { want += (double) kd[i]*qd[i]; }
        float s = NAN;
        cpu->vec_dot(n, &s, 0, x.data(), 0, y.data(), 0, 1);
        EXPECT(std::fabs(s - want) < 1e-4*n, "vec_dot %s of %d blocks: %f, want %f", ggml_type_name(t.type), blocks, s, want);
    }
}

// ---- attention ----

enum mask_kind { NO_MASK, CAUSAL, WINDOW, SCATTERED, MASK_KINDS };

struct attention {
    ggml_type k_type, v_type;
    int dk, dv, heads_kv, group, batch, n_kv, n_ring, seqs;
    int mask;                 // mask_kind
    int mask_heads;           // 1 or all
    bool sinks, alibi, softcap, v_is_k;
    int threads;

    std::string name() const {
        char s[256];
        snprintf(s, sizeof(s), "k=%s v=%s d=%d/%d heads=%dx%d batch=%d kv=%d+%d seqs=%d mask=%d/%d sinks=%d alibi=%d softcap=%d view=%d threads=%d",
                 ggml_type_name(k_type), ggml_type_name(v_type), dk, dv, heads_kv, group, batch, n_kv, n_ring, seqs, mask, mask_heads,
                 sinks, alibi, softcap, v_is_k, threads);
        return s;
    }
};

// random rows; after the first `distinct` they repeat
static void fill(ggml_tensor * t, float deviation, int64_t distinct = INT64_MAX) {
    const int64_t n = t->ne[0], rows = ggml_nrows(t);
    std::vector<float> x(n);
    for (int64_t r = 0; r < rows; r++) {
        if (r >= distinct) {
            memcpy((char *) t->data + r*t->nb[1], (char *) t->data + (r - distinct)*t->nb[1], t->nb[1]);
            continue;
        }
        for (float & f : x) { f = deviation*normal(); }
        void * out = (char *) t->data + r*t->nb[1];
        if (t->type == GGML_TYPE_F32) {
            memcpy(out, x.data(), n*sizeof(float));
        } else {
            ggml_get_type_traits(t->type)->from_float_ref(x.data(), out, n);
        }
    }
}

static std::vector<float> row_of(const ggml_tensor * t, int64_t i1, int64_t i2, int64_t i3, int64_t n) {
    std::vector<float> x(n);
    const void * p = (const char *) t->data + i1*t->nb[1] + i2*t->nb[2] + i3*t->nb[3];
    if (t->type == GGML_TYPE_F32) {
        memcpy(x.data(), p, n*sizeof(float));
    } else {
        ggml_get_type_traits(t->type)->to_float(p, x.data(), n);
    }
    return x;
}

struct built {
    ggml_context * ctx;
    ggml_cgraph * graph;
    ggml_tensor * q, * k, * v, * mask, * k16, * v16, * mask16, * sinks, * out;
};

static ggml_tensor * cache_view(ggml_context * ctx, ggml_type type, int d, int heads, int n_kv, int seqs, int64_t distinct = INT64_MAX) {
    ggml_tensor * t = ggml_new_tensor_3d(ctx, type, (int64_t) d*heads, n_kv, seqs);
    fill(t, 1.0f, distinct);
    const size_t row = ggml_row_size(type, d);
    return ggml_view_4d(ctx, t, d, n_kv, heads, seqs, row*heads, row, row*heads*n_kv, 0);
}

static void set_window(ggml_tensor * attention, ggml_tensor * k16, ggml_tensor * v16, ggml_tensor * mask16) {
    attention->src[9]  = k16;
    attention->src[10] = v16;
    attention->src[11] = mask16;
}

static built build(const attention & c) {
    const size_t rows   = c.n_kv + c.n_ring;
    const size_t floats = (size_t) c.seqs*(rows*c.heads_kv*(c.dk + c.dv) + (size_t) c.batch*c.heads_kv*c.group*(c.dk + c.dv + rows));
    ggml_init_params params = { floats*8 + (16u << 20), nullptr, false };
    built b = {};
    b.ctx = ggml_init(params);
    const int heads = c.heads_kv*c.group;

    ggml_tensor * q = ggml_new_tensor_4d(b.ctx, GGML_TYPE_F32, c.dk, heads, c.batch, c.seqs);
    fill(q, 1.5f);
    b.q = ggml_permute(b.ctx, q, 0, 2, 1, 3);
    b.k = cache_view(b.ctx, c.k_type, c.dk, c.heads_kv, c.n_kv, c.seqs);
    b.v = c.v_is_k ? ggml_view_4d(b.ctx, b.k, c.dv, c.n_kv, c.heads_kv, c.seqs, b.k->nb[1], b.k->nb[2], b.k->nb[3], 0)
                   : cache_view(b.ctx, c.v_type, c.dv, c.heads_kv, c.n_kv, c.seqs);
    if (c.mask != NO_MASK) {
        const int mask_seqs = c.seqs > 1 && pick(2) ? c.seqs : 1;
        b.mask = ggml_new_tensor_4d(b.ctx, GGML_TYPE_F16, c.n_kv, c.batch, c.mask_heads == 1 ? 1 : heads, mask_seqs);
        for (int64_t r = 0; r < ggml_nrows(b.mask); r++) {
            const int token = (int) (r % c.batch), position = c.n_kv - c.batch + token;
            for (int t = 0; t < c.n_kv; t++) {
                bool seen = true;
                if (c.mask == CAUSAL)    { seen = t <= position; }
                if (c.mask == WINDOW)    { seen = t <= position && t > position - 40; }
                if (c.mask == SCATTERED) { seen = t % 3 == token % 3 && pick(8) > 0; }
                const float bias = c.alibi ? -0.1f*std::abs(position - t) : 0.0f;
                ((ggml_fp16_t *) b.mask->data)[r*c.n_kv + t] = ggml_fp32_to_fp16(seen ? bias : -INFINITY);
            }
        }
    }
    b.out = ggml_flash_attn_ext(b.ctx, b.q, b.k, b.v, b.mask, 1.0f/std::sqrt((float) c.dk), c.alibi ? 8.0f : 0.0f, c.softcap ? 10.0f : 0.0f);
    if (c.sinks) {
        b.sinks = ggml_new_tensor_1d(b.ctx, GGML_TYPE_F32, heads);
        fill(b.sinks, 1.0f);
        ggml_flash_attn_ext_add_sinks(b.out, b.sinks);
    }
    if (c.n_ring) {
        b.k16    = cache_view(b.ctx, kvq_window_type(c.k_type), c.dk, c.heads_kv, c.n_ring, c.seqs);
        b.v16    = cache_view(b.ctx, kvq_window_type(c.v_type), c.dv, c.heads_kv, c.n_ring, c.seqs);
        b.mask16 = ggml_new_tensor_4d(b.ctx, GGML_TYPE_F16, c.n_ring, c.batch, 1, c.seqs);
        for (int64_t i = 0; i < ggml_nelements(b.mask16); i++) {
            ((ggml_fp16_t *) b.mask16->data)[i] = ggml_fp32_to_fp16(pick(3) == 0 ? -INFINITY : c.alibi ? -0.1f*pick(100) : 0.0f);
        }
        set_window(b.out, b.k16, b.v16, b.mask16);
    }
    b.graph = ggml_new_graph(b.ctx);
    ggml_build_forward_expand(b.graph, b.out);
    return b;
}

static void compute(const built & b, int threads, bool use_ref) {
    ggml_cplan plan = ggml_graph_plan(b.graph, threads, nullptr);
    plan.use_ref = use_ref;
    std::vector<uint8_t> work(plan.work_size + 64, 0xFF);   // stale NaNs must not reach the output
    plan.work_data = work.data();
    ggml_graph_compute(b.graph, &plan);
    for (size_t i = plan.work_size; i < work.size(); i++) {
        EXPECT(work[i] == 0xFF, "attention writes past its work buffer");
    }
}

// the query as the packed kernels see it: int8 in the domain of the codes
static std::vector<float> seen_query(const std::vector<float> & q, ggml_type k_type) {
    if (kvq_code(k_type) == KVQ_TIERED) {
        const int n = (int) ggml_blck_size(k_type);
        std::vector<float> x(q);
        for (size_t b = 0; b < q.size(); b += n) {
            float top = 0.0f;
            for (int i = 0; i < n; i++) { top = std::max(top, std::fabs(q[b + i])); }
            for (int i = 0; i < n && top > 0.0f; i++) { x[b + i] = std::nearbyint(q[b + i]*(127.0f/top))*(top/127.0f); }
        }
        return x;
    }
    const ggml_type type = ggml_get_type_traits_cpu(k_type)->vec_dot_type;
    std::vector<uint8_t> packed(ggml_row_size(type, q.size()));
    std::vector<float> x(q.size());
    ggml_get_type_traits(type)->from_float_ref(q.data(), packed.data(), q.size());
    ggml_get_type_traits(type)->to_float(packed.data(), x.data(), q.size());
    return x;
}

static std::vector<double> attention_in_double(const attention & c, const built & b, bool int8_query) {
    const int heads = c.heads_kv*c.group;
    std::vector<double> out((size_t) c.dv*heads*c.batch*c.seqs);
    for (int s = 0; s < c.seqs; s++) {
        for (int hk = 0; hk < c.heads_kv; hk++) {
            const int n = c.n_kv + c.n_ring;
            std::vector<std::vector<float>> k(n), v(n);
            for (int t = 0; t < n; t++) {
                const int row = t < c.n_kv ? t : t - c.n_kv;
                k[t] = row_of(t < c.n_kv ? b.k : b.k16, row, hk, s, c.dk);
                if (!c.v_is_k) { v[t] = row_of(t < c.n_kv ? b.v : b.v16, row, hk, s, c.dv); }
            }
            for (int h = hk*c.group; h < (hk + 1)*c.group; h++) {
                const int log2 = 1 << (int) std::floor(std::log2(heads));
                const double slope = !c.alibi ? 1.0 : h < log2 ? std::pow(2.0, -8.0/log2*(h + 1)) : std::pow(2.0, -4.0/log2*(2*(h - log2) + 1));
                for (int i = 0; i < c.batch; i++) {
                    const std::vector<float> plain = row_of(b.q, i, h, s, c.dk);
                    const std::vector<float> packed = int8_query && kvq_is_cache_type(c.k_type) ? seen_query(plain, c.k_type) : plain;
                    std::vector<double> logit(n);
                    double top = b.sinks ? ((const float *) b.sinks->data)[h] : -INFINITY;
                    for (int t = 0; t < n; t++) {
                        const std::vector<float> & q = t < c.n_kv ? packed : plain;
                        double dot = 0.0;
                        for (int e = 0; e < c.dk; e++) { dot += (double) q[e]*k[t][e]; }
                        dot /= std::sqrt((double) c.dk);
                        if (c.softcap) { dot = 10.0*std::tanh(dot/10.0); }
                        if (t >= c.n_kv) {
                            const char * m = (const char *) b.mask16->data + i*b.mask16->nb[1] + s*b.mask16->nb[3];
                            dot += slope*ggml_fp16_to_fp32(((const ggml_fp16_t *) m)[t - c.n_kv]);
                        } else if (b.mask) {
                            const char * m = (const char *) b.mask->data + i*b.mask->nb[1] + h % b.mask->ne[2]*b.mask->nb[2] + s % b.mask->ne[3]*b.mask->nb[3];
                            dot += slope*ggml_fp16_to_fp32(((const ggml_fp16_t *) m)[t]);
                        }
                        logit[t] = dot;
                        top = std::max(top, dot);
                    }
                    double total = b.sinks ? std::exp(((const float *) b.sinks->data)[h] - top) : 0.0;
                    double * o = out.data() + (size_t) c.dv*(h + heads*((size_t) i + (size_t) c.batch*s));
                    for (int t = 0; t < n && top > -INFINITY; t++) {
                        const double w = std::exp(logit[t] - top);
                        total += w;
                        const std::vector<float> & x = c.v_is_k ? k[t] : v[t];
                        for (int e = 0; e < c.dv; e++) { o[e] += w*x[e]; }
                    }
                    for (int e = 0; e < c.dv; e++) { o[e] = total > 0.0 ? o[e]/total : 0.0; }
                }
            }
        }
    }
    return out;
}

// squared error relative to the squared signal
static double error_of(const float * got, const std::vector<double> & want) {
    double e = 0.0, n = 1e-30;
    for (size_t i = 0; i < want.size(); i++) {
        e += (got[i] - want[i])*(got[i] - want[i]);
        n += want[i]*want[i];
    }
    return e/n;
}

static struct { double packed, query, reference; } worst;

static void test_attention(const attention & c) {
    const built b = build(c);
    const float * got = (const float *) b.out->data;
    const std::vector<double> want = attention_in_double(c, b, true);

    compute(b, c.threads, false);
    const double error = error_of(got, want);
    EXPECT(error < 1e-7, "attention %s: error %.3g against the int8 query", c.name().c_str(), error);
    const std::vector<float> first(got, got + want.size());
    compute(b, c.threads, false);
    EXPECT(memcmp(first.data(), got, want.size()*sizeof(float)) == 0, "attention %s: differs from run to run", c.name().c_str());

    const std::vector<double> exact = attention_in_double(c, b, false);
    const double query_error = error_of(got, exact);
    EXPECT(query_error < 2e-3, "attention %s: error %.3g against the float query", c.name().c_str(), query_error);
    compute(b, c.threads, true);
    const double ref_error = error_of(got, exact);
    EXPECT(ref_error < 1e-9, "attention %s: error %.3g of the reference path", c.name().c_str(), ref_error);
    worst.packed    = std::max(worst.packed, error);
    worst.query     = std::max(worst.query, query_error);
    worst.reference = std::max(worst.reference, ref_error);
    ggml_free(b.ctx);
}

template <typename T> static T one_of(const std::vector<T> & v) { return v[pick((int) v.size())]; }

static const std::vector<ggml_type> side_types = {
    GGML_TYPE_F32, GGML_TYPE_F16, GGML_TYPE_BF16, GGML_TYPE_Q8_0, GGML_TYPE_Q4_0,
    GGML_TYPE_TURBO2_128, GGML_TYPE_TURBO3_128, GGML_TYPE_TURBO4_128, GGML_TYPE_OSCAR2_128,
};
constexpr int OURS = 4;   // the last of them

static attention random_case() {
    attention c = {};
    c.dk = c.dv = one_of<int>({ 64, 80, 96, 112, 128, 192, 256 });
    c.heads_kv = 1 + pick(3);
    c.group    = one_of<int>({ 1, 2, 3, 4, 5, 6, 7, 8, 12, 16 });
    c.batch    = one_of<int>({ 1, 1, 2, 3, 8, 17, 64 });
    c.n_kv     = one_of<int>({ 1, 5, 33, 64, 256, 577 });
    c.n_ring   = pick(3) == 0 ? one_of<int>({ 1, 64, 130, 600 }) : 0;
    c.seqs     = 1 + pick(2);
    c.mask     = pick(MASK_KINDS);
    c.alibi    = c.mask != NO_MASK && pick(4) == 0;
    c.softcap  = pick(4) == 0;
    c.sinks    = pick(4) == 0;
    c.mask_heads = pick(6) == 0 ? 2 : 1;
    c.threads  = 1 + pick(4);
    c.k_type = c.v_type = GGML_TYPE_TURBO3_128;
    return c;
}

// Keeps the double-precision side affordable; false where a type has no block for the head.
static bool settle(attention & c) {
    c.k_type = kvq_type_for_head(c.k_type, c.dk);
    c.v_type = kvq_type_for_head(c.v_type, c.v_is_k ? c.dk : c.dv);
    if (c.dk % ggml_blck_size(c.k_type) || c.dv % ggml_blck_size(c.v_type)) {
        return false;
    }
    while ((double) c.batch*(c.n_kv + c.n_ring)*c.heads_kv*c.group*c.seqs*(c.dk + c.dv) > (quick ? 1e6 : 2e7)) {
        if      (c.heads_kv > 1) { c.heads_kv--; }
        else if (c.seqs > 1)     { c.seqs--; }
        else if (c.batch > 17)   { c.batch = 17; }
        else if (c.n_kv > 256)   { c.n_kv = 256; }
        else if (c.n_ring > 130) { c.n_ring = 130; }
        else if (c.batch > 3)    { c.batch = 3; }
        else                     { break; }
    }
    return true;
}

static int test_all_attention(int cases, int threads) {
    int run = 0;
    const auto test = [&](attention c) {
        if (threads > 0) { c.threads = threads; }
        if (settle(c)) {
            test_attention(c);
            run++;
        }
    };
    // every pair of types at every head size
    for (ggml_type k : side_types) {
        for (ggml_type v : side_types) {
            if (!kvq_is_cache_type(k) && !kvq_is_cache_type(v)) {
                continue;
            }
            const int sizes[][2] = { {64, 64}, {80, 80}, {96, 96}, {112, 112}, {128, 128}, {192, 192}, {256, 256}, {192, 128}, {576, 512} };
            for (const auto & s : sizes) {
                attention c = random_case();
                c.k_type = k; c.v_type = v; c.dk = s[0]; c.dv = s[1];
                if (c.dk == 576) { c.heads_kv = 1; }
                c.v_is_k = c.dk == 576 && k == v;
                c.n_ring = c.v_is_k ? 0 : c.n_ring;
                test(c);
            }
        }
    }
    // every group ratio with every batch, at both common head sizes
    for (int d : { 64, 128 }) {
        for (int group : { 1, 2, 3, 4, 5, 6, 7, 8, 12, 16 }) {
            for (int batch : { 1, 2, 3, 8, 17, 64 }) {
                attention c = random_case();
                c.dk = c.dv = d; c.group = group; c.batch = batch;
                c.k_type = one_of(std::vector<ggml_type>(side_types.end() - OURS, side_types.end()));
                c.v_type = one_of(std::vector<ggml_type>(side_types.end() - OURS, side_types.end()));
                test(c);
            }
        }
    }
    for (int i = 0; i < cases; i++) {
        attention c = random_case();
        c.k_type = one_of(side_types);
        c.v_type = kvq_is_cache_type(c.k_type) ? one_of(side_types) : one_of(std::vector<ggml_type>(side_types.end() - OURS, side_types.end()));
        test(c);
    }
    return run;
}

// a stale block that is not finite, in a cell that the mask hides
static void test_hidden_nan() {
    attention c = random_case();
    c.dk = c.dv = 64; c.heads_kv = 1; c.group = 3; c.batch = 1; c.n_kv = 70; c.n_ring = 70; c.seqs = 1; c.mask = CAUSAL; c.mask_heads = 1;
    c.sinks = c.alibi = c.softcap = false; c.threads = 2;
    for (ggml_type k : { GGML_TYPE_F16, GGML_TYPE_TURBO3_64, GGML_TYPE_OSCAR2_64 }) {
        for (ggml_type v : { GGML_TYPE_F16, GGML_TYPE_TURBO3_64 }) {
            c.k_type = k; c.v_type = v;
            if (k == GGML_TYPE_F16 && v == GGML_TYPE_F16) {
                continue;
            }
            const built b = build(c);
            for (int t = 0; t < c.n_kv; t++) {
                if (t % 5 == 2) {
                    ((ggml_fp16_t *) b.mask->data)[t] = ggml_fp32_to_fp16(-INFINITY);
                    memset((char *) b.k->data + t*b.k->nb[1], 0xFF, ggml_row_size(k, c.dk));
                    memset((char *) b.v->data + t*b.v->nb[1], 0xFF, ggml_row_size(v, c.dv));
                    ((ggml_fp16_t *) b.mask16->data)[t] = ggml_fp32_to_fp16(-INFINITY);
                    memset((char *) b.k16->data + t*b.k16->nb[1], 0xFF, b.k16->nb[1]);
                    memset((char *) b.v16->data + t*b.v16->nb[1], 0xFF, b.v16->nb[1]);
                }
            }
            for (bool ref : { false, true }) {
                compute(b, c.threads, ref);
                const float * x = (const float *) b.out->data;
                EXPECT(std::all_of(x, x + ggml_nelements(b.out), [](float f) { return std::isfinite(f); }),
                       "hidden NaN reaches the output: k=%s v=%s ref=%d", ggml_type_name(k), ggml_type_name(v), ref);
            }
            ggml_free(b.ctx);
        }
    }
}

// A token gives the same bits alone as in a batch, whatever lies in the cells that it does not see and with any number
// of threads.
static void test_batch_invariance() {
    for (ggml_type k_family : { GGML_TYPE_TURBO2_128, GGML_TYPE_TURBO3_128, GGML_TYPE_TURBO4_128, GGML_TYPE_OSCAR2_128, GGML_TYPE_F16 }) {
        for (ggml_type v_family : { GGML_TYPE_TURBO3_128, GGML_TYPE_TURBO4_128, GGML_TYPE_Q8_0 }) {
            if (!kvq_is_cache_type(k_family) && !kvq_is_cache_type(v_family)) {
                continue;
            }
            attention c = random_case();
            c.dk = c.dv = one_of<int>({ 64, 96, 128, 256 });
            c.k_type = kvq_type_for_head(k_family, c.dk);
            c.v_type = kvq_type_for_head(v_family, c.dv);
            c.heads_kv = 2; c.group = one_of<int>({ 1, 3, 4, 7 }); c.batch = 17; c.n_kv = quick ? 700 : 1300; c.n_ring = pick(2) ? 130 : 0; c.seqs = 1; c.mask_heads = 1;
            c.mask = one_of<int>({ CAUSAL, WINDOW, SCATTERED });
            c.threads = 1;
            const built b = build(c);
            const int heads = c.heads_kv*c.group;
            const float * got = (const float *) b.out->data;
            compute(b, 1, false);
            const std::vector<float> whole(got, got + ggml_nelements(b.out));
            for (int threads : { 2, 3 }) {
                compute(b, threads, false);
                EXPECT(memcmp(whole.data(), got, whole.size()*sizeof(float)) == 0, "attention %s: %d threads change bits", c.name().c_str(), threads);
            }

            ggml_init_params params = { 64u << 20, nullptr, false };
            ggml_context * ctx = ggml_init(params);
            for (int i = c.batch - 1; i >= 0; i--) {   // descending: hidden cells are overwritten, which earlier tokens see
                ggml_tensor * q = ggml_view_4d(ctx, b.q, c.dk, 1, heads, 1, b.q->nb[1], b.q->nb[2], b.q->nb[3], i*b.q->nb[1]);
                ggml_tensor * mask = ggml_view_4d(ctx, b.mask, c.n_kv, 1, 1, 1, b.mask->nb[1], b.mask->nb[2], b.mask->nb[3], i*b.mask->nb[1]);
                if (c.mask != SCATTERED) {
                    for (int t = c.n_kv - c.batch + i + 1; t < c.n_kv; t++) {
                        memset((char *) b.k->data + t*b.k->nb[1], pick(2) ? 0xFF : 0x5A, b.k->nb[1]);
                        memset((char *) b.v->data + t*b.v->nb[1], pick(2) ? 0xFF : 0x5A, b.v->nb[1]);
                    }
                }
                built one = b;
                one.out = ggml_flash_attn_ext(ctx, q, b.k, b.v, mask, 1.0f/std::sqrt((float) c.dk), c.alibi ? 8.0f : 0.0f, c.softcap ? 10.0f : 0.0f);
                if (b.sinks) { ggml_flash_attn_ext_add_sinks(one.out, b.sinks); }
                if (b.k16) {
                    set_window(one.out, b.k16, b.v16, ggml_view_4d(ctx, b.mask16, c.n_ring, 1, 1, 1, b.mask16->nb[1], b.mask16->nb[2], b.mask16->nb[3],
                        i*b.mask16->nb[1]));
                }
                one.graph = ggml_new_graph(ctx);
                ggml_build_forward_expand(one.graph, one.out);
                for (int threads : { 1, 2 }) {
                    compute(one, threads, false);
                    EXPECT(memcmp(whole.data() + (size_t) i*heads*c.dv, one.out->data, (size_t) heads*c.dv*sizeof(float)) == 0,
                           "attention %s: token %d alone with %d threads differs", c.name().c_str(), i, threads);
                }
            }
            ggml_free(ctx);
            ggml_free(b.ctx);
        }
    }
}

// ---- benchmark ----

// Upstream rotates queries and outputs of its own quantised caches in the graph; ours do it inside the operation.
static ggml_tensor * rotated(ggml_context * ctx, ggml_tensor * x, int d) {
    ggml_tensor * h = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, d, d);
    fill(h, 0.1f);
    ggml_tensor * y = ggml_mul_mat(ctx, h, ggml_cont_2d(ctx, x, d, ggml_nelements(x)/d));
    return ggml_reshape_4d(ctx, y, x->ne[0], x->ne[1], x->ne[2], x->ne[3]);
}

// ms a step. The CPU time is that of all threads, which wait by spinning: of use with one thread, on a busy machine.
struct timing { double wall, cpu; };

static timing bench_one(ggml_type k_type, ggml_type v_type, int d, int heads, int heads_kv, int layers, int depth, int batch, int threads) {
    const size_t bytes = (size_t) layers*(2*(size_t) depth*heads_kv*d*2 + (size_t) batch*heads*d*64 + (size_t) depth*batch*2) + (64u << 20);
    ggml_init_params params = { bytes, nullptr, false };
    ggml_context * ctx = ggml_init(params);
    ggml_cgraph * graph = ggml_new_graph(ctx);
    ggml_tensor * mask = ggml_new_tensor_2d(ctx, GGML_TYPE_F16, depth, batch);
    memset(mask->data, 0, ggml_nbytes(mask));
    const bool upstream_quant = ggml_is_quantized(k_type) && !kvq_is_cache_type(k_type);
    for (int l = 0; l < layers; l++) {
        ggml_tensor * q = ggml_new_tensor_4d(ctx, GGML_TYPE_F32, d, heads, batch, 1);
        fill(q, 1.0f);
        if (upstream_quant) { q = rotated(ctx, q, 64); }
        ggml_tensor * out = ggml_flash_attn_ext(ctx, ggml_permute(ctx, q, 0, 2, 1, 3), cache_view(ctx, k_type, d, heads_kv, depth, 1, 61),
                                                cache_view(ctx, v_type, d, heads_kv, depth, 1, 61), mask, 1.0f/std::sqrt((float) d), 0.0f, 0.0f);
        if (upstream_quant) { out = rotated(ctx, out, 64); }
        ggml_build_forward_expand(graph, out);
    }
    ggml_cplan plan = ggml_graph_plan(graph, threads, nullptr);
    std::vector<uint8_t> work(plan.work_size);
    plan.work_data = work.data();
    timing best = { 1e30, 1e30 };
    for (int i = 0; i < 8; i++) {
        const auto start = std::chrono::steady_clock::now();
        const clock_t cpu = clock();
        ggml_graph_compute(graph, &plan);
        best.cpu  = std::min(best.cpu, 1e3*(double) (clock() - cpu)/CLOCKS_PER_SEC);
        best.wall = std::min(best.wall, std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count());
    }
    ggml_free(ctx);
    return best;
}

static void bench(int threads, int depth, int batch, const std::string & only) {
    const struct { const char * name; int d, heads, heads_kv, layers; } shapes[] = {
        { "SmolLM2-135M",  64,  9, 3, 30 },
        { "Qwen3-8B",     128, 32, 8,  4 },
        { "Gemma-3-270M", 256,  4, 1, 18 },
    };
    const ggml_type types[][2] = {
        { GGML_TYPE_F16, GGML_TYPE_F16 }, { GGML_TYPE_Q8_0, GGML_TYPE_Q8_0 }, { GGML_TYPE_Q4_0, GGML_TYPE_Q4_0 },
        { GGML_TYPE_TURBO4_128, GGML_TYPE_TURBO4_128 }, { GGML_TYPE_TURBO3_128, GGML_TYPE_TURBO3_128 },
        { GGML_TYPE_TURBO2_128, GGML_TYPE_TURBO2_128 }, { GGML_TYPE_OSCAR2_128, GGML_TYPE_TURBO2_128 }, { GGML_TYPE_Q8_0, GGML_TYPE_TURBO3_128 }, { GGML_TYPE_F16, GGML_TYPE_TURBO3_128 },
    };
    for (const auto & s : shapes) {
        printf("%s: %d layers, %d/%d heads of %d, depth %d, batch %d, %d threads\n", s.name, s.layers, s.heads, s.heads_kv, s.d, depth, batch, threads);
        timing f16 = {};
        for (const auto & t : types) {
            if (!only.empty() && only != kvq_family_name(t[0])) {
                continue;
            }
            const ggml_type k = kvq_type_for_head(t[0], s.d), v = kvq_type_for_head(t[1], s.d);
            const timing ms = bench_one(k, v, s.d, s.heads, s.heads_kv, s.layers, depth, batch, threads);
            if (t[0] == GGML_TYPE_F16 && t[1] == GGML_TYPE_F16) { f16 = ms; }
            printf("  %-7s %-7s %9.2f ms a step", kvq_family_name(k), kvq_family_name(v), ms.wall);
            if (f16.wall > 0.0) { printf(", f16 / this = %5.2f", f16.wall/ms.wall); }
            if (threads == 1)   { printf("; CPU time %9.2f ms", ms.cpu); }
            if (threads == 1 && f16.cpu > 0.0) { printf(", f16 / this = %5.2f", f16.cpu/ms.cpu); }
            printf("\n");
            fflush(stdout);
        }
    }
}

int main(int argc, char ** argv) {
    int cases = 300, threads = 0, depth = 8192, batch = 1;
    bool run_bench = false;
    std::string only;
    for (int i = 1; i < argc; i++) {
        const std::string a = argv[i];
        const auto value = [&]() { return i + 1 < argc ? atoi(argv[++i]) : 0; };
        if      (a == "--bench")   { run_bench = true; }
        else if (a == "--quick")   { quick = true; }
        else if (a == "--cases")   { cases = value(); }
        else if (a == "--seed")    { rng.seed(value()); }
        else if (a == "--threads") { threads = value(); }
        else if (a == "--depth")   { depth = value(); }
        else if (a == "--batch")   { batch = value(); }
        else if (a == "--type")    { only = i + 1 < argc ? argv[++i] : ""; }
        else { fprintf(stderr, "unknown argument %s\n", a.c_str()); return 2; }
    }
    setvbuf(stdout, nullptr, _IOLBF, 0);
    ggml_cpu_init();
    printf("ggml-cpu is compiled for: avx2=%d avx512=%d avx512_vnni=%d avx_vnni=%d neon=%d dotprod=%d\n", ggml_cpu_has_avx2(), ggml_cpu_has_avx512(),
           ggml_cpu_has_avx512_vnni(), ggml_cpu_has_avx_vnni(), ggml_cpu_has_neon(), ggml_cpu_has_dotprod());
    if (run_bench) {
        bench(threads > 0 ? threads : 2, depth, batch, only);
        return 0;
    }
    for (const type_info & t : cache_types)      { test_quantize(t); test_vec_dot(t); }
    for (const type_info & t : window_types)     { test_quantize(t); }
    for (const type_info & t : activation_types) { test_quantize(t); }
    printf("rows: %zu types\n", cache_types.size() + window_types.size() + activation_types.size());
    test_hidden_nan();
    test_batch_invariance();
    const int run = test_all_attention(cases, threads);
    printf("attention: %d cases\n", run);
    printf("attention: largest relative squared error %.2g, with float queries %.2g, of the reference path %.2g\n", worst.packed, worst.query, worst.reference);
    printf("%d failures\n", failures);
    return failures != 0;
}
