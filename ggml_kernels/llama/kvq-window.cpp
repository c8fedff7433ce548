#include "kvq-window.h"
#include "kvq-key-bias.h"
#include "kvq-transforms.h"
#include "kvq.h"

#include "ggml-cpp.h"
#include "llama-cparams.h"
#include "llama-hparams.h"
#include "llama-impl.h"
#include "llama-io.h"
#include "llama-model.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <stdexcept>

static constexpr int64_t NOT_NEEDED = INT64_MAX;
static constexpr int64_t AGE        = 1ll << 32;   // every sink is needed more than any recent token

// measured (docs/windows.md)
static constexpr uint32_t SINK = 64, RECENT = 256;
static constexpr uint32_t SMALL_BATCH = 16;   // tokens of a batch that find rows in the ring at least: slots, drafts

// ---- which cache has one ----

// Why no window can stand beside this cache; empty: it can.
static std::string obstacle(const llama_model & model, const llama_cparams & cparams, bool ours, bool values) {
    if (!ours) {
        return "its types need none";
    }
    if (!values) {
        return "latent keys hold the values too";
    }
    if (!cparams.flash_attn || model.hparams.n_rel_attn_bkts > 0) {
        return "it needs flash attention";
    }
    if (!kvq_has_hooks(model)) {
        return format("the attention of %s has a builder of its own", model.arch_name().c_str());
    }
    return "";
}

// asks the device about the attention operation of a layer and about writes to its window
static bool device_supports(const llama_hparams & h, int32_t il, const ggml_tensor * k, const ggml_tensor * v, bool bias) {
    ggml_backend_dev_t dev = ggml_backend_buft_get_device(ggml_backend_buffer_get_type(k->buffer));
    if (!dev) {
        return true;
    }
    ggml_context_ptr context(ggml_init({ 32*ggml_tensor_overhead(), nullptr, true }));
    ggml_context * ctx = context.get();
    const int64_t dk = h.n_embd_head_k(il), dv = h.n_embd_head_v(il), n_head_kv = h.n_head_kv(il);
    ggml_tensor * q = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, dk, h.n_head(il), 1);
    const auto rows = [&](ggml_type type, int64_t d, int64_t n) { return ggml_new_tensor_3d(ctx, type, d, n, n_head_kv); };
    const auto mask = [&](int64_t n) { return ggml_new_tensor_2d(ctx, GGML_TYPE_F16, n, 1); };

    ggml_tensor * attention = ggml_flash_attn_ext(ctx, ggml_permute(ctx, q, 0, 2, 1, 3), rows(k->type, dk, 256), rows(v->type, dv, 256),
        mask(256), 1.0f, 0.0f, h.attn_soft_cap ? h.f_attn_logit_softcapping : 0.0f);
    kvq_sources sources;
    sources.k16    = rows(kvq_window_type(k->type), dk, 64);
    sources.v16    = rows(kvq_window_type(v->type), dv, 64);
    sources.mask16 = mask(64);
    if (bias) {
        sources.bias = kvq_bias_to_ask(ctx, h, il, q, 320);
    }
    kvq_add_sources(ctx, attention, &sources);

    bool writes = true;
    for (const auto & [type, d] : { std::pair(k->type, dk), std::pair(v->type, dv) }) {
        ggml_tensor * ring = ggml_new_tensor_2d(ctx, kvq_window_type(type), d, 64);
        writes = writes && ggml_backend_dev_supports_op(dev, ggml_set_rows(ctx, ring, ggml_new_tensor_2d(ctx, GGML_TYPE_F32, d, 1),
            ggml_new_tensor_1d(ctx, GGML_TYPE_I64, 1)));
        ggml_tensor * values = ggml_new_tensor_2d(ctx, GGML_TYPE_F16, d, 64);
        writes = writes && ggml_backend_dev_supports_op(dev, ggml_repeat_4d(ctx, values, d, 128, 1, 1))
                        && ggml_backend_dev_supports_op(dev, ggml_cpy(ctx, values, ggml_new_tensor_2d(ctx, GGML_TYPE_F16, d, 64)));
    }
    return writes && ggml_backend_dev_supports_op(dev, attention);
}

std::shared_ptr<kvq_window> kvq_window::make(llama_kv_cache & cache) {
    const kvq_request & wish = kvq_current();
    if (cache.other || cache.layers.empty() || !wish.cparams) {
        return nullptr;
    }
    bool all = true, values = true;
    for (const auto & layer : cache.layers) {
        values = values && layer.v;
        const ggml_type k = layer.k->type, v = layer.v ? layer.v->type : k;
        all      = all && (kvq_is_cache_type(k) || kvq_is_cache_type(v));
    }
    // by default as much in f16 as half of a short cache's cells would take, so that the whole stays smaller than an f16 cache
    const uint32_t n_seq  = cache.n_stream == 1 ? cache.n_seq_max : 1, cells = cache.get_size();
    const uint32_t most   = (std::max(cells/2, SMALL_BATCH + 1) - SMALL_BATCH - 1)/n_seq;
    const uint32_t sink   = wish.sink   >= 0 ? wish.sink   : std::min(SINK, most/4);
    const uint32_t recent = wish.recent >= 0 ? wish.recent : std::min(RECENT, most - std::min(most, sink));
    if (sink == 0 && recent == 0) {
        return nullptr;
    }

    const bool asked = wish.sink > 0 || wish.recent > 0;
    const std::string reason = obstacle(cache.model, *wish.cparams, all, values);
    if (!reason.empty()) {
        if (asked) {
            LLAMA_LOG_WARN("kvq: no f16 window beside this cache: %s\n", reason.c_str());
        }
        return nullptr;
    }
    for (const auto & layer : cache.layers) {
        if (!device_supports(cache.hparams, layer.il, layer.k, layer.v, layer.kvq->bias)) {
            const std::string text = format("device %s has no kernel for an f16 window beside K %s and V %s", ggml_backend_buffer_name(layer.k->buffer),
                kvq_family_name(layer.k->type), kvq_family_name(layer.v->type));
            if (asked) {
                throw std::runtime_error(text + "; use --kv-sink 0 --kv-recent 0");
            }
            LLAMA_LOG_WARN("kvq: no f16 window: %s\n", text.c_str());
            return nullptr;
        }
    }

    // no more rows than cells, and one that nobody reads
    const uint64_t rows = n_seq*((uint64_t) sink + recent);
    const uint32_t n_rows = (uint32_t) GGML_PAD(std::min<uint64_t>(rows + (recent ? SMALL_BATCH : 0), cells) + 1, 64);
    const uint32_t room   = recent == 0 || n_rows > cells ? UINT32_MAX : n_rows - 1 - (uint32_t) rows;
    std::shared_ptr<kvq_window> window(new kvq_window(cache, sink, recent, n_rows, room, room == UINT32_MAX ? 0 : GGML_PAD(wish.cparams->n_ubatch, 64)));
    window->allocate();
    return window;
}

kvq_window::kvq_window(llama_kv_cache & cache, uint32_t sink, uint32_t recent, uint32_t n_rows, uint32_t room, uint32_t n_own_max)
    : sink(sink), recent(recent), n_rows(n_rows), n_own_max(n_own_max), cache(cache), room(room) {
    streams.resize(cache.n_stream);
    for (auto & s : streams) {
        s.cell_of.assign(n_rows, -1);
        s.row_of.assign(cache.get_size(), -1);
    }
}

void kvq_window::allocate() {
    std::map<ggml_backend_buffer_type_t, ggml_context_ptr> contexts;
    for (const auto & layer : cache.layers) {
        auto & ctx = contexts[ggml_backend_buffer_get_type(layer.k->buffer)];
        if (!ctx) {
            ctx.reset(ggml_init({ 2*(1 + cache.n_stream)*cache.layers.size()*ggml_tensor_overhead(), nullptr, true }));
        }
        layer_rows rows;
        const auto make = [&](ggml_tensor * stored, const char * name, std::vector<ggml_tensor *> & views) {
            ggml_tensor * t = ggml_new_tensor_3d(ctx.get(), kvq_window_type(stored->type), stored->ne[0], n_rows, cache.n_stream);
            ggml_format_name(t, "window_%s_l%d", name, layer.il);
            for (uint32_t s = 0; s < cache.n_stream; s++) {
                views.push_back(ggml_view_2d(ctx.get(), t, t->ne[0], n_rows, t->nb[1], s*t->nb[2]));
            }
            return t;
        };
        rows.k = make(layer.k, "k", rows.k_stream);
        rows.v = make(layer.v, "v", rows.v_stream);
        layers.push_back(std::move(rows));
    }
    const bool no_alloc = cache.hparams.no_alloc;
    for (auto & [buft, ctx] : contexts) {
        ggml_backend_buffer_t buffer = no_alloc ? ggml_backend_buft_alloc_buffer(buft, 0) : ggml_backend_alloc_ctx_tensors_from_buft(ctx.get(), buft);
        if (!buffer) {
            throw std::runtime_error("failed to allocate buffer for the f16 window; use smaller --kv-sink and --kv-recent");
        }
        for (ggml_tensor * t = ggml_get_first_tensor(ctx.get()); no_alloc && t; t = ggml_get_next_tensor(ctx.get(), t)) {
            t->buffer = buffer;
        }
        ggml_backend_buffer_clear(buffer, 0);
        cache.ctxs_bufs.emplace_back(std::move(ctx), buffer);
    }
}

uint64_t kvq_window::bytes(size_t layer) const {
    return ggml_nbytes(layers[layer].k) + ggml_nbytes(layers[layer].v);
}

// ---- rows ----

bool kvq_window::is_used(uint32_t stream, uint32_t row) const {
    const int32_t cell = streams[stream].cell_of[row];
    return cell >= 0 && !cache.v_cells[stream].is_empty(cell);
}

void kvq_window::release(uint32_t stream, uint32_t row) {
    auto & map = streams[stream];
    if (map.cell_of[row] >= 0) {
        map.row_of[map.cell_of[row]] = -1;
        map.cell_of[row] = -1;
    }
}

// the position that each sequence's next token will have
std::vector<llama_pos> kvq_window::next_positions(uint32_t stream) const {
    std::vector<llama_pos> next(cache.n_seq_max);
    for (uint32_t s = 0; s < cache.n_seq_max; s++) {
        next[s] = cache.v_cells[stream].seq_pos_max(s) + 1;
    }
    return next;
}

// Smaller is needed more: sinks by position, then recent tokens by their age.
int64_t kvq_window::need(uint32_t stream, uint32_t cell, const std::vector<llama_pos> & next) const {
    const auto & cells = cache.v_cells[stream];
    const llama_pos pos = cells.pos_get(cell);
    if (pos < (llama_pos) sink) {
        return pos;
    }
    int64_t least = NOT_NEEDED;
    for (uint32_t s = 0; s < next.size(); s++) {
        if (cells.seq_has(cell, s) && (int64_t) pos > (int64_t) next[s] - recent) {
            least = std::min(least, AGE + next[s] - pos);
        }
    }
    return least;
}

// Frees the rows of cells that left the window, and of the least needed where more than `most` are left.
void kvq_window::trim(uint32_t stream, const std::vector<llama_pos> & next, size_t most) {
    std::vector<std::pair<int64_t, uint32_t>> kept;
    for (uint32_t row = 0; row < n_rows; row++) {
        const int64_t n = is_used(stream, row) ? need(stream, streams[stream].cell_of[row], next) : NOT_NEEDED;
        if (n == NOT_NEEDED) {
            release(stream, row);
        } else {
            kept.emplace_back(n, row);
        }
    }
    if (kept.size() > most) {
        std::sort(kept.begin(), kept.end());
        for (size_t i = most; i < kept.size(); i++) {
            release(stream, kept[i].second);
        }
    }
}

void kvq_window::forget(uint32_t stream, const std::vector<uint32_t> & cells) {
    for (const uint32_t cell : cells) {
        if (streams[stream].row_of[cell] >= 0) {
            release(stream, streams[stream].row_of[cell]);
        }
    }
}

// ---- batches ----

uint32_t kvq_window::n_own(int64_t n_tokens) const {
    return n_tokens <= room ? 0 : GGML_PAD(n_tokens, 64);
}

void kvq_window::assign(uint32_t stream, const std::vector<uint32_t> & cells) {
    auto & map = streams[stream];
    uint32_t row = 0;
    for (const uint32_t cell : cells) {
        while (map.cell_of[row] >= 0) {
            row++;
        }
        map.cell_of[row] = cell;
        map.row_of[cell] = row;
    }
}

void kvq_window::admit(const llama_kv_cache::slot_info & sinfo, const llama_ubatch & ubatch) {
    const size_t n = sinfo.size(), capacity = n_rows - 1;
    const bool own = n_own(n) > 0;
    uint32_t n_read = 64;
    for (uint32_t s = 0; s < sinfo.n_stream(); s++) {
        const uint32_t stream = sinfo.strm[s];
        const auto & cells = cache.v_cells[stream];
        forget(stream, sinfo.idxs[s]);

        // what is recent counts from the first token of the batch, which is recent as a whole
        std::vector<llama_pos> next = next_positions(stream);
        std::vector<uint32_t> wanted;
        for (size_t i = 0; i < n; i++) {
            const size_t token = s*n + i;
            for (int32_t j = 0; j < ubatch.n_seq_id[token]; j++) {
                llama_pos & first = next[ubatch.seq_id[token][j]];
                first = std::min(first, ubatch.pos[token]);
            }
            if (!own && (recent > 0 || cells.pos_get(sinfo.idxs[s][i]) < (llama_pos) sink)) {
                wanted.push_back(sinfo.idxs[s][i]);
            }
        }
        wanted.resize(std::min(wanted.size(), capacity));   // many tokens at the position of a sink: images
        trim(stream, next, capacity - wanted.size());
        assign(stream, wanted);

        auto & map = streams[stream];
        map.read.assign(n_rows, -1);
        for (uint32_t row = 0; row < n_rows; row++) {
            if (is_used(stream, row)) {
                map.read[row] = map.cell_of[row];
                n_read = std::max<uint32_t>(n_read, GGML_PAD(row + 1, 64));
            }
        }
    }
    for (uint32_t s = 0; s < sinfo.n_stream(); s++) {
        const uint32_t stream = sinfo.strm[s];
        streams[stream].read.resize(n_read);
        if (!own) {
            continue;
        }
        // the graph reads the rows as they were and then writes those that the next batch reads
        const std::vector<llama_pos> next = next_positions(stream);
        std::vector<std::pair<int64_t, uint32_t>> wanted;
        for (const uint32_t cell : sinfo.idxs[s]) {
            if (const int64_t n = need(stream, cell, next); n != NOT_NEEDED) {
                wanted.emplace_back(n, cell);
            }
        }
        std::sort(wanted.begin(), wanted.end());
        wanted.resize(std::min(wanted.size(), capacity));
        trim(stream, next, capacity - wanted.size());
        std::vector<uint32_t> kept;
        for (const auto & [_, cell] : wanted) {
            kept.push_back(cell);
        }
        assign(stream, kept);
    }
}

uint32_t kvq_window::n_ring(const llama_kv_cache::slot_info & sinfo) const {
    return streams[sinfo.strm[0]].read.size();
}

std::vector<int32_t> kvq_window::cells_read(const llama_kv_cache::slot_info & sinfo, uint32_t s) const {
    std::vector<int32_t> cells = streams[sinfo.strm[s]].read;
    if (const uint32_t own = n_own(sinfo.size())) {
        cells.insert(cells.end(), sinfo.idxs[s].begin(), sinfo.idxs[s].end());
        cells.resize(n_ring(sinfo) + own, -1);
    }
    return cells;
}

void kvq_window::store(ggml_context * ctx, ggml_cgraph * gf, ggml_tensor * k, ggml_tensor * v, const kvq_window_input & input, int32_t il,
        const llama_kv_cache::slot_info & sinfo, kvq_sources & out) const {
    const layer_rows & rows = layers[cache.map_layer_ids.at(il)];
    const auto & h = cache.hparams;
    const int64_t n_read = input.mask->ne[0], n_stream = input.mask->ne[3], n_ring = n_read - n_own(input.mask->ne[1]);
    const auto part = [&](ggml_tensor * ring, ggml_tensor * x, int64_t d, ggml_tensor *& copy) {
        const int64_t width = ring->ne[0];
        ggml_tensor * flat = x ? ggml_view_2d(ctx, x, x->ne[0]*x->ne[1], x->ne[2], x->nb[2], 0) : nullptr;
        if (x && input.own) {
            // windows of turbo types are f16 values in another basis; no backend need know how to copy them
            const auto as = [](ggml_tensor * t, ggml_type type) {
                t->type  = type;
                t->nb[0] = ggml_type_size(type);
                return t;
            };
            const auto rows_of = [&](ggml_tensor * t, int64_t n, size_t stream, size_t offset) {
                return as(ggml_view_3d(ctx, t, width, n, n_stream, ring->nb[1], stream, offset), GGML_TYPE_F16);
            };
            const size_t offset = sinfo.s0*ring->nb[2];
            ggml_tensor * all = ggml_repeat_4d(ctx, rows_of(ring, 64, ring->nb[2], offset), width, n_read, n_stream, 1);   // of any finite values
            copy = ggml_cpy(ctx, rows_of(ring, n_ring, ring->nb[2], offset), rows_of(all, n_ring, all->nb[2], 0));
            copy = as(ggml_view_2d(ctx, copy, width, n_read*n_stream, ring->nb[1], 0), ring->type);   // each from the one before, so that its memory is freed
            copy = ggml_set_rows(ctx, copy, flat, input.own);
            ggml_build_forward_expand(gf, copy);
        }
        if (x) {
            ggml_tensor * all = ggml_reshape_2d(ctx, ring, width, ring->ne[1]*ring->ne[2]);
            ggml_build_forward_expand(gf, ggml_set_rows(ctx, all, flat, input.idxs));
        }
        ggml_tensor * from = input.own ? copy : ring;
        const size_t stream = input.own ? n_read*ring->nb[1] : ring->nb[2];
        ggml_tensor * view = ggml_view_4d(ctx, from, d, width/d, n_read, n_stream, ggml_row_size(ring->type, d), ring->nb[1], stream,
            input.own ? 0 : sinfo.s0*stream);
        return ggml_permute(ctx, view, 0, 2, 1, 3);
    };
    out.k16    = part(rows.k, k, h.n_embd_head_k(il), rows.k_copy);
    out.v16    = part(rows.v, v, h.n_embd_head_v(il), rows.v_copy);
    out.mask16 = input.mask;
}

void kvq_window::set_input(const kvq_window_input & input, ggml_tensor * mask, const llama_kv_cache::slot_info & sinfo) const {
    const size_t n = sinfo.size();
    if (input.own && input.own->buffer) {
        int64_t * index = (int64_t *) input.own->data;
        const int64_t first = n_ring(sinfo), rows = first + n_own(n);
        for (uint32_t s = 0; s < sinfo.n_stream(); s++) {
            for (size_t i = 0; i < n; i++) {
                *index++ = s*rows + first + i;
            }
        }
    }
    if (input.idxs && input.idxs->buffer) {
        int64_t * index = (int64_t *) input.idxs->data;
        for (uint32_t s = 0; s < sinfo.n_stream(); s++) {
            for (const uint32_t cell : sinfo.idxs[s]) {
                const int32_t row = streams[sinfo.strm[s]].row_of[cell];
                *index++ = (int64_t) sinfo.strm[s]*n_rows + (row >= 0 ? row : n_rows - 1);
            }
        }
    }
    if (!input.mask || !input.mask->buffer || !mask || !mask->buffer) {
        return;
    }
    GGML_ASSERT(mask->type == GGML_TYPE_F16 && ggml_backend_buffer_is_host(mask->buffer) && ggml_backend_buffer_is_host(input.mask->buffer));
    const ggml_fp16_t hidden = ggml_fp32_to_fp16(-INFINITY);
    const int64_t n_kv = mask->ne[0], n_read = input.mask->ne[0];
    for (uint32_t s = 0; s < sinfo.n_stream(); s++) {
        const std::vector<int32_t> cell_of = cells_read(sinfo, s);
        GGML_ASSERT((int64_t) cell_of.size() == n_read);
        for (size_t i = 0; i < n; i++) {
            ggml_fp16_t * main = (ggml_fp16_t *) mask->data       + (s*n + i)*n_kv;
            ggml_fp16_t * ring = (ggml_fp16_t *) input.mask->data + (s*n + i)*n_read;
            for (int64_t row = 0; row < n_read; row++) {
                ring[row] = hidden;
                if (cell_of[row] >= 0) {
                    std::swap(ring[row], main[cell_of[row]]);
                }
            }
        }
    }
}

void kvq_window::positions(const llama_kv_cache::slot_info & sinfo, uint32_t s, int32_t * out) const {
    const auto & cells = cache.v_cells[sinfo.strm[s]];
    const std::vector<int32_t> read = cells_read(sinfo, s);
    std::fill_n(out, n_ring(sinfo) + n_own_max, 0);
    std::transform(read.begin(), read.end(), out, [&](int32_t cell) { return cell >= 0 ? cells.pos_get(cell) : 0; });
}

// ---- sequences ----

void kvq_window::copy_map(uint32_t from, uint32_t to) {
    for (uint32_t row = 0; row < n_rows; row++) {
        release(to, row);
    }
    for (uint32_t row = 0; row < n_rows; row++) {
        const int32_t cell = streams[from].cell_of[row];
        if (is_used(from, row) && !cache.v_cells[to].is_empty(cell)) {
            streams[to].cell_of[row]  = cell;
            streams[to].row_of[cell] = row;
        }
    }
}

void kvq_window::copy_data(uint32_t from, uint32_t to) const {
    for (const auto & layer : layers) {
        ggml_backend_tensor_copy(layer.k_stream[from], layer.k_stream[to]);
        ggml_backend_tensor_copy(layer.v_stream[from], layer.v_stream[to]);
    }
}

ggml_tensor * kvq_window::keys(ggml_context * ctx, size_t layer) const {
    ggml_tensor * k = layers[layer].k;
    const int64_t d = cache.hparams.n_embd_head_k(cache.layers[layer].il);
    return ggml_view_3d(ctx, k, d, k->ne[0]/d, k->ne[1]*k->ne[2], ggml_row_size(k->type, d), k->nb[1], 0);
}

void kvq_window::set_input_shift(ggml_tensor * shift) const {
    int32_t * data = (int32_t *) shift->data;
    for (uint32_t stream = 0; stream < cache.n_stream; stream++) {
        for (uint32_t row = 0; row < n_rows; row++) {
            *data++ = is_used(stream, row) ? cache.v_cells[stream].get_shift(streams[stream].cell_of[row]) : 0;
        }
    }
}

// ---- saved states ----

// [n_rows of u32, n_layer of u32, rows: which cell of the state], then for each layer: size of a row of K and of V, and the rows
void kvq_window::write(llama_io_write_i & io, uint32_t stream, const std::vector<uint32_t> & cells) const {
    std::vector<uint32_t> order(streams[stream].row_of.size(), UINT32_MAX);
    for (uint32_t i = 0; i < cells.size(); i++) {
        order[cells[i]] = i;
    }
    const std::vector<llama_pos> next = next_positions(stream);
    std::vector<uint32_t> rows, index;
    for (uint32_t row = 0; row < n_rows; row++) {
        const int32_t cell = streams[stream].cell_of[row];
        if (is_used(stream, row) && order[cell] != UINT32_MAX && need(stream, cell, next) != NOT_NEEDED) {
            rows.push_back(row);
            index.push_back(order[cell]);
        }
    }
    const uint32_t n = rows.size(), n_layer = layers.size();
    io.write(&n, sizeof(n));
    io.write(&n_layer, sizeof(n_layer));
    if (n > 0) {                                 // no rows have no address
        io.write(index.data(), n*sizeof(uint32_t));
    }
    for (const auto & layer : layers) {
        const uint64_t sizes[2] = { layer.k->nb[1], layer.v->nb[1] };
        io.write(sizes, sizeof(sizes));
        for (ggml_tensor * t : { layer.k_stream[stream], layer.v_stream[stream] }) {
            for (size_t i = 0, j; i < rows.size(); i = j) {
                for (j = i + 1; j < rows.size() && rows[j] == rows[j - 1] + 1; j++) {}
                io.write_tensor(t, rows[i]*t->nb[1], (j - i)*t->nb[1]);
            }
        }
    }
}

static uint32_t read_count(llama_io_read_i & io, uint32_t & n_layer) {
    uint32_t n;
    io.read(&n, sizeof(n));
    io.read(&n_layer, sizeof(n_layer));
    return n;
}

bool kvq_window::read(llama_io_read_i & io, uint32_t stream, const std::vector<uint32_t> & cells) {
    uint32_t n_layer;
    const uint32_t n = read_count(io, n_layer);
    if (n > cells.size() || n_layer != layers.size()) {
        LLAMA_LOG_ERROR("%s: damaged f16 window (%u rows, %u layers)\n", __func__, n, n_layer);
        return false;
    }
    std::vector<uint32_t> index(n), rows(n, n_rows - 1);
    if (n > 0) {
        io.read(index.data(), n*sizeof(uint32_t));
    }

    const std::vector<llama_pos> next = next_positions(stream);
    trim(stream, next, n_rows - 1);
    auto & map = streams[stream];
    uint32_t row = 0, n_left = 0;
    for (uint32_t i = 0; i < n; i++) {
        if (index[i] >= cells.size() || map.row_of[cells[index[i]]] >= 0) {
            LLAMA_LOG_ERROR("%s: damaged f16 window (row %u)\n", __func__, i);
            return false;
        }
        const uint32_t cell = cells[index[i]];
        while (row < n_rows - 1 && map.cell_of[row] >= 0) {
            row++;
        }
        if (row == n_rows - 1 || need(stream, cell, next) == NOT_NEEDED) {
            n_left++;
            continue;
        }
        rows[i] = row;
        map.cell_of[row]  = cell;
        map.row_of[cell] = row;
    }
    if (n_left) {
        LLAMA_LOG_WARN("kvq: the saved state has %u tokens in its f16 window, %u of which are outside this window of %u sinks and %u recent ones\n",
            n, n_left, sink, recent);
    }
    for (const auto & layer : layers) {
        uint64_t sizes[2];
        io.read(sizes, sizeof(sizes));
        if (sizes[0] != layer.k->nb[1] || sizes[1] != layer.v->nb[1]) {
            LLAMA_LOG_ERROR("%s: mismatched row sizes of the f16 window\n", __func__);
            return false;
        }
        for (ggml_tensor * t : { layer.k_stream[stream], layer.v_stream[stream] }) {
            for (size_t i = 0, j; i < n; i = j) {
                for (j = i + 1; j < n && rows[j] == rows[j - 1] + 1; j++) {}
                io.read_tensor(t, rows[i]*t->nb[1], (j - i)*t->nb[1]);
            }
        }
    }
    return true;
}

void kvq_window::skip(llama_io_read_i & io) {
    std::vector<uint8_t> scratch(1 << 16);
    const auto pass_over = [&](uint64_t size) {   // a damaged size ends with the data, not with the memory
        for (; size > 0; size -= std::min<uint64_t>(size, scratch.size())) {
            io.read(scratch.data(), std::min<uint64_t>(size, scratch.size()));
        }
    };
    uint32_t n_layer;
    const uint32_t n = read_count(io, n_layer);
    pass_over(n*sizeof(uint32_t));
    for (uint32_t il = 0; il < n_layer; il++) {
        uint64_t sizes[2];
        io.read(sizes, sizeof(sizes));
        pass_over(sizes[0]*n);
        pass_over(sizes[1]*n);
    }
    if (n) {
        LLAMA_LOG_WARN("kvq: the saved state has %u tokens in its f16 window, and this cache has no window\n", n);
    }
}

// ---- the cache's context ----

kvq_window_input llama_kv_cache_context::kvq_build_window(ggml_context * ctx, const llama_ubatch & ubatch, const llama_cparams & cparams) const {
    kvq_window_input input;
    if (kv->window && cparams.flash_attn) {
        const uint32_t n_stream = cparams.kv_unified ? 1 : ubatch.n_seqs_unq, n_tokens = ubatch.n_tokens/n_stream, n_own = kv->window->n_own(n_tokens);
        input.idxs = ggml_new_tensor_1d(ctx, GGML_TYPE_I64, ubatch.n_tokens);
        input.mask = ggml_new_tensor_4d(ctx, GGML_TYPE_F16, n_ring + n_own, n_tokens, 1, n_stream);
        if (n_own) {
            input.own = ggml_new_tensor_1d(ctx, GGML_TYPE_I64, ubatch.n_tokens);
            ggml_set_input(input.own);
            ggml_set_name(input.own, "kvq_window_own");
        }
        ggml_set_input(input.idxs);
        ggml_set_input(input.mask);
        ggml_set_name(input.idxs, "kvq_window_idxs");
        ggml_set_name(input.mask, "kvq_window_mask");
    }
    return input;
}

void llama_kv_cache_context::kvq_set_window(const kvq_window_input & input, ggml_tensor * mask) const {
    if (kv->window) {
        kv->window->set_input(input, mask, sinfos[i_cur]);
    }
}

bool llama_kv_cache_context::kvq_can_reuse(const kvq_window_input & input) const {
    return !input.mask || input.mask->ne[0] == n_ring + kv->window->n_own(input.mask->ne[1]);
}

void llama_kv_cache_context::kvq_store(ggml_context * ctx, ggml_cgraph * gf, ggml_tensor * k, ggml_tensor * v, const kvq_window_input & input,
        int32_t il, kvq_sources & out) const {
    if (input.mask) {
        kv->window->store(ctx, gf, k, v, input, il, sinfos[i_cur], out);
    }
}
