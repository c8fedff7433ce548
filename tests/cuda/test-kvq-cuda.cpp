// Every CUDA operation of the cache types against the CPU backend, which defines the right answer.
//   test-kvq-cuda            the whole grid; exit code 1 when something differs, 77 without a CUDA device
//   test-kvq-cuda quick      a small grid, for compute-sanitizer
//   test-kvq-cuda host       beside the small grid, what else the host machine runs (tests/cuda/host)
//   test-kvq-cuda steps      norm and RoPE joined with transforms, writes and attention, alone
//   test-kvq-cuda time       attention and cache writes timed beside upstream's f16, q8_0 and q4_0
//   test-kvq-cuda parts      attention timed with an f16 window and with a key bias beside neither
//   test-kvq-cuda bandwidth  attention of one token at 131072 and of 8 sequences of 32768 as a share of a device copy
//   --part 2/8               the second of eight parts, to be run side by side: the reference takes most of the time
//   --most 3e6               without attention of more products of queries and keys
#include "ggml.h"
#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml-cpu.h"
#include "kvq.h"
#include "kvq-bias-pairs.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <functional>
#include <map>
#include <random>
#include <string>
#include <thread>
#include <vector>

typedef std::vector<uint8_t> bytes;

static ggml_backend_t gpu, cpu;
static int failures, checks;
static int part = 1, parts = 1, cases;
static double most = INFINITY;

// whether the next case, of so many products, belongs to this part of the grid
static bool mine(const double products = 0.0) {
    return products <= most && cases++ % parts == part - 1;
}

static std::mt19937 rng(7);

struct tensor_data { ggml_tensor * tensor; const bytes * data; };

struct graph_build {
    ggml_context * ctx;
    std::vector<tensor_data> inputs;
    ggml_cgraph * graph;

    ggml_tensor * input(const ggml_type type, const std::vector<int64_t> & ne, const bytes & data) {
        ggml_tensor * t = ggml_new_tensor(ctx, type, int(ne.size()), ne.data());
        GGML_ASSERT(ggml_nbytes(t) == data.size());
        inputs.push_back({ t, &data });
        return t;
    }
};

// Computes what `build` describes on one backend and returns the result's bytes; the whole of `watch`, if it sets one.
// shared: tensors of the graph take over each other's memory as in a model; the CPU and a GPU must see them in the same order.
static bytes compute(const ggml_backend_t backend, const std::function<ggml_tensor * (graph_build &, ggml_tensor **)> & build, const bool shared = false) {
    ggml_context * ctx = ggml_init({ ggml_tensor_overhead()*128 + ggml_graph_overhead(), nullptr, true });
    ggml_cgraph * graph = ggml_new_graph(ctx);
    graph_build b = { ctx, {}, graph };
    ggml_tensor * watch = nullptr;
    ggml_tensor * out = build(b, &watch);
    ggml_build_forward_expand(graph, out);
    for (int i = 0; i < ggml_graph_n_nodes(graph); ++i) {
        ggml_tensor * node = ggml_graph_node(graph, i);
        if (!ggml_backend_supports_op(backend, node)) {
            printf("FAIL: %s does not support %s to %s\n", ggml_backend_name(backend), ggml_op_name(node->op), ggml_type_name(node->type));
            failures++;
            ggml_free(ctx);
            return {};
        }
    }
    ggml_set_output(watch ? watch : out);             // nothing may leave it out
    ggml_gallocr_t memory = nullptr;
    ggml_backend_buffer_t buffer = nullptr;
    if (shared) {
        for (const tensor_data & t : b.inputs) {
            ggml_set_input(t.tensor);
            ggml_set_output(t.tensor);
        }
        memory = ggml_gallocr_new(ggml_backend_get_default_buffer_type(backend));
        GGML_ASSERT(ggml_gallocr_alloc_graph(memory, graph));
    } else {
        buffer = ggml_backend_alloc_ctx_tensors(ctx, backend);
        ggml_backend_buffer_clear(buffer, 0xFF);          // poison: NaN wherever nothing is written
    }
    for (const tensor_data & t : b.inputs) {
        ggml_backend_tensor_set(t.tensor, t.data->data(), 0, t.data->size());
    }
    GGML_ASSERT(ggml_backend_graph_compute(backend, graph) == GGML_STATUS_SUCCESS);
    const ggml_tensor * result = watch ? watch : out;
    bytes r(ggml_nbytes(result));
    ggml_backend_tensor_get(result, r.data(), 0, r.size());
    ggml_backend_buffer_free(buffer);
    ggml_gallocr_free(memory);
    ggml_free(ctx);
    return r;
}

static bytes gaussian(const size_t n, const float sigma) {
    bytes b(n*sizeof(float));
    std::normal_distribution<float> d(0.0f, sigma);
    for (size_t i = 0; i < n; ++i) {
        ((float *) b.data())[i] = d(rng);
    }
    return b;
}

// n random values in the given type
static bytes cache_data(const ggml_type type, const int64_t row, const int64_t rows) {
    const bytes x = gaussian(size_t(row*rows), 1.0f);
    bytes y(ggml_row_size(type, row)*rows);
    if (type == GGML_TYPE_F32) {
        return x;
    }
    ggml_get_type_traits(type)->from_float_ref((const float *) x.data(), y.data(), row*rows);
    return y;
}

static double relative_error(const float * x, const float * y, const size_t n) {
    double num = 0.0, den = 1e-30;
    for (size_t i = 0; i < n; ++i) {
        num += double(x[i] - y[i])*(x[i] - y[i]);
        den += double(y[i])*y[i];
    }
    return sqrt(num/den);
}

static double relative_error(const bytes & a, const bytes & b) {
    return a.size() != b.size() || a.empty() ? INFINITY : relative_error((const float *) a.data(), (const float *) b.data(), a.size()/sizeof(float));
}

static void report(const bool good, const std::string & what) {
    checks++;
    if (!good) {
        failures++;
        printf("FAIL: %s\n", what.c_str());
        fflush(stdout);
    }
}

// ---- rows ----

static std::vector<ggml_type> cache_types() {
    return {
#define KVQ_TYPE(E, F, NAME, FAMILY, BITS, N, BYTES) GGML_TYPE_##E,
        KVQ_FOR_EACH_CACHE_TYPE(KVQ_TYPE)
#undef KVQ_TYPE
    };
}

static std::vector<ggml_type> window_types() {
    return {
#define KVQ_TYPE(E, F, NAME, N, BYTES) GGML_TYPE_##E,
        KVQ_FOR_EACH_WINDOW_TYPE(KVQ_TYPE)
#undef KVQ_TYPE
    };
}

// K and V of a layer and their rows of an f16 window, at other indices: fused into one launch.
static void check_four_writes(const ggml_type tk, const ggml_type tv) {
    if (!mine()) {
        return;
    }
    const int64_t n = ggml_blck_size(tk), row = 3*n, rows = 5, table = 40;
    const ggml_type type[4] = { tk, tv, kvq_window_type(tk), kvq_window_type(tv) };
    bytes x[4], old[4], index[2];
    for (int i = 0; i < 4; ++i) {
        x[i]   = gaussian(row*rows, 1.0f + i);
        old[i] = cache_data(type[i], row, table);
    }
    for (int i = 0; i < 2; ++i) {
        index[i].resize(rows*8);
        for (int r = 0; r < rows; ++r) { ((int64_t *) index[i].data())[r] = (7*r + 3 + 11*i) % table; }
    }
    for (int watched = 0; watched < 4; ++watched) {
        auto build = [&](graph_build & b, ggml_tensor ** watch) {
            ggml_tensor * at[2] = { b.input(GGML_TYPE_I64, { rows }, index[0]), b.input(GGML_TYPE_I64, { rows }, index[1]) };
            ggml_tensor * out = nullptr;
            for (int i = 0; i < 4; ++i) {
                ggml_tensor * cache = b.input(type[i], { row, table }, old[i]);
                out = ggml_set_rows(b.ctx, cache, b.input(GGML_TYPE_F32, { row, rows }, x[i]), at[i/2]);
                ggml_build_forward_expand(b.graph, out);
                *watch = i == watched ? cache : *watch;
            }
            return out;
        };
        const bytes a = compute(gpu, build), b = compute(cpu, build);
        report(!a.empty() && a == b, std::string("four SET_ROWS, ") + ggml_type_name(type[watched]) + " of " + ggml_type_name(tk) + "/" + ggml_type_name(tv) + " differs from the CPU");
    }
}

static void check_rows(const ggml_type type) {
    if (!mine()) {
        return;
    }
    const int64_t n = ggml_blck_size(type), row = 3*n, rows = 11, table = 37;
    const std::string name = ggml_type_name(type);
    auto same = [&](const std::string & op, const std::function<ggml_tensor * (graph_build &, ggml_tensor **)> & build) {
        const bytes a = compute(gpu, build), b = compute(cpu, build);
        report(!a.empty() && a == b, op + " of " + name + " differs from the CPU");
    };
    for (const float sigma : { 1.0f, 1e-3f, 300.0f }) {
        bytes x = gaussian(row*rows*2, sigma);
        std::fill(x.begin(), x.begin() + n*sizeof(float), uint8_t(0));             // a block of zeros
        const bytes blocks = cache_data(type, row, table*2);
        const bytes other = cache_data(GGML_TYPE_TURBO2_128, row/n*128, table*2);
        bytes i32(rows*4), i64(rows*8), i64x2(rows*16);
        std::vector<int> order(table);
        for (int i = 0; i < table; ++i) { order[i] = i; }
        std::shuffle(order.begin(), order.end(), rng);
        for (int i = 0; i < rows; ++i) {
            ((int32_t *) i32.data())[i] = order[i];
            ((int64_t *) i64.data())[i] = order[i];
            ((int64_t *) i64x2.data())[i]        = order[i];
            ((int64_t *) i64x2.data())[rows + i] = order[i] + table;
        }
        for (const bool wide : { false, true }) {
            same("SET_ROWS", [&](graph_build & b, ggml_tensor ** watch) {
                *watch = b.input(type, { row, table, 2 }, blocks);
                return ggml_set_rows(b.ctx, *watch, b.input(GGML_TYPE_F32, { row, rows, 2 }, x), wide ? b.input(GGML_TYPE_I64, { rows }, i64) : b.input(GGML_TYPE_I32, { rows }, i32));
            });
        }
        // K and V in a row: fused into one launch
        same("two SET_ROWS", [&](graph_build & b, ggml_tensor ** watch) {
            ggml_tensor * cache[2], * rows_of[2];
            for (int i = 0; i < 2; ++i) {
                cache[i]   = b.input(i == 1 && type == GGML_TYPE_TURBO3_128 ? GGML_TYPE_TURBO2_128 : type, { row, table*2 }, i == 1 && type == GGML_TYPE_TURBO3_128 ? other : blocks);
                rows_of[i] = b.input(GGML_TYPE_F32, { row, rows*2 }, x);
            }
            ggml_tensor * index = b.input(GGML_TYPE_I64, { rows*2 }, i64x2);
            ggml_tensor * k = ggml_set_rows(b.ctx, cache[0], rows_of[0], index);
            ggml_tensor * v = ggml_set_rows(b.ctx, cache[1], rows_of[1], index);
            ggml_build_forward_expand(b.graph, k);
            *watch = cache[sigma == 1.0f ? 0 : 1];
            return v;
        });
        // nothing gathers rows of a window, and the CPU does not
        if (kvq_is_cache_type(type)) same("GET_ROWS", [&](graph_build & b, ggml_tensor **) {
            ggml_tensor * t = b.input(type, { row, table*2 }, blocks);
            return ggml_get_rows(b.ctx, t, b.input(GGML_TYPE_I32, { rows }, i32));
        });
        same("CPY from f32", [&](graph_build & b, ggml_tensor ** watch) {
            *watch = b.input(type, { row, table, 2 }, blocks);
            ggml_tensor * view = ggml_view_2d(b.ctx, *watch, row, rows*2, (*watch)->nb[1], 3*(*watch)->nb[1]);   // the CPU needs a contiguous target
            return ggml_cpy(b.ctx, b.input(GGML_TYPE_F32, { row, rows, 2 }, x), view);
        });
        same("CPY to f32", [&](graph_build & b, ggml_tensor **) {
            ggml_tensor * t = b.input(type, { row, table, 2 }, blocks);
            return ggml_cast(b.ctx, ggml_view_3d(b.ctx, t, row, rows, 2, t->nb[1], t->nb[2], t->nb[1]), GGML_TYPE_F32);
        });
        same("CPY of heads to f32", [&](graph_build & b, ggml_tensor **) {
            ggml_tensor * t = b.input(type, { row, table, 2 }, blocks);
            return ggml_cast(b.ctx, ggml_view_3d(b.ctx, t, n, 3, rows, ggml_row_size(type, n), t->nb[1], 2*t->nb[1]), GGML_TYPE_F32);
        });
        same("CPY between caches", [&](graph_build & b, ggml_tensor ** watch) {
            *watch = b.input(type, { row, table, 2 }, blocks);
            ggml_tensor * from = b.input(type, { row, table*2 }, blocks);
            ggml_tensor * view = ggml_view_3d(b.ctx, *watch, row, rows, 2, (*watch)->nb[1], (*watch)->nb[2], 5*(*watch)->nb[1]);
            return ggml_cpy(b.ctx, ggml_view_3d(b.ctx, from, row, rows, 2, from->nb[1], 13*from->nb[1], from->nb[1]), view);
        });
    }
}

// ---- attention ----

struct attention {
    ggml_type tk, tv;
    int dk, dv, heads_kv, gqa, tokens, seqs, n_kv;
    bool mask = true, sinks = false, v_is_k = false, one_mask = false;
    float softcap = 0.0f, max_bias = 0.0f;
    int  n_window = 0;                                  // rows of an f16 window
    bool cache_hidden = false, window_hidden = false;   // in full
    int  n_rot = 0;                                     // values that a key bias turns; 0 without one
    int  n_pairs = 0;                                   // of frequencies that carry it; 0: all
    bool interleaved = false;                           // pairs of the bias
    enum { ONE_BREAK, IN_A_ROW, FOUR_SEQUENCES, NO_ORDER } places = ONE_BREAK;     // positions of the tokens; sequences that share a cache

    double products() const { return double(dk)*heads_kv*gqa*tokens*seqs*(n_kv + n_window); }
};

static std::string text(const attention & p) {
    char s[384];
    snprintf(s, sizeof(s), "%s/%s d %d/%d kv heads %d gqa %d tokens %d seqs %d n_kv %d window %d%s%s bias %d%s%s%s%s%s%s%s%s", ggml_type_name(p.tk), ggml_type_name(p.tv), p.dk, p.dv, p.heads_kv,
        p.gqa, p.tokens, p.seqs, p.n_kv, p.n_window, p.cache_hidden ? " cache hidden" : "", p.window_hidden ? " window hidden" : "", p.n_rot, p.n_pairs ? (" in " + std::to_string(p.n_pairs) + " pairs").c_str() : "",
        p.interleaved ? " interleaved" : "", p.places == p.IN_A_ROW ? " in a row" : p.places == p.FOUR_SEQUENCES ? " four sequences" : p.places == p.NO_ORDER ? " scattered" : "", p.mask ? " mask" : "", p.sinks ? " sinks" : "", p.v_is_k ? " V in K" : "", p.softcap != 0 ? " softcap" : "", p.max_bias > 0 ? " alibi" : "");
    return s;
}

// the pairs that carry the bias: some of them, scattered
static kvq_pair_set pairs_of(const attention & p) {
    const int all = p.n_rot/2;
    if (p.n_pairs == 0) {
        return kvq_first_pairs(all);
    }
    kvq_pair_set set = {};
    for (int i = 0; i < p.n_pairs; ++i) {
        int pair = (5*i*i + 11*i + p.n_kv) % all;
        while (kvq_has_pair(set, pair)) {
            pair = (pair + 1) % all;
        }
        set[pair/32] |= 1u << pair % 32;
    }
    return set;
}

struct attention_data { bytes q, k, v, mask, sinks, k16, v16, mask16, bias_q, bias, trig, pos; };

static const int TRIG_STEPS = 64;       // of 256 positions

// window and key bias
static void make_parts(const attention & p, attention_data & d) {
    if (p.n_window) {
        d.k16 = cache_data(kvq_window_type(p.tk), p.dk*p.heads_kv, int64_t(p.n_window)*p.seqs);
        d.v16 = cache_data(kvq_window_type(p.tv), p.dv*p.heads_kv, int64_t(p.n_window)*p.seqs);
        d.mask16.resize(size_t(2)*p.n_window*p.tokens*(p.one_mask ? 1 : p.seqs));
        for (size_t i = 0; i < d.mask16.size()/2; ++i) {
            const int c = int(i % p.n_window), t = int(i/p.n_window % p.tokens), s = int(i/p.n_window/p.tokens);
            // rows of other sequences and free ones, a tile that none sees
            const bool hidden = p.window_hidden || (5*c + 3*t + s) % 4 == 0 || (c >= 64 && c < 96);
            ((ggml_fp16_t *) d.mask16.data())[i] = ggml_fp32_to_fp16(hidden ? -INFINITY : p.max_bias > 0 ? -float((c*3 + t) % 50)/16.0f : 0.0f);
        }
    }
    if (p.n_rot) {
        d.bias_q = gaussian(size_t(p.dk)*p.heads_kv*p.gqa*p.tokens*p.seqs, 1.0f);
        d.bias   = gaussian(size_t(p.dk)*p.heads_kv, 2.0f);
        const kvq_pair_set pairs = pairs_of(p);
        for (int i = 0; i < p.dk*p.heads_kv; ++i) {
            const int c = i % p.dk;
            if (c < p.n_rot && !kvq_has_pair(pairs, p.interleaved ? c/2 : c % (p.n_rot/2))) {
                ((float *) d.bias.data())[i] = 0.0f;
            }
        }
        d.trig.resize(size_t(4)*p.n_rot*(256 + TRIG_STEPS));
        for (int r = 0; r < 256 + TRIG_STEPS; ++r) {
            for (int i = 0; i < p.n_rot/2; ++i) {
                const double angle = (r < 256 ? r : (r - 256)*256)*pow(10000.0, -2.0*i/p.n_rot);
                ((float *) d.trig.data())[size_t(r)*p.n_rot + i]             = float(cos(angle));
                ((float *) d.trig.data())[size_t(r)*p.n_rot + p.n_rot/2 + i] = float(sin(angle));
            }
        }
        const int cells = p.n_kv + p.n_window;
        d.pos.resize(size_t(4)*cells*p.seqs);
        for (int i = 0; i < cells*p.seqs; ++i) {
            const int c = i % cells;
            ((int32_t *) d.pos.data())[i] = p.places == p.NO_ORDER ? int(rng() % 16000) : p.places == p.FOUR_SEQUENCES ? c/4 + 1111*(c % 4) :
                c + (p.places == p.IN_A_ROW ? 100 : c > cells/3 ? 40 : 3000);
        }
    }
}

static attention_data make_data(const attention & p) {
    attention_data d;
    const int heads = p.heads_kv*p.gqa;
    d.q = gaussian(size_t(p.dk)*heads*p.tokens*p.seqs, 2.0f);
    d.k = cache_data(p.tk, p.dk*p.heads_kv, int64_t(p.n_kv + 2)*p.seqs);
    if (!p.v_is_k) {
        d.v = cache_data(p.tv, p.dv*p.heads_kv, int64_t(p.n_kv + 2)*p.seqs);
    }
    const int mask_seqs = p.one_mask ? 1 : p.seqs;
    d.mask.resize(size_t(2)*p.n_kv*p.tokens*mask_seqs);
    for (size_t i = 0; i < d.mask.size()/2; ++i) {
        const int c = int(i % p.n_kv), t = int(i/p.n_kv % p.tokens), s = int(i/p.n_kv/p.tokens);
        // causal, each sequence with its own length, a few holes, biases for ALiBi
        const bool hidden = p.cache_hidden || c > p.n_kv - p.tokens - 7*s + t || (c % 97 == 13);
        ((ggml_fp16_t *) d.mask.data())[i] = ggml_fp32_to_fp16(hidden && (c > 0 || p.cache_hidden) ? -INFINITY : p.max_bias > 0 ? -float((c*7 + t) % 50)/16.0f : 0.0f);
    }
    d.sinks = gaussian(heads, 1.0f);
    make_parts(p, d);
    return d;
}

static ggml_tensor * build_attention(const attention & p, const attention_data & d, graph_build & b) {
    auto heads_of = [&](const ggml_type type, const int dim, const bytes & data) {
        ggml_tensor * t = b.input(type, { int64_t(dim)*p.heads_kv, p.n_kv + 2, p.seqs }, data);
        t = ggml_view_4d(b.ctx, t, dim, p.heads_kv, p.n_kv, p.seqs, ggml_row_size(type, dim), t->nb[1], t->nb[2], 0);
        return ggml_permute(b.ctx, t, 0, 2, 1, 3);
    };
    const int heads = p.heads_kv*p.gqa;
    ggml_tensor * q = ggml_permute(b.ctx, b.input(GGML_TYPE_F32, { p.dk, heads, p.tokens, p.seqs }, d.q), 0, 2, 1, 3);
    ggml_tensor * k = heads_of(p.tk, p.dk, d.k);
    ggml_tensor * v = p.v_is_k ? ggml_view_4d(b.ctx, k, p.dv, p.n_kv, p.heads_kv, p.seqs, k->nb[1], k->nb[2], k->nb[3], 0) : heads_of(p.tv, p.dv, d.v);
    ggml_tensor * mask = p.mask ? b.input(GGML_TYPE_F16, { p.n_kv, p.tokens, 1, p.one_mask ? 1 : p.seqs }, d.mask) : nullptr;
    ggml_tensor * out = ggml_flash_attn_ext(b.ctx, q, k, v, mask, 1.0f/sqrtf(float(p.dk)), p.max_bias, p.softcap);
    if (p.sinks) {
        ggml_flash_attn_ext_add_sinks(out, b.input(GGML_TYPE_F32, { heads }, d.sinks));
    }
    ggml_prec_set_acc(out, GGML_PREC_F32);
    if (p.n_window) {
        auto rows_of = [&](const ggml_type type, const int dim, const bytes & data) {
            ggml_tensor * t = b.input(type, { int64_t(dim)*p.heads_kv, p.n_window, p.seqs }, data);
            t = ggml_view_4d(b.ctx, t, dim, p.heads_kv, p.n_window, p.seqs, ggml_row_size(type, dim), t->nb[1], t->nb[2], 0);
            return ggml_permute(b.ctx, t, 0, 2, 1, 3);
        };
        out->src[9]  = rows_of(kvq_window_type(p.tk), p.dk, d.k16);
        out->src[10] = rows_of(kvq_window_type(p.tv), p.dv, d.v16);
        out->src[11] = b.input(GGML_TYPE_F16, { p.n_window, p.tokens, 1, p.one_mask ? 1 : p.seqs }, d.mask16);
    }
    if (p.n_rot) {
        out->src[5] = ggml_permute(b.ctx, b.input(GGML_TYPE_F32, { p.dk, heads, p.tokens, p.seqs }, d.bias_q), 0, 2, 1, 3);
        out->src[6] = b.input(GGML_TYPE_F32, { p.dk, p.heads_kv }, d.bias);
        out->src[7] = b.input(GGML_TYPE_F32, { p.n_rot, 256 + TRIG_STEPS }, d.trig);
        out->src[8] = b.input(GGML_TYPE_I32, { p.n_kv + p.n_window, p.seqs }, d.pos);
        ((int32_t *) out->op_params)[8] = p.interleaved;
        kvq_set_bias_pairs(out, pairs_of(p));
    }
    return out;
}

static void check_attention(const attention & p) {
    if (!mine(p.products())) {
        return;
    }
    const attention_data d = make_data(p);
    auto build = [&](graph_build & b, ggml_tensor **) { return build_attention(p, d, b); };
    const bytes a = compute(gpu, build), b = compute(cpu, build);
    const double e = relative_error(a, b);
    // int8 products with 16-bit queries and weights stay below 1e-3, the f16 tiles of larger batches and mixed types below 1e-2
    // (2e-3 with a window or a bias, whose products are of f16)
    const bool decode = p.tokens*p.gqa <= 32 && kvq_is_cache_type(p.tk) && kvq_value_type(p.tk) == p.tv && (!p.n_rot || p.dk == 64 || p.dk == 128);
    const double limit = !decode ? 1e-2 : p.n_window || p.n_rot ? 2e-3 : 1e-3;
    char s[64];
    snprintf(s, sizeof(s), "error %.2e above %.0e: ", e, limit);
    report(e < limit, s + text(p));
}

// A step of decoding: K and V of a new token are written, to the window too if there is one, and attention reads them in the
// launch that follows.
static void check_write_and_attention(const attention & p) {
    if (!mine(p.products())) {
        return;
    }
    const attention_data d = make_data(p);
    const bytes row = gaussian(size_t(p.dk)*p.heads_kv, 3.0f);
    bytes index(8), index16(8), mask(size_t(2)*p.n_kv, 0);
    *(int64_t *) index.data() = p.n_kv - 2;
    *(int64_t *) index16.data() = p.n_window - 7;
    if (p.n_window) {       // the written cell is read from the window
        ((ggml_fp16_t *) mask.data())[p.n_kv - 2] = ggml_fp32_to_fp16(-INFINITY);
    }
    auto build = [&](graph_build & b, ggml_tensor **) {
        ggml_tensor * cache[2], * heads[2];
        const bytes * data[2] = { &d.k, &d.v };
        const ggml_type type[2] = { p.tk, p.tv };
        ggml_tensor * q = ggml_permute(b.ctx, b.input(GGML_TYPE_F32, { p.dk, p.heads_kv*p.gqa, 1 }, d.q), 0, 2, 1, 3);
        ggml_tensor * at = b.input(GGML_TYPE_I64, { 1 }, index);
        for (int i = 0; i < 2; ++i) {
            cache[i] = b.input(type[i], { int64_t(p.dk)*p.heads_kv, p.n_kv + 2 }, *data[i]);
            ggml_build_forward_expand(b.graph, ggml_set_rows(b.ctx, cache[i], b.input(GGML_TYPE_F32, { int64_t(p.dk)*p.heads_kv, 1 }, row), at));
            heads[i] = ggml_view_3d(b.ctx, cache[i], p.dk, p.heads_kv, p.n_kv, ggml_row_size(type[i], p.dk), cache[i]->nb[1], 0);
            heads[i] = ggml_permute(b.ctx, heads[i], 0, 2, 1, 3);
        }
        ggml_tensor * heads16[2] = {};
        const bytes * data16[2] = { &d.k16, &d.v16 };
        ggml_tensor * at16 = p.n_window ? b.input(GGML_TYPE_I64, { 1 }, index16) : nullptr;
        for (int i = 0; i < 2 && p.n_window; ++i) {
            const ggml_type t = kvq_window_type(type[i]);
            ggml_tensor * rows = b.input(t, { int64_t(p.dk)*p.heads_kv, p.n_window }, *data16[i]);
            ggml_build_forward_expand(b.graph, ggml_set_rows(b.ctx, rows, b.input(GGML_TYPE_F32, { int64_t(p.dk)*p.heads_kv, 1 }, row), at16));
            heads16[i] = ggml_permute(b.ctx, ggml_view_3d(b.ctx, rows, p.dk, p.heads_kv, p.n_window, ggml_row_size(t, p.dk), rows->nb[1], 0), 0, 2, 1, 3);
        }
        ggml_tensor * out = ggml_flash_attn_ext(b.ctx, q, heads[0], heads[1], p.n_window ? b.input(GGML_TYPE_F16, { p.n_kv, 1 }, mask) : nullptr,
            1.0f/sqrtf(float(p.dk)), 0.0f, 0.0f);
        if (p.n_window) {
            out->src[9]  = heads16[0];
            out->src[10] = heads16[1];
            out->src[11] = b.input(GGML_TYPE_F16, { p.n_window, 1 }, d.mask16);
        }
        ggml_prec_set_acc(out, GGML_PREC_F32);
        return out;
    };
    const double e = relative_error(compute(gpu, build), compute(cpu, build));
    char s[64];
    snprintf(s, sizeof(s), "error %.2e after a write: ", e);
    report(e < (p.n_window ? 2e-3 : 1e-3), s + text(p));
}

static const int OSCAR2 = 5;       // in place of bits

static ggml_type member(const int bits, const int d) {
    return kvq_type_for_head(bits == 2 ? GGML_TYPE_TURBO2_128 : bits == 3 ? GGML_TYPE_TURBO3_128 : bits == 4 ? GGML_TYPE_TURBO4_128 : GGML_TYPE_OSCAR2_128, d);
}
static ggml_type type_of(const int store, const int d) {
    return store == 16 ? GGML_TYPE_F16 : store == 8 ? GGML_TYPE_Q8_0 : member(store, d);
}

// Calibrated transforms as libllama builds them: keys minus a mean times a matrix, queries times another.
struct transform {
    int d, heads_kv, gqa, tokens;
    bool mean, marked;
};

struct transform_data { bytes q, k, mean, q_in, k_in; };

static transform_data make_data(const transform & p) {
    return { gaussian(size_t(p.d)*p.heads_kv*p.gqa*p.tokens, 2.0f), gaussian(size_t(p.d)*p.heads_kv*p.tokens, 2.0f), gaussian(size_t(p.d)*p.heads_kv, 1.0f),
        cache_data(GGML_TYPE_F16, p.d, int64_t(p.d)*p.heads_kv), cache_data(GGML_TYPE_F16, p.d, int64_t(p.d)*p.heads_kv) };
}

// of q [d, heads, tokens] and k; returns the queries, *keys are the keys
static ggml_tensor * build_transform(const transform & p, const transform_data & d, graph_build & b, ggml_tensor * q, ggml_tensor * k, ggml_tensor ** keys) {
    const int64_t n = p.d, heads = p.heads_kv;
    auto product = [&](const bytes & matrix, ggml_tensor * x, const int mark) {
        ggml_tensor * y = ggml_mul_mat(b.ctx, b.input(GGML_TYPE_F16, { n, n, heads }, matrix), x);
        ggml_prec_set_acc(y, GGML_PREC_F32);
        y->op_params[KVQ_PRODUCT_PARAM] = p.marked ? mark : 0;
        return y;
    };
    ggml_tensor * centred = p.mean ? ggml_sub(b.ctx, k, b.input(GGML_TYPE_F32, { n, heads }, d.mean)) : k;
    ggml_tensor * kt = product(d.k_in, ggml_permute(b.ctx, centred, 0, 2, 1, 3), KVQ_PRODUCT_KEYS);
    kt = p.tokens == 1 || heads == 1 ? ggml_reshape_3d(b.ctx, kt, n, heads, p.tokens) : ggml_cont(b.ctx, ggml_permute(b.ctx, kt, 0, 2, 1, 3));
    ggml_tensor * x = p.tokens == 1 ? ggml_reshape_3d(b.ctx, q, n, p.gqa, heads) : ggml_permute(b.ctx, q, 0, 2, 1, 3);
    ggml_build_forward_expand(b.graph, x);
    ggml_build_forward_expand(b.graph, kt);
    *keys = kt;
    ggml_tensor * y = product(d.q_in, x, KVQ_PRODUCT_QUERIES);
    y->src[2] = kt;     // nothing that the products read is overwritten before the last of them
    y->src[3] = k;
    return y;
}

static ggml_tensor * build_transform(const transform & p, const transform_data & d, graph_build & b, ggml_tensor ** keys) {
    ggml_tensor * k = b.input(GGML_TYPE_F32, { p.d, p.heads_kv, p.tokens }, d.k), * q = b.input(GGML_TYPE_F32, { p.d, int64_t(p.heads_kv)*p.gqa, p.tokens }, d.q);
    return build_transform(p, d, b, q, k, keys);
}

static void check_transform(const transform & p) {
    if (!mine()) {
        return;
    }
    const transform_data d = make_data(p);
    for (const bool of_keys : { true, false }) {
        auto build = [&](graph_build & b, ggml_tensor ** watch) {
            ggml_tensor * keys = nullptr, * q = build_transform(p, d, b, &keys);
            *watch = of_keys ? keys : q;
            return q;
        };
        const double e = relative_error(compute(gpu, build), compute(cpu, build));
        char s[160];
        snprintf(s, sizeof(s), "error %.2e: transformed %s d %d kv heads %d gqa %d tokens %d%s", e, of_keys ? "keys" : "queries", p.d, p.heads_kv, p.gqa, p.tokens,
            p.mean ? " mean" : "");
        report(e < 1e-3, s);      // the CPU rounds what it multiplies with f16 to f16
    }
}

static void check_transforms(const bool quick) {
    for (const int d : { 128, 64, 80, 256 }) {
        for (const int tokens : { 1, 2, 8 }) {
            check_transform({ d, 8, 4, tokens, true, true });
            if (!quick) {
                check_transform({ d, 1, 3, tokens, true, true });
                check_transform({ d, 3, 1, tokens, false, true });
            }
        }
    }
}

static attention P(const int k, const int v, const int d, const int heads_kv, const int gqa, const int tokens, const int seqs, const int n_kv) {
    attention p;
    p.tk = type_of(k, d); p.tv = type_of(v, d); p.dk = p.dv = d; p.heads_kv = heads_kv; p.gqa = gqa; p.tokens = tokens; p.seqs = seqs; p.n_kv = n_kv;
    return p;
}

// A layer's step of decoding as libllama builds it: norm and RoPE of queries and keys, their calibrated transforms, what is written to the cache and to the
// f16 window, and attention. Nodes of the first parts stand where launches join them, or as upstream has them.
struct step {
    int  k, v, d, heads_kv, gqa, tokens;
    bool norm = true, neox = true, factors = false, yarn = false;
    int  n_dims = 0;                    // values that turn; 0: all
    bool window = false, transform = false, attends = false;
    bool kept = false;                  // turned queries and keys have other readers
    bool one_product = false;           // Q, K and V are parts of one tensor
    bool own_memory = false;            // a tensor each, instead of a graph's memory
    bool apart = false;                 // the order of upstream
};

struct step_data { bytes qkv, weight[2], pos, factors, k, v, k16, v16, index, index16, mask, mask16; transform_data transform; };

static const int STEP_CELLS = 256, STEP_WINDOW = 64;

static step_data make_data(const step & p, const ggml_type tk, const ggml_type tv) {
    const int64_t row = int64_t(p.d)*p.heads_kv;
    step_data d;
    d.qkv = gaussian(size_t(row)*(p.gqa + 2)*p.tokens, 2.0f);
    for (bytes & w : d.weight) { w = gaussian(p.d, 1.0f); }
    d.factors = gaussian(p.d/2, 0.3f);
    for (int i = 0; i < p.d/2; ++i) { ((float *) d.factors.data())[i] = 1.5f + std::abs(((float *) d.factors.data())[i]); }
    d.pos.resize(size_t(4)*p.tokens);
    d.index.resize(size_t(8)*p.tokens);
    d.index16.resize(size_t(8)*p.tokens);
    for (int i = 0; i < p.tokens; ++i) {                // of several sequences
        ((int32_t *) d.pos.data())[i] = 100 + 371*i % 1000;
        ((int64_t *) d.index.data())[i] = (31*i + 17) % STEP_CELLS;
        ((int64_t *) d.index16.data())[i] = (7*i + 3) % STEP_WINDOW;
    }
    d.k   = cache_data(tk, row, STEP_CELLS + 2);
    d.v   = cache_data(tv, row, STEP_CELLS + 2);
    d.k16 = cache_data(kvq_window_type(tk), row, STEP_WINDOW);
    d.v16 = cache_data(kvq_window_type(tv), row, STEP_WINDOW);
    d.mask.assign(size_t(2)*STEP_CELLS*p.tokens, 0);
    d.mask16.assign(size_t(2)*STEP_WINDOW*p.tokens, 0);
    if (p.transform) {
        d.transform = make_data(transform { p.d, p.heads_kv, p.gqa, p.tokens, true, true });
    }
    return d;
}

struct step_nodes { ggml_tensor * q, * k, * cache[4], * out; };     // queries and keys as attention and the cache get them; K, V and their windows

static step_nodes build_step(const step & p, const step_data & d, const ggml_type tk, const ggml_type tv, graph_build & b) {
    const int64_t n = p.d, heads = p.heads_kv, heads_q = heads*p.gqa, tokens = p.tokens, row = n*heads;
    ggml_context * ctx = b.ctx;
    step_nodes out = {};
    // what products give: a node, whose memory is free once it is read
    ggml_tensor * qkv = ggml_scale(ctx, b.input(GGML_TYPE_F32, { n*(heads_q + 2*heads), tokens }, d.qkv), 0.5f);
    auto product = [&](const int64_t n_head, const int64_t first) {
        ggml_tensor * x = ggml_view_3d(ctx, qkv, n, n_head, tokens, n*sizeof(float), qkv->nb[1], first*n*sizeof(float));
        return p.one_product ? x : ggml_reshape_3d(ctx, ggml_scale(ctx, ggml_cont_2d(ctx, x, n*n_head, tokens), 1.0f), n, n_head, tokens);
    };
    ggml_tensor * q = product(heads_q, 0), * k = product(heads, heads_q), * v = product(heads, heads_q + heads);
    if (!p.apart) {
        for (ggml_tensor * t : { q, k, v }) { ggml_build_forward_expand(b.graph, t); }
    }
    ggml_tensor * pos = b.input(GGML_TYPE_I32, { tokens }, d.pos), * factors = p.factors ? b.input(GGML_TYPE_F32, { n/2 }, d.factors) : nullptr;
    auto turned = [&](ggml_tensor * x, const bytes & weight) {
        x = p.norm ? ggml_mul(ctx, ggml_rms_norm(ctx, x, 1e-6f), b.input(GGML_TYPE_F32, { n }, weight)) : x;
        x = ggml_rope_ext(ctx, x, pos, factors, p.n_dims ? p.n_dims : p.d, p.neox ? GGML_ROPE_TYPE_NEOX : GGML_ROPE_TYPE_NORMAL, 128, 10000.0f,
            p.yarn ? 0.25f : 1.0f, p.yarn ? 1.0f : 0.0f, p.yarn ? 1.2f : 1.0f, 32.0f, 1.0f);
        if (p.kept) {
            ggml_set_output(x);
        }
        return x;
    };
    ggml_tensor * const products[2] = { q, k };
    q = turned(q, d.weight[0]);
    if (p.apart) {
        ggml_build_forward_expand(b.graph, q);
        ggml_build_forward_expand(b.graph, v);
    }
    k = turned(k, d.weight[1]);
    out.q = q;
    out.k = k;
    if (p.transform) {
        const transform t = { p.d, p.heads_kv, p.gqa, p.tokens, true, true };
        q = build_transform(t, d.transform, b, q, k, &out.k);
        k = out.k;
        out.q = q;
        q->src[4] = products[0];
        q->src[5] = products[1];
        q->src[6] = pos;
        q = tokens == 1 ? ggml_reshape_3d(ctx, q, n, heads_q, 1) : ggml_permute(ctx, q, 0, 2, 1, 3);
    }
    ggml_build_forward_expand(b.graph, q);
    ggml_build_forward_expand(b.graph, v);
    ggml_build_forward_expand(b.graph, k);
    ggml_tensor * x[2] = { k, v }, * at = b.input(GGML_TYPE_I64, { tokens }, d.index), * at16 = p.window ? b.input(GGML_TYPE_I64, { tokens }, d.index16) : nullptr;
    const bytes * old[4] = { &d.k, &d.v, &d.k16, &d.v16 };
    ggml_tensor * heads_of[4] = {};
    for (int i = 0; i < (p.window ? 4 : 2); ++i) {
        const ggml_type cache = i % 2 ? tv : tk, type = i < 2 ? cache : kvq_window_type(cache);
        const int64_t cells = i < 2 ? STEP_CELLS : STEP_WINDOW;
        out.cache[i] = b.input(type, { row, i < 2 ? cells + 2 : cells }, *old[i]);
        ggml_build_forward_expand(b.graph, ggml_set_rows(ctx, out.cache[i], ggml_view_2d(ctx, x[i % 2], row, tokens, x[i % 2]->nb[2], 0), i < 2 ? at : at16));
        heads_of[i] = ggml_permute(ctx, ggml_view_3d(ctx, out.cache[i], n, heads, cells, ggml_row_size(type, n), out.cache[i]->nb[1], 0), 0, 2, 1, 3);
    }
    out.out = out.q;
    if (p.attends) {
        out.out = ggml_flash_attn_ext(ctx, ggml_permute(ctx, q, 0, 2, 1, 3), heads_of[0], heads_of[1], b.input(GGML_TYPE_F16, { STEP_CELLS, tokens }, d.mask),
            1.0f/sqrtf(float(n))/(p.transform ? n : 1), 0.0f, 0.0f);     // matrices of the test lengthen both, and one token would be all of the sum
        ggml_prec_set_acc(out.out, GGML_PREC_F32);
        if (p.window) {
            out.out->src[9]  = heads_of[2];
            out.out->src[10] = heads_of[3];
            out.out->src[11] = b.input(GGML_TYPE_F16, { STEP_WINDOW, tokens }, d.mask16);
        }
    }
    return out;
}

static std::string text(const step & p) {
    char s[256];
    snprintf(s, sizeof(s), "step %d/%d d %d kv heads %d gqa %d tokens %d%s%s%s%s turns %d%s%s%s%s%s%s%s", p.k, p.v, p.d, p.heads_kv, p.gqa, p.tokens, p.norm ? " norm" : "", p.neox ? " neox" : "",
        p.factors ? " factors" : "", p.yarn ? " yarn" : "", p.n_dims ? p.n_dims : p.d, p.window ? " window" : "", p.transform ? " transform" : "", p.attends ? " attention" : "",
        p.kept ? " kept" : "", p.one_product ? " one product" : "", p.own_memory ? " own memory" : "", p.apart ? " apart" : "");
    return s;
}

static std::vector<float> to_floats(const ggml_type type, const bytes & x) {
    std::vector<float> y(x.size()/ggml_type_size(type)*ggml_blck_size(type));
    if (type == GGML_TYPE_F32) {
        memcpy(y.data(), x.data(), x.size());
    } else {
        ggml_get_type_traits(type)->to_float(x.data(), y.data(), int64_t(y.size()));
    }
    return y;
}

// K as the CPU stores the keys that the GPU has made: those of the CPU are not quite the same, and a scale of a tier that falls to its neighbour is an error
// of 0.06 to 0.08 in a single row.
static bytes stored_keys(const step & p, const step_data & d, const ggml_type tk, const ggml_type tv) {
    const bytes keys = compute(gpu, [&](graph_build & b, ggml_tensor ** watch) {
        const step_nodes nodes = build_step(p, d, tk, tv, b);
        *watch = nodes.k;
        return nodes.out;
    }, !p.own_memory);
    return compute(cpu, [&](graph_build & b, ggml_tensor ** watch) {
        const int64_t row = int64_t(p.d)*p.heads_kv;
        *watch = b.input(tk, { row, STEP_CELLS + 2 }, d.k);
        return ggml_set_rows(b.ctx, *watch, b.input(GGML_TYPE_F32, { row, p.tokens }, keys), b.input(GGML_TYPE_I64, { p.tokens }, d.index));
    });
}

static void check_step(const step & p) {
    if (!mine()) {
        return;
    }
    const ggml_type tk = type_of(p.k, p.d), tv = type_of(p.v, p.d);
    const step_data d = make_data(p, tk, tv);
    const char * names[] = { "queries", "keys", "K", "V", "the window of K", "the window of V", "attention" };
    // turns differ by the GPU's sines, and a value between two levels takes the other one now and then
    const double limits[] = { p.transform ? 2e-3 : 1e-3, p.transform ? 2e-3 : 1e-3, p.transform ? 1e-2 : 6e-2, 0.0, 3e-3, 0.0, 3e-2 };
    for (int what = 0; what < 7; ++what) {
        const bool there = what < 2 ? what == 0 || p.kept : what < 4 || (what < 6 ? p.window : p.attends);
        if (!there) {
            continue;
        }
        ggml_type type = GGML_TYPE_F32;
        auto build = [&](graph_build & b, ggml_tensor ** watch) {
            const step_nodes nodes = build_step(p, d, tk, tv, b);
            *watch = what == 0 ? nodes.q : what == 1 ? nodes.k : what == 6 ? nodes.out : nodes.cache[what - 2];
            type = (*watch)->type;
            return nodes.out;
        };
        const bytes a = compute(gpu, build, !p.own_memory);
        const bytes b = what == 2 && p.transform ? stored_keys(p, d, tk, tv) : compute(cpu, build, !p.own_memory);
        const std::vector<float> x = to_floats(type, a), y = to_floats(type, b);
        const double e = a.empty() ? INFINITY : relative_error(x.data(), y.data(), x.size());
        char s[96];
        snprintf(s, sizeof(s), "error %.2e above %.0e: %s of ", e, limits[what], names[what]);
        report(e <= limits[what], s + text(p));
    }
}

static void check_steps(const bool quick) {
    auto with = [](step p, const std::function<void(step &)> & change) {
        change(p);
        check_step(p);
    };
    const step plain = { 3, 3, 128, 8, 4, 1 }, calibrated = [] { step p = { OSCAR2, 2, 128, 8, 4, 1 }; p.transform = p.window = true; return p; }();
    with(plain,      [](step & p) { p.window = p.attends = true; });
    with(plain,      [](step & p) { p.window = p.attends = p.apart = true; });
    with(plain,      [](step & p) { p.tokens = 3; p.norm = p.neox = false; p.factors = true; p.kept = true; });
    with(plain,      [](step & p) { p.tokens = 8; p.n_dims = 64; p.yarn = p.own_memory = p.kept = true; p.heads_kv = 2; });
    with(plain,      [](step & p) { p.d = 256; p.heads_kv = 1; p.tokens = 2; p.window = p.attends = true; });
    with(calibrated, [](step & p) { p.attends = true; });
    with(calibrated, [](step & p) { p.tokens = 3; p.norm = p.neox = false; p.factors = p.kept = p.own_memory = true; p.heads_kv = 2; });
    with(calibrated, [](step & p) { p.tokens = 8; p.n_dims = 64; p.yarn = true; p.heads_kv = 2; });
    if (quick) {
        return;
    }
    for (const int d : { 64, 80, 96, 112, 128, 192, 256, 512 }) {
        for (const int tokens : { 1, 3, 8, 9 }) {
            for (const bool neox : { false, true }) {
                for (const bool transform : { false, true }) {
                    const int bits = 2 + tokens % 3;
                    step p = { transform ? OSCAR2 : bits, transform ? 2 : bits, d, 2, 3, tokens };
                    p.neox = neox; p.transform = transform; p.attends = d == 128;
                    check_step(p);
                    p.window = p.factors = true; p.norm = false;   check_step(p);
                    p.kept = p.yarn = true; p.n_dims = d/2;        check_step(p);
                    p.own_memory = p.norm = true; p.n_dims = 24;   check_step(p);
                    p.kept = false; p.one_product = true;          check_step(p);
                    p.kept = true; p.own_memory = false;           check_step(p);
                    p.apart = true;                                check_step(p);
                }
            }
        }
    }
}

static void check_windows(const bool quick) {
    auto W = [](attention p, const int n_window) {
        p.n_window = n_window;
        check_attention(p);
    };
    for (const int n_kv : { 256, 896 }) {
        attention p = P(2, 2, 128, 8, 4, 1, 1, n_kv);
        p.n_window = 128;
        check_write_and_attention(p);
    }
    if (quick) {
        W(P(2, 2, 128, 8, 4, 1, 1, 256), 64);
        W(P(3, 3, 128, 8, 4, 2, 1, 896), 128);
        W(P(OSCAR2, 2, 128, 2, 3, 1, 2, 200), 192);
        W(P(4, 4, 128, 2, 4, 40, 1, 133), 64);
        W(P(2, 2, 96, 2, 4, 20, 1, 133), 64);
        return;
    }
    // the three decode kernels and the prefill kernels, one part hidden
    for (const int n_kv : { 200, 256, 576, 4096 }) {
        for (const int tokens : { 1, 2, 8, n_kv > 1000 ? 12 : 70 }) {
            for (const int s : { 2, 3, 4, OSCAR2 }) {
                attention p = P(s, s == OSCAR2 ? 2 : s, 128, 8, 4, tokens, 1, n_kv);
                W(p, 320);
                p.cache_hidden = true;                             W(p, 128);
                p.cache_hidden = false; p.window_hidden = true;    W(p, 128);
                p.cache_hidden = p.sinks = true;                   W(p, 64);      // nothing but sinks
            }
        }
    }
    for (const int n_window : { 64, 448, 1024, 1536, 2560 }) {
        for (const int tokens : { 1, 2, 4, 33 }) {
            W(P(2, 2, 128, 8, 4, tokens, 1, 512), n_window);
            W(P(3, 2, 64, 8, 2, tokens, 3, 640), n_window);
        }
    }
    for (const int d : { 64, 80, 96, 112, 128, 192, 256, 512 }) {
        for (const int tokens : { 1, 3, 8, 40, 130 }) {
            for (const int s : { 2, 3, 4, OSCAR2 }) {
                W(P(s, s == OSCAR2 ? 2 : s, d, 2, 2, tokens, 2, 261), 128);
            }
        }
    }
    for (const int k : { 2, 3, 4, OSCAR2, 8, 16 }) {
        for (const int v : { 2, 3, 4, 8, 16 }) {
            if (k != 8 && k != 16 ? true : v <= 4) {
                for (const int d : { 64, 128, 256 }) {
                    for (const int tokens : { 1, 20, 64 }) {
                        W(P(k, v, d, 2, 4, tokens, 1, 333), 192);
                    }
                }
            }
        }
    }
    for (const int gqa : { 1, 2, 3, 5, 7, 8, 12, 16 }) {
        for (const int tokens : { 1, 4, 8, 17 }) {
            W(P(2, 2, 128, 2, gqa, tokens, 1, 300), 128);
        }
    }
    for (const int tokens : { 1, 5, 50 }) {
        for (const int s : { 2, 3, OSCAR2 }) {
            attention p = P(s, s == OSCAR2 ? 2 : s, 128, 4, 4, tokens, 3, 400);
            p.sinks = true;                       W(p, 192);
            p.softcap = 15.0f;                    W(p, 192);
            p.sinks = false; p.one_mask = true;   W(p, 192);
            p.softcap = 0.0f; p.max_bias = 8.0f;  W(p, 192);
            p.max_bias = 0.0f; p.mask = false;    W(p, 192);
            attention x = P(s, s, 192, 2, 8, tokens, 1, 300);
            x.dv = 128; x.tv = member(s == OSCAR2 ? 2 : s, 128); W(x, 128);
        }
    }
}

static void check_biases(const bool quick) {
    auto B = [](attention p, const int n_rot, const int n_window, const int n_pairs = 0) {
        p.n_rot = n_rot; p.n_window = n_window; p.n_pairs = n_pairs;
        check_attention(p);
        p.places = p.NO_ORDER;
        p.interleaved = true;
        check_attention(p);
    };
    if (quick) {
        B(P(2, 2, 128, 8, 4, 1, 1, 256), 128, 64);
        B(P(3, 3, 64, 2, 7, 1, 1, 200), 64, 0);
        B(P(OSCAR2, 2, 128, 2, 6, 40, 1, 133), 128, 64);
        B(P(3, 3, 64, 2, 7, 1, 1, 200), 64, 64, 16);
        B(P(2, 2, 128, 2, 6, 1, 1, 256), 128, 0, 8);
        B(P(4, 4, 128, 2, 6, 40, 1, 133), 128, 64, 24);
        B(P(2, 2, 128, 8, 4, 2, 1, 640), 128, 64, 40);
        B(P(2, 2, 64, 2, 7, 20, 1, 133), 64, 64, 16);
        return;
    }
    // the shapes of Qwen2: 0.5B, 1.5B, 7B, 72B
    for (const int tokens : { 1, 2, 4, 8, 70 }) {
        for (const int s : { 2, 3, 4, OSCAR2 }) {
            for (const int n_window : { 0, 128 }) {
                const int v = s == OSCAR2 ? 2 : s;
                B(P(s, v,  64, 2, 7, tokens, 1, 777),  64, n_window);
                B(P(s, v, 128, 2, 6, tokens, 1, 777), 128, n_window);
                B(P(s, v, 128, 4, 7, tokens, 1, 640), 128, n_window);
                B(P(s, v, 128, 8, 8, tokens, 1, 640), 128, n_window);
                B(P(s, v, 128, 8, 4, tokens, 2, 640), 128, n_window);
            }
        }
    }
    for (const int d : { 64, 80, 96, 112, 128, 192, 256, 512 }) {
        for (const int tokens : { 1, 3, 40 }) {
            B(P(3, 3, d, 2, 2, tokens, 2, 261), std::min(d, 256), 64);
            B(P(OSCAR2, 2, d, 2, 3, tokens, 1, 261), d/2, 64);
            B(P(2, 16, d, 2, 2, tokens, 1, 261), 24, 64);
        }
    }
    // the kernels for 8 KV heads of whole tiles, and where tokens of several sequences stand between each other
    for (const int n_kv : { 64, 256, 512, 1024, 4096 }) {
        for (const int tokens : { 1, 2, 40 }) {
            for (const int s : { 2, 3, 4, OSCAR2 }) {
                for (const int n_pairs : { 16, 20, 0 }) {
                    attention p = P(s, s == OSCAR2 ? 2 : s, 128, 8, 4, tokens, n_kv > 1000 ? 1 : 2, n_kv);
                    p.n_rot = 128; p.n_pairs = n_pairs; p.n_window = n_kv == 256 ? 0 : 320;
                    p.places = p.IN_A_ROW;       check_attention(p);
                    p.places = p.FOUR_SEQUENCES; check_attention(p);
                    attention x = P(s, s == OSCAR2 ? 2 : s, 64, 8, 3, tokens, 1, n_kv);
                    x.n_rot = 64; x.n_pairs = n_pairs; x.places = x.FOUR_SEQUENCES; check_attention(x);
                }
            }
        }
    }
    // some of the pairs
    for (const int d : { 64, 96, 128, 256 }) {
        for (const int tokens : { 1, 2, 8, 40 }) {
            for (const int n_pairs : { 1, 3, 8, 16, 24, 32 }) {
                B(P(3, 3, d, 2, d == 64 ? 7 : 6, tokens, 1, 777), d, n_pairs % 16 ? 0 : 128, n_pairs);
                B(P(OSCAR2, 2, d, 2, 4, tokens, 2, 320), d, 64, n_pairs);
            }
        }
    }
    for (const int tokens : { 1, 5, 50 }) {
        attention p = P(3, 3, 128, 4, 4, tokens, 3, 400);
        p.sinks = true;                       B(p, 128, 128);
        p.softcap = 15.0f;                    B(p, 128, 128);
        p.sinks = false; p.one_mask = true;   B(p,  64, 128);
        p.softcap = 0.0f; p.max_bias = 8.0f;  B(p, 128, 0);
        p.max_bias = 0.0f; p.mask = false;    B(p, 128, 64);
        p.cache_hidden = p.mask = true;       B(p, 128, 64);
    }
}

// Every type's rows, and each option of attention once, in contexts of a few tiles.
static void check_host() {
    for (const ggml_type type : cache_types()) {
        check_rows(type);
    }
    check_rows(GGML_TYPE_TURBO_F16_64);
    check_four_writes(member(3, 96), member(4, 96));
    for (int gqa = 1; gqa <= 8; ++gqa) {
        const int s = 2 + gqa % 3;
        check_attention(P(s, s, gqa % 2 ? 64 : 128, 2, gqa, gqa < 5 ? 2 : 1, 1, 60 + 9*gqa));
    }
    for (const int tokens : { 1, 8 }) {       // the kernels of a cluster, and those of whole tiles
        for (const int n_kv : { 64, 1088 }) {
            check_attention(P(2, 2, 128, 8, 1, tokens, 1, n_kv));
            check_attention(P(4, 4,  64, 8, 1, tokens, 2, n_kv));
        }
    }
    for (const int tokens : { 1, 8, 64 }) {   // both kinds of decode kernels, prefill by mma.sync, by wgmma
        for (const int d : { 64, 128 }) {
            attention p = P(3, 3, d, 2, tokens == 8 ? 4 : 2, tokens, 1, 150);
            p.sinks = true;                       check_attention(p);
            p.softcap = 15.0f; p.seqs = 2;        check_attention(p);
            p.one_mask = true; p.n_window = 64;   check_attention(p);
            p.softcap = 0.0f; p.max_bias = 8.0f;  check_attention(p);
            p.max_bias = 0.0f; p.mask = false;    check_attention(p);
            p.mask = p.cache_hidden = true;       check_attention(p);
        }
    }
    check_attention(P(2, 16, 128, 1, 8, 40, 1, 130));
    check_attention(P(16, 4,  64, 1, 8, 40, 1, 130));
    check_attention(P(8, 3,  128, 1, 4, 100, 1, 200));
    check_attention(P(OSCAR2, 8, 128, 2, 4, 48, 1, 140));
    check_attention(P(3, 3, 256, 1, 4, 40, 1, 100));
    for (const int n_window : { 64, 192 }) {
        attention p = P(OSCAR2, 2, 128, 1, 4, 64, 1, 200);
        p.n_window = n_window;       check_attention(p);
        p.tk = p.tv = member(4, 64); p.dk = p.dv = 64; check_attention(p);
    }
}

static void check_all(const bool quick) {
    check_transforms(quick);
    check_steps(quick);
    if (quick) {
        check_rows(member(3, 128));
        check_rows(member(2, 80));
        for (const int s : { 2, 3, 4 }) {
            check_attention(P(s, s, 128, 8, 4, 1, 1, 200));
            check_attention(P(s, s, 128, 8, 4, 2, 1, 256));
            check_attention(P(s, s, 128, 8, 4, 1, 1, 896));
            check_write_and_attention(P(s, s, 128, 8, 4, 1, 1, 256));
            check_attention(P(s, s, 64, 3, 2, 3, 2, 131));
            check_attention(P(s, s, 128, 2, 4, 33, 1, 133));
        }
        check_attention(P(16, 3, 128, 2, 4, 1, 1, 100));
        check_attention(P(4, 8, 96, 1, 4, 1, 1, 100));
        check_rows(member(OSCAR2, 128));
        check_rows(member(OSCAR2, 80));
        check_attention(P(OSCAR2, 2, 128, 8, 4, 1, 1, 256));
        check_attention(P(OSCAR2, 2, 128, 8, 4, 1, 1, 896));
        check_attention(P(OSCAR2, 2, 80, 2, 4, 1, 1, 100));
        check_attention(P(OSCAR2, 3, 64, 2, 4, 40, 1, 200));
        attention p = P(3, 3, 256, 2, 4, 9, 1, 140);
        p.sinks = true;
        check_attention(p);
        check_rows(GGML_TYPE_TURBO_F16_128);
        check_four_writes(member(OSCAR2, 128), member(2, 128));
        check_windows(true);
        check_biases(true);
        return;
    }
    for (const ggml_type type : cache_types()) {
        check_rows(type);
    }
    for (const ggml_type type : window_types()) {
        check_rows(type);
        const int n = int(ggml_blck_size(type));
        check_four_writes(member(2, n), member(3, n));
        check_four_writes(member(OSCAR2, n), member(2, n));
        check_four_writes(member(4, n), member(4, n));
    }
    check_windows(false);
    check_biases(false);
    const int stores[] = { 2, 3, 4, 8, 16 };
    for (const int k : stores) {
        for (const int v : stores) {
            if (k > 4 && v > 4) {
                continue;
            }
            for (const int d : { 64, 128, 256, 96 }) {
                for (const int tokens : { 1, 3, 20, 64 }) {
                    check_attention(P(k, v, d, 2, 4, tokens, 1, 333));
                }
            }
        }
    }
    // oscar2 is a type of keys
    for (const int v : stores) {
        for (const int d : { 64, 128, 256, 96 }) {
            for (const int tokens : { 1, 3, 20, 64 }) {
                check_attention(P(OSCAR2, v, d, 2, 4, tokens, 1, 333));
            }
        }
    }
    for (const int d : { 64, 80, 96, 112, 128, 192, 256, 512 }) {
        for (const int tokens : { 1, 2, 8, 40 }) {
            check_attention(P(OSCAR2, 2, d, 2, 2, tokens, 2, 261));
        }
    }
    for (const int tokens : { 1, 20, 130 }) {
        for (const int d : { 64, 96, 112, 128 }) {
            check_attention(P(OSCAR2, 2, d, 2, 4, tokens, 1, 6000));
        }
    }
    for (const int n_kv : { 64, 256, 768, 832, 2048 }) {
        for (const int tokens : { 1, 2 }) {
            check_attention(P(OSCAR2, 2, 128, 8, 4, tokens, 2, n_kv));
            check_attention(P(OSCAR2, 3, 64, 8, 3, tokens, 1, n_kv));
            attention p = P(OSCAR2, 2, 128, 8, 3, tokens, 1, n_kv);
            p.sinks = true; p.softcap = 15.0f; check_attention(p);
        }
        check_write_and_attention(P(OSCAR2, 2, 128, 8, 4, 1, 1, n_kv));
    }
    for (const int s : { 2, 3, 4 }) {
        for (const int d : { 64, 80, 96, 112, 128, 192, 256, 512 }) {
            for (const int tokens : { 1, 2, 8, 40 }) {
                check_attention(P(s, s, d, 2, 2, tokens, 2, 261));
            }
        }
        // many tiles a block, under a mask that differs between them
        for (const int tokens : { 1, 20, 130 }) {
            for (const int d : { 64, 96, 128 }) {
                check_attention(P(s, s, d, 2, 4, tokens, 1, 6000));
                check_attention(P(16, s, d, 2, 4, tokens, 1, 6000));
                check_attention(P(s, 8, d, 2, 4, tokens, 1, 6000));
            }
        }
        for (const int gqa : { 1, 2, 3, 4, 5, 6, 7, 8, 12, 16 }) {
            for (const int tokens : { 1, 4, 17 }) {
                check_attention(P(s, s, 128, 2, gqa, tokens, 1, 300));
            }
        }
        for (const int tokens : { 1, 2, 3, 4, 8, 9, 17, 33, 512 }) {
            check_attention(P(s, s, 128, tokens > 100 ? 1 : 8, 4, tokens, 1, 700));
        }
        for (const int heads_kv : { 1, 3, 4, 5, 8, 10, 16 }) {
            check_attention(P(s, s, 128, heads_kv, 2, 1, 2, 500));
            check_attention(P(s, s, 64,  heads_kv, 1, 2, 1, 77));
        }
        for (const int n_kv : { 1, 2, 31, 63, 64, 65, 255, 256, 1025, 5000 }) {
            check_attention(P(s, s, 128, 8, 4, 1, 1, n_kv));
        }
        // whole tiles of 8 heads: the short and the linear kernel, one and two groups of rows
        for (const int n_kv : { 256, 768, 832, 2048 }) {
            for (const int tokens : { 1, 2 }) {
                check_attention(P(s, s, 128, 8, 4, tokens, 2, n_kv));
                check_attention(P(s, s == 3 ? 2 : 3, 64, 8, 3, tokens, 1, n_kv));
                attention p = P(s, s, 128, 8, 3, tokens, 1, n_kv);
                p.sinks = true; p.softcap = 15.0f; check_attention(p);
                p.mask = false; check_attention(p);
            }
            check_write_and_attention(P(s, s, 128, 8, 4, 1, 1, n_kv));
        }
        for (const int tokens : { 1, 5, 50 }) {
            attention p = P(s, s, 128, 4, 4, tokens, 3, 400);
            p.sinks = true;                       check_attention(p);
            p.softcap = 15.0f;                    check_attention(p);
            p.sinks = false; p.one_mask = true;   check_attention(p);
            p.softcap = 0.0f; p.max_bias = 8.0f;  check_attention(p);
            p.max_bias = 0.0f; p.mask = false;    check_attention(p);
            attention m = P(s, s, 64, 1, 16, tokens, 1, 300);
            m.dk = 576; m.dv = 512; m.v_is_k = true; check_attention(m);
            attention x = P(s, s, 192, 2, 8, tokens, 1, 300);
            x.dv = 128; x.tv = member(s, 128);    check_attention(x);
        }
    }
}

// ---- timing ----

static double seconds_of(const ggml_backend_t backend, const std::function<ggml_tensor * (graph_build &, int)> & build, const int copies, const int repeats) {
    ggml_context * ctx = ggml_init({ ggml_tensor_overhead()*4096 + ggml_graph_overhead_custom(4096, false), nullptr, true });
    ggml_cgraph * graph = ggml_new_graph_custom(ctx, 4096, false);
    graph_build b = { ctx, {}, graph };
    for (int i = 0; i < copies; ++i) {
        ggml_build_forward_expand(graph, build(b, i));
    }
    ggml_backend_buffer_t buffer = ggml_backend_alloc_ctx_tensors(ctx, backend);
    for (const tensor_data & t : b.inputs) {
        ggml_backend_tensor_set(t.tensor, t.data->data(), 0, t.data->size());
    }
    std::vector<double> times;
    for (int r = 0; r < repeats + 3; ++r) {
        const auto t0 = std::chrono::steady_clock::now();
        ggml_backend_graph_compute(backend, graph);
        ggml_backend_synchronize(backend);
        if (r >= 3) {
            times.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - t0).count()/copies);
        }
    }
    ggml_backend_buffer_free(buffer);
    ggml_free(ctx);
    std::sort(times.begin(), times.end());
    return times[times.size()/2];
}

static void time_attention(const ggml_type tk, const ggml_type tv, const int tokens, const int seqs, const int n_kv, const double copy_rate, const int n_window = 0, const int n_pairs = 0, const bool broken = false,
        const int heads_kv = 8, const int gqa = 4) {
    attention p;
    p.n_window = n_window; p.n_rot = n_pairs ? 128 : 0; p.n_pairs = n_pairs; p.places = broken ? p.ONE_BREAK : p.IN_A_ROW;
    p.tk = tk; p.tv = tv; p.dk = p.dv = 128; p.heads_kv = heads_kv; p.gqa = gqa; p.tokens = tokens; p.seqs = seqs; p.n_kv = n_kv;
    attention_data d;
    d.q = gaussian(size_t(p.dk)*heads_kv*gqa*tokens*seqs, 2.0f);
    // one random megatoken pattern repeated is enough for timing, and quick to make
    auto repeat = [&](const ggml_type type) {
        const bytes one = cache_data(type, 128*heads_kv, 1024);
        bytes all(ggml_row_size(type, 128*heads_kv)*size_t(n_kv + 2)*seqs);
        for (size_t at = 0; at < all.size(); at += one.size()) {
            memcpy(all.data() + at, one.data(), std::min(one.size(), all.size() - at));
        }
        return all;
    };
    d.k = repeat(tk);
    d.v = repeat(tv);
    d.mask.assign(size_t(2)*n_kv*tokens*seqs, 0);
    make_parts(p, d);
    const double bytes_read = double(ggml_row_size(tk, 128*heads_kv) + ggml_row_size(tv, 128*heads_kv))*n_kv*seqs;
    const int copies = tokens > 64 ? 1 : std::max(2, std::min(16, int(5e8/bytes_read)));
    const double s = seconds_of(gpu, [&](graph_build & b, int) { return build_attention(p, d, b); }, copies, tokens > 64 ? 5 : 15);
    printf("attention %-8s %-8s tokens %3d seqs %d n_kv %6d window %4d bias pairs %2d%s%s: %9.1f us %6.0f GB/s = %4.1f %% of copy %6.1f TFLOP/s\n", ggml_type_name(tk), ggml_type_name(tv), tokens, seqs, n_kv,
        n_window, n_pairs, broken ? " with a break" : "", heads_kv != 8 ? (", KV heads " + std::to_string(heads_kv) + " of " + std::to_string(gqa)).c_str() : "", s*1e6, bytes_read/s*1e-9, 100.0*bytes_read/s/copy_rate, 4.0*heads_kv*gqa*128*double(n_kv)*tokens*seqs/s*1e-12);
    fflush(stdout);
}

static double time_copy() {
    const bytes big(size_t(1) << 30, 1);
    const double copy = seconds_of(gpu, [&](graph_build & b, int) { return ggml_dup(b.ctx, b.input(GGML_TYPE_F32, { int64_t(1) << 28 }, big)); }, 2, 199);   // long enough for the clocks to rise
    const double rate = 2.0*double(big.size())/copy;
    printf("copy %.0f GB/s, read plus written\n", rate*1e-9);
    return rate;
}

static void time_bandwidth() {
    const double rate = time_copy();
    for (const ggml_type t : { GGML_TYPE_F16, GGML_TYPE_TURBO2_128, GGML_TYPE_TURBO3_128, GGML_TYPE_TURBO4_128, GGML_TYPE_OSCAR2_128 }) {
        time_attention(t, kvq_value_type(t), 1, 1, 131072, rate);
        time_attention(t, kvq_value_type(t), 1, 8, 32768, rate);
    }
}

// the products of a layer in one launch, and one by one
static void time_transforms() {
    for (const int tokens : { 1, 2, 8 }) {
        for (const bool marked : { false, true }) {
            const transform p = { 128, 8, 4, tokens, true, marked };
            const transform_data d = make_data(p);
            const double s = seconds_of(gpu, [&](graph_build & b, int) {
                ggml_tensor * keys;
                return build_transform(p, d, b, &keys);
            }, 64, 15);
            printf("transforms of 8 KV heads of 128, 32 query heads, tokens %d, %s: %6.2f us\n", tokens, marked ? "one launch" : "one by one", s*1e6);
        }
    }
}

// The launches of a layer from the products to attention at 256 tokens, joined and in upstream's order. Every layer's products are copies, a launch each.
static void time_steps() {
    for (const bool transform : { false, true }) {
        for (const int tokens : { 1, 2, 8 }) {
            for (const bool apart : { true, false }) {
                step p = { transform ? OSCAR2 : 3, transform ? 2 : 3, 128, 8, 4, tokens };
                p.window = p.attends = true; p.transform = transform; p.apart = apart;
                const ggml_type tk = type_of(p.k, p.d), tv = type_of(p.v, p.d);
                const step_data d = make_data(p, tk, tv);
                const double s = seconds_of(gpu, [&](graph_build & b, int) { return build_step(p, d, tk, tv, b).out; }, 16, 15);
                printf("a layer's step, %s, window %d, tokens %d, %s: %6.2f us\n", transform ? "oscar2 and turbo2 calibrated" : "turbo3", STEP_WINDOW, tokens, apart ? "apart" : "joined", s*1e6);
            }
        }
    }
}

// what an f16 window of 64 + 256 rows and a key bias add, in a quarter of the pairs and in all
static void time_parts() {
    const double rate = time_copy();
    const int parts[5][2] = { { 0, 0 }, { 320, 0 }, { 0, 16 }, { 320, 16 }, { 0, 64 } };
    for (const ggml_type t : { GGML_TYPE_TURBO2_128, GGML_TYPE_TURBO3_128, GGML_TYPE_TURBO4_128, GGML_TYPE_OSCAR2_128 }) {
        auto time_all_parts = [&](const int tokens, const int seqs, const int n_kv) {
            for (const auto & part : parts) {
                time_attention(t, kvq_value_type(t), tokens, seqs, n_kv, rate, part[0], part[1]);
            }
            time_attention(t, kvq_value_type(t), tokens, seqs, n_kv, rate, 0, 16, true);
        };
        for (const int n_kv : { 256, 4096, 32768, 131072 }) {
            time_all_parts(1, 1, n_kv);
        }
        time_all_parts(1, 8, 32768);
        time_all_parts(512, 1, 32768);
        for (const int n_kv : { 32768, 131072 }) {      // Qwen2.5 7B
            for (const int n_pairs : { 0, 16 }) {
                time_attention(t, kvq_value_type(t), 1, 1, n_kv, rate, 0, n_pairs, false, 4, 7);
            }
        }
    }
}

static void time_all() {
    const double rate = time_copy();
    time_transforms();
    time_steps();
    const ggml_type types[] = { GGML_TYPE_F16, GGML_TYPE_Q8_0, GGML_TYPE_Q4_0, GGML_TYPE_TURBO2_128, GGML_TYPE_TURBO3_128, GGML_TYPE_TURBO4_128, GGML_TYPE_OSCAR2_128 };
    for (const int n_kv : { 256, 4096, 32768, 131072 }) {
        for (const ggml_type t : types) {
            time_attention(t, kvq_value_type(t), 1, 1, n_kv, rate);
        }
    }
    for (const int tokens : { 2, 4, 8, 512 }) {
        for (const ggml_type t : types) {
            time_attention(t, kvq_value_type(t), tokens, 1, 32768, rate);
        }
    }
    for (const ggml_type t : types) {
        time_attention(t, kvq_value_type(t), 1, 8, 32768, rate);
    }
    for (const int rows : { 1, 512 }) {
        const bytes x = gaussian(size_t(1024)*rows, 1.0f);
        bytes index(size_t(8)*rows);
        for (int i = 0; i < rows; ++i) { ((int64_t *) index.data())[i] = 3*i; }
        for (const ggml_type t : types) {
            const double s = seconds_of(gpu, [&](graph_build & b, int) {
                ggml_tensor * table = ggml_new_tensor_2d(b.ctx, t, 1024, 4096);
                return ggml_set_rows(b.ctx, table, b.input(GGML_TYPE_F32, { 1024, rows }, x), b.input(GGML_TYPE_I64, { rows }, index));
            }, 32, 15);
            printf("SET_ROWS %-8s rows %3d: %6.2f us\n", ggml_type_name(t), rows, s*1e6);
        }
    }
}

int main(int argc, char ** argv) {
    std::string mode;
    for (int i = 1; i < argc; ++i) {
        const std::string argument = argv[i], value = i + 1 < argc ? argv[i + 1] : "";
        if (argument == "--part" && sscanf(value.c_str(), "%d/%d", &part, &parts) == 2 && part >= 1 && part <= parts) {
            i++;
        } else if (argument == "--most" && (most = atof(value.c_str())) > 0.0) {
            i++;
        } else if (mode.empty() && argument[0] != '-') {
            mode = argument;
        } else {
            printf("%s %s: the first lines of this program's source tell what it takes; --part 1/8 is the first of eight parts\n", argument.c_str(), value.c_str());
            return 2;
        }
    }
    ggml_backend_dev_t device = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_GPU);
    if (!device) {
        printf("no GPU\n");
        return 77;
    }
    gpu = ggml_backend_dev_init(device, nullptr);
    cpu = ggml_backend_cpu_init();
    ggml_backend_cpu_set_n_threads(cpu, int(std::max(1u, std::thread::hardware_concurrency()/parts)));
    ggml_backend_cpu_set_use_ref(cpu, true);
    printf("%s against %s\n", ggml_backend_dev_description(device), ggml_backend_name(cpu));
    if (mode == "time") {
        time_all();
    } else if (mode == "parts") {
        time_parts();
    } else if (mode == "bandwidth") {
        time_bandwidth();
    } else {
        if (mode == "host") {
            check_host();
        } else if (mode == "steps") {
            check_steps(false);
        } else {
            check_all(mode == "quick");
        }
        printf("%d checks, %d failures\n", checks, failures);
    }
    ggml_backend_free(gpu);
    ggml_backend_free(cpu);
    return failures != 0;
}
