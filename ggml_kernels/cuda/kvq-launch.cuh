// Which attention kernel runs, with which grid: host code shared by the ggml entry points and the benchmark.
#pragma once

#include "kvq-fattn.cuh"
#include "kvq-tiles.h"

struct kvq_device {
    int    n_sm;
    size_t smem_block;      // most shared memory of one block, opted in
    size_t smem_sm;         // of one multiprocessor
    bool   clusters;        // blocks can form clusters (compute capability 9.0 and later)
    bool   wgmma;           // has the products of compute capability 9.0, and no other
};

struct kvq_launch {
    kvq_fattn_kernel kernel = nullptr;
    dim3   grid, block;
    size_t smem = 0;
    bool   joined = false;          // needs no combine kernel
};

// one compiled shape of the decode kernel
struct kvq_decode_variant {
    kvq_fattn_kernel kernel;                // null when not compiled
    int tile, stages, q_bytes, blocks;
    int q16_bytes, bias_bytes, bias_fixed;  // f16 queries of a warp for a window; for 16 pairs of a bias, of a warp and of a block
};

// Kernels for one pair of types and head sizes: index 0 for up to 4 query rows of a KV head, 1 for more.
struct kvq_decode_entry {
    kvq_decode_variant general[2];
    kvq_decode_variant linear[2];           // for 8 KV heads in packed, aligned rows
    kvq_decode_variant brief[2];            // the same for short contexts, without a combine kernel
    kvq_decode_variant general_bias[2], linear_bias[2], brief_bias[2];      // with a key bias
    int v_parts;
};

// one compiled shape of the prefill kernel
struct kvq_prefill_entry {
    kvq_fattn_kernel kernel;
    int rows, warps, tile, v_parts;
    size_t fixed_bytes;
};

static constexpr int KVQ_PREFILL_BIAS = 8;

// Decode kernels for bits per code of K and V and the head sizes; null when none are compiled. v_is_k: V is a view of K.
kvq_decode_entry  kvq_find_decode (int k_bits, int v_bits, int dk, int dv, bool v_is_k);
// Prefill kernels for the head sizes, index 0 the largest tile, KVQ_PREFILL_BIAS with a key bias; kernel is null past the last.
kvq_prefill_entry kvq_find_prefill(int dk, int dv, bool v_is_k, int index);
kvq_fattn_kernel  kvq_find_combine(int dv, bool v_is_k);
// Prefill kernel for compute capability 9.0, this head size of K and V and pairs of a bias; kernel is null when none is compiled.
kvq_prefill_entry kvq_find_hopper(int d, int bias_pairs);

// Values per block that a head of this size uses, as the cache picks it; 0 when none divides.
static inline int kvq_head_block(const int d) {
#define KVQ_TRY(N) if (d % N == 0) { return N; }
    KVQ_FOR_EACH_BLOCK(KVQ_TRY)
#undef KVQ_TRY
    return 0;
}

// Bytes of one head's slice of a token.
static inline int kvq_slice_bytes(const int store, const int d, const int n) {
    const int bits = store == KVQ_STORE_OSCAR2 ? 2 : store;
    return store == KVQ_STORE_F16 ? 2*d : store == KVQ_STORE_Q8_0 ? d/32*34 : d/n*(n*bits/8 + 2);
}

static inline bool kvq_is_turbo(const int store) { return store <= KVQ_STORE_TURBO4; }

// Window of `heads` slices in shared memory: copy granularity, copies per row, row stride.
static inline void kvq_set_window(kvq_operand & o, const int heads) {
    const bool wide = o.nb1 % 16 == 0 && o.nb3 % 16 == 0;
    o.gran = wide ? 16 : 4;
    const int bytes = int((heads - 1)*o.nb2) + o.bytes;
    // the window begins up to gran - 2 bytes into its first copy
    o.chunks = (bytes + 2*o.gran - 2)/o.gran;
    if (wide && o.nb2*heads == o.nb1 && ((uintptr_t) o.data) % 16 == 0) {
        o.chunks = (bytes + 15)/16;
    }
    // an odd number of 16-byte units: eight neighbouring rows fall into different banks
    o.stride = (o.chunks*o.gran + 15)/16*16;
    if ((o.stride/16) % 2 == 0) {
        o.stride += 16;
    }
}

// Tiles of the cache, and rows of a window, up to which one cluster takes the whole context.
static constexpr int KVQ_SHORT_TILES = 16, KVQ_SHORT_WINDOW = 1024;

// Shared memory behind the stages: what a window and a bias need for `slots` warps with query rows of their own.
static inline size_t kvq_decode_extra(const kvq_fattn_args & a, const kvq_decode_variant & e, const int slots) {
    return size_t(slots)*((a.window.n > 0 ? e.q16_bytes : 0) + a.bias.chunks*e.bias_bytes) + a.bias.chunks*e.bias_fixed;
}

// Names the n pairs that carry the bias.
static inline void kvq_set_pairs(kvq_bias_args & bias, const uint8_t * pairs, const int n) {
    bias.n = n;
    bias.chunks = (n + 15)/16;
    for (int i = 0; i < KVQ_BIAS_PAIRS; ++i) {
        bias.list[i] = pairs[i < n ? i : 0];
    }
}

// Eight KV heads in one block, their tokens' rows packed, whole tiles, a mask whose rows allow 16-byte copies.
static inline bool kvq_plan_decode_linear(kvq_fattn_args & a, const kvq_decode_entry & pair, const int size, const kvq_device & dev, kvq_launch & out) {
    auto run_of_rows = [](const kvq_operand & o) {
        return o.nb2 == o.bytes && o.nb1 == 8*o.bytes && o.nb3 % 16 == 0 && (uintptr_t) o.data % 16 == 0;
    };
    const bool bias = a.bias.chunks > 0;
    const kvq_decode_variant & brief = bias ? pair.brief_bias[size] : pair.brief[size];
    const bool is_short = brief.kernel && dev.clusters && a.n_kv <= KVQ_SHORT_TILES*brief.tile && a.n_kv % brief.tile == 0 && a.window.n <= KVQ_SHORT_WINDOW;
    const kvq_decode_variant & e = is_short ? brief : bias ? pair.linear_bias[size] : pair.linear[size];
    if (!e.kernel || a.v_is_k || a.n_head_kv != 8 || a.n_kv % e.tile != 0 || !run_of_rows(a.k) || !run_of_rows(a.v) ||
        (a.mask && (a.nbm1 % 16 != 0 || a.nbm3 % 16 != 0 || (uintptr_t) a.mask % 16 != 0)) || (bias && (a.bias.nbp1 % 16 != 0 || (uintptr_t) a.bias.pos % 16 != 0))) {
        return false;
    }
    a.mask_rows = a.mask ? a.n_tok : 0;
    out.smem = size_t(e.stages)*e.tile*(a.k.nb1 + a.v.nb1 + 2*a.mask_rows + (bias ? 4 : 0)) + 128 + kvq_decode_extra(a, e, 8);
    if (out.smem > dev.smem_block) {
        return false;
    }
    a.heads = 8;
    a.row_groups = a.slices = 1;
    out.joined = is_short;
    if (is_short) {
        a.n_split = 8;          // the blocks of one cluster
        a.n_part  = 0;
    } else {
        const int resident = int(dev.smem_sm/(out.smem + 1024)) < e.blocks ? int(dev.smem_sm/(out.smem + 1024)) : e.blocks;
        const int want = dev.n_sm*(resident > 0 ? resident : 1)/a.n_seq;
        a.n_split = a.n_part = kvq_decode_splits(a.n_kv/e.tile, a.window.n/KVQ_WINDOW_TILE, want < 1 ? 1 : want);
    }
    out.kernel = e.kernel;
    out.grid   = dim3(a.n_split, 1, a.n_seq);
    out.block  = dim3(32, 8, 1);
    return true;
}

static inline bool kvq_plan_decode(kvq_fattn_args & a, const int dk, const int dv, const kvq_device & dev, kvq_launch & out) {
    if (!(kvq_is_turbo(a.k.store) || a.k.store == KVQ_STORE_OSCAR2) || !kvq_is_turbo(a.v.store)) {
        return false;
    }
    const kvq_decode_entry pair = kvq_find_decode(a.k.store, a.v.store, dk, dv, a.v_is_k);
    const int n_rows = a.gqa*a.n_tok, size = n_rows > 4, rows = size ? 8 : 4;
    const kvq_decode_variant & e = a.bias.chunks > 0 ? pair.general_bias[size] : pair.general[size];
    if (!e.kernel) {
        return false;
    }
    if (n_rows <= rows && kvq_plan_decode_linear(a, pair, size, dev, out)) {
        return true;
    }
    a.mask_rows = 0;
    const int groups = (n_rows + rows - 1)/rows;
    const bool packed = a.k.nb2 == a.k.bytes && (a.v_is_k || a.v.nb2 == a.v.bytes);
    const int max_work = 8/pair.v_parts;
    a.row_groups = groups < max_work ? groups : max_work;

    auto smem_of = [&](const int heads, const int slices) {
        kvq_set_window(a.k, heads);
        kvq_set_window(a.v, heads);
        return size_t(heads*a.row_groups*(e.q_bytes + 32)) + 16 +
            size_t(e.stages)*e.tile*slices*(a.k.stride + (a.v_is_k ? 0 : a.v.stride) + (a.bias.chunks > 0 ? 4 : 0)) + 128 + kvq_decode_extra(a, e, heads*a.row_groups);
    };
    // as many heads as there are warps for them: neighbouring heads share sectors of memory
    const size_t limit = dev.smem_sm/e.blocks - 1024 < dev.smem_block ? dev.smem_sm/e.blocks - 1024 : dev.smem_block;
    a.heads = 0;
    for (int h = max_work/a.row_groups; h >= 1; --h) {
        if (a.n_head_kv % h == 0 && (packed || h == 1) && smem_of(h, 1) <= limit) {
            a.heads = h;
            break;
        }
    }
    if (a.heads == 0) {
        a.heads = 1;
        while (a.row_groups > 1 && smem_of(1, 1) > dev.smem_block) {
            a.row_groups--;
        }
        if (smem_of(1, 1) > dev.smem_block) {
            return false;
        }
    }
    a.slices = max_work/(a.heads*a.row_groups);
    while (a.slices > 1 && (smem_of(a.heads, a.slices) > limit || e.tile*(a.slices/2) >= a.n_kv)) {
        a.slices--;
    }
    out.smem = smem_of(a.heads, a.slices);

    const int y = a.n_head_kv/a.heads*((groups + a.row_groups - 1)/a.row_groups);
    const int per_tile = e.tile*a.slices;
    const int resident = int((dev.smem_sm - 1024)/(out.smem + 1024)) < e.blocks ? int((dev.smem_sm - 1024)/(out.smem + 1024)) : e.blocks;
    const int want = dev.n_sm*(resident > 0 ? resident : 1)/(y*a.n_seq);
    const int per_window = KVQ_WINDOW_TILE*a.slices;
    a.n_split = kvq_decode_splits((a.n_kv + per_tile - 1)/per_tile, (a.window.n + per_window - 1)/per_window, want < 1 ? 1 : want);
    a.n_part = a.n_split*a.slices;
    out.kernel = e.kernel;
    out.grid   = dim3(a.n_split, y, a.n_seq);
    out.block  = dim3(32, a.heads*a.row_groups*pair.v_parts*a.slices, 1);
    return true;
}

// Parts along the context for blocks of e.rows query rows: fewest tile steps of the busiest multiprocessor, a part costs
// about two steps of its own; the partial results stay below 128 MiB.
static inline int kvq_prefill_splits(const kvq_fattn_args & a, const kvq_prefill_entry & e, const int dv, const int n_sm) {
    const int x = (a.gqa*a.n_tok + e.rows - 1)/e.rows, y = a.n_head_kv*e.v_parts;
    const int tiles = (a.n_kv + e.tile - 1)/e.tile + a.window.n/e.tile;
    const int64_t part_bytes = int64_t(a.n_seq)*a.n_tok*a.n_head*dv*4;
    int64_t best = INT64_MAX;
    int n_split = 1;
    for (int s = 1; s <= tiles && s <= 2*n_sm && (s == 1 || s*part_bytes <= (int64_t(128) << 20)); ++s) {
        const int64_t waves = (int64_t(x)*y*a.n_seq*s + n_sm - 1)/n_sm;
        const int64_t cost = 100*waves*((tiles + s - 1)/s + 2);
        if (s == 1 || cost < best - best/32) {
            best = cost;
            n_split = s;
        }
    }
    return n_split;
}

static inline void kvq_set_prefill(kvq_fattn_args & a, const kvq_prefill_entry & e, const int dv, const kvq_device & dev, kvq_launch & out) {
    a.n_split = a.n_part = kvq_prefill_splits(a, e, dv, dev.n_sm);
    a.heads = a.row_groups = a.slices = 1;
    out.kernel = e.kernel;
    out.grid   = dim3((a.gqa*a.n_tok + e.rows - 1)/e.rows, a.n_head_kv*e.v_parts, a.n_seq*a.n_split);
    out.block  = dim3(32, e.warps, 1);
}

static inline bool kvq_plan_prefill(kvq_fattn_args & a, const int dk, const int dv, const kvq_device & dev, kvq_launch & out) {
    kvq_set_window(a.k, 1);
    kvq_set_window(a.v, 1);
    const kvq_prefill_entry hopper = dev.wgmma && dk == dv && !a.v_is_k ? kvq_find_hopper(dk, a.bias.n) : kvq_prefill_entry {};
    if (hopper.kernel && 4*a.gqa*a.n_tok >= 3*hopper.rows) {
        out.smem = hopper.fixed_bytes + size_t(2)*hopper.tile*(a.k.stride + a.v.stride) + 128;
        if (out.smem <= dev.smem_block) {
            a.mask_rows = 0;
            kvq_set_prefill(a, hopper, dv, dev, out);
            return true;
        }
    }
    for (int i = a.bias.chunks > 0 ? KVQ_PREFILL_BIAS : 0; ; ++i) {
        const kvq_prefill_entry e = kvq_find_prefill(dk, dv, a.v_is_k, i);
        if (!e.kernel) {
            return false;
        }
        // 16-byte copies of mask rows, over the tokens that the rows of one block belong to
        const bool stage_mask = a.mask && a.nbm1 % 16 == 0 && a.nbm3 % 16 == 0 && (uintptr_t) a.mask % 16 == 0;
        const int tokens = e.rows % a.gqa == 0 ? e.rows/a.gqa : (e.rows + a.gqa - 2)/a.gqa + 1;
        a.mask_rows = !stage_mask ? 0 : tokens < a.n_tok ? tokens : a.n_tok;
        out.smem = e.fixed_bytes + size_t(e.tile)*(2*(a.k.stride + (a.v_is_k ? 0 : a.v.stride)) + 3*2*a.mask_rows) + 128;
        const bool last = kvq_find_prefill(dk, dv, a.v_is_k, i + 1).kernel == nullptr;
        if (out.smem > dev.smem_block || (!last && e.rows >= 2*a.gqa*a.n_tok)) {
            continue;
        }
        kvq_set_prefill(a, e, dv, dev, out);
        return true;
    }
}

// Rows of a group up to which the decode kernel is the faster one: it unpacks a tile once per 8 rows.
static constexpr int KVQ_DECODE_ROWS = 32;

// Plans attention and combine, which has no kernel where attention needs none. False: no compiled kernel serves these sizes
// on this device. Fills a.n_part, which sizes a.part and a.meta; pointers may be set afterwards, but k.data and v.data must be set before.
static inline bool kvq_plan(kvq_fattn_args & a, const int dk, const int dv, const kvq_device & dev, kvq_launch & attention, kvq_launch & combine) {
    const bool few = a.gqa*a.n_tok <= KVQ_DECODE_ROWS;
    if (!(few && kvq_plan_decode(a, dk, dv, dev, attention)) && !kvq_plan_prefill(a, dk, dv, dev, attention) &&
        !(!few && kvq_plan_decode(a, dk, dv, dev, attention))) {
        return false;
    }
    if (attention.joined) {
        combine = {};
        return true;
    }
    int step = 1;                      // whole warps: DV/4 threads a partial result
    while (dv/4*step % 32 != 0) {
        step *= 2;
    }
    int y = step;
    while (y < a.n_part && dv/4*(y + step) <= 1024 && y < 32) {
        y += step;
    }
    combine.kernel = kvq_find_combine(dv, a.v_is_k);
    combine.grid   = dim3(a.n_seq*a.n_tok*a.n_head, 1, 1);
    combine.block  = dim3(dv/4, y, 1);
    combine.smem   = (size_t((a.n_part + 3) & ~3) + size_t(y)*dv)*sizeof(float);
    return combine.kernel != nullptr;
}
