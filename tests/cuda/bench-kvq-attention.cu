// Checks and times the attention kernels alone, without ggml: random caches, a double-precision reference on the CPU,
// CUDA graphs, buffers rotated so that the L2 cache holds none of them. Usage: bench-kvq-attention [check|time|decode|prefill|profile]
#include "kvq-launch.cuh"
#include "kvq-tiers.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <algorithm>
#include <random>
#include <string>
#include <vector>

#define CHECK(x) do { cudaError_t e_ = (x); if (e_ != cudaSuccess) { fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, cudaGetErrorString(e_)); exit(1); } } while (0)

static std::mt19937 rng(1);

static void hadamard(std::vector<double> & x, const int n, const bool inverse) {
    const int m = n == 80 ? 20 : n == 96 ? 12 : n == 112 ? 28 : 1, inner = n/m;
    const uint32_t * rows = m == 12 ? KVQ_PALEY_12 : m == 20 ? KVQ_PALEY_20 : KVQ_PALEY_28;
    std::vector<double> y(n);
    if (!inverse) {
        for (int i = 0; i < n; ++i) { x[i] *= KVQ_SIGNS[i]; }
    }
    for (int i = 0; i < n; ++i) {
        double s = 0.0;
        for (int j = 0; j < n; ++j) {
            const int ia = i/inner, ja = j/inner;
            int minus = __builtin_popcount((i % inner) & (j % inner)) & 1;
            if (m > 1) { minus ^= inverse ? (rows[ja] >> ia) & 1 : (rows[ia] >> ja) & 1; }
            s += minus ? -x[j] : x[j];
        }
        y[i] = s/sqrt(double(n));
    }
    if (inverse) {
        for (int i = 0; i < n; ++i) { y[i] *= KVQ_SIGNS[i]; }
    }
    x = y;
}

static double half_value(const uint8_t * p) {
    __half h;
    memcpy(&h, p, 2);
    return __half2float(h);
}

// one head's slice in the domain in which it is stored (rotated for our types)
static void decode_slice(const uint8_t * p, const int store, const int d, const int n, double * out) {
    for (int i = 0; i < d; ++i) {
        if (store == KVQ_STORE_F16) { out[i] = half_value(p + 2*i); continue; }
        if (store == KVQ_STORE_Q8_0) { out[i] = half_value(p + i/32*34)*int8_t(p[i/32*34 + 2 + i % 32]); continue; }
        const uint8_t * b = p + i/n*(n*(store == KVQ_STORE_OSCAR2 ? 2 : store)/8 + 2);
        const int c = i % n;
        if (store == KVQ_STORE_OSCAR2) {
            const kvq_place place = kvq_place_of(c, n);
            const int code = b[place.byte] >> place.shift, bits = b[n/4] | (b[n/4 + 1] << 8);
            const int level = c < n/4 ? KVQ_TIER_LEVELS_4[code & 15] : c < n/2 ? KVQ_TIER_LEVELS_2[4*KVQ_TIER_SPREAD_2(bits) + (code & 3)] : KVQ_TIER_LEVELS_1[2*KVQ_TIER_SPREAD_1(bits) + (code & 1)];
            const uint16_t scale = uint16_t(bits & 0xFFE0);
            out[i] = half_value((const uint8_t *) &scale)*level/KVQ_TIER_SCALE;
            continue;
        }
        int code;
        if (store == 4) {
            code = c < n/2 ? b[c] & 15 : b[c - n/2] >> 4;
        } else {
            const int q = n/4, k = c/q, r = c % q;
            code = (b[r] >> (2*k)) & 3;
            if (store == 3) { code |= ((b[q + r % (q/2)] >> (2*k + r/(q/2))) & 1) << 2; }
        }
        const int level = store == 2 ? KVQ_LEVELS_2[code] : store == 3 ? KVQ_LEVELS_3[code] : KVQ_LEVELS_4[code];
        const double scale = store == 2 ? KVQ_SCALE_2 : store == 3 ? KVQ_SCALE_3 : KVQ_SCALE_4;
        out[i] = half_value(b + n*store/8)*level/scale;
    }
}

struct problem {
    int dk, dv, ks, vs, heads_kv, gqa, n_tok, n_seq, n_kv;
    bool mask, sinks, v_is_k;
    float softcap, max_bias;
    int n_window = 0;                                   // rows of an f16 window
    bool cache_hidden = false, window_hidden = false;   // in full
    int n_rot = 0, n_pairs = 0;                         // values that a key bias turns, 0 without one; pairs that carry it, 0: all
    bool interleaved = false, in_a_row = true;          // pairs of the bias; positions of the tokens
};

static void fill_cache(std::vector<uint8_t> & buf, const int store, const int d, const int n, const size_t slices) {
    const int bytes = kvq_slice_bytes(store, d, n);
    buf.resize(slices*bytes);
    const size_t words = buf.size()/4;
    for (size_t i = 0; i < words; ++i) { ((uint32_t *) buf.data())[i] = rng(); }
    for (size_t i = 4*words; i < buf.size(); ++i) { buf[i] = uint8_t(rng()); }
    for (size_t s = 0; s < slices; ++s) {
        uint8_t * p = buf.data() + s*bytes;
        const int step = store == KVQ_STORE_F16 ? 2 : store == KVQ_STORE_Q8_0 ? 34 : n*(store == KVQ_STORE_OSCAR2 ? 2 : store)/8 + 2;
        for (int at = 0; at < bytes; at += step) {
            const float r = 0.5f + (rng() & 0xFFFF)/65536.0f;
            const __half h = __float2half(store == KVQ_STORE_F16 ? 2.0f*(r - 1.0f)*1.7f : store == KVQ_STORE_Q8_0 ? r/70.0f : r);
            memcpy(p + at + (store <= KVQ_STORE_OSCAR2 ? step - 2 : 0), &h, 2);
        }
    }
}

static kvq_device device_limits() {
    cudaDeviceProp prop;
    CHECK(cudaGetDeviceProperties(&prop, 0));
    return { prop.multiProcessorCount, prop.sharedMemPerBlockOptin, prop.sharedMemPerMultiprocessor, prop.major >= 9, prop.major == 9 };
}

static void launch(const kvq_launch & l, const kvq_fattn_args & a, cudaStream_t stream) {
    cudaLaunchAttribute attr;
    attr.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attr.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t cfg = {};
    cfg.gridDim = l.grid; cfg.blockDim = l.block; cfg.dynamicSmemBytes = l.smem; cfg.stream = stream;
    cfg.attrs = &attr; cfg.numAttrs = 1;
    CHECK(cudaLaunchKernelEx(&cfg, l.kernel, a));
}

// Runs one problem; returns the relative error of the sampled rows (negative: not checked). us: time per call over
// `sets` cache copies in one graph, attention and combine.
static double run(const problem & p, const int sets, const int check_rows, double * us, double * us_attention, std::string * how) {
    const kvq_device dev = device_limits();
    const int nk = p.v_is_k ? 64 : kvq_head_block(p.dk), nv = p.v_is_k ? 64 : kvq_head_block(p.dv);
    const int n_head = p.heads_kv*p.gqa;
    const size_t slices = size_t(p.n_kv)*p.heads_kv*p.n_seq;

    std::vector<uint8_t> k, v;
    fill_cache(k, p.ks, p.dk, nk, slices);
    if (!p.v_is_k) { fill_cache(v, p.vs, p.dv, nv, slices); }
    std::vector<float> q(size_t(p.dk)*n_head*p.n_tok*p.n_seq), sinks(n_head);
    std::normal_distribution<float> gauss;
    for (float & x : q) { x = 2.0f*gauss(rng); }
    for (float & x : sinks) { x = gauss(rng); }
    const int mask_row = (p.n_kv + 1)/2*2;
    std::vector<__half> mask(size_t(mask_row)*p.n_tok*p.n_seq);
    for (size_t i = 0; i < mask.size(); ++i) {
        const int c = int(i % mask_row), tok = int(i/mask_row % p.n_tok);
        mask[i] = __float2half(p.cache_hidden || c > p.n_kv - p.n_tok + tok || (rng() & 63) == 0 ? -INFINITY : p.max_bias > 0 ? -float(rng() & 127)/64.0f : 0.0f);
    }

    // the window [n_seq][n_window][heads][d], in the domain of the stored values
    std::vector<__half> k16(size_t(p.n_window)*p.heads_kv*p.n_seq*p.dk), v16(size_t(p.n_window)*p.heads_kv*p.n_seq*p.dv), mask16(size_t(p.n_window)*p.n_tok*p.n_seq);
    for (__half & x : k16) { x = __float2half(gauss(rng)); }
    for (__half & x : v16) { x = __float2half(gauss(rng)); }
    for (__half & x : mask16) { x = __float2half(p.window_hidden || (rng() & 3) == 0 ? -INFINITY : p.max_bias > 0 ? -float(rng() & 127)/64.0f : 0.0f); }
    // the bias: its queries, one vector a KV head, the table of turns, a position for every token of cache and window
    const int n_pos = p.n_kv + p.n_window, n_trig = 256 + 64;
    std::vector<float> bq(p.n_rot ? q.size() : 0), bias(p.n_rot ? p.dk*p.heads_kv : 0), trig(size_t(p.n_rot)*n_trig);
    std::vector<int> pos(p.n_rot ? size_t(n_pos)*p.n_seq : 0);
    for (float & x : bq)   { x = gauss(rng); }
    for (float & x : bias) { x = 2.0f*gauss(rng); }
    // every 1st, 2nd, 3rd, ... pair; b is zero elsewhere
    auto carries = [&](const int i) { return p.n_pairs == 0 || i % (p.n_rot/2/p.n_pairs) == 0; };
    for (size_t i = 0; i < bias.size(); ++i) {
        const int x = int(i % p.dk), pair = p.interleaved ? x/2 : x % (p.n_rot/2);
        bias[i] = x < p.n_rot && carries(pair) ? bias[i] : 0.0f;
    }
    auto angle = [&](const int i, const int at) { return at*pow(10000.0, -2.0*i/p.n_rot); };
    for (int r = 0; r < n_trig && p.n_rot; ++r) {
        for (int i = 0; i < p.n_rot/2; ++i) {
            const double x = angle(i, r < 256 ? r : (r - 256)*256);
            trig[size_t(r)*p.n_rot + i]             = float(cos(x));
            trig[size_t(r)*p.n_rot + p.n_rot/2 + i] = float(sin(x));
        }
    }
    for (size_t i = 0; i < pos.size(); ++i) { pos[i] = p.in_a_row ? int(i % n_pos) + 3000 : int(rng() % 16000); }

    std::vector<char *> dk(sets), dvv(sets);
    for (int s = 0; s < sets; ++s) {
        CHECK(cudaMalloc(&dk[s], k.size() + 256));
        CHECK(cudaMemcpy(dk[s], k.data(), k.size(), cudaMemcpyHostToDevice));
        if (!p.v_is_k) {
            CHECK(cudaMalloc(&dvv[s], v.size() + 256));
            CHECK(cudaMemcpy(dvv[s], v.data(), v.size(), cudaMemcpyHostToDevice));
        }
    }
    float * dq, * dst, * dsinks; __half * dmask;
    const size_t n_out = size_t(p.dv)*n_head*p.n_tok*p.n_seq;
    CHECK(cudaMalloc(&dq, q.size()*4));      CHECK(cudaMemcpy(dq, q.data(), q.size()*4, cudaMemcpyHostToDevice));
    CHECK(cudaMalloc(&dsinks, n_head*4));    CHECK(cudaMemcpy(dsinks, sinks.data(), n_head*4, cudaMemcpyHostToDevice));
    CHECK(cudaMalloc(&dmask, mask.size()*2));CHECK(cudaMemcpy(dmask, mask.data(), mask.size()*2, cudaMemcpyHostToDevice));
    CHECK(cudaMalloc(&dst, n_out*4));        CHECK(cudaMemset(dst, 0xFF, n_out*4));

    kvq_fattn_args a = {};
    a.q = (const char *) dq;
    auto operand = [&](const char * data, const int store, const int d, const int n) {
        kvq_operand o = {};
        o.data = data; o.store = store; o.bytes = kvq_slice_bytes(store, d, n);
        o.nb2 = o.bytes; o.nb1 = int64_t(o.bytes)*p.heads_kv; o.nb3 = o.nb1*p.n_kv;
        return o;
    };
    a.k = operand(dk[0], p.ks, p.dk, nk);
    a.v = p.v_is_k ? a.k : operand(dvv[0], p.vs, p.dv, nv);
    a.v_is_k = p.v_is_k;
    a.mask = p.mask ? (const char *) dmask : nullptr;
    a.sinks = p.sinks ? dsinks : nullptr;
    a.dst = dst;
    a.nbq2 = p.dk*4; a.nbq1 = a.nbq2*n_head; a.nbq3 = a.nbq1*p.n_tok;      // [dk, head, tok, seq] in memory
    a.nbm1 = mask_row*2; a.nbm3 = a.nbm1*p.n_tok; a.nem3 = p.n_seq;
    a.n_tok = p.n_tok; a.n_head = n_head; a.n_head_kv = p.heads_kv; a.n_seq = p.n_seq; a.gqa = p.gqa; a.n_kv = p.n_kv;
    std::vector<void *> more;
    auto upload = [&](const void * data, const size_t n) {
        char * d;
        CHECK(cudaMalloc(&d, n + 256));
        CHECK(cudaMemcpy(d, data, n, cudaMemcpyHostToDevice));
        more.push_back(d);
        return (const char *) d;
    };
    if (p.n_window) {
        kvq_f16_window & w = a.window;
        w.k = upload(k16.data(), k16.size()*2);
        w.v = upload(v16.data(), v16.size()*2);
        w.mask = upload(mask16.data(), mask16.size()*2);
        w.nbk2 = p.dk*2; w.nbk1 = w.nbk2*p.heads_kv; w.nbk3 = w.nbk1*p.n_window;
        w.nbv2 = p.dv*2; w.nbv1 = w.nbv2*p.heads_kv; w.nbv3 = w.nbv1*p.n_window;
        w.nbm1 = p.n_window*2; w.nbm3 = w.nbm1*p.n_tok;
        w.nem3 = p.n_seq; w.n = p.n_window;
    }
    if (p.n_rot) {
        kvq_bias_args & b = a.bias;
        b.q = upload(bq.data(), bq.size()*4);
        b.b = upload(bias.data(), bias.size()*4);
        b.trig = upload(trig.data(), trig.size()*4);
        b.pos = upload(pos.data(), pos.size()*4);
        b.nbq2 = a.nbq2; b.nbq1 = a.nbq1; b.nbq3 = a.nbq3; b.nbb1 = p.dk*4; b.nbt1 = p.n_rot*4; b.nbp1 = n_pos*4;
        b.pairs = p.n_rot/2; b.steps = n_trig - 256; b.seqs = 1; b.interleaved = p.interleaved;
        uint8_t list[KVQ_BIAS_PAIRS];
        int n = 0;
        for (int i = 0; i < b.pairs && n < KVQ_BIAS_PAIRS; ++i) {
            if (carries(i)) { list[n++] = uint8_t(i); }
        }
        kvq_set_pairs(b, list, n);
    }
    a.scale = 1.0f/sqrtf(float(p.dk)); a.softcap = p.softcap; a.max_bias = p.max_bias;
    if (p.softcap != 0.0f) { a.scale /= p.softcap; }
    a.n_head_log2 = 1u << uint32_t(floorf(log2f(float(n_head))));
    a.m0 = powf(2.0f, -p.max_bias/a.n_head_log2); a.m1 = powf(2.0f, -p.max_bias/2.0f/a.n_head_log2);

    kvq_launch attention, combine;
    if (!kvq_plan(a, p.dk, p.dv, dev, attention, combine)) {
        printf("no plan\n");
        return 1e9;
    }
    CHECK(cudaFuncSetAttribute(attention.kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(attention.smem)));
    if (combine.kernel) CHECK(cudaFuncSetAttribute(combine.kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(combine.smem)));
    char text[160];
    snprintf(text, sizeof(text), "grid %ux%ux%u block %u warps smem %zu heads %d groups %d slices %d parts %d", attention.grid.x, attention.grid.y,
        attention.grid.z, attention.block.y, attention.smem, a.heads, a.row_groups, a.slices, a.n_part);
    if (how) { *how = text; }
    const size_t rows = size_t(n_head)*p.n_tok*p.n_seq;
    CHECK(cudaMalloc(&a.part, rows*a.n_part*p.dv*4)); CHECK(cudaMemset(a.part, 0xFF, rows*a.n_part*p.dv*4));
    CHECK(cudaMalloc(&a.meta, rows*a.n_part*8));      CHECK(cudaMemset(a.meta, 0xFF, rows*a.n_part*8));

    cudaStream_t stream;
    CHECK(cudaStreamCreate(&stream));
    launch(attention, a, stream);
    if (combine.kernel) { launch(combine, a, stream); }
    CHECK(cudaStreamSynchronize(stream));

    double error = -1.0;
    if (check_rows) {
        std::vector<float> out(n_out);
        CHECK(cudaMemcpy(out.data(), dst, n_out*4, cudaMemcpyDeviceToHost));
        for (float x : out) { if (!(fabsf(x) < 1e30f)) { error = NAN; } }
        double num = 0.0, den = 0.0;
        for (int c = 0; c < check_rows; ++c) {
            const int row = c == 0 ? 0 : c == 1 ? int(rows) - 1 : int(rng() % rows);
            const int head = row % n_head, tok = row/n_head % p.n_tok, seq = row/n_head/p.n_tok;
            std::vector<double> qr(p.dk), acc(p.dv, 0.0), kd(p.dk), vd(p.v_is_k ? p.dk : p.dv);
            for (int i = 0; i < p.dk; ++i) { qr[i] = q[size_t(row)*p.dk + i]; }
            if (p.ks <= 4) {
                for (int b = 0; b < p.dk/nk; ++b) {
                    std::vector<double> x(qr.begin() + b*nk, qr.begin() + (b + 1)*nk);
                    hadamard(x, nk, false);
                    std::copy(x.begin(), x.end(), qr.begin() + b*nk);
                }
            }
            std::vector<double> logit(n_pos);
            double top = p.sinks ? sinks[head] : -1e300;
            const double slope = p.max_bias > 0 ? (head < int(a.n_head_log2) ? pow(a.m0, head + 1) : pow(a.m1, 2*(head - int(a.n_head_log2)) + 1)) : 1.0;
            for (int i = 0; i < n_pos; ++i) {
                const size_t slice = (size_t(seq)*p.n_kv + i)*p.heads_kv + head/p.gqa, slice16 = (size_t(seq)*p.n_window + i - p.n_kv)*p.heads_kv + head/p.gqa;
                if (i < p.n_kv) {
                    decode_slice(k.data() + slice*a.k.bytes, p.ks, p.dk, nk, kd.data());
                } else {
                    for (int j = 0; j < p.dk; ++j) { kd[j] = __half2float(k16[slice16*p.dk + j]); }
                }
                double s = 0.0;
                for (int j = 0; j < p.dk; ++j) { s += qr[j]*kd[j]; }
                for (int j = 0; j < p.n_rot/2; ++j) {
                    const int x = p.interleaved ? 2*j : j, y = p.interleaved ? 2*j + 1 : j + p.n_rot/2;
                    const double t = angle(j, pos[size_t(seq)*n_pos + i]);
                    const float * qq = bq.data() + size_t(row)*p.dk, * bb = bias.data() + head/p.gqa*p.dk;
                    s += (double(qq[x])*bb[x] + double(qq[y])*bb[y])*cos(t) + (double(qq[y])*bb[x] - double(qq[x])*bb[y])*sin(t);
                }
                s /= sqrt(double(p.dk));
                if (p.softcap != 0.0f) { s = p.softcap*tanh(s/p.softcap); }
                if (i >= p.n_kv) {
                    s += slope*double(__half2float(mask16[(size_t(seq)*p.n_tok + tok)*p.n_window + i - p.n_kv]));
                } else if (p.mask) {
                    s += slope*double(__half2float(mask[(size_t(seq)*p.n_tok + tok)*mask_row + i]));
                }
                logit[i] = s;
                top = std::max(top, s);
            }
            double sum = p.sinks ? exp(sinks[head] - top) : 0.0;
            for (int i = 0; i < n_pos; ++i) {
                const double w = exp(logit[i] - top);
                if (!(w >= 1e-12)) { continue; }
                const size_t slice = (size_t(seq)*p.n_kv + i)*p.heads_kv + head/p.gqa, slice16 = (size_t(seq)*p.n_window + i - p.n_kv)*p.heads_kv + head/p.gqa;
                if (i >= p.n_kv) {
                    for (int j = 0; j < p.dv; ++j) { vd[j] = __half2float(v16[slice16*p.dv + j]); }
                } else if (p.v_is_k) {
                    decode_slice(k.data() + slice*a.k.bytes, p.ks, p.dk, nk, vd.data());
                } else {
                    decode_slice(v.data() + slice*a.v.bytes, p.vs, p.dv, nv, vd.data());
                }
                for (int j = 0; j < p.dv; ++j) { acc[j] += w*vd[j]; }
                sum += w;
            }
            for (int j = 0; j < p.dv; ++j) { acc[j] = sum > 0 ? acc[j]/sum : 0.0; }
            if ((p.v_is_k ? p.ks : p.vs) <= 4) {
                for (int b = 0; b < p.dv/nv; ++b) {
                    std::vector<double> x(acc.begin() + b*nv, acc.begin() + (b + 1)*nv);
                    hadamard(x, nv, true);
                    std::copy(x.begin(), x.end(), acc.begin() + b*nv);
                }
            }
            for (int j = 0; j < p.dv; ++j) {
                const double e = out[size_t(row)*p.dv + j] - acc[j];
                num += e*e;
                den += acc[j]*acc[j];
            }
        }
        if (error == error) { error = sqrt(num/den); }
    }

    for (int mode = 0; mode < 2 && us; ++mode) {
        if (mode == 1 && !us_attention) { break; }
        cudaGraph_t graph; cudaGraphExec_t exec;
        CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
        const int calls = std::max(sets, p.n_tok > 64 ? 2 : 16);
        for (int i = 0; i < calls; ++i) {
            a.k.data = dk[i % sets];
            a.v.data = p.v_is_k ? a.k.data : dvv[i % sets];
            launch(attention, a, stream);
            if (mode == 0 && combine.kernel) { launch(combine, a, stream); }
        }
        CHECK(cudaStreamEndCapture(stream, &graph));
        CHECK(cudaGraphInstantiate(&exec, graph, 0));
        cudaEvent_t t0, t1;
        CHECK(cudaEventCreate(&t0)); CHECK(cudaEventCreate(&t1));
        std::vector<float> times;
        for (int r = 0; r < (p.n_tok > 64 ? 5 : 13); ++r) {
            CHECK(cudaEventRecord(t0, stream));
            CHECK(cudaGraphLaunch(exec, stream));
            CHECK(cudaEventRecord(t1, stream));
            CHECK(cudaStreamSynchronize(stream));
            float ms;
            CHECK(cudaEventElapsedTime(&ms, t0, t1));
            if (r > 1) { times.push_back(ms*1000.0f/calls); }
        }
        std::sort(times.begin(), times.end());
        (mode == 0 ? *us : *us_attention) = times[times.size()/2];
        CHECK(cudaGraphExecDestroy(exec)); CHECK(cudaGraphDestroy(graph));
    }
    for (void * x : more) { CHECK(cudaFree(x)); }
    for (char * x : dk)  { CHECK(cudaFree(x)); }
    for (char * x : dvv) { if (x) { CHECK(cudaFree(x)); } }
    CHECK(cudaFree(dq)); CHECK(cudaFree(dst)); CHECK(cudaFree(dsinks)); CHECK(cudaFree(dmask)); CHECK(cudaFree(a.part)); CHECK(cudaFree(a.meta));
    CHECK(cudaStreamDestroy(stream));
    return error;
}

static int failures = 0;
static void check(const problem & p) {
    std::string how;
    const double e = run(p, 1, 5, nullptr, nullptr, &how);
    const bool good = e < 3e-3;
    failures += !good;
    printf("%s %9.2e  K %2d V %2d  d %d/%d  kv heads %d gqa %d tokens %d seqs %d n_kv %d%s%s%s%s window %d%s%s bias %d%s%s  %s\n", good ? "ok  " : "FAIL", e, p.ks, p.vs, p.dk, p.dv, p.heads_kv,
        p.gqa, p.n_tok, p.n_seq, p.n_kv, p.mask ? " mask" : "", p.sinks ? " sinks" : "", p.softcap != 0 ? " softcap" : "", p.max_bias > 0 ? " alibi" : "", p.n_window,
        p.cache_hidden ? " cache hidden" : "", p.window_hidden ? " window hidden" : "", p.n_rot, p.interleaved ? " interleaved" : "", p.in_a_row ? "" : " scattered", good ? "" : how.c_str());
    fflush(stdout);
}

static void timing(const problem & p, const double copy_rate) {
    const double bytes = double(p.n_kv)*p.heads_kv*p.n_seq*(kvq_slice_bytes(p.ks, p.dk, kvq_head_block(p.dk)) + kvq_slice_bytes(p.vs, p.dv, kvq_head_block(p.dv)));
    const int sets = std::max(1, std::min(12, int(4e8/bytes)));
    double us = 0, us_a = 0;
    std::string how;
    const double e = run(p, sets, 2, &us, &us_a, &how);
    failures += !(e < 3e-3);
    const double flops = 4.0*p.n_tok*p.n_seq*p.heads_kv*p.gqa*double(p.n_kv)*p.dk;
    printf("K %2d V %2d d %d kv heads %d gqa %d tokens %3d seqs %d n_kv %6d: %8.2f us (attention %8.2f), %6.0f GB/s = %4.1f %% of copy, floor %6.2f us, %5.0f TFLOP/s, error %.1e  [%s]\n",
        p.ks, p.vs, p.dk, p.heads_kv, p.gqa, p.n_tok, p.n_seq, p.n_kv, us, us_a, bytes/us*1e-3, 100*bytes/(us*1e-6)/copy_rate, bytes/copy_rate*1e6, flops/us*1e-6, e, how.c_str());
    fflush(stdout);
}

int main(int argc, char ** argv) {
    const std::string mode = argc > 1 ? argv[1] : "all";
    cudaDeviceProp prop;
    CHECK(cudaGetDeviceProperties(&prop, 0));
    printf("%s, %d multiprocessors\n", prop.name, prop.multiProcessorCount);

    auto P = [](int d, int ks, int vs, int hkv, int gqa, int tok, int seq, int n_kv) { return problem{ d, d, ks, vs, hkv, gqa, tok, seq, n_kv, true, false, false, 0.0f, 0.0f }; };
    if (mode == "profile") {
        run(P(128, 3, 3, 8, 4, 512, 1, 32768), 1, 0, nullptr, nullptr, nullptr);
        for (int s : { 2, 3, 4 }) { run(P(128, s, s, 8, 4, 1, 8, 32768), 1, 0, nullptr, nullptr, nullptr); }
        for (int n_kv : { 131072, 256 }) { for (int s : { 2, 3, 4 }) { run(P(128, s, s, 8, 4, 1, 1, n_kv), 1, 0, nullptr, nullptr, nullptr); } }
        return 0;
    }
    if (mode == "all" || mode == "check") {
        for (int s : { 2, 3, 4 }) { for (int d : { 128, 64, 256, 80, 96, 112 }) { check(P(d, s, s, 8, 4, 1, 1, 1000)); } }
        for (int ks : { 2, 3, 4, 8, 16 }) { for (int vs : { 2, 3, 4, 8, 16 }) { if (ks != vs || ks < 5) { check(P(128, ks, vs, 2, 4, 2, 1, 517)); check(P(128, ks, vs, 2, 4, 70, 1, 517)); check(P(64, ks, vs, 3, 3, 200, 2, 1021)); } } }
        for (int d : { 128, 64, 256, 80, 96, 112, 192 }) { for (int tok : { 1, 2, 20, 130 }) { check(P(d, 5, 2, 8, 4, tok, 1, 1000)); check(P(d, 5, 2, 8, 4, tok, 1, 4096)); if (d % 32 == 0) { check(P(d, 5, tok == 1 ? 3 : 8, 2, 4, tok, 2, 777)); } } }
        for (int gqa : { 1, 2, 3, 5, 6, 7, 8, 12, 16 }) { check(P(128, 3, 3, 2, gqa, 1, 1, 777)); }
        for (int tok : { 2, 3, 4, 8, 9, 17, 33, 130, 300 }) { for (int s : { 2, 3, 4 }) { check(P(128, s, s, 8, 4, tok, 1, 901)); } }
        for (int hkv : { 1, 3, 5, 10 }) { for (int s : { 2, 3, 4 }) { check(P(64, s, s, hkv, 3, 1, 3, 333)); } }
        for (int n : { 1, 7, 31, 64, 65, 127, 4097 }) { check(P(128, 2, 2, 8, 4, 1, 1, n)); check(P(128, 4, 4, 1, 4, 40, 2, n)); }
        for (int n : { 64, 256, 768, 832, 4096, 16384 }) { for (int tok : { 1, 2 }) { for (int s : { 2, 3, 4 }) {
            check(P(128, s, s, 8, 4, tok, 1, n));
            check(P(64, s, s == 3 ? 2 : s, 8, 3, tok, 2, n));
        } } }
        for (int tok : { 1, 70 }) { for (int s : { 2, 3, 4 }) {
            problem p = P(128, s, s, 4, 4, tok, 2, 600);
            p.sinks = true; check(p);
            p.softcap = 20.0f; check(p);
            p.sinks = false; p.softcap = 0.0f; p.max_bias = 8.0f; check(p);
            p.mask = false; p.max_bias = 0.0f; check(p);
            problem m = { 576, 512, s, s, 1, 16, tok, 1, 700, true, false, true, 0.0f, 0.0f }; check(m);
            check(P(512, s, s, 2, 8, tok, 1, 300));
            problem x = P(192, s, s, 2, 8, tok, 1, 300); x.dv = 128; check(x);
            for (int d : { 64, 80, 96, 112, 256 }) { check(P(d, s, s, 4, 2, tok, 1, 290)); }
        } }
        printf("%d failures\n", failures);
    }
    if (mode != "check") {
        char * x, * y;
        const size_t n = size_t(4) << 30;
        CHECK(cudaMalloc(&x, n)); CHECK(cudaMalloc(&y, n)); CHECK(cudaMemset(x, 1, n));
        cudaEvent_t t0, t1;
        CHECK(cudaEventCreate(&t0)); CHECK(cudaEventCreate(&t1));
        float best = 1e30f;
        for (int r = 0; r < 6; ++r) {
            CHECK(cudaEventRecord(t0)); CHECK(cudaMemcpyAsync(y, x, n, cudaMemcpyDeviceToDevice)); CHECK(cudaEventRecord(t1)); CHECK(cudaEventSynchronize(t1));
            float ms; CHECK(cudaEventElapsedTime(&ms, t0, t1));
            best = std::min(best, ms);
        }
        CHECK(cudaFree(x)); CHECK(cudaFree(y));
        const double rate = 2.0*n/(best*1e-3);
        printf("copy: %.0f GB/s (read plus written)\n", rate*1e-9);
        if (mode == "prefill") {
            for (int s : { 2, 3, 4, 16 }) { timing(P(128, s, s, 8, 4, 512, 1, 32768), rate); }
            return failures != 0;
        }
        for (int n_kv : { 256, 512, 768, 1024, 4096, 32768, 131072 }) { for (int s : { 2, 3, 4 }) { timing(P(128, s, s, 8, 4, 1, 1, n_kv), rate); } }
        timing(P(128, 4, 3, 8, 4, 1, 1, 131072), rate);
        for (int n_kv : { 256, 4096, 32768, 131072 }) { timing(P(128, 5, 2, 8, 4, 1, 1, n_kv), rate); }
        timing(P(128, 5, 2, 8, 4, 1, 8, 32768), rate);
        timing(P(128, 5, 2, 8, 4, 512, 1, 32768), rate);
        for (int tok : { 2, 4, 8 }) { for (int s : { 2, 3, 4 }) { timing(P(128, s, s, 8, 4, tok, 1, 131072), rate); } }
        for (int s : { 2, 3, 4 }) { timing(P(128, s, s, 8, 4, 1, 8, 32768), rate); }
        for (int s : { 2, 3, 4 }) { timing(P(64, s, s, 8, 4, 1, 1, 131072), rate); timing(P(256, s, s, 4, 4, 1, 1, 65536), rate); }
        if (mode == "decode") {
            return failures != 0;
        }
        for (int n_kv : { 32768, 131072 }) { for (int s : { 2, 3, 4, 16 }) { timing(P(128, s, s, 8, 4, 512, 1, n_kv), rate); } }
    }
    return failures != 0;
}
