// The f16 window of a cache. Every token is quantised; while it is a sink (position below `sink`) or recent (within the last
// `recent` positions of its sequence) it also has a row in a ring beside the cache, which holds the same vectors in f16. Masks
// decide which copy attention reads, so entering and leaving the window moves no data.
//
// All tokens of a batch count as recent. A batch that finds no room in the ring is read from an f16 copy which the graph makes for one
// layer at a time, the ring's rows and its own; the ring gets those of its tokens that the next batch reads.
//
// A row belongs to a cell. The map is kept lazily: a row whose cell has become empty is free. Whoever gives a cell to another
// token (a batch, a restored state, a copied stream) takes its row away first.
#pragma once

#include "kvq-llama.h"

#include "llama-kv-cache.h"

#include <cstdint>
#include <memory>
#include <vector>

class kvq_window {
public:
    // Null when the cache has no window, with a line where one was asked for. Throws std::runtime_error, in one line with the
    // remedy, when one was asked for that the device cannot read.
    static std::shared_ptr<kvq_window> make(llama_kv_cache & cache);

    const uint32_t sink, recent;
    const uint32_t n_rows;      // of a stream; the last one takes what nobody reads
    const uint32_t n_own_max;   // n_own of the largest batch

    // bytes of a layer, all streams
    uint64_t bytes(size_t layer) const;

    // ---- batches ----

    // Gives rows to the tokens of a batch that was just placed in its cells, and takes them from those that left the window.
    void admit(const llama_kv_cache::slot_info & sinfo, const llama_ubatch & ubatch);

    // rows of the ring that the graph of the batch admitted last must read, padded; n_own: of its tokens beside the ring, 0 when they have room in it
    uint32_t n_ring(const llama_kv_cache::slot_info & sinfo) const;
    uint32_t n_own(int64_t n_tokens) const;

    // views of the ring and its writes for one layer; k, v null: the layer reads what another one wrote
    void store(ggml_context * ctx, ggml_cgraph * gf, ggml_tensor * k, ggml_tensor * v, const kvq_window_input & input, int32_t il,
        const llama_kv_cache::slot_info & sinfo, kvq_sources & out) const;

    // Fills the inputs and hides from the cache's mask the cells that have a row.
    void set_input(const kvq_window_input & input, ggml_tensor * mask, const llama_kv_cache::slot_info & sinfo) const;

    // position of every row that the batch's s-th stream reads, n_ring + n_own_max values; 0 for free ones
    void positions(const llama_kv_cache::slot_info & sinfo, uint32_t s, int32_t * out) const;

    // ---- sequences ----

    // The cells of stream `from` were copied to stream `to`; copy_data: the tensors.
    void copy_map (uint32_t from, uint32_t to);
    void copy_data(uint32_t from, uint32_t to) const;

    // keys of a layer as [d, heads, rows of all streams], and by how far the K-shift turns each row
    ggml_tensor * keys(ggml_context * ctx, size_t layer) const;
    void set_input_shift(ggml_tensor * shift) const;

    // ---- saved states ----

    // The rows of cells of a stream, given in the order of the state. read: of the state's rows those that this window holds; false,
    // with a line, for a damaged state. forget: the cells belong to other tokens now.
    void write (llama_io_write_i & io, uint32_t stream, const std::vector<uint32_t> & cells) const;
    bool read  (llama_io_read_i  & io, uint32_t stream, const std::vector<uint32_t> & cells);
    void forget(uint32_t stream, const std::vector<uint32_t> & cells);

    // reads the rows of a state for a cache without a window
    static void skip(llama_io_read_i & io);

private:
    struct layer_rows {
        ggml_tensor * k, * v;                             // [n_embd_gqa, n_rows, n_stream]
        std::vector<ggml_tensor *> k_stream, v_stream;    // [n_embd_gqa, n_rows]
        mutable ggml_tensor * k_copy = nullptr, * v_copy = nullptr;   // of the graph being built, for layers that read this one's
    };
    struct stream_map {
        std::vector<int32_t> cell_of, row_of;   // -1: none
        std::vector<int32_t> read;              // cell of each row as the graph reads them
    };

    llama_kv_cache & cache;
    std::vector<layer_rows> layers;             // as the cache's own
    std::vector<stream_map> streams;
    const uint32_t room;                        // tokens of a batch that find rows in the ring

    kvq_window(llama_kv_cache & cache, uint32_t sink, uint32_t recent, uint32_t n_rows, uint32_t room, uint32_t n_own_max);

    void allocate();
    bool is_used(uint32_t stream, uint32_t row) const;
    void release(uint32_t stream, uint32_t row);
    void assign(uint32_t stream, const std::vector<uint32_t> & cells);
    std::vector<int32_t> cells_read(const llama_kv_cache::slot_info & sinfo, uint32_t s) const;
    int64_t need(uint32_t stream, uint32_t cell, const std::vector<llama_pos> & next) const;
    std::vector<llama_pos> next_positions(uint32_t stream) const;
    void trim(uint32_t stream, const std::vector<llama_pos> & next, size_t most);
};
