// GGML_OP_FLASH_ATTN_EXT over caches in which the keys, the values or both are of our types.
//
// All query rows that read one KV head are taken together, so a block is read and unpacked once for the group. Queries
// are rotated on entry and the output is rotated back on exit; in between keys and values stay in the rotated domain.
//
// The context is cut into spans of a fixed length, those of the cache and then those of the f16 window, whose partial results
// are merged in ascending order. So few heads
// still occupy all threads, and a row's output has the same bits whatever the batch and the number of threads: a token
// decoded alone, in a prompt or beside other sequences continues alike.
#include "kvq.h"
#include "kvq-attn-tile.h"
#include "kvq-bias-tile.h"
#include "kvq-flash-attn.h"
#include "ggml-cpu.h"

#include <algorithm>
#include <cfloat>
#include <numeric>

namespace kvq {

static const packed_kernels * kernels_for(ggml_type type) {
    switch ((int) type) {
#define KVQ_KERNELS(E, F, NAME, FAMILY, CODE, N, BYTES) \
        case GGML_TYPE_##E: { \
            constexpr bool rotated = CODE != KVQ_TIERED; \
            constexpr float unit = 1.0f/codec<CODE>::scale; \
            static const packed_kernels k = { N, BYTES, tile_stride<N>, unit, quantize_query<N, rotated>, turn_query<N, rotated>, \
                unpack_keys<CODE, N>, add_logits<N>, add_values<CODE, N>, rotated ? unit/sqrtf((float) N) : unit, \
                rotated ? unrotate<N> : rescale<N> }; \
            return &k; \
        }
        KVQ_FOR_EACH_CACHE_TYPE(KVQ_KERNELS)
#undef KVQ_KERNELS
        default: return nullptr;
    }
}

static void to_float_row(ggml_type type, const void * x, float * y, int64_t n) {
    // the rows of a window stay in the rotated domain
    switch (kvq_is_window_type(type) ? GGML_TYPE_F16 : type) {
        case GGML_TYPE_F32:  memcpy(y, x, n*sizeof(float)); break;
        case GGML_TYPE_F16:  halves_to_float((const uint16_t *) x, y, n); break;
        case GGML_TYPE_BF16: ggml_cpu_bf16_to_fp32((const ggml_bf16_t *) x, y, n); break;
        default:             ggml_get_type_traits(type)->to_float(x, y, n); break;
    }
}

static void to_float_rows(const ggml_tensor * x, const uint8_t * const * token, int n, float * y, int stride) {
    const int64_t bytes = ggml_row_size(x->type, x->ne[0]);
    for (int t = 0; t < n; t++) {
        if (token[t]) {
            for (int64_t line = 0; line < bytes; line += 64) {
                prefetch<1>(token[t] + line, TILE*x->nb[1]);
            }
            to_float_row(x->type, token[t], y + t*stride, x->ne[0]);
        }
    }
}

// Hands out the work buffer; counts when it has none.
struct arena {
    char * base;
    size_t used = 0;

    template <typename T> T * take(size_t n) {
        T * p = base ? (T *) (base + used) : nullptr;
        used += (n*sizeof(T) + 63)/64*64;
        return p;
    }
};

constexpr int    SPAN_TILES   = 8;           // 512 tokens
constexpr size_t PARTIALS_MAX = 64u << 20;   // bytes

struct plan {
    attn_args a;
    const packed_kernels * k;   // null: float keys
    const packed_kernels * v;   // null: float values
    int group;                  // query heads that share a K head and a V head
    int64_t groups, group_rows; // rows: token-major, so that a tile of rows covers few tokens
    int64_t row_tiles, cache_spans, spans;
    int64_t parts;              // work units of a row tile, each with one partial result a row; 1: no partials
    int64_t part_spans;
    int64_t batch;              // units that a thread takes at a time
    int key_row, value_row;     // padded floats of a row

    plan(const ggml_tensor * dst, int n_threads) : a(dst) {
        k = kernels_for(a.k->type);
        v = kernels_for(a.v->type);
        group      = (int) std::gcd(a.q->ne[2]/a.k->ne[2], a.q->ne[2]/a.v->ne[2]);
        groups     = a.q->ne[2]/group;
        group_rows = group*a.q->ne[1];
        row_tiles  = (group_rows + ROWS - 1)/ROWS;
        cache_spans = spans_of(a.parts[0].n_rows());
        spans      = cache_spans + spans_of(a.parts[1].n_rows());
        key_row    = round_up((int) a.k->ne[0], 16);
        value_row  = round_up((int) a.v->ne[0], 16);

        // Few rows: a unit is one span, and a thread takes all heads of a span in turn, whose blocks share cache lines.
        // Many rows: a unit runs through the whole context, and a thread takes one row tile of one head.
        const int64_t tiles_of_rows = row_tiles*a.q->ne[3];
        part_spans = spans;
        if (tiles_of_rows == 1 || tiles_of_rows*groups < 4*n_threads) {
            // longer parts where partials of every span would take too much memory
            const int64_t fit = PARTIALS_MAX/(rows()*partial_size()*sizeof(float));
            part_spans = (spans + std::max<int64_t>(fit, 1) - 1)/std::max<int64_t>(fit, 1);
        }
        parts = (spans + part_spans - 1)/part_spans;
        batch = parts > 1 && parts*tiles_of_rows >= 2*n_threads ? groups : 1;
    }

    static int64_t spans_of(int64_t rows) { return (rows + SPAN_TILES*TILE - 1)/(SPAN_TILES*TILE); }

    bool    window()        const { return a.parts[1].k != nullptr; }
    int64_t rows()          const { return group_rows*groups*a.q->ne[3]; }
    int64_t units()         const { return groups*row_tiles*a.q->ne[3]*parts; }
    size_t  partial_size()  const { return 16 + value_row; }   // largest logit, sum of weights, padding; weighted values
    size_t  partial_floats() const { return parts > 1 ? rows()*parts*partial_size() : 0; }
};

// one thread's buffers
struct scratch {
    int8_t  * query;         // packed keys: rows of blocks of int8
    float   * query_unit;    // its value in logits, one for each row and block
    float   * query_float;   // for float keys, in the domain of the window's where the cache has packed ones
    float   * logit, * acc;
    float   * merged;        // of the spans so far
    int8_t  * level, * magnitude;
    float   * key, * value;
    int8_t  * value_level;
    int16_t * fixed;
    bias_tile bias;
    size_t query_stride, blocks;

    scratch(const plan & p, arena & m) : bias(p.a.bias, m) {
        const size_t dk = p.a.k->ne[0];
        blocks       = p.k ? dk/p.k->block : 0;
        query_stride = p.k ? blocks*p.k->stride : 0;
        query       = m.take<int8_t>(p.k ? ROWS*query_stride : 0);
        query_unit  = m.take<float>(ROWS*blocks);
        query_float = m.take<float>(p.k && !p.window() ? 0 : ROWS*p.key_row);
        logit       = m.take<float>(ROWS*TILE);
        acc         = m.take<float>(ROWS*p.value_row);
        merged      = m.take<float>(ROWS*p.partial_size());
        level       = m.take<int8_t>(p.k ? TILE*p.k->stride : 0);
        magnitude   = m.take<int8_t>(p.k ? TILE*p.k->stride : 0);
        key         = m.take<float>(p.k && !p.window() ? 0 : TILE*p.key_row);
        value       = m.take<float>(p.v && !p.window() ? 0 : TILE*p.value_row);
        value_level = m.take<int8_t>(p.v ? TILE*p.v->block : 0);
        fixed       = m.take<int16_t>(p.v ? ROWS*TILE : 0);
    }

    // the padding of rows, which the kernels never write
    void clear(const plan & p) {
        if (p.k) {
            memset(query, 0, ROWS*query_stride);
            memset(level, 0, TILE*p.k->stride);
            memset(magnitude, 0, TILE*p.k->stride);
        }
        if (!p.k || p.window()) {
            memset(query_float, 0, ROWS*p.key_row*sizeof(float));
            memset(key, 0, TILE*p.key_row*sizeof(float));
        }
        if (!p.v || p.window()) {
            memset(value, 0, TILE*p.value_row*sizeof(float));
        }
        if (p.a.bias) {
            bias.prepare();
        }
    }
};

// the rows of one unit and the state of their softmax
struct row_state {
    int n;
    int token[ROWS], head[ROWS];
    const uint16_t * mask[2][ROWS];   // of the cache and of the window
    float slope[ROWS];
    float top[ROWS], total[ROWS];    // running maximum of the logits and sum of the weights
    float alpha[ROWS], beta[ROWS];   // factors of the sums so far and of the tile
};

constexpr uint16_t F16_MINUS_INF = 0xFC00;

// tokens of the tile that some row may see, as bits
static uint64_t visible_tokens(const uint16_t * const * mask, int rows, int64_t first, int n) {
    uint64_t seen = 0;
    const uint64_t all = n == 64 ? ~0ull : (1ull << n) - 1;
    const uint16_t * last = nullptr;
    for (int r = 0; r < rows && seen != all; r++) {
        const uint16_t * m = mask[r];
        if (!m) {
            return all;
        }
        if (m == last) {
            continue;
        }
        last = m;
        int t = 0;
#if defined(KVQ_AVX2)
        for (; t + 32 <= n; t += 32) {
            const __m256i none = _mm256_set1_epi16((int16_t) F16_MINUS_INF);
            const __m256i a = _mm256_cmpeq_epi16(none, _mm256_loadu_si256((const __m256i *) (m + first + t)));
            const __m256i b = _mm256_cmpeq_epi16(none, _mm256_loadu_si256((const __m256i *) (m + first + t + 16)));
            const __m256i hidden = _mm256_permute4x64_epi64(_mm256_packs_epi16(a, b), 0xD8);
            seen |= (uint64_t) (uint32_t) ~_mm256_movemask_epi8(hidden) << t;
        }
#endif
        for (; t < n; t++) {
            seen |= (uint64_t) (m[first + t] != F16_MINUS_INF) << t;
        }
    }
    return seen;
}

// Logits of one row to weights relative to the tile's maximum; updates the row's state. mask is null or holds a whole
// tile.
static void softmax_row(float * logit, int n, const uint16_t * mask, float cap, row_state & rows, int r) {
    const f32x16 lowest = set1(-FLT_MAX), minus_inf = set1(-INFINITY), slope = set1(rows.slope[r]);
    f32x16 top = minus_inf;
    for (int t = 0; t < n; t += 16) {
        f32x16 x = load(logit + t);
        if (cap != 0.0f) {
            x = mul(set1(cap), tanh(x));
        }
        if (mask) {
            const f32x16 m = mul(slope, load_f16(mask + t));
            x = select_lt(m, lowest, minus_inf, add(x, m));
        }
        top = max(x, top);
        store(logit + t, x);
    }
    const float tile_top = max_of(top);
    if (tile_top == -INFINITY) {
        for (int t = 0; t < n; t += 16) {
            store(logit + t, set1(0.0f));
        }
        rows.alpha[r] = 1.0f;
        rows.beta[r]  = 0.0f;
        return;
    }
    f32x16 s = set1(0.0f);
    const f32x16 shift = set1(tile_top);
    for (int t = 0; t < n; t += 16) {
        const f32x16 p = exp_nonpositive(sub(load(logit + t), shift));
        s = add(s, p);
        store(logit + t, p);
    }
    if (tile_top > rows.top[r]) {
        rows.alpha[r] = expf(rows.top[r] - tile_top);
        rows.beta[r]  = 1.0f;
        rows.top[r]   = tile_top;
    } else {
        rows.alpha[r] = 1.0f;
        rows.beta[r]  = expf(tile_top - rows.top[r]);
    }
    rows.total[r] = rows.total[r]*rows.alpha[r] + rows.beta[r]*sum(s);
}

static void load_queries(const plan & p, scratch & s, const row_state & rows, int64_t i3) {
    const attn_args & a = p.a;
    for (int r = 0; r < rows.n; r++) {
        const float * q = a.query(rows.token[r], rows.head[r], i3);
        if (a.bias) {
            a.bias.query(rows.token[r], rows.head[r], i3, a.logit_scale(), s.bias.query + r*s.bias.width);
        }
        if (p.k) {
            for (size_t b = 0; b < s.blocks; b++) {
                const float d = p.k->quantize_query(q + b*p.k->block, s.query + r*s.query_stride + b*p.k->stride);
                s.query_unit[r*s.blocks + b] = d*p.k->unit*a.logit_scale();
            }
            if (p.window()) {
                for (int64_t i = 0; i < a.k->ne[0]; i += p.k->block) {
                    p.k->turn_query(q + i, a.logit_scale(), s.query_float + r*p.key_row + i);
                }
            }
        } else {
            for (int64_t i = 0; i < a.k->ne[0]; i++) {
                s.query_float[r*p.key_row + i] = q[i]*a.logit_scale();
            }
        }
    }
}

static void compute_logits(const plan & p, scratch & s, const attn_part & part, const uint8_t * const * token, int n, int rows) {
    if (p.k && part.k == p.a.k) {
        uint16_t d[TILE] = {};
        for (size_t b = 0; b < s.blocks; b++) {
            p.k->unpack_keys(token, b*p.k->bytes, n, TILE*p.a.k->nb[1], s.level, s.magnitude, d);
            p.k->add_logits(s.level, s.magnitude, d, n, s.query + b*p.k->stride, s.query_stride, s.query_unit + b, s.blocks,
                            rows, s.logit, b > 0);
        }
    } else {
        to_float_rows(part.k, token, n, s.key, p.key_row);
        float_logits(s.key, n, s.query_float, p.key_row, rows, s.logit);
    }
}

static void accumulate(const plan & p, scratch & s, const attn_part & part, const uint8_t * const * token, int n, const row_state & rows) {
    if (p.v && part.v == p.a.v) {
        for (int64_t b = 0; b < p.a.v->ne[0]/p.v->block; b++) {
            p.v->add_values(token, b*p.v->bytes, n, TILE*p.a.v->nb[1], s.logit, rows.alpha, rows.beta, rows.n, s.acc + b*p.v->block,
                            p.value_row, s.value_level, s.fixed);
        }
    } else {
        to_float_rows(part.v, token, n, s.value, p.value_row);
        float beta[ROWS];   // the sums of a cache of ours are in its levels
        for (int r = 0; r < rows.n; r++) {
            beta[r] = p.v ? rows.beta[r]/p.v->unit : rows.beta[r];
        }
        float_values(s.value, n, p.value_row, s.logit, rows.alpha, beta, rows.n, s.acc, p.value_row);
    }
}

// softmax over a span for the rows of one unit
static void attend(const plan & p, scratch & s, row_state & rows, int64_t i3, int64_t span) {
    const attn_args & a = p.a;
    const int which = span >= p.cache_spans;
    const attn_part & part = a.parts[which];
    const int64_t n_kv   = part.n_rows();
    const int64_t first  = (which ? span - p.cache_spans : span)*SPAN_TILES;
    const int64_t last   = std::min((n_kv + TILE - 1)/TILE, first + SPAN_TILES);
    const uint8_t * keys   = (const uint8_t *) a.rows_of(part.k, rows.head[0], i3);
    const uint8_t * values = (const uint8_t *) a.rows_of(part.v, rows.head[0], i3);

    const int32_t * positions = a.bias ? a.bias.positions(i3) + part.first : nullptr;
    memset(s.acc, 0, (size_t) rows.n*p.value_row*sizeof(float));
    for (int r = 0; r < rows.n; r++) {
        rows.top[r]   = -INFINITY;
        rows.total[r] = 0.0f;
    }

    for (int64_t tile = first; tile < last; tile++) {
        const int64_t t0 = tile*TILE;
        const int width = (int) std::min<int64_t>(TILE, n_kv - t0);
        const uint64_t seen = visible_tokens(rows.mask[which], rows.n, t0, width);
        if (seen == 0) {
            continue;
        }

        // Runs of sixteen tokens that no row sees are left out: cells of other sequences, of a window, of the future.
        // Shorter runs only save their unpacking, since the order of a row's sums must not depend on other rows.
        int from[TILE/16], n = 0;
        const uint8_t * key[TILE], * value[TILE];
        int32_t position[TILE];
        for (int run = 0; run < TILE; run += 16) {
            if ((seen >> run & 0xFFFF) == 0) {
                continue;
            }
            from[n/16] = run;
            for (int t = run; t < run + 16; t++, n++) {
                const bool visible = seen >> t & 1;
                key[n]   = visible ? keys   + (t0 + t)*part.k->nb[1] : nullptr;
                value[n] = visible ? values + (t0 + t)*part.v->nb[1] : nullptr;
                position[n] = visible && positions ? positions[t0 + t] : -1;
            }
        }

        compute_logits(p, s, part, key, n, rows.n);
        if (positions) {
            // rows of a window come in runs of tokens that begin anywhere
            int at = 0;
            while (which && !(seen >> at & 1)) {
                at++;
            }
            s.bias.add_to(s.logit, n, from, position, std::max(positions[t0 + at] - at, 0), rows.n);
        }

        const bool whole = n == TILE && width == TILE;
        uint16_t gathered[TILE];
        const uint16_t * source = nullptr;
        for (int r = 0; r < rows.n; r++) {
            const uint16_t * mask = rows.mask[which][r] ? rows.mask[which][r] + t0 : nullptr;
            if (!whole) {
                if (r == 0 || mask != source) {
                    source = mask;
                    for (int t = 0; t < n; t++) {
                        const int at = from[t/16] + t % 16;
                        gathered[t] = at >= width ? F16_MINUS_INF : mask ? mask[at] : 0;
                    }
                }
                mask = gathered;
            }
            softmax_row(s.logit + r*TILE, n, mask, a.softcap, rows, r);
        }
        accumulate(p, s, part, value, n, rows);
    }
}

// Softmax over two parts of the context: adds a partial result to another.
static void merge(float * into, float top, float total, const float * acc, int n) {
    if (total == 0.0f) {
        return;
    }
    const float new_top = std::max(into[0], top);
    const float keep = expf(into[0] - new_top), gain = expf(top - new_top);
    into[0] = new_top;
    into[1] = into[1]*keep + total*gain;
    for (int i = 0; i < n; i += 16) {
        store(into + 16 + i, fma(load(acc + i), set1(gain), mul(load(into + 16 + i), set1(keep))));
    }
}

static void clear_partial(float * x, int n) {
    x[0] = -INFINITY;
    x[1] = 0.0f;
    memset(x + 16, 0, n*sizeof(float));
}

// the weighted sum is in the domain of the codes, or of plain values if those are not ours
static void finish_row(const plan & p, int64_t token, int64_t head, int64_t i3, const float * result) {
    const attn_args & a = p.a;
    const float * acc = result + 16;
    float factor = a.finish(head, result[0], result[1]);
    float * out = a.output(token, head, i3);
    const int64_t dv = a.v->ne[0];
    if (p.v) {
        factor *= p.v->value_unit;
        for (int64_t i = 0; i < dv; i += p.v->block) {
            p.v->finish(acc + i, factor, out + i);
        }
    } else {
        for (int64_t i = 0; i < dv; i++) {
            out[i] = acc[i]*factor;
        }
    }
}

static float * partial_at(const plan & p, float * partials, int64_t i3, int64_t group, int64_t row, int64_t part) {
    return partials + (((i3*p.groups + group)*p.group_rows + row)*p.parts + part)*p.partial_size();
}

static void run_unit(const plan & p, scratch & s, float * partials, int64_t unit) {
    const attn_args & a = p.a;
    const int64_t group = unit % p.groups;
    const int64_t part  = unit/p.groups % p.parts;
    const int64_t tile  = unit/(p.groups*p.parts) % p.row_tiles;
    const int64_t i3    = unit/(p.groups*p.parts*p.row_tiles);
    const int64_t row0  = tile*ROWS;

    row_state rows;
    rows.n = (int) std::min<int64_t>(ROWS, p.group_rows - row0);
    for (int r = 0; r < rows.n; r++) {
        rows.token[r] = (int) ((row0 + r)/p.group);
        rows.head[r]  = (int) (group*p.group + (row0 + r) % p.group);
        for (int i = 0; i < 2; i++) {
            rows.mask[i][r] = a.parts[i].mask_row(rows.token[r], rows.head[r], i3);
        }
        rows.slope[r] = a.slope(rows.head[r]);
    }
    load_queries(p, s, rows, i3);

    float * result[ROWS];
    for (int r = 0; r < rows.n; r++) {
        result[r] = p.parts == 1 ? s.merged + r*p.partial_size() : partial_at(p, partials, i3, group, row0 + r, part);
        clear_partial(result[r], p.value_row);
    }
    for (int64_t span = part*p.part_spans; span < std::min(p.spans, (part + 1)*p.part_spans); span++) {
        attend(p, s, rows, i3, span);
        for (int r = 0; r < rows.n; r++) {
            merge(result[r], rows.top[r], rows.total[r], s.acc + (size_t) r*p.value_row, p.value_row);
        }
    }
    if (p.parts == 1) {
        for (int r = 0; r < rows.n; r++) {
            finish_row(p, rows.token[r], rows.head[r], i3, result[r]);
        }
    }
}

static void combine_row(const plan & p, float * partials, float * merged, int64_t row) {
    const int64_t r = row % p.group_rows, group = row/p.group_rows % p.groups, i3 = row/(p.group_rows*p.groups);
    clear_partial(merged, p.value_row);
    for (int64_t part = 0; part < p.parts; part++) {
        const float * x = partial_at(p, partials, i3, group, r, part);
        merge(merged, x[0], x[1], x + 16, p.value_row);
    }
    finish_row(p, r/p.group, group*p.group + r % p.group, i3, merged);
}

} // namespace kvq

extern "C" bool kvq_cpu_owns_flash_attn(const ggml_tensor * dst) {
    return kvq_is_cache_type(dst->src[1]->type) || kvq_is_cache_type(dst->src[2]->type);
}

extern "C" size_t kvq_cpu_flash_attn_work_size(const ggml_tensor * dst, int n_threads) {
    if (!kvq_cpu_owns_flash_attn(dst)) {
        return 0;
    }
    size_t most = kvq::reference_work_size(dst, n_threads);
    for (const int n : { 1, n_threads }) {   // the partials of fewer threads, if any, are the same
        const kvq::plan p(dst, n);
        kvq::arena one = { nullptr };
        const kvq::scratch s(p, one);
        (void) s;
        most = std::max(most, 128 + p.partial_floats()*sizeof(float) + n_threads*one.used);
    }
    return most;
}

extern "C" void kvq_cpu_flash_attn(const ggml_compute_params * params, ggml_tensor * dst) {
    using namespace kvq;
    if (params->use_ref) {
        reference_flash_attn(params, dst);
        return;
    }
    const int ith = params->ith, nth = params->nth;
    const plan p(dst, nth);
    p.a.check();

    arena m = { (char *) GGML_PAD((uintptr_t) params->wdata, 64) };
    float * partials = m.take<float>(p.partial_floats());

    arena count = { nullptr };
    scratch sizes(p, count);
    (void) sizes;
    arena own = { m.base + m.used + ith*count.used };
    GGML_ASSERT((size_t) (own.base + count.used - (char *) params->wdata) <= params->wsize);
    scratch s(p, own);
    s.clear(p);

    if (ith == 0) {
        ggml_threadpool_chunk_set(params->threadpool, nth);
    }
    ggml_barrier(params->threadpool);

    for (int64_t first = ith*p.batch; first < p.units(); first = p.batch*ggml_threadpool_chunk_add(params->threadpool, 1)) {
        for (int64_t unit = first; unit < first + p.batch; unit++) {
            run_unit(p, s, partials, unit);
        }
    }
    if (p.parts > 1) {
        ggml_barrier(params->threadpool);
        for (int64_t row = ith; row < p.rows(); row += nth) {
            combine_row(p, partials, s.merged, row);
        }
    }
}
