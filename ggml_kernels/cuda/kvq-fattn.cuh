// What the attention kernels share: arguments, asynchronous copies, the turns of a key bias.
#pragma once

#include "kvq-codec.cuh"
#include "kvq-types.h"

// how K or V is stored: bits per code of our types, or the two partner types
enum kvq_store { KVQ_STORE_TURBO2 = 2, KVQ_STORE_TURBO3 = 3, KVQ_STORE_TURBO4 = 4, KVQ_STORE_OSCAR2 = KVQ_TIERS, KVQ_STORE_Q8_0 = 8, KVQ_STORE_F16 = 16 };

struct kvq_operand {
    const char * data;
    int64_t nb1, nb2, nb3;      // bytes from one token, KV head, sequence to the next
    int     store;              // kvq_store
    int     bytes;              // of one head's slice of a token
    int     gran;               // bytes of one asynchronous copy: 16 or 4
    int     chunks;             // copies per row of the window
    int     stride;             // bytes of a window row in shared memory
};

// The f16 rows of sinks and recent tokens, beside the cache: of turbo types rotated, of others as they are; no scale.
struct kvq_f16_window {
    const char * k, * v;                // [d, n, n_head_kv, n_seq]
    const char * mask;                  // f16 [n, n_tok, 1, nem3]
    int64_t nbk1, nbk2, nbk3, nbv1, nbv2, nbv3, nbm1, nbm3;
    int     nem3;
    int     n;                          // rows, a multiple of 64; 0 without a window
};

static constexpr int KVQ_BIAS_PAIRS = 128;      // pairs that an operation can name

// A key bias b that the stored keys lack: a logit gains q . R(pos) b. Few pairs carry it; the others' part of b stays in the keys.
struct kvq_bias_args {
    const char * q;                     // f32 [d, n_tok, n_head, n_seq], before any transform
    const char * b;                     // f32 [d, n_head_kv]
    const char * trig;                  // f32 [2*pairs, 256 + steps]: cosines, then sines, of positions 0..255 and of multiples of 256
    const char * pos;                   // i32 [n_kv + window rows, n_seq/seqs]
    int64_t nbq1, nbq2, nbq3, nbb1, nbt1, nbp1;
    int     pairs, steps, seqs;
    bool    interleaved;                // pairs (0, 1), (2, 3), ...; else (0, pairs), (1, pairs + 1), ...
    int     n, chunks;                  // pairs that carry the bias, and 16s of them; 0 without a bias
    uint8_t list[KVQ_BIAS_PAIRS];       // these pairs, then the first of them again
};

// Arguments of both attention kernels. A query row is (token, head in group), row = token*gqa + head.
struct kvq_fattn_args {
    const char  * q;
    kvq_operand   k, v;
    kvq_f16_window window;
    kvq_bias_args  bias;
    const char  * mask;         // f16 [n_kv, n_tok, 1, nem3], or null
    const float * sinks;        // one logit a head, or null
    float       * dst;          // [dv, n_head, n_tok, n_seq]
    float       * part;         // partial outputs [n_seq, n_tok, n_head, n_part, dv], not normalised
    float2      * meta;         // their (maximum logit in log2 units, sum of weights)
    int64_t nbq1, nbq2, nbq3;   // bytes of q from one token, head, sequence to the next
    int64_t nbm1, nbm3;
    int     nem3;
    int     n_tok, n_head, n_head_kv, n_seq, gqa, n_kv;
    float   scale, softcap, max_bias, m0, m1;
    uint32_t n_head_log2;
    int     n_split, n_part;    // blocks, and partial results, along the context
    int     mask_rows;          // mask rows staged in shared memory, 0 to read them from memory
    int     heads, row_groups, slices;      // decode: what the warps of one block divide among themselves
    bool    v_is_k;             // V is the head of K's slice (MLA)
    bool    early_queries;      // decode: the launch before this one did not write the queries
};

typedef void (* kvq_fattn_kernel)(const kvq_fattn_args);

static constexpr float KVQ_LOG2E = 1.44269504f;
static constexpr float KVQ_NO_MAX = -1e30f;      // finite, so that differences of maxima are numbers

static __device__ __forceinline__ float kvq_slope(const kvq_fattn_args & a, const int head) {
    if (a.max_bias <= 0.0f) {
        return 1.0f;
    }
    const float base = head < int(a.n_head_log2) ? a.m0 : a.m1;
    return powf(base, head < int(a.n_head_log2) ? head + 1 : 2*(head - int(a.n_head_log2)) + 1);
}

#ifdef KVQ_AMPERE
static __device__ __forceinline__ uint32_t kvq_pack_half2(const float low, const float high) {
    const __half2 h = __floats2half2_rn(low, high);
    return *(const uint32_t *) &h;
}

// turn by a, then by b
static __device__ __forceinline__ float2 kvq_turn_on(const float2 a, const float2 b) {
    return make_float2(a.x*b.x - a.y*b.y, a.y*b.x + a.x*b.y);
}
// what meets cosine and sine at a position, from what meets them at the turn r further
static __device__ __forceinline__ float2 kvq_turn_back(const float2 z, const float2 r) {
    return make_float2(z.x*r.x + z.y*r.y, z.y*r.x - z.x*r.y);
}
// cosine and sine of pair i at a small position
static __device__ __forceinline__ float2 kvq_turn_row(const kvq_bias_args & bias, const int row, const int i) {
    const float * r = (const float *) (bias.trig + row*bias.nbt1) + i;
    return make_float2(r[0], r[bias.pairs]);
}
// the same at any position, which is not negative: the turn by its multiple of 256, then by the rest
static __device__ __forceinline__ float2 kvq_turn(const kvq_bias_args & bias, const int pos, const int i) {
    return kvq_turn_on(kvq_turn_row(bias, 256 + min(pos >> 8, bias.steps - 1), i), kvq_turn_row(bias, pos & 255, i));
}
// What row (token, head) meets cosine and sine of pair list[i] with, times scale; 0 past the last.
static __device__ __forceinline__ float2 kvq_bias_query(const kvq_bias_args & bias, const int seq, const int tok, const int head, const int head_kv, const int i, const float scale) {
    if (i >= bias.n) {
        return make_float2(0.0f, 0.0f);
    }
    const int pair = bias.list[i];
    const float * q = (const float *) (bias.q + seq*bias.nbq3 + tok*bias.nbq1 + head*bias.nbq2);
    const float * b = (const float *) (bias.b + head_kv*bias.nbb1);
    const int x = bias.interleaved ? 2*pair : pair, y = bias.interleaved ? 2*pair + 1 : pair + bias.pairs;
    return make_float2(scale*(q[x]*b[x] + q[y]*b[y]), scale*(q[y]*b[x] - q[x]*b[y]));
}

// Starts the copy of n_rows token rows of a window into shared memory; rows past the end become zeros.
// GRAN bytes a copy; first: address of the window in the row of token 0.
template <int GRAN> static __device__ __forceinline__ void kvq_copy_window_g(
        const kvq_operand & o, const char * first, const uint32_t dst, const int token, const int n_rows, const int n_kv,
        const int tid, const int n_threads) {
    // threads walk a row's chunks; 32 lanes a row, several rows at once when a row is short
    const int per = o.chunks <= 4 ? 4 : o.chunks <= 8 ? 8 : o.chunks <= 16 ? 16 : 32;
    const int c0 = tid & (per - 1), r0 = tid/per, dr = n_threads/per;
    for (int r = r0; r < n_rows; r += dr) {
        const bool real = token + r < n_kv;
        const char * src = (const char *) ((uintptr_t) (first + (real ? token + r : 0)*o.nb1) & ~uintptr_t(GRAN - 1));
        for (int c = c0; c < o.chunks; c += per) {
            kvq_cp_async<GRAN>(dst + r*o.stride + c*GRAN, src + c*GRAN, real);
        }
    }
}
static __device__ __forceinline__ void kvq_copy_window(
        const kvq_operand & o, const char * first, const uint32_t dst, const int token, const int n_rows, const int n_kv,
        const int tid, const int n_threads) {
    if (o.gran == 16) {
        kvq_copy_window_g<16>(o, first, dst, token, n_rows, n_kv, tid, n_threads);
    } else {
        kvq_copy_window_g<4>(o, first, dst, token, n_rows, n_kv, tid, n_threads);
    }
}

// This thread's part of a copy in 16-byte pieces, worked out once: a thread keeps its piece of a row and walks the rows.
struct kvq_copier {
    uint32_t src, src_step;     // bytes from the start of the tile, and to this thread's next row
    int dst, dst_step;          // the same in the window
    int row, row_step;          // row is past the last when this thread copies nothing

    __device__ __forceinline__ kvq_copier(const int chunks, const int64_t nb, const int stride, const int tid, const int n_threads) {
        const int per = chunks <= 4 ? 4 : chunks <= 8 ? 8 : chunks <= 16 ? 16 : 32, c = tid & (per - 1);
        row = c < chunks ? tid/per : 1 << 20;
        src = uint32_t(tid/per*nb) + c*16;
        dst = tid/per*stride + c*16;
        row_step = n_threads/per;
        src_step = uint32_t(row_step*nb);
        dst_step = row_step*stride;
    }
    static __device__ __forceinline__ bool possible(const int rows, const int chunks, const int64_t nb) {
        return chunks <= 32 && nb*rows < (int64_t(1) << 31);
    }
    __device__ __forceinline__ void copy(const uint32_t at, const char * tile, const int rows, const int rows_left) const {
        uint32_t from = src, to = at + dst;
        for (int r = row; r < rows; r += row_step) {
            kvq_cp_async<16>(to, tile + from, r < rows_left);
            from += src_step;
            to += dst_step;
        }
    }
};
#endif // KVQ_AMPERE
