// How the blocks of the decode kernel divide the tiles of a context: plain C++, shared by kernel, host code and test.
#pragma once

#ifdef __CUDACC__
#define KVQ_HOST_DEVICE __host__ __device__
#else
#define KVQ_HOST_DEVICE
#endif

static constexpr int KVQ_WINDOW_TILE = 16;      // rows of a window that a warp takes at once

// First cache tile of block `split` of n_split; it goes on to the next block's. Runs differ by one tile and the short ones come
// first, because block s also has tiles s, s + n_split, ... of an f16 window.
KVQ_HOST_DEVICE static inline int kvq_first_tile(const int split, const int n_split, const int n_tiles) {
    const int most = (n_tiles + n_split - 1)/n_split, n_short = most*n_split - n_tiles;
    return split*most - (split < n_short ? split : n_short);
}

// Blocks for these tiles, at most `want`: runs are uneven only where they are long, and blocks that would be left over take
// window tiles alone.
static inline int kvq_decode_splits(const int n_tiles, const int n_window, const int want) {
    if (n_tiles >= 4*want) {
        return want < 1 ? 1 : want;
    }
    const int each = (n_tiles + want - 1)/want, splits = (n_tiles + each - 1)/each + n_window;
    return splits < want ? splits : want;
}
