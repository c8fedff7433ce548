// What the Metal kernels and their host code share: arguments, how vectors are stored, indices of function constants, and the
// layout of threadgroup memory. Plain C, because it is compiled as Metal too.
#pragma once

// how K or V is stored: bits per code of the turbo types, or one of these
#define KVQ_STORE_OSCAR2    5
#define KVQ_STORE_Q8_0      8
#define KVQ_STORE_F16       16
#define KVQ_STORE_TURBO_F16 17      // rotated f16, for rows alone: attention reads it as f16 in the rotated domain

// function constants
#define KVQ_FC_K_STORE  0
#define KVQ_FC_V_STORE  1
#define KVQ_FC_ROWS     2           // query rows of a threadgroup, decode
#define KVQ_FC_MASK     3
#define KVQ_FC_SOFTCAP  4
#define KVQ_FC_SLOPE    5           // ALiBi
#define KVQ_FC_WINDOW   6
#define KVQ_FC_SINKS    7
#define KVQ_FC_ROT      8           // cosines and sines of the pairs that carry a key bias, a multiple of 8; 0 without one
#define KVQ_FC_INDEX    9           // rows: 0 plain copy, 32 or 64 bits of a row index
#define KVQ_FC_HALF     10          // rows: the float side is f16

#define KVQ_TILE        32          // tokens of a tile
#define KVQ_SIMDGROUPS  4           // of a threadgroup

// One side of the attention: a cache, or the f16 window beside it.
struct kvq_metal_part {
    int32_t  n;                     // tokens
    int32_t  nem3;                  // sequences of the mask
    int32_t  first;                 // of its rows among the positions of a key bias
    uint64_t nbk1, nbk2, nbk3;      // bytes from one token, KV head, sequence to the next
    uint64_t nbv1, nbv2, nbv3;
    uint64_t nbm1, nbm3;            // mask: tokens, sequences
};

// A key bias that the keys lack; see kvq_key_bias in kvq-llama.h.
struct kvq_metal_bias {
    int32_t  steps;                 // of 256 positions in the table
    int32_t  seqs;                  // sequences of a row of positions
    int32_t  interleaved;
    int32_t  all;                   // pairs of the table
    int32_t  n;                     // pairs that carry it
    unsigned char pair[128];        // which, then any up to FC_rot/2
    uint64_t nbq1, nbq2, nbq3, nbb1, nbt1, nbp1;
};

// A query row is (token, head in group): row = token*gqa + head.
struct kvq_metal_args {
    int32_t  n_tok, n_head, n_head_kv, gqa, n_seq;
    int32_t  row_groups;            // threadgroups that share a KV head
    int32_t  n_split;               // parts along the context
    int32_t  n_head_log2;
    float    scale, softcap, m0, m1;
    uint64_t nbq1, nbq2, nbq3;
    struct kvq_metal_part part[2];
    struct kvq_metal_bias bias;
};

// Both sides of a copy, gather or scatter, extents in blocks along dimension 0. The walked side has the index's rows.
struct kvq_metal_rows_args {
    int32_t  n_blocks, blocks_row, ne1, ne2;        // of the walked side
    int32_t  other_row, other_ne1, other_ne2;       // of the other side, plain copies
    int32_t  index_ne1, index_ne2;
    uint64_t nb_src[4], nb_dst[4];                  // 0: one block
    uint64_t nb_index[3];
    int32_t  bytes;                                 // of a block, for copies between tensors of one type
};

// floats of threadgroup memory of the decode kernel: levels, queries, key bias, and for each simdgroup weights, scales and the
// bias turned to a tile
#define KVQ_TABLES                          96
#define KVQ_DECODE_OWN(ROWS, NBV)           ((ROWS)*KVQ_TILE + (NBV)*KVQ_TILE > 128 ? (ROWS)*KVQ_TILE + (NBV)*KVQ_TILE : 128)
#define KVQ_DECODE_SCRATCH(ROWS, NBV, ROT)  (KVQ_DECODE_OWN(ROWS, NBV) + (ROWS)*(ROT))
#define KVQ_DECODE_LOOP(ROWS, DK, NBV, ROT) (KVQ_TABLES + (ROWS)*((DK) + (ROT)) + KVQ_SIMDGROUPS*KVQ_DECODE_SCRATCH(ROWS, NBV, ROT))
#define KVQ_DECODE_MERGE(ROWS, DV)          (KVQ_SIMDGROUPS*(ROWS)*((DV) + 2))

// bytes of threadgroup memory of the prefill kernel: queries, tile and key bias in f16, logits, levels, diagonal matrices, flags
#define KVQ_PREFILL_BYTES(ROWS, DK, CHUNK, ROT) (2*((ROWS)*((DK) + (ROT)) + KVQ_TILE*(CHUNK)) + \
    4*((ROWS)*KVQ_TILE + KVQ_TABLES + 8*(ROWS) + 4*128) + 4*2*KVQ_SIMDGROUPS)
