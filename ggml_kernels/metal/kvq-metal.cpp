// What ggml asks of the Metal kernels of the cache types: which operations are ours, which run here, and encoding them.
#include "kvq-metal.h"

#include "ggml-backend-impl.h"
#include "ggml-impl.h"
#include "kvq-bias-pairs.h"
#include "kvq.h"
#include "kvq-metal-source.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "kvq-metal-impl.h"

// Query rows of a KV head up to which the decode kernel runs: it unpacks a tile once for 8 of them, prefill once for 32.
static constexpr int DECODE_ROWS = 16;

static int store_of(const ggml_type type) {
    return kvq_code(type) == KVQ_TIERED ? KVQ_STORE_OSCAR2 : kvq_bits(type) > 0 ? kvq_bits(type) : kvq_is_window_type(type) ? KVQ_STORE_TURBO_F16
         : type == GGML_TYPE_Q8_0 ? KVQ_STORE_Q8_0 : type == GGML_TYPE_F16 ? KVQ_STORE_F16 : 0;
}

static bool is_ours(const ggml_type type) { return kvq_is_cache_type(type) || kvq_is_window_type(type); }

bool kvq_metal_owns(const ggml_tensor * op) {
    switch (op->op) {
        case GGML_OP_FLASH_ATTN_EXT:
            return kvq_is_cache_type(op->src[1]->type) || kvq_is_cache_type(op->src[2]->type);
        case GGML_OP_SET_ROWS:
            return is_ours(op->type);
        case GGML_OP_GET_ROWS:
        case GGML_OP_CPY:
        case GGML_OP_DUP:
        case GGML_OP_CONT:
            return is_ours(op->type) || is_ours(op->src[0]->type);
        default:
            return false;
    }
}

// ---- libraries and pipelines ----

// Compiled from source on first use, for each device; kept until the process ends, as the device is.
static ggml_metal_library_t library_of(const ggml_metal_device_t dev, const kvq_metal_library which) {
    static std::mutex mutex;
    static std::map<std::pair<ggml_metal_device_t, int>, ggml_metal_library_t> libraries;
    std::lock_guard<std::mutex> lock(mutex);
    const auto found = libraries.find({ dev, which });
    if (found != libraries.end()) {
        return found->second;
    }
    return libraries[{ dev, which }] = ggml_metal_library_init_from_source(dev, kvq_metal_sources[which], true);
}

typedef std::vector<std::pair<int, int>> constants;     // index and value

// pipeline is null when the kernels do not compile on this device
static ggml_metal_pipeline_with_params pipeline_of(const ggml_metal_device_t dev, const kvq_metal_library which, const std::string & base, const constants & values) {
    const ggml_metal_library_t library = library_of(dev, which);
    if (!library) {
        return {};
    }
    std::string name = base;
    for (const auto & v : values) {
        name += "_" + std::to_string(v.first) + "=" + std::to_string(v.second);
    }
    ggml_metal_pipeline_with_params pipeline = ggml_metal_library_get_pipeline(library, name.c_str());
    if (!pipeline.pipeline) {
        ggml_metal_cv_t cv = ggml_metal_cv_init();
        for (const auto & v : values) {
            if (v.first == KVQ_FC_MASK || v.first == KVQ_FC_SOFTCAP || v.first == KVQ_FC_SLOPE || v.first == KVQ_FC_WINDOW || v.first == KVQ_FC_SINKS || v.first == KVQ_FC_HALF) {
                ggml_metal_cv_set_bool(cv, v.second != 0, v.first);
            } else {
                ggml_metal_cv_set_int32(cv, v.second, v.first);
            }
        }
        pipeline = ggml_metal_library_compile_pipeline(library, base.c_str(), name.c_str(), cv);
        ggml_metal_cv_free(cv);
    }
    return pipeline;
}

static ggml_metal_buffer_id buffer_of(const ggml_tensor * t) {
    const ggml_backend_buffer_t buffer = t->view_src ? t->view_src->buffer : t->buffer;
    return ggml_metal_buffer_get_id((ggml_metal_buffer_t) buffer->context, t);
}

// ---- attention ----

struct head_sizes { int dk, dv, n, nv, decode_rows, prefill_rows, chunk; };

// what kvq-decode.metal and kvq-prefill.metal instantiate
static const head_sizes HEAD_SIZES[] = {
    {  64,  64,  64,  64, 8, 32,  64 }, {  80,  80,  80,  80, 8, 32,  80 }, {  96,  96,  96,  96, 8, 32,  96 }, { 112, 112, 112, 112, 8, 32, 112 },
    { 128, 128, 128, 128, 8, 32, 128 }, { 192, 192,  64,  64, 4, 32,  64 }, { 192, 128,  64, 128, 4, 32, 128 }, { 256, 256, 128, 128, 4, 16, 128 },
    { 512, 512, 128, 128, 2,  8, 128 }, { 576, 512,  64,  64, 2,  8, 192 },
};

static const head_sizes * sizes_of(const ggml_tensor * op) {
    for (const head_sizes & s : HEAD_SIZES) {
        if (op->src[1]->ne[0] == s.dk && op->src[2]->ne[0] == s.dv) {
            return &s;
        }
    }
    return nullptr;
}

static kvq_metal_part part_of(const ggml_tensor * k, const ggml_tensor * v, const ggml_tensor * mask) {
    kvq_metal_part p = {};
    if (k) {
        p.n    = int32_t(k->ne[1]);
        p.nbk1 = k->nb[1];  p.nbk2 = k->nb[2];  p.nbk3 = k->nb[3];
        p.nbv1 = v->nb[1];  p.nbv2 = v->nb[2];  p.nbv3 = v->nb[3];
    }
    p.nem3 = mask ? int32_t(mask->ne[3]) : 1;
    p.nbm1 = mask ? mask->nb[1] : 0;
    p.nbm3 = mask ? mask->nb[3] : 0;
    return p;
}

// cosines and sines of the pairs that carry a key bias, in whole matrices of the prefill kernel
static int rot_of(const ggml_tensor * op) {
    uint8_t pairs[KVQ_BIAS_PAIRS_MAX];
    return (2*kvq_bias_pairs(op, pairs) + 7)/8*8;
}

static bool is_decode(const ggml_tensor * op) { return op->src[0]->ne[1]*(op->src[0]->ne[2]/op->src[1]->ne[2]) <= DECODE_ROWS; }

// Parts along the context: two tiles or more for every simdgroup, at most 32.
static int splits_of(const ggml_tensor * op) {
    auto tiles = [](const ggml_tensor * k) { return k ? (k->ne[1] + KVQ_TILE - 1)/KVQ_TILE : 0; };
    return int(std::clamp<int64_t>((tiles(op->src[1]) + tiles(op->src[9]))/(2*KVQ_SIMDGROUPS), 1, 32));
}

static kvq_metal_args args_of(const ggml_tensor * op) {
    const ggml_tensor * q = op->src[0], * k = op->src[1];
    kvq_metal_args a = {};
    a.n_tok     = int32_t(q->ne[1]);
    a.n_head    = int32_t(q->ne[2]);
    a.n_seq     = int32_t(q->ne[3]);
    a.n_head_kv = int32_t(k->ne[2]);
    a.gqa       = a.n_head/a.n_head_kv;
    a.n_split   = splits_of(op);
    a.nbq1 = q->nb[1];  a.nbq2 = q->nb[2];  a.nbq3 = q->nb[3];
    float max_bias = 0.0f;
    memcpy(&a.scale,   (const float *) op->op_params + 0, sizeof(float));
    memcpy(&max_bias,  (const float *) op->op_params + 1, sizeof(float));
    memcpy(&a.softcap, (const float *) op->op_params + 2, sizeof(float));
    if (a.softcap != 0.0f) {
        a.scale /= a.softcap;
    }
    a.n_head_log2 = 1 << int(floorf(log2f(float(a.n_head))));
    a.m0 = powf(2.0f, -max_bias/float(a.n_head_log2));
    a.m1 = powf(2.0f, -max_bias/2.0f/float(a.n_head_log2));
    a.part[0] = part_of(k, op->src[2], op->src[3]);
    a.part[1] = part_of(op->src[9], op->src[10], op->src[11]);
    a.part[1].first = a.part[0].n;
    if (const ggml_tensor * bias_q = op->src[5]) {
        const ggml_tensor * trig = op->src[7], * pos = op->src[8];
        a.bias.steps = int32_t(trig->ne[1] - 256);
        a.bias.seqs  = int32_t(q->ne[3]/pos->ne[1]);
        a.bias.interleaved = op->op_params[8] != 0;
        a.bias.all = int32_t(trig->ne[0]/2);
        a.bias.n   = kvq_bias_pairs(op, a.bias.pair);
        a.bias.nbq1 = bias_q->nb[1];  a.bias.nbq2 = bias_q->nb[2];  a.bias.nbq3 = bias_q->nb[3];
        a.bias.nbb1 = op->src[6]->nb[1];
        a.bias.nbt1 = trig->nb[1];
        a.bias.nbp1 = pos->nb[1];
    }
    return a;
}

// the kernels of one attention operation and how they are launched
struct attention_plan {
    kvq_metal_args args;
    ggml_metal_pipeline_with_params attention, combine;         // combine: decode alone
    int rows;
    size_t bytes;                                               // of threadgroup memory
};

static attention_plan plan_of(const ggml_metal_device_t dev, const ggml_tensor * op) {
    const head_sizes & s = *sizes_of(op);
    attention_plan p = {};
    p.args = args_of(op);
    const std::string heads = std::to_string(s.dk) + "_" + std::to_string(s.dv);
    const int n_rows = p.args.gqa*p.args.n_tok;
    const bool decode = is_decode(op);
    float max_bias;
    memcpy(&max_bias, (const float *) op->op_params + 1, sizeof(float));
    constants values = { { KVQ_FC_K_STORE, store_of(op->src[1]->type) }, { KVQ_FC_V_STORE, store_of(op->src[2]->type) }, { KVQ_FC_MASK, op->src[3] != nullptr },
                         { KVQ_FC_SOFTCAP, p.args.softcap != 0.0f }, { KVQ_FC_SLOPE, max_bias > 0.0f }, { KVQ_FC_WINDOW, op->src[9] != nullptr },
                         { KVQ_FC_ROT, rot_of(op) } };
    if (decode) {
        p.args.row_groups = (n_rows + s.decode_rows - 1)/s.decode_rows;
        p.rows = (n_rows + p.args.row_groups - 1)/p.args.row_groups;
        const int loop = KVQ_DECODE_LOOP(p.rows, s.dk, s.dv/s.nv, rot_of(op)), merge = KVQ_DECODE_MERGE(p.rows, s.dv);
        p.bytes = sizeof(float)*size_t(std::max(loop, merge));
        values.push_back({ KVQ_FC_ROWS, p.rows });
        p.attention = pipeline_of(dev, KVQ_METAL_DECODE, "kernel_kvq_decode_" + heads, values);
        p.combine   = pipeline_of(dev, KVQ_METAL_DECODE, "kernel_kvq_combine_" + std::to_string(s.dv) + "_" + std::to_string(s.nv),
                                  { { KVQ_FC_V_STORE, store_of(op->src[2]->type) }, { KVQ_FC_SINKS, op->src[4] != nullptr } });
    } else {
        p.args.row_groups = (n_rows + s.prefill_rows - 1)/s.prefill_rows;
        p.rows  = s.prefill_rows;
        p.bytes = KVQ_PREFILL_BYTES(s.prefill_rows, s.dk, s.chunk, rot_of(op));
        values.push_back({ KVQ_FC_SINKS, op->src[4] != nullptr });
        p.attention = pipeline_of(dev, KVQ_METAL_PREFILL, "kernel_kvq_prefill_" + heads, values);
    }
    return p;
}

// bytes from the start of a result to its scratch
static size_t scratch_offset(const ggml_tensor * op) { return GGML_PAD(ggml_nbytes(op), 16); }

size_t kvq_metal_scratch(const ggml_tensor * op) {
    if (op->op != GGML_OP_FLASH_ATTN_EXT || !is_decode(op)) {
        return 0;
    }
    return scratch_offset(op) - ggml_nbytes(op) + sizeof(float)*size_t(ggml_nrows(op)*splits_of(op)*(op->ne[0] + 2));
}

// a source that is not there is not read
static void set_source(const ggml_metal_encoder_t enc, const ggml_tensor * op, const int source, const int index) {
    ggml_metal_encoder_set_buffer(enc, buffer_of(op->src[source] ? op->src[source] : op->src[0]), index);
}

static void encode_attention(const ggml_metal_device_t dev, const ggml_metal_encoder_t enc, const ggml_tensor * op) {
    attention_plan p = plan_of(dev, op);
    const head_sizes & s = *sizes_of(op);
    ggml_metal_buffer_id result = buffer_of(op), scratch = result;
    scratch.offs += scratch_offset(op);

    ggml_metal_encoder_set_pipeline(enc, p.attention);
    ggml_metal_encoder_set_bytes(enc, &p.args, sizeof(p.args), 0);
    const int sources[] = { 0, 1, 2, 3, 9, 10, 11 };
    for (int i = 0; i < 7; ++i) {
        set_source(enc, op, sources[i], i + 1);
    }
    const bool decode = is_decode(op);
    for (int i = 0; i < 4; ++i) {
        set_source(enc, op, 5 + i, (decode ? 9 : 10) + i);
    }
    ggml_metal_encoder_set_threadgroup_memory_size(enc, GGML_PAD(p.bytes, 16), 0);
    if (!decode) {
        set_source(enc, op, 4, 8);
        ggml_metal_encoder_set_buffer(enc, result, 9);
        ggml_metal_encoder_dispatch_threadgroups(enc, p.args.row_groups, p.args.n_head_kv, p.args.n_seq, 32, KVQ_SIMDGROUPS, 1);
        return;
    }
    ggml_metal_encoder_set_buffer(enc, scratch, 8);
    ggml_metal_encoder_dispatch_threadgroups(enc, p.args.n_split, p.args.n_head_kv*p.args.row_groups, p.args.n_seq, 32, KVQ_SIMDGROUPS, 1);
    ggml_metal_encoder_memory_barrier(enc);

    ggml_metal_encoder_set_pipeline(enc, p.combine);
    ggml_metal_encoder_set_bytes(enc, &p.args, sizeof(p.args), 0);
    ggml_metal_encoder_set_buffer(enc, scratch, 1);
    set_source(enc, op, 4, 2);
    ggml_metal_encoder_set_buffer(enc, result, 3);
    ggml_metal_encoder_set_threadgroup_memory_size(enc, sizeof(float)*size_t(s.dv), 0);
    ggml_metal_encoder_dispatch_threadgroups(enc, p.args.n_seq*p.args.n_tok*p.args.n_head, 1, 1, 32, s.dv/s.nv, 1);
}

// ---- rows ----

// the tensor that a copy writes
static const ggml_tensor * target_of(const ggml_tensor * op) { return op->op == GGML_OP_CPY ? op->src[1] : op; }

static void encode_rows(const ggml_metal_device_t dev, const ggml_metal_encoder_t enc, const ggml_tensor * op) {
    const bool set = op->op == GGML_OP_SET_ROWS, get = op->op == GGML_OP_GET_ROWS;
    const ggml_tensor * src = op->src[0], * dst = set || get ? op : target_of(op), * index = set || get ? op->src[1] : nullptr;
    const ggml_type type = is_ours(dst->type) ? dst->type : src->type;
    const int64_t n = ggml_blck_size(type);
    const ggml_tensor * walked = get ? dst : src;

    kvq_metal_rows_args a = {};
    a.n_blocks   = int32_t(ggml_nelements(walked)/n);
    a.blocks_row = int32_t(walked->ne[0]/n);
    a.ne1 = int32_t(walked->ne[1]);
    a.ne2 = int32_t(walked->ne[2]);
    a.other_row = int32_t(dst->ne[0]/n);
    a.other_ne1 = int32_t(dst->ne[1]);
    a.other_ne2 = int32_t(dst->ne[2]);
    a.bytes = int32_t(ggml_type_size(type));
    for (int i = 0; i < 4; ++i) {
        a.nb_src[i] = i ? src->nb[i] : src->nb[0]*size_t(n/ggml_blck_size(src->type));
        a.nb_dst[i] = i ? dst->nb[i] : dst->nb[0]*size_t(n/ggml_blck_size(dst->type));
    }
    a.index_ne1 = index ? int32_t(index->ne[1]) : 1;
    a.index_ne2 = index ? int32_t(index->ne[2]) : 1;
    for (int i = 0; i < 3; ++i) {
        a.nb_index[i] = index ? index->nb[i] : 0;
    }

    const bool copy = src->type == dst->type, write = is_ours(dst->type);
    const ggml_type floats = write ? src->type : dst->type;
    const std::string name = copy ? "kernel_kvq_copy" : std::string(write ? "kernel_kvq_write_" : "kernel_kvq_read_") + std::to_string(n);
    const constants values = copy ? constants() : constants { { KVQ_FC_K_STORE, store_of(type) }, { KVQ_FC_HALF, floats == GGML_TYPE_F16 },
        { KVQ_FC_INDEX, !index ? 0 : index->type == GGML_TYPE_I64 ? 64 : 32 } };

    ggml_metal_encoder_set_pipeline(enc, pipeline_of(dev, KVQ_METAL_ROWS, name, values));
    ggml_metal_encoder_set_bytes(enc, &a, sizeof(a), 0);
    ggml_metal_encoder_set_buffer(enc, buffer_of(src), 1);
    if (copy) {
        ggml_metal_encoder_set_buffer(enc, buffer_of(dst), 2);
        const int threads = int(GGML_PAD(a.bytes/2, 32));
        ggml_metal_encoder_dispatch_threadgroups(enc, 1, a.n_blocks, 1, threads, 1, 1);
        return;
    }
    ggml_metal_encoder_set_buffer(enc, buffer_of(index ? index : src), 2);
    ggml_metal_encoder_set_buffer(enc, buffer_of(dst), 3);
    ggml_metal_encoder_set_threadgroup_memory_size(enc, sizeof(float)*size_t(KVQ_SIMDGROUPS*(n + n/2)), 0);
    ggml_metal_encoder_dispatch_threadgroups(enc, (a.n_blocks + KVQ_SIMDGROUPS - 1)/KVQ_SIMDGROUPS, 1, 1, 32, KVQ_SIMDGROUPS, 1);
}

void kvq_metal_encode(ggml_metal_device_t dev, ggml_metal_encoder_t enc, const ggml_tensor * op) {
    if (op->op == GGML_OP_FLASH_ATTN_EXT) {
        encode_attention(dev, enc, op);
    } else if (!ggml_is_empty(op)) {
        encode_rows(dev, enc, op);
    }
}

// ---- refusals ----

// Reason why the rows cannot be moved, or null.
static const char * rows_refusal(const ggml_tensor * op) {
    const ggml_tensor * src = op->src[0], * dst = target_of(op);
    auto is_float = [](const ggml_tensor * t) { return (t->type == GGML_TYPE_F32 || t->type == GGML_TYPE_F16) && t->nb[0] == ggml_type_size(t->type); };
    switch (op->op) {
        case GGML_OP_SET_ROWS:
            return is_float(src) && (op->src[1]->type == GGML_TYPE_I64 || op->src[1]->type == GGML_TYPE_I32) ? nullptr : "row types";
        case GGML_OP_GET_ROWS:
            return is_float(op) && op->src[1]->type == GGML_TYPE_I32 ? nullptr : "row types";
        default:
            if (src->type == dst->type) {
                return nullptr;
            }
            if (is_ours(dst->type)) {
                return is_float(src) && src->ne[0] % ggml_blck_size(dst->type) == 0 ? nullptr : "copy between these types";
            }
            return is_float(dst) && dst->ne[0] % ggml_blck_size(src->type) == 0 ? nullptr : "copy between these types";
    }
}

// Reason why the attention cannot run, whatever the device, or null.
static const char * attention_refusal(const ggml_tensor * op) {
    const ggml_tensor * q = op->src[0], * k = op->src[1], * v = op->src[2], * mask = op->src[3];
    if (q->type != GGML_TYPE_F32 || op->type != GGML_TYPE_F32 || q->nb[0] != sizeof(float)) {
        return "queries and output must be f32 with contiguous rows";
    }
    const head_sizes * s = sizes_of(op);
    if (!s) {
        return "no kernel for these head sizes";
    }
    for (const ggml_tensor * x : { k, v }) {
        if (!store_of(x->type) || store_of(x->type) == KVQ_STORE_TURBO_F16) {
            return "a cache type can be mixed with f16 and q8_0 alone";
        }
        if (x->nb[0] != ggml_type_size(x->type) || x->ne[3] != q->ne[3] || x->nb[1] % 2 != 0) {
            return "layout of K or V";
        }
        if (kvq_is_cache_type(x->type) && ggml_blck_size(x->type) != (x == k ? s->n : s->nv)) {
            return "block size of K or V";
        }
    }
    if (store_of(v->type) == KVQ_STORE_OSCAR2) {
        return "oscar2 is a type of keys, with values of their own";
    }
    if (mask && (mask->type != GGML_TYPE_F16 || mask->ne[2] != 1 || q->ne[3] % mask->ne[3] != 0)) {
        return "a mask per head";
    }
    if (q->ne[2] % k->ne[2] != 0 || v->ne[2] != k->ne[2]) {
        return "number of heads";
    }
    if (op->src[5]) {
        const ggml_tensor * pos = op->src[8];
        for (int i = 5; i <= 7; ++i) {
            if (op->src[i]->type != GGML_TYPE_F32 || op->src[i]->nb[0] != sizeof(float)) {
                return "types of the key bias";
            }
        }
        if (pos->type != GGML_TYPE_I32 || q->ne[3] % pos->ne[1] != 0 || op->src[7]->ne[0] % 2 != 0 || op->src[7]->ne[0] > k->ne[0] || op->src[7]->ne[1] <= 256) {
            return "shape of the key bias";
        }
    }
    if (op->src[9] && (op->src[9]->type != kvq_window_type(k->type) || op->src[10]->type != kvq_window_type(v->type) || op->src[11]->type != GGML_TYPE_F16)) {
        return "types of the f16 window";
    }
    return nullptr;
}

static const char * refusal(const ggml_metal_device_t dev, const ggml_tensor * op) {
    const ggml_metal_device_props * props = ggml_metal_device_get_props(dev);
    if (!props->has_simdgroup_reduction || !props->has_simdgroup_mm) {
        return "the kernels need simdgroup functions and matrices";
    }
    if (op->op != GGML_OP_FLASH_ATTN_EXT) {
        // a cache that can be written must be attended too: all of them or none
        for (const kvq_metal_library which : { KVQ_METAL_ROWS, KVQ_METAL_DECODE, KVQ_METAL_PREFILL }) {
            if (!library_of(dev, which)) {
                return "the kernels do not compile on this device";
            }
        }
        return rows_refusal(op);
    }
    if (const char * reason = attention_refusal(op)) {
        return reason;
    }
    const attention_plan p = plan_of(dev, op);
    if (!p.attention.pipeline || (is_decode(op) && !p.combine.pipeline)) {
        return "the kernels do not compile on this device";
    }
    if (p.bytes > props->max_theadgroup_memory_size || ggml_metal_pipeline_max_theads_per_threadgroup(p.attention) < 32*KVQ_SIMDGROUPS) {
        return "too little threadgroup memory or too few registers";
    }
    return nullptr;
}

// The cache that the operation reads or writes: its name says which layer it belongs to.
static const char * cache_name(const ggml_tensor * op) {
    const ggml_tensor * t = op->op == GGML_OP_FLASH_ATTN_EXT ? op->src[1] : is_ours(op->type) ? op : op->src[0];
    t = t->view_src ? t->view_src : t;
    return t->name[0] ? t->name : op->name;
}

bool kvq_metal_supports(ggml_metal_device_t dev, const ggml_tensor * op) {
    const char * reason = refusal(dev, op);
    if (!reason) {
        return true;
    }
    // the scheduler asks for every graph: one line per operation and cache is enough
    static std::mutex mutex;
    static std::set<std::string> told;
    const std::string what = std::string(ggml_op_name(op->op)) + " of " + cache_name(op);
    std::lock_guard<std::mutex> lock(mutex);
    if (told.size() < 256 && told.insert(what).second) {
        GGML_LOG_WARN("kvq: %s falls back to the CPU instead of Metal: %s\n", what.c_str(), reason);
    }
    return false;
}
