// What ggml asks of the CUDA kernels of the cache types: which operations are ours, which run here, and running them.
#include "common.cuh"
#include "kvq-bias-pairs.h"
#include "kvq-cuda.cuh"
#include "kvq-launch.cuh"
#include "kvq-rows-ops.cuh"
#include "kvq-transform.h"

#include <algorithm>
#include <cstdlib>
#include <mutex>
#include <set>

static int kvq_store_of(const ggml_type type) {
    return kvq_code(type) == KVQ_TIERED ? KVQ_STORE_OSCAR2 : kvq_bits(type) > 0 ? kvq_bits(type) : type == GGML_TYPE_Q8_0 ? KVQ_STORE_Q8_0 : type == GGML_TYPE_F16 ? KVQ_STORE_F16 : 0;
}

static bool kvq_v_is_k(const ggml_tensor * k, const ggml_tensor * v) {
    // MLA caches K alone; V is a view of the same rows
    return v->view_src && (v->view_src == k || (v->view_src == k->view_src && v->view_offs == k->view_offs)) && v->type == k->type &&
        v->ne[0] < k->ne[0] && v->nb[1] == k->nb[1] && v->nb[2] == k->nb[2] && v->nb[3] == k->nb[3];
}

// a type that only our kernels write and read
static bool kvq_is_ours(const ggml_type type) {
    return kvq_is_cache_type(type) || kvq_is_window_type(type);
}

bool kvq_cuda_owns(const ggml_tensor * op) {
    switch (op->op) {
        case GGML_OP_FLASH_ATTN_EXT:
            return kvq_is_cache_type(op->src[1]->type) || kvq_is_cache_type(op->src[2]->type);
        case GGML_OP_SET_ROWS:
            return kvq_is_ours(op->type);
        case GGML_OP_GET_ROWS:
        case GGML_OP_CPY:
        case GGML_OP_DUP:
        case GGML_OP_CONT:
            return kvq_is_ours(op->type) || kvq_is_ours(op->src[0]->type);
        default:
            return false;
    }
}

static kvq_device kvq_device_of(const int device) {
    const auto & info = ggml_cuda_info().devices[device];
    // a multiprocessor has a little more shared memory than a block can take; half of it must not promise too much
    const bool clusters = info.cc >= GGML_CUDA_CC_HOPPER && ggml_cuda_highest_compiled_arch(info.cc) >= GGML_CUDA_CC_HOPPER;
    return { info.nsm, info.smpbo, info.smpbo + 1024, clusters, info.cc == GGML_CUDA_CC_HOPPER };
}

static kvq_fattn_args kvq_fattn_args_of(const ggml_tensor * dst) {
    const ggml_tensor * q = dst->src[0], * k = dst->src[1], * v = dst->src[2], * mask = dst->src[3], * sinks = dst->src[4];
    kvq_fattn_args a = {};
    auto operand = [](const ggml_tensor * x) {
        kvq_operand o = {};
        o.data  = (const char *) x->data;
        o.nb1   = x->nb[1];
        o.nb2   = x->nb[2];
        o.nb3   = x->nb[3];
        o.store = kvq_store_of(x->type);
        o.bytes = int(ggml_row_size(x->type, x->ne[0]));
        return o;
    };
    a.q = (const char *) q->data;
    a.k = operand(k);
    a.v = operand(v);
    a.v_is_k = kvq_v_is_k(k, v);
    a.mask  = mask  ? (const char  *) mask->data  : nullptr;
    a.sinks = sinks ? (const float *) sinks->data : nullptr;
    a.dst   = (float *) dst->data;
    a.nbq1 = q->nb[1];
    a.nbq2 = q->nb[2];
    a.nbq3 = q->nb[3];
    a.nbm1 = mask ? mask->nb[1] : 0;
    a.nbm3 = mask ? mask->nb[3] : 0;
    a.nem3 = mask ? int(mask->ne[3]) : 1;
    a.n_tok     = int(q->ne[1]);
    a.n_head    = int(q->ne[2]);
    a.n_head_kv = int(k->ne[2]);
    a.n_seq     = int(q->ne[3]);
    a.gqa       = a.n_head/a.n_head_kv;
    a.n_kv      = int(k->ne[1]);
    memcpy(&a.scale,    (const float *) dst->op_params + 0, sizeof(float));
    memcpy(&a.max_bias, (const float *) dst->op_params + 1, sizeof(float));
    memcpy(&a.softcap,  (const float *) dst->op_params + 2, sizeof(float));
    if (a.softcap != 0.0f) {
        a.scale /= a.softcap;
    }
    if (const ggml_tensor * k16 = dst->src[9]) {
        const ggml_tensor * v16 = dst->src[10], * mask16 = dst->src[11];
        a.window = { (const char *) k16->data, (const char *) v16->data, (const char *) mask16->data, int64_t(k16->nb[1]), int64_t(k16->nb[2]), int64_t(k16->nb[3]),
            int64_t(v16->nb[1]), int64_t(v16->nb[2]), int64_t(v16->nb[3]), int64_t(mask16->nb[1]), int64_t(mask16->nb[3]), int(mask16->ne[3]), int(k16->ne[1]) };
    }
    if (const ggml_tensor * bq = dst->src[5]) {
        const ggml_tensor * b = dst->src[6], * trig = dst->src[7], * pos = dst->src[8];
        a.bias.q    = (const char *) bq->data;
        a.bias.b    = (const char *) b->data;
        a.bias.trig = (const char *) trig->data;
        a.bias.pos  = (const char *) pos->data;
        a.bias.nbq1 = bq->nb[1];
        a.bias.nbq2 = bq->nb[2];
        a.bias.nbq3 = bq->nb[3];
        a.bias.nbb1 = b->nb[1];
        a.bias.nbt1 = trig->nb[1];
        a.bias.nbp1 = pos->nb[1];
        a.bias.pairs = int(trig->ne[0]/2);
        a.bias.steps = int(trig->ne[1] - 256);
        a.bias.seqs  = int(q->ne[3]/pos->ne[1]);
        a.bias.interleaved = dst->op_params[8] != 0;
        uint8_t pairs[KVQ_BIAS_PAIRS_MAX];
        static_assert(KVQ_BIAS_PAIRS_MAX == KVQ_BIAS_PAIRS, "the kernels' list holds them all");
        const int n = kvq_bias_pairs(dst, pairs);
        kvq_set_pairs(a.bias, pairs, n);
    }
    a.n_head_log2 = 1u << uint32_t(floorf(log2f(float(a.n_head))));
    a.m0 = powf(2.0f, -a.max_bias/a.n_head_log2);
    a.m1 = powf(2.0f, -a.max_bias/2.0f/a.n_head_log2);
    return a;
}

// Reason why no kernel reads the f16 window of this attention operation, or null.
static const char * kvq_window_refusal(const ggml_tensor * op) {
    const ggml_tensor * q = op->src[0], * k16 = op->src[9], * v16 = op->src[10], * mask16 = op->src[11];
    if (!v16 || !mask16 || kvq_v_is_k(op->src[1], op->src[2])) {
        return "an f16 window without its values or its mask";
    }
    for (const ggml_tensor * x : { k16, v16 }) {
        const ggml_tensor * stored = x == k16 ? op->src[1] : op->src[2];
        if (x->type != kvq_window_type(stored->type) || x->ne[0] != stored->ne[0] || x->ne[1] != k16->ne[1] || x->ne[2] != stored->ne[2] || x->ne[3] != q->ne[3]) {
            return "type or shape of the f16 window";
        }
        if (x->nb[1] % 16 != 0 || x->nb[2] % 16 != 0 || x->nb[3] % 16 != 0 || x->view_offs % 16 != 0) {
            return "layout of the f16 window";
        }
    }
    if (k16->ne[1] % 64 != 0 || mask16->type != GGML_TYPE_F16 || mask16->ne[0] < k16->ne[1] || mask16->nb[1] % 4 != 0 || mask16->ne[2] != 1 || q->ne[3] % mask16->ne[3] != 0) {
        return "rows or mask of the f16 window";
    }
    return nullptr;
}

// Reason why no kernel adds the key bias of this attention operation, or null.
static const char * kvq_bias_refusal(const ggml_tensor * op) {
    const ggml_tensor * q = op->src[0], * bq = op->src[5], * b = op->src[6], * trig = op->src[7], * pos = op->src[8];
    if (bq->type != GGML_TYPE_F32 || b->type != GGML_TYPE_F32 || trig->type != GGML_TYPE_F32 || pos->type != GGML_TYPE_I32 || bq->nb[0] != 4 || !ggml_are_same_shape(bq, q)) {
        return "types of the key bias";
    }
    const int64_t cells = op->src[1]->ne[1] + (op->src[9] ? op->src[9]->ne[1] : 0);
    if (trig->ne[0] % 2 != 0 || trig->ne[0] > op->src[1]->ne[0] || trig->ne[1] <= 256 || pos->ne[0] < cells || q->ne[3] % pos->ne[1] != 0 || b->ne[1] != op->src[1]->ne[2]) {
        return "shape of the key bias";
    }
    return nullptr;
}

// Reason why the device cannot run the operation, or null.
static const char * kvq_refusal(const int device, const ggml_tensor * op) {
    const int cc = ggml_cuda_info().devices[device].cc;
    if (!GGML_CUDA_CC_IS_NVIDIA(cc)) {
        return "the kernels of the cache types are for NVIDIA GPUs";
    }
    if (op->op != GGML_OP_FLASH_ATTN_EXT) {
        const ggml_tensor * src = op->src[0];
        auto is_float = [](const ggml_type t) { return t == GGML_TYPE_F32 || t == GGML_TYPE_F16; };
        switch (op->op) {
            case GGML_OP_SET_ROWS:
                return is_float(src->type) && (op->src[1]->type == GGML_TYPE_I64 || op->src[1]->type == GGML_TYPE_I32) ? nullptr : "row types";
            case GGML_OP_GET_ROWS:
                return is_float(op->type) && op->src[1]->type == GGML_TYPE_I32 ? nullptr : "row types";
            default: {
                const ggml_tensor * dst = op->op == GGML_OP_CPY ? op->src[1] : op;
                if (src->type == dst->type) {
                    return ggml_are_same_shape(src, dst) || (ggml_is_contiguous(src) && ggml_is_contiguous(dst)) ? nullptr : "a copy that reshapes blocks";
                }
                if (kvq_is_ours(dst->type)) {
                    return is_float(src->type) && src->ne[0] % ggml_blck_size(dst->type) == 0 ? nullptr : "copy between these types";
                }
                return is_float(dst->type) && dst->ne[0] % ggml_blck_size(src->type) == 0 ? nullptr : "copy between these types";
            }
        }
    }
    if (cc < GGML_CUDA_CC_AMPERE || ggml_cuda_highest_compiled_arch(cc) < GGML_CUDA_CC_AMPERE) {
        return "attention over the cache types needs compute capability 8.0 or later";
    }
    const ggml_tensor * q = op->src[0], * k = op->src[1], * v = op->src[2], * mask = op->src[3];
    if (q->type != GGML_TYPE_F32 || op->type != GGML_TYPE_F32 || q->nb[0] != sizeof(float)) {
        return "queries and output must be f32 with contiguous rows";
    }
    for (const ggml_tensor * x : { k, v }) {
        if (!kvq_store_of(x->type)) {
            return "a cache type can be mixed with f16 and q8_0 alone";
        }
        if (x->nb[0] != ggml_type_size(x->type) || x->ne[3] != q->ne[3] || x->nb[1] % 2 != 0) {
            return "layout of K or V";
        }
    }
    if (mask && (mask->type != GGML_TYPE_F16 || mask->ne[2] != 1 || q->ne[3] % mask->ne[3] != 0)) {
        return "a mask per head";
    }
    if (q->ne[2] % k->ne[2] != 0 || v->ne[2] != k->ne[2]) {
        return "number of heads";
    }
    const bool view = kvq_v_is_k(k, v);
    if (kvq_store_of(v->type) == KVQ_STORE_OSCAR2) {
        return "oscar2 is a type of keys, with values of their own";
    }
    if (kvq_is_cache_type(k->type) && ggml_blck_size(k->type) != (view ? 64 : kvq_head_block(int(k->ne[0])))) {
        return "block size of K";
    }
    if (kvq_is_cache_type(v->type) && ggml_blck_size(v->type) != (view ? 64 : kvq_head_block(int(v->ne[0])))) {
        return "block size of V";
    }
    if (const char * reason = op->src[9] ? kvq_window_refusal(op) : nullptr) {
        return reason;
    }
    if (const char * reason = op->src[5] ? kvq_bias_refusal(op) : nullptr) {
        return reason;
    }
    kvq_fattn_args a = kvq_fattn_args_of(op);
    kvq_launch attention, combine;
    if (!kvq_plan(a, int(k->ne[0]), int(v->ne[0]), kvq_device_of(device), attention, combine)) {
        return "no kernel is compiled for these head sizes";
    }
    return nullptr;
}

// The cache that the operation reads or writes: its name says which layer it belongs to.
static const char * kvq_cache_name(const ggml_tensor * op) {
    const ggml_tensor * t = op->op == GGML_OP_FLASH_ATTN_EXT ? op->src[1] : kvq_is_ours(op->type) ? op : op->src[0];
    t = t->view_src ? t->view_src : t;
    return t->name[0] ? t->name : op->name;
}

bool kvq_cuda_supports(const int device, const ggml_tensor * op) {
    const char * reason = kvq_refusal(device, op);
    if (!reason) {
        return true;
    }
    // the scheduler asks for every graph: one line per operation, cache and device is enough
    static std::mutex mutex;
    static std::set<std::string> told;
    const std::string what = std::string(ggml_op_name(op->op)) + " of " + kvq_cache_name(op);
    std::lock_guard<std::mutex> lock(mutex);
    if (told.size() < 256 && told.insert(what + std::to_string(device)).second) {
        GGML_LOG_WARN("kvq: %s falls back to the CPU on CUDA device %d: %s\n", what.c_str(), device, reason);
    }
    return false;
}

// Raises a kernel's limit of shared memory, once per device and kernel.
static void kvq_allow_shared_memory(const int device, const kvq_fattn_kernel kernel, const size_t bytes) {
    if (bytes <= 48*1024) {
        return;
    }
    static std::mutex mutex;
    static std::set<std::pair<int, kvq_fattn_kernel>> raised;
    std::lock_guard<std::mutex> lock(mutex);
    if (raised.insert({ device, kernel }).second) {
        CUDA_CHECK(cudaFuncSetAttribute((const void *) kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(ggml_cuda_info().devices[device].smpbo)));
    }
}

// The attention node that the launch of a cache write directly precedes on its stream: it may load its queries before that is
// done, because the write waits for everything before itself. Forgotten once another node is reached.
static thread_local struct {
    const ggml_tensor * attention;
    cudaStream_t        stream;
} kvq_after_write;

static void kvq_cuda_flash_attn(ggml_backend_cuda_context & ctx, ggml_tensor * dst) {
    const int device = ggml_cuda_get_device();
    kvq_fattn_args a = kvq_fattn_args_of(dst);
    const int dk = int(dst->src[1]->ne[0]), dv = int(dst->src[2]->ne[0]);
    kvq_launch attention, combine;
    GGML_ASSERT(kvq_plan(a, dk, dv, kvq_device_of(device), attention, combine));

    const size_t rows = size_t(a.n_seq)*a.n_tok*a.n_head;
    ggml_cuda_pool_alloc<float>  part(ctx.pool(), std::max<size_t>(rows*a.n_part*dv, 1));
    ggml_cuda_pool_alloc<float2> meta(ctx.pool(), std::max<size_t>(rows*a.n_part, 1));
    a.part = part.get();
    a.meta = meta.get();
    a.early_queries = dst == kvq_after_write.attention && ctx.stream() == kvq_after_write.stream;
    kvq_after_write = {};
    kvq_allow_shared_memory(device, attention.kernel, attention.smem);
    ggml_cuda_kernel_launch(attention.kernel, ggml_cuda_kernel_launch_params(attention.grid, attention.block, attention.smem, ctx.stream()), a);
    if (combine.kernel) {
        kvq_allow_shared_memory(device, combine.kernel, combine.smem);
        ggml_cuda_kernel_launch(combine.kernel, ggml_cuda_kernel_launch_params(combine.grid, combine.block, combine.smem, ctx.stream()), a);
    }
    CUDA_CHECK(cudaGetLastError());
}

void kvq_cuda_compute(ggml_backend_cuda_context & ctx, ggml_tensor * dst) {
    switch (dst->op) {
        case GGML_OP_FLASH_ATTN_EXT: kvq_cuda_flash_attn(ctx, dst);                   break;
        case GGML_OP_SET_ROWS:       kvq_cuda_set_rows(ctx, dst);                     break;
        case GGML_OP_GET_ROWS:       kvq_cuda_get_rows(ctx, dst);                     break;
        case GGML_OP_CPY:            kvq_cuda_copy(ctx, dst->src[0], dst->src[1]);    break;
        case GGML_OP_DUP:
        case GGML_OP_CONT:           kvq_cuda_copy(ctx, dst->src[0], dst);            break;
        default: GGML_ABORT("not an operation of the cache types");
    }
}

// Whether the write `t` can join the launch of n others: it must not read or write what they write.
static bool kvq_joins(const ggml_tensor * t, const ggml_tensor * const * others, const int n) {
    if (t->op != GGML_OP_SET_ROWS || (t->flags & GGML_TENSOR_FLAG_OUTPUT) || !(t->flags & GGML_TENSOR_FLAG_COMPUTE) || !t->view_src ||
        !(kvq_is_ours(t->type) || (n > 0 && t->type == GGML_TYPE_F16)) || !kvq_cuda_rows_fit(n > 0 ? others[0] : t, t)) {
        return false;
    }
    for (int i = 0; i < n; ++i) {
        if (t->view_src == others[i]->view_src || t->src[0]->view_src == others[i]->view_src || t->src[0] == others[i]) {
            return false;
        }
    }
    return true;
}

// Whether the launch of `writes`, which ends with node `last`, may do these turns. Those that nothing else reads lose their output; that of the others must not lie
// where the launch reads.
static bool kvq_rotaries_fit(const ggml_cgraph * graph, kvq_rotary_nodes * turns, const int n_turns, const int last, const ggml_tensor * const * writes, const int n) {
    for (int t = 0; t < n_turns; ++t) {
        const ggml_tensor * rope = turns[t].rope;
        int n_written = 0;
        for (int i = 0; i < n; ++i) {
            if (kvq_is_all_of(writes[i]->src[0], rope)) {
                n_written++;
                if (rope->ne[0] % ggml_blck_size(writes[0]->type) != 0 || writes[i]->src[0]->ne[0] != rope->ne[0]*rope->ne[1]) {
                    return false;
                }
            } else if (kvq_overlap(rope, writes[i]->src[0])) {
                return false;
            }
        }
        if (n_written && kvq_used_within(graph, turns[t].last, last)) {
            turns[t].turn.y = nullptr;
            continue;
        }
        for (int other = 0; other < n_turns; ++other) {
            if (kvq_overlap(rope, turns[other].source)) {
                return false;
            }
        }
    }
    return true;
}

// How many turns, of the keys and then of the queries too, may stand in front of a write and of a transform, and whether a transform and its writes are one
// launch. By time on an H200: a write that makes the queries costs attention more than the launch that it saves. Timing only: KVQ_CUDA_JOIN=0 leaves norm and RoPE to
// upstream, 1 joins those of the keys, 2 those of queries too, 3 transforms and writes as well.
struct kvq_join_rule { int before_write, before_transform; bool transform_and_write; };

static const kvq_join_rule & kvq_join_limits() {
    static const kvq_join_rule rule = [] {
        const char * value = getenv("KVQ_CUDA_JOIN");
        const int n = value ? std::min(atoi(value), KVQ_ROTARIES) : 0;
        return value ? kvq_join_rule { n, n, atoi(value) > KVQ_ROTARIES } : kvq_join_rule { 1, KVQ_ROTARIES, false };
    }();
    return rule;
}

// The writes in a row that node i begins, with views between them.
static kvq_writes kvq_find_writes(const ggml_cgraph * graph, const int i) {
    kvq_writes writes = {};
    for (int at = i; at < graph->n_nodes && writes.n < KVQ_ROWS_TOGETHER && kvq_joins(graph->nodes[at], writes.node, writes.n); at = kvq_next_node(graph, at)) {
        writes.node[writes.n++] = graph->nodes[at];
        writes.last = at;
    }
    return writes;
}

// Those writes with turns in front of them: the last node that is done, -1 for none.
static int kvq_cuda_write(ggml_backend_cuda_context & ctx, const ggml_cgraph * graph, const int i, const kvq_rotary_nodes * found, const int n_turns) {
    kvq_rotary_nodes turns[KVQ_ROTARIES];
    std::copy(found, found + n_turns, turns);
    const kvq_writes writes = kvq_find_writes(graph, i);
    if (writes.n == 0 || writes.n + n_turns < 2 || !kvq_rotaries_fit(graph, turns, n_turns, writes.last, writes.node, writes.n)) {
        return -1;
    }
    kvq_cuda_set_rows_together(ctx, writes.node, writes.n, turns, n_turns);
    // queries of this launch's making are not there early
    const bool made = std::any_of(turns, turns + n_turns, [](const kvq_rotary_nodes & t) { return t.turn.y; });
    const int next = kvq_next_node(graph, writes.last);
    if (!made && next < graph->n_nodes && graph->nodes[next]->op == GGML_OP_FLASH_ATTN_EXT && kvq_cuda_owns(graph->nodes[next])) {
        kvq_after_write = { graph->nodes[next], ctx.stream() };
    }
    return writes.last;
}

// The transforms that node i begins, with the writes behind them if these can join.
static int kvq_cuda_transform_any(ggml_backend_cuda_context & ctx, const ggml_cgraph * graph, const int i, const kvq_rotary_nodes * turns, const int n_turns) {
    if (kvq_join_limits().transform_and_write) {
        kvq_transform_args args;
        const int n_done = kvq_find_transform(graph, i, KVQ_ROTARY_TOKENS, args);
        const kvq_writes writes = n_done ? kvq_find_writes(graph, kvq_next_node(graph, i + n_done)) : kvq_writes {};
        const int last = writes.n ? kvq_cuda_transform(ctx, graph, i, turns, n_turns, writes) : -1;
        if (last >= 0) {
            return last;
        }
    }
    return kvq_cuda_transform(ctx, graph, i, turns, n_turns, {});
}

int kvq_cuda_try_fuse(ggml_backend_cuda_context & ctx, const ggml_cgraph * graph, const int i) {
    if (graph->nodes[i] != kvq_after_write.attention && !ggml_op_is_empty(graph->nodes[i]->op)) {
        kvq_after_write = {};
    }
    // turns of queries and keys in a row, and what may do them on the way; fewer of them when not all can be
    kvq_rotary_nodes turns[KVQ_ROTARIES];
    int n_turns = 0, at[KVQ_ROTARIES + 1] = { i };
    const kvq_join_rule & limits = kvq_join_limits();
    while (n_turns < std::max(limits.before_write, limits.before_transform) && at[n_turns] < graph->n_nodes && kvq_find_rotary(graph, at[n_turns], KVQ_ROTARY_TOKENS, turns[n_turns])) {
        at[n_turns + 1] = kvq_next_node(graph, turns[n_turns].last);
        n_turns++;
    }
    for (int n = n_turns; n >= (n_turns > 0 ? 1 : 0); --n) {
        if (at[n] == graph->n_nodes) {
            continue;
        }
        int last = n <= limits.before_transform ? kvq_cuda_transform_any(ctx, graph, at[n], turns, n) : -1;
        if (last < 0 && n <= limits.before_write) {
            last = kvq_cuda_write(ctx, graph, at[n], turns, n);
        }
        if (last >= 0) {
            return last - i;
        }
    }
    return 0;
}
