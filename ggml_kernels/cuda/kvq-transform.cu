// Calibrated transforms of the keys and queries of a few tokens, those of one layer in one launch.
#include "common.cuh"
#include "kvq-fattn.cuh"
#include "kvq-transform.h"
#include "kvq-write.cuh"
#include "kvq-rotary.cuh"

constexpr int KVQ_TRANSFORM_WARPS  = 8;
constexpr int KVQ_TRANSFORM_ROWS   = 2;    // matrix rows of a warp
constexpr int KVQ_TRANSFORM_COLS   = 4;    // columns that it asks for at once

struct kvq_transform_set {
    kvq_transform_args args;
    kvq_rotary turn[2];                    // of keys, of queries
    bool turned[2];                        // x is what they were before it
};

// Sums of N values over the lanes of a warp; lane l gets the one of number l*N/32.
template <int N>
static __device__ __forceinline__ float kvq_warp_sums(float (&v)[N], const int lane) {
    int offset = 16;
#pragma unroll
    for (int n = N/2; n > 0; n /= 2, offset /= 2) {
#pragma unroll
        for (int i = 0; i < n; ++i) {
            const float other = __shfl_xor_sync(0xFFFFFFFF, lane & offset ? v[i] : v[i + n], offset);
            v[i] = (lane & offset ? v[i + n] : v[i]) + other;
        }
    }
#pragma unroll
    for (int w = 16/N; w > 0; w /= 2) {
        v[0] += __shfl_xor_sync(0xFFFFFFFF, v[0], w);
    }
    return v[0];
}

// ROWS rows of a KV head's matrix from `row` on, one warp, by all columns, COLS of them at a time. NV: vectors of 4 values that a lane holds of a row. With ROTARY, columns
// are normed and turned on the way; angles: of the block's THREADS threads. put(i, j, r, y): value r of the column of indices i, j.
template <int NV, bool ROTARY, int ROWS, int COLS, int THREADS, typename put_value>
static __device__ __forceinline__ void kvq_transform_rows(const kvq_transform_part & p, const kvq_rotary & t, const bool turned, const int d, const int head, const int row, float2 * angles,
        const put_value & put) {
    static_assert(ROWS*COLS == 8, "sums of a step");
    const int lane = threadIdx.x;
    const float4 zero = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    half2 m[ROWS][NV][2];
    float of_mean[ROWS] = {};
    // what does not change is asked for while the kernels before this one still run, and what it gives is worked out
#pragma unroll
    for (int v = 0; v < NV; ++v) {
        const int at = 4*(v*32 + lane);
        const float4 mean = p.mean && at < d ? *(const float4 *) (p.mean + head*d + at) : zero;
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            const uint2 bits = row + r < d && at < d ? *(const uint2 *) (p.matrix + (int64_t(head)*d + row + r)*d + at) : make_uint2(0, 0);
            m[r][v][0] = *(const half2 *) &bits.x;
            m[r][v][1] = *(const half2 *) &bits.y;
            const float2 lo = __half22float2(m[r][v][0]), hi = __half22float2(m[r][v][1]);
            of_mean[r] += mean.x*lo.x + mean.y*lo.y + mean.z*hi.x + mean.w*hi.y;
        }
    }
    const int half = turned ? t.n_dims/2 : 0;
    float own[ROTARY ? NV : 1][4], other[ROTARY ? NV : 1][4];
    auto set_token = [&](const int token) {
#pragma unroll
        for (int v = 0; v < (ROTARY ? NV : 0); ++v) {
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                const int i = 4*(v*32 + lane) + k, pair = !t.neox ? i/2 : i < half ? i : i - half;
                const bool turns = i < 2*half, first = t.neox ? i < half : k % 2 == 0;
                const float2 angle = turns ? angles[token*half + pair] : make_float2(1.0f, 0.0f);
                const bool norms = turned && t.weight && i < d;
                own[v][k]   = angle.x*(norms ? t.weight[i] : 1.0f);
                other[v][k] = (first ? -angle.y : angle.y)*(norms && turns ? t.weight[!t.neox ? i ^ 1 : first ? i + half : i - half] : 1.0f);
            }
        }
    };
    if constexpr (ROTARY) {
        for (int i = threadIdx.y*32 + lane; turned && i < t.n_tokens*half; i += THREADS) {
            angles[i] = kvq_angle(t, i % half, t.pos[i/half]);
        }
        __syncthreads();
        set_token(0);
    }
    const float mean_sum = kvq_warp_sums(of_mean, lane), minus = __shfl_sync(0xFFFFFFFF, mean_sum, lane/4 % ROWS*(32/ROWS));
    kvq_pdl_wait();
    kvq_pdl_launch();
    // all columns of a step are asked for before any result is written: it could be where the next column is read, to the compiler
    for (int first = 0, i = 0, j = 0; j < p.n2; first += COLS) {
        float4 x[COLS][NV], y[ROTARY ? COLS : 1][NV];
        int token[COLS];
#pragma unroll
        for (int c = 0; c < COLS; ++c) {
            const char * column = p.x + i*p.nbx1 + (head*p.n2 + j)*p.nbx2;
#pragma unroll
            for (int v = 0; v < NV; ++v) {
                const int at = 4*(v*32 + lane);
                const bool there = j < p.n2 && at < d;
                x[c][v] = there ? *(const float4 *) (column + at*sizeof(float)) : zero;
                if (ROTARY && t.neox) {
                    y[c][v] = there && at < 2*half ? *(const float4 *) (column + (at < half ? at + half : at - half)*sizeof(float)) : zero;
                }
            }
            token[c] = i;
            if (++i == p.n1) {
                i = 0;
                ++j;
            }
        }
        float squares[COLS] = {};
        if (turned) {
#pragma unroll
            for (int c = 0; c < COLS; ++c) {
                if (t.n_tokens > 1) {
                    set_token(token[c]);
                }
#pragma unroll
                for (int v = 0; v < NV; ++v) {
                    const float4 z = x[c][v], w = t.neox ? y[ROTARY ? c : 0][v] : make_float4(z.y, z.x, z.w, z.z);
                    const float (&a)[4] = own[ROTARY ? v : 0], (&b)[4] = other[ROTARY ? v : 0];
                    squares[c] += z.x*z.x + z.y*z.y + z.z*z.z + z.w*z.w;
                    x[c][v] = make_float4(z.x*a[0] + w.x*b[0], z.y*a[1] + w.y*b[1], z.z*a[2] + w.z*b[2], z.w*a[3] + w.w*b[3]);
                }
            }
        }
        float sum[COLS*ROWS] = {};
#pragma unroll
        for (int v = 0; v < NV; ++v) {
#pragma unroll
            for (int r = 0; r < ROWS; ++r) {
                const float2 lo = __half22float2(m[r][v][0]), hi = __half22float2(m[r][v][1]);
#pragma unroll
                for (int c = 0; c < COLS; ++c) {
                    sum[c*ROWS + r] += x[c][v].x*lo.x + x[c][v].y*lo.y + x[c][v].z*hi.x + x[c][v].w*hi.y;
                }
            }
        }
        // a lane has the sum of one row and column, and the norm of that
        const float scale = turned && t.weight ? kvq_norm(t, kvq_warp_sums(squares, lane)) : 1.0f;
        const float total = scale*kvq_warp_sums(sum, lane) - minus;
        const int c = first + lane/4/ROWS, r = row + lane/4 % ROWS, c2 = c/p.n1, c1 = c - c2*p.n1;
        if (lane % 4 == 0 && c2 < p.n2 && r < d) {
            put(c1, c2, r, total);
        }
        if (turned && t.y && row == 0) {       // for others that read them
#pragma unroll
            for (int k = 0; k < COLS; ++k) {
                const int k2 = (first + k)/p.n1, k1 = first + k - k2*p.n1;
                const float own_scale = __shfl_sync(0xFFFFFFFF, scale, 32/COLS*k);
                float * out = t.n_tokens > 1 ? t.y + (int64_t(k1)*t.n_head + head*p.n2 + k2)*d : t.y + (head*p.n1*p.n2 + first + k)*d;
#pragma unroll
                for (int v = 0; v < NV; ++v) {
                    const int at = 4*(v*32 + lane);
                    if (k2 < p.n2 && at < d) {
                        *(float4 *) (out + at) = make_float4(own_scale*x[k][v].x, own_scale*x[k][v].y, own_scale*x[k][v].z, own_scale*x[k][v].w);
                    }
                }
            }
        }
    }
}

// Blocks: KV head and rows of its matrix; keys, queries.
template <int NV, bool ROTARY>
static __global__ void __launch_bounds__(32*KVQ_TRANSFORM_WARPS) kvq_transform(const __grid_constant__ kvq_transform_set set) {
    __shared__ float2 angles[ROTARY ? KVQ_ROTARY_TOKENS*NV*64 : 1];
    const kvq_transform_part & p = set.args.part[blockIdx.y];
    const int groups = gridDim.x/set.args.n_head_kv, head = blockIdx.x/groups;
    const int row = ((blockIdx.x - head*groups)*KVQ_TRANSFORM_WARPS + threadIdx.y)*KVQ_TRANSFORM_ROWS;
    kvq_transform_rows<NV, ROTARY, KVQ_TRANSFORM_ROWS, KVQ_TRANSFORM_COLS, 32*KVQ_TRANSFORM_WARPS>(p, set.turn[blockIdx.y], set.turned[blockIdx.y], set.args.d, head, row, angles,
        [&](const int i, const int j, const int r, const float y) { p.y[r + i*p.sy1 + (head*p.n2 + j)*p.sy2] = y; });
}

// ---- with the writes of the layer ----

constexpr int KVQ_STEP_WARPS = 16;
constexpr int KVQ_STEP_ROWS  = 8;          // of a warp in the blocks of keys

struct kvq_step_set {
    kvq_transform_set transform;
    kvq_rows_args part[KVQ_ROWS_TOGETHER];     // those of the transformed keys come first
    int  n_of_keys, n_parts;
    bool keeps_keys;                           // in memory, for others that read them
};

// Heads of N values. Blocks: one for the keys of each KV head, which are whole in it and written from there; rows of the queries' matrices; other rows to write.
template <int N>
static __global__ void __launch_bounds__(32*KVQ_STEP_WARPS) kvq_transform_and_write(const __grid_constant__ kvq_step_set set) {
    static_assert(N <= KVQ_STEP_WARPS*KVQ_STEP_ROWS, "a head's keys are a block's");
    constexpr int GROUPS = (N + KVQ_STEP_WARPS*KVQ_TRANSFORM_ROWS - 1)/(KVQ_STEP_WARPS*KVQ_TRANSFORM_ROWS);
    __shared__ float2  angles[KVQ_ROTARY_TOKENS*64];
    __shared__ float   keys[KVQ_ROTARY_TOKENS][N];
    __shared__ float   all_buf[KVQ_STEP_WARPS][N];
    __shared__ uint8_t all_codes[KVQ_STEP_WARPS][N];
    const kvq_transform_args & args = set.transform.args;
    const int lane = threadIdx.x, warp = threadIdx.y, heads = args.n_head_kv;
    float   * buf   = all_buf[warp];
    uint8_t * codes = all_codes[warp];
    int block = blockIdx.x;
    float x[kvq_hadamard<N>::regs];
    if (block < heads) {
        const kvq_transform_part & p = args.part[0];
        kvq_transform_rows<1, true, KVQ_STEP_ROWS, 8/KVQ_STEP_ROWS, 32*KVQ_STEP_WARPS>(p, set.transform.turn[0], set.transform.turned[0], N, block, warp*KVQ_STEP_ROWS, angles,
            [&](const int i, const int, const int r, const float y) {
                keys[i][r] = y;
                if (set.keeps_keys) {
                    p.y[r + i*p.sy1 + block*p.sy2] = y;
                }
            });
        __syncthreads();
        for (int u = warp; u < p.n1*set.n_of_keys; u += KVQ_STEP_WARPS) {
            const int which = u/p.n1, token = u - which*p.n1;
            uint32_t at[4] = { uint32_t(block), uint32_t(token), 0, 0 };
#pragma unroll
            for (int r = 0; r < kvq_hadamard<N>::regs; ++r) {
                x[r] = r*32 + lane < N ? keys[token][r*32 + lane] : 0.0f;
            }
            kvq_write_part<N>(set.part[which], 0, at, x, buf, codes, lane);
        }
        return;
    }
    block -= heads;
    if (block < heads*GROUPS) {
        const kvq_transform_part & p = args.part[1];
        const int head = block/GROUPS, row = ((block - head*GROUPS)*KVQ_STEP_WARPS + warp)*KVQ_TRANSFORM_ROWS;
        kvq_transform_rows<1, true, KVQ_TRANSFORM_ROWS, KVQ_TRANSFORM_COLS, 32*KVQ_STEP_WARPS>(p, set.transform.turn[1], set.transform.turned[1], N, head, row, angles,
            [&](const int i, const int j, const int r, const float y) { p.y[r + i*p.sy1 + (head*p.n2 + j)*p.sy2] = y; });
        return;
    }
    uint32_t i = (block - heads*GROUPS)*KVQ_STEP_WARPS + warp, at[4];
    int which = set.n_of_keys;
    while (which < set.n_parts && i >= set.part[which].n_blocks) {
        i -= set.part[which++].n_blocks;
    }
    kvq_pdl_wait();
    kvq_pdl_launch();
    if (which < set.n_parts) {
        const kvq_rows_args & a = set.part[which];
        kvq_split_index(a, i, at);
        kvq_load_block<N, float>(a, at, x, lane);
        kvq_write_part<N>(a, i, at, x, buf, codes, lane);
    }
}

// The part that reads the turn's rows where they were before it; false where this kernel cannot.
static bool kvq_rotary_part(kvq_transform_set & set, const kvq_transform_nodes & nodes, const kvq_rotary_nodes & turn) {
    const kvq_rotary & t = turn.turn;
    const int part = kvq_is_all_of(nodes.in[0], turn.rope) ? 0 : 1;
    if (!kvq_is_all_of(nodes.in[part], turn.rope) || set.turned[part] || t.d > 256 || t.n_dims % 8 != 0 || !kvq_vector_rows(turn.source)) {
        return false;
    }
    kvq_transform_part & p = set.args.part[part];
    p.x = t.x;
    p.nbx1 = t.n_tokens > 1 ? t.nbx2 : t.nbx1;
    p.nbx2 = t.n_tokens > 1 ? t.nbx1 : p.n1*t.nbx1;
    set.turn[part]   = t;
    set.turned[part] = true;
    return true;
}

static void kvq_launch_transform(ggml_backend_cuda_context & ctx, const kvq_transform_set & set, const bool rotary) {
    constexpr int rows = KVQ_TRANSFORM_WARPS*KVQ_TRANSFORM_ROWS;
    const int d = set.args.d;
    const ggml_cuda_kernel_launch_params launch(dim3(unsigned(set.args.n_head_kv*((d + rows - 1)/rows)), 2, 1), dim3(32, KVQ_TRANSFORM_WARPS, 1), size_t(0), ctx.stream());
    void (* kernel)(const kvq_transform_set) = d > 256 ? kvq_transform<4, false> : rotary ? (d > 128 ? kvq_transform<2, true> : kvq_transform<1, true>) :
        d > 128 ? kvq_transform<2, false> : kvq_transform<1, false>;
    ggml_cuda_kernel_launch(kernel, launch, set);
}

static void kvq_launch_step(ggml_backend_cuda_context & ctx, const kvq_step_set & set) {
    constexpr int rows = KVQ_STEP_WARPS*KVQ_TRANSFORM_ROWS;
    const int d = set.transform.args.d;
    unsigned others = 0;
    for (int i = set.n_of_keys; i < set.n_parts; ++i) {
        others += set.part[i].n_blocks;
    }
    const unsigned blocks = set.transform.args.n_head_kv*(1 + (d + rows - 1)/rows) + (others + KVQ_STEP_WARPS - 1)/KVQ_STEP_WARPS;
    void (* kernel)(const kvq_step_set) = nullptr;
    switch (d) {
#define KVQ_CASE_STEP(N) case N: kernel = kvq_transform_and_write<N>; break;
        KVQ_FOR_EACH_BLOCK(KVQ_CASE_STEP)
        default: GGML_ABORT("not a block of the cache types");
    }
    ggml_cuda_kernel_launch(kernel, ggml_cuda_kernel_launch_params(dim3(blocks, 1, 1), dim3(32, KVQ_STEP_WARPS, 1), size_t(0), ctx.stream()), set);
}

// Adds the writes, the last of them node `last`, of which one at least is of the transformed keys; false where they need a launch of their own.
static bool kvq_add_writes(kvq_step_set & set, const ggml_cgraph * graph, const int first, const int last, const kvq_transform_nodes & nodes, const ggml_tensor * const * writes, const int n) {
    const ggml_tensor * keys = nodes.out[0];
    const int64_t d = set.transform.args.d, row = d*set.transform.args.n_head_kv;
    for (const bool of_keys : { true, false }) {
        for (int i = 0; i < n; ++i) {
            const ggml_tensor * x = writes[i]->src[0];
            if (kvq_is_all_of(x, keys) != of_keys) {
                continue;
            }
            if (ggml_blck_size(writes[0]->type) != d || (of_keys ? x->ne[0] != row : kvq_overlap(nodes.out[0], x) || kvq_overlap(nodes.out[1], x))) {
                return false;
            }
            set.part[set.n_parts++] = kvq_set_rows_args(writes[i], d);
            set.n_of_keys += of_keys;
        }
    }
    int at = first;
    while (graph->nodes[at] != keys) {
        at++;
    }
    set.keeps_keys = !kvq_used_within(graph, at, last);
    return set.n_of_keys > 0;
}

int kvq_cuda_transform(ggml_backend_cuda_context & ctx, const ggml_cgraph * graph, const int i, const kvq_rotary_nodes * turns, const int n_turns, const kvq_writes & writes) {
    kvq_step_set set = {};
    kvq_transform_nodes nodes;
    const int n_done = kvq_find_transform(graph, i, KVQ_ROTARY_TOKENS, set.transform.args, &nodes);
    if (!n_done) {
        return -1;
    }
    const int last = i + n_done;
    for (int k = 0; k < n_turns; ++k) {
        kvq_rotary_nodes turn = turns[k];
        const bool stays = kvq_used_within(graph, turn.last, last);
        if (stays) {
            turn.turn.y = nullptr;
        }
        // every block reads what comes before the turns, and may begin when another has ended
        for (int other = 0; other < n_turns; ++other) {
            for (const ggml_tensor * read : { turns[other].source, (const ggml_tensor *) turns[other].rope->src[1] }) {
                if (kvq_overlap(nodes.out[0], read) || kvq_overlap(nodes.out[1], read) || (!stays && kvq_overlap(turn.rope, read))) {
                    return -1;
                }
            }
        }
        for (int w = 0; w < writes.n && !stays; ++w) {
            if (kvq_overlap(turn.rope, writes.node[w]->src[0])) {
                return -1;
            }
        }
        if (!kvq_rotary_part(set.transform, nodes, turn)) {
            return -1;
        }
    }
    if (!writes.n) {
        kvq_launch_transform(ctx, set.transform, n_turns > 0);
        return last;
    }
    if (!kvq_add_writes(set, graph, i, writes.last, nodes, writes.node, writes.n)) {
        return -1;
    }
    kvq_launch_step(ctx, set);
    return writes.last;
}
