// The key bias of a tile of 64 cells. Their positions are nearly always consecutive, p, p + 1, ...; then the query's part is
// turned to p once, and meets a table of the turns by 0..63 that all tiles share. Pairs of frequencies so slow that the tile is
// a small part of a turn are taken together: a cubic through four of its points (error below 6e-5 of the bias logit).
// A cell at another position is computed by itself.
#pragma once

#include "kvq-attn-tile.h"
#include "kvq-key-bias.h"

#include <cmath>

namespace kvq {

struct bias_tile {
    static constexpr int NODES = 4;
    static constexpr int node[NODES] = { 2, 19, 44, 61 };   // near the zeros of Chebyshev's polynomial

    const key_bias & bias;
    const int width, pairs, stride;
    float * query;     // [ROWS, width] of each row
    float * here;      // [ROWS, stride] turned to the first position: cosines and sines of fast pairs, then the slow ones at the nodes
    float * table;     // [terms, TILE] turns of the fast pairs by 0..63, then the cubics of the nodes
    float * nodes;     // [2 * pairs, 16] cosines and sines of the slow pairs at the nodes, in the first lanes
    float * at;        // [2 * pairs, 16] turned to the first position
    float * turned;    // [width] of a position
    float * logit;     // [ROWS, TILE]
    int n_fast = 0;    // pairs that carry the bias up to the last fast one

    template <typename Arena>
    bias_tile(const key_bias & bias, Arena & m) : bias(bias), width(bias.width()), pairs(bias.pairs), stride(width + 16) {
        const size_t rows = bias ? ROWS : 0;
        query  = m.template take<float>(rows*width);
        here   = m.template take<float>(rows*stride);
        table  = m.template take<float>(bias ? TILE*stride : 0);
        nodes  = m.template take<float>(16*width);
        at     = m.template take<float>(16*width);
        turned = m.template take<float>(width);
        logit  = m.template take<float>(rows*TILE);
    }

    int terms() const { return 2*n_fast + NODES; }

    // cosine and sine of the turn of pair i by t
    float cosine(int t, int i) const { return ((const float *) ((const char *) bias.trig->data + t*bias.trig->nb[1]))[bias.pair[i]]; }
    float sine(int t, int i) const { return ((const float *) ((const char *) bias.trig->data + t*bias.trig->nb[1]))[bias.pair[i] + bias.all()]; }

    void prepare() {
        for (int i = 0; i < pairs; i++) {
            if (sine(1, i) > 0.01f || cosine(1, i) < 0.5f) {
                n_fast = i + 1;
            }
        }
        for (int i = 0; i < n_fast; i++) {
            for (int t = 0; t < TILE; t++) {
                table[i*TILE + t]            = cosine(t, i);
                table[(n_fast + i)*TILE + t] = sine(t, i);
            }
        }
        for (int n = 0; n < NODES; n++) {
            for (int t = 0; t < TILE; t++) {
                float x = 1.0f;
                for (int o = 0; o < NODES; o++) {
                    x *= o == n ? 1.0f : (float) (t - node[o])/(float) (node[n] - node[o]);
                }
                table[(2*n_fast + n)*TILE + t] = x;
            }
        }
        memset(nodes, 0, 16*width*sizeof(float));
        for (int i = n_fast; i < pairs; i++) {
            for (int n = 0; n < NODES; n++) {
                nodes[(2*i)*16 + n]     = cosine(node[n], i);
                nodes[(2*i + 1)*16 + n] = sine(node[n], i);
            }
        }
    }

    // out[r][0..16) = sum over m < n of z[r][m] * x[m][0..16)
    template <int R> static void products(const float * x, int x_stride, int n, const float * z, int z_stride, float * out, int out_stride) {
        f32x16 s[R];
        for (int r = 0; r < R; r++) {
            s[r] = set1(0.0f);
        }
        for (int m = 0; m < n; m++) {
            const f32x16 v = load(x + m*x_stride);
            for (int r = 0; r < R; r++) {
                s[r] = fma(set1(z[r*z_stride + m]), v, s[r]);
            }
        }
        for (int r = 0; r < R; r++) {
            store(out + r*out_stride, s[r]);
        }
    }

    static void all_products(const float * x, int x_stride, int n, const float * z, int z_stride, float * out, int out_stride, int rows) {
        for (int r = 0; r < rows; ) {
#define KVQ_ROWS(R) products<R>(x, x_stride, n, z + r*z_stride, z_stride, out + r*out_stride, out_stride); r += R
            switch (rows - r) {
                case 1:  KVQ_ROWS(1); break;
                case 2:  KVQ_ROWS(2); break;
                case 3:  KVQ_ROWS(3); break;
                case 4:  KVQ_ROWS(4); break;
                case 5:  KVQ_ROWS(5); break;
                case 6:  KVQ_ROWS(6); break;
                default: KVQ_ROWS(7); break;
            }
#undef KVQ_ROWS
        }
    }

    // turns the queries of the rows to the position of the tile's first cell
    void turn_queries(int32_t position, int rows) {
        bias.turn(position, turned);
        const float * c = turned, * s = turned + pairs;
        for (int i = n_fast; i < pairs; i++) {   // the slow pairs at the nodes: cosines, then sines
            const f32x16 x = load(nodes + (2*i)*16), y = load(nodes + (2*i + 1)*16);
            store(at + (i - n_fast)*16,           sub(mul(x, set1(c[i])), mul(y, set1(s[i]))));
            store(at + (pairs + i - 2*n_fast)*16, fma(y, set1(c[i]), mul(x, set1(s[i]))));
        }
        for (int r = 0; r < rows; r++) {
            const float * x = query + r*width, * y = x + pairs;
            float * out = here + r*stride;
            for (int i = 0; i < n_fast; i++) {
                out[i]          = x[i]*c[i] + y[i]*s[i];
                out[n_fast + i] = y[i]*c[i] - x[i]*s[i];
            }
        }
        // nodes: the cosine part of every row, then the sine part
        const int n_slow = pairs - n_fast;
        float part[2][ROWS*16];
        all_products(at,             16, n_slow, query + n_fast,         width, part[0], 16, rows);
        all_products(at + n_slow*16, 16, n_slow, query + pairs + n_fast, width, part[1], 16, rows);
        for (int r = 0; r < rows; r++) {
            for (int n = 0; n < NODES; n++) {
                here[r*stride + 2*n_fast + n] = part[0][r*16 + n] + part[1][r*16 + n];
            }
        }
    }

    // Adds the bias to logits [rows, TILE] of n gathered cells in runs of 16, which begin at cells `from` of the tile.
    // position: of each gathered cell, -1 where no row sees it; first: of the tile's first cell.
    void add_to(float * logits, int n, const int * from, const int32_t * position, int32_t first, int rows) {
        turn_queries(first, rows);
        for (int t = 0; t < n; t += 16) {
            all_products(table + from[t/16], TILE, terms(), here, stride, logit + t, TILE, rows);
        }
        for (int t = 0; t < n; t++) {
            if (position[t] < 0 || position[t] == first + from[t/16] + t % 16) {
                continue;
            }
            bias.turn(position[t], turned);
            for (int r = 0; r < rows; r++) {
                float s = 0.0f;
                for (int i = 0; i < width; i++) {
                    s += query[r*width + i]*turned[i];
                }
                logit[r*TILE + t] = s;
            }
        }
        for (int r = 0; r < rows; r++) {
            for (int t = r*TILE; t < r*TILE + n; t += 16) {
                store(logits + t, add(load(logits + t), load(logit + t)));
            }
        }
    }
};

} // namespace kvq
